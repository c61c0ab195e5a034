"""Arrays that are valid in Arrow and that Lance cannot import: they are detected and copied into arrays that it can."""

from __future__ import annotations

import itertools
import random
from decimal import Decimal

import lance
import numpy as np
import pyarrow as pa
import pytest

from memwal.wal.codec.lance_arrays import delicate_columns, importable, importable_table


def leaf(chance: random.Random, count: int) -> pa.Array:
    kinds = [pa.int64(), pa.string(), pa.bool_(), pa.decimal128(20, 2), pa.list_(pa.float32(), 3)]
    kind = chance.choice(kinds)

    def value() -> object:
        number = chance.randrange(100)
        if chance.random() < 0.2:
            return None
        if pa.types.is_fixed_size_list(kind):
            return [float(number)] * 3
        return Decimal(number) if pa.types.is_decimal(kind) else {"string": "x" * (number % 5)}.get(str(kind), number)

    values = [value() for _ in range(count)]
    return pa.array([v if v is None else bool(v) for v in values] if kind == pa.bool_() else values, kind)


def tree(chance: random.Random, count: int, depth: int) -> pa.Array:
    """Return `count` values of a random type, sliced at a random depth out of a longer array."""
    offset = chance.choice([0, 0, 3])
    longer = count + offset + chance.choice([0, 2])
    kind = chance.randrange(3) if depth else 0
    mask = pa.array([chance.random() < 0.2 for _ in range(longer)], pa.bool_())
    if kind == 0:
        found = leaf(chance, longer)
    elif kind == 1:
        fields = [tree(chance, longer, depth - 1) for _ in range(chance.randrange(1, 3))]
        found = pa.StructArray.from_arrays(fields, [f"f{n}" for n in range(len(fields))], mask=mask)
    else:
        ends = list(itertools.accumulate((chance.randrange(3) for _ in range(longer)), initial=0))
        found = pa.ListArray.from_arrays(pa.array(ends, pa.int32()), tree(chance, ends[-1], depth - 1), mask=mask)
    return found.slice(offset, count)


def through_lance(batch: pa.RecordBatch) -> list[object]:
    written = lance.write_dataset(pa.RecordBatchReader.from_batches(batch.schema, [batch]), "memory://")
    values: list[object] = written.to_table().column("c").to_pylist()
    return values


@pytest.mark.parametrize("seed", range(150))
def test_lance_takes_any_array_made_importable(seed: int) -> None:
    chance = random.Random(seed)
    count = chance.randrange(1, 20)
    column = tree(chance, count, 3)
    batch = pa.record_batch([pa.array(range(count)), column], names=["id", "c"])
    given = importable(batch, delicate_columns(batch.schema))
    assert given.equals(batch)
    assert through_lance(given) == column.to_pylist()


def received(rows: pa.Table, offset: int) -> pa.Table:
    """Return `rows` as read from an IPC stream that begins `offset` bytes behind an aligned address."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as stream:
        stream.write_table(rows)
    memory = np.zeros(sink.tell() + 128, np.uint8)
    start = (-memory.ctypes.data) % 64 + offset
    data = sink.getvalue()
    memory[start : start + data.size] = np.frombuffer(data, np.uint8)
    return pa.ipc.open_stream(pa.py_buffer(memory[start : start + data.size])).read_all()


NUMBERS = pa.array([Decimal(number) for number in range(8)], pa.decimal128(20, 2))
DECIMALS = {
    "decimal128": NUMBERS,
    "decimal256": NUMBERS.cast(pa.decimal256(40, 2)),
    "with nulls": pa.array([None, Decimal(1), None], pa.decimal128(38, 0)),
    "struct": pa.StructArray.from_arrays([NUMBERS, pa.array(range(8))], ["price", "n"]),
    "struct in struct": pa.StructArray.from_arrays([pa.StructArray.from_arrays([NUMBERS], ["price"])], ["in"]),
    "list": pa.ListArray.from_arrays(pa.array([0, 3, 3, 8], pa.int32()), NUMBERS),
    "empty lists": pa.array([[], [], None], pa.list_(pa.decimal128(20, 2))),
    "list of fixed size": pa.FixedSizeListArray.from_arrays(NUMBERS, 2),
}


@pytest.mark.parametrize("offset", [0, 8, 16, 24])
@pytest.mark.parametrize("shape", DECIMALS)
def test_lance_takes_decimals_that_ipc_brought(shape: str, offset: int) -> None:
    column = DECIMALS[shape]
    rows = received(pa.table({"id": pa.array(range(len(column))), "c": column}), offset)
    (batch,) = importable_table(rows).to_batches()
    assert through_lance(batch) == column.to_pylist()


def test_what_lance_can_import_is_not_copied() -> None:
    plain = pa.table({"id": [1, 2, 3], "v": ["a", None, "b"], "w": pa.array([[1.0], None, []], pa.list_(pa.float32()))})
    assert importable_table(plain.slice(1)).column("v").chunk(0).buffers()[2].address == (
        plain.column("v").chunk(0).buffers()[2].address
    )
    assert delicate_columns(plain.schema) == ()
    whole = pa.record_batch([DECIMALS["struct in struct"], NUMBERS], names=["s", "d"])
    assert importable(whole, delicate_columns(whole.schema)) is whole
