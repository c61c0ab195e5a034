"""The applied maps of a table's regions, carried over to regions among which the keys are spread anew.

A region remembers per producer the highest sequence that it applied. After a resize the rows of one old region lie in
any of the new ones, so all of them begin with the same map: the highest sequence of each producer. Old regions that had
not got so far, because a micro-batch is half applied or had no rows for them, are exceptions, kept in the same map:

    memwal:before:{buckets}/{bucket}:{producer} = sequence       of rows that went to that bucket of so many, no more
                                                                 than this was applied (-1: nothing)
    memwal:before:4/2+8/5:{producer} = sequence                  of rows to which both apply: an exception from before
                                                                 an earlier resize that the regions do not agree on

A write whose token counts as applied is cut down to the rows that an exception lets through (`left_over`), so a replay
of a half-applied micro-batch is completed, whatever the table was resized to meanwhile. Exceptions of a producer end
with its next sequence: its writes are in order, so what came before is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flush.sharding import Buckets

PREFIX = "memwal:before:"
"""No producer's name begins so."""
Applied = Mapping[str, int]
RouteInto = Callable[[int, pa.Table], Buckets]
"""Buckets of rows where a table has so many: `BaseTable.route_into`."""


class _Exception(NamedTuple):
    key: str
    rows: tuple[tuple[int, int], ...]
    """Number of buckets and bucket: the rows meant are in all of them."""
    applied: int


def carried(maps: Sequence[Applied]) -> dict[str, int]:
    """The map that every new region begins with. `maps`: those of the old regions, that of bucket n at n. Pure."""
    producers = sorted({name for each in maps for name in each if not name.startswith(PREFIX)})
    found: dict[str, int] = {}
    for producer in producers:
        found[producer] = max(each.get(producer, -1) for each in maps)
        found |= _exceptions_of_all(maps, producer, found[producer])
    return found


def with_exceptions(applied: Applied) -> frozenset[str]:
    """The producers that have any."""
    return frozenset(name.split(":", 3)[3] for name in applied if name.startswith(PREFIX))


def left_over(
    applied: Applied, producer: str, sequence: int, rows: pa.Table, route: RouteInto
) -> npt.NDArray[np.bool_]:
    """Which of `rows`, written under a token that counts as applied, were not applied: bool [rows]."""
    wanted = np.zeros(rows.num_rows, dtype=bool)
    for each in _exceptions(applied, producer):
        if each.applied < sequence:
            wanted |= np.logical_and.reduce([route(buckets, rows) == bucket for buckets, bucket in each.rows])
    return wanted


def settled(applied: Applied, producer: str, sequence: int) -> dict[str, int]:
    """The map once a write under this token is applied, or what was left over of it."""
    found, highest = dict(applied), applied.get(producer, -1)
    for each in _exceptions(applied, producer):
        if sequence >= highest:
            del found[each.key]
        else:
            found[each.key] = max(each.applied, sequence)
    found[producer] = max(highest, sequence)
    return found


def _exceptions(applied: Applied, producer: str) -> list[_Exception]:
    found = []
    for key, sequence in applied.items():
        if key.startswith(PREFIX):
            rows, name = key.removeprefix(PREFIX).split(":", 1)
            if name == producer:
                pairs = [tuple(map(int, pair.split("/"))) for pair in rows.split("+")]
                found.append(_Exception(key, tuple((buckets, bucket) for buckets, bucket in pairs), sequence))
    return found


def _exceptions_of_all(maps: Sequence[Applied], producer: str, highest: int) -> dict[str, int]:
    """Those of the old regions that are behind, and of those that have exceptions themselves."""
    own = [{each.key: each.applied for each in _exceptions(applied, producer)} for applied in maps]
    behind = [applied.get(producer, -1) for applied in maps]
    if all(each == highest for each in behind) and all(each == own[0] for each in own):
        return own[0]  # nothing was written since the last resize: they are as good as before
    found = {}
    for bucket, (sequence, exceptions) in enumerate(zip(behind, own, strict=True)):
        here = f"{len(maps)}/{bucket}"
        if sequence < highest:
            found[f"{PREFIX}{here}:{producer}"] = sequence
        for key, earlier in exceptions.items():
            found[f"{PREFIX}{here}+{key.removeprefix(PREFIX)}"] = earlier
    return found
