"""No acknowledged row is lost by closing, crashing and opening again at any moment.

A writer process (`tests/scripts/writer.py`) prints its acknowledgements and is killed; the next one prints the rows
that it finds. With one region these must be *exactly* the rows after one of the operations from the last durable one to
the last one tried: whole operations, in order, none missing. With two regions this holds for each key.
"""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import lance
import pytest

import memwal
from memwal import wal
from memwal.ingest.engine.table.garbage import Ages
from tests.clean import assert_clean, assert_collected
from tests.conftest import OpenSmall, Script, WaitUntil, extent

pytestmark = pytest.mark.usefixtures("only_process")
Model = dict[int, str]
COMMIT_ON_DEMAND = {"commit": {"interval": "0s"}}
SEED = 3
"""The first operation of this seed is a durable put of 60 rows, which takes several entries."""


def after(model: Model, op: dict[str, Any]) -> Model:
    """Return the model after an operation."""
    if op["kind"] == "put":
        return model | {id: f"row {id} v{op['number']}" for id in op["ids"]}
    if op["kind"] == "delete":
        return {id: name for id, name in model.items() if id not in op["ids"]}
    return model


@dataclass
class Promises:
    """The allowed states of a table: `states[0]` is acknowledged, the others were tried after it."""

    states: list[Model] = field(default_factory=lambda: [{}])

    def read(self, line: dict[str, Any], ops: dict[int, dict[str, Any]]) -> None:
        """Process one line of the writer."""
        if "try" in line:
            op = line["try"]
            ops[op["number"]] = op
            self.states.append(after(self.states[-1], op))
        elif "ack" in line:
            op = ops[line["ack"]]
            # A commit takes published rows only, and leaves lingering rows in memory.
            if op["kind"] == "flush" or (op["durable"] and op["kind"] != "commit"):
                self.states = self.states[-1:]
        elif "closed" in line:
            self.states = self.states[-1:]

    def check(self, found: Model, *, whole: bool) -> None:
        """Check the found rows. `whole`: they must equal one state; otherwise each key may match a different state."""
        if whole:
            assert found in self.states, differences(found, self.states)
            return
        for id in set(found).union(*self.states):
            assert found.get(id) in {state.get(id) for state in self.states}, f"key {id}: {found.get(id)}"


def differences(found: Model, states: Sequence[Model]) -> str:
    """Describe how `found` differs from the nearest of `states`."""
    nearest = min(states, key=lambda state: len(state.items() ^ found.items()))
    return f"of {len(states)} states none fits; nearest differs in {sorted(nearest.items() ^ found.items())[:6]}"


def follow(running: Any, promises: Promises, rng: random.Random | None, whole: bool) -> bool:
    """Read a writer until it ends; with `rng`, kill it during one of its flushes or commits.

    Return whether it got as far as opening the table.
    """
    ops: dict[int, dict[str, Any]] = {}
    opened, steps_left = False, rng.randrange(1, 4) if rng else 0
    while (text := running.line()) is not None:
        line = json.loads(text)
        if "state" in line:
            opened = True
            found = {int(id): name for id, name in line["state"].items()}
            assert line["rows"] == len(found)
            promises.check(found, whole=whole)
            promises.states = [found]
        promises.read(line, ops)
        if rng and line.get("try", {}).get("kind") in ("flush", "commit"):
            steps_left -= 1
            if not steps_left:
                # At any time in a flush or a commit, which take some 10 to 100 ms, or right after it.
                with suppress(subprocess.TimeoutExpired):
                    running.process.wait(rng.random() * 0.08)
                running.process.kill()
    code = running.wait()
    assert code in (0, -9), running.errors
    return opened


