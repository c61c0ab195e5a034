"""Choose the power cuts of a recording: at which prefix, and which volatile operations are lost.

For every prefix and both profiles there are: nothing lost; everything volatile lost; each volatile operation alone
lost; each alone kept; writes torn; and random subsets. That is far more than a run can check, so a run takes a seeded
sample: first the first two kinds of every prefix, up to a part of the run, then random ones, with recent operations
more often. Two cuts that leave the same files after the same acknowledgements count as one.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from memwal.flush.base.manifest import manifest_version
from memwal.flush.base.torn import TORN
from memwal.wal.layout import SYNCED_KEY
from tests.power_cuts.model import BLOCK, NEVER, Crash, Recording, Tear, Tree

PROFILES = ("posix", "ext4")
PLAIN = 0.4
"""Share of a run for the cuts that lose nothing or everything."""
_OF_BASE = re.compile(r"^(?!.*_mem_wal/)(?P<table>.*)/(data|_indices)/")
"""Files of a base table whose zeros an opening does not detect."""
_RECENT = 24
"""Number of recent volatile operations: half of the choices of a single one are among them."""


@dataclass(frozen=True)
class Cut:
    """One power cut. With the recording it determines the files."""

    line: int
    profile: str
    loss: str
    """nothing, all, one (lost), other (all lost except one), torn, some."""
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.line}:{self.profile}:{self.loss}:{self.seed}"

    @staticmethod
    def parse(text: str) -> Cut:
        """Parse the text of `str`."""
        line, profile, loss, seed = text.split(":")
        return Cut(int(line), profile, loss, int(seed))


@dataclass(frozen=True)
class State:
    """The files after a cut, and the marks of the workload before it."""

    cut: Cut
    tree: Tree = field(repr=False)
    marks: list[Mapping[str, Any]] = field(repr=False)
    lost: tuple[str, ...] = field(repr=False)
    """The volatile operations that were lost or torn, for a report."""
    zeroed: tuple[str, ...] = field(repr=False)
    """Unsynced data and index files of a base table with zeros instead of lost bytes before present ones."""


def sample(recording: Recording, seed: int, most: int) -> Iterator[State]:
    """Yield up to `most` different states of a recording."""
    seen: set[bytes] = set()
    tries = 0
    for cut in _candidates(recording, random.Random(seed), most):
        state = state_of(recording, cut)
        if (digest := digest_of(state)) in seen:
            tries += 1
            if tries > 20 * most + 1000:
                return
            continue
        seen.add(digest)
        yield state
        if len(seen) == most:
            return


def _candidates(recording: Recording, rng: random.Random, most: int) -> Iterator[Cut]:
    lines = list(recording.cuts)
    plain = [Cut(line, profile, loss) for line in lines for profile in PROFILES for loss in ("all", "nothing")]
    rng.shuffle(plain)
    yield from plain[: int(PLAIN * most) + 1]
    while True:
        loss = rng.choice(("one", "other", "torn", "some"))
        profile = "ext4" if rng.random() < 0.25 else "posix"
        yield Cut(rng.choice(lines), profile, loss, rng.getrandbits(32))


def state_of(recording: Recording, cut: Cut) -> State:
    """Return the state after a cut."""
    durable, volatile = recording.at(cut.line, cut.profile)
    choose = _posix if cut.profile == "posix" else _ext4
    kept, tears = choose(recording, cut, volatile, random.Random(cut.seed))
    crash = Crash(recording, kept | set(durable), tears, cut.profile)
    lost = tuple(
        f"{'torn' if place in tears else 'lost'}: {described(recording, place)}"
        for place in volatile
        if place not in kept or place in tears
    )
    return State(cut, crash.tree, recording.marks(cut.line), lost, _zeroed(recording, crash, kept, volatile, tears))


def _zeroed(
    recording: Recording, crash: Crash, kept: set[int], volatile: list[int], tears: Mapping[int, Tear]
) -> tuple[str, ...]:
    found = set()
    for place in volatile:
        operation, tear = recording.operations[place], tears.get(place)
        landed = len(operation.data) - 1 if tear is not None and tear.cuts_size else 0
        lost = place not in kept or tear is not None
        path = recording.name_of(operation.inode)
        goes_on = len(crash.tree.get(path) or b"") > operation.offset + landed
        if lost and goes_on and operation.kind == "data" and _OF_BASE.search(path):
            found.add(path)
    return tuple(sorted(found))


def gone_back(state: State) -> State:
    """Return the state after the unsynced versions of tables with zeros were set aside by hand."""
    tree = dict(state.tree)
    for table in {match["table"] for match in map(_OF_BASE.search, state.zeroed) if match is not None}:
        note = tree.get(f"{table}/{SYNCED_KEY}") or b'{"version": 0}'
        versions = {path: manifest_version(path[len(table) + 1 :]) for path in tree if path.startswith(f"{table}/")}
        for path, version in versions.items():
            if (version or 0) > json.loads(note)["version"]:
                tree[f"{path}{TORN}"] = tree.pop(path)
        tree.pop(f"{table}/_versions/latest_version_hint.json", None)
    return replace(state, tree=tree)


def _one(volatile: list[int], rng: random.Random) -> int:
    return rng.choice(volatile[-_RECENT:] if rng.random() < 0.5 else volatile)


def _posix(recording: Recording, cut: Cut, volatile: list[int], rng: random.Random) -> tuple[set[int], dict[int, Tear]]:
    every = set(volatile)
    if cut.loss == "nothing" or not volatile:
        return every, {}
    if cut.loss == "all":
        return set(), {}
    if cut.loss == "one":
        return every - {_one(volatile, rng)}, {}
    if cut.loss == "other":
        return {_one(volatile, rng)}, {}
    if cut.loss == "some":
        share = rng.choice((0.1, 0.5, 0.9))
        every = {place for place in volatile if rng.random() < share}
    writes = [place for place in sorted(every) if recording.operations[place].kind == "data"]
    torn = {_one(writes, rng)} if writes and cut.loss == "torn" else {w for w in writes if rng.random() < 0.2}
    return every, {place: _tear(len(recording.operations[place].data), cut.profile, rng) for place in torn}


def _tear(size: int, profile: str, rng: random.Random) -> Tear:
    blocks = -(-size // BLOCK[profile])
    first = frozenset(range(rng.randrange(blocks)))
    if profile == "ext4" or rng.random() < 0.4:
        return Tear(first, cuts_size=True)
    some = frozenset(number for number in range(blocks) if rng.random() < 0.5)
    return Tear(rng.choice((first, frozenset(), some)), cuts_size=False)


def _ext4(recording: Recording, cut: Cut, volatile: list[int], rng: random.Random) -> tuple[set[int], dict[int, Tear]]:
    """Choose the loss: names from the end of the journal, and the last blocks of each file."""
    if cut.loss == "nothing" or not volatile:
        return set(volatile), {}
    names = [place for place in volatile if recording.operations[place].kind == "names"]
    data = [place for place in volatile if recording.operations[place].kind != "names"]
    if cut.loss == "all":
        return set(), {}
    if cut.loss in ("one", "other"):  # every name is on the disk, and no data, or all data but that of one file
        file = recording.operations[_one(data, rng)].inode if data else -1
        mine = {place for place in data if recording.operations[place].inode == file}
        return set(names) | (set(data) - mine if cut.loss == "one" else mine), {}
    kept = set(names if cut.loss == "torn" else names[: rng.randint(0, len(names))])
    tears: dict[int, Tear] = {}
    for inode in sorted({recording.operations[place].inode for place in data}):
        mine_in_order = [place for place in data if recording.operations[place].inode == inode]
        until = rng.choice((0, rng.randint(0, len(mine_in_order)), len(mine_in_order)))
        kept.update(mine_in_order[:until])
        if until < len(mine_in_order) and recording.operations[mine_in_order[until]].kind == "data":
            place = mine_in_order[until]
            kept.add(place)
            tears[place] = _tear(len(recording.operations[place].data), "ext4", rng)
    return kept, tears


def digest_of(state: State) -> bytes:
    """Return a hash of the files and the number of marks."""
    found = hashlib.blake2b(str(len(state.marks)).encode(), digest_size=16)
    for path, data in state.tree.items():
        found.update(f"{path}\0{-1 if data is None else len(data)}\0".encode())
        found.update(data or b"")
    return found.digest()


def described(recording: Recording, place: int) -> str:
    """Describe an operation in words."""
    operation = recording.operations[place]
    names = recording.name_of
    what = {
        "data": lambda: f"write of {len(operation.data)} bytes at {operation.offset} of {names(operation.inode)}",
        "size": lambda: f"size {operation.size} of {names(operation.inode)}",
        "names": lambda: "; ".join(
            f"{'no' if change.inode is None else 'the'} name {names(change.directory)}/{change.name}"
            for change in operation.changes
        ),
    }[operation.kind]()
    return f"line {operation.entry}: {what}"


def volatile_for_ever(recording: Recording, profile: str) -> list[str]:
    """Return the operations that no sync of the run covers."""
    when = recording.durable_at[profile]
    return [
        described(recording, place)
        for place, operation in enumerate(recording.operations)
        if operation.is_change and when[place] == NEVER
    ]
