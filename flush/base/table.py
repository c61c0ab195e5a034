"""One version of the base Lance table as an immutable view: schema, key, regions, indexes, committed generations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from uuid import UUID

import lance
import pyarrow as pa

from memwal.flush.base.adoptable import unsupported_columns
from memwal.flush.base.create import adopt, complete, create, existing, sync_newest
from memwal.flush.base.manifest import read_progress
from memwal.flush.base.open import LanceCaches, Session, open_dataset
from memwal.flush.base.setup import (
    REGIONS,
    TABLE,
    Restored,
    Setup,
    WriteRules,
    metadata_of,
    read_setup,
    refuse_wiped,
    refuse_written_over,
    restored_from,
)
from memwal.flush.base.shape import Shape, column_ids, field_id, present_indexes, row_field_ids, shape_of
from memwal.flush.base.sharding import BucketHash, Buckets, Regions, Routing, RowHash, bucket_regions, published_regions
from memwal.flush.base.torn import set_torn_versions_aside
from memwal.flush.base.ttl import Expiry, Ttl, is_time
from memwal.flush.base.vector_models import vector_models
from memwal.flush.errors import NotALanceTable, NotInitialised, UnsupportedTable
from memwal.memtable import LANCES_ROW_COLUMNS, IndexSpec, VectorModel, key_columns, required_columns
from memwal.wal import Corrupt, EntryCodec, ObjectStore, WalFormat, codec_for, open_store
from memwal.wal.panics import panics_as_errors

_OPENINGS = 10
"""Attempts to open the newest version; an attempt fails only if a commit and a clean-up follow within milliseconds."""


@dataclass(frozen=True, eq=False)
class BaseTable:
    """One version of the base table.

    Thread safety. Any thread. Read from `dataset`, do not write through it: pylance would move it to the new version.
    Invariants. All attributes are of `version`; `latest()` returns a newer view.
    """

    uri: str
    """Absolute, so that it stays valid after a change of the working directory."""
    dataset: lance.LanceDataset
    version: int
    schema: pa.Schema
    """The columns that memwal holds, with the key's field metadata, without schema metadata."""
    unsupported: Mapping[str, str]
    """Columns that memwal cannot hold, added by other programs, with the reason. Reads return the other columns, puts
    are rejected, and a commit leaves their values unchanged (null in new rows).
    """
    key: tuple[str, ...]
    """Key columns; () if the table has no key and rows are only appended."""
    append_by: tuple[str, ...] | None
    """None if the table has a key, else the columns that route rows; () = all columns at the set-up."""
    indexes: tuple[IndexSpec, ...]
    regions: Regions
    """Ids of the regions; rows of bucket n belong to region n."""
    routing_version: int
    """Version of the routing of rows to regions: 1, plus one per resize."""
    wal_format: WalFormat
    """Format of its WAL entries, fixed at the set-up."""
    rules: WriteRules
    """What a put does to an existing key, fixed at the set-up; with the present name of the version column."""
    ttl: Ttl | None
    """When rows expire; None: never. With the present name of the time column; "" if that column was dropped."""
    committed: Mapping[UUID, int]
    """Per region, the highest generation whose rows this version holds; absent = none."""
    marked: Mapping[UUID, int]
    """The same by Lance's own marker, which lags briefly in a table without a key (flush.commits.append_pass)."""
    storage_version: str
    """Lance file version of new data files, such as "2.2"; SSTs use the same."""
    storage_options: Mapping[str, str] = field(repr=False)  # contains secrets
    routing: Routing
    """The parameters of the bucket function."""
    routing_is_stable: bool
    """Whether every row still goes to its original region; False if a hashed column was dropped."""
    _hash: BucketHash | RowHash
    caches: LanceCaches = field(default_factory=LanceCaches, repr=False)
    """Caches of the views that follow this one."""
    session: Session | None = field(default=None, repr=False)
    """The Lance session of this view; None for a separate one, which ends with the view."""

    @staticmethod
    @panics_as_errors
    def create(
        uri: str,
        schema: pa.Schema,
        key: Sequence[str],
        buckets: int,
        indexes: Sequence[IndexSpec],
        storage_options: Mapping[str, str] | None = None,
        wal_format: WalFormat = "lance",
        append_by: Sequence[str] | None = None,
        rules: WriteRules | None = None,
        ttl: Ttl | None = None,
    ) -> BaseTable:
        """Create an empty table with its key, its indexes and `buckets` regions.

        `append_by`: for a table without a key (`key` is empty), whose rows are only appended: the columns that route
        rows, () for all.
        `indexes`: the first commit with enough rows builds the vector indexes among them.
        Raises TableExists; NotALanceTable if the path holds something else; InvalidRows for schema, key, or indexes.
        """
        setup = _setup(buckets, indexes, wal_format, append_by, rules, ttl)
        create(open_store(uri, storage_options), uri, schema, key, setup)
        return BaseTable.open(uri, storage_options)

    @staticmethod
    @panics_as_errors
    def adopt(
        uri: str,
        key: Sequence[str],
        buckets: int,
        indexes: Sequence[IndexSpec],
        storage_options: Mapping[str, str] | None = None,
        wal_format: WalFormat | None = None,
        append_by: Sequence[str] | None = None,
        rules: WriteRules | None = None,
        ttl: Ttl | None = None,
    ) -> BaseTable:
        """Set up an existing Lance table for ingestion, and build its indexes. Its rows are unchanged.

        Also completes a set-up that crashed; a table that is already set up is returned unchanged. The key must have no
        nulls and no duplicates; this check reads its columns.
        `wal_format`: None for lance, or for arrow if another program initialised the table's MemWAL; the table then
        keeps its key and its regions, whatever `buckets` is.
        `append_by`: as for `create`; the table must not have a primary key.
        Raises NotALanceTable; UnsupportedTable; InvalidRows.
        """
        store = open_store(uri, storage_options)
        dataset = _existing(store, uri, None)
        if dataset.mem_wal_index_details() is None:
            refuse_written_over(uri, dataset, store)
        if REGIONS not in metadata_of(dataset):
            refuse_wiped(uri, dataset, store)
            setup = _setup(buckets, indexes, wal_format or "lance", append_by, rules, ttl)
            adopt(uri, dataset, key, setup, any_format=wal_format is None)
        complete(dataset, read_setup(metadata_of(dataset)))
        return BaseTable.open(uri, storage_options)

    @staticmethod
    @panics_as_errors
    def find(
        uri: str,
        storage_options: Mapping[str, str] | None = None,
        *,
        to_write: bool = False,
        caches: LanceCaches | None = None,
    ) -> BaseTable | None:
        """Return the table at `uri`, or None if the path is empty. Completes a creation that crashed.

        `caches`: as for `open`. `to_write`: on a local disk, set torn versions aside after a power cut
        (`flush.base.torn`), and sync the newest version unless it is already synced.
        Raises NotALanceTable if the path holds something else; NotInitialised; UnsupportedTable.
        """
        store = open_store(uri, storage_options)
        store.children("")  # memwal's client first: it fails at once, with one line; Lance retries for seconds.
        if to_write:
            set_torn_versions_aside(store, uri)
        caches = caches or LanceCaches()
        dataset = existing(store, uri, caches.session)
        if dataset is None:
            return None
        metadata = metadata_of(dataset)
        if REGIONS in metadata and dataset.mem_wal_index_details() is None:
            refuse_written_over(uri, dataset, store)
            complete(dataset, read_setup(metadata))
            return BaseTable.open(uri, storage_options, caches=caches)
        opened = [dataset]  # on S3 a second opening takes as long as claiming a region
        base = _shared_view(
            uri, store, caches, lambda session: opened.pop() if opened else _existing(store, uri, None, session)
        )
        if to_write:
            sync_newest(base.dataset)
        return base

    @staticmethod
    @panics_as_errors
    def open(
        uri: str,
        storage_options: Mapping[str, str] | None = None,
        version: int | None = None,
        caches: LanceCaches | None = None,
    ) -> BaseTable:
        """Open the table at its newest version, or at `version`. Writes nothing.

        `caches`: shared by a process that opens the table repeatedly; None for separate ones.
        Raises NotALanceTable; NotInitialised; UnsupportedTable; Corrupt if its manifest cannot be parsed.
        """
        store = open_store(uri, storage_options)
        if version is not None:
            return _view(uri, _existing(store, uri, version), store)
        return _shared_view(uri, store, caches or LanceCaches(), lambda session: _existing(store, uri, None, session))

    @property
    def table_id(self) -> str:
        """Random id from the table's creation. A table recreated at the same path has a different id."""
        return metadata_of(self.dataset).get(TABLE, b"").decode()

    @property
    def restored(self) -> Restored | None:
        """The backup that the table was restored from; None if it was not restored."""
        return restored_from(metadata_of(self.dataset))

    @property
    def puts_rejected(self) -> str | None:
        """The reason why the table takes no puts, with the remedy; None if it does."""
        return None if not self.unsupported else _remedy(next(iter(self.unsupported.items())), self.version)

    def expect_readable(self) -> None:
        """Raise UnsupportedTable if Lance cannot read the table because of the name of a column."""
        for name in LANCES_ROW_COLUMNS:
            if name in self.unsupported:
                raise UnsupportedTable(f"{self.uri}: {_remedy((name, self.unsupported[name]), self.version)}")

    @property
    def buckets(self) -> int:
        """Number of regions."""
        return len(self.regions)

    @property
    def hashed(self) -> tuple[str, ...]:
        """The columns used to compute the bucket of a row."""
        return self._hash.columns

    @property
    def routed_by(self) -> tuple[str, ...]:
        """The columns that determine the region of a row."""
        return self.key or self._hash.columns

    def expiry(self, now: float) -> Expiry | None:
        """Return the rows that have expired at `now` (Unix seconds), as an Expiry; None if rows never expire."""
        if self.ttl is None or not self.ttl.column:
            return None
        return Expiry.at(self.ttl, self.schema.field(self.ttl.column).type, now)

    @property
    def required(self) -> tuple[str, ...]:
        """Columns outside the key that must not be null in any put row."""
        declared, version = required_columns(self.schema, self.key), self.rules.version
        return (*declared, version) if version and version not in declared else declared

    @property
    def codec(self) -> EntryCodec:
        """A codec for the entries of this table's log."""
        return codec_for(self.wal_format, self.shape.rows)

    @cached_property
    def shape(self) -> Shape:
        """Columns and indexes, which may differ between versions."""
        return shape_of(self.dataset, self.schema, self.key, self.indexes, self.unsupported)

    @property
    def row_field_ids(self) -> tuple[int, ...] | None:
        """Field ids that its SSTs must have; None if they count from 0 without a gap, as Lance numbers them."""
        ids = row_field_ids(self.dataset, self.schema.names)
        return None if ids == tuple(range(len(ids))) else ids

    @panics_as_errors
    def latest(self) -> BaseTable:
        """Return the newest version; this object if it is still the newest. All later views share the caches.

        Raises UnsupportedTable if another table was created at its path in the meantime; what `open` raises.
        """
        if self.session is self.caches.session and self.dataset.latest_version == self.version:
            return self
        store = open_store(self.uri, self.storage_options)
        # Lance alone raises just a ValueError if storage does not answer.
        newest = _shared_view(self.uri, store, self.caches, lambda session: _existing(store, self.uri, None, session))
        if newest.table_id != self.table_id:
            raise UnsupportedTable(f"{self.uri}: another table was made here while this one was open; open it again")
        if newest.shape == self.shape:
            vars(newest)["shape"] = self.shape  # reads compare shapes; the same object makes that free
        return newest

    @panics_as_errors
    def is_kept(self) -> bool:
        """Return whether this version is still on storage. Raises the error of a storage that does not answer."""
        return any(each["version"] == self.version for each in self.dataset.version_refs())

    def vector_models(self) -> dict[str, VectorModel]:
        """Return the trained model of each column's vector index; columns without a usable index are absent."""
        return vector_models(self.dataset, self.indexes, self.storage_options)

    def route(self, rows: pa.Table | pa.RecordBatch) -> Buckets:
        """Return the bucket of every row, int32 in row order.

        The bucket is a pure function of the key, or of the row in a table without a key. `rows` needs only the columns
        in `hashed`.
        """
        return self._hash(rows)

    def route_into(self, buckets: int, rows: pa.Table | pa.RecordBatch) -> Buckets:
        """Return `route` for a table with `buckets` regions: the number before or after a resize."""
        return self.routing._replace(buckets=buckets).hash(self.schema)(rows)


