"""Rows for the benchmarks of the memtable: keys of three kinds, any number of packages, 128-d vectors. All pure."""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from bench.source_data import NARROW, NARROW_KEY, PACKAGES_KEY, SEED, VECTOR_WIDTH, narrow_rows, packages

Vectors = npt.NDArray[np.float32]

STRING_KEY = "name"
STRING = pa.schema([pa.field(STRING_KEY, pa.string(), nullable=False), *list(NARROW)[1:]])
COMPOSITE_KEY = ("name", "id")
COMPOSITE = pa.schema([STRING.field(STRING_KEY), NARROW.field(NARROW_KEY), NARROW.field("value")])
WIDTH = 128
VECTORS = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("vector", pa.list_(pa.float32(), WIDTH))])
NOISE = 0.05
"""Length of the noise added to a unit vector, so that no two vectors are equal."""


def with_string_key(rows: pa.Table) -> pa.Table:
    """Return rows of NARROW with a text of 20 characters in place of the id."""
    digits = pc.utf8_lpad(rows.column(NARROW_KEY).cast(pa.string()), 12, "0")
    names = pc.binary_join_element_wise("package-", digits, "")
    return pa.table([names, rows.column("value"), rows.column("label")], schema=STRING)


def with_composite_key(rows: pa.Table) -> pa.Table:
    """Return rows of NARROW with a key of label and id."""
    return pa.table([rows.column("label"), rows.column(NARROW_KEY), rows.column("value")], schema=COMPOSITE)


def in_batches(rows: pa.Table, size: int) -> list[pa.Table]:
    """Return the rows in tables of `size` rows; the last table may be shorter."""
    return [rows.slice(at, size).combine_chunks() for at in range(0, rows.num_rows, size)]


@cache
def many_narrow(count: int) -> pa.Table:
    """Return rows of NARROW with the ids from 0 to `count` - 1, in random order."""
    return narrow_rows(range(count), 11)


def many_packages(count: int) -> pa.Table:
    """Return copies of the real packages, each with its own names, a word of its own, and slightly moved vectors."""
    copies = [_copy(number) for number in range(-(-count // packages().num_rows))]
    return pa.concat_tables(copies).slice(0, count).combine_chunks()


def _copy(number: int) -> pa.Table:
    rows = packages()
    rng = np.random.default_rng((SEED, number))
    shuffled = rows.take(pa.array(rng.permutation(rows.num_rows)))
    vectors = _flat(shuffled.column("embedding"), VECTOR_WIDTH)
    column = _column(_moved(vectors, rng), rows.schema.field("embedding").type)
    for name, suffix in ((PACKAGES_KEY, f"~{number}"), ("description", f" copy{number}")):
        shuffled = shuffled.set_column(
            rows.schema.get_field_index(name),
            rows.schema.field(name),
            pc.binary_join_element_wise(shuffled.column(name), suffix, ""),
        )
    return shuffled.set_column(rows.schema.get_field_index("embedding"), rows.schema.field("embedding"), column)


@cache
def many_vectors(count: int) -> Vectors:
    """Return float32 [count, WIDTH]: points between two real embeddings, rotated into fewer dimensions, with noise."""
    rng = np.random.default_rng((SEED, count))
    real = _flat(packages().column("embedding"), VECTOR_WIDTH)
    turned = real @ np.linalg.qr(rng.standard_normal((VECTOR_WIDTH, WIDTH)))[0].astype(np.float32)
    pairs = turned[rng.integers(0, len(turned), (count, 2))]
    share = rng.random((count, 1), dtype=np.float32)
    return _moved(pairs[:, 0] * share + pairs[:, 1] * (1 - share), rng)


def vector_rows(vectors: Vectors) -> pa.Table:
    """Return rows of VECTORS with ids in order."""
    return pa.table([pa.array(np.arange(len(vectors))), _column(vectors, VECTORS.field("vector").type)], schema=VECTORS)


def _moved(vectors: Vectors, rng: np.random.Generator) -> Vectors:
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    noise = rng.standard_normal(vectors.shape, dtype=np.float32) * np.float32(NOISE / np.sqrt(vectors.shape[1]))
    return np.asarray(unit + noise, dtype=np.float32)


def _flat(column: pa.ChunkedArray, width: int) -> Vectors:
    flat: Vectors = column.combine_chunks().flatten().to_numpy().reshape(-1, width)
    return flat


def _column(vectors: Vectors, kind: pa.DataType) -> pa.Array:
    return pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), type=kind)
