"""Merge the applied maps of a table's old regions into the one map that all regions begin with after a resize.

A region remembers, per producer, the highest sequence that it applied. After a resize the rows of one old region may be
in any of the new ones, so all of them begin with the same map: the highest sequence of each producer. An old region may
be behind, because a micro-batch is half applied or had no rows for that region. Its rows are exceptions, kept in the
same map:

    memwal:before:{buckets}/{bucket}:{producer} = sequence - 1   rows that belonged to this bucket, of {buckets},
                                                                 lack the producer's highest sequence
    memwal:before:8/xfe:{producer} = sequence - 1                rows of any of several buckets: bit n of the
                                                                 hexadecimal number stands for bucket n
    memwal:before:4/2+8/x3:{producer} = sequence - 1             rows that match both: an exception from before an
                                                                 earlier resize that some regions have applied since

A write whose token counts as applied is reduced to the rows listed by an exception (`left_over`), so the replay of a
half-applied micro-batch completes it, whatever number of regions the table has by then.

Why one bit per row is enough. The writes of a producer are in order: it begins a sequence after every region has acked
the previous one. So if one region has applied sequence s, all rows of all sequences below s are applied, and rows can
only be missing of sequence s. Hence

 (1) a sequence below the highest is a repeat everywhere;
 (2) the exceptions of a producer end with its next sequence: at once in the region that applies it, at the next resize
     in all regions;
 (3) a region that applies the highest sequence has all of its rows, so its exceptions end too.

Why exceptions stay few. All regions of a routing begin with the same ones, and by (2) and (3) each region still has all
of them or none. So at the next resize a producer that has continued has only new exceptions, by the current number of
buckets; a producer that has not continued has the old ones and at most one more number of buckets. Each number of
buckets has one set. A producer that continues has one exception; a producer stuck in a half-applied micro-batch has one
with as many sets as the table has had different numbers of buckets since. Maps of older releases, which kept every
bucket separately with one sequence each, are also read, and joined into sets at the next resize.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from memwal.flush.base.sharding import Buckets
from memwal.wal.applied import NONE_RETIRED, PREFIX, AppliedMap, Snapshot, hashes, names_of, producer_of

Applied = Mapping[str, int]
RouteInto = Callable[[int, pa.Table], Buckets]
"""Buckets of rows, for a given number of buckets: `BaseTable.route_into`."""

Rows = tuple[tuple[int, int], ...]
"""Rows that match every pair (number of buckets, set of its buckets as one bit each); numbers ascend."""
Exceptions = Mapping[str, tuple[str, ...]]
"""Per producer, the map keys of its exceptions."""


def merged_map(maps: Sequence[Applied]) -> dict[str, int]:
    """Return the map that every new region begins with. `maps`: of the old regions, bucket n at index n. Pure.

    Keeps the order of the last changes, which determines the retirement of names: a name is as new as in the region
    where the fewest other names were changed after it.
    """
    highest: dict[str, int] = {}
    age: dict[str, int] = {}
    for applied in maps:
        for later, name in enumerate(reversed(names_of(applied))):
            highest[name] = max(highest.get(name, -1), applied[name])
            age[name] = min(age.get(name, later), later)
    exceptions = [exceptions_by_producer(applied) for applied in maps]
    merged: dict[str, int] = {}
    for producer in sorted(highest, key=lambda name: (-age[name], name)):
        merged[producer] = sequence = highest[producer]
        for rows in _behind(maps, exceptions, producer, sequence):
            merged[_key(rows, producer)] = sequence - 1
    return merged


def initial_map(maps: Sequence[AppliedMap]) -> AppliedMap:
    """Return `merged_map` without names that a region has retired: it cannot distinguish a repeat from a new write."""
    merged, retired = merged_map(maps), NONE_RETIRED
    for applied in maps:
        retired = np.union1d(retired, applied.snapshot.retired)
    if len(retired):
        is_retired = np.isin(hashes([producer_of(key) for key in merged]), retired)
        merged = {key: value for (key, value), out in zip(merged.items(), is_retired, strict=True) if not out}
    return AppliedMap(merged, Snapshot(retired=retired))


def exceptions_by_producer(applied: Applied) -> dict[str, tuple[str, ...]]:
    """Return the exceptions in `applied` by producer."""
    exceptions: dict[str, tuple[str, ...]] = {}
    for key in applied:
        if key.startswith(PREFIX):
            producer = producer_of(key)
            exceptions[producer] = (*exceptions.get(producer, ()), key)
    return exceptions


def left_over(
    applied: Applied, exceptions: Exceptions, producer: str, sequence: int, rows: pa.Table, route: RouteInto
) -> npt.NDArray[np.bool_]:
    """Return which of `rows`, written under a token that counts as applied, were not applied: bool [rows].

    `exceptions`: those that the region began with; one that is no longer in `applied` does not count.
    (model: Resize!Put)
    """
    wanted = np.zeros(rows.num_rows, dtype=bool)
    for key in exceptions.get(producer, ()) if sequence == applied.get(producer, -1) else ():
        if key in applied:
            wanted |= np.logical_and.reduce([_bits(bits, n)[route(n, rows)] for n, bits in _rows(key)])
    return wanted


def settle(applied: MutableMapping[str, int], exceptions: Exceptions, producer: str, sequence: int) -> None:
    """Record in `applied` that a write with this token, or the rest of it, is applied."""
    if sequence >= applied.get(producer, -1):
        for key in exceptions.get(producer, ()):
            if key in applied:
                del applied[key]
        applied[producer] = sequence


def _behind(maps: Sequence[Applied], exceptions: Sequence[Exceptions], producer: str, highest: int) -> set[Rows]:
    """Return the rows that lack the highest sequence of a producer."""
    regions: dict[Rows, int] = {}  # missing rows -> the regions that lack them, one bit each
    for bucket, applied in enumerate(maps):
        up_to_date = applied.get(producer, -1) == highest
        for rows in {_rows(key) for key in exceptions[bucket].get(producer, ())} if up_to_date else {()}:
            regions[rows] = regions.get(rows, 0) | 1 << bucket
    narrowed = (_both(rows, len(maps), bits) for rows, bits in regions.items())
    return _joined({rows for rows in narrowed if rows is not None})


def _both(rows: Rows, buckets: int, bits: int) -> Rows | None:
    """Return `rows` limited to the buckets in `bits`; None if no row can match."""
    sets = dict(rows)
    sets[buckets] = sets.get(buckets, _all(buckets)) & bits
    if not sets[buckets]:
        return None
    return tuple((n, members) for n, members in sorted(sets.items()) if members != _all(n))


def _joined(exceptions: set[Rows]) -> set[Rows]:
    """Return the same rows with fewer exceptions: two that differ in only one set become one."""
    for n in sorted({n for rows in exceptions for n, _ in rows}):
        others: dict[Rows, int] = {}
        for rows in exceptions:
            rest = tuple(pair for pair in rows if pair[0] != n)
            others[rest] = others.get(rest, 0) | dict(rows).get(n, _all(n))
        exceptions = {both for rest, bits in others.items() if (both := _both(rest, n, bits)) is not None}
    return exceptions


def _all(buckets: int) -> int:
    return (1 << buckets) - 1


def _bits(bits: int, buckets: int) -> npt.NDArray[np.bool_]:
    """Return whether each bucket is in the set `bits`: bool [buckets]."""
    packed = np.frombuffer(bits.to_bytes(buckets // 8 + 1, "little"), np.uint8)
    return np.unpackbits(packed, bitorder="little")[:buckets].astype(bool)


def _key(rows: Rows, producer: str) -> str:
    sets = (f"{n}/x{bits:x}" if bits & (bits - 1) else f"{n}/{bits.bit_length() - 1}" for n, bits in rows)
    return f"{PREFIX}{'+'.join(sets)}:{producer}"


def _rows(key: str) -> Rows:
    sets: dict[int, int] = {}
    for part in key.removeprefix(PREFIX).split(":", 1)[0].split("+"):
        n, members = part.split("/")
        bits = int(members[1:], 16) if members.startswith("x") else 1 << int(members)
        sets[int(n)] = sets.get(int(n), _all(int(n))) & bits
    return tuple(sorted(sets.items()))
