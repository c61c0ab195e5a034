"""What a commit does to the base table, read from the SSTs it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from flush.commit_plan import RegionPlan
from flush.newest import newest_per_key
from flush.sst import read_sst
from memtable import TOMBSTONE
from wal import ObjectStore


@dataclass(frozen=True)
class Changes:
    """Keys to delete and rows to upsert, each key at most once in the two together.

    `deletes` has the key columns, `upserts` the base schema with its nullability and field metadata, no
    `_tombstone`.
    """

    deletes: pa.Table
    upserts: pa.Table


def read_changes(
    store: ObjectStore, plans: Sequence[RegionPlan], base_schema: pa.Schema, key: Sequence[str]
) -> Changes:
    """The newest row of each key over the SSTs of `plans`, tombstones apart. One key never is in two regions.

    Keys are read first, so that rows which a later generation replaces are read only where an SST holds
    newest rows beside them. Raises Corrupt where an SST is missing or short; ValueError where a row is null
    in a column that the base table declares not null.
    """
    key_schema = pa.schema([base_schema.field(name) for name in key])
    deletes, upserts = [key_schema.empty_table()], [base_schema.empty_table()]
    for plan in plans:
        keys = [read_sst(store, plan.region, sst, [*key, TOMBSTONE]) for sst in plan.ssts]
        for sst, rows, newest in zip(plan.ssts, keys, newest_per_key(keys, key), strict=True):
            deletes.append(rows.filter(pa.array(newest.deletes)).select(list(key)).cast(key_schema))
            if newest.upserts.any():
                whole = read_sst(store, plan.region, sst, base_schema.names)
                upserts.append(whole.filter(pa.array(newest.upserts)).cast(base_schema))
    return Changes(pa.concat_tables(deletes), pa.concat_tables(upserts))
