"""Which regions a table has, by the sharding spec in Lance's MemWAL index.

Ids are LanceDB's (`wal.layout`), so that whoever follows the spec finds the region of a row where we do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import UUID

from flush.errors import UnsupportedTable
from wal import bucket_region
from wal.layout import UNSHARDED_REGION

Regions = tuple[UUID, ...]
"""Ids of a table's regions: that of bucket n at n."""


def bucket_regions(buckets: int) -> Regions:
    """The regions of `buckets` buckets of the first key column."""
    return tuple(map(bucket_region, range(buckets)))


def published_regions(uri: str, details: Mapping[str, Any], key: str, key_field_id: int) -> Regions:
    """The regions of the table at `uri` by the sharding spec in the `details` of its MemWAL index.

    `key`: its first key column, which has the field id `key_field_id`. Raises UnsupportedTable where rows are not
    sharded by buckets of that column, and not unsharded.
    """
    specs = details["sharding_specs"]
    if len(specs) != 1 or len(specs[0]["fields"]) != 1:
        raise _unsupported(uri, f"has {len(specs)} sharding specs", key)
    (field,) = specs[0]["fields"]
    if field["transform"] == "unsharded":
        return (UNSHARDED_REGION,)
    if field["transform"] != "bucket":
        raise _unsupported(uri, f"is sharded by {field['transform'] or 'an expression'}", key)
    if field["source_ids"] != [key_field_id]:
        raise _unsupported(uri, f"is sharded by the columns with the field ids {field['source_ids']}", key)
    return bucket_regions(int(field["parameters"]["num_buckets"]))


def _unsupported(uri: str, what: str, key: str) -> UnsupportedTable:
    return UnsupportedTable(
        f"{uri}: its MemWAL was initialised by another program and {what}; memwal needs buckets of the first key "
        f"column {key!r}, or no sharding: copy the rows into a new table"
    )
