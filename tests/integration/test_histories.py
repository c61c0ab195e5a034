"""The recorder and the judge of histories: what Porcupine accepts as linearizable, and what it rejects."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from memwal.ingest.errors import Unavailable
from tests.conftest import ROOT, extent
from tests.histories import simulated
from tests.histories.judge import Judgement, NotLinearizable, expect_linearizable, judge
from tests.histories.record import Operation, Recorder
from tests.messages import raises
from tests.simulation.planted import OF_LEASES
from tests.simulation_fixtures import expect_found

KEY, OTHER = 1, 2


class History:
    """A history whose operations are given with their times."""

    def __init__(self, directory: Path) -> None:
        self.path, self._now = directory / "history.jsonl", 0
        self._recorder = Recorder.to_file(self.path, lambda: self._now)
        self._clients, self._ends = itertools.count(), list[tuple[int, Operation, Mapping[str, Any]]]()

    def add(self, at: tuple[int, int | None], op: str, told: Any = None, **given: Any) -> None:
        """Add an operation from `at[0]` to `at[1]`; None: it never returned. `told`: the rows that a read found,
        whether a condition held, or the error.
        """
        self._now = at[0]
        begun = self._recorder.invoke(f"c{next(self._clients)}", op, 0, **given)
        if at[1] is not None:
            self._now = at[1]
            if isinstance(told, Exception):
                begun.failed(told)
            else:
                begun.ok(told) if op == "read" else begun.ok(applied=told)

    def put(self, at: tuple[int, int | None], *values: int) -> None:
        """Put values to KEY, or to KEY and OTHER."""
        self.add(at, "put", rows=dict(zip((KEY, OTHER), values, strict=False)))

    def delete(self, at: tuple[int, int | None], *keys: int) -> None:
        self.add(at, "delete", keys=keys or [KEY])

    def read(self, at: tuple[int, int], *values: int | None, level: str = "latest") -> None:
        """Add a read of KEY, or of KEY and OTHER, that found values; None: the key was absent."""
        asked = dict(zip((KEY, OTHER), values, strict=False))
        found = {key: value for key, value in asked.items() if value is not None}
        self.add(at, "read", found, keys=asked, level=level)

    def judged(self) -> Judgement:
        return judge([self.path], pictures=self.path.parent)

    @property
    def verdicts(self) -> dict[str, str]:
        return {part.partition: part.verdict for part in self.judged().parts}

    @property
    def linearizable(self) -> bool:
        verdicts = set(self.verdicts.values())
        assert verdicts <= {"Ok", "Illegal"}
        return verdicts == {"Ok"}


@pytest.fixture
def history(tmp_path: Path) -> History:
    return History(tmp_path)


# ---- verdicts --------------------------------------------------------------------------------------------------------


def op(name: str) -> Callable[..., Callable[[History], None]]:
    """Return a function that makes an operation of a case."""
    return lambda *at, **given: lambda history: getattr(history, name)(*at, **given)


put, delete, read, add = map(op, ("put", "delete", "read", "add"))
STORED = {"level": "stored"}
V10, V11, V12, V13 = ({"rows": {KEY: value}} for value in (10, 11, 12, 13))
CASES: dict[str, tuple[list[Callable[[History], None]], list[Callable[[History], None]]]] = {
    "reads in order": (
        [
            *(read((0, 1), None), put((2, 3), 10), read((4, 5), 10), put((6, 9), 11), read((7, 8), 11)),
            *(delete((10, 11)), read((12, 13), None)),
        ],
        [],
    ),
    "a read that goes back": ([put((0, 1), 10), put((2, 9), 11), read((3, 4), 11)], [read((5, 6), 10)]),
    "a lost update": ([put((0, 1), 10)], [read((2, 3), None)]),
    "a deleted row that comes back": ([put((0, 1), 10), delete((2, 3))], [read((4, 5), 10)]),
    "a put that was applied twice": ([put((0, 9), 10), read((1, 2), 10), put((3, 4), 11)], [read((5, 6), 10)]),
    "a value that nobody wrote": ([], [read((0, 1), 10)]),
    "a failed put that is seen": (
        [add((0, 0), "put", Unavailable("busy"), **V10), read((1, 2), None)],
        [read((3, 4), 10)],
    ),
    "an unknown put may appear late": (
        [put((0, 1), 10), put((2, None), 11), read((10, 11), 10), read((20, 21), 11)],
        [],
    ),
    "an unknown put that disappears": ([put((0, 1), 10), put((2, None), 11), read((10, 11), 11)], [read((20, 21), 10)]),
    "an unknown put appears after a later one, once": (
        [put((0, None), 10), put((1, 2), 11), read((3, 4), 11), read((5, 6), 10)],
        [read((7, 8), 11)],
    ),
    "an unknown delete takes effect once": (
        [put((0, 1), 10), delete((2, None)), read((3, 4), 10), read((5, 6), None)],
        [put((7, 8), 11), read((9, 10), None)],
    ),
    "a put of two rows is seen whole": ([put((0, 9), 10, 20), read((1, 2), None, None), read((3, 4), 10, 20)], []),
    "storage shows a put before its owner, and never goes back": (
        [put((0, 1), 10), put((2, 9), 11), read((3, 4), 11, **STORED), read((5, 6), 10)],
        [read((7, 8), 10, **STORED)],
    ),
    "an owner shows no put before storage": ([put((0, 9), 10), read((1, 2), 10)], [read((3, 4), None, **STORED)]),
    "storage and owner agree on the order": (
        [put((0, 9), 10), put((0, 9), 11), read((1, 2), 10, **STORED), read((3, 4), 11, **STORED), read((5, 6), 11)],
        [read((7, 8), 10)],
    ),
    "storage misses no acknowledged put": ([put((0, 1), 10)], [read((2, 3), None, **STORED)]),
    "an unknown put stays in the log and is shown later": (
        [put((0, None), 10), read((1, 2), 10, **STORED), read((3, 4), None), read((5, 6), 10, level="durable")],
        [read((7, 8), None)],
    ),
    "find or create succeeds once": (
        [add((0, 9), "insert", 1, **V10), add((0, 9), "insert", 0, **V11), read((10, 11), 10)],
        [add((12, 13), "insert", 1, **V12)],
    ),
    "an insert that was applied twice": (
        [add((0, 9), "insert", 1, **V10), read((1, 2), 10), delete((3, 4))],
        [read((5, 6), 10)],
    ),
    "an unknown insert explains a refusal": (
        [add((0, None), "insert", **V10), add((1, 2), "insert", 0, **V11), delete((3, 4)), read((5, 6), None)],
        [add((7, 8), "insert", 0, **V12)],
    ),
    "the highest version counts": (
        [
            *(add((0, 1), "version", 1, **V10, version=5), add((2, 3), "version", 0, **V11, version=4)),
            *(read((4, 5), 10), add((6, 7), "version", 1, **V12, version=5), read((8, 9), 12)),
        ],
        [add((10, 11), "version", 1, **V13, version=4)],
    ),
    "delete if the value is as expected": (
        [
            *(put((0, 1), 10), add((2, 3), "compare", 0, rows={KEY: 9}), add((4, 5), "compare", 1, **V10)),
            read((6, 7), None),
        ],
        [add((8, 9), "compare", 1, **V10)],
    ),
    "conditions beside reads from storage": (
        [
            *(add((0, 9), "insert", 1, **V10), read((1, 2), 10, **STORED), read((3, 4), None)),
            *(add((10, 11), "insert", 0, **V11), add((12, None), "insert", **V12), add((12, None), "compare", **V10)),
            *(read((13, 14), None, **STORED), read((15, 16), 12)),
        ],
        [],
    ),
    "an insert without a verdict is not in storage alone": (
        [add((0, 9), "insert", **V10), read((10, 11), 10, **STORED)],
        [read((12, 13), None)],
    ),
    "a version without a verdict is not in storage alone": (
        [add((0, 9), "version", **V10, version=1), read((10, 11), 10, **STORED)],
        [read((12, 13), None)],
    ),
    "a write without a verdict may have changed nothing": (
        [add((0, 1), "insert", 1, **V10), add((2, 3), "insert", **V11), read((4, 5), 10, **STORED), read((6, 7), 10)],
        [],
    ),
}
"""Operations of a history that is linearizable, and operations after which it is not, if any."""


@pytest.mark.parametrize("case", CASES)
def test_a_history_is_linearizable_or_not(history: History, case: str) -> None:
    right, wrong = CASES[case]
    for operation in right:
        operation(history)
    if right:
        assert history.linearizable
    for operation in wrong:
        operation(history)
    assert history.linearizable == (not wrong)


def test_a_stale_read_is_found_and_explained(history: History) -> None:
    history.put((0, 1), 10)
    history.put((2, 3), 11)
    history.read((4, 5), 10)
    assert not history.linearizable
    assert history.judged().operations == 3
    wrong = history.judged().wrong
    assert [part.partition for part in wrong] == ["region 0, key 1", "region 0"]
    assert "c2 read of 1 at latest -> map[1:10] [4, 5]" in wrong[0].why
    assert all("<title>Porcupine</title>" in Path(part.html).read_text() for part in wrong)
    with raises(NotLinearizable):
        expect_linearizable([history.path])


def test_what_came_before_a_wrong_read_is_told_with_the_writes_that_failed(history: History) -> None:
    history.put((0, 1), 10)
    history.add((2, 5), "delete", Unavailable("the daemon ends"), keys=[KEY])
    history.put((3, None), 11)
    history.read((6, 7), None)
    history.put((8, 9), 12)
    assert (
        "before: c0 put map[1:10] -> ok [0, 1]; c1 delete of 1 -> failed (Unavailable: the daemon ends) [2, 5]; "
        "c2 put map[1:11] -> unknown [3, ]; c3 read of 1 at latest -> map[] [6, 7]"
    ) in history.judged().wrong[0].why


def test_unknown_operations_that_nobody_noticed_are_not_ordered(history: History) -> None:
    history.put((0, 1), 0)
    for number in range(1, 200):
        history.put((2, None), number)
        history.delete((2, None))
        history.put((10 * number, 10 * number + 1), 1000 + number)
        history.read((10 * number + 2, 10 * number + 3), 1000 + number)
    assert history.linearizable
    region = history.judged().parts[-1]
    assert (region.unknown, region.left_out) == (0, 398)


def test_many_unknown_puts_that_were_noticed_are_decided(history: History) -> None:
    for number in range(1, 100):
        history.put((10 * number, None), number)
        history.put((10 * number + 1, 10 * number + 2), 1000 + number)
        history.read((10 * number + 3, 10 * number + 4), 1000 + number)
        history.read((10 * number + 5, 10 * number + 6), number)
    assert history.linearizable
    history.read((2000, 2001), 50)
    assert not history.linearizable


def test_a_torn_put_is_wrong_though_each_key_is_right(history: History) -> None:
    history.put((0, 1), 10, 20)
    history.put((2, 9), 11, 21)
    history.read((3, 4), 11, 20)
    assert history.verdicts == {"region 0, key 1": "Ok", "region 0, key 2": "Ok", "region 0": "Illegal"}


def test_two_reads_of_one_key_each_may_not_disagree_on_the_order(history: History) -> None:
    history.put((0, 9), 10)
    history.add((0, 9), "put", rows={OTHER: 20})
    history.read((1, 2), 10, None)
    assert history.linearizable
    history.read((1, 2), None, 20)
    assert history.verdicts == {"region 0, key 1": "Ok", "region 0, key 2": "Ok", "region 0": "Illegal"}


# ---- files -----------------------------------------------------------------------------------------------------------


def test_a_line_that_was_cut_off_ends_a_file(history: History) -> None:
    history.put((0, 1), 10)
    history.put((2, 3), 11)
    history.read((4, 5), 11)
    text = history.path.read_text()
    history.path.write_text(text[:-20])
    assert history.linearizable
    history.path.write_text(text[:-20] + "\n" + text)
    with raises(ValueError):
        history.judged()


@pytest.mark.parametrize(
    "lines",
    [
        '{"event": "return", "id": "a", "at": 1, "outcome": "ok"}',
        '{"event": "invoke", "id": "a", "at": 1, "op": "swap"}',
        '{"event": "invoke", "id": "a", "at": 1, "op": "read", "keys": [1], "level": "flushed"}',
        '{"event": "invoke", "id": "a", "op": "put", "rows": {"1": 1}}',
        "\n".join(f'{{"event": "invoke", "id": "{each}", "at": 1, "op": "put", "rows": {{"1": 1}}}}' for each in "ab"),
    ],
)
def test_what_is_no_history_is_refused(history: History, lines: str) -> None:
    history.path.write_text(lines)
    with raises(ValueError):
        history.judged()


KILLED = """
import os, pathlib, signal, sys
from tests.histories.record import Recorder
recorder = Recorder.to_file(pathlib.Path(sys.argv[1]))
recorder.invoke("a", "put", 0, rows={1: 10}).ok()
recorder.invoke("a", "put", 0, rows={1: 11})
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_operation_of_a_killed_client_stays_open(history: History, tmp_path: Path) -> None:
    killed = tmp_path / "killed.jsonl"
    ran = subprocess.run([sys.executable, "-c", KILLED, str(killed)], cwd=ROOT, env={**os.environ})
    assert ran.returncode == -signal.SIGKILL
    assert len(killed.read_text().splitlines()) == 3
    reader = Recorder.to_file(tmp_path / "reader.jsonl")
    for value in (10, 11):  # the machine's clock orders these reads after the puts of the other process
        reader.invoke("b", "read", 0, keys=[KEY], level="latest").ok({KEY: value})
    assert not expect_linearizable([killed, tmp_path / "reader.jsonl"]).wrong
    reader.invoke("b", "read", 0, keys=[KEY], level="latest").ok({KEY: 10})
    assert judge([killed, tmp_path / "reader.jsonl"]).wrong


