"""New fields in a source: seen before anything of their micro-batch is written, then refused, or added as columns.

In steps, for a micro-batch:

 1. Its records are looked at for fields that nobody reads, and for the type of their values: JSON by the values
    themselves (`drift_kinds`), Avro by the schemas that its values were written by, each once (`drift_avro`), Parquet
    and ORC by the schemas of the files (`drift_files`).
 2. `fail`: the stream ends here. `add`: the driver adds nullable columns to the base table, by Lance's own call; of
    several that add the same one, one does. *Crash here: the columns are there, null in every row.*
 3. The query ends and begins anew with the columns that the table has now; the regions follow
    (`ingest.region.admission`). Its checkpoint has the micro-batch as begun, so it comes again, whole. *Crash here: the
    same.*

What becomes no column is left out, and told once in the log: fields whose names nobody can use, or that differ from
a column's only in the case of letters. A field that is null in all records so far is no field yet. A value that does
not fit its column later is a bad row, as ever.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import lance
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json

from memwal.flush import BaseTable
from memwal.ingest.drift.avro_fields import fields_of_schema
from memwal.ingest.drift.file_fields import OWN_SCHEMA, fields_of_files
from memwal.ingest.drift.kinds import Kinds, new_columns, of_arrow, of_value, packed, said, unpacked, widen
from memwal.ingest.errors import Invalid, MemWalError, Unavailable
from memwal.ingest.mapping.avro import HEAD, Options, inline_schema, writer_schema
from memwal.ingest.mapping.documents import documents, of_json
from memwal.ingest.mapping.spec import VALUE
from memwal.ingest.settings.load import Settings
from memwal.ingest.settings.process_sections import KAFKA
from memwal.ingest.source.batch_files import NO_GLOB, files_of
from memwal.ingest.source.columns import PLACE, RAW_VALUE
from memwal.ingest.source.kafka.rows import record_mapping
from memwal.ingest.spark.errors import of_spark
from memwal.ingest.spark.task import only_looking, task_edge

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_LOG = logging.getLogger("memwal.pipeline")
_TRIES = 20
MOST_COLUMNS = 1_000
"""Of a table, for new ones to be added: where there are more fields than that, their names are data."""


class Grown(Exception):
    """The table has columns now that the query was started without."""


# ---- on executors --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FieldsTask:
    """Looks through records (a binary column) for fields besides `known`; yields them once, packed.

    `registry`: of Avro values; without one they are JSON. Records that cannot be read have no fields: what becomes of
    them is decided elsewhere. Raises (as TaskError): Invalid and Unavailable about the registry.
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
            yield pa.RecordBatch.from_pydict({"found": pa.array([packed(found)], pa.binary())})

    def fields_of(self, records: pa.Array) -> Kinds:
        """Kinds of the fields of records, by name."""
        found = self._of_schemas(records) if self.registry else _of_json(records, self.envelope)
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


def _of_json(records: pa.Array, envelope: str) -> Kinds:
    values = [value for value in records.to_pylist() if value is not None]
    found = _at_once(values) if envelope == "none" and values else None
    if found is None:
        found = {}
        for each in documents(values, of_json, envelope):
            widen(found, {name: of_value(value) for name, value in (each.fields or {}).items()})
    return found


def _at_once(values: list[bytes]) -> Kinds | None:
    """All records by Arrow's own reader; None where one of them, or two together, are not what it takes."""
    try:
        read = pyarrow.json.read_json(
            io.BytesIO(b"\n".join(values)),
            parse_options=pyarrow.json.ParseOptions(newlines_in_values=True),
        )
    except pa.ArrowException:
        return None
    return {field.name: of_arrow(field.type) for field in read.schema}


# ---- on the driver -------------------------------------------------------------------------------------------------


class Drift:
    """Stands before the sink of a query, and looks at each micro-batch first.

    Thread safety. As the sink. Errors. As the sink, and `Grown`; the last one stays in `failure`.
    """

    def __init__(
        self,
        settings: Settings,
        base: BaseTable,
        sink: Callable[[DataFrame, int], None],
        told: set[str] | None = None,
    ) -> None:
        """`base`: the table with the columns that the query was started with. `told`: fields that the log knows."""
        self._settings, self._base, self._sink = settings, base, sink
        self.told: set[str] = set() if told is None else told
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
        """Raises: Grown, and Invalid where new fields are to end the run."""
        known = self._known()
        columns, passed = new_columns(self._found(frame, known), known)
        if self._settings.source.schema_drift == "fail" and columns:
            names = ", ".join(map(said, columns))
            raise Invalid(
                f"the source has fields that the table has not: {names}; add the columns, or set source.schema_drift"
            )
        if self._settings.source.format in OWN_SCHEMA:  # no column of text can take what is no text there
            passed += [column.name for column in columns if column.metadata]
            columns = [column for column in columns if not column.metadata]
        self._tell(passed)
        if columns:
            self._add(columns)

    def _add(self, columns: Sequence[pa.Field]) -> None:
        if len(self._base.schema.names) + len(columns) > MOST_COLUMNS:
            raise Invalid(
                f"the source has {len(columns):,} new fields, such as {said(columns[0])}; with them the table has more "
                f"than {MOST_COLUMNS:,} columns; add those that you want, and set source.schema_drift to ignore"
            )
        if add_columns(self._base, columns):
            raise Grown(", ".join(column.name for column in columns))

    def _found(self, frame: DataFrame, known: frozenset[str]) -> Kinds:
        source = self._settings.source
        if source.format in OWN_SCHEMA:
            return fields_of_files(frame, source, known)
        if source.avro_schema:
            return fields_of_schema(inline_schema(source.avro_schema), source.envelope)
        options = tuple((name, value.get_secret_value()) for name, value in source.registry_options.items())
        task = FieldsTask(known, source.envelope, source.registry, options)
        found: Kinds = {}
        with only_looking(frame.sparkSession):
            for row in _records(frame).mapInArrow(task, "found binary").collect():
                widen(found, unpacked(bytes(row["found"])))
        return found

    def _tell(self, names: Sequence[str]) -> None:
        names = [name for name in names if name not in self.told]
        if names:
            self.told |= set(names)
            _LOG.warning(
                "%s: fields of the source that become no columns, and are left out: %s; such a name, or type, no "
                "column can have here, or another one has the name in other letters",
                self._base.uri,
                ", ".join(map(repr, names)),
            )

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
    files, spark = files_of(frame), frame.sparkSession
    lines = spark.read.option(*NO_GLOB).text(files) if files else spark.createDataFrame([], "value string")
    return lines.select(functions.col("value").cast("binary"))


def add_columns(base: BaseTable, wanted: Sequence[pa.Field]) -> bool:
    """Add to the table those of the columns that it does not have; whether it has columns now that `base` has not.

    Raises: Unavailable where others were always faster.
    """
    for _ in range(_TRIES):
        newest = base.latest()
        there = {name.lower() for name in newest.schema.names}  # another pipeline may have added it, in other letters
        missing = [column for column in wanted if column.name.lower() not in there]
        if not missing:
            return bool(newest.schema.names != base.schema.names)
        try:
            lance.dataset(base.uri, storage_options=dict(base.storage_options)).add_columns(pa.schema(missing))
        except OSError as error:
            last = error
    raise Unavailable(f"{base.uri}: columns could not be added after {_TRIES} attempts; run it again") from last
