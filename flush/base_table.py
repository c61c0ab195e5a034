"""The base Lance table as one immutable view: schema, key, buckets, indexes, and what is committed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import lance
import pyarrow as pa

from flush.errors import NotALanceTable, NotInitialised, TableExists, UnsupportedTable
from flush.sharding import BucketHash, Buckets
from flush.table_manifest import compacted_generations
from flush.table_setup import REGIONS, TABLE, complete, declare, is_vacant, keyed_schema, read_setup, setup_metadata
from memtable import IndexSpec, InvalidRows, check_indexes, key_columns, row_schema
from wal import ObjectStore, open_store


@dataclass(frozen=True, eq=False)
class BaseTable:
    """One version of the base table.

    Thread safety. Any thread. Read from `dataset`, do not write through it: pylance would move it to the new
    version.
    Invariants. Everything here is of `version`; `latest()` gives a newer view.
    """

    uri: str
    dataset: lance.LanceDataset
    version: int
    schema: pa.Schema
    """Base schema, the key's field metadata included, schema metadata left out."""
    key: tuple[str, ...]
    indexes: tuple[IndexSpec, ...]
    buckets: int
    committed: Mapping[UUID, int]
    """Per region the highest generation this version holds; absent = none."""
    storage_version: str
    """Lance file version of new data files, such as "2.2"; SSTs use the same."""
    storage_options: Mapping[str, str]
    _hash: BucketHash

    @staticmethod
    def create(
        uri: str,
        schema: pa.Schema,
        key: Sequence[str],
        buckets: int,
        indexes: Sequence[IndexSpec],
        storage_options: Mapping[str, str] | None = None,
    ) -> BaseTable:
        """Create an empty table with its key, its indexes and `buckets` regions.

        The vector indexes among `indexes` are built by the first commit that has rows enough for them.
        Raises TableExists; NotALanceTable where something else is there; InvalidRows for schema, key, or
        indexes.
        """
        options = dict(storage_options or {})
        keyed = keyed_schema(schema, key, setup_metadata(buckets, indexes))
        _check_definition(keyed, key, buckets, indexes)
        store = open_store(uri, options)
        if not is_vacant(store):
            if _opened(uri, options, None) is not None:
                raise TableExists(f"{uri}: a Lance table is there already; open it, or choose another uri")
            raise _not_a_table(uri)
        try:
            dataset = lance.write_dataset(keyed.empty_table(), uri, schema=keyed, storage_options=options)
        except OSError as error:
            if _opened(uri, options, None) is not None:
                raise TableExists(f"{uri}: another process created the table just now; open it") from error
            raise
        complete(dataset, indexes)
        return BaseTable.open(uri, options)

    @staticmethod
    def adopt(
        uri: str,
        key: Sequence[str],
        buckets: int,
        indexes: Sequence[IndexSpec],
        storage_options: Mapping[str, str] | None = None,
    ) -> BaseTable:
        """Set up a Lance table that is there for ingestion, and build its indexes; its rows stay as they are.

        Also completes a set-up that crashed; a complete one is returned as it is. The key must be without
        nulls and duplicates, which is checked by reading its columns.
        Raises NotALanceTable; UnsupportedTable; InvalidRows.
        """
        options = dict(storage_options or {})
        dataset = _existing(uri, options, None)
        if REGIONS not in (dataset.schema.metadata or {}):
            if dataset.mem_wal_index_details() is not None:
                raise _foreign(uri)
            _check_field_ids(uri, dataset)
            _check_definition(keyed_schema(dataset.schema, key, {}), key, buckets, indexes)
            _check_unique(uri, dataset, key)
            declare(dataset, key, buckets, indexes)
        complete(dataset, read_setup(dataset.schema.metadata)[1])
        return BaseTable.open(uri, options)

    @staticmethod
    def find(uri: str, storage_options: Mapping[str, str] | None = None) -> BaseTable | None:
        """The table at `uri`, or None where nothing is there. Completes a creation that crashed half way.

        Raises NotALanceTable where something else is there; NotInitialised; UnsupportedTable.
        """
        options = dict(storage_options or {})
        dataset = _opened(uri, options, None)
        if dataset is None:
            if is_vacant(open_store(uri, options)):
                return None
            raise _not_a_table(uri)
        if REGIONS in (dataset.schema.metadata or {}) and dataset.mem_wal_index_details() is None:
            complete(dataset, read_setup(dataset.schema.metadata)[1])
        return BaseTable.open(uri, options)

    @staticmethod
    def open(uri: str, storage_options: Mapping[str, str] | None = None, version: int | None = None) -> BaseTable:
        """The table at its newest version, or at `version`. Writes nothing.

        Raises NotALanceTable; NotInitialised; UnsupportedTable; Corrupt where its manifest cannot be parsed.
        """
        options = dict(storage_options or {})
        return _view(uri, _existing(uri, options, version), options, open_store(uri, options))

    @property
    def table_id(self) -> str:
        """Random id that the table got at its creation: a table made anew at the same path has another one."""
        return str((self.dataset.schema.metadata or {}).get(TABLE, b"").decode())

    def latest(self) -> BaseTable:
        """The newest version: this very object where it still is; the dataset's caches are kept."""
        if self.dataset.latest_version == self.version:
            return self
        options = dict(self.storage_options)
        dataset = lance.dataset(self.uri, storage_options=options, session=self.dataset.session())
        return _view(self.uri, dataset, options, open_store(self.uri, options))

    def route(self, rows: pa.Table | pa.RecordBatch) -> Buckets:
        """Bucket of every row, int32 in row order: a pure function of the key. `rows` need hold the key
        columns only.
        """
        return self._hash(rows)


