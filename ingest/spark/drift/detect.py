"""Detect new fields in a source before their micro-batch is written; then reject them or add columns.

Steps for a micro-batch:

1. Its records are examined for fields that the mapping does not read, and for the types of their values: JSON by the
   values (`kinds`), Avro by the writer's schemas, each once (`schemas`), Parquet and ORC by the schemas of the
   files (`schemas`).
2. `fail`: the stream ends here. `add`: the driver adds nullable columns to the base table with Lance's own call; if
   several drivers add the same column, one succeeds. *Crash here: the columns exist, null in every row.*
3. The query is restarted with the table's current columns; the regions follow (`region.admission`). The
   checkpoint counts the micro-batch as begun, so it is replayed as a whole. *Crash here: the same.*

The README lists the fields that do not become columns.
"""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import lance
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json

from memwal.flush import BaseTable
from memwal.ingest.errors import Invalid, MemWalError, Unavailable
from memwal.ingest.settings.load import Settings
from memwal.ingest.settings.sections import KAFKA
from memwal.ingest.spark.drift import kinds
from memwal.ingest.spark.drift.kinds import Kinds, described, widen
from memwal.ingest.spark.drift.schemas import OWN_SCHEMA, fields_of_files, fields_of_schema
from memwal.ingest.spark.errors import of_spark
from memwal.ingest.spark.source.columns import PLACE, RAW_VALUE
from memwal.ingest.spark.source.files import NO_GLOB, files_of
from memwal.ingest.spark.source.kafka.rows import record_mapping
from memwal.ingest.spark.task import LOOKING, task_edge
from memwal.ingest.values.avro import HEAD, Options, inline_schema, options_of, writer_schema
from memwal.ingest.values.documents import documents, of_json
from memwal.ingest.values.spec import VALUE
from memwal.ingest.values.values import WHOLE

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_LOG = logging.getLogger("memwal.pipeline")
_TRIES = 20
_LONG_WHOLE = re.compile(rb"[:\[,]\s*-?\d{%d,}\s*[,\]}]" % len(str(WHOLE[64])))
"""A whole number in JSON that a float64 may round."""
MOST_COLUMNS = 1_000
"""Maximum number of columns for adding columns. With more fields than this, field names are data."""


class ColumnsAdded(Exception):
    """Raised if the table has columns that it lacked when the query was started."""


# ---- on executors --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FieldsTask:
    """Examines records (a binary column) for fields besides `known`; yields the fields once, packed.

    `registry`: of Avro values; without a registry, values are JSON. Unreadable records count as records without fields;
    the mapping reports them. Raises (as TaskError): Invalid and Unavailable for the registry.
    """

    known: frozenset[str]
    envelope: str = "none"
    registry: str = ""
    registry_options: Options = ()

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with task_edge():
            found: Kinds = {}
            for batch in batches:
                widen(found, self.fields_of(batch.column(0)))
            yield pa.RecordBatch.from_pydict({"found": pa.array([kinds.packed(found)], pa.binary())})

    def fields_of(self, records: pa.Array) -> Kinds:
        """Return the kinds of the fields of records, by name."""
        values = [] if self.registry else [value for value in records.to_pylist() if value is not None]
        found = _at_once(values, self.known) if self.envelope == "none" and values else None
        if self.registry:
            found = self._of_schemas(records)
        elif found is None:
            found = {}
            for each in documents(values, of_json, self.envelope):
                widen(found, {name: kinds.of_value(value) for name, value in (each.fields or {}).items()})
        return {name: kind for name, kind in found.items() if name not in self.known}

    def _of_schemas(self, records: pa.Array) -> Kinds:
        found: Kinds = {}
        for head in pc.unique(pc.binary_slice(records.drop_null(), 0, HEAD)).to_pylist():
            try:
                schema = writer_schema(head, self.registry, self.registry_options)
            except ValueError:
                continue
            widen(found, fields_of_schema(schema, self.envelope))
        return found


def _at_once(values: list[bytes], known: frozenset[str]) -> Kinds | None:
    """Read all records with Arrow's reader, and return the kinds of fields besides `known`.

    Return None if the reader rejects a record or two together, may accept text that is not JSON (see
    `values.json_columns`), or may have rounded a whole number.
    """
    joined, given = b"\n".join(values), [each.strip() for each in values]
    if not all(each[:1] == b"{" and each[-1:] == b"}" for each in given) or b"NaN" in joined or b"Inf" in joined:
        return None
    try:
        read = pyarrow.json.read_json(
            io.BytesIO(joined),
            parse_options=pyarrow.json.ParseOptions(newlines_in_values=True),
        )
    except pa.ArrowException:
        return None
    if read.num_rows != len(values):
        return None
    new = {name: column for name, column in zip(read.column_names, read.columns, strict=True) if name not in known}
    if any(map(kinds.may_be_rounded, new.values())) and _LONG_WHOLE.search(joined):
        return None
    return {name: kinds.of_arrow(column) for name, column in new.items()}


# ---- on the driver -------------------------------------------------------------------------------------------------


