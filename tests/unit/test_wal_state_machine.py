"""The log against a list: claims, appends, faults, flushes, collection and old writers that wake, in any order.

Replay must return the list: every acknowledged row, in order, and of the rows without an answer only those that the log
holds. Rows are numbers; each is appended once.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache

import pyarrow as pa
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from memwal.wal import (
    BatchPart,
    Claim,
    Fenced,
    LanceCodec,
    ManifestStore,
    OutcomeUnknown,
    Poisoned,
    PutOutcome,
    StoreUnavailable,
    WalAppender,
    WalCollector,
    WalOptions,
    bucket_region,
    claim,
    read_tail,
)
from tests.log_rows import SCHEMA
from tests.support.clock import FakeClock, SeededIds
from tests.support.memory_store import MemoryStore

REGION = bucket_region(0)
OPTIONS = WalOptions(put_timeout=1.0, retry_budget=2.0)
FAULTS = st.lists(
    st.sampled_from(["lands, no answer", "no answer", "lands later", "unavailable", "own retry"]), max_size=2
) | st.sampled_from([[], [], ["no answer for long"], ["away for long"]])


class RememberingCodec(LanceCodec):
    """Decodes each entry once: the invariant reads the whole tail after each step, and entries never change."""

    def __init__(self) -> None:
        super().__init__(SCHEMA)
        self.decode = cache(self.decode)  # type: ignore[method-assign]
        self.header = cache(self.header)  # type: ignore[method-assign]


CODEC = RememberingCodec()


class FaultyStore(MemoryStore):
    """A store that plays the given faults, one per put; faults "for long" last until the test removes them."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(clock.now)
        self.faults: list[str] = []
        self.late: list[tuple[str, bytes]] = []

    def put_if_absent(self, key: str, data: bytes) -> PutOutcome:
        fault = self.faults[0] if self.faults else ""
        if fault and not fault.endswith("for long"):
            self.faults.pop(0)
        if fault in ("unavailable", "away for long"):
            return PutOutcome.UNAVAILABLE
        if fault in ("no answer", "no answer for long"):
            return PutOutcome.OUTCOME_UNKNOWN
        if fault == "lands later":
            self.late.append((key, data))
            return PutOutcome.OUTCOME_UNKNOWN
        outcome = super().put_if_absent(key, data)
        if fault == "lands, no answer":
            return PutOutcome.OUTCOME_UNKNOWN
        return PutOutcome.ALREADY_EXISTS if fault == "own retry" else outcome


@dataclass
class Writer:
    """The writer of one claim; it is old after a newer claim, whether it has noticed that or not."""

    claimed: Claim
    appender: WalAppender
    applied: dict[str, int]
    open_parts: list[int] = field(default_factory=list)
    attempt: int = 0


