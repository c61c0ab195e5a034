"""Groups of writes in one region: which writes form a group, the write rules, tokens, failed lookups and replay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from memwal import wal
from memwal.flush import WriteRules
from memwal.ingest.engine.api.tokens import Token
from memwal.ingest.engine.read.levels import CaptureOvertaken, RegionView
from memwal.ingest.engine.region.admission import Admission
from memwal.ingest.engine.region.core import RegionCore
from memwal.ingest.engine.region.groups import Repeats, WriteGroup, WriteGroups, entry_sized
from memwal.ingest.engine.region.write_queue import Write
from memwal.ingest.errors import Unavailable
from memwal.memtable import InvalidRows
from memwal.wal.applied import AppliedMap
from tests.region_contexts import region_context
from tests.support.memory_store import MemoryStore

NAMED = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("v", pa.string())])


def write(*ids: int | None, token: Token | None = None, durable: bool = True) -> Write:
    rows = pa.table({"id": pa.array(ids, pa.int64()), "v": pa.array([""] * len(ids), pa.string())}, schema=NAMED)
    return Write(rows, durable, token)


def groups(**more: Any) -> WriteGroups:
    """Return the write groups of an empty region."""
    view = RegionView(wal.bucket_region(0), (), ())
    return WriteGroups(region_context(MemoryStore(), NAMED, **more), Repeats({}), lambda: view)


def ids(group: WriteGroup | None) -> list[int]:
    assert group is not None
    assert group.rows is not None
    found: list[int] = group.rows.rows.column("id").to_pylist()
    return found


def test_as_many_writes_go_together_as_an_entry_holds() -> None:
    writes = [write(*range(number)) for number in (10, 10, 100, 10, 10)]
    size = writes[0].rows.get_total_buffer_size()
    assert [list(map(writes.index, run)) for run in entry_sized(writes, 2 * size)] == [[0, 1], [2], [3, 4]]
    assert list(entry_sized(writes[2:3], 1)) == [writes[2:3]]
    assert list(entry_sized([], 1)) == []


def test_the_map_of_a_group_is_the_regions_and_its_own_tokens() -> None:
    before = {"loader": 3, "other": 1}
    group = groups().group([write(1, token=Token("loader", 4))], AppliedMap(before))
    assert group is not None
    assert group.applied == {"loader": 4, "other": 1}
    assert before["loader"] == 3, "the region's own map is as it was until the group is in the log"


def test_a_repeat_is_answered_with_the_group_and_named_the_newest() -> None:
    fresh, repeated = write(1, token=Token("loader", 4)), write(2, token=Token("loader", 2), durable=False)
    group = groups().group([fresh, repeated], AppliedMap({"loader": 3}))
    assert ids(group) == [1]
    assert group is not None
    assert group.durable
    group.acknowledge(7)
    assert (fresh.done.result().applied, fresh.done.result().newest) == (True, None)
    assert (repeated.done.result().applied, repeated.done.result().newest) == (False, 4)
    assert repeated.done.result().position == 7


@pytest.mark.parametrize(
    ("writes", "new"),
    [
        ([write(token=Token("loader", 4))], True),
        ([write(1, token=Token("loader", 3))], False),
        ([write(1, token=Token("loader", 3)), write(2, token=Token("loader", 4))], True),
        ([write(1)], False),
    ],
)
def test_the_map_is_another_object_if_and_only_if_the_group_has_a_new_token(writes: list[Write], new: bool) -> None:
    """The log uses the identity of the map to find out which maps it does not have yet."""
    before = AppliedMap({"loader": 3})
    group = groups().group(writes, before)
    assert group is not None
    assert (group.applied is not before, before["loader"]) == (new, 3)


BASE = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("v", pa.string()),
        pa.field("must", pa.int64(), nullable=False),
    ]
)
REGION = wal.bucket_region(0)


class Region:
    """A core whose lookups read its memtables and a dict as base table. `next`: errors of the next lookups."""

    def __init__(self, root: Path, upsert: Any) -> None:
        self.base: dict[int, dict[str, Any]] = {}
        self.asked: list[list[int]] = []
        self.next: list[Exception] = []
        self.store = wal.LocalStore(root)
        more = {"required": ("must",), "rules": WriteRules(upsert), "find": self.find}
        self.context = region_context(self.store, BASE, **more)
        self.core = RegionCore.open(self.context, REGION)
        self.admission = Admission(self.context)

    def find(
        self, view: RegionView, keys: pa.Table, columns: Sequence[str], shape: object, above: object = None
    ) -> pa.Table:
        self.asked.append(keys.column("id").to_pylist())
        if self.next:
            raise self.next.pop(0)
        live = {**self.base, **seen(view)}
        rows = [live[key] for key in self.asked[-1] if live.get(key) is not None]
        schema = pa.schema([BASE.field(name).with_nullable(name != "id") for name in columns])
        return pa.Table.from_pylist([{name: row[name] for name in columns} for row in rows], schema=schema)

    def put(self, rows: list[dict[str, Any]], **more: Any) -> Write:
        return Write(self.admission.conform(pa.Table.from_pylist(rows)), **more)

    def delete(self, *ids: int) -> Write:
        nothing = {"v": [None] * len(ids), "must": [None] * len(ids)}
        schema = pa.schema([field.with_nullable(field.name != "id") for field in BASE])
        return Write(pa.table({"id": list(ids), **nothing}, schema=schema), deletes=True)

    def serve(self, *writes: Write) -> list[Any]:
        """Serve the writes as one group. Return for each write its error, or the skipped rows of its ack."""
        self.core.serve(list(writes))
        return [write.done.exception() or write.done.result().skipped for write in writes]

    @property
    def rows(self) -> dict[int, Any]:
        """The live rows of the region's memtables, by key."""
        return {key: row for key, row in seen(self.core.view()).items() if row is not None}

    def entries(self) -> int:
        return sum("/wal/" in key for key in self.store.list(""))


