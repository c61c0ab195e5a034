"""Hash rows independently of chunks, order and offsets, to check that two sides returned the same rows."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc


def rows_digest(table: pa.Table, key: Sequence[str]) -> str:
    """Return SHA-256 (16 hex digits) of the columns in name order, with rows sorted by `key`, which must be unique.

    Types: integers, floats, bool, string, binary and fixed-size lists of numbers; nulls count.
    """
    ordered = table.take(pc.sort_indices(table, sort_keys=[(name, "ascending") for name in key]))
    found = hashlib.sha256(str(ordered.num_rows).encode())
    for name in sorted(ordered.column_names):
        found.update(name.encode())
        for part in _parts(ordered.column(name).combine_chunks()):
            found.update(part)
    return found.hexdigest()[:16]


def texts_digest(texts: Sequence[str]) -> str:
    """Return SHA-256 (16 hex digits) of texts in the given order."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def _parts(column: pa.Array) -> Iterator[bytes]:
    """Return a column as bytes that depend on its values only.

    Slots of nulls are filled, because Arrow leaves their contents undefined.
    """
    yield np.packbits(column.is_valid().to_numpy(zero_copy_only=False)).tobytes()
    kind = column.type
    if pa.types.is_fixed_size_list(kind):
        yield from _parts(column.flatten())
    elif pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_binary(kind):
        # Lengths are hashed too: "ab", "c" and "a", "bc" are different rows.
        filled = column.cast(pa.large_binary()).fill_null(b"")
        yield pc.binary_length(filled).to_numpy().tobytes()
        yield b"".join(filled.to_pylist())
    else:
        yield pc.fill_null(column, False if pa.types.is_boolean(kind) else 0).to_numpy(zero_copy_only=False).tobytes()
