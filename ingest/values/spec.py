"""The mapping of `[source]`: which part of a Kafka record becomes which column; parsed, checked, and picklable.

    [source.columns]
    dep = "value.dep_time"                                   a field of the value, nested ones with dots
    carrier = { from = "headers.carrier", default = "??" }   the last header of that name; a default if it is missing
    at = { from = "value.ms", unit = "ms" }                  a timestamp from a number of milliseconds since 1970
    seen = "timestamp"                                       also topic, partition, offset, key, key.field, value
    delay = { sql = "value.arr - value.sched" }              Spark SQL over the same names

A column that is not listed is read from the field with its name (`raw`: from the part with its name). All functions are
pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa
from pydantic import SecretStr

from memwal.ingest.suggest import suggestion
from memwal.ingest.values.avro import options_of
from memwal.ingest.values.type_names import parse_type
from memwal.ingest.values.values import ANY_TEXT, MARK_ANY, check_unit, is_text, typed
from memwal.wal.errors import first_line

VALUE, KEY, HEADERS, ENVELOPE = "value", "key", "headers", "envelope"
PLAIN: Mapping[str, pa.DataType] = {
    "topic": pa.string(),
    "partition": pa.int32(),
    "offset": pa.int64(),
    "timestamp": pa.timestamp("us", "UTC"),
}
"""Parts of a record whose type does not depend on the format of its value."""
ROOTS = (VALUE, KEY, HEADERS, *PLAIN)

_SEGMENT = re.compile(r"`([^`]+)`|([^.`]+)")
_ENTRY = ("from", "sql", "default", "unit")


class MappingSource(Protocol):
    """The settings of `[source]` that describe the mapping; see `settings.sections.SourceSettings`."""

    @property
    def value_format(self) -> str: ...
    @property
    def avro_schema(self) -> str: ...
    @property
    def registry(self) -> str: ...
    @property
    def registry_options(self) -> dict[str, SecretStr]: ...
    @property
    def envelope(self) -> str: ...
    @property
    def delete_when(self) -> str: ...
    @property
    def columns(self) -> dict[str, str | dict[str, Any]]: ...
    @property
    def fields(self) -> dict[str, str]: ...


@dataclass(frozen=True, slots=True)
class Origin:
    """A part of a record: `value.geo.lat` is ("value", ("geo", "lat"))."""

    root: str
    path: tuple[str, ...] = ()

    def __str__(self) -> str:
        return ".".join((self.root, *self.path))


@dataclass(frozen=True, slots=True)
class Leaf:
    """A part of a record and the type to read it as.

    `unit`: s, ms, us, ns or d if numbers are times; `ANY_TEXT` if a text column accepts values of every kind.
    """

    origin: Origin
    kind: pa.DataType
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Column:
    """The origin of the values of one column of the table: `leaf`, or else `sql`."""

    name: str
    kind: pa.DataType
    leaf: Leaf | None
    sql: str = ""
    default: Any = None
    required: bool = False
    key: bool = False


@dataclass(frozen=True, slots=True)
class RecordMapping:
    """Everything that an executor needs to map records to rows. Secrets in `registry_options` are references."""

    columns: tuple[Column, ...]
    inputs: tuple[Leaf, ...]
    """Parts of a record that SQL expressions use."""
    value_format: str
    envelope: str
    delete_when: str = ""
    avro_schema: str = ""
    registry: str = ""
    registry_options: tuple[tuple[str, str], ...] = ()

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """Every part of a record that is read, without duplicates."""
        return tuple(dict.fromkeys([*(c.leaf for c in self.columns if c.leaf is not None), *self.inputs]))

    @property
    def has_sql(self) -> bool:
        """Whether Spark must evaluate SQL expressions after the mapping."""
        return bool(self.delete_when) or any(column.sql for column in self.columns)

    @property
    def headers(self) -> bool:
        """Whether any header is read."""
        return any(leaf.origin.root == HEADERS for leaf in self.leaves)


class MappingProblem(ValueError):
    """A mistake in the mapping. `key`: the setting of [source]. `text`: the problem and its remedy."""

    def __init__(self, key: str, text: str) -> None:
        super().__init__(text)
        self.key, self.text = key, text


# ---- reading -------------------------------------------------------------------------------------------------------


def build(source: MappingSource, schema: pa.Schema, key: Sequence[str]) -> tuple[RecordMapping, list[MappingProblem]]:
    """Return the mapping of `source` into a table of `schema` (base schema), and all mistakes in it."""
    problems: list[MappingProblem] = []
    columns: list[Column] = []
    for field in schema:
        try:
            columns.append(_column(source, field, key))
        except MappingProblem as problem:
            problems.append(problem)
    problems += [
        MappingProblem("columns", f"columns.{name}: the table has no such column{suggestion(name, schema.names)}")
        for name in source.columns
        if name not in schema.names
    ]
    inputs, input_problems = _inputs(source, columns)
    mapping = RecordMapping(
        tuple(columns),
        tuple(inputs),
        source.value_format,
        source.envelope,
        source.delete_when,
        source.avro_schema,
        source.registry,
        options_of(source.registry_options),
    )
    return mapping, [*problems, *input_problems]


def parse_origin(text: str, source: MappingSource) -> Origin:
    """Parse `value.geo.lat`; backticks enclose a name with a dot. Raises: ValueError with the remedy."""
    return _origin(_split(text), text, source)


def _origin(parts: Sequence[str], text: str, source: MappingSource) -> Origin:
    roots = (*ROOTS, ENVELOPE) if source.envelope != "none" else ROOTS
    if not parts:
        raise ValueError(
            f"{text!r} is not a path; write value.FIELD, with dots between names, and names with dots in backticks"
        )
    root, path = parts[0], tuple(parts[1:])
    if root not in roots:
        raise ValueError(f"{text!r} is not a part of a record (a field is value.{text}){suggestion(root, roots)}")
    if root in PLAIN and path:
        raise ValueError(f"{text!r}: {root} has no fields; write {root!r}")
    if root in (HEADERS, ENVELOPE) and not path:
        raise ValueError(f"{text!r} does not name a {'header' if root == HEADERS else 'field'}; write {root}.NAME")
    if root == HEADERS and len(path) > 1:
        raise ValueError(f"{text!r}: a header has no fields; write a name with dots in backticks")
    if root == VALUE and path and source.value_format == "raw":
        raise ValueError(f'{text!r}: with value_format = "raw" the value has no fields; set it to json or avro')
    return Origin(root, path)


def _split(text: str) -> list[str]:
    parts, at = [], 0
    while match := _SEGMENT.match(text, at):
        parts.append(match[1] or match[2])
        at = match.end()
        if at == len(text):
            return parts
        if text[at] != ".":
            break
        at += 1
    return []


def _column(source: MappingSource, field: pa.Field, key: Sequence[str]) -> Column:
    name, is_key = field.name, field.name in key
    required = is_key or not field.nullable
    entry = _entry(source, name)
    if "sql" in entry:
        return Column(name, field.type, None, str(entry["sql"]), required=required, key=is_key)
    unit = str(entry.get("unit", ""))
    try:
        origin = parse_origin(entry["from"], source)
        leaf = Leaf(origin, field.type, check_unit(unit, field.type) or _any(field))
        _check_fit(leaf)
        default = None if "default" not in entry else typed(entry["default"], field.type)
    except ValueError as error:
        raise MappingProblem("columns", f"columns.{name}: {error}") from None
    return Column(name, field.type, leaf, default=default, required=required, key=is_key)


def _entry(source: MappingSource, name: str) -> Mapping[str, Any]:
    """Return the entry of a column in [source.columns] as a table; the default entry if it is not listed."""
    entry = source.columns.get(name)
    if entry is None:
        if source.value_format == "raw" and name not in (KEY, VALUE, *PLAIN):
            raise MappingProblem(
                "columns",
                f"columns.{name}: a raw value has no fields; write where the column comes from, such as "
                f'{name} = "value", or remove it from the table',
            )
        return {"from": name if source.value_format == "raw" else f"value.`{name}`"}
    if isinstance(entry, str):
        return {"from": entry}
    for word, value in entry.items():
        if word not in _ENTRY:
            raise MappingProblem("columns", f"columns.{name}: unknown key {word!r}{suggestion(word, _ENTRY)}")
        if word != "default" and not isinstance(value, str):
            raise MappingProblem("columns", f"columns.{name}: {word} must be text in quotes")
    if ("from" in entry) == ("sql" in entry):
        raise MappingProblem("columns", f"columns.{name}: write either from or sql")
    if "sql" in entry and len(entry) > 1:
        raise MappingProblem(
            "columns", f"columns.{name}: sql cannot be combined with other keys; write coalesce(…, …) for a default"
        )
    return entry


def _any(field: pa.Field) -> str:
    name, value = MARK_ANY
    return ANY_TEXT if (field.metadata or {}).get(name) == value else ""


def _check_fit(leaf: Leaf) -> None:
    """Raise ValueError for a part whose values can never fit the column."""
    root, kind = leaf.origin.root, leaf.kind
    fits = {"timestamp": pa.types.is_timestamp, "topic": is_text}.get(root, pa.types.is_integer)
    if root in PLAIN and not fits(kind):
        raise ValueError(f"{root} is {PLAIN[root]}, the column is {kind}; change the column's type, or use sql")
    whole = root == HEADERS or (root in (KEY, VALUE) and not leaf.origin.path)
    if whole and pa.types.is_fixed_size_list(kind):
        raise ValueError(f"{leaf.origin} is bytes, the column is a vector; vectors come from JSON or Avro fields")


# ---- SQL -----------------------------------------------------------------------------------------------------------


def _inputs(source: MappingSource, columns: Sequence[Column]) -> tuple[list[Leaf], list[MappingProblem]]:
    """Return the parts that expressions use, typed by [source.fields] or by the column mapped from the same part."""
    inputs: dict[Origin, Leaf] = {}
    problems: list[MappingProblem] = []
    known = {column.leaf.origin: column.leaf for column in columns if column.leaf is not None}
    declared: dict[Origin, str] = {}
    for text, kind in source.fields.items():
        try:
            declared[parse_origin(text, source)] = kind
        except ValueError as error:
            problems.append(MappingProblem("fields", f"fields: {error}"))
    expressions = [("columns", f"columns.{column.name}: sql", column.sql) for column in columns if column.sql]
    if source.delete_when:
        expressions.append(("delete_when", "delete_when", source.delete_when))
    for key, where, sql in expressions:
        try:
            for origin in references(sql, source):
                inputs[origin] = _input(origin, declared, known)
        except ValueError as error:
            problems.append(MappingProblem(key, f"{where}: {error}"))
    return list(inputs.values()), problems


def _input(origin: Origin, declared: Mapping[Origin, str], known: Mapping[Origin, Leaf]) -> Leaf:
    if origin in declared:
        return Leaf(origin, parse_type(declared[origin]))
    if origin.root in PLAIN:
        return Leaf(origin, PLAIN[origin.root])
    if origin.root in (KEY, VALUE) and not origin.path:
        return Leaf(origin, pa.binary())
    if origin.root == HEADERS:
        return Leaf(origin, pa.string())
    if origin in known:
        return known[origin]
    raise ValueError(f'{origin} has no type; add it to [source.fields], such as "{origin}" = "int64"')


def references(sql: str, source: MappingSource) -> Iterator[Origin]:
    """Yield the parts of a record that a Spark SQL expression names. Raises: ValueError for other names."""
    import sqlglot
    from sqlglot import exp

    try:
        tree = sqlglot.parse_one(f"SELECT {sql}", read="spark")
    except sqlglot.errors.SqlglotError as error:
        raise ValueError(f"{sql!r} is not SQL: {first_line(error)}") from None
    names = {each.name for found in tree.find_all(exp.Lambda) for each in found.expressions}
    for column in tree.find_all(exp.Column):
        whole: exp.Expression = column
        parts = [part.name for part in column.parts]
        while isinstance(whole.parent, exp.Dot) and whole.parent.this is whole:
            whole = whole.parent
            parts.append(whole.expression.name)
        if parts[0] not in names:
            yield _origin(parts, ".".join(parts), source)