def seen(view: RegionView) -> dict[int, dict[str, Any] | None]:
    """Return the newest row per key of a view's memtables, None for a deleted key."""
    found: dict[int, Any] = {}
    for snapshot in view.memtables:
        rows = snapshot.take(np.flatnonzero(snapshot.newest()), [*BASE.names, "_tombstone"]).to_pylist()
        for row in rows:
            found.setdefault(row["id"], None if row.pop("_tombstone") else row)
    return found


def row(id: int, v: str | None = "", must: int = 0) -> dict[str, Any]:
    return {"id": id, "v": v, "must": must}


@pytest.fixture
def inserts(tmp_path: Path) -> Region:
    return Region(tmp_path / "insert.lance", "insert")


@pytest.fixture
def merges(tmp_path: Path) -> Region:
    return Region(tmp_path / "merge.lance", "merge")


def test_a_group_is_one_entry_and_one_lookup_and_the_first_put_of_a_key_wins(inserts: Region) -> None:
    inserts.base[9] = row(9, "base")
    told = inserts.serve(
        inserts.put([row(1, "a"), row(9, "no")]),
        inserts.put([row(1, "b"), row(2, "b")]),
        inserts.delete(1),
        inserts.put([row(1, "c")]),
        inserts.put([row(1, "d"), row(2, "d")]),
    )
    assert told == [1, 1, 0, 0, 2]
    assert inserts.rows == {1: row(1, "c"), 2: row(2, "b")}
    assert inserts.entries() == 1
    assert [sorted(each) for each in inserts.asked] == [[1, 2, 9]]
    assert seen(RegionCore.open(inserts.context, REGION).view()) == inserts.rows


def test_a_token_that_is_repeated_in_its_group_is_no_second_put(inserts: Region, merges: Region) -> None:
    for region in (inserts, merges):
        first = region.put([row(1, "a")], token=Token("p", 1))
        again = region.put([row(1, "b"), row(2)], token=Token("p", 1))
        region.serve(first, again)
        assert (first.done.result().applied, again.done.result().applied) == (True, False)
        assert region.rows == {1: row(1, "a")}