# ---- rules that omit or bound unknown operations ---------------------------------------------------------------------


class RandomOperation:
    """An operation on one or both of two keys. It takes effect between its call and its return, or has an unknown
    outcome.
    """

    def __init__(self, number: int, chance: random.Random) -> None:
        self.number, self.kind = number, chance.choice(["put", "put", "insert", "delete", "read", "read", "read"])
        self.keys = chance.sample([KEY, OTHER], 1 if self.kind == "insert" else chance.randint(1, 2))
        self.rows = dict.fromkeys(self.keys, 100 + number)
        self.level = chance.choice(["latest", "stored"])
        self.unknown = self.kind != "read" and chance.random() < 0.5
        self.happens = not self.unknown or chance.random() < 0.5
        call = chance.randrange(30)
        effect = call + chance.randrange(1, 8)
        self.moments = (call, effect, effect + chance.randrange(1, 8))
        self.wrong = chance.randrange(10) if chance.random() < 0.1 else None
        self.told: Any = None

    def invoke(self, recorder: Recorder, region: int) -> None:
        given: dict[str, Any] = {"rows": self.rows} if self.kind in ("put", "insert") else {"keys": self.keys}
        level = self.level if self.kind == "read" else None
        self.begun = recorder.invoke(f"c{self.number}", self.kind, region, level=level, **given)

    def take_effect(self, shown: dict[int, int]) -> None:
        if self.kind == "read":
            self.told = {key: shown[key] for key in self.keys if key in shown}
            if self.wrong is not None:
                self.told = {self.keys[0]: 100 + self.wrong}
        elif self.happens and not (self.kind == "insert" and self.keys[0] in shown):
            self.told = 1
            for key in self.keys:
                shown.pop(key, None)
            shown |= {} if self.kind == "delete" else self.rows

    def end(self) -> None:
        if self.kind == "read":
            self.begun.ok(self.told)
        elif not self.unknown:
            self.begun.ok(applied=self.told or 0 if self.kind == "insert" else None)


