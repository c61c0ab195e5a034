"""`memwal config new`: write a configuration from the columns and the first rows of files or of a Lance table."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.json

from memwal.ingest.cli.command import CommandConsole
from memwal.ingest.cli.print import count
from memwal.ingest.engine.loads.files import InputFile, find_files
from memwal.ingest.engine.loads.formats import tables
from memwal.ingest.errors import Invalid
from memwal.ingest.settings.reference import toml_value
from memwal.ingest.values.type_names import SIMPLE
from memwal.memtable.index_spec import vector_width
from memwal.memtable.schema import unsupported
from memwal.wal.errors import first_line

ROWS = 10_000
"""Rows that are read."""
_TEXT = 4 << 20
"""Bytes of CSV or NDJSON that are read."""
_WORDS = 4
"""Words of an average text that is worth a full-text index."""
_ZONE = re.compile(r"(?:Z|[+-]\d\d:?\d\d)$")
_BARE = re.compile(r"[A-Za-z0-9_-]+")
_FILTERED = re.compile(r"date|time|year|price|count|size|status|kind|type", re.IGNORECASE)
"""Names of columns that filters often use."""
_KEYS = re.compile(r"(?:.*_)?(?:id|key|uuid|guid|no|number|code|package|name)", re.IGNORECASE)
"""Names that a key often has."""


def new_config(config: Path, sources: Sequence[str], console: CommandConsole) -> int:
    """Write `config`, and print what to do next. Raises: Invalid if it exists, or a source cannot be read."""
    if config.exists():
        raise Invalid(f"{config}: the file exists; name another one, or remove it")
    files = find_files(sources, None, {})
    rows = _sample(files[0])
    text = "\n".join(_lines(config, files, rows)) + "\n"
    try:
        config.write_text(text, encoding="utf-8")
    except OSError as error:
        raise Invalid(f"{config}: {error.strerror}") from None
    console.say(
        f"wrote {config}: {count(rows.num_columns, 'column')}, from {count(rows.num_rows, 'row')} of {files[0].name}"
    )
    console.note(f"check its key and indexes, then: memwal config check {config}; memwal run {config} --once")
    return 0


def _sample(file: InputFile) -> pa.Table:
    """Return the first rows of a file, with the types of Parquet, Arrow and Lance, or those that the texts suggest."""
    try:
        if file.format in ("parquet", "arrow", "lance"):
            parts = list(islice(tables(file, pa.schema([])), 1 + ROWS // 8192))
            if not parts:
                raise Invalid(f"{file.name}: the file has no rows, so no columns can be proposed")
            return pa.concat_tables(parts).slice(0, ROWS)
        with file.streamed() as opened:
            read = opened.read(_TEXT)
        whole = read if len(read) < _TEXT else read[: read.rindex(b"\n") + 1]
        if file.format == "csv":
            return pyarrow.csv.read_csv(io.BytesIO(whole)).slice(0, ROWS)
        return _zoned(pyarrow.json.read_json(io.BytesIO(whole)).slice(0, ROWS), whole)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise Invalid(f"{file.name}: cannot be read: {first_line(error)}") from None


def _zoned(rows: pa.Table, lines: bytes) -> pa.Table:
    """Return rows of NDJSON with times in UTC where the text names a zone, which Arrow's reader drops."""
    for place, field in enumerate(rows.schema):
        if pa.types.is_timestamp(field.type):
            texts = (json.loads(line).get(field.name) for line in lines.splitlines() if line.strip())
            if _ZONE.search(str(next((text for text in texts if text), ""))):
                rows = rows.set_column(place, field.name, rows.column(place).cast(pa.timestamp("us", "UTC")))
    return rows


def _lines(config: Path, files: Sequence[InputFile], rows: pa.Table) -> Iterator[str]:
    key, first = _key(rows), files[0]
    of_table = first.format == "lance"
    yield f"# Written by `memwal config new` from {first.name}: {count(rows.num_rows, 'row')} were read."
    yield "# configs/default.toml has every setting.\n"
    yield "[table]"
    yield f"uri = {toml_value(first.path if of_table else f'{config.stem}.lance')}"
    if key:
        yield f"key = {toml_value(key)} # unique in the rows that were read; a put replaces the row of its key"
    else:
        yield 'append_only = true # no columns are unique; or: key = ["COLUMN", …], whose rows are replaced'
    if not of_table:
        yield "\n[table.columns]"
        for field in rows.schema:
            yield _column(field, rows.column(field.name))
    if lines := list(_indexes(rows, key)):
        yield "\n[table.indexes]"
        yield from lines
    if of_table:
        yield "\n# The table exists: `memwal init` sets it up for ingestion. [source] names a source of Spark."
        return
    yield "\n[source] # every file that appears in path, once"
    yield f"format = {toml_value({'ndjson': 'json'}.get(first.format, first.format))}"
    yield f"path = {toml_value(str(Path(first.path).parent))}"


