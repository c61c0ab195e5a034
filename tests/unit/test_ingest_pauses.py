"""Pauses of a table: which of two operators wins, what survives, the meaning of a broken note, and the gate of
micro-batches."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path
from typing import Any

import pytest

from memwal.ingest.engine.table.pauses import LOOK_EVERY, Paused, Pauses, PauseWatch, merged, text_of
from memwal.ingest.errors import Unavailable
from memwal.ingest.settings.load import Settings
from memwal.ingest.spark.pipeline.pausing import Gate, Pausing
from memwal.wal import PutOutcome, StoreUnavailable, WalOptions
from memwal.wal.layout import paused_key
from tests.conftest import PATIENCE, wait_until
from tests.messages import raises
from tests.support.clock import FakeClock
from tests.support.memory_store import MemoryStore


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def test_the_first_of_two_operators_pauses_and_the_other_is_told_of_it(store: MemoryStore) -> None:
    clock = FakeClock()
    one, two = Pauses(store, clock), Pauses(store, clock)
    found, new = one.pause("commits", "one@here", "the table  is\nrewritten")
    assert new
    clock.advance(60)
    assert two.pause("commits", "two@there", "another reason") == (found, False)
    assert two.now() == {"commits": {"since": found.since, "by": "one@here", "reason": "the table is rewritten"}}
    assert two.pause("ingestion", "two@there")[1], "each is paused by itself"
    assert Pauses(store, clock).resume("commits") == found, "another process, later"
    assert one.resume("commits") is None
    assert list(one.now()) == ["ingestion"]


def test_a_resume_ends_the_pause_that_it_has_read_and_no_later_one(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the read and the write of a resume, another operator ends the same pause and begins the next one."""
    one, two, clock = Pauses(store, FakeClock()), Pauses(store, FakeClock()), FakeClock()
    one.pause("ingestion", "one@here", "upgrade")
    left = [1]

    def other_operator() -> None:
        if left:
            left.clear()
            assert two.resume("ingestion") is not None
            assert two.pause("ingestion", "two@there", "migration")[1]

    for name in ("put_if_absent", "delete"):
        real = getattr(store, name)
        monkeypatch.setattr(store, name, lambda *given, real=real: (other_operator(), real(*given))[1])
    one.resume("ingestion")
    assert Pauses(store, clock).now()["ingestion"]["by"] == "two@there"


def test_pauses_follow_each_other(store: MemoryStore) -> None:
    clock = FakeClock()
    pauses, other = Pauses(store, clock), Pauses(store, clock)
    for number in range(5):
        assert pauses.now() == other.now() == Pauses(store, clock).now() == {}
        found, new = (pauses, other)[number % 2].pause("commits", f"{number}@here")
        assert new
        told = {"commits": found.told()}
        assert pauses.now() == other.now() == Pauses(store, clock).now() == told
        assert other.resume("commits") == found
        assert pauses.resume("commits") is None


def test_a_pause_whose_answer_was_lost_is_still_ours(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    real, lost = store.put_if_absent, iter([PutOutcome.OUTCOME_UNKNOWN])
    monkeypatch.setattr(store, "put_if_absent", lambda *given: next(lost, real(*given)))
    found, new = Pauses(store, FakeClock()).pause("ingestion", "one@here")
    assert new
    assert Pauses(store, FakeClock()).resume("ingestion") == found


def test_storage_that_does_not_answer_pauses_nothing(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "put_if_absent", lambda *_: PutOutcome.UNAVAILABLE)
    with raises(StoreUnavailable):
        Pauses(store, FakeClock(), options=WalOptions(1.0, 2.0)).pause("ingestion", "one@here")
    assert Pauses(store, FakeClock()).now() == {}


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"since": "noon"}', b"[" * 100_000])
def test_a_note_that_cannot_be_read_pauses_and_can_be_removed(store: MemoryStore, data: bytes) -> None:
    store.put(paused_key("ingestion"), data)
    pauses = Pauses(store, FakeClock())
    told = pauses.now()["ingestion"]
    assert text_of("ingestion", told) == "ingestion is paused: its note beside the table cannot be read"
    assert pauses.resume("ingestion") is not None
    assert pauses.now() == {}


