"""`memwal config new`: write a configuration from the columns and first rows of files, a Lance table or a topic."""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
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
from memwal.ingest.engine.loads.formats import TYPED, tables
from memwal.ingest.errors import Invalid
from memwal.ingest.settings.load import load, load_tables
from memwal.ingest.settings.reference import key_name, toml_value
from memwal.ingest.settings.sections import KAFKA, TABLES, SourceSettings
from memwal.ingest.settings.values import check_table_name
from memwal.ingest.spark.dlq.sources import ending_spark
from memwal.ingest.spark.drift.detect import FieldsTask
from memwal.ingest.spark.drift.kinds import new_columns
from memwal.ingest.spark.drift.schemas import fields_of_schema
from memwal.ingest.spark.source.kafka.stream import first_values
from memwal.ingest.values.avro import decoder, inline_schema, options_of
from memwal.ingest.values.type_names import SIMPLE
from memwal.memtable.index_spec import vector_width
from memwal.memtable.schema import unsupported
from memwal.wal.errors import first_line

ROWS = 10_000
"""Rows that are read of files."""
TOPIC_ROWS = 1_000
"""Records that are read of a topic."""
KAFKA_URL = "kafka://"
_TEXT = 4 << 20
"""Bytes of CSV or NDJSON that are read."""
_WORDS = 4
"""Words of an average text that is worth a full-text index."""
_ZONE = re.compile(r"(?:Z|[+-]\d\d:?\d\d)$")
_FILTERED = re.compile(r"date|time|year|price|count|size|status|kind|type", re.IGNORECASE)
"""Names of columns that filters often use."""
_KEYS = re.compile(r"(?:.*_)?(?:id|key|uuid|guid|no|number|code|package|name)", re.IGNORECASE)
"""Names that a key often has."""


def new_config(config: Path, sources: Sequence[str], console: CommandConsole, table: str = "") -> int:
    """Write `config`, and print what to do next. `table`: add [tables.NAME] of this name to it, without a source.

    Raises: Invalid if it exists (with `table`: if it has this table, or names no tables), or a source cannot be read.
    """
    section = _section(config, table)
    if sources[0].startswith(KAFKA_URL):
        name = sources[0]
        rows, settings = _of_topic(name)
        text = "\n".join(_lines(section, table or config.stem, name, rows, None, settings)) + "\n"
    else:
        file = find_files(sources, None, {})[0]
        name, rows = file.name, _sample(file)
        settings = {"format": {"ndjson": "json"}.get(file.format, file.format), "path": str(Path(file.path).parent)}
        existing = file.path if file.format == "lance" else None
        text = "\n".join(_lines(section, table or config.stem, name, rows, existing, settings)) + "\n"
    try:
        with config.open("a", encoding="utf-8") as opened:
            opened.write(f"\n{text}" if opened.tell() else text)
    except OSError as error:
        raise Invalid(f"{config}: {error.strerror}") from None
    console.say(f"wrote {config}: {count(rows.num_columns, 'column')}, from {count(rows.num_rows, 'row')} of {name}")
    begin = f"init {config} --table {table}" if table else f"run {config} --once"
    console.note(f"check its key and indexes, then: memwal config check {config}; memwal {begin}")
    return 0


def _section(config: Path, table: str) -> str:
    """Return the name of the section to write. Raises: errors of `new_config` about the file and the name."""
    if not table:
        if config.exists():
            raise Invalid(f"{config}: the file exists; name another one, remove it, or add a table to it with --table")
        return "table"
    try:
        section = TABLES + key_name(check_table_name(table))
    except ValueError as error:
        raise Invalid(f"--table: {error}") from None
    tables = load_tables(config, os.environ).tables if config.exists() else None
    if tables is not None and (not tables or table in tables):
        found = f"[{section}]" if tables else "no [tables.NAME]"
        raise Invalid(f"{config}: the file exists and has {found}; name another {'table' if tables else 'file'}")
    return section


