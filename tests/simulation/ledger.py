"""Judge the reads of a table's clients by the moments at which every write and read began and ended.

A moment is a number that rises with every use. Of two writes of a key, one is certainly older if it was settled before
the other began: acknowledged, or refused. A write without an answer is never settled, except by a newer number under
the name of its token. A read is wrong if it shows a write that

- was refused;
- is certainly older than another one that was known to be durable before the read began, by its acknowledgement or
  because a reader had seen it;
- was replaced: an earlier read, which began after this write was known, did not show it any more.

A missing row is a delete that is shown. If only one delete can explain it, this delete is known from then on.

Each value is written once, so for a single key this is linearizability, as far as unanswered deletes can be
distinguished. Owners and readers of storage are judged by separate orders: a row may be seen on storage before an owner
shows it (`engine/read/README.md`), and what an owner shows is on storage. Writes without durability may be seen at
`latest` and then lost, so they prove nothing there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tests.simulation.oracle import Wrong

_NEVER = 1 << 62
Layer = str
OWNERS, STORED = "owners", "stored"
"""The sources of rows: owners, or storage."""


def _of_layers() -> dict[Layer, dict[int, int]]:
    return {OWNERS: {}, STORED: {}}


@dataclass(eq=False)
class Op:
    """One put or delete of a client. Its number is the value of its rows."""

    number: int
    client: str
    rows: Mapping[int, bool]
    """Whether the write deletes each key."""
    token: tuple[str, int] | None
    durable: bool
    began: int
    settled: int | None = None
    """The first moment when it cannot take effect any more, if it has not."""
    known: dict[Layer, dict[int, int]] = field(default_factory=_of_layers)
    """For each key, the first moment when it was known to be durable."""
    final: dict[Layer, dict[int, int]] = field(default_factory=_of_layers)
    """For each key, the first moment when it had taken effect, or could not any more."""
    replaced: dict[Layer, dict[int, int]] = field(default_factory=_of_layers)
    """For each key, the first moment when no read may show it any more."""
    failed: bool = False

    def __str__(self) -> str:
        what = ",".join(f"{key}{'-' if deletes else ''}" for key, deletes in self.rows.items())
        return f"#{self.number}({what}){'' if self.token is None else ' ' + '/'.join(map(str, self.token))}"


@dataclass(eq=False)
class Ledger:
    """The writes of all clients. One thread."""

    all_durable = False
    """Whether all writes must be durable."""
    region_of: Mapping[int, int]
    """The region of each key of clients; a write is visible in a region as a whole. Empty if regions change."""
    ops: list[Op] = field(default_factory=list)
    moments: int = 0
    reads: int = 0
    _of_key: dict[int, list[Op]] = field(default_factory=dict)

    def moment(self) -> int:
        """Return a new moment."""
        self.moments += 1
        return self.moments

    def begin(self, client: str, rows: Mapping[int, bool], token: tuple[str, int] | None, *, durable: bool) -> Op:
        """Record that a client sends a write."""
        op = Op(len(self.ops) + 1, client, rows, token, durable, self.moment())
        self.ops.append(op)
        for key in rows:
            self._of_key.setdefault(key, []).append(op)
        return op

    def acked(self, op: Op) -> None:
        """Record that the client has its receipt."""
        op.settled = self.moment()
        if op.durable:
            self._is_known(op, op.rows, (OWNERS, STORED))

    def refused(self, op: Op) -> None:
        """Record the answer that nothing was written. Raises: Wrong if a reader saw the write."""
        op.settled, op.failed = self.moment(), True
        if op.known[STORED]:
            raise Wrong(f"{op} was refused, but a reader saw it")

    def read(
        self,
        who: str,
        began: int,
        rows: Iterable[tuple[int, int]],
        keys: Iterable[int],
        *,
        level: str,
        stored: bool = False,
    ) -> None:
        """Check a read of `keys` that began at `began` and shows `rows`. `stored`: from storage. Raises: Wrong."""
        self.reads += 1
        shown: dict[int, Op] = {}
        for key, value in rows:
            if key in shown:
                raise Wrong(f"{who}: key {key} came twice")
            shown[key] = self._shown(who, key, value)
        asked, layer = set(keys), STORED if stored else OWNERS
        if level not in ("flushed", "committed"):  # these levels promise no moment
            for key in asked:
                self._check(who, key, shown.get(key), began, layer)
        for op in dict.fromkeys(shown.values()):
            self._check_whole(who, op, shown, asked)
        layers = (STORED,) if stored else (OWNERS, STORED)
        for key, op in shown.items():
            if op.durable or level != "latest":
                self._is_known(op, self._beside(op, key), layers)
        if level not in ("flushed", "committed"):
            for key in asked:
                self._learn(key, shown.get(key), began, layers, latest=level == "latest")

    def _beside(self, op: Op, key: int) -> list[int]:
        """Return the keys of a write in the same region as `key`."""
        region = self.region_of.get(key, key)
        return [each for each in op.rows if self.region_of.get(each, each) == region]

    def _is_known(self, op: Op, keys: Iterable[int], layers: Iterable[Layer]) -> None:
        now = self.moment()
        for key in keys:
            for layer in layers:
                if key in op.known[layer]:
                    continue
                op.known[layer][key] = now
                for each in self._of_key[key]:
                    if each is op or _named_before(each, op):
                        each.final[layer].setdefault(key, now)

    def _shown(self, who: str, key: int, value: int) -> Op:
        if not 1 <= value <= len(self.ops):
            raise Wrong(f"{who}: key {key} has the value {value}, which nobody wrote")
        op = self.ops[value - 1]
        if op.rows.get(key) is not False:
            raise Wrong(f"{who}: key {key} shows {op}, which did not put it")
        if op.failed:
            raise Wrong(f"{who}: key {key} shows {op}, which was refused")
        return op

    def _check(self, who: str, key: int, shown: Op | None, began: int, layer: Layer) -> None:
        due = self._due(key, began, layer)
        if shown is not None:
            if (newer := _newer(shown, due)) is not None:
                raise Wrong(f"{who}: key {key} shows {shown}, though {newer} was known before the read began")
            if shown.replaced[layer].get(key, began) < began:
                raise Wrong(f"{who}: key {key} shows {shown}, which a reader before it did not find any more")
        elif due and not self._deletes(key, due, began, layer):
            raise Wrong(f"{who}: key {key} is missing, though {due[-1]} was known before the read began")

    def _due(self, key: int, began: int, layer: Layer) -> list[Op]:
        """Return the writes of a key that were known at a moment."""
        return [op for op in self._of_key.get(key, ()) if op.known[layer].get(key, began) < began]

    def _deletes(self, key: int, due: Sequence[Op], began: int, layer: Layer) -> list[Op]:
        """Return the deletes that a read may show."""
        return [
            op
            for op in self._of_key[key]
            if op.rows[key]
            and not op.failed
            and op.replaced[layer].get(key, began) >= began
            and _newer(op, due) is None
        ]

    def _learn(self, key: int, shown: Op | None, began: int, layers: Iterable[Layer], *, latest: bool) -> None:
        """Record which writes a read proves to be replaced."""
        ops = self._of_key.get(key, ())
        if latest:
            shows_what_may_be_lost = (
                not shown.durable if shown else any(op.rows[key] and not op.durable and not op.failed for op in ops)
            )
            if shows_what_may_be_lost:
                return
        # Storage may have a row that an owner does not show yet: reads of owners prove what owners knew, for storage
        # too.
        now, by = self.moment(), OWNERS if OWNERS in layers else STORED
        due = self._due(key, began, by) if shown is None else ()
        possible = self._deletes(key, due, began, by) if any(not op.rows[key] for op in due) else ()
        for layer in layers:
            if len(possible) == 1:
                self._is_known(possible[0], self._beside(possible[0], key), (layer,))
            for op in ops:
                is_another = not op.rows[key] if shown is None else op is not shown
                if is_another and op.final[by].get(key, began) < began:
                    op.replaced[layer].setdefault(key, now)

    def _check_whole(self, who: str, op: Op, shown: Mapping[int, Op], asked: Collection[int]) -> None:
        visible = {self.region_of.get(key) for key in op.rows if shown.get(key) is op}
        for key, deletes in op.rows.items():
            if key not in asked or key not in self.region_of or self.region_of[key] not in visible:
                continue
            other = shown.get(key)
            if other is not None and other is not op and _before(other, op):
                raise Wrong(f"{who}: {op} is visible in part: key {key} shows {other}")
            if (
                other is None
                and not deletes
                and not any(each.rows[key] and not each.failed and not _before(each, op) for each in self._of_key[key])
            ):
                raise Wrong(f"{who}: {op} is visible in part: key {key} is missing")


def _newer(op: Op, due: Iterable[Op]) -> Op | None:
    return next((other for other in due if other is not op and _before(op, other)), None)


def _before(op: Op, other: Op) -> bool:
    """Return whether `op` is certainly older."""
    return (op.settled is not None and op.settled < other.began) or _named_before(op, other)


def _named_before(op: Op, other: Op) -> bool:
    """Return whether `op` has an older number under the name of the same token."""
    if op.token is None or other.token is None:
        return False
    return op.token[0] == other.token[0] and op.token[1] < other.token[1]