@pytest.mark.parametrize("regions", [1, 2])
def test_no_acknowledged_row_is_missing_after_any_crash(regions: int, uri: str, script: Script) -> None:
    seed, lives = 20 + regions, extent(6, 60)
    rng = random.Random(seed)
    promises = Promises()
    opened = 0
    for life in range(lives):
        nth = rng.randrange(1, 30) if rng.random() < 0.5 else rng.randrange(30, 90)
        kill_point = () if life % 3 == 2 else (nth, rng.choice(["before", "after"]))
        running = script("writer.py", uri, regions, seed, life * 1000, 60, *kill_point)
        opened += follow(running, promises, None if kill_point else rng, whole=regions == 1)
        if opened:
            assert_clean(wal.open_store(uri), uri, deep=False)
    assert opened >= lives // 2, "most lives should get to write"
    with memwal.open(uri, settings=COMMIT_ON_DEMAND) as table:
        found = {row["id"]: row["name"] for row in table.scan(["id", "name"]).read_all().to_pylist()}
        assert table.count() == len(found)
        promises.check(found, whole=regions == 1)
        table.flush()
        assert_clean(wal.open_store(uri), uri)
        table.commit()
        # Only an owner can determine what killed predecessors left of a generation that is not published yet.
        table.upkeep.collect(Ages(wal=-1.0, sst=-1.0, orphan=604_800.0))
    assert_collected(wal.open_store(uri), uri)
    committed = lance.dataset(uri).to_table(columns=["id", "name"]).to_pylist()
    assert {row["id"]: row["name"] for row in committed} == found
    assert len(committed) == len(found)


def test_every_change_on_storage_may_be_the_last(uri: str, script: Script) -> None:
    """The first changes of a life are those of the claim and the first appends: the process dies at each of them in
    turn.
    """
    promises = Promises()
    for kill_at in range(1, 15, step := extent(2, 1)):
        when = "after" if kill_at // step % 2 else "before"
        running = script("writer.py", uri, 1, 5, kill_at * 1000, 12, kill_at, when)
        follow(running, promises, None, whole=True)
    assert_clean(wal.open_store(uri), uri)
    with memwal.open(uri, settings=COMMIT_ON_DEMAND) as table:
        promises.check(
            {row["id"]: row["name"] for row in table.scan(["id", "name"]).read_all().to_pylist()}, whole=True
        )


def test_a_put_of_several_entries_is_all_or_nothing(tmp_path: Any, script: Script) -> None:
    """60 rows need several entries of 2 KiB: wherever the writer dies, the table has all 60 rows or none."""
    outcomes = set()
    for kill_at in range(8, 17, extent(2, 1)):
        uri = str(tmp_path / f"{kill_at}.lance")
        running = script("writer.py", uri, 1, SEED, 0, 1, kill_at, "after")
        acked = False
        while (text := running.line()) is not None:
            acked |= "ack" in json.loads(text)
        with memwal.open(uri, settings=COMMIT_ON_DEMAND) as table:
            outcomes.add(table.count())
            assert table.count() in ((60,) if acked else (0, 60)), f"killed at {kill_at}"
            assert table.put([{"id": 500}], missing="null").applied
            assert table.count(filter="id < 500") in (0, 60)
    assert outcomes == {0, 60}, "the kill points should lie on both sides"


def test_rows_put_without_durability_become_durable_by_themselves(
    open_small: OpenSmall, made: Any, wait_until: WaitUntil
) -> None:
    """The rows become durable within `wal.linger_max`, with the next durable put, or at the close; never later."""
    table = open_small(regions=1, wal={"linger_max": "100ms"})
    assert set(table.put(made.rows([1, 2]), durable=False).positions.values()) == {0}
    wait_until(lambda: table.status()["regions"][0]["wal_position"] == 1)
    table = open_small(wal={"linger_max": "1h"})  # takes the region over: rows that were only in memory would be lost
    assert table.count() == 2
    table.put(made.rows([3]), durable=False)
    table.delete([1], durable=False)
    assert table.put(made.rows([4])).positions.popitem()[1] == 3
    table = open_small(wal={"linger_max": "1h"})
    assert sorted(table.scan(["id"]).read_all()["id"].to_pylist()) == [2, 3, 4]
    table.put(made.rows([5]), durable=False)
    table.close()
    table = open_small(wal={"linger_max": "1h"})
    assert sorted(table.scan(["id"]).read_all()["id"].to_pylist()) == [2, 3, 4, 5]
    table.put(made.rows([6]), durable=False)
    table.flush()
    table = open_small()
    assert sorted(table.scan(["id"]).read_all()["id"].to_pylist()) == [2, 3, 4, 5, 6]
    table = open_small(wal={"linger_max": "1h"})
    table.put(made.rows([7]), durable=False)
    assert table.count(level="durable") == 6, "a durable read makes durable what it returns"
    table = open_small()
    assert table.count() == 6