def _setup(
    buckets: int,
    indexes: Sequence[IndexSpec],
    wal_format: WalFormat,
    append_by: Sequence[str] | None,
    rules: WriteRules | None,
    ttl: Ttl | None,
) -> Setup:
    by = None if append_by is None else tuple(append_by)
    return Setup(buckets, tuple(indexes), wal_format, append_by=by, rules=rules or WriteRules(), ttl=ttl)


def _newest_view(uri: str, store: ObjectStore, opened: Callable[[], lance.LanceDataset]) -> BaseTable:
    """Return a view of the newest version.

    Another program may supersede a version and clean it up before its manifest is read; then a newer version is opened.
    """
    for _ in range(_OPENINGS):
        dataset = opened()
        try:
            return _view(uri, dataset, store)
        except Corrupt:
            if dataset.latest_version == dataset.version:
                raise
    return _view(uri, opened(), store)


def _shared_view(
    uri: str, store: ObjectStore, caches: LanceCaches, opened: Callable[[Session], lance.LanceDataset]
) -> BaseTable:
    """Return `_newest_view`, opened with the session of `caches`."""
    session = caches.session
    newest = replace(_newest_view(uri, store, lambda: opened(session)), caches=caches, session=session)
    caches.opened(newest.dataset)
    return newest


