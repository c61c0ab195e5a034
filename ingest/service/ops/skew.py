"""Detect an uneven distribution of rows over regions: measured by rows, and predicted by the key. Pure functions.

A region has one writer, so a table whose rows go to one region is as slow as a table with one region.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from memwal.flush import BaseTable
from memwal.ingest.settings.load import Settings

LEAST_ROWS = 10_000
"""Tables with fewer rows than this, in all regions together, are not judged."""
FACTOR = 10
"""How many times the mean of the other regions a region must have to be reported."""
_REMEDY = (
    "copy the rows into a new table of wal.format = 'lance', which is routed by the whole key, or put the key column "
    "with the most values first"
)


def measured(regions: Sequence[Mapping[str, Any]]) -> str:
    """Return what is wrong with the distribution of rows over the `regions` of a table's status; "" if nothing is.

    Counts the larger of the rows that the owners received since their claims and the rows that are not committed yet.
    """
    rows = {int(region["bucket"]): max(int(region.get("rows_put", 0)), _uncommitted(region)) for region in regions}
    total = sum(rows.values())
    if len(rows) < 2 or total < LEAST_ROWS:
        return ""
    bucket = max(rows, key=lambda each: rows[each])
    if rows[bucket] * (len(rows) - 1) < FACTOR * (total - rows[bucket]):
        return ""
    share = 100 * rows[bucket] / total
    return (
        f"region {bucket} has {share:.0f} % of the last {total:,} rows, so the other regions do not help; {_REMEDY} "
        "(without a key: name more columns in regions.by)"
    )


def by_key(settings: Settings, base: BaseTable | None) -> str:
    """Return why the first key column alone decides the region of a row; "" if it does not, or if there is one
    region.

    `base`: the table; None if it does not exist yet.
    """
    if base is None:
        key, regions = tuple(settings.table.key), settings.regions.first
        first_only = settings.wal.format == "arrow"
    else:
        key, regions, first_only = base.key, base.buckets, base.hashed == base.key[:1]
    if len(key) < 2 or regions < 2 or not first_only:
        return ""
    return (
        f"the first key column {key[0]!r} alone decides which of the {regions} regions a row goes to: if it has few "
        f"values, {_REMEDY}"
    )


def _uncommitted(region: Mapping[str, Any]) -> int:
    flushed = sum(int(sst["rows"] or 0) for sst in region["ssts"] if not sst.get("committed"))
    return int(region["memtable_rows"]) + flushed