def random_history(recorder: Recorder, region: int, chance: random.Random, at: list[int]) -> None:
    """Return operations in a random order; some reads show a wrong value."""
    operations = [RandomOperation(number, chance) for number in range(10)]
    shown: dict[int, int] = {}
    for time, phase, number in sorted(
        (time, phase, o.number) for o in operations for phase, time in enumerate(o.moments)
    ):
        at[0], operation = time, operations[number]
        if phase == 0:
            operation.invoke(recorder, region)
        elif phase == 1:
            operation.take_effect(shown)
        else:
            operation.end()


def test_the_rules_for_unknown_operations_change_no_verdict(tmp_path: Path) -> None:
    at, path = [0], tmp_path / "random.jsonl"
    recorder, chance = Recorder.to_file(path, lambda: at[0]), random.Random("histories")
    for region in range(150):
        random_history(recorder, region, chance, at)
    fast, whole = judge([path]), judge([path], order_all=True)
    verdicts = [{part.partition: part.verdict for part in judged.parts} for judged in (fast, whole)]
    assert verdicts[0] == verdicts[1]
    assert min(Counter(verdicts[0].values()).values()) > 30
    assert sum(part.left_out for part in fast.parts) > 100 > sum(part.left_out for part in whole.parts)


# ---- the simulation --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "seeds"), [("log", extent(3, 12)), ("leases", extent(5, 50)), ("cluster", extent(6, 50))]
)
def test_what_clients_see_in_the_simulation_is_linearizable(kind: str, seeds: int, tmp_path: Path) -> None:
    """Of one seed in ten, Porcupine may not decide in time: its search grows exponentially with unknown outcomes."""
    judged, failed = simulated.judged(range(1, seeds + 1), kind, tmp_path)
    print(judged)
    undecided = [line for line in failed if "was not decided in time" in line]
    assert failed == undecided
    assert len(undecided) <= seeds // 10
    reads: Counter[str] = Counter()
    for part in judged.parts:
        reads.update(part.reads)
    assert reads["latest"] > 50
    assert reads["stored"] > 10


@pytest.mark.parametrize("fault", OF_LEASES)
def test_a_planted_stale_read_is_found_without_the_oracle(fault: str, tmp_path: Path) -> None:
    """The fault concerns deposed owners, and is found from the clients' view alone."""

    def search(fault: str, first: int) -> tuple[int, str] | None:
        for seed in dict.fromkeys((first, *range(1, 80))):
            path = tmp_path / f"{seed}.jsonl"
            with OF_LEASES[fault]():
                simulated.record(seed, "leases", path, blind=True)
            if wrong := judge([path]).wrong:
                assert {part.verdict for part in wrong} == {"Illegal"}
                assert "at latest" in wrong[0].why
                return seed, wrong[0].why
        return None

    expect_found(fault, search, FOUND_BY)


FOUND_BY = {
    "reads_without_a_lease": 11,
    "writes_before_others_stop_reading": 5,
    "takes_any_owner_for_the_one_that_ended": 35,
}
"""As `tests.simulation.planted.FOUND_BY`, without the oracle."""