def _view(uri: str, dataset: lance.LanceDataset, store: ObjectStore) -> BaseTable:
    metadata, details = metadata_of(dataset), dataset.mem_wal_index_details()
    if details is None or REGIONS not in metadata:
        if details is None:
            refuse_written_over(uri, dataset, store)
        if REGIONS not in metadata:
            refuse_wiped(uri, dataset, store)
        raise NotInitialised(f"{uri}: a Lance table that is not set up for ingestion; run `memwal init` once")
    setup, columns, unsupported = read_setup(metadata), column_ids(dataset), unsupported_columns(dataset)
    schema = pa.schema([field for field in dataset.schema if field.name not in unsupported])
    # A primary key that is declared later does not change a table that was set up without a key.
    key = key_columns(schema) if setup.append_by is None else ()
    routed_ids = setup.routed_ids or setup.append_ids
    complete_columns = set(routed_ids) <= set(columns.values())
    present = complete_columns and (bool(key) or setup.append_by is not None)
    if not present and setup.append_by != ():  # (): all columns route rows
        raise UnsupportedTable(
            f"{uri}: its {'key' if setup.append_by is None else 'regions.by'} columns are missing in version "
            f"{dataset.version}; restore a version that has them"
        )
    names = {number: name for name, number in columns.items()}
    if setup.version_id is not None and setup.version_id not in names:
        raise UnsupportedTable(
            f"{uri}: its version column is missing in version {dataset.version}; restore a version that has it"
        )
    version_column = "" if setup.version_id is None else names[setup.version_id]
    regions, version = bucket_regions(setup.buckets), setup.routing
    if setup.wal_format == "arrow":
        regions = published_regions(uri, details, key[0], field_id(dataset, key[0]))
        version = int(details["sharding_specs"][0]["spec_id"])
    done = read_progress(store, dataset.version)
    by_first = key and not setup.routed_ids
    routing = Routing(len(regions), key[0]) if by_first else Routing.by_columns(routed_ids, columns, setup.buckets)
    return BaseTable(
        uri=uri if "://" in uri else store.url(""),
        dataset=dataset,
        version=dataset.version,
        schema=schema,
        unsupported=unsupported,
        key=key,
        append_by=tuple(name for _, name in routing.by) if setup.append_by else setup.append_by,
        indexes=present_indexes(dataset, schema, setup.indexes, setup.index_ids),
        regions=regions,
        routing_version=version,
        wal_format=setup.wal_format,
        rules=setup.rules._replace(version=version_column),
        ttl=_present_ttl(setup, schema, columns),
        committed=done.committed,
        marked=done.marked,
        storage_version=dataset.data_storage_version,
        storage_options=store.storage_options,
        routing=routing,
        routing_is_stable=complete_columns,
        _hash=routing.hash(schema),
    )


def _remedy(column: tuple[str, str], version: int) -> str:
    name, reason = column
    return (
        f"{reason}; memwal cannot hold it since version {version} or an earlier one: drop it with "
        f"LanceDataset.drop_columns([{name!r}]), or restore a version without it"
    )


def _present_ttl(setup: Setup, schema: pa.Schema, columns: Mapping[str, int]) -> Ttl | None:
    """Return the ttl with the present name of its column. If the column was dropped, rows count as if it were null."""
    if setup.ttl is None:
        return None
    names = (name for name, number in columns.items() if number == setup.ttl_id and is_time(schema.field(name).type))
    return setup.ttl._replace(column=next(names, ""))


def _existing(store: ObjectStore, uri: str, version: int | None, session: Session | None = None) -> lance.LanceDataset:
    dataset = open_dataset(store, uri, version, session)
    if dataset is None:
        raise NotALanceTable.at(uri, version)
    return dataset
