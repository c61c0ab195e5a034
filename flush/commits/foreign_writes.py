"""Rows that other programs wrote into the base table between our commits, and keys that stand twice because of them.

Lance detects two rows of one key only where both writers say which keys they insert, and for some key types only. So:

    invariant: when a commit writes its rows, none of their keys stands twice in the base.

 1. **Look back** from the version read to the newest commit (a version whose progress differs from the one below). A
    version in between that added fragments, and is no compaction, is foreign. Where Lance does not detect duplicates
    (`lance_detects_duplicates`), look back one commit further: a foreign merge may have landed just below the newest
    commit, after that commit was planned. For a region whose range another committer has planned before, and may have
    held back, look back to its own last commit. A load (flush.commits.load) writes keys of every region, so where
    Lance does not detect duplicates, it and a commit may insert one key and not see each other. So look back to the
    commits before the newest one of its regions: that one had read those, and a load below them. A load above them is
    treated like a foreign merge.
 2. **No foreign version**, the usual case: the base holds what our commits wrote, one row per key; no row is read.
    *History that was cleaned up, or is longer than `_LOOK_BACK`, counts as foreign.*
 3. **Foreign versions**: scan the key columns once, for the keys to be written and those that others added. A key
    found twice:
    - One row by a commit, the other by a foreign merge or a load, and a type for which Lance detects no duplicates:
      neither writer saw the other. The row of the later version stands, as if the two had come one after the other; the
      older one is deleted, in a version of its own, and the commit begins again.
    - Any other pair: which row is meant is not ours to decide. The key's region is held back where the commit would
      write the key (`DoubledKey`, before anything is written over it); every other region is committed. A key that the
      commit does not write is reported, and looked up by each commit of this process until it stands there once; after
      a restart `memwal verify --deep` finds it.
 4. After an upserts pass that Lance put on top of versions that the round has not read, 1 to 3 run once more before the
    commit reports. *Crash before that: the next commit that has rows does it as its first step; the look back in 1
    reaches as far.* Until then readers see the key twice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from uuid import UUID

import lance
import pyarrow as pa
import pyarrow.compute as pc

from memwal.flush.base.load_id import is_load, loads_in
from memwal.flush.base.state import TableState, read_state
from memwal.flush.base.table import BaseTable
from memwal.flush.errors import DoubledKey
from memwal.wal import Corrupt, ObjectStore
from memwal.wal.errors import first_line

_LOOK_BACK = 64
"""Versions; each takes two or three small reads."""
_ADDED_ROWS_MAX = 4_000_000
"""Foreign rows whose keys are held in memory and looked up; where there are more, only the keys to be written are."""
_ROWS_AT_ONCE = 1 << 20
_ROW_ADDRESS = "_rowaddr"
_EARLIER, _UNKNOWN = 0, -1
"""In place of the version that made a row: one before those looked at; any."""
_FRAGMENT_BITS = 32
"""A row address is the fragment's id and, in these lower bits, the row's offset in it."""


@dataclass(frozen=True)
class ForeignWrites:
    """The versions since the last commit, or the one before it, that other programs made."""

    complete: bool
    """Whether the history could be read back that far."""
    commits: Mapping[int, frozenset[int]] = field(default_factory=dict)
    """Versions of our commits -> fragments they added."""
    foreign: Mapping[int, frozenset[int]] = field(default_factory=dict)
    """Versions of other programs that added fragments -> these fragments."""
    unchecked: frozenset[int] = frozenset()
    """Versions in `foreign` whose keys Lance may not have compared with those of a commit."""
    loads: Mapping[int, frozenset[int]] = field(default_factory=dict)
    """Among `commits`: loads whose keys Lance may not have compared with those of a commit or of another load."""
    rewritten: frozenset[int] = frozenset()
    """Fragments made by compactions: their rows are of unknown age."""

    @property
    def possible(self) -> bool:
        """Whether a key may stand twice."""
        return bool(self.foreign) or bool(self.loads) or not self.complete


def lance_detects_duplicates(schema: pa.Schema, key: Sequence[str]) -> bool:
    """Return whether Lance detects two merges that insert one key at once; tried with pylance 14.0.2."""
    types = [schema.field(name).type for name in key]
    detected = {pa.int32(), pa.int64(), pa.uint32(), pa.uint64()} | {pa.string(), pa.large_string()}
    return all(kind in detected | {pa.binary(), pa.large_binary()} for kind in types)


def look_back(store: ObjectStore, base: BaseTable, behind: Collection[UUID] = ()) -> ForeignWrites:
    """Step 1, from the version of `base`.

    `behind`: regions that commits may have held back; the look back reaches the last commit of each.
    Raises StoreUnavailable, StoreRefused.
    """
    if lance_detects_duplicates(base.schema, base.key):
        found = _Found(set(behind), 1)
    else:
        found = _Found(set(behind), 2, to_find=None if loads_in(base.committed) else set())
    try:
        state = read_state(store, base.version)
        for _ in range(_LOOK_BACK):
            if state.version == 1:
                return found.writes(complete=True)
            before = read_state(store, state.version - 1)
            found.add(before, state)
            if found.enough:
                return found.writes(complete=True)
            state = before
    except Corrupt:  # cleaned up
        return found.writes(complete=False)
    return found.writes(complete=len(found.commits) >= found.commits_wanted and not found.behind)


@dataclass
class _Found:
    """What a look back has found so far, from the newest version down."""

    behind: set[UUID]
    """Regions whose last commits are still to be found."""
    commits_wanted: int
    to_find: set[UUID] | None = field(default_factory=set)
    """Regions of the newest commit whose commits before it are still to be found; None: the newest commit itself is."""
    commits: dict[int, frozenset[int]] = field(default_factory=dict)
    foreign: dict[int, frozenset[int]] = field(default_factory=dict)
    unchecked: set[int] = field(default_factory=set)
    loads: dict[int, frozenset[int]] = field(default_factory=dict)
    rewritten: frozenset[int] = frozenset()

    def add(self, before: TableState, state: TableState) -> None:
        """Add what version `state` did to `before`, the one below it."""
        added = frozenset(state.fragments.keys() - before.fragments.keys())
        operation = state.transaction.operation if state.transaction else "unknown"
        if before.committed != state.committed:
            self._add_commit(before, state, added)
        elif operation == "rewrite":
            self.rewritten |= added
        elif added:
            self.foreign[state.version] = added
            self.unchecked |= {state.version} if operation == "update" and self.commits_wanted == 2 else set()

    def _add_commit(self, before: TableState, state: TableState, added: frozenset[int]) -> None:
        ids = before.committed.keys() | state.committed.keys()
        moved = {id for id in ids if before.committed.get(id) != state.committed.get(id)}
        regions = {id for id in moved if not is_load(id)}
        self.commits[state.version] = added
        self.behind -= moved
        if moved - regions and self.commits_wanted == 2:
            self.loads[state.version] = added
        if self.to_find is not None:
            self.to_find -= regions
        elif regions:
            self.to_find = regions

    @property
    def enough(self) -> bool:
        """Whether no version further below matters."""
        return len(self.commits) >= self.commits_wanted and not self.behind and self.to_find == set()

    def writes(self, *, complete: bool) -> ForeignWrites:
        """Return what was found."""
        unchecked = frozenset(self.unchecked)
        return ForeignWrites(complete, self.commits, self.foreign, unchecked, self.loads, self.rewritten)


def rows_with_keys(base: BaseTable, keys: pa.Table) -> pa.Table:
    """Return key columns and `_rowaddr` of the base's rows that have one of `keys` (the key columns, any number).

    One scan of the key columns. Memory holds `keys`, the rows found, and about as many rows of the base as `keys` has.
    Raises OSError of storage.
    """
    names = list(base.key)
    wanted = keys.group_by(names).aggregate([])
    schema = pa.schema([*(base.schema.field(name) for name in names), pa.field(_ROW_ADDRESS, pa.uint64())])
    if not wanted.num_rows:
        return schema.empty_table()
    with _reading():
        batches = base.dataset.scanner(columns=names, with_row_address=True).to_batches()
        matches = [
            rows.select(schema.names).join(wanted, names, join_type="left semi").cast(schema)
            for rows in _gathered(batches, max(_ROWS_AT_ONCE, wanted.num_rows))
        ]
    return pa.concat_tables([schema.empty_table(), *matches])


@contextmanager
def _reading() -> Iterator[None]:
    """Turn ValueError into OSError.

    pylance raises ValueError for a version or file that another program has cleaned up meanwhile, and for a stream of
    rows that storage breaks off.
    """
    try:
        yield
    except ValueError as error:
        raise OSError(first_line(error)) from error


def _gathered(batches: Iterable[pa.RecordBatch], rows: int) -> Iterator[pa.Table]:
    """Join batches to tables of at least `rows` rows each but the last: every join hashes all wanted keys again."""
    gathered: list[pa.RecordBatch] = []
    for batch in batches:
        gathered.append(batch)
        if sum(part.num_rows for part in gathered) >= rows:
            yield pa.Table.from_batches(gathered)
            gathered = []
    if gathered:
        yield pa.Table.from_batches(gathered)


def added_keys(base: BaseTable, writes: ForeignWrites) -> pa.Table:
    """Return the keys of the rows that other programs, and loads in `writes`, added, as each version had them.

    Returns none where these are more than _ADDED_ROWS_MAX, or where one of the versions was cleaned up since
    `look_back`: then the history says nothing.
    """
    names = list(base.key)
    keys = [pa.schema([base.schema.field(name) for name in names]).empty_table()]
    left = _ADDED_ROWS_MAX
    try:
        for version, ids in {**writes.foreign, **writes.loads}.items():
            dataset = base.dataset.checkout_version(version)
            fragments = [fragment for fragment in dataset.get_fragments() if fragment.fragment_id in ids]
            left -= sum(fragment.count_rows() for fragment in fragments)
            if left < 0:
                return keys[0]
            keys.append(dataset.scanner(columns=names, fragments=fragments).to_table().cast(keys[0].schema))
    except (OSError, ValueError):
        return keys[0]
    return pa.concat_tables(keys)


def duplicates(
    base: BaseTable, stored: pa.Table, writes: ForeignWrites
) -> tuple[list[int], pa.Table, dict[UUID, DoubledKey]]:
    """Step 3 for the rows `stored` (`rows_with_keys`).

    Returns the addresses of the rows to delete; the other keys that stand twice; an error for these by region.
    """
    names = list(base.key)
    counts = stored.group_by(names).aggregate([([], "count_all")])
    twice = counts.filter(pc.greater(counts.column("count_all"), 1))
    if not twice.num_rows:
        return [], twice.select(names), {}
    doubled = stored.join(twice.select(names), names, join_type="left semi").to_pylist()
    addresses: dict[tuple[object, ...], list[int]] = {}
    for row in doubled:
        addresses.setdefault(tuple(row[name] for name in names), []).append(row[_ROW_ADDRESS])
    older, undecided = list[int](), list[tuple[object, ...]]()
    for key, of_key in addresses.items():
        if (address := _older(of_key, writes)) is None:
            undecided.append(key)
        else:
            older.append(address)
    schema = twice.select(names).schema
    keys = pa.Table.from_pylist([dict(zip(names, key, strict=True)) for key in undecided], schema)
    return older, keys, _errors(base, keys, addresses)


def _errors(
    base: BaseTable, keys: pa.Table, addresses: Mapping[tuple[object, ...], Sequence[int]]
) -> dict[UUID, DoubledKey]:
    """Return one error per region, about its first key among `keys`."""
    errors: dict[UUID, DoubledKey] = {}
    regions = [base.regions[bucket] for bucket in base.route(keys).tolist()] if keys.num_rows else []
    for region, row in zip(regions, keys.to_pylist(), strict=True):
        named = ", ".join(f"{name} = {value!r:.80}" for name, value in row.items())
        errors.setdefault(
            region,
            DoubledKey(
                f"{base.uri}: version {base.version} holds {len(addresses[tuple(row.values())])} rows with {named}, by "
                "another program; no row was written over them: delete all but one of each key, commit again, and "
                "append through memwal only"
            ),
        )
    return errors


def delete_rows(dataset: lance.LanceDataset, addresses: Sequence[int]) -> int:
    """Delete the rows at `addresses`; moves `dataset` to the new version. Raises OSError on a conflict."""
    done = dataset.delete(f"{_ROW_ADDRESS} IN ({', '.join(map(str, addresses))})", conflict_retries=0)
    return int(done["num_deleted_rows"])


def _older(addresses: Sequence[int], writes: ForeignWrites) -> int | None:
    """Return the address of the older row of a key that stands twice because two merges did not see each other.

    None for any other pair.
    """
    versions = {id: version for version, ids in {**writes.commits, **writes.foreign}.items() for id in ids}
    versions |= dict.fromkeys(writes.rewritten, _UNKNOWN)
    by_age = sorted((versions.get(address >> _FRAGMENT_BITS, _EARLIER), address) for address in addresses)
    made = {version for version, _ in by_age}
    mergers = writes.commits.keys() | writes.unchecked | ({_EARLIER} if made & writes.loads.keys() else set())
    if len(by_age) == len(made) == len(made & mergers) == 2:
        return by_age[0][1] if made & writes.commits.keys() else None
    return None