class Drift:
    """Wraps the sink of a query, and examines each micro-batch first.

    Thread safety. As the sink. Raises: as the sink, and `ColumnsAdded`; `failure` keeps the last error of the
    examination.
    """

    def __init__(
        self,
        settings: Settings,
        base: BaseTable,
        sink: Callable[[DataFrame, int], None],
        told: set[str] | None = None,
    ) -> None:
        """`base`: the table with the columns that the query was started with. `told`: fields already logged."""
        self._settings, self._base, self._sink = settings, base, sink
        self.told: set[str] = set() if told is None else told
        self.failure: MemWalError | ColumnsAdded | None = None

    def __call__(self, frame: DataFrame, batch_id: int) -> None:
        """Examine a micro-batch, then write it; Spark calls this."""
        self.failure = None
        try:
            self._look(frame)
        except ColumnsAdded as added:
            self.failure = added
            raise
        except Exception as error:  # noqa: BLE001 - raised again as one of the six kinds
            self.failure = of_spark(error)
            raise self.failure from None
        self._sink(frame, batch_id)

    def _look(self, frame: DataFrame) -> None:
        """Raise ColumnsAdded if columns were added, Invalid if new fields end the run."""
        known = self._known()
        columns, passed = kinds.new_columns(self._found(frame, known), known)
        if self._settings.source.schema_drift == "fail" and columns:
            names = ", ".join(map(described, columns))
            raise Invalid(
                f"the source has fields without a column: {names}; add the columns, or set source.schema_drift"
            )
        if self._settings.source.format in OWN_SCHEMA:  # a text column cannot hold other values of such files
            passed += [column.name for column in columns if column.metadata]
            columns = [column for column in columns if not column.metadata]
        self._tell(passed)
        if columns:
            self._add(columns)

    def _add(self, columns: Sequence[pa.Field]) -> None:
        if len(self._base.schema.names) + len(columns) > MOST_COLUMNS:
            raise Invalid(
                f"the source has {len(columns):,} new fields, such as {described(columns[0])}; with them the table has "
                f"more than {MOST_COLUMNS:,} columns; add those that you want, and set source.schema_drift to ignore"
            )
        if add_columns(self._base, columns):
            raise ColumnsAdded(", ".join(column.name for column in columns))

    def _found(self, frame: DataFrame, known: frozenset[str]) -> Kinds:
        source = self._settings.source
        if source.format in OWN_SCHEMA:
            return fields_of_files(frame, source, known)
        if source.avro_schema:
            return fields_of_schema(inline_schema(source.avro_schema), source.envelope)
        options = options_of(source.registry_options)
        task = FieldsTask(known, source.envelope, source.registry, options)
        found: Kinds = {}
        with LOOKING.on(frame.sparkSession):
            for row in _records(frame).mapInArrow(task, "found binary").collect():
                widen(found, kinds.unpacked(bytes(row["found"])))
        return found

    def _tell(self, names: Sequence[str]) -> None:
        names = [name for name in names if name not in self.told]
        if names:
            self.told |= set(names)
            _LOG.warning(
                "%s: fields of the source that become no columns, and are left out: %s; a column cannot have this name "
                "or type, or another name differs only in case",
                self._base.uri,
                ", ".join(map(repr, names)),
            )

    def _known(self) -> frozenset[str]:
        """Return the names of fields that have a column, or that the mapping reads into one."""
        names, source = set(self._base.schema.names), self._settings.source
        if source.format == KAFKA:
            mapping = record_mapping(source, self._base.schema, self._base.key)
            names |= {leaf.origin.path[0] for leaf in mapping.leaves if leaf.origin.root == VALUE and leaf.origin.path}
        return frozenset(names)


def _records(frame: DataFrame) -> DataFrame:
    """Return the raw records of a micro-batch.

    Kafka records come from the frame; files are read once more, as lines.
    """
    from pyspark.sql import functions

    if PLACE[1] not in frame.columns:
        return frame.select(RAW_VALUE)
    files, spark = files_of(frame), frame.sparkSession
    lines = spark.read.option(*NO_GLOB).text(files) if files else spark.createDataFrame([], "value string")
    return lines.select(functions.col("value").cast("binary"))


def add_columns(base: BaseTable, wanted: Sequence[pa.Field]) -> bool:
    """Add the missing columns to the table. Return whether it now has columns that `base` lacks.

    Raises: Unavailable if other writers were faster in every attempt.
    """
    last: OSError | None = None
    for attempt in range(_TRIES + 1):
        newest = base.latest()
        # Another pipeline may have added the column with another case; another program with a type that memwal cannot
        # hold.
        there = {name.lower() for name in newest.dataset.schema.names}
        missing = [column for column in wanted if column.name.lower() not in there]
        if not missing:
            return bool(newest.schema.names != base.schema.names)
        if attempt == _TRIES:
            break
        try:
            lance.dataset(base.uri, storage_options=dict(base.storage_options)).add_columns(pa.schema(missing))
        except OSError as error:
            last = error
    raise Unavailable(f"{base.uri}: columns could not be added after {_TRIES} attempts; run it again") from last
