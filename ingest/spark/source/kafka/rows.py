"""Map Kafka records to rows on executors: one function over streams of Arrow batches.

1. The parts of the records that the mapping names become columns, one batch at a time (`mapping_json` for JSON). If a
   record of the batch does not fit, the records are read one by one, each for its values or a reason (`_Values`).
2. A null value is a tombstone: it deletes the key that the record's own key contains.
3. Defaults are filled in; missing required values are problems.
4. A row that cannot be used has the reason in `PROBLEM`; no value becomes null without a reason. A row that deletes has
   only its key; its other columns are null.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from memwal.ingest.errors import Invalid
from memwal.ingest.settings.sections import SourceSettings
from memwal.ingest.spark.reading import refuse_reading_again
from memwal.ingest.spark.source import columns as col
from memwal.ingest.spark.task import LOOKING, task_edge
from memwal.ingest.values import json_columns as mapping_json
from memwal.ingest.values.documents import Document, documents, json_decoder
from memwal.ingest.values.documents import field as field_of
from memwal.ingest.values.json_parts import one_of
from memwal.ingest.values.spec import ENVELOPE, HEADERS, KEY, VALUE, Column, Leaf, RecordMapping, build
from memwal.ingest.values.values import ANY_TEXT, Problems, bytes_column, from_text, transport_type, typed
from memwal.ingest.values.values import column as column_of

KEY_PROBLEM = "_memwal_key_problem"
"""As PROBLEM, if the row is a delete. A separate column, because `delete_when` is evaluated later."""


@dataclass(frozen=True, slots=True)
class MapTask:
    """Converts batches of Kafka records to rows. `raw`: add the bytes of the records.

    Raises (as TaskError): Invalid and Unavailable for a schema registry. A bad record raises nothing.
    """

    mapping: RecordMapping
    raw: bool = False

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with task_edge():
            refuse_reading_again()
            made = unmapped if self.raw and LOOKING.is_on() else mapped
            for batch in batches:
                yield made(batch, self.mapping, raw=self.raw)


def column_name(number: int) -> str:
    """Return the temporary name of the table's column `number`, since SQL may use only the names of record parts."""
    return f"_memwal_c{number}"


def mapped(batch: pa.RecordBatch, mapping: RecordMapping, *, raw: bool = False) -> pa.RecordBatch:
    """Return the rows of a batch with the columns key, value, topic, partition, offset and timestamp.

    The batch also has headers if `mapping` reads them, or with `raw`.

    Columns of the result: `column_name(n)` for columns without SQL; `inputs` for SQL, with a struct for each root that
    has fields; LANDED, COORDINATES, DELETE, PROBLEM and KEY_PROBLEM; with `raw` also RAW_KEY, RAW_VALUE and
    RAW_HEADERS.
    """
    rows = _Rows(batch, mapping)
    found = {column_name(n): rows.column(c) for n, c in enumerate(mapping.columns) if c.leaf is not None}
    inputs = nested((leaf, rows.leaf(leaf)) for leaf in mapping.inputs)
    found |= {name: _struct(below) for name, below in inputs.items()}
    found |= {col.LANDED: batch["timestamp"], col.TOPIC: batch["topic"]}
    found |= {col.PARTITION: batch["partition"], col.OFFSET: batch["offset"]}
    found |= {col.DELETE: rows.deletes, col.PROBLEM: rows.problems(), KEY_PROBLEM: rows.problems(of_deletes=True)}
    if raw:
        found |= {col.RAW_KEY: batch["key"], col.RAW_VALUE: batch["value"], col.RAW_HEADERS: batch["headers"]}
    return pa.RecordBatch.from_pydict(found)


def rows_without_sql(batch: pa.RecordBatch, mapping: RecordMapping, *, raw: bool = False) -> pa.RecordBatch:
    """Return the rows of a batch in the form of the source's frame.

    Columns: those of the table by name, LANDED, COORDINATES, DELETE and PROBLEM; with `raw` also the bytes of the
    records. Requires: the mapping contains no SQL.
    """
    found = mapped(batch, mapping, raw=raw)
    columns = {each.name: found[column_name(number)] for number, each in enumerate(mapping.columns)}
    beside = (col.LANDED, *col.COORDINATES, *(col.RAW if raw else ()), col.DELETE, col.PROBLEM)
    return pa.RecordBatch.from_pydict(columns | {name: found[name] for name in beside})