def _view(uri: str, dataset: lance.LanceDataset, options: dict[str, str], store: ObjectStore) -> BaseTable:
    metadata = dataset.schema.metadata or {}
    initialised = dataset.mem_wal_index_details() is not None
    if REGIONS not in metadata and initialised:
        raise _foreign(uri)
    if not initialised:
        raise NotInitialised(f"{uri}: a Lance table that is not set up for ingestion; run `memwal init` once")
    _check_field_ids(uri, dataset)
    buckets, indexes = read_setup(metadata)
    schema = pa.schema(list(dataset.schema))
    key = key_columns(schema)
    return BaseTable(
        uri=uri,
        dataset=dataset,
        version=dataset.version,
        schema=schema,
        key=key,
        indexes=indexes,
        buckets=buckets,
        committed=compacted_generations(store, dataset.version),
        storage_version=dataset.data_storage_version,
        storage_options=options,
        _hash=BucketHash(dataset, key[0], buckets),
    )


def _opened(uri: str, options: dict[str, str], version: int | None) -> lance.LanceDataset | None:
    """The dataset, or None where pylance finds none. OSError of storage passes."""
    try:
        return lance.dataset(uri, version=version, storage_options=options)
    except ValueError:
        return None


def _existing(uri: str, options: dict[str, str], version: int | None) -> lance.LanceDataset:
    dataset = _opened(uri, options, version)
    if dataset is None:
        raise _not_a_table(uri, version)
    return dataset


def _not_a_table(uri: str, version: int | None = None) -> NotALanceTable:
    which = "" if version is None else f" of version {version}"
    return NotALanceTable(f"{uri}: no Lance table{which} is there; correct table.uri")


def _foreign(uri: str) -> UnsupportedTable:
    return UnsupportedTable(
        f"{uri}: its MemWAL was initialised by another writer, whose regions use the arrow WAL format; "
        "this version writes the lance format only: copy the rows into a new table"
    )


def _check_definition(schema: pa.Schema, key: Sequence[str], buckets: int, indexes: Sequence[IndexSpec]) -> None:
    if buckets < 1:
        raise InvalidRows(f"regions.count = {buckets}: a table has at least 1 region")
    row_schema(schema, key)
    for name in key:
        if pa.types.is_date32(schema.field(name).type):
            raise InvalidRows(
                f"key column {name!r} has the type date32, which Lance's MemWAL cannot have in a key: "
                "use its days as int32, or a string",
                column=name,
            )
    check_indexes(schema, indexes)


def _check_unique(uri: str, dataset: lance.LanceDataset, key: Sequence[str]) -> None:
    keys = dataset.to_table(columns=list(key))
    doubled = keys.num_rows - keys.group_by(list(key)).aggregate([]).num_rows
    if doubled:
        raise InvalidRows(
            f"{uri}: {doubled} of {keys.num_rows} rows repeat a key of {', '.join(key)}; remove them first, "
            "or choose another key"
        )


def _check_field_ids(uri: str, dataset: lance.LanceDataset) -> None:
    """SSTs number their fields from 0; where the table does not, readers would pair the wrong columns."""
    ids = list(_field_ids(dataset.lance_schema.fields()))
    if ids != list(range(len(ids))):
        raise UnsupportedTable(
            f"{uri}: its field ids {ids} have gaps, since columns were dropped or added; "
            "this version needs them gapless: copy the rows into a new table"
        )


def _field_ids(fields: Sequence[Any]) -> Iterator[int]:
    for field in fields:
        yield field.id()
        yield from _field_ids(field.children())
