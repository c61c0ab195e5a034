"""The recorder and the judge of histories: what Porcupine accepts as linearizable, and what it rejects."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
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


# ---- reads -----------------------------------------------------------------------------------------------------------


def test_reads_in_order(history: History) -> None:
    history.read((0, 1), None)
    history.put((2, 3), 10)
    history.read((4, 5), 10)
    history.put((6, 9), 11)
    history.read((7, 8), 11)
    history.delete((10, 11))
    history.read((12, 13), None)
    assert history.linearizable
    assert history.judged().operations == 7


def test_a_stale_read_is_found_and_explained(history: History) -> None:
    history.put((0, 1), 10)
    history.put((2, 3), 11)
    history.read((4, 5), 10)
    assert not history.linearizable
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


def test_a_read_that_goes_back(history: History) -> None:
    """Each read alone is valid, since the put was in progress."""
    history.put((0, 1), 10)
    history.put((2, 9), 11)
    history.read((3, 4), 11)
    assert history.linearizable
    history.read((5, 6), 10)
    assert not history.linearizable


def test_a_lost_update(history: History) -> None:
    history.put((0, 1), 10)
    history.read((2, 3), None)
    assert not history.linearizable


def test_a_deleted_row_that_comes_back(history: History) -> None:
    history.put((0, 1), 10)
    history.delete((2, 3))
    history.read((4, 5), 10)
    assert not history.linearizable


def test_a_put_that_was_applied_twice(history: History) -> None:
    """Between the two applications a read showed the put, and another put replaced it."""
    history.put((0, 9), 10)
    history.read((1, 2), 10)
    history.put((3, 4), 11)
    history.read((5, 6), 10)
    assert not history.linearizable


def test_a_value_that_nobody_wrote(history: History) -> None:
    history.read((0, 1), 10)
    assert not history.linearizable


def test_a_failed_put_that_is_seen(history: History) -> None:
    history.add((0, 0), "put", Unavailable("busy"), rows={KEY: 10})
    history.read((1, 2), None)
    assert history.linearizable
    history.read((3, 4), 10)
    assert not history.linearizable


# ---- unknown outcomes ------------------------------------------------------------------------------------------------


def test_an_unknown_put_may_appear_late(history: History) -> None:
    history.put((0, 1), 10)
    history.put((2, None), 11)
    history.read((10, 11), 10)
    history.read((20, 21), 11)
    assert history.linearizable


def test_an_unknown_put_that_appears_and_disappears(history: History) -> None:
    history.put((0, 1), 10)
    history.put((2, None), 11)
    history.read((10, 11), 11)
    history.read((20, 21), 10)
    assert not history.linearizable


def test_an_unknown_put_may_appear_after_a_later_one_once(history: History) -> None:
    history.put((0, None), 10)
    history.put((1, 2), 11)
    history.read((3, 4), 11)
    history.read((5, 6), 10)
    assert history.linearizable
    history.read((7, 8), 11)
    assert not history.linearizable


def test_an_unknown_delete_may_take_effect_once(history: History) -> None:
    history.put((0, 1), 10)
    history.delete((2, None))
    history.read((3, 4), 10)
    history.read((5, 6), None)
    assert history.linearizable
    history.put((7, 8), 11)
    history.read((9, 10), None)
    assert not history.linearizable


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


# ---- several rows ----------------------------------------------------------------------------------------------------


def test_a_put_of_two_rows_is_seen_whole(history: History) -> None:
    history.put((0, 9), 10, 20)
    history.read((1, 2), None, None)
    history.read((3, 4), 10, 20)
    assert history.linearizable


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


# ---- reads from storage ----------------------------------------------------------------------------------------------


def test_storage_may_show_a_put_before_its_owner_does(history: History) -> None:
    history.put((0, 1), 10)
    history.put((2, 9), 11)
    history.read((3, 4), 11, level="stored")
    history.read((5, 6), 10)
    assert history.linearizable
    history.read((7, 8), 10, level="stored")  # but reads from storage must not go back
    assert not history.linearizable


def test_an_owner_shows_no_put_before_storage_does(history: History) -> None:
    history.put((0, 9), 10)
    history.read((1, 2), 10)
    history.read((3, 4), None, level="stored")
    assert not history.linearizable


def test_storage_and_owner_agree_on_the_order(history: History) -> None:
    history.put((0, 9), 10)
    history.put((0, 9), 11)
    history.read((1, 2), 10, level="stored")
    history.read((3, 4), 11, level="stored")
    history.read((5, 6), 11)
    assert history.linearizable
    history.read((7, 8), 10)
    assert not history.linearizable


def test_storage_misses_no_put_that_was_acknowledged(history: History) -> None:
    history.put((0, 1), 10)
    history.read((2, 3), None, level="stored")
    assert not history.linearizable


def test_an_unknown_put_may_stay_in_the_log_and_be_shown_later(history: History) -> None:
    history.put((0, None), 10)
    history.read((1, 2), 10, level="stored")
    history.read((3, 4), None)
    history.read((5, 6), 10, level="durable")
    assert history.linearizable
    history.read((7, 8), None)
    assert not history.linearizable


# ---- conditions ------------------------------------------------------------------------------------------------------


def test_find_or_create_succeeds_once(history: History) -> None:
    history.add((0, 9), "insert", 1, rows={KEY: 10})
    history.add((0, 9), "insert", 0, rows={KEY: 11})
    history.read((10, 11), 10)
    assert history.linearizable
    history.add((12, 13), "insert", 1, rows={KEY: 12})
    assert not history.linearizable


def test_an_insert_that_was_applied_twice(history: History) -> None:
    history.add((0, 9), "insert", 1, rows={KEY: 10})
    history.read((1, 2), 10)
    history.delete((3, 4))
    history.read((5, 6), 10)
    assert not history.linearizable


def test_an_unknown_insert_explains_a_refusal(history: History) -> None:
    history.add((0, None), "insert", rows={KEY: 10})
    history.add((1, 2), "insert", 0, rows={KEY: 11})
    history.delete((3, 4))
    history.read((5, 6), None)
    assert history.linearizable
    history.add((7, 8), "insert", 0, rows={KEY: 12})
    assert not history.linearizable


def test_the_highest_version_counts(history: History) -> None:
    history.add((0, 1), "version", 1, rows={KEY: 10}, version=5)
    history.add((2, 3), "version", 0, rows={KEY: 11}, version=4)
    history.read((4, 5), 10)
    history.add((6, 7), "version", 1, rows={KEY: 12}, version=5)
    history.read((8, 9), 12)
    assert history.linearizable
    history.add((10, 11), "version", 1, rows={KEY: 13}, version=4)
    assert not history.linearizable


def test_delete_if_the_value_is_as_expected(history: History) -> None:
    history.put((0, 1), 10)
    history.add((2, 3), "compare", 0, rows={KEY: 9})
    history.add((4, 5), "compare", 1, rows={KEY: 10})
    history.read((6, 7), None)
    assert history.linearizable
    history.add((8, 9), "compare", 1, rows={KEY: 10})
    assert not history.linearizable


def test_conditions_beside_reads_from_storage(history: History) -> None:
    history.add((0, 9), "insert", 1, rows={KEY: 10})
    history.read((1, 2), 10, level="stored")
    history.read((3, 4), None)
    history.add((10, 11), "insert", 0, rows={KEY: 11})
    history.add((12, None), "insert", rows={KEY: 12})
    history.add((12, None), "compare", rows={KEY: 10})
    history.read((13, 14), None, level="stored")
    history.read((15, 16), 12)
    assert history.linearizable


@pytest.mark.parametrize("kind", ["insert", "version"])
def test_a_write_whose_verdict_nobody_was_told_is_not_in_storage_alone_for_ever(history: History, kind: str) -> None:
    """The write has returned, so the owner must show a row that storage shows."""
    history.add((0, 9), kind, rows={KEY: 10}, **({"version": 1} if kind == "version" else {}))
    history.read((10, 11), 10, level="stored")
    assert history.linearizable
    history.read((12, 13), None)
    assert not history.linearizable


def test_a_write_whose_verdict_nobody_was_told_may_have_changed_nothing(history: History) -> None:
    history.add((0, 1), "insert", 1, rows={KEY: 10})
    history.add((2, 3), "insert", rows={KEY: 11})
    history.read((4, 5), 10, level="stored")
    history.read((6, 7), 10)
    assert history.linearizable


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
    ("kind", "seeds"), [("log", extent(3, 30)), ("leases", extent(5, 50)), ("cluster", extent(5, 50))]
)
def test_what_clients_see_in_the_simulation_is_linearizable(kind: str, seeds: int, tmp_path: Path) -> None:
    judged, failed = simulated.judged(range(1, seeds + 1), kind, tmp_path)
    print(judged)
    assert failed == []
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