def unmapped(batch: pa.RecordBatch, mapping: RecordMapping, *, raw: bool = True) -> pa.RecordBatch:
    """As `mapped`, but with the bytes of values only: every other column is null."""
    schema = mapped(batch.slice(0, 0), mapping, raw=raw).schema
    values = [batch["value"] if each.name == col.RAW_VALUE else pa.nulls(len(batch), each.type) for each in schema]
    return pa.RecordBatch.from_arrays(values, schema.names)


def nested(inputs: Iterable[tuple[Leaf, Any]]) -> dict[str, Any]:
    """Return what belongs to the parts of a record that SQL uses, with fields nested below their root."""
    found: dict[str, Any] = {}
    for leaf, each in inputs:
        below, names = found, (leaf.origin.root, *leaf.origin.path)
        for name in names[:-1]:
            below = below.setdefault(name, {})
        below[names[-1]] = each
    return found


def _struct(below: Any) -> pa.Array:
    if not isinstance(below, dict):
        return below
    return pa.StructArray.from_arrays([_struct(each) for each in below.values()], list(below))


@dataclass
class _Rows:
    """One batch being mapped. Problems (row -> reason) are collected in `parse`, `of_key` and `of_rest`."""

    batch: pa.RecordBatch
    mapping: RecordMapping
    parse: Problems = field(default_factory=dict)
    of_key: Problems = field(default_factory=dict)
    of_rest: Problems = field(default_factory=dict)
    _read: dict[Leaf, tuple[pa.Array, Problems]] = field(default_factory=dict)

    @cached_property
    def gone(self) -> pa.Array:
        """Rows that are tombstones."""
        return pc.is_null(self.batch["value"])

    @cached_property
    def deletes(self) -> pa.Array:
        """Rows that delete their key, without those that `delete_when` adds later."""
        return pc.or_(self.gone, self.values.deletes)

    @cached_property
    def values(self) -> _Values:
        wanted = [leaf for leaf in self.mapping.leaves if leaf.origin.root in (VALUE, ENVELOPE) and leaf.origin.path]
        found = _Values(self.batch["value"], wanted, self.mapping)
        self.parse |= found.problems
        return found

    @cached_property
    def keys(self) -> _Values:
        wanted = [leaf for leaf in self.mapping.leaves if leaf.origin.root == KEY and leaf.origin.path]
        found = _Values(self.batch["key"], wanted, self.mapping, of_key=True)
        self.parse |= found.problems
        return found

    def column(self, column: Column) -> pa.Array:
        """Return the values of one column of the table; record its problems."""
        assert column.leaf is not None
        values, problems = self._leaf(column.leaf)
        from_key = column.key and column.leaf.origin.root in (VALUE, ENVELOPE)
        if from_key and pc.any(self.gone).as_py():
            named, more = self._named_by_key(column)
            values = pc.if_else(self.gone, named, values)
            problems = problems | more
        if column.default is not None:
            values = pc.coalesce(values, pa.scalar(column.default, values.type))
        self._note(column, values, problems)
        if not column.key and pc.any(self.deletes).as_py():
            values = pc.if_else(self.deletes, pa.scalar(None, values.type), values)
        return values

    def leaf(self, leaf: Leaf) -> pa.Array:
        """Return a part that SQL uses; record its problems."""
        values, problems = self._leaf(leaf)
        for row, reason in problems.items():
            self.of_rest.setdefault(row, f"map: {leaf.origin}: {reason}")
        return values

    def problems(self, *, of_deletes: bool = False) -> pa.Array:
        """Return why each row cannot be used. `of_deletes`: assume that each row is a delete."""
        found: list[str | None] = [None] * self.batch.num_rows
        deletes = self.deletes
        keyless = not any(column.key for column in self.mapping.columns)
        if keyless and (of_deletes or pc.any(deletes).as_py()):
            for row in np.flatnonzero(deletes.to_numpy(zero_copy_only=False)) if not of_deletes else range(len(found)):
                found[row] = "map: cannot delete: the table has no key; remove deletes from the topic"
        for row, reason in self.of_rest.items():
            if not of_deletes and not deletes[row].as_py():
                found[row] = reason
        for row, reason in (self.of_key | self.parse).items():
            found[row] = reason
        return pa.array(found, pa.string())

    def _leaf(self, leaf: Leaf) -> tuple[pa.Array, Problems]:
        """Return a part of the records, and why values in it do not fit."""
        if leaf in self._read:
            return self._read[leaf]
        root, path = leaf.origin.root, leaf.origin.path
        if root in (VALUE, ENVELOPE) and path:
            found = self.values.read(leaf)
        elif root == KEY and path:
            found = self.keys.read(leaf)
        elif root in (VALUE, KEY):
            found = bytes_column(self.batch[root], leaf.kind, leaf.unit)
        elif root == HEADERS:
            found = bytes_column(_header(self.batch["headers"], path[0]), leaf.kind, leaf.unit)
        else:
            found = _plain(self.batch[root], leaf)
        self._read[leaf] = found
        return found

    def _named_by_key(self, column: Column) -> tuple[pa.Array, Problems]:
        """Return a key column of tombstones, for a column that other rows take from the value.

        The value is the field of the column's name if the record's key is an object, or the whole record key if the
        table's key has one column. A key in Avro or in a wrapper of schema and payload has typed values; any other key
        is text.
        """
        leaf = column.leaf
        assert leaf is not None
        alone = sum(each.key for each in self.mapping.columns) == 1
        names = (leaf.origin.path[-1] if leaf.origin.path else column.name, column.name)
        decode, avro = _decoder(self.mapping, of_key=True), _framed(self.mapping)
        raw, gone = self.batch["key"], self.gone.to_numpy(zero_copy_only=False)

        def named(value: Any, kind: pa.DataType, unit: str) -> Any:
            if value is None:
                return None
            try:
                decoded = decode(value)
            except ValueError:
                if avro(value):
                    raise
                decoded = None
            found = _payload(decoded)
            if isinstance(found, dict):
                return typed(next((one_of(found, name) for name in names if name in found), None), kind, unit)
            if not alone:
                raise ValueError("the key is no object of the key columns")
            if avro(value) or found is not decoded:
                return typed(found, kind, unit)
            return from_text(value.decode(errors="strict"), kind, unit)

        values = [value if take else None for value, take in zip(raw.to_pylist(), gone.tolist(), strict=True)]
        return column_of(values, leaf.kind, leaf.unit, named)

    def _note(self, column: Column, values: pa.Array, problems: Problems) -> None:
        noted = self.of_key if column.key else self.of_rest
        assert column.leaf is not None
        where = f"map: column {column.name!r} ({column.leaf.origin})"
        for row, reason in problems.items():
            noted.setdefault(row, f"{where}: {reason}")
        if column.required and values.null_count:
            why = "it is part of the key" if column.key else "it may not be null"
            for row in np.flatnonzero(pc.is_null(values).to_numpy(zero_copy_only=False)).tolist():
                noted.setdefault(row, f"{where} is missing; {why}, give it a value or a default")