def _sample(file: InputFile) -> pa.Table:
    """Return the first rows of a file, with the types of Parquet, Arrow and Lance, or those that the texts suggest."""
    try:
        if file.format in TYPED:
            parts = list(islice(tables(file, pa.schema([])), 1 + ROWS // 8192))
            if not parts:
                raise Invalid(f"{file.name}: the file has no rows, so no columns can be proposed")
            return pa.concat_tables(parts).slice(0, ROWS)
        with file.streamed() as opened:
            read = opened.read(_TEXT)
        whole = read if len(read) < _TEXT else read[: read.rindex(b"\n") + 1]
        if file.format == "csv":
            return pyarrow.csv.read_csv(io.BytesIO(whole)).slice(0, ROWS)
        return _rows_of_json(whole)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise Invalid(f"{file.name}: cannot be read: {first_line(error)}") from None


def _of_topic(url: str) -> tuple[pa.Table, dict[str, Any]]:
    """Return the first rows of a topic, and the settings of [source] to read it. Raises: Invalid, Unavailable."""
    place, _, registry = url.removeprefix(KAFKA_URL).partition("?registry=")
    brokers, _, topic = place.partition("/")
    given: dict[str, Any] = {"format": KAFKA, "brokers": brokers, "topics": [topic]}
    if registry:
        given |= {"value_format": "avro", "registry": registry}
    try:
        settings = load({"table": {"uri": "t.lance"}, "source": given}, os.environ)
    except Invalid as error:
        form = "write kafka://HOST:PORT/TOPIC, with ?registry=URL for Avro"
        raise Invalid.of(f"{line.removeprefix('settings: ')}; {form}" for line in error.lines) from None
    with ending_spark():
        values = first_values(settings, TOPIC_ROWS)
    try:
        if settings.source.value_format == "avro":
            rows = _rows_of_avro(values, settings.source)
        else:
            rows = _rows_of_json(b"\n".join(value.replace(b"\n", b" ") for value in values))
        if not rows.num_columns:
            raise ValueError("it has no fields")
    except (ValueError, pa.ArrowException) as error:
        hint = "" if registry else "; for Avro write kafka://HOST:PORT/TOPIC?registry=URL"
        raise Invalid(
            f"{url}: a record cannot be read as {settings.source.value_format}: {first_line(error)}{hint}"
        ) from None
    return rows, given


def _rows_of_avro(values: Sequence[bytes], source: SourceSettings) -> pa.Table:
    """Return the rows of Avro values, with the columns of their schemas; what has no type of its own becomes text."""
    options = options_of(source.registry_options)
    decode = decoder(source.avro_schema, source.registry, options)
    rows = [decode(value) for value in values]
    task = FieldsTask(frozenset(), registry=source.registry, registry_options=options)
    found = task.fields_of(pa.array(values)) if source.registry else fields_of_schema(inline_schema(source.avro_schema))
    schema = pa.schema([field.remove_metadata() for field in new_columns(found, ())[0]])
    columns = ([row.get(field.name) for row in rows] for field in schema)
    return pa.table([_typed(column, field.type) for column, field in zip(columns, schema, strict=True)], schema)


def _typed(column: Sequence[Any], kind: pa.DataType) -> pa.Array:
    if pa.types.is_string(kind):
        column = [None if value is None else str(value) for value in column]
    return pa.array(column, kind)


def _rows_of_json(lines: bytes) -> pa.Table:
    """Return rows of NDJSON with times in UTC where the text names a zone, which Arrow's reader drops."""
    rows = pyarrow.json.read_json(io.BytesIO(lines)).slice(0, ROWS)
    for place, field in enumerate(rows.schema):
        if pa.types.is_timestamp(field.type):
            texts = (json.loads(line).get(field.name) for line in lines.splitlines() if line.strip())
            if _ZONE.search(str(next((text for text in texts if text), ""))):
                rows = rows.set_column(place, field.name, rows.column(place).cast(pa.timestamp("us", "UTC")))
    return rows


def _lines(
    section: str, stem: str, name: str, rows: pa.Table, table: str | None, source: Mapping[str, Any]
) -> Iterator[str]:
    """Yield the lines of the configuration. `stem`: name of a new table. `table`: address of an existing table, which
    [source] does not read."""
    key = _key(rows)
    yield f"# Written by `memwal config new` from {name}: {count(rows.num_rows, 'row')} were read."
    yield "# configs/default.toml has every setting.\n"
    yield f"[{section}]"
    yield f"uri = {toml_value(table or f'{stem}.lance')}"
    if key:
        yield f"key = {toml_value(key)} # unique in the rows that were read; a put replaces the row of its key"
    else:
        yield 'append_only = true # no columns are unique; or: key = ["COLUMN", …], whose rows are replaced'
    if not table:
        yield f"\n[{section}.columns]"
        for field in rows.schema:
            yield _column(field, rows.column(field.name))
    if lines := list(_indexes(rows, key)):
        yield f"\n[{section}.indexes]"
        yield from lines
    if table:
        yield "\n# The table exists: `memwal init` sets it up for ingestion. [source] names a source of Spark."
        return
    if section != "table":
        return
    yield "\n[source] # every file that appears in path, once" if "path" in source else "\n[source]"
    yield from (f"{setting} = {toml_value(value)}" for setting, value in source.items())


def _column(field: pa.Field, values: pa.ChunkedArray) -> str:
    name, such = key_name(field.name), _example(values)
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


def _indexes(rows: pa.Table, key: Sequence[str]) -> Iterator[str]:
    """Yield the lines of indexes: vectors, texts of several words; others as comments."""
    for field in rows.schema:
        name, column = key_name(field.name), rows.column(field.name)
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