def test_a_put_that_changes_nothing_is_acked_durably_and_its_token_is_remembered(inserts: Region) -> None:
    inserts.serve(inserts.put([row(1, "a")], durable=False))
    assert inserts.entries() == 0
    skipped = inserts.put([row(1, "b")], token=Token("p", 1))
    assert inserts.serve(skipped) == [1]
    # The row that the lookup found is made durable too: after a crash the key must not be free again.
    assert skipped.done.result().position == 1
    assert not inserts.core.lingers
    idle = inserts.put([row(1, "c")], token=Token("p", 2))
    assert inserts.serve(idle) == [1]
    assert inserts.entries() == 2, "an entry of the applied map alone, so that the token outlives a crash"
    inserts.serve(inserts.delete(1))
    late = Write(inserts.put([row(1, "d")]).rows, token=Token("p", 2))
    newer = RegionCore.open(inserts.context, REGION)
    newer.serve([late])
    assert not late.done.result().applied
    assert seen(newer.view()) == {1: None}


def test_columns_that_a_put_does_not_have_keep_what_is_stored(merges: Region) -> None:
    merges.base = {1: row(1, "base", 10), 2: row(2, "base", 20)}
    told = merges.serve(
        merges.put([{"id": 1, "v": "one"}, {"id": 2, "v": None}]),
        merges.put([{"id": 1, "must": 11}]),
        merges.delete(2),
        merges.put([{"id": 3, "must": 30}, {"id": 2, "must": 22}]),
        merges.put([{"id": 3, "v": "three"}]),
    )
    assert told == [0] * 5
    assert merges.rows == {1: row(1, "one", 11), 2: row(2, None, 22), 3: row(3, "three", 30)}
    assert (merges.entries(), len(merges.asked)) == (1, 1)
    assert seen(RegionCore.open(merges.context, REGION).view()) == merges.rows  # whole rows are in the log


def test_whole_rows_and_deletes_ask_for_nothing(merges: Region, inserts: Region) -> None:
    merges.serve(merges.put([row(1, "a")]), merges.delete(1), merges.put([row(2, "b")]))
    inserts.serve(inserts.delete(1, 2))
    inserts.serve(inserts.delete(3), inserts.put([row(3)]))
    assert merges.asked == inserts.asked == []


def test_a_write_that_lacks_what_it_needs_is_refused_alone_and_what_built_on_it_too(merges: Region) -> None:
    merges.base = {1: row(1, "base", 10)}
    fine = merges.put([{"id": 1, "v": "fine"}])
    new = merges.put([{"id": 6, "must": 1}, {"id": 1, "must": 1}])
    lacks = merges.put([{"id": 1, "v": "x"}, {"id": 5, "v": "x"}])
    builds = merges.put([{"id": 5, "v": "y"}])
    whole = merges.put([row(5, "z", 5)])
    after = merges.put([{"id": 5, "v": "after"}])
    told = merges.serve(fine, new, lacks, builds, whole, after)
    for error in told[2:4]:
        assert isinstance(error, InvalidRows)
        assert "required column 'must' is missing, and the key id = 5 is not stored" in str(error)
    assert told[:2] + told[4:] == [0] * 4
    assert merges.rows == {1: row(1, "fine", 1), 6: row(6, None, 1), 5: row(5, "after", 5)}
    assert merges.entries() == 1


def test_a_chain_of_refused_writes_is_refused_link_by_link(merges: Region) -> None:
    """All writes have one token. Once a write is refused, the next one is not a repeat but the token's first write, so
    the group needs more than a thousand rounds."""
    writes = [merges.put([{"id": 1, "v": str(n)}], token=Token("p", 1)) for n in range(1200)]
    told = merges.serve(*writes, whole := merges.put([row(1, "whole")]))
    assert all(isinstance(error, InvalidRows) for error in told[:-1])
    assert whole.done.result().applied
    assert merges.rows == {1: row(1, "whole")}