class LogAgainstList(RuleBasedStateMachine):
    """A state machine of one region; `log` holds the acknowledged rows in order."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.store = FaultyStore(self.clock)
        self.ids = SeededIds(1)
        self.writers: list[Writer] = []
        self.log: list[tuple[int, int]] = []
        """(position, row) acknowledged."""
        self.open: set[int] = set()
        """Rows whose writer got no answer."""
        self.never: set[int] = set()
        """Rows whose writer got the answer that they were not written."""
        self.next_row = 0

    @rule(faults=FAULTS)
    def claims(self, faults: list[str]) -> None:
        self.store.faults = list(faults)
        with suppress(StoreUnavailable, OutcomeUnknown):
            claimed = claim(self.store, REGION, spec_id=1, codec=CODEC, ids=self.ids, clock=self.clock, options=OPTIONS)
            appender = WalAppender(
                self.store, REGION, claimed.guard, CODEC, claimed.next_position, self.ids, self.clock, OPTIONS
            )
            self.writers.append(Writer(claimed, appender, dict(claimed.applied)))
            self.replayed([row for entry in claimed.entries for row in entry.rows["id"].to_pylist()])
        self.store.faults = []

    @precondition(lambda self: self.writers)
    @rule(which=st.integers(0, 3), faults=FAULTS, rows=st.integers(1, 3))
    def appends(self, which: int, faults: list[str], rows: int) -> None:
        """Append with any writer, including old ones."""
        writer = self.writers[max(0, len(self.writers) - 1 - which)]
        self.put(writer, rows, faults, None)

    @precondition(lambda self: self.writers)
    @rule(faults=FAULTS, closes=st.booleans())
    def appends_a_part(self, faults: list[str], closes: bool) -> None:
        writer = self.writers[-1]
        if not writer.open_parts:
            writer.attempt += 1
        attempt = f"{len(self.writers)}-{writer.attempt}"
        self.put(writer, 1, faults, BatchPart("", 0, attempt, closes))

    def put(self, writer: Writer, count: int, faults: list[str], part: BatchPart | None) -> None:
        rows = list(range(self.next_row, self.next_row + count))
        self.next_row += count
        table = pa.table({"id": rows, "_tombstone": [False] * count}, schema=SCHEMA)
        generation = writer.claimed.manifest.current_generation
        newest = writer is self.writers[-1]
        self.store.faults = list(faults)
        try:
            position = writer.appender.append(table, generation=generation, applied={"w": rows[-1]}, part=part)
        except StoreUnavailable:
            self.never |= {*rows}
        except (Fenced, Poisoned, OutcomeUnknown):
            self.open |= {*rows, *writer.open_parts}
            writer.open_parts = []
        else:
            assert newest, f"epoch {writer.claimed.guard.epoch} was acknowledged after a newer claim"
            if part is not None and not part.closes:
                writer.open_parts += rows
                self.open |= {*rows}
            else:
                batch = [*(writer.open_parts if part is not None else []), *rows]
                self.log += [(position, row) for row in batch]
                self.open -= {*batch}
                if part is not None:
                    writer.open_parts = []
        self.store.faults = []

    @precondition(lambda self: self.writers and self.log)
    @rule(back=st.integers(0, 3))
    def flushes(self, back: int) -> None:
        """Let the owner record that every row up to the end of some write is in an SST."""
        writer = self.writers[-1]
        covers = self.log[-1 - min(back, len(self.log) - 1)][0]
        manifests = ManifestStore(self.store, REGION, ids=self.ids, clock=self.clock, options=OPTIONS)
        with suppress(Fenced):
            manifests.edit(
                writer.claimed.guard, lambda current: replace(current, replay_after=max(current.replay_after, covers))
            )

    @rule(age=st.sampled_from([0.0, 5.0]), seconds=st.sampled_from([0.0, 3.0, 60.0]))
    def collects(self, age: float, seconds: float) -> None:
        self.clock.advance(seconds)
        WalCollector(self.store, REGION, CODEC, self.clock, workers=1).collect(age)

    @precondition(lambda self: self.store.late)
    @rule()
    def a_late_put_lands(self) -> None:
        MemoryStore.put_if_absent(self.store, *self.store.late.pop(0))

    @precondition(lambda self: self.writers)
    @invariant()
    def replay_gives_what_was_acknowledged(self) -> None:
        manifest = ManifestStore(self.store, REGION).latest()
        assert manifest is not None
        entries, _ = read_tail(self.store, REGION, CODEC, manifest.replay_after, clock=self.clock, options=OPTIONS)
        self.compare([row for entry in entries for row in entry.rows["id"].to_pylist()], manifest.replay_after)

    def replayed(self, rows: list[int]) -> None:
        manifest = ManifestStore(self.store, REGION).latest()
        assert manifest is not None
        self.compare(rows, manifest.replay_after)

    def compare(self, found: list[int], after: int) -> None:
        """Assert that `found` holds the acknowledged rows above position `after`, in order, and no other rows than open
        ones."""
        acked = [row for position, row in self.log if position > after]
        everything = {row for _, row in self.log}
        assert len(found) == len(set(found)), "a row twice"
        assert not self.never & {*found}, "a row that was answered with 'nothing was written'"
        assert [row for row in found if row in everything and row not in self.open] == acked
        assert {*found} <= everything | self.open


RUN = settings(stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))


def test_a_log_is_a_list() -> None:
    run_state_machine_as_test(LogAgainstList, settings=RUN)