def _plain(values: pa.Array, leaf: Leaf) -> tuple[pa.Array, Problems]:
    """Return topic, partition, offset or timestamp in the type of the column."""
    if pa.types.is_timestamp(leaf.kind) and leaf.kind.tz is None:
        values = pc.local_timestamp(values)
    return values.cast(transport_type(leaf.kind)), {}


def _header(headers: pa.Array, name: str) -> pa.Array:
    """Return the last header named `name` of each row, as Kafka's own clients do; null if a row lacks it."""
    pairs = headers.flatten()
    if not len(pairs):
        return pa.nulls(len(headers), pa.binary())
    mine = np.flatnonzero(pc.equal(pairs.field("key"), name).to_numpy(zero_copy_only=False))
    last = np.full(len(headers), -1)
    last[pc.list_parent_indices(headers).to_numpy()[mine]] = mine  # later headers overwrite earlier ones
    return pairs.field("value").take(pa.array(last, mask=last < 0))


def _payload(found: Any) -> Any:
    """Return a key without the wrapper of schema and payload; a null payload becomes an object without fields."""
    if isinstance(found, dict) and set(found) == {"schema", "payload"}:
        payload = one_of(found, "payload")
        return {} if payload is None else payload
    return found


def _decoder(mapping: RecordMapping, *, of_key: bool = False) -> Callable[[bytes], Any]:
    """Return the function that decodes a value or a key: Avro if a registry id precedes it, else JSON."""
    any_text = any(leaf.unit == ANY_TEXT for leaf in mapping.leaves)
    of_json = json_decoder((leaf.kind for leaf in mapping.leaves), any_text=any_text)
    if mapping.value_format != "avro" or (of_key and not mapping.registry):
        return of_json
    from memwal.ingest.values.avro import decoder

    of_avro = decoder(mapping.avro_schema, mapping.registry, mapping.registry_options)
    if not of_key:
        return of_avro
    avro = _framed(mapping)
    return lambda value: of_avro(value) if avro(value) else of_json(value)


