"""The base Lance table as one immutable view: schema, key, buckets, indexes, and what is committed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import lance
import pyarrow as pa

from flush.errors import NotALanceTable, NotInitialised, TableExists, UnsupportedTable
from flush.field_ids import field_id, row_field_ids, with_field_ids
from flush.lance_dataset import open_dataset
from flush.sharding import BucketHash, Buckets
from flush.sharding_spec import Regions, bucket_regions, published_regions
from flush.table_manifest import compacted_generations
from flush.table_setup import (
    REGIONS,
    TABLE,
    Setup,
    complete,
    declare,
    declare_beside,
    is_vacant,
    keyed_schema,
    metadata_of,
    read_setup,
    setup_metadata,
)
from flush.vector_models import vector_models
from memtable import IndexSpec, InvalidRows, VectorModel, check_indexes, key_columns, row_schema
from wal import EntryCodec, ObjectStore, WalFormat, codec_for, open_store
from wal import regions as regions_of
from wal.layout import ROOT, manifest_prefix


@dataclass(frozen=True, eq=False)
class BaseTable:
    """One version of the base table.

    Thread safety. Any thread. Read from `dataset`, do not write through it: pylance would move it to the new
    version.
    Invariants. Everything here is of `version`; `latest()` gives a newer view.
    """

    uri: str
    """Absolute, so that it names this table from whatever directory it is used later."""
    dataset: lance.LanceDataset
    version: int
    schema: pa.Schema
    """Base schema, the key's field metadata included, schema metadata left out."""
    key: tuple[str, ...]
    indexes: tuple[IndexSpec, ...]
    regions: Regions
    """Ids of the regions; rows of bucket n go to region n."""
    wal_format: WalFormat
    """How the entries of its log are written, fixed when it was set up."""
    committed: Mapping[UUID, int]
    """Per region the highest generation this version holds; absent = none."""
    storage_version: str
    """Lance file version of new data files, such as "2.2"; SSTs use the same."""
    storage_options: Mapping[str, str] = field(repr=False)  # secrets are among them
    _hash: BucketHash

    @staticmethod
    def create(
        uri: str,
        schema: pa.Schema,
        key: Sequence[str],
        buckets: int,
        indexes: Sequence[IndexSpec],
        storage_options: Mapping[str, str] | None = None,
        wal_format: WalFormat = "lance",
    ) -> BaseTable:
        """Create an empty table with its key, its indexes and `buckets` regions.

        The vector indexes among `indexes` are built by the first commit that has rows enough for them.
        Raises TableExists; NotALanceTable where something else is there; InvalidRows for schema, key, or
        indexes.
        """
        store, setup = open_store(uri, storage_options), Setup(buckets, tuple(indexes), wal_format)
        keyed = keyed_schema(schema, key, setup_metadata(setup))
        _check_definition(keyed, key, setup)
        if not is_vacant(store):
            if open_dataset(store, uri) is not None:
                raise TableExists(f"{uri}: a Lance table is there already; open it, or choose another uri")
            raise _not_a_table(uri)
        try:
            dataset = lance.write_dataset(keyed.empty_table(), uri, schema=keyed, storage_options=store.storage_options)
        except OSError as error:
            if open_dataset(store, uri) is not None:
                raise TableExists(f"{uri}: another process created the table just now; open it") from error
            raise
        complete(dataset, setup)
        return BaseTable.open(uri, storage_options)

    @staticmethod
    def adopt(
        uri: str,
        key: Sequence[str],
        buckets: int,
        indexes: Sequence[IndexSpec],
        storage_options: Mapping[str, str] | None = None,
        wal_format: WalFormat | None = None,
    ) -> BaseTable:
        """Set up a Lance table that is there for ingestion, and build its indexes; its rows stay as they are.

        `wal_format`: None for lance, or arrow where another program initialised the table's MemWAL; such a table
        keeps its key and its regions, whatever `buckets` says. Also completes a set-up that crashed; a complete one
        is returned as it is. The key must be without nulls and duplicates, which is checked by reading its columns.
        Raises NotALanceTable; UnsupportedTable; InvalidRows.
        """
        store = open_store(uri, storage_options)
        dataset = _existing(store, uri, None)
        if dataset.mem_wal_index_details() is None:
            _refuse_written_over(uri, dataset, store)
        if REGIONS not in metadata_of(dataset):
            key, details = _key_of(uri, dataset, key), dataset.mem_wal_index_details()
            keyed, setup = keyed_schema(dataset.schema, key, {}), Setup(buckets, tuple(indexes), wal_format or "lance")
            if details is not None:
                keyed, setup = dataset.schema, _setup_beside(uri, dataset, details, key, indexes, wal_format)
            _check_definition(keyed, key, setup)
            _check_unique(uri, dataset, key)
            if details is None:
                declare(dataset, key, setup)
            else:
                declare_beside(dataset, setup)
        complete(dataset, read_setup(metadata_of(dataset)))
        return BaseTable.open(uri, storage_options)

    @staticmethod
    def find(uri: str, storage_options: Mapping[str, str] | None = None) -> BaseTable | None:
        """The table at `uri`, or None where nothing is there. Completes a creation that crashed half way.

        Raises NotALanceTable where something else is there; NotInitialised; UnsupportedTable.
        """
        store = open_store(uri, storage_options)
        store.children("")  # Our client first: it says at once, in one line, what is wrong; Lance's tries for seconds.
        dataset = open_dataset(store, uri)
        if dataset is None:
            if is_vacant(store):
                return None
            raise _not_a_table(uri)
        metadata = metadata_of(dataset)
        if REGIONS in metadata and dataset.mem_wal_index_details() is None:
            _refuse_written_over(uri, dataset, store)
            complete(dataset, read_setup(metadata))
        return BaseTable.open(uri, storage_options)

    @staticmethod
    def open(uri: str, storage_options: Mapping[str, str] | None = None, version: int | None = None) -> BaseTable:
        """The table at its newest version, or at `version`. Writes nothing.

        Raises NotALanceTable; NotInitialised; UnsupportedTable; Corrupt where its manifest cannot be parsed.
        """
        store = open_store(uri, storage_options)
        return _view(uri, _existing(store, uri, version), store)

    @property
    def table_id(self) -> str:
        """Random id that the table got at its creation: a table made anew at the same path has another one."""
        return metadata_of(self.dataset).get(TABLE, b"").decode()

    @property
    def buckets(self) -> int:
        """Number of regions."""
        return len(self.regions)

    @property
    def codec(self) -> EntryCodec:
        """A codec for the entries of this table's log."""
        rows = row_schema(with_field_ids(self.schema, self.dataset), self.key)
        return codec_for(self.wal_format, rows.with_metadata(self.dataset.schema.metadata))

    @property
    def row_field_ids(self) -> tuple[int, ...] | None:
        """Field ids that its SSTs must have, None where they count from 0 without a gap, as Lance numbers them."""
        ids = row_field_ids(self.dataset)
        return None if ids == tuple(range(len(ids))) else ids

    def latest(self) -> BaseTable:
        """The newest version: this very object where it still is; the dataset's caches are kept.

        Raises UnsupportedTable where another table was made at its path meanwhile; what `open` raises.
        """
        if self.dataset.latest_version == self.version:
            return self
        store = open_store(self.uri, self.storage_options)
        dataset = lance.dataset(self.uri, storage_options=store.storage_options, session=self.dataset.session())
        newest = _view(self.uri, dataset, store)
        if newest.table_id != self.table_id:
            raise UnsupportedTable(f"{self.uri}: another table was made here while this one was open; open it again")
        return newest

    def vector_models(self) -> dict[str, VectorModel]:
        """By column, what its vector indexes were trained to; columns without an index that serves are absent."""
        return vector_models(self.dataset, self.indexes, self.storage_options)

    def route(self, rows: pa.Table | pa.RecordBatch) -> Buckets:
        """Bucket of every row, int32 in row order: a pure function of the key. `rows` need hold the key
        columns only.
        """
        return self._hash(rows)


