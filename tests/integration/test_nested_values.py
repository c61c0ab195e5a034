"""Random nested columns and values, from a put to a read of the reopened table.

Each seed draws a schema from the types that `memtable.schema` allows, up to four levels deep, and rows with
nulls, empty lists and NaN at every depth. The draw is skewed per put: whole puts of nulls or of empty lists, and
deletes in between, make the pages of one column differ. After every step the rows are compared with a dict, at the
level that the step has brought them to.
"""

from __future__ import annotations

import decimal
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest

import memwal
from memwal import wal
from memwal.flush.sst import data, files
from memwal.flush.verification.runner import verify_table
from memwal.memtable import schema as schemas
from tests.conftest import extent

SEEDS = extent(8, 60)
FIXED: list[pa.DataType] = [
    pa.bool_(),
    pa.int8(),
    pa.uint64(),
    pa.float16(),
    pa.float32(),
    pa.float64(),
    pa.decimal128(9, 2),
    pa.decimal256(40, 3),
    pa.date32(),
    pa.time64("us"),
    pa.timestamp("us", "Europe/Berlin"),
    pa.timestamp("ns"),
    pa.duration("ms"),
    pa.binary(3),
]
VARIABLE: list[pa.DataType] = [pa.string(), pa.large_string(), pa.binary(), pa.large_binary()]
SMALL = {"data_cache_bytes": 1}
_NUMBERS = (pa.types.is_temporal, pa.types.is_integer)


class Random:
    """Draws types and values. One seed gives one run."""

    def __init__(self, seed: int) -> None:
        self.of = random.Random(seed)

    def schema(self) -> pa.Schema:
        kinds = [self.of.choice([self.kind(4), self.kind(4), pa.uuid()]) for _ in range(self.of.randint(1, 3))]
        fields = [pa.field(f"c{place}", kind) for place, kind in enumerate(kinds)]
        return pa.schema([pa.field("id", pa.int64(), nullable=False), *fields])

    def kind(self, depth: int, *, list_allowed: bool = True) -> pa.DataType:
        shapes = ["flat", "fixed", *(["list", "list", "large", "struct", "struct"] if depth else [])]
        shape = self.of.choice(shapes)
        if shape in ("list", "large") and list_allowed:
            return (pa.list_ if shape == "list" else pa.large_list)(self.kind(depth - 1))
        if shape == "struct":
            first = self.kind(depth - 1, list_allowed=False)
            rest = [self.kind(depth - 1) for _ in range(self.of.randint(0, 2))]
            return pa.struct([(f"f{place}", kind) for place, kind in enumerate([first, *rest])])
        if shape == "fixed":
            return pa.list_(self.of.choice(FIXED), self.of.randint(1, 4))
        return self.of.choice(FIXED + VARIABLE)

    def rows(self, schema: pa.Schema, ids: list[int]) -> list[dict[str, Any]]:
        """Return the rows of one put; their shares of nulls and empty lists are drawn once per field."""
        skews = {field.name: [self.of.choice([0.0, 0.1, 0.5, 1.0]) for _ in range(6)] for field in schema}
        longest = self.of.choice([0, 1, 3])
        return [
            {"id": id} | {f.name: self.value(f.type, skews[f.name], longest) for f in schema if f.name != "id"}
            for id in ids
        ]

    def value(self, kind: pa.DataType, nulls: list[float], longest: int, depth: int = 0) -> Any:
        if self.of.random() < nulls[min(depth, len(nulls) - 1)]:
            return None
        if pa.types.is_struct(kind):
            fields = (kind.field(place) for place in range(kind.num_fields))
            return {field.name: self.value(field.type, nulls, longest, depth + 1) for field in fields}
        if pa.types.is_fixed_size_list(kind):
            return [self.flat(kind.value_type) for _ in range(kind.list_size)]
        if pa.types.is_list(kind) or pa.types.is_large_list(kind):
            count = self.of.randint(0, longest)
            return [self.value(kind.value_type, nulls, longest, depth + 1) for _ in range(count)]
        return self.flat(kind)

    def flat(self, kind: pa.DataType) -> Any:
        number = self.of.randint(0, 100)
        if pa.types.is_boolean(kind):
            return number % 2 == 0
        if pa.types.is_floating(kind):
            value = self.of.choice([0.5 * number, -0.0, float("nan"), float("inf")])
            return np.float16(value) if pa.types.is_float16(kind) else value
        if pa.types.is_decimal(kind):
            return decimal.Decimal(number).scaleb(-2)
        if any(is_number(kind) for is_number in _NUMBERS):
            return number
        if isinstance(kind, pa.BaseExtensionType):
            return bytes([number]) * 16
        if pa.types.is_fixed_size_binary(kind):
            return bytes([number]) * kind.byte_width
        text = "x" * self.of.choice([0, 1, 30]) + str(number)
        return text if pa.types.is_string(kind) or pa.types.is_large_string(kind) else text.encode()


