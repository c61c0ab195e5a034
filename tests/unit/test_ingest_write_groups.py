"""Groups of writes, before any request to storage: which writes form a group, which are left out, and their answers."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from memwal import wal
from memwal.ingest.engine.api.tokens import Token
from memwal.ingest.engine.read.levels import RegionView
from memwal.ingest.engine.region.groups import Repeats, WriteGroup, WriteGroups, entry_sized
from memwal.ingest.engine.region.write_queue import Write
from memwal.wal.applied import AppliedMap
from tests.region_contexts import region_context
from tests.support.memory_store import MemoryStore

BASE = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("v", pa.string())])


def write(*ids: int | None, token: Token | None = None, durable: bool = True) -> Write:
    rows = pa.table({"id": pa.array(ids, pa.int64()), "v": pa.array([""] * len(ids), pa.string())}, schema=BASE)
    return Write(rows, durable, token)


def groups(**more: Any) -> WriteGroups:
    """Return the write groups of an empty region."""
    view = RegionView(wal.bucket_region(0), (), ())
    return WriteGroups(region_context(MemoryStore(), BASE, **more), Repeats({}), lambda: view)


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