@pytest.mark.parametrize("since", ["NaN", "Infinity", "-Infinity", "1e300", "1e17", "1" + "0" * 400, '"noon"', "null"])
def test_a_time_that_is_none_is_left_out(store: MemoryStore, since: str) -> None:
    """Any program may write a note. The main thread of a run prints it, so a broken time must not raise."""
    note = f'{{"since": {since}, "by": "one@here", "reason": "moved", "id": "a"}}'
    store.put(paused_key("ingestion"), note.encode())
    told = Pauses(store, FakeClock()).now()["ingestion"]
    assert told == {"since": 0.0, "by": "one@here", "reason": "moved"}
    said = "ingestion is paused by one@here: moved"
    assert text_of("ingestion", told) == text_of("ingestion", told | {"since": float("inf")}) == said


def test_nothing_of_a_note_acts_on_a_terminal(store: MemoryStore) -> None:
    pauses = Pauses(store, FakeClock())
    pauses.pause("ingestion", "one@here", "brokers\x1b[2J\nare\x07 moved\u202e")
    assert pauses.now()["ingestion"]["reason"] == "brokers[2J are moved"
    note = json.dumps({"since": 0, "by": "\x1b]0;root\x07one@here", "reason": "\x9bmoved", "id": "a"})
    store.put(paused_key("commits"), note.encode())
    assert text_of("commits", pauses.now()["commits"]) == "commits are paused by ]0;rootone@here: moved"


def test_a_pause_is_told_in_one_line() -> None:
    told = {"since": 1_795_645_266.8, "by": "one@here", "reason": "brokers are moved"}
    assert (
        text_of("ingestion", told) == "ingestion is paused since 2026-11-25 22:21:06 UTC by one@here: brokers are moved"
    )
    assert text_of("commits", told | {"reason": ""}) == "commits are paused since 2026-11-25 22:21:06 UTC by one@here"