def _view(uri: str, dataset: lance.LanceDataset, store: ObjectStore) -> BaseTable:
    metadata, details = metadata_of(dataset), dataset.mem_wal_index_details()
    if details is None or REGIONS not in metadata:
        if details is None:
            _refuse_written_over(uri, dataset, store)
        raise NotInitialised(f"{uri}: a Lance table that is not set up for ingestion; run `memwal init` once")
    setup = read_setup(metadata)
    schema = pa.schema(list(dataset.schema))
    key = key_columns(schema)
    if not key:
        raise UnsupportedTable(
            f"{uri}: its key columns are gone from version {dataset.version}; restore a version that has them"
        )
    regions = bucket_regions(setup.buckets)
    if setup.wal_format == "arrow":
        regions = published_regions(uri, details, key[0], field_id(dataset, key[0]))
    return BaseTable(
        uri=uri if "://" in uri else store.url(""),
        dataset=dataset,
        version=dataset.version,
        schema=schema,
        key=key,
        # A column that was dropped since took its index with it.
        indexes=tuple(spec for spec in setup.indexes if spec.column in schema.names),
        regions=regions,
        wal_format=setup.wal_format,
        committed=compacted_generations(store, dataset.version),
        storage_version=dataset.data_storage_version,
        storage_options=store.storage_options,
        _hash=BucketHash(dataset, key[0], len(regions)),
    )


