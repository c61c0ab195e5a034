"""Two writers of one region: the newer epoch wins, the older one fails with both epochs, no
acknowledged row is lost.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import lance
import pytest

import memwal
from memwal import wal
from tests.conftest import extent, wait_until
from tests.messages import raises
from tests.support.interpose import Once
from tests.support.rows import names

SETTINGS = {"commit": {"interval": "0s"}}


def test_the_older_writer_is_refused_with_both_epochs(open_small: Callable[..., Any], made: Any) -> None:
    older = open_small(regions=1)
    older.put(made.rows(range(10)))
    newer = open_small()
    for attempt in range(3):
        with raises(memwal.FencedError):
            older.put(made.rows([50 + attempt]))
    with pytest.raises(memwal.FencedError):
        older.delete([1])
    assert names(newer) == {id: f"row {id} v0" for id in range(10)}
    newer.put(made.rows([3], 1))
    assert names(newer)[3] == "row 3 v1"
    third = open_small()
    with raises(memwal.FencedError):
        newer.put(made.rows([4], 2))
    assert names(third) == {id: f"row {id} v{int(id == 3)}" for id in range(10)}


def test_rows_that_were_written_as_the_region_was_taken_are_not_told_to_be_fenced(
    open_small: Callable[..., Any], made: Any, monkeypatch: pytest.MonkeyPatch, once: Once
) -> None:
    """The newer writer has the rows: after `FencedError` a client would send them again, even without a token."""
    older, newer = open_small(regions=1), list[Any]()
    monkeypatch.setattr("memwal.wal.appender._PROOF_LASTS", 0.0)
    once(wal.LocalStore, "put_if_absent", lambda: newer.append(open_small()), after=True)
    with raises(memwal.UnknownOutcome):
        older.put(made.rows([1]))
    assert names(newer[0]) == {1: "row 1 v0"}
    with raises(memwal.FencedError):
        older.put(made.rows([2]))
    newer[0].put(made.rows([3]))
    assert set(names(newer[0])) == {1, 3}


def test_the_older_writer_cannot_flush_either(open_small: Callable[..., Any], made: Any, uri: str) -> None:
    older = open_small(regions=1)
    older.put(made.rows(range(10)))
    newer = open_small()
    newer.delete([0])
    with raises(memwal.FencedError):
        older.flush()
    newer.flush()
    newer.commit()
    assert names(newer) == {id: f"row {id} v0" for id in range(1, 10)}
    assert lance.dataset(uri).count_rows() == 9


def test_rows_that_linger_at_the_takeover_are_lost_or_kept_but_not_invented(
    open_small: Callable[..., Any], made: Any
) -> None:
    """Rows acked without durability may be lost with their writer; a reader of the newer writer never sees a part of a
    write.
    """
    older = open_small(regions=1, wal={"linger_max": "1h"})
    older.put(made.rows(range(5)))
    older.put(made.rows(range(5, 10)), durable=False)
    newer = open_small()
    assert names(newer) == {id: f"row {id} v0" for id in range(5)}
    with pytest.raises(memwal.FencedError):  # five rows that were visible are lost, and close() raises
        older.close()
    assert names(newer) == {id: f"row {id} v0" for id in range(5)}


@pytest.mark.parametrize("seed", range(extent(2, 10)))
def test_no_acknowledged_row_is_lost_when_the_region_changes_hands(
    seed: int, open_small: Callable[..., Any], made: Any, uri: str
) -> None:
    """Writers take the region from each other while all put from two threads, with flushes and commits in between."""
    rng = random.Random(seed)
    acked: set[int] = set()
    tried: set[int] = set()
    problems: list[str] = []
    rows_max = rng.choice([7, 1000])

    def write(table: Any, first: int) -> None:
        for id in range(first, first + 1000):
            tried.add(id)
            try:
                table.put(made.rows([id]))
            except memwal.FencedError:
                return
            except Exception as error:  # noqa: BLE001 - reported by the main thread
                problems.append(repr(error))
                return
            acked.add(id)

    threads: list[threading.Thread] = []
    tables: list[Any] = []
    for owner in range(4):
        tables.append(open_small(regions=1, commit=rng.choice(["0s", "20ms"]), memtable={"rows_max": rows_max}))
        for half in range(2):
            threads.append(threading.Thread(target=write, args=(tables[-1], owner * 10_000 + half * 5_000)))
            threads[-1].start()
        threads[-1].join(rng.random() * 0.2)
    wait_until(lambda: len(acked) > 4)
    last = open_small()
    for thread in threads:
        thread.join(60)
    assert problems == []
    assert not any(thread.is_alive() for thread in threads), "a fenced writer must not wait for ever"
    found = names(last)
    assert acked <= set(found) <= tried
    assert all(name == f"row {id} v0" for id, name in found.items())
    last.flush()
    last.commit()
    committed = lance.dataset(uri).to_table(columns=["id"])["id"].to_pylist()
    assert sorted(committed) == sorted(found)


@pytest.mark.parametrize("seed", range(extent(2, 10)))
def test_processes_take_a_region_from_each_other(seed: int, uri: str, script: Callable[..., Any]) -> None:
    rng = random.Random(seed)
    processes = [script("putter.py", uri, first) for first in (1_000, 1_000_000, 2_000_000)]
    for process in processes:
        process.line_with("ready")
    first, *others = processes
    first.tell("go")
    first.line_with(f'"ack": {rng.randrange(1, 40)}}}')
    if seed % 2:  # with odd seeds they race each other, else they run one after the other
        for other in others:
            other.tell("go")
    else:
        others[0].tell("go")
        others[0].line_with(f'"ack": {rng.randrange(1, 25)}}}')
        others[1].tell("go")
    for other in others:
        other.line_with("open")
    owner = _last_owner(processes)
    for process in processes:
        while process is not owner and process.line() is not None:
            pass  # the process runs to its end: it is fenced, and reports this twice
    wanted = len([line for line in owner.lines if '"ack"' in line]) + 5
    while sum('"ack"' in line for line in owner.lines) < wanted:
        assert owner.line() is not None
    owner.tell("stop")
    assert owner.wait() == 0
    _check(processes, owner, uri)


def _last_owner(processes: list[Any]) -> Any:
    """Return the process with the highest epoch."""
    epochs = {}
    for process in processes:
        opened = [json.loads(line)["open"] for line in process.lines if '"open"' in line]
        epochs[id(process)] = opened[0][0] if opened and opened[0] else 0
    return max(processes, key=lambda process: epochs[id(process)])


def _check(processes: list[Any], owner: Any, uri: str) -> None:
    """Check that refusals carry both epochs and repeat, no acknowledged row is lost, and the hot key has its newest
    value.
    """
    acked, tried, hot = set(), set(), []
    for process in processes:
        said = [json.loads(line) for line in process.lines]
        errors = [line["error"] for line in said if "error" in line]
        epoch = next((line["open"][0] for line in said if line.get("open")), None)
        if process is not owner:
            assert process.wait() == 0, process.errors
            assert len(errors) == (1 if epoch is None else 2), "the next put fails too"
            for kind, message, details in errors:
                assert kind == "FencedError", message
                assert details["theirs"] > details["ours"]
                assert f"writer epoch {details['ours']} was fenced by epoch {details['theirs']}" in message
                assert epoch is None or details["ours"] == epoch
        else:
            assert errors == []
        base = int(process.process.args[-1])
        first_errors = next((n for n, line in enumerate(said) if "error" in line), len(said))
        mine = [line["ack"] for line in said if "ack" in line]
        acked |= {base + n for n in mine}
        tried |= {base + line["try"] for line in said[:first_errors] if "try" in line}
        if mine:
            hot.append((epoch, {f"{base}/{mine[-1]}", f"{base}/{mine[-1] + 1}"}))
    with memwal.open(uri, settings=SETTINGS) as table:
        found = names(table)
        newest = found.pop(0)
        assert acked <= set(found) <= tried
        assert newest in max(hot)[1], "the newest owner's last value wins"
        table.flush()
        table.commit()
    assert lance.dataset(uri).count_rows() == len(found) + 1


@pytest.mark.parametrize("level", ["latest", "durable"])
def test_a_read_sees_what_anybody_acknowledged_before_it_or_fails(
    level: str, open_small: Callable[..., Any], made: Any
) -> None:
    """The older owner has flushed and committed and is idle; only the read itself can detect that it was deposed."""
    older = open_small(regions=1)
    older.put(made.rows(range(10)))
    older.flush()
    older.commit()
    assert older.count(level=level) == 10
    newer = open_small()
    newer.put(made.rows([3], 1))
    newer.delete([4])
    for read in (lambda: older.get([3, 4], level=level), lambda: older.count(level=level)):
        with raises(memwal.FencedError):
            read()
    assert older.count(level="committed") == 10
    assert [row["name"] for row in newer.get([3, 4], ["name"], level=level).to_pylist()] == ["row 3 v1"]


def test_an_owner_that_is_closed_is_not_waited_for(open_small: Callable[..., Any], made: Any, uri: str) -> None:
    settings = {**SETTINGS, "wal": {"read_lease": "30s"}}
    with open_small(regions=1, wal={"read_lease": "30s"}) as table:
        table.put(made.rows(range(3)))
        assert table.count() == 3
    with memwal.open(uri, settings=settings) as table:
        began = time.monotonic()
        table.put(made.rows([3]))
        assert time.monotonic() - began < 25  # otherwise it waits 33 s
        assert table.count() == 4


def test_reads_of_an_idle_region_cost_a_request_for_each_lease_and_no_write(
    open_small: Callable[..., Any], made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = open_small(regions=1, wal={"read_lease": "60s"})
    table.put(made.rows(range(3)))
    asked: list[str] = []
    for name in ("get", "put", "put_if_absent", "list"):
        original = getattr(wal.LocalStore, name)

        def noted(self: Any, *args: Any, name: str = name, original: Any = original, **rest: Any) -> Any:
            if "_mem_wal" in args[0]:
                asked.append(f"{name} {args[0]}")
            return original(self, *args, **rest)

        monkeypatch.setattr(wal.LocalStore, name, noted)
    for _ in range(50):
        assert table.get([1]).num_rows == 1
    assert asked == []