def test_faults_of_their_own_are_told_by_the_writes_own_row_numbers(merges: Region, inserts: Region) -> None:
    schema = pa.schema([field.with_nullable(True) for field in BASE])
    nulls = pa.Table.from_pylist([row(1), {**row(2), "must": None}], schema=schema)
    for region in (merges, inserts):
        faulty = Write(region.admission.conform(nulls))
        told = region.serve(region.put([row(3, "x")]), faulty, region.put([row(4, "y")]))
        assert isinstance(told[1], InvalidRows)
        assert (told[1].column, told[1].row) == ("must", 1)
        assert set(region.rows) == {3, 4}


def test_a_lookup_that_fails_costs_its_callers_an_error_and_the_region_nothing(inserts: Region) -> None:
    inserts.serve(inserts.put([row(1, "a")]))
    for error in (wal.StoreUnavailable("no answer"), OSError("read"), wal.Corrupt("bad")):
        inserts.next = [error]
        writes = [inserts.put([row(1, "b")], token=Token("p", 1)), inserts.put([row(2)])]
        assert inserts.serve(*writes) == [error, error]
        assert all(write.copied for write in writes)
    assert (inserts.entries(), inserts.core.failure) == (1, None)
    retried = inserts.put([row(2, "b")], token=Token("p", 1))
    assert inserts.serve(retried) == [0]
    assert retried.done.result().applied


def test_a_view_that_a_commit_overtook_is_captured_again(inserts: Region) -> None:
    inserts.base[1] = row(1)
    inserts.next = [CaptureOvertaken(), CaptureOvertaken()]
    assert inserts.serve(inserts.put([row(1)])) == [1]
    assert len(inserts.asked) == 3
    inserts.next = [CaptureOvertaken()] * 100
    (error,) = inserts.serve(inserts.put([row(1)]))
    assert isinstance(error, Unavailable)
    inserts.next = []
    assert inserts.serve(inserts.put([row(1)])) == [1]


def test_what_is_frozen_between_two_groups_is_found(inserts: Region, merges: Region) -> None:
    for region in (inserts, merges):
        region.serve(region.put([row(1, "a", 7)]))
        region.core.freeze()
    assert inserts.serve(inserts.put([row(1, "b")])) == [1]
    assert merges.serve(merges.put([{"id": 1, "v": "b"}])) == [0]
    assert (inserts.rows, merges.rows) == ({1: row(1, "a", 7)}, {1: row(1, "b", 7)})


def test_a_failed_append_leaves_keys_free(inserts: Region, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(key: str, data: bytes) -> wal.PutOutcome:
        raise wal.StoreRefused("no such bucket")

    with monkeypatch.context() as broken:
        broken.setattr(inserts.store, "put_if_absent", refuse)
        (error,) = inserts.serve(inserts.put([row(1, "a")]))
        assert isinstance(error, wal.StoreRefused)
    assert inserts.serve(inserts.put([row(1, "b")])) == [0]
    assert inserts.rows == {1: row(1, "b")}


def test_callers_memory_is_not_looked_at_once_a_write_counts_as_copied(merges: Region) -> None:
    """After a refusal the group resolves the other writes again. A caller that gave up by then may reuse its arrays."""
    ids = np.array([1, 2])
    patient = Write(merges.admission.conform(pa.table({"id": ids, "v": ["a", "b"], "must": [1, 2]})))
    finding = merges.find

    def meddle(
        view: RegionView, keys: pa.Table, columns: Sequence[str], shape: object, above: object = None
    ) -> pa.Table:
        assert patient.copied
        ids[:] = 99
        return finding(view, keys, columns, shape, above)

    context = replace(merges.context, find=meddle)
    merges.core = RegionCore.open(context, REGION)
    told = merges.serve(patient, merges.put([{"id": 7, "v": "new"}]))
    assert isinstance(told[1], InvalidRows)
    assert merges.rows == {1: row(1, "a", 1), 2: row(2, "b", 2)}
