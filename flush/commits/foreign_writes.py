"""What other programs wrote into the base table beside our commits, and whether it put a key there twice.

Lance finds two rows of one key only where both writers say which keys they insert, and for some types of keys only. So:

    invariant: below every commit's rows no key of them stands twice.

 1. **Look back** from the version read to the newest commit (a version whose progress differs from the one below). A
    version between that added fragments, and is no compaction, is a stranger's. Where Lance does not tell the keys
    apart (`lance_tells_apart`) to the commit before that one: a stranger's merge may have come in just below the
    newest, after it was planned.
    Of a region whose range another committer has planned before, and may have held back, to its own last commit.
 2. **Nobody there**, the usual case: the base holds what our commits put there, one row per key; no row is read.
    *History that was cleaned up, or longer than `_LOOK_BACK`, counts as somebody.*
 3. **Somebody there**: one scan of the key columns for the keys to be written and those that strangers added. A key
    found twice:
    - one row by a commit, the other by a stranger's merge, and a type that Lance does not tell apart: neither saw the
      other. The row of the later version stands, as if the two had come one after the other; the older one is deleted,
      in a version of its own, and the commit begins again.
    - any other pair: which row is meant is not ours to decide. The key's region is held back where the key is to be
      written (`DoubledKey`, before anything is written over it); every other region is committed, and the key is looked
      for again by each commit of this process until it stands there once.
 4. After an upserts pass that Lance put on top of versions nobody had read, 1 to 3 are done once more before the commit
    reports. *Crash before that: the next commit that has rows does it, as its first step; the look back in 1 reaches as
    far.* Until then readers see the key twice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from uuid import UUID

import lance
import pyarrow as pa
import pyarrow.compute as pc

from memwal.flush.base.state import read_state
from memwal.flush.base.table import BaseTable
from memwal.flush.errors import DoubledKey
from memwal.wal import Corrupt, ObjectStore
from memwal.wal.errors import first_line

_LOOK_BACK = 64
"""Versions; each costs two or three small reads."""
_ADDED_ROWS_MAX = 4_000_000
"""Strangers' rows whose keys are held in memory to be looked for; of more only the keys to be written are."""
_ROWS_AT_ONCE = 1 << 20
_ROW_ADDRESS = "_rowaddr"
_FRAGMENT_BITS = 32
"""A row address is the fragment's id and, in these lower bits, the row's place in it."""


@dataclass(frozen=True)
class Beside:
    """Which versions since the last commit, or the one before it, are strangers'."""

    complete: bool
    """Whether the history could be read back that far."""
    ours: Mapping[int, frozenset[int]] = field(default_factory=dict)
    """Commits -> fragments they added."""
    strangers: Mapping[int, frozenset[int]] = field(default_factory=dict)
    """Versions of others that added fragments -> those."""
    merges: frozenset[int] = frozenset()
    """Which of `strangers` Lance may have let pass without a look at their keys."""

    @property
    def somebody(self) -> bool:
        """Whether a key may stand twice."""
        return bool(self.strangers) or not self.complete


def lance_tells_apart(schema: pa.Schema, key: Sequence[str]) -> bool:
    """Whether Lance finds two merges that insert one key at once; tried with pylance 14.0.2."""
    types = [schema.field(name).type for name in key]
    known = {pa.int32(), pa.int64(), pa.uint32(), pa.uint64()} | {pa.string(), pa.large_string()}
    return all(each in known | {pa.binary(), pa.large_binary()} for each in types)


def look_back(store: ObjectStore, base: BaseTable, behind: Collection[UUID] = ()) -> Beside:
    """Step 1, from the version of `base`. `behind`: regions that commits may have held back; it looks back to the last
    commit of each. Raises StoreUnavailable, StoreRefused.
    """
    waiting = set(behind)
    ours: dict[int, frozenset[int]] = {}
    strangers: dict[int, frozenset[int]] = {}
    merges: set[int] = set()
    commits = 1 if lance_tells_apart(base.schema, base.key) else 2
    try:
        state = read_state(store, base.version)
        for _ in range(_LOOK_BACK):
            if state.version == 1:
                break
            before = read_state(store, state.version - 1)
            added = frozenset(state.fragments.keys() - before.fragments.keys())
            operation = state.transaction.operation if state.transaction else "unknown"
            if before.committed != state.committed:
                ours[state.version] = added
                waiting -= {each for each in waiting if state.committed.get(each) != before.committed.get(each)}
                if len(ours) >= commits and not waiting:
                    break
            elif added and operation != "rewrite":
                strangers[state.version] = added
                merges |= {state.version} if operation == "update" and commits == 2 else set()
            state = before
        else:
            return Beside(False, ours, strangers, frozenset(merges))
    except Corrupt:  # cleaned up
        return Beside(False, ours, strangers, frozenset(merges))
    return Beside(True, ours, strangers, frozenset(merges))


