"""How Lance writes the data file of an SST: format version, page size, compression, schema metadata.

Compression is set by Lance's field metadata:

    lance-encoding:compression         zstd | lz4 | fsst | none; without it Lance chooses by the column's values
    lance-encoding:compression-level   zstd: 1 to 22

The file keeps that metadata. Readers use neither it nor the schema's, so SSTs may differ in it from the base table and
from each other.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar

import lance
import pyarrow as pa

from memwal.flush.base.adoptable import unfit_for_files
from memwal.flush.errors import InvalidFileOptions
from memwal.wal.errors import first_line
from memwal.wal.panics import panics_as_errors

STORAGE_VERSIONS = ("2.0", "2.1", "2.2")
SCHEMES = ("zstd", "lz4", "fsst", "none")
PAGE_SIZE = 256 << 10
"""Bytes. Lance's own page of 8 MiB leaves the processor's cache before it is written: a file of vectors takes 1.35
times as long.
"""
PAGE_SIZE_MIN, PAGE_SIZE_MAX = 4 << 10, 1 << 30

_SCHEME, _LEVEL = b"lance-encoding:compression", b"lance-encoding:compression-level"
_ZSTD_LEVELS = range(1, 23)
_TAKEN = ("memwal:", "lance:", "lance-")


@dataclass(frozen=True)
class FileOptions:
    """Settings of the file writer.

    Invariants. Immutable; checked at construction, which raises InvalidFileOptions with one line.
    """

    storage_version: str | None = None
    """One of STORAGE_VERSIONS; None: the base table's."""
    page_size: int = PAGE_SIZE
    """Bytes of a column that are gathered into one page; larger batches become larger pages."""
    compression: Mapping[str, str] = field(default_factory=dict)
    """Column pattern ("body", "*_text") -> scheme, or "zstd:9" with its level; the first match counts."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Schema metadata of the SST."""

    def __post_init__(self) -> None:
        if self.storage_version not in (None, *STORAGE_VERSIONS):
            versions = ", ".join(STORAGE_VERSIONS)
            raise InvalidFileOptions(f"storage_version = {self.storage_version!r}: use one of {versions}")
        if not PAGE_SIZE_MIN <= self.page_size <= PAGE_SIZE_MAX:
            raise InvalidFileOptions(f"page_size = {self.page_size}: use {PAGE_SIZE_MIN} to {PAGE_SIZE_MAX} bytes")
        check_compression(self.compression)
        check_metadata(self.metadata)

    def version(self, base: str | None) -> str | None:
        """Return the format version of an SST whose base table has the version `base`."""
        return self.storage_version or base

    def schema(self, rows: pa.Schema) -> pa.Schema:
        """Return `rows` as the schema of the file: fields with their compression, and the schema's metadata."""
        if not (self.compression or self.metadata):
            return rows
        fields = list(rows)
        for place, column in enumerate(rows):
            if (pattern := self._pattern(column.name)) is not None:
                compressed = _field_metadata(pattern, self.compression[pattern])
                fields[place] = column.with_metadata({**(column.metadata or {}), **compressed})
        return pa.schema(fields, metadata=dict(self.metadata) or None)

    def expect_fit(self, columns: pa.Schema, base: str | None) -> None:
        """Raise InvalidFileOptions, naming the column, if Lance cannot write SSTs of these columns with the options.

        `columns`: of the base table. `base`: its format version, None for Lance's default. Writes one row of nulls,
        like a delete, to memory: a few milliseconds.
        """
        version = self.version(base)
        if (reason := unfit_for_files(columns, version or "")) is not None:
            raise InvalidFileOptions(f"storage_version = {version!r}: {reason}; choose another version")
        if (error := self._write_error(columns, version)) is None:
            return
        for column in columns:
            if (of_column := self._write_error(pa.schema([column]), version)) is not None:
                chosen = self._pattern(column.name)
                what = "" if chosen is None else f" with compression {self.compression[chosen]!r}"
                raise InvalidFileOptions(
                    f"storage_version = {version!r}: Lance cannot write column {column.name!r} of type {column.type}"
                    f"{what} ({of_column}); choose another version or compression"
                )
        raise InvalidFileOptions(f"Lance cannot write SSTs with these settings ({error})")

    def _write_error(self, columns: pa.Schema, version: str | None) -> str | None:
        """Return the error of writing a row of nulls, in a line; None if Lance writes it."""
        schema = self.schema(pa.schema([field.with_nullable(True).remove_metadata() for field in columns]))
        try:
            with panics_as_errors:
                _write_nulls(schema.serialize().to_pybytes(), version, self.page_size * len(schema))
        except (OSError, ValueError, RuntimeError, pa.ArrowException) as error:
            return first_line(error)
        return None

    def _pattern(self, column: str) -> str | None:
        """Return the first pattern of `compression` that matches a column; None without one."""
        return next((pattern for pattern in self.compression if fnmatch.fnmatchcase(column, pattern)), None)


@lru_cache
def _write_nulls(schema: bytes, version: Any, cache_bytes: int) -> None:
    """Write a row of nulls of `schema` (serialized) to memory, once: the tables of a fleet often have equal columns.

    A failed write is not remembered.
    """
    row_schema = pa.ipc.read_schema(pa.py_buffer(schema))
    row = pa.Table.from_arrays([pa.nulls(1, field.type) for field in row_schema], schema=row_schema)
    lance.write_dataset(row, "memory://", data_storage_version=version, data_cache_bytes=cache_bytes)


T = TypeVar("T", bound=Mapping[str, str])


def check_compression(compression: T) -> T:
    """Return `compression`. Raises InvalidFileOptions for a value that is not a compression."""
    for pattern, wanted in compression.items():
        _field_metadata(pattern, wanted)
    return compression


def check_metadata(metadata: T) -> T:
    """Return `metadata`. Raises InvalidFileOptions for a name that Lance or memwal reserves."""
    for name in metadata:
        if name.startswith(_TAKEN):
            raise InvalidFileOptions(f"metadata {name!r}: names that begin with {', '.join(_TAKEN)} are taken")
    return metadata


def _field_metadata(pattern: str, wanted: str) -> dict[bytes, bytes]:
    scheme, colon, level = wanted.partition(":")
    if scheme not in SCHEMES:
        raise InvalidFileOptions(f"compression of {pattern!r} = {wanted!r}: use one of {', '.join(SCHEMES)}")
    if not colon:
        return {_SCHEME: scheme.encode()}
    if scheme != "zstd" or not level.isdecimal() or int(level) not in _ZSTD_LEVELS:
        raise InvalidFileOptions(
            f"compression of {pattern!r} = {wanted!r}: only zstd has levels, 1 to {_ZSTD_LEVELS[-1]}, such as 'zstd:9'"
        )
    return {_SCHEME: scheme.encode(), _LEVEL: level.encode()}