def as_table(rows: list[dict[str, Any]], schema: pa.Schema) -> pa.Table:
    return pa.Table.from_pylist(rows, schema)


def comparable(rows: pa.Table) -> dict[int, str]:
    """Return the rows by id as text, which shows NaN, the sign of a zero and the type of a value."""
    return {row["id"]: repr(row) for row in rows.to_pylist()}


def run(seed: int, uri: str) -> None:
    """Put, flush, commit, delete, reopen and read; raise AssertionError or MemWalError if a row differs."""
    draw = Random(seed)
    schema = draw.schema()
    settings = {
        "commit": {"interval": "0s"},
        "flush": {"retry_delay": "10ms"},
        "wal": {"put_timeout": "1s", "retry_budget": "1s"},
        "regions": {"count": draw.of.choice([1, 2])},
    }
    expected: dict[int, str] = {}

    def check(table: Any, level: str) -> None:
        found = comparable(table.scan(level=level).read_all())
        assert found == expected, f"seed {seed}, {level}, {schema}"

    with memwal.open(uri, schema=schema, key="id", settings=settings) as table:
        for _ in range(3):
            for _ in range(draw.of.randint(1, 3)):
                ids = draw.of.sample(range(2_000), draw.of.choice([1, 40, 400]))
                rows = as_table(draw.rows(schema, ids), schema)
                table.put(rows)
                expected |= comparable(rows)
                gone = draw.of.sample(range(2_000), draw.of.choice([0, 100, 1_000]))
                table.delete(gone)
                expected = {id: row for id, row in expected.items() if id not in set(gone)}
            check(table, "latest")
            table.flush()
            check(table, "flushed")
            if draw.of.random() < 0.7:
                table.commit()
                check(table, "committed")
        del settings["regions"]
    with memwal.open(uri, settings=settings) as table:
        check(table, "durable")
        table.commit()
        check(table, "committed")
    assert not verify_table(wal.open_store(uri), uri, deep=True).findings


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make slices and pages of an SST as small as possible, so that few rows fill many pages."""
    write = lance.write_dataset
    monkeypatch.setattr(data, "SLICE_BYTES", 1_000)
    monkeypatch.setattr(data.lance, "write_dataset", lambda *given, **more: write(*given, **more | SMALL))


@pytest.mark.parametrize("seed", range(SEEDS))
def test_every_value_comes_back(tmp_path: Path, seed: int) -> None:
    run(seed, str(tmp_path / "t.lance"))


def found_within(seeds: int, tmp_path: Path) -> bool:
    for seed in range(seeds):
        try:
            run(seed, str(tmp_path / f"{seed}.lance"))
        except (AssertionError, memwal.MemWalError):
            return True
    return False


def nested_columns(schema: pa.Schema) -> Iterator[int]:
    for place, field in enumerate(schema):
        if pa.types.is_struct(field.type) or pa.types.is_list(field.type):
            yield place


def test_a_writer_that_loses_the_last_value_of_nested_columns_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The read-back of flushes is switched off."""
    write = lance.write_dataset

    def damaging(rows: pa.RecordBatchReader, *arguments: Any, **more: Any) -> Any:
        table = rows.read_all().combine_chunks()
        for place in nested_columns(table.schema):
            column = table.column(place).chunk(0)
            lost = pa.concat_arrays([column.slice(0, len(column) - 1), pa.nulls(1, column.type)])
            table = table.set_column(place, table.schema.field(place), lost)
        return write(table.to_reader(), *arguments, **more)

    monkeypatch.setattr(files, "_read_back", lambda *_: None)
    monkeypatch.setattr(data.lance, "write_dataset", damaging)
    assert found_within(10, tmp_path)


def test_a_type_that_lance_cannot_always_read_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The type is a struct that begins with a list, which `memtable.schema` otherwise rejects."""
    monkeypatch.setattr(schemas, "_begins_with_list", lambda _: False)
    monkeypatch.setattr(Random, "kind", lambda *_, **__: pa.struct([("f", pa.list_(pa.string()))]))
    assert found_within(10, tmp_path)