def rows_of(base: BaseTable, keys: pa.Table) -> pa.Table:
    """The base's rows that have one of `keys` (the key columns, any number of rows): those and `_rowaddr`.

    One scan of the key columns; held in memory are `keys`, the rows found, and of the base about as many rows as there
    are keys. Raises OSError of storage.
    """
    names = list(base.key)
    wanted = keys.group_by(names).aggregate([])
    schema = pa.schema([*(base.schema.field(name) for name in names), pa.field(_ROW_ADDRESS, pa.uint64())])
    if not wanted.num_rows:
        return schema.empty_table()
    with _reading():
        batches = base.dataset.scanner(columns=names, with_row_address=True).to_batches()
        found = [
            rows.select(schema.names).join(wanted, names, join_type="left semi").cast(schema)
            for rows in _gathered(batches, max(_ROWS_AT_ONCE, wanted.num_rows))
        ]
    return pa.concat_tables([schema.empty_table(), *found])


@contextmanager
def _reading() -> Iterator[None]:
    """pylance has ValueError for a version or a file that is gone, which a stranger may have cleaned up meanwhile, and
    for a stream of rows that storage breaks off: all of them OSError here.
    """
    try:
        yield
    except ValueError as error:
        raise OSError(first_line(error)) from error


def _gathered(batches: Iterable[pa.RecordBatch], rows: int) -> Iterator[pa.Table]:
    """Tables of at least `rows` rows, but for the last: every join hashes all the wanted keys anew."""
    gathered: list[pa.RecordBatch] = []
    for batch in batches:
        gathered.append(batch)
        if sum(each.num_rows for each in gathered) >= rows:
            yield pa.Table.from_batches(gathered)
            gathered = []
    if gathered:
        yield pa.Table.from_batches(gathered)


def added_keys(base: BaseTable, beside: Beside) -> pa.Table:
    """The keys of the rows that strangers added, as each version had them; none where these are more than fit, or where
    one of the versions cannot be read any more: cleaned up since `look_back`, like a history that does not say."""
    names = list(base.key)
    keys = [pa.schema([base.schema.field(name) for name in names]).empty_table()]
    left = _ADDED_ROWS_MAX
    try:
        for version, ids in beside.strangers.items():
            dataset = base.dataset.checkout_version(version)
            fragments = [each for each in dataset.get_fragments() if each.fragment_id in ids]
            left -= sum(each.count_rows() for each in fragments)
            if left < 0:
                return keys[0]
            keys.append(dataset.scanner(columns=names, fragments=fragments).to_table().cast(keys[0].schema))
    except (OSError, ValueError):
        return keys[0]
    return pa.concat_tables(keys)


def superseded(base: BaseTable, found: pa.Table, beside: Beside) -> tuple[list[int], pa.Table, dict[UUID, DoubledKey]]:
    """Of `rows_of`: the addresses of the rows to delete, step 3; other keys that stand twice; what to say of those, by
    the region that a key is of."""
    names = list(base.key)
    counts = found.group_by(names).aggregate([([], "count_all")])
    twice = counts.filter(pc.greater(counts.column("count_all"), 1))
    if not twice.num_rows:
        return [], twice.select(names), {}
    doubled = found.join(twice.select(names), names, join_type="left semi").to_pylist()
    pairs: dict[tuple[object, ...], list[int]] = {}
    for row in doubled:
        pairs.setdefault(tuple(row[name] for name in names), []).append(row[_ROW_ADDRESS])
    older, bad = list[int](), list[tuple[object, ...]]()
    for key, addresses in pairs.items():
        if (row := _older(addresses, beside)) is None:
            bad.append(key)
        else:
            older.append(row)
    schema = twice.select(names).schema
    keys = pa.Table.from_pylist([dict(zip(names, key, strict=True)) for key in bad], schema)
    return older, keys, _said(base, keys, pairs)


def _said(base: BaseTable, keys: pa.Table, pairs: Mapping[tuple[object, ...], Sequence[int]]) -> dict[UUID, DoubledKey]:
    """By region, of its first key among `keys`."""
    said: dict[UUID, DoubledKey] = {}
    regions = [base.regions[bucket] for bucket in base.route(keys).tolist()] if keys.num_rows else []
    for region, row in zip(regions, keys.to_pylist(), strict=True):
        named = ", ".join(f"{name} = {value!r:.80}" for name, value in row.items())
        said.setdefault(
            region,
            DoubledKey(
                f"{base.uri}: version {base.version} holds {len(pairs[tuple(row.values())])} rows with {named}, by "
                "another program; no row was written over them: delete all but one of each key, commit again, and "
                "append through memwal only"
            ),
        )
    return said


def delete_rows(dataset: lance.LanceDataset, addresses: Sequence[int]) -> int:
    """Delete the rows at `addresses`; moves `dataset` on. Raises OSError on a conflict."""
    done = dataset.delete(f"{_ROW_ADDRESS} IN ({', '.join(map(str, addresses))})", conflict_retries=0)
    return int(done["num_deleted_rows"])


def _older(addresses: Sequence[int], beside: Beside) -> int | None:
    """The address of the older row of a key that stands twice because two merges did not see each other; None of any
    other pair."""
    versions = {id: version for version, ids in {**beside.ours, **beside.strangers}.items() for id in ids}
    by = sorted((versions.get(address >> _FRAGMENT_BITS, 0), address) for address in addresses)
    made = {version for version, _ in by}
    if len(by) == len(made) == len(made & (beside.ours.keys() | beside.merges)) == 2 and made & beside.ours.keys():
        return by[0][1]
    return None