def _column(field: pa.Field, values: pa.ChunkedArray) -> str:
    name, such = _named(field.name), _example(values)
    kind = type_name(field.type)
    if kind is None:
        reason = unsupported(field) or f"its type {field.type} has no name here; memwal.open(schema=…) creates it"
        return f"# {name}: {reason}"
    return f"{name} = {toml_value(kind)}" + (f" # {such}" if such else "")


def type_name(kind: pa.DataType) -> str | None:
    """Return the configured name of an Arrow type; None if it has none."""
    if (width := vector_width(kind)) is not None:
        return f"vector[{width}]" if kind.value_type == pa.float32() else f"vector[{width}, {kind.value_type}]"
    if pa.types.is_dictionary(kind):
        return type_name(kind.value_type)
    if pa.types.is_timestamp(kind):
        return f"timestamp[{kind.unit}{f', {kind.tz}' if kind.tz else ''}]"
    return next(
        (name for name in SIMPLE if pa.type_for_alias(name) == kind), "string" if pa.types.is_null(kind) else None
    )


def _example(values: pa.ChunkedArray) -> str:
    present = values.drop_null()
    if not len(present) or pa.types.is_nested(values.type) or pa.types.is_binary(values.type):
        return ""
    text = " ".join(str(present[0].as_py()).split())
    return f"such as {text if len(text) <= 40 else text[:39] + '…'}"


def _key(rows: pa.Table) -> list[str]:
    """Return the fewest columns, at most four, that identify the rows, those with a usual name first; [] if none do."""
    kinds = (pa.types.is_integer, pa.types.is_string, pa.types.is_timestamp, pa.types.is_date)
    fitting = [field.name for field in rows.schema if any(fits(field.type) for fits in kinds)]
    fitting = [name for name in fitting if not rows.column(name).null_count]
    left, chosen, found = sorted(fitting, key=lambda name: _KEYS.fullmatch(name) is None), list[str](), 1
    while left and len(chosen) < 4 and found < rows.num_rows:
        numbers = {name: rows.group_by([*chosen, name]).aggregate([]).num_rows for name in left}
        best = max(left, key=lambda name: numbers[name])  # the first of equals
        chosen, found = [*chosen, best], numbers[best]
        left.remove(best)
    return chosen if found == rows.num_rows and chosen else []


def _named(name: str) -> str:
    """Return the name of a column as a TOML key."""
    return name if _BARE.fullmatch(name) else str(toml_value(name))


def _indexes(rows: pa.Table, key: Sequence[str]) -> Iterator[str]:
    """Yield the lines of indexes: vectors, texts of several words; others as comments."""
    for field in rows.schema:
        name, column = _named(field.name), rows.column(field.name)
        if vector_width(field.type) is not None:
            yield f'{name} = {{ type = "ivf_pq", metric = "{_metric(column)}" }}'
        elif pa.types.is_string(field.type) and _words(column) >= _WORDS:
            yield f'{name} = "fts"'
        elif list(key) != [field.name] and (pa.types.is_temporal(field.type) or _FILTERED.search(field.name)):
            yield f'# {name} = "btree" # for filters on it'


def _words(column: pa.ChunkedArray) -> float:
    spaces = pc.mean(pc.count_substring(column.drop_null(), " ")).as_py()
    return 0.0 if spaces is None else 1.0 + float(spaces)


def _metric(column: pa.ChunkedArray) -> str:
    """Return "l2" if all vectors have unit length, which gives the order of "cosine" faster; else "cosine"."""
    vectors: Any = column.drop_null().combine_chunks()
    if not len(vectors):
        return "l2"
    numbers = vectors.flatten().to_numpy(zero_copy_only=False).reshape(len(vectors), -1).astype(np.float64)
    return "l2" if np.allclose(np.linalg.norm(numbers, axis=1), 1.0, atol=1e-3) else "cosine"
