"""Detect rows that other programs wrote into the base table between commits, and repair keys with two rows.

Lance detects two inserts of one key only if both writers declare the keys they insert, and only for some key types.
This module ensures:

    invariant: when a commit writes its rows, none of their keys has two rows in the base.

 1. **Look back** from the version read to the newest commit (a version whose progress differs from the version below).
    A version in between that added fragments and is not a compaction is foreign. *History that was cleaned up, or is
    longer than `_LOOK_BACK`, counts as foreign.* Look back further in these cases:
    - Lance does not detect duplicates for the key (`lance_detects_duplicates`): one commit further. A foreign merge may
      have landed just below the newest commit, after that commit was planned.
    - Another committer planned a region's range first, and may have held the region back: to that region's own last
      commit.
    - The base contains a load (flush.commits.load), and Lance does not detect duplicates: to the previous commits of
      the newest commit's regions. A load writes keys of every region, so a load and a commit may insert one key without
      seeing each other. The newest commit had read those previous commits, and any load below them. A load above them
      is treated like a foreign merge.
 2. **No foreign version** (the usual case): the base holds what commits wrote, one row per key. No row is read.
 3. **Foreign versions**: scan the key columns once for the keys to be written and the keys that others added. If a key
    has two rows:
    - One row is from a commit, the other from a foreign merge or a load, and Lance detects no duplicates for the key
      type: neither writer saw the other. The row of the later version is kept, as if the two had run one after the
      other. The older row is deleted in a separate version, and the commit restarts.
    - Any other pair: memwal cannot decide which row is correct. If the commit would write the key, the key's region is
      held back (`DoubledKey`, before anything is written over it) and all other regions are committed. A key that the
      commit does not write is reported, and each commit of this process looks it up until it has one row; after a
      restart, `memwal verify --deep` finds it.
 4. If Lance rebased an upserts pass onto versions that the round has not read, run steps 1 to 3 once more before the
    commit reports. *Crash before this step: the next commit with rows does it as its first step; the look back in step
    1 reaches far enough.* Until then readers see the key twice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from uuid import UUID

import lance
import pyarrow as pa
import pyarrow.compute as pc

from memwal.flush.base.state import TableState, read_state
from memwal.flush.base.table import BaseTable
from memwal.flush.commits.load_notes import is_load, loads_in
from memwal.flush.errors import DoubledKey
from memwal.wal import Corrupt, ObjectStore
from memwal.wal.errors import first_line

_LOOK_BACK = 64
"""Versions; each takes two or three small reads."""
_ADDED_ROWS_MAX = 4_000_000
"""Maximum number of foreign rows whose keys are held in memory and looked up. Above it, only the keys to be written
are.
"""
_ROWS_AT_ONCE = 1 << 20
_ROW_ADDRESS = "_rowaddr"
_EARLIER, _UNKNOWN = 0, -1
"""Placeholders for the version that created a row: older than all examined versions; any version."""
_FRAGMENT_BITS = 32
"""A row address is the fragment's id and, in these lower bits, the row's offset in the fragment."""


@dataclass(frozen=True)
class ForeignWrites:
    """The versions that other programs created since the last commit, or since the one before it."""

    complete: bool
    """Whether the history could be read back that far."""
    commits: Mapping[int, frozenset[int]] = field(default_factory=dict)
    """Versions of commits -> fragments that they added."""
    foreign: Mapping[int, frozenset[int]] = field(default_factory=dict)
    """Versions of other programs that added fragments -> these fragments."""
    unchecked: frozenset[int] = frozenset()
    """Versions in `foreign` whose keys Lance may not have compared with those of a commit."""
    loads: Mapping[int, frozenset[int]] = field(default_factory=dict)
    """Loads among `commits` whose keys Lance may not have compared with those of a commit or of another load."""
    rewritten: frozenset[int] = frozenset()
    """Fragments created by compactions: the age of their rows is unknown."""

    @property
    def possible(self) -> bool:
        """Whether a key may have two rows."""
        return bool(self.foreign) or bool(self.loads) or not self.complete


def lance_detects_duplicates(schema: pa.Schema, key: Sequence[str]) -> bool:
    """Return whether Lance detects two concurrent merges that insert the same key. Tested with pylance 14.0.2."""
    types = [schema.field(name).type for name in key]
    detected = {pa.int32(), pa.int64(), pa.uint32(), pa.uint64()} | {pa.string(), pa.large_string()}
    return all(kind in detected | {pa.binary(), pa.large_binary()} for kind in types)


def look_back(store: ObjectStore, base: BaseTable, behind: Collection[UUID] = ()) -> ForeignWrites:
    """Run step 1, from the version of `base`.

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
    """The state of a look back, from the newest version down."""

    behind: set[UUID]
    """Regions whose last commits are still to be found."""
    commits_wanted: int
    to_find: set[UUID] | None = field(default_factory=set)
    """Regions of the newest commit whose previous commits are still to be found; None until the newest commit is found.
    """
    commits: dict[int, frozenset[int]] = field(default_factory=dict)
    foreign: dict[int, frozenset[int]] = field(default_factory=dict)
    unchecked: set[int] = field(default_factory=set)
    loads: dict[int, frozenset[int]] = field(default_factory=dict)
    rewritten: frozenset[int] = frozenset()

    def add(self, before: TableState, state: TableState) -> None:
        """Add the changes of version `state` to `before`, the version below it."""
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
        """Whether no older version matters."""
        return len(self.commits) >= self.commits_wanted and not self.behind and self.to_find == set()

    def writes(self, *, complete: bool) -> ForeignWrites:
        """Return the result."""
        unchecked = frozenset(self.unchecked)
        return ForeignWrites(complete, self.commits, self.foreign, unchecked, self.loads, self.rewritten)


def rows_with_keys(base: BaseTable, keys: pa.Table) -> pa.Table:
    """Return key columns and `_rowaddr` of the base rows that have one of `keys` (the key columns, any number of rows).

    Scans the key columns once. Memory holds `keys`, the rows found, and about as many base rows as `keys` has.
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

    pylance raises ValueError if another program has cleaned up a version or file in the meantime, or if storage
    interrupts a stream of rows.
    """
    try:
        yield
    except ValueError as error:
        raise OSError(first_line(error)) from error


def _gathered(batches: Iterable[pa.RecordBatch], rows: int) -> Iterator[pa.Table]:
    """Join batches into tables of at least `rows` rows each, except the last. Every join hashes all keys."""
    gathered: list[pa.RecordBatch] = []
    for batch in batches:
        gathered.append(batch)
        if sum(part.num_rows for part in gathered) >= rows:
            yield pa.Table.from_batches(gathered)
            gathered = []
    if gathered:
        yield pa.Table.from_batches(gathered)


def added_keys(base: BaseTable, writes: ForeignWrites) -> pa.Table:
    """Return the keys of the rows that other programs, and loads in `writes`, added, as of each version.

    Returns an empty table if there are more than _ADDED_ROWS_MAX rows, or if one of the versions was cleaned up since
    `look_back`: the history is then incomplete.
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
    """Run step 3 for the rows `stored` (from `rows_with_keys`).

    Returns the addresses of the rows to delete; the other keys that have two rows; an error per region for these.
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
    """Delete the rows at `addresses`. Moves `dataset` to the new version. Raises OSError on a conflict."""
    done = dataset.delete(f"{_ROW_ADDRESS} IN ({', '.join(map(str, addresses))})", conflict_retries=0)
    return int(done["num_deleted_rows"])


def _older(addresses: Sequence[int], writes: ForeignWrites) -> int | None:
    """Return the address of the older row of a key that two merges inserted without seeing each other.

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