def _framed(mapping: RecordMapping) -> Callable[[bytes], bool]:
    """Return the function that detects whether a key is Avro behind a registry id."""
    from memwal.ingest.values.avro import MAGIC

    with_registry = mapping.value_format == "avro" and bool(mapping.registry)
    return lambda key: with_registry and key[:1] == bytes([MAGIC])


class _Values:
    """The fields of a batch's values (or keys).

    `read` returns the fields. `deletes`: which rows delete. `problems`: of whole values, by row.
    """

    def __init__(self, raw: pa.Array, leaves: Sequence[Leaf], mapping: RecordMapping, *, of_key: bool = False) -> None:
        self.problems: Problems = {}
        self.deletes = pa.array(np.zeros(len(raw), bool))
        self._raw, self._leaves, self._mapping, self._of_key = raw, list(leaves), mapping, of_key
        self._columns: dict[Leaf, pa.Array] = {}
        self._documents: list[Document] = []
        if (leaves or mapping.envelope != "none") and len(raw):
            self._decode()

    def read(self, leaf: Leaf) -> tuple[pa.Array, Problems]:
        """Return the column of one of the leaves, and why values in it do not fit."""
        if leaf in self._columns:
            return self._columns[leaf], {}
        around = leaf.origin.root == ENVELOPE
        values = [field_of(each, leaf.origin.path, of_envelope=around) for each in self._documents]
        return column_of(values, leaf.kind, leaf.unit)

    def _decode(self) -> None:
        fast = self._mapping.value_format == "json" and self._fast(self._raw, None)
        if fast and not any(leaf.unit == ANY_TEXT for leaf in self._leaves):
            return
        envelope = "none" if self._of_key else self._mapping.envelope
        read = _decoder(self._mapping, of_key=self._of_key)
        decode = (lambda value: _payload(read(value))) if self._of_key else read
        noun = "the key" if self._of_key else "the value"
        self._documents = documents(self._raw.to_pylist(), decode, envelope, noun)
        self.problems = {row: each.problem for row, each in enumerate(self._documents) if each.problem}
        if self._of_key:
            self.problems = {row: text.replace("parse: ", "parse: key: ", 1) for row, text in self.problems.items()}
        self.deletes = pa.array([each.delete for each in self._documents], pa.bool_())
        if self.problems and not fast and self._mapping.value_format == "json":
            good = np.array([each.problem is None for each in self._documents])
            self._fast(self._raw.filter(pa.array(good)), good)

    def _fast(self, raw: pa.Array, good: np.ndarray[Any, np.dtype[np.bool_]] | None) -> bool:
        """Read all leaves of the rows `good` at once, except those that accept any value.

        Return False if a value does not fit.
        """
        filled = raw.fill_null(b"{}")
        leaves = [leaf for leaf in self._leaves if leaf.unit != ANY_TEXT]
        ordered = [leaf for of in (False, True) for leaf in leaves if (leaf.origin.root == ENVELOPE) is of]
        rows, around = (
            [(leaf.origin.path, leaf.kind, leaf.unit) for leaf in ordered if (leaf.origin.root == ENVELOPE) is of]
            for of in (False, True)
        )
        deletes = None
        if self._of_key:
            found = mapping_json.wrapped(filled, rows)
        elif self._mapping.envelope == "none":
            found = mapping_json.plain(filled, rows)
        else:
            both = mapping_json.debezium(filled, rows, around, pc.is_null(raw))
            found, deletes = (None, None) if both is None else both
        if found is None:
            return False
        places = None if good is None else pa.array(np.cumsum(good) - 1, mask=~good)
        spread = found if places is None else [each.take(places) for each in found]
        if deletes is not None:
            self.deletes = deletes if places is None else deletes.take(places).fill_null(False)
        self._columns = dict(zip(ordered, spread, strict=True))
        return True


def record_mapping(source: SourceSettings, schema: pa.Schema, key: tuple[str, ...]) -> RecordMapping:
    """Return the mapping into the columns of a table. Raises: Invalid with every problem, one line each."""
    mapping, problems = build(source, schema, key)
    if problems:
        raise Invalid.of(f"[source] {problem.text}" for problem in problems)
    return mapping
