"""A region's streams of mixed puts and deletes, under every rule, compared with a dict that applies one row at a time.

Flush, commit, reopening and the death of the writer come in between; a repeated stream changes nothing.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

import memwal
from memwal import wal
from memwal.ingest.engine.api.tokens import Token
from memwal.ingest.errors import Invalid
from memwal.memtable import TOMBSTONE
from tests.messages import raises

SCHEMA = pa.schema(
    [
        pa.field("k", pa.string(), nullable=False),
        pa.field("v", pa.int64()),
        pa.field("must", pa.int64(), nullable=False),
        pa.field("text", pa.string()),
    ]
)
KEYS = st.sampled_from(["", "a", "b", "c", "d'e"])
REGION = wal.bucket_region(0)
SETTINGS = {"commit": {"interval": "0s"}, "wal": {"read_lease": "20ms"}}
"""A claim of a region whose owner is alive waits for the lease."""


@dataclass(frozen=True)
class Op:
    """One row of a stream."""

    key: str
    deletes: bool
    version: int | None
    value: int


PUTS = st.builds(Op, KEYS, st.just(False), st.integers(0, 5), st.integers(0, 99))
DELETES = st.builds(Op, KEYS, st.just(True), st.sampled_from([None, *range(6)]), st.integers(0, 99))
OPS = st.one_of(PUTS, PUTS, DELETES)


def stream(ops: list[Op], columns: list[str]) -> pa.Table:
    """Return the rows as Spark sends them; the other columns of a delete have no effect, null or not."""
    data: dict[str, Any] = {
        "k": [op.key for op in ops],
        "v": [op.version for op in ops],
        "must": [None if op.deletes else op.value for op in ops],
        "text": [f"text {op.value}" for op in ops],
    }
    fields = [SCHEMA.field(name).with_nullable(name != "k") for name in columns]
    deletes = pa.array([op.deletes or None for op in ops], pa.bool_())
    return pa.table([data[name] for name in columns], schema=pa.schema(fields)).append_column(TOMBSTONE, deletes)


class StreamsAgainstDict(RuleBasedStateMachine):
    """`model` holds the rows that `latest` must show after each step."""

    choices: ClassVar[dict[str, str]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.mkdtemp()
        self.uri = str(Path(self.directory) / "table.lance")
        self.model: dict[str, dict[str, Any]] = {}
        self.versions: dict[str, int] = {}  # of the newest row of a key, including deletes
        self.sequence = 0
        self.last: tuple[pa.Table, Token] | None = None

    @initialize()
    def create(self) -> None:
        settings = SETTINGS | {"table": self.choices}
        self.table = memwal.open(self.uri, schema=SCHEMA, key="k", regions=1, settings=settings)

    @rule(ops=st.lists(OPS, min_size=1, max_size=10), whole=st.booleans())
    def send(self, ops: list[Op], whole: bool) -> None:
        whole = whole or self.choices.get("upsert") != "merge"
        columns = SCHEMA.names if whole else ["k", "v", "must"]
        rows, token = stream(ops, columns), Token("stream", self.sequence)
        self.sequence += 1
        settled = self.settled(ops)
        if settled is None:
            with pytest.raises(Invalid):
                self.table.put_region(REGION, rows, token)
            return
        skipped = self.take(settled, whole)
        ack = self.table.put_region(REGION, rows, token)
        assert (ack.rows, ack.applied, ack.skipped) == (len(ops), True, skipped)
        self.last = rows, token

    @rule()
    def send_again(self) -> None:
        if self.last is not None:
            assert not self.table.put_region(REGION, *self.last).applied

    @rule(key=KEYS, value=st.integers(0, 99), version=st.integers(0, 5))
    def put_one(self, key: str, value: int, version: int) -> None:
        op = Op(key, False, version, value)
        skipped = self.take([op])
        assert self.table.put(stream([op], SCHEMA.names).drop_columns(TOMBSTONE)).skipped == skipped

    @rule(key=KEYS)
    def delete_one(self, key: str) -> None:
        self.take([Op(key, True, None, 0)])
        self.table.delete([key])

    @rule()
    def flush(self) -> None:
        self.table.flush()

    @rule()
    def commit(self) -> None:
        self.table.flush()
        self.table.commit()
        self.forget()

    @rule(dies=st.booleans())
    def reopen(self, dies: bool) -> None:
        old = self.table
        if not dies:
            old.close()
        self.table = memwal.open(self.uri, settings=SETTINGS, take_over=dies)
        if dies:  # the writer is fenced by now: its actions change nothing
            old.close()

    @invariant()
    def shows_the_model(self) -> None:
        read = self.table.scan().read_all().to_pylist()
        assert len(read) == len(self.model)
        assert {row["k"]: row for row in read} == self.model

    def teardown(self) -> None:
        if hasattr(self, "table"):
            self.table.close()
        shutil.rmtree(self.directory)

    # ---- the model -------------------------------------------------------------------------------------------------

    def settled(self, ops: list[Op]) -> list[Op] | None:
        """Return the rows that the rule for equal keys keeps of a stream; None if it rejects the stream."""
        if self.choices.get("on_duplicate", "last") == "last":
            return ops
        put: set[str] = set()
        left = []
        for op in ops:
            if op.deletes:
                put.discard(op.key)
            elif op.key in put:
                if self.choices["on_duplicate"] == "fail":
                    return None
                continue
            else:
                put.add(op.key)
            left.append(op)
        return left

    def take(self, ops: list[Op], whole: bool = True) -> int:
        """Apply the rows of one write, which have all columns or lack the text; return how many are left out."""
        skipped = 0
        runs: dict[str, bool] = {}  # whether the puts of a key since its last delete in this write are accepted
        for op in ops:
            if "version" in self.choices and op.version is not None:
                if op.version < self.versions.get(op.key, 0):
                    skipped += 1
                    continue
                self.versions[op.key] = op.version
            if op.deletes:
                runs.pop(op.key, None)
                self.model.pop(op.key, None)
                if op.version is None:
                    self.versions.pop(op.key, None)
            elif self.choices.get("upsert") != "insert" or runs.setdefault(op.key, op.key not in self.model):
                text = f"text {op.value}" if whole else self.model.get(op.key, {}).get("text")
                self.model[op.key] = {"k": op.key, "v": op.version, "must": op.value, "text": text}
            else:
                skipped += 1
        return skipped

    def forget(self) -> None:
        """Forget the versions of deleted keys: everything is in the base table, which has no tombstones."""
        self.versions = {key: version for key, version in self.versions.items() if key in self.model}


@pytest.mark.parametrize(
    "rules",
    [
        {},
        {"on_duplicate": "first"},
        {"upsert": "insert"},
        {"upsert": "insert", "on_duplicate": "fail"},
        {"upsert": "merge", "on_duplicate": "fail"},
        {"version": "v"},
        {"version": "v", "upsert": "merge"},
        {"version": "v", "on_duplicate": "first"},
    ],
    ids=lambda rules: "-".join(rules.values()) or "default",
)
def test_streams_of_puts_and_deletes_are_what_one_row_after_the_other_is(rules: dict[str, str]) -> None:
    machine = type("Machine", (StreamsAgainstDict,), {"choices": rules})
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine,
        settings=settings(
            max_examples=10,
            stateful_step_count=16,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.fixture
def merging(tmp_path: Path) -> Any:
    rules = {"upsert": "merge"}
    settings = {"commit": {"interval": "0s"}, "table": rules}
    with memwal.open(tmp_path / "t.lance", schema=SCHEMA, key="k", regions=1, settings=settings) as table:
        yield table


def test_columns_that_a_stream_does_not_have_are_kept_where_no_delete_comes_between(merging: Any) -> None:
    whole = [Op(key, False, 1, 1) for key in "abc"]
    merging.put_region(REGION, stream(whole, SCHEMA.names), None)
    partial = [
        Op("a", False, 2, 2),
        Op("b", True, 2, 2),
        Op("b", False, 3, 3),
        Op("c", True, 0, 0),
        Op("x", True, 0, 0),
    ]
    merging.put_region(REGION, stream(partial, ["k", "v", "must"]), None)
    found = {row.pop("k"): row for row in merging.scan().read_all().to_pylist()}
    assert found == {"a": {"v": 2, "must": 2, "text": "text 1"}, "b": {"v": 3, "must": 3, "text": None}}


def test_a_row_that_is_put_needs_its_required_columns_and_one_that_deletes_does_not(merging: Any) -> None:
    rows = stream([Op("a", True, 1, 1), Op("b", False, 1, 1)], SCHEMA.names)
    without = rows.set_column(2, rows.field(2), pa.nulls(2, pa.int64()))
    with raises(Invalid):
        merging.put_region(REGION, without, None)
    assert merging.put_region(REGION, without.slice(0, 1), None).applied
    assert merging.count() == 0


def test_a_delete_without_a_key_or_a_mark_that_is_none_is_refused_in_one_line(merging: Any, tmp_path: Path) -> None:
    rows = stream([Op("a", True, 1, 1)], SCHEMA.names)
    with raises(Invalid):
        merging.put_region(REGION, rows.set_column(4, TOMBSTONE, pa.array([1])), None)
    with raises(Invalid):
        merging.put_region(REGION, rows.set_column(0, "k", pa.nulls(1, pa.string())), None)
    with memwal.open(tmp_path / "append.lance", schema=SCHEMA, key=(), regions=1) as appends:
        with raises(Invalid):
            appends.put_region(REGION, rows, None)
        puts = stream([Op("a", False, 1, 1)] * 2, SCHEMA.names)
        assert appends.put_region(REGION, puts, None).applied
        assert appends.count() == 2
