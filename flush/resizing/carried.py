"""The applied maps of a table's regions, carried over to regions among which the keys are spread anew.

A region remembers per producer the highest sequence that it applied. After a resize the rows of one old region lie in
any of the new ones, so all of them begin with the same map: the highest sequence of each producer. Old regions that had
not got so far, because a micro-batch is half applied or had no rows for them, are exceptions, kept in the same map:

    memwal:before:{buckets}/{bucket}:{producer} = sequence - 1   rows that went to that bucket of so many have not had
                                                                 the producer's highest sequence
    memwal:before:8/xfe:{producer} = sequence - 1                to one of several buckets: bit n of the hexadecimal
                                                                 number stands for bucket n
    memwal:before:4/2+8/x3:{producer} = sequence - 1             rows that are in both: an exception from before an
                                                                 earlier resize that some regions have made up since

A write whose token counts as applied is cut down to the rows that an exception lets through (`left_over`), so a replay
of a half-applied micro-batch is completed, whatever the table was resized to meanwhile.

Why one bit of each row is enough. A producer's writes are in order: it begins with a sequence when every region has
acked the one before. So where one region has applied sequence s, all rows of all sequences below s are applied, and
only of s itself it is open which rows are. Hence

 (1) a sequence below the highest is a repeat everywhere;
 (2) exceptions of a producer end with its next sequence: in the region that applies it, at the next resize in all;
 (3) a region that applies the highest sequence has all of its rows, so its exceptions end too.

Why exceptions stay few. All regions of a routing begin with the same ones, and by (2) and (3) each has still all of
them or none. So at the next resize there are, per producer, either new ones by the number of buckets alone (it went
on), or the old ones and one more number of buckets at most (it did not), and one number of buckets stands for one set:
a producer that goes on has one exception, one that is stuck in a half-applied micro-batch one with as many sets as the
table has had different numbers of buckets since. Maps of older releases, which kept every bucket by itself and one
sequence each, are read too, and are joined into sets at the next resize.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from memwal.flush.base.sharding import Buckets
from memwal.wal.applied import NONE_RETIRED, PREFIX, AppliedMap, Snapshot, hashes

Applied = Mapping[str, int]
RouteInto = Callable[[int, pa.Table], Buckets]
"""Buckets of rows where a table has so many: `BaseTable.route_into`."""


Rows = tuple[tuple[int, int], ...]
"""Rows that are in all of these: a number of buckets, ascending, and the set of those meant, one bit each."""
Exceptions = Mapping[str, tuple[str, ...]]
"""Per producer the keys of its exceptions."""


def carried(maps: Sequence[Applied]) -> dict[str, int]:
    """The map that every new region begins with. `maps`: those of the old regions, that of bucket n at n. Pure."""
    highest: dict[str, int] = {}
    for each in maps:
        for name, sequence in each.items():
            if not name.startswith(PREFIX):
                highest[name] = max(highest.get(name, -1), sequence)
    exceptions = [with_exceptions(each) for each in maps]
    found: dict[str, int] = {}
    for producer, sequence in sorted(highest.items()):
        found[producer] = sequence
        for rows in _behind(maps, exceptions, producer, sequence):
            found[_key(rows, producer)] = sequence - 1
    return found


def begun_with(maps: Sequence[AppliedMap]) -> AppliedMap:
    """`carried`, and what one region has retired is retired in all: it cannot tell a repeat from a new write."""
    found, retired = carried(maps), NONE_RETIRED
    for each in maps:
        retired = np.union1d(retired, each.snapshot.retired)
    if len(retired):
        names = [key.removeprefix(PREFIX).split(":", 1)[1] if key.startswith(PREFIX) else key for key in found]
        gone = np.isin(hashes(names), retired)
        found = {key: value for (key, value), out in zip(found.items(), gone, strict=True) if not out}
    return AppliedMap(found, Snapshot(retired=retired))


def with_exceptions(applied: Applied) -> dict[str, tuple[str, ...]]:
    """The producers that have any, and the keys of them."""
    found: dict[str, tuple[str, ...]] = {}
    for key in applied:
        if key.startswith(PREFIX):
            name = key.removeprefix(PREFIX).split(":", 1)[1]
            found[name] = (*found.get(name, ()), key)
    return found


def left_over(
    applied: Applied, exceptions: Exceptions, producer: str, sequence: int, rows: pa.Table, route: RouteInto
) -> npt.NDArray[np.bool_]:
    """Which of `rows`, written under a token that counts as applied, were not applied: bool [rows].

    `exceptions`: those with which the region began; those that `applied` has no more do not count.
    """
    wanted = np.zeros(rows.num_rows, dtype=bool)
    for key in exceptions.get(producer, ()) if sequence == applied.get(producer, -1) else ():
        if key in applied:
            wanted |= np.logical_and.reduce([_bits(bits, n)[route(n, rows)] for n, bits in _rows(key)])
    return wanted


def settle(applied: MutableMapping[str, int], exceptions: Exceptions, producer: str, sequence: int) -> None:
    """Note that a write under this token is applied, or what was left over of it."""
    if sequence >= applied.get(producer, -1):
        for key in exceptions.get(producer, ()):
            if key in applied:
                del applied[key]
        applied[producer] = sequence


def _behind(maps: Sequence[Applied], exceptions: Sequence[Exceptions], producer: str, highest: int) -> set[Rows]:
    """The rows that have not had the highest sequence of a producer."""
    buckets: dict[Rows, int] = {}  # what is open of a region's rows -> the regions of which this is open
    for bucket, applied in enumerate(maps):
        here = applied.get(producer, -1) == highest
        for rows in {_rows(key) for key in exceptions[bucket].get(producer, ())} if here else {()}:
            buckets[rows] = buckets.get(rows, 0) | 1 << bucket
    return _joined({each for rows, those in buckets.items() if (each := _both(rows, len(maps), those)) is not None})


def _both(rows: Rows, buckets: int, those: int) -> Rows | None:
    """Those of `rows` that are in one of `those` buckets; None where none can be."""
    sets = dict(rows)
    sets[buckets] = sets.get(buckets, _all(buckets)) & those
    if not sets[buckets]:
        return None
    return tuple((n, bits) for n, bits in sorted(sets.items()) if bits != _all(n))


def _joined(exceptions: set[Rows]) -> set[Rows]:
    """The same rows by fewer exceptions: those that differ in one set only are one."""
    for n in sorted({n for rows in exceptions for n, _ in rows}):
        others: dict[Rows, int] = {}
        for rows in exceptions:
            rest = tuple(each for each in rows if each[0] != n)
            others[rest] = others.get(rest, 0) | dict(rows).get(n, _all(n))
        exceptions = {each for rest, bits in others.items() if (each := _both(rest, n, bits)) is not None}
    return exceptions


def _all(buckets: int) -> int:
    return (1 << buckets) - 1


def _bits(bits: int, buckets: int) -> npt.NDArray[np.bool_]:
    """Whether each bucket is one of the set: bool [buckets]."""
    packed = np.frombuffer(bits.to_bytes(buckets // 8 + 1, "little"), np.uint8)
    return np.unpackbits(packed, bitorder="little")[:buckets].astype(bool)


def _key(rows: Rows, producer: str) -> str:
    sets = (f"{n}/x{bits:x}" if bits & (bits - 1) else f"{n}/{bits.bit_length() - 1}" for n, bits in rows)
    return f"{PREFIX}{'+'.join(sets)}:{producer}"


def _rows(key: str) -> Rows:
    sets: dict[int, int] = {}
    for each in key.removeprefix(PREFIX).split(":", 1)[0].split("+"):
        n, those = each.split("/")
        bits = int(those[1:], 16) if those.startswith("x") else 1 << int(those)
        sets[int(n)] = sets.get(int(n), _all(int(n))) & bits
    return tuple(sorted(sets.items()))
