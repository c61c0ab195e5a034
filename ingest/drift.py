"""New fields in a source: seen before anything of their micro-batch is written, then refused, or added as columns.

In steps, for a micro-batch:

 1. Executors look at the records for fields that nobody reads, and for the type of their values (`FieldsTask`).
 2. `fail`: the stream ends here. `add`: the driver adds nullable columns to the base table, by Lance's own call; of
    several that add the same one, one does. *Crash here: the columns are there, null in every row.*
 3. The query ends and begins anew with the columns that the table has now; the regions follow (`ingest.reshaping`).
    Its checkpoint has the micro-batch as begun, so it comes again, whole. *Crash here: the same.*

A type is one that any of its values fits: bool, int64, float64 (of whole and other numbers), else string. Fields that
are objects or lists, null in all records so far, or that differ from a column only in the case of letters add nothing.
A value that does not fit its column later is a bad row, as ever.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import lance
import pyarrow as pa
import pyarrow.json

from flush import BaseTable
from ingest.errors import Invalid, MemWalError, Unavailable
from ingest.kafka_checks import KAFKA, record_mapping
from ingest.mapping import VALUE
from ingest.mapping_documents import documents, of_json
from ingest.settings import Settings
from ingest.source import FILE, PLACE, RAW_VALUE
from ingest.task_errors import of_spark, task_edge

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

Types = dict[str, pa.DataType]
_TRIES = 20
_OURS = "_"
"""How names begin that Lance or memwal may take for itself."""


class Grown(Exception):
    """The table has columns now that the query was started without."""


# ---- on executors --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FieldsTask:
    """Looks through records (a binary column) for fields besides `known`; yields their names and types, as text.

    Records that cannot be read have none: what becomes of them is decided elsewhere.
    """

    known: frozenset[str]
    envelope: str = "none"

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with task_edge():
            found: Types = {}
            for batch in batches:
                widen(found, fields_of(batch.column(0), self.known, self.envelope))
            yield pa.RecordBatch.from_pydict({"name": list(found), "type": [str(kind) for kind in found.values()]})


def fields_of(records: pa.Array, known: frozenset[str], envelope: str = "none") -> Types:
    """Names and types of the fields of JSON objects that are not `known`, whatever the case of their letters."""
    values = [value for value in records.to_pylist() if value is not None]
    found = _at_once(values) if envelope == "none" and values else None
    if found is None:
        found = {}
        for each in documents(values, of_json, envelope):
            widen(found, {name: _type_of(value) for name, value in (each.fields or {}).items()})
    return {name: kind for name, kind in found.items() if kind is not None and _is_new(name, known)}


def _at_once(values: list[bytes]) -> Types | None:
    """All records by Arrow's own reader; None where one of them, or two together, are not what it takes."""
    try:
        read = pyarrow.json.read_json(
            io.BytesIO(b"\n".join(values)),
            parse_options=pyarrow.json.ParseOptions(newlines_in_values=True),
        )
    except pa.ArrowException:
        return None
    return {field.name: _column_type(field.type) for field in read.schema}


def _column_type(kind: pa.DataType) -> Any:
    types = pa.types
    if types.is_nested(kind) or types.is_null(kind):
        return None
    return kind if types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind) else pa.string()


def _type_of(value: object) -> Any:
    if isinstance(value, bool):
        return pa.bool_()
    if isinstance(value, int):
        return pa.int64() if -(2**63) <= value < 2**63 else pa.float64()
    if isinstance(value, float):
        return pa.float64()
    return pa.string() if isinstance(value, str) else None


def _is_new(name: str, known: frozenset[str]) -> bool:
    usable = bool(name) and not name.startswith(_OURS) and not set(name) & set('."`')
    return usable and name.lower() not in {each.lower() for each in known}


def widen(found: Types, more: Mapping[str, Any]) -> None:
    """Take `more` into `found`: a type that holds the values of both. None: nothing but nulls, objects or lists."""
    numbers = {pa.int64(), pa.float64()}
    for name, kind in more.items():
        before = found.get(name)
        if before is None or kind is None or before == kind:
            found[name] = before if kind is None and before is not None else kind
        else:
            found[name] = pa.float64() if {before, kind} == numbers else pa.string()


# ---- on the driver -------------------------------------------------------------------------------------------------


class Drift:
    """Stands before the sink of a query, and looks at each micro-batch first.

    Thread safety. As the sink. Errors. As the sink, and `Grown`; the last one stays in `failure`.
    """

    def __init__(self, settings: Settings, base: BaseTable, sink: Callable[[DataFrame, int], None]) -> None:
        """`base`: the table with the columns that the query was started with."""
        self._settings, self._base, self._sink = settings, base, sink
        self.failure: MemWalError | Grown | None = None

    def __call__(self, frame: DataFrame, batch_id: int) -> None:
        """Look, then write; Spark calls this."""
        self.failure = None
        try:
            self._look(frame)
        except Grown as grown:
            self.failure = grown
            raise
        except Exception as error:  # noqa: BLE001 - raised again as one of the six kinds
            self.failure = of_spark(error)
            raise self.failure from None
        self._sink(frame, batch_id)

    def _look(self, frame: DataFrame) -> None:
        task = FieldsTask(self._known(), self._settings.source.envelope)
        found: Types = {}
        for row in _records(frame).mapInArrow(task, "name string, type string").collect():
            widen(found, {row["name"]: pa.type_for_alias(row["type"])})
        if not found:
            return
        if self._settings.source.schema_drift == "fail":
            names = ", ".join(f"{name} ({kind})" for name, kind in sorted(found.items()))
            raise Invalid(
                f"the source has fields that the table has not: {names}; add the columns, or set source.schema_drift"
            )
        if add_columns(self._base, found):
            raise Grown(", ".join(sorted(found)))

    def _known(self) -> frozenset[str]:
        """Names of fields that a column has, or that the mapping reads into one."""
        names, source = set(self._base.schema.names), self._settings.source
        if source.format == KAFKA:
            mapping = record_mapping(source, self._base.schema, self._base.key)
            names |= {leaf.origin.path[0] for leaf in mapping.leaves if leaf.origin.root == VALUE and leaf.origin.path}
        return frozenset(names)


def _records(frame: DataFrame) -> DataFrame:
    """The raw records of a micro-batch: those of Kafka come along; those of files are lines, read once more."""
    from pyspark.sql import functions

    if PLACE[1] not in frame.columns:
        return frame.select(RAW_VALUE)
    files = [row[0] for row in frame.select(FILE).distinct().collect()]
    lines = frame.sparkSession.read.text(files) if files else frame.sparkSession.createDataFrame([], "value string")
    return lines.select(functions.col("value").cast("binary"))


def add_columns(base: BaseTable, wanted: Mapping[str, pa.DataType]) -> bool:
    """Add to the table those of the columns that it does not have; whether it has columns now that `base` has not.

    Raises: Unavailable where others were always faster.
    """
    for _ in range(_TRIES):
        newest = base.latest()
        missing = {name: kind for name, kind in wanted.items() if name not in newest.schema.names}
        if not missing:
            return bool(newest.schema.names != base.schema.names)
        try:
            dataset = lance.dataset(base.uri, storage_options=dict(base.storage_options))
            dataset.add_columns(pa.schema([pa.field(name, kind) for name, kind in missing.items()]))
        except OSError as error:
            last = error
    raise Unavailable(f"{base.uri}: columns could not be added after {_TRIES} attempts; run it again") from last
