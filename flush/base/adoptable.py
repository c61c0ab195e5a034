"""Check which Lance tables and columns can hold rows put through MemWAL, and that their key is unique and never null.

Found by running pylance 14.0.2, for columns of types that `memtable.schema` allows:

    file format 0.1               values of nested columns come back changed
    file format 2.0, a struct     a null struct cannot be written, and a delete is a row of nulls
    a blob column                 a scan returns the position of the bytes, not the bytes

The key columns are read once. Memory holds 64 bits of each key, for up to _HELD keys; a larger table is read several
times. Keys with equal hashes are compared by value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import lance
import numpy as np
import pyarrow as pa

from memwal.flush.base.row_hash import row_hashes
from memwal.flush.base.siphash import Hashes
from memwal.flush.errors import UnsupportedTable
from memwal.memtable import InvalidRows, unsupported
from memwal.wal.codec.lance_arrays import has_struct

_HELD = 1 << 23
"""Hashes in memory at once: 64 MiB, and the same again to sort them."""
_COMPARED = 100_000
"""Rows with a repeated hash whose keys are held in memory."""
_BATCH_ROWS, _READ_AHEAD, _READ_BUFFER = 1 << 16, 4, 64 << 20
_BLOB = b"lance-encoding:blob"


_COPY = "copy its rows into a new table"


def unfit_reason(dataset: lance.LanceDataset) -> str | None:
    """Return in one line why the table cannot hold rows put through MemWAL, without its name; None if it can."""
    if (version := dataset.data_storage_version) == "0.1":
        return f"its files have the format {version}, whose nested values come back changed: {_COPY}"
    return next(iter(unsupported_columns(dataset).values()), None)


def unsupported_columns(dataset: lance.LanceDataset) -> dict[str, str]:
    """Return the columns that cannot hold values put through MemWAL, each with the reason and the remedy in one line.

    Another program, or an older memwal, may have added them.
    """
    reasons = {}
    for field in dataset.schema:
        kind = field.type
        is_blob = isinstance(kind, pa.BaseExtensionType) and kind.extension_name.startswith("lance.blob")
        if is_blob or _BLOB in (field.metadata or {}):
            reasons[field.name] = (
                f"column {field.name!r} is a blob column, and scans do not return the bytes of those: {_COPY}"
            )
        elif (reason := unsupported(field)) is not None:
            reasons[field.name] = reason
        elif (reason := unfit_for_files(pa.schema([field]), dataset.data_storage_version)) is not None:
            reasons[field.name] = f"{reason}: {_COPY}"
    return reasons


def unfit_for_files(schema: pa.Schema, version: str) -> str | None:
    """Return in one line why files of the format `version` cannot hold rows of `schema`; None if they can.

    A delete is a row of nulls, so every struct may be null.
    """
    for field in schema:
        if version == "2.0" and has_struct(field.type):
            return (
                f"column {field.name!r} has the type {field.type}, and files of the format 2.0 hold no null structs, "
                "which a delete needs"
            )
    return None


def expect_fit(uri: str, dataset: lance.LanceDataset) -> None:
    """Raise UnsupportedTable if `unfit_reason` returns a reason."""
    if (reason := unfit_reason(dataset)) is not None:
        raise UnsupportedTable(f"{uri}: {reason}")


def expect_key(uri: str, dataset: lance.LanceDataset, key: Sequence[str]) -> None:
    """Raise InvalidRows if a row has a null in a column of `key`, or the key of another row."""
    rows = dataset.count_rows()
    parts = max(1, -(-rows // _HELD))
    by_part = [_repeated(np.concatenate([*_hashes(uri, dataset, key, part, parts)])) for part in range(parts)]
    repeated = np.concatenate(by_part)
    if not len(repeated):
        return
    keys = _with_hash(dataset, key, np.sort(repeated))
    doubled = keys.num_rows - keys.group_by(list(key)).aggregate([]).num_rows
    if doubled:
        least = "at least " if keys.num_rows >= _COMPARED else ""
        raise InvalidRows(
            f"{uri}: {least}{doubled} of {rows} rows repeat a key of {', '.join(key)}; remove them first, or choose "
            "another key"
        )


def _hashes(uri: str, dataset: lance.LanceDataset, key: Sequence[str], part: int, parts: int) -> Iterator[Hashes]:
    """Yield the key hashes of each batch that belong to `part` of `parts`."""
    yield np.empty(0, np.uint64)
    for batch in _batches(dataset, key):
        for name in key:
            if count := batch.column(name).null_count:
                raise InvalidRows(
                    f"{uri}: column {name!r} is null in {count} or more rows, and a key is never null; give these rows "
                    "a value, or choose another key",
                    column=name,
                )
        hashes = _hash(batch)
        yield hashes if parts == 1 else hashes[hashes % np.uint64(parts) == part]


def _with_hash(dataset: lance.LanceDataset, key: Sequence[str], wanted: Hashes) -> pa.Table:
    """Return the keys whose hash is in `wanted` (sorted); stop after the batch that reaches _COMPARED keys."""
    kept, rows = [dataset.schema.empty_table().select(list(key))], 0
    for batch in _batches(dataset, key):
        hashes = _hash(batch)
        at = np.minimum(np.searchsorted(wanted, hashes), len(wanted) - 1)
        kept.append(pa.Table.from_batches([batch]).filter(pa.array(wanted[at] == hashes)).cast(kept[0].schema))
        rows += kept[-1].num_rows
        if rows >= _COMPARED:
            break
    return pa.concat_tables(kept)


def _batches(dataset: lance.LanceDataset, key: Sequence[str]) -> Iterator[pa.RecordBatch]:
    scanner: Any = dataset.scanner(
        columns=list(key), batch_size=_BATCH_ROWS, batch_readahead=_READ_AHEAD, io_buffer_size=_READ_BUFFER
    )
    yield from scanner.to_batches()


def _hash(keys: pa.RecordBatch) -> Hashes:
    return row_hashes(enumerate(keys.columns), keys.num_rows)


def _repeated(hashes: Hashes) -> Hashes:
    hashes.sort()
    return np.unique(hashes[1:][hashes[1:] == hashes[:-1]])