def test_storage_is_looked_at_only_so_often(store: MemoryStore, caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    watch = PauseWatch(store, clock)
    assert watch.recent() == {}
    Pauses(store, clock).pause("commits", "one@here")
    assert watch.recent() == {}
    clock.advance(LOOK_EVERY)
    with caplog.at_level(logging.INFO, "memwal.pauses"):
        assert list(watch.recent()) == list(watch.last) == ["commits"]
        Pauses(store, clock).resume("commits")
        assert watch.look() == {}
    assert [record.event for record in caplog.records] == ["paused", "resumed"]  # type: ignore[attr-defined]


class Failing:
    """Storage that fails the next `reads` reads, and every read while it is `away`."""

    def __init__(self, store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reads, self.away, self.asked, self._get = 0, False, 0, store.get
        monkeypatch.setattr(store, "get", self._read)

    def _read(self, key: str) -> bytes | None:
        self.asked += 1
        if self.away or self.reads:
            self.reads -= not self.away
            raise StoreUnavailable("away")
        return self._get(key)


@pytest.fixture
def failing(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> Failing:
    return Failing(store, monkeypatch)


def test_storage_that_fails_is_asked_no_more_often(store: MemoryStore, failing: Failing) -> None:
    clock = FakeClock()
    Pauses(store, clock).pause("commits", "one@here")
    watch = PauseWatch(store, clock)
    assert list(watch.recent()) == ["commits"]
    clock.advance(LOOK_EVERY)
    failing.away, failing.asked = True, 0
    with pytest.raises(StoreUnavailable):
        watch.recent()
    assert list(watch.recent()) == ["commits"], "what was paused counts on"
    assert failing.asked == 1


def test_nothing_counts_as_not_paused_before_storage_has_said_so(store: MemoryStore, failing: Failing) -> None:
    """A daemon that starts while storage fails must not commit a table whose commits are paused."""
    clock = FakeClock()
    Pauses(store, clock).pause("commits", "one@here")
    watch = PauseWatch(store, clock)
    failing.away = True
    for _ in range(2):
        with pytest.raises(StoreUnavailable):
            watch.recent()
        assert watch.last == {}
    failing.away = False
    assert list(watch.recent()) == ["commits"]
    failing.reads = 2
    other = PauseWatch(store, clock)
    assert list(other.recent()) == ["commits"], "it is asked again at once"
    assert failing.reads == 0


def test_who_asks_during_the_first_look_waits_for_it(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, began, go_on = FakeClock(), threading.Event(), threading.Event()
    Pauses(store, clock).pause("commits", "one@here")
    get = store.get

    def slow(key: str) -> bytes | None:
        began.set()
        assert go_on.wait(PATIENCE)
        return get(key)

    monkeypatch.setattr(store, "get", slow)
    watch, told = PauseWatch(store, clock), list[Paused]()
    asking = [threading.Thread(target=lambda: told.append(watch.recent())) for _ in range(2)]
    asking[0].start()
    assert began.wait(PATIENCE)
    asking[1].start()
    asking[1].join(0.05)
    go_on.set()
    for each in asking:
        each.join()
    assert [list(each) for each in told] == [["commits"], ["commits"]]


def test_a_run_that_ends_commits_by_its_last_look_if_storage_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = Settings.model_validate({"table": {"uri": str(tmp_path / "rows.lance")}})
    pausing = Pausing(settings, {}, FakeClock())
    pauses = pausing.watch.pauses
    assert pausing.held("commits") is None
    real = pauses.now

    def away(**_: Any) -> dict[str, Any]:
        raise StoreUnavailable("away")

    monkeypatch.setattr(pauses, "now", away)
    assert pausing.held("commits") is None, "it commits"
    assert "cannot look whether commits are paused, going by the last look: away" in caplog.text
    monkeypatch.setattr(pauses, "now", real)
    pauses.pause("commits", "one@here")
    assert pausing.held("commits") == pausing.watch.last["commits"]
    monkeypatch.setattr(pauses, "now", away)
    assert pausing.held("commits") == pausing.watch.last["commits"]


def test_what_one_daemon_has_seen_counts() -> None:
    told = {"since": 1.0, "by": "", "reason": ""}
    assert merged([{}, {"commits": told}, {"ingestion": told}]) == {"commits": told, "ingestion": told}


# ---- the gate ------------------------------------------------------------------------------------------------------


class Batches:
    """Micro-batches that begin one after the other, as Spark begins them."""

    def __init__(self) -> None:
        self.gate, self.written, self.failed = Gate(), list[int](), list[Any]()
        self._write = self.gate.before(lambda _, batch: self.written.append(batch))

    def begin(self, batch: int) -> threading.Thread:
        thread = threading.Thread(target=self._begun, args=(batch,))
        thread.start()
        return thread

    def _begun(self, batch: int) -> None:
        try:
            self._write(None, batch)  # type: ignore[arg-type]
        except Unavailable as error:
            self.failed.append((batch, error.message))


def test_a_closed_gate_holds_a_micro_batch_until_it_is_opened() -> None:
    batches = Batches()
    batches.gate.close()
    waiting = batches.begin(0)
    wait_until(lambda: batches.gate.holds)
    assert batches.written == []
    batches.gate.open()
    waiting.join()
    assert (batches.written, batches.failed, batches.gate.holds) == ([0], [], False)


def test_a_micro_batch_whose_query_is_stopped_fails_and_never_counts_as_written() -> None:
    """Spark records a micro-batch as done when its function returns, so the function must raise."""
    batches = Batches()
    batches.gate.close()
    waiting = batches.begin(0)
    wait_until(lambda: batches.gate.holds)
    batches.gate.leave()
    waiting.join()
    batches.begin(1).join()
    assert batches.written == []
    assert [batch for batch, _ in batches.failed] == [0, 1]
    batches.gate.open()
    batches.begin(0).join()
    assert batches.written == [0]


def test_a_query_that_is_stopped_for_another_reason_leaves_the_gate_open() -> None:
    batches = Batches()
    batches.gate.leave()
    batches.begin(0).join()
    assert batches.written == [0]
