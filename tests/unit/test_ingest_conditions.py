"""Deletes with a condition in one region without a thread: the rows that they see, the entries in the log, and the
callers that get an error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from memwal import wal
from memwal.ingest.engine.api.filter_writes import Where
from memwal.ingest.engine.api.tokens import Token
from memwal.ingest.engine.read.levels import BaseChanged, RegionView, Stack
from memwal.ingest.engine.read.merged import MergedView
from memwal.ingest.engine.read.top_k import concatenate
from memwal.ingest.engine.region.admission import Admission
from memwal.ingest.engine.region.core import RegionCore
from memwal.ingest.engine.region.groups import Repeats, entry_sized
from memwal.ingest.engine.region.write_queue import Write
from memwal.memtable import TOMBSTONE, InvalidRows
from memwal.wal.applied import AppliedMap
from tests.messages import raises
from tests.region_contexts import region_context
from tests.support.clock import FakeClock

BASE = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("v", pa.string())])
REGION = wal.bucket_region(0)
SCANNED, CHANGED = 7, 8
"""Versions of the base: before the scan, and another one."""


class Region:
    """A region over a dict as base table. `looked_at`: the keys that were looked up in the base."""

    def __init__(self, root: Path, base: Mapping[int, str] = {}, **more: Any) -> None:
        self.base, self.version, self.looked_at = dict(base), SCANNED, list[int]()
        self.context = region_context(wal.LocalStore(root), BASE, clock=FakeClock(), find=self._find, **more)
        self.core = RegionCore.open(self.context, REGION)

    def _find(
        self, view: RegionView, keys: pa.Table, columns: Sequence[str], _shape: object, above: int | None = None
    ) -> pa.Table:
        if above not in (None, self.version):
            raise BaseChanged
        names = [name for name in columns if name != TOMBSTONE]
        merged = MergedView(SimpleNamespace(get=self.in_base), (Stack(view.memtables),), ["id"])  # type: ignore[arg-type]
        parts = [rows for rows, _ in merged.rows_of(keys, names, tombstones=True, base=above is None)]
        fields = [BASE.field(name) for name in names]
        return concatenate(parts, pa.schema([*fields, pa.field(TOMBSTONE, pa.bool_())])).select(list(columns))

    def in_base(self, keys: pa.Table, columns: list[str]) -> tuple[pa.Table, Any]:
        asked = keys["id"].to_pylist()
        self.looked_at += asked
        at = [number for number, id in enumerate(asked) if id in self.base]
        ids = [asked[number] for number in at]
        return pa.table({"id": ids, "v": [self.base[id] for id in ids]}, schema=BASE).select(columns), np.array(at, int)

    def serve(self, *writes: Write) -> None:
        self.core.serve(list(writes))

    def rows(self, core: RegionCore | None = None) -> dict[int, str]:
        """Return the rows that a reader sees."""
        found = dict(self.base)
        for snapshot in reversed((core or self.core).view().memtables):
            for row in snapshot.take(np.flatnonzero(snapshot.newest()), ["id", "v", TOMBSTONE]).to_pylist():
                found.pop(row["id"], None)
                if not row[TOMBSTONE]:
                    found[row["id"]] = row["v"]
        return found

    def replayed(self) -> dict[int, str]:
        """Return the rows that a reader sees after a crash."""
        return self.rows(RegionCore.open(self.context, REGION))


def put(*ids: int, v: str, **more: Any) -> Write:
    return Write(pa.table({"id": list(ids), "v": [v] * len(ids)}, schema=BASE), **more)


def delete(*ids: int, where: str = "v = 'old'", version: int = SCANNED, **more: Any) -> Write:
    keys = pa.table({"id": list(ids), "v": [None] * len(ids)}, schema=BASE)
    return Write(keys, deletes=True, where=Where(where, version), **more)


def counts(write: Write) -> tuple[int, int]:
    """Return the number of keys that a write deleted, and the number of keys that stayed."""
    counted = write.done.result().counts
    return counted.applied, counted.skipped


def test_each_sees_the_writes_before_it_in_one_call_and_none_behind_it(tmp_path: Path) -> None:
    region = Region(tmp_path)
    first, second = delete(1, 2, 3), delete(1, 2, 3)
    region.serve(
        put(1, 2, v="old"), put(2, 3, v="new"), first, put(1, v="new"), put(3, v="old"), second, put(3, v="old")
    )
    assert (counts(first), counts(second)) == ((1, 2), (1, 2))
    assert region.rows() == region.replayed() == {1: "new", 2: "new", 3: "old"}


def test_the_log_has_plain_tombstones(tmp_path: Path) -> None:
    region = Region(tmp_path)
    region.serve(put(1, 2, v="old"), put(2, v="new"), delete(1, 2))
    entries, _ = wal.read_tail(region.context.store, REGION, region.context.codec, 0)
    rows = [row for entry in entries for row in entry.rows.to_pylist()]
    assert [row["id"] for row in rows if row[TOMBSTONE]] == [1]


@pytest.mark.parametrize("version", [SCANNED, CHANGED])
def test_rows_of_the_base_are_looked_at_only_if_the_base_has_changed(tmp_path: Path, version: int) -> None:
    region = Region(tmp_path, base={1: "old", 2: "old", 3: "old", 4: "old"})
    region.serve(put(2, v="new"))
    region.serve(Write(pa.table({"id": [3], "v": [None]}, schema=BASE), deletes=True))
    region.version = version
    if version == CHANGED:
        region.base[4] = "changed by another program"
    asked = delete(1, 2, 3, 4)
    region.serve(asked)
    assert counts(asked) == ((2, 2) if version == SCANNED else (1, 3))
    assert region.looked_at == ([] if version == SCANNED else [1, 4])
    kept = {2: "new"} if version == SCANNED else {2: "new", 4: "changed by another program"}
    assert region.rows() == region.replayed() == kept


def test_a_change_that_lingers_is_durable_when_it_has_kept_its_row(tmp_path: Path) -> None:
    region = Region(tmp_path, base={1: "old"})
    region.serve(put(1, v="new", durable=False))
    assert region.replayed() == {1: "old"}
    region = Region(tmp_path, base={1: "old"})
    region.serve(put(1, v="new", durable=False), asked := delete(1))
    assert counts(asked) == (0, 1)
    assert region.replayed() == {1: "new"}


def test_a_region_that_was_fenced_keeps_no_row_by_what_it_remembers(tmp_path: Path) -> None:
    region = Region(tmp_path)
    region.serve(put(1, v="new"))
    RegionCore.open(region.context, REGION)
    with pytest.raises(wal.Fenced):
        region.serve(delete(1))


def test_a_piece_is_skipped_where_its_token_was_recorded_and_records_none(tmp_path: Path) -> None:
    region, token = Region(tmp_path), Token("cleaner", 3)
    region.serve(put(1, 2, v="old"))
    region.serve(one := delete(1, token=token), other := delete(2, token=token))
    assert [counts(each) for each in (one, other)] == [(1, 0), (1, 0)]
    assert region.core.applied("cleaner").newest is None
    region.serve(put(v="", token=token), put(1, v="old"), late := delete(1, token=token))
    assert not late.done.result().applied
    assert late.done.result().counts.repeated == 1
    assert region.replayed() == {1: "old"}
    assert RegionCore.open(region.context, REGION).applied("cleaner").newest == 3


def test_a_filter_that_fails_on_a_row_fails_its_write_alone(tmp_path: Path) -> None:
    region = Region(tmp_path)
    wrong, gone = delete(1, where="10 / (id - 1) > 0"), delete(1, where="nothing = 1")
    region.serve(put(1, v="old"), wrong, gone, fine := put(2, v="new"))
    for write in (wrong, gone):
        with raises(InvalidRows):
            write.done.result()
    assert fine.done.result().applied
    assert region.rows() == region.replayed() == {1: "old", 2: "new"}


def test_a_lookup_that_fails_writes_nothing(tmp_path: Path) -> None:
    region = Region(tmp_path, base={1: "old"})
    entries = region.core.status()["wal_position"]

    def fail(*_: object) -> pa.Table:
        raise wal.StoreUnavailable("storage hangs")

    region.in_base = fail  # type: ignore[method-assign]
    region.serve(asked := delete(1, version=CHANGED))
    assert isinstance(asked.done.exception(), wal.StoreUnavailable)
    assert region.core.status()["wal_position"] == entries


def test_one_with_a_condition_is_a_group_by_itself() -> None:
    writes = [put(1, v=""), put(2, v=""), delete(1), delete(2), put(3, v=""), put(4, v="")]
    runs = [list(map(writes.index, run)) for run in entry_sized(writes, 1 << 20)]
    assert runs == [[0, 1], [2], [3], [4, 5]]


def test_one_half_applied_at_a_resize_is_settled_by_its_empty_entry(tmp_path: Path) -> None:
    """Before the resize there were two regions, and the first one had not applied cleaner:4."""
    before = "memwal:before:2/0:cleaner"
    applied, token = AppliedMap({"cleaner": 4, before: 3}), Token("cleaner", 4)
    context = region_context(wal.LocalStore(tmp_path), BASE, route_into=lambda n, rows: rows["id"].to_numpy() % n)
    admission, repeats = Admission(context), Repeats(applied)
    piece = delete(1, 2, 3, 4, token=token)
    fresh, after = repeats.set_aside([piece], applied, admission)
    assert (fresh, piece.rows["id"].to_pylist(), dict(after)) == ([piece], [2, 4], dict(applied))
    assert repeats.half_applied("cleaner", after)
    fresh, after = repeats.set_aside([end := put(v="", token=token)], applied, admission)
    assert (fresh, dict(after)) == ([end], {"cleaner": 4})
    assert repeats.set_aside([put(v="", token=token)], after, admission)[0] == []