def _refuse_written_over(uri: str, dataset: lance.LanceDataset, store: ObjectStore) -> None:
    """A table without Lance's MemWAL index whose regions were claimed: by the protocol they never are before it exists.

    What is committed went with the index, so nobody can tell which SSTs the rows that are there hold. Where the index
    was made and a region claimed since `dataset` was opened, it is moved to the newest version, and nothing is refused.
    """
    if not any(list(store.list(manifest_prefix(region))) for region in regions_of(store)):
        return
    dataset.checkout_latest()  # type: ignore[no-untyped-call]
    if dataset.mem_wal_index_details() is not None:
        return
    raise UnsupportedTable(
        f"{uri}: version {dataset.version} was written over by another program, and the progress of its regions is "
        "gone; restore the version before that (LanceDataset.restore), or, to keep its rows as they are and give up "
        f"those that were not committed, move {store.url(ROOT.rstrip('/'))} away and run `memwal init`"
    )


def _key_of(uri: str, dataset: lance.LanceDataset, key: Sequence[str]) -> tuple[str, ...]:
    """The key to adopt a table by: the primary key it declares, which Lance never changes, else `key`."""
    declared = key_columns(dataset.schema)
    if declared and tuple(key) not in ((), declared):
        raise InvalidRows(f"{uri}: its primary key is {', '.join(declared)}, not {', '.join(key)}; name that one")
    return declared or tuple(key)


def _setup_beside(
    uri: str,
    dataset: lance.LanceDataset,
    details: Mapping[str, Any],
    key: Sequence[str],
    indexes: Sequence[IndexSpec],
    wal_format: WalFormat | None,
) -> Setup:
    """The set-up of a table whose MemWAL another program initialised, as the `details` say."""
    if wal_format == "lance":
        raise UnsupportedTable(
            f"{uri}: its MemWAL was initialised by another program, whose regions hold entries in arrow format; "
            "set wal.format = 'arrow', or copy the rows into a new table"
        )
    if not key_columns(dataset.schema):
        raise UnsupportedTable(
            f"{uri}: its MemWAL was initialised by another program, and it has no primary key; copy the rows into a "
            "new table"
        )
    regions = published_regions(uri, details, key[0], field_id(dataset, key[0]))
    return Setup(len(regions), tuple(indexes), "arrow")


def _existing(store: ObjectStore, uri: str, version: int | None) -> lance.LanceDataset:
    dataset = open_dataset(store, uri, version)
    if dataset is None:
        raise _not_a_table(uri, version)
    return dataset


def _not_a_table(uri: str, version: int | None = None) -> NotALanceTable:
    which = "" if version is None else f" of version {version}"
    return NotALanceTable(f"{uri}: no Lance table{which} is there; correct table.uri")


def _check_definition(schema: pa.Schema, key: Sequence[str], setup: Setup) -> None:
    if setup.buckets < 1:
        raise InvalidRows(f"regions.count = {setup.buckets}: a table has at least 1 region")
    row_schema(schema, key)
    first = schema.field(key[0])
    if setup.wal_format == "arrow" and (pa.types.is_binary(first.type) or pa.types.is_large_binary(first.type)):
        raise InvalidRows(
            f"key column {first.name!r} has the type {first.type}, by which Lance cannot shard a table with "
            "wal.format = 'arrow': put another column first in the key, or choose wal.format = 'lance'",
            column=first.name,
        )
    for name in key:
        if pa.types.is_date32(schema.field(name).type):
            raise InvalidRows(
                f"key column {name!r} has the type date32, which Lance's MemWAL cannot have in a key: "
                "use its days as int32, or a string",
                column=name,
            )
    check_indexes(schema, setup.indexes)


def _check_unique(uri: str, dataset: lance.LanceDataset, key: Sequence[str]) -> None:
    keys = dataset.to_table(columns=list(key))
    doubled = keys.num_rows - keys.group_by(list(key)).aggregate([]).num_rows
    if doubled:
        raise InvalidRows(
            f"{uri}: {doubled} of {keys.num_rows} rows repeat a key of {', '.join(key)}; remove them first, "
            "or choose another key"
        )
