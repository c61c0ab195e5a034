"""Implement `Table.sql`: plan a query, read the needed rows of each table at one moment, and stream the answer.

README.md of this package has the steps. DataFusion raises one type for everything: a query that cannot be planned or
run is Invalid, with DataFusion's text as one line for its author; unrecognised texts stay unchanged.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Protocol

import pyarrow as pa
from datafusion import RuntimeEnvBuilder, SessionConfig, SessionContext, SQLOptions

from memwal.ingest.engine.api.arguments import brief
from memwal.ingest.engine.api.python_values import check_offsets
from memwal.ingest.engine.api.results import RowStream
from memwal.ingest.engine.api.sql.plan import BARRIER, Scan, any_of, filter_of, reads_again, scans_of
from memwal.ingest.engine.api.sql.sources import Handover, Kept, Provider, Source, counted
from memwal.ingest.engine.api.sql.statement import SELF, Statement, expect_bounded
from memwal.ingest.errors import Invalid, MemWalError, Unavailable, classify
from memwal.ingest.settings.values import format_size
from memwal.ingest.suggest import suggestion
from memwal.ingest.values.values import holds
from memwal.memtable.filter.predicate import null_inside
from memwal.wal.errors import first_line

ATTEMPTS = 3
_NAME = re.compile(r"[^\W\d]\w*")
_LEAD = re.compile(
    r"^((DataFusion|External|Schema|Execution|Internal|Arrow|SQL) error: |Error during planning: "
    r"|This feature is not implemented: |Optimizer rule '\w+' failed:? ?|type_coercion$|caused by$)+"
)
_HIDDEN = re.compile(r"\bmemwal_\d+\.")
_PLACE = re.compile(r" at Line: (\d+), Column: (\d+)")
_FIELDS = re.compile(r"Valid fields are (.*?)\.?$", re.MULTILINE)
_FIELD = re.compile(r'(?:"((?:[^"]|"")+)"|(\w+))(?=,|$)')
_SHOWN, _LONGEST = 300, 1000
"""Characters of DataFusion's message, and of the resulting message: both may hold a whole query."""
_READING = SQLOptions().with_allow_ddl(False).with_allow_dml(False).with_allow_statements(False)


class Readable(Protocol):
    """The methods used of a memwal table."""

    def scan(self, columns: Any = ..., filter: Any = ..., limit: Any = ..., *, level: str = ...) -> RowStream: ...

    def count(self, filter: Any = ..., *, level: str = ...) -> int: ...


@dataclass(frozen=True, slots=True)
class Request:
    """A query as the caller made it. `tables`: by name. `kind`: the class of memwal tables. `memory`: sql.memory_max,
    in bytes."""

    query: str
    tables: Mapping[str, Any]
    parameters: Mapping[str, Any]
    level: str
    kind: type
    memory: int


def run(table: Readable, location: str, request: Request) -> RowStream:
    """Return the rows of a query of `table`, which is at `location`.

    The first batch is read here, so that its errors are raised here. Raises: Invalid; errors of the scans.
    """
    statement = Statement.of(request.query)
    expect_bounded(request.query, request.parameters)
    given = _named(table, location, request)
    values = {name: _scalar(name, value) for name, value in request.parameters.items()}
    for _ in range(ATTEMPTS):
        try:
            return _Attempt(statement, given, request).answer(values)
        except _ColumnsChanged:
            continue
    raise Unavailable("somebody changed the table's columns while it was read; read again")


class _ColumnsChanged(Exception):
    """The scan has other columns than the query was planned with."""


def _named(table: Readable, location: str, request: Request) -> dict[str, Any]:
    """Return the tables by the names that the query may use."""
    others, taken = {}, {SELF}
    for name, rows in request.tables.items():
        if not _NAME.fullmatch(name):
            raise Invalid(f"tables: {brief(name)} is no plain name; use letters, digits and _, such as 'prices'")
        if name.lower() in taken:
            raise Invalid(f"tables: the name {brief(name)} is taken; choose another one")
        taken.add(name.lower())
        others[name] = rows if isinstance(rows, request.kind) else _arrow(name, rows)
    own = PurePosixPath(location).name.partition(".")[0]
    return {SELF: table, **({own: table} if _NAME.fullmatch(own) and own.lower() not in taken else {}), **others}


def _arrow(name: str, rows: Any) -> pa.Table | pa.RecordBatchReader:
    """Return rows of Arrow: in memory as a table, others as a stream, which is read once. Raises: Invalid."""
    if isinstance(rows, pa.Table):
        return rows
    if isinstance(rows, pa.RecordBatch):
        return pa.Table.from_batches([rows])
    if not hasattr(rows, "__arrow_c_stream__"):
        raise Invalid(
            f"tables: {name:.200} is a {type(rows).__name__}; give a memwal table, or rows of Arrow: a pyarrow.Table, "
            "a frame of pandas or Polars, a result of scan() or sql()"
        )
    return pa.RecordBatchReader.from_stream(rows)


def _scalar(name: str, value: Any) -> pa.Scalar:
    try:
        if isinstance(value, pa.Scalar):
            return value
        found = pa.scalar(value)
        if holds(found.type, pa.types.is_timestamp):
            check_offsets(list(_zoned_times(value)))  # Arrow truncates them silently
        return found
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise Invalid(f"parameters: {name:.200} has a value without an Arrow type: {first_line(error):.200}") from None


def _zoned_times(value: Any) -> Iterator[datetime.datetime]:
    """Yield the datetimes with a time zone in a value, at any depth."""
    if isinstance(value, datetime.datetime):
        if value.tzinfo is not None:
            yield value
    elif isinstance(value, Iterable) and not isinstance(value, str | bytes):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _zoned_times(part)


@dataclass(slots=True)
class _Table:
    """A memwal table (`ours`) or a stream in a session. `hidden`: its name in plans. `names`: its names in queries."""

    hidden: str
    rows: Any
    ours: bool
    provider: Provider
    names: list[str]


class _Attempt:
    """One attempt to answer a query."""

    def __init__(self, statement: Statement, given: Mapping[str, Any], request: Request) -> None:
        self._kind, self._level, self.statement, self.names = request.kind, request.level, statement, list(given)
        self._in_memory = {name: rows for name, rows in given.items() if isinstance(rows, pa.Table)}
        self.query, self.memory = request.query, request.memory
        self._tables: list[_Table] = []
        for name, rows in given.items():
            if name not in self._in_memory:
                self._add(name, rows)
        columns = [*(table.provider.schema for table in self._tables), *(t.schema for t in self._in_memory.values())]
        self.columns = {name for schema in columns for name in schema.names}

    def answer(self, parameters: Mapping[str, pa.Scalar]) -> RowStream:
        """Return the rows. Raises: _ColumnsChanged before any given stream is read."""
        frame = self._planned(parameters)
        plan = self._told(frame.optimized_logical_plan)
        scans = scans_of(plan)
        again = reads_again(plan, scans)
        with ExitStack() as opened:
            sources = []
            for table in sorted(self._tables, key=lambda table: not table.ours):
                places = [scan for scan in scans if scan.table == table.hidden]
                if again:
                    places = [Scan(table.hidden, None, (), None)] * 2
                if places:
                    source = table.provider.source = self._source(table, places)
                    opened.callback(source.close)
                    sources.append(source)
            result = self._result(frame, sources)
            opened.pop_all()
            return result

    # ---- plan ----------------------------------------------------------------------------------------------------

    def _add(self, name: str, rows: Any) -> None:
        known = next((table for table in self._tables if table.rows is rows), None)
        if known is not None:
            known.names.append(name)
            return
        # Level committed gives the newest columns without a request to an owner; the table may not know them yet.
        ours = isinstance(rows, self._kind)
        schema = _plain(rows.scan(limit=0, level="committed").schema if ours else rows.schema)
        self._tables.append(_Table(f"memwal_{len(self._tables)}", rows, ours, Provider(schema), [name]))

    def _planned(self, parameters: Mapping[str, pa.Scalar]) -> Any:
        """Plan with names as written; if that fails, with unquoted names in lower case, as in SQL."""
        failures = []
        for fold in (False, True):
            try:
                return self._session(fold=fold).sql_with_options(self.statement.text, _READING, dict(parameters))
            except Exception as error:  # noqa: BLE001 - DataFusion raises bare exceptions
                failures.append(self._problem(error))
        raise failures[0]

    def _session(self, *, fold: bool) -> SessionContext:
        runtime = RuntimeEnvBuilder().with_disk_manager_os().with_fair_spill_pool(self.memory)
        config = SessionConfig().with_target_partitions(1)
        config = config.set("datafusion.sql_parser.enable_ident_normalization", str(fold).lower())
        config = config.set("datafusion.sql_parser.map_string_types_to_utf8view", "false")
        # By default a sort merges thousands of sorted batches, whose cursors hold every row again: out of memory.
        config = config.set("datafusion.execution.sort_in_place_threshold_bytes", str(self.memory))
        session = SessionContext(config, runtime)
        for table in self._tables:
            session.register_table(table.hidden, table.provider)
            rows = session.table(table.hidden).limit(BARRIER)
            for name in table.names:
                session.register_view(f'"{name}"', rows)
            session.deregister_table(table.hidden)  # a query must not reach it without the barrier
        for name, rows in self._in_memory.items():
            session.register_record_batches(
                f'"{name}"', [null_inside(rows).to_batches() or [pa.RecordBatch.from_pylist([], rows.schema)]]
            )
        return session

    # ---- scan ----------------------------------------------------------------------------------------------------

    def _source(self, table: _Table, scans: Sequence[Scan]) -> Source:
        """Open the one scan that serves all places of a plan which read a table."""
        schema = table.provider.schema
        names = {name for scan in scans for name in (schema.names if scan.columns is None else scan.columns)}
        projected = pa.schema([field for field in schema if field.name in names])
        make = Source if len(scans) == 1 else Kept
        if table.ours and not names:
            return make(projected, counted(table.rows.count(level=self._level)), lambda: None)
        rows = self._scan(table.rows, schema, projected, scans) if table.ours else table.rows
        return make(projected, iter(rows), rows.close)

    def _scan(self, table: Readable, schema: pa.Schema, projected: pa.Schema, scans: Sequence[Scan]) -> RowStream:
        filters = [filter_of(scan.conditions, schema) for scan in scans]
        limit = scans[0].enough if len(scans) == 1 and filters[0][1] else None
        try:
            rows = table.scan(projected.names, any_of([text for text, _ in filters]), limit, level=self._level)
        except Invalid:
            if _plain(table.scan(limit=0, level="committed").schema) == schema:
                raise
            raise _ColumnsChanged from None
        if _plain(rows.schema) != projected:
            rows.close()
            raise _ColumnsChanged
        return rows

    # ---- run -----------------------------------------------------------------------------------------------------

    def _result(self, frame: Any, sources: Sequence[Source]) -> RowStream:
        schema, names = frame.schema(), list[str]()
        for name in schema.names:  # a result has distinct names, and no types that few libraries read
            numbered = (f"{name}_{number}" for number in range(1, len(schema) + 1))
            names.append(name if name not in names else next(each for each in numbered if each not in names))
        kinds = {pa.string_view(): pa.string(), pa.binary_view(): pa.binary()}
        pairs = zip(names, schema, strict=True)
        schema = pa.schema([pa.field(name, kinds.get(field.type, field.type), field.nullable) for name, field in pairs])
        out = Handover("sql", iter(self._told(frame.execute_stream)), 1)

        def close() -> None:
            out.close(interrupt=True)
            for source in sources:
                source.close()

        batches = self._batches(out, sources, schema, close)
        next(batches)
        return RowStream(schema, batches, close)

    def _batches(
        self, out: Handover[Any], sources: Sequence[Source], schema: pa.Schema, close: Callable[[], None]
    ) -> Iterator[pa.RecordBatch]:
        """Yield None once the first batch has arrived, so that the caller gets its error, and then the batches."""
        try:
            batch = self._next(out, sources)
            yield None
            while batch is not None:
                pairs = zip(batch.columns, schema, strict=True)
                columns = [column if column.type == field.type else column.cast(field.type) for column, field in pairs]
                if batch.num_rows:
                    yield pa.RecordBatch.from_arrays(columns, schema=schema)
                batch = self._next(out, sources)
        finally:
            close()

    def _next(self, out: Handover[Any], sources: Sequence[Source]) -> pa.RecordBatch | None:
        """Return the next batch, None after the last."""
        try:
            batch = out.take()
        except StopIteration:
            return None
        except Exception as error:  # noqa: BLE001 - DataFusion raises bare exceptions
            raise next((source.failure for source in sources if source.failure), self._problem(error)) from None
        return None if batch is None else batch.to_pyarrow()

    def _problem(self, error: BaseException) -> MemWalError:
        """Return the caller's error for an error of DataFusion."""
        text = _HIDDEN.sub("", str(error))
        if isinstance(error, MemWalError) or "os error" in text:
            return classify(error)
        for pattern, form in _MESSAGES.items():
            if match := re.search(pattern, text):
                message = form.format(*match.groups()) if isinstance(form, str) else form(self, match)
                return Invalid(f"sql: {message:.{_LONGEST}}")
        lines = (_LEAD.sub("", line.strip()) for line in text.splitlines())
        return Invalid(f"sql: {next((line for line in lines if line), type(error).__name__)[:_SHOWN].rstrip('.')}")

    def _told(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:  # noqa: BLE001 - DataFusion raises bare exceptions
            raise self._problem(error) from None


def _plain(schema: pa.Schema) -> pa.Schema:
    """Return a schema without metadata, which differs between a table and its batches."""
    return pa.schema([field.remove_metadata() for field in schema])


# ---- kinds of problems ---------------------------------------------------------------------------------------------


def _syntax(attempt: _Attempt, match: re.Match[str]) -> str:
    said = match[1].replace('\\"', '"').replace("Expected: ", "expected ")
    said = said.replace(", found: EOF", ", found the end").replace(", found: ", ", found ")
    return _PLACE.sub(
        lambda place: f" at line {place[1]}, column {attempt.statement.typed(int(place[1]), int(place[2]))}", said
    )


def _no_field(attempt: _Attempt, match: re.Match[str]) -> str:
    qualifier, _, name = (part.strip('"') for part in match[1].rpartition("."))
    listed = _FIELDS.search(match.string)
    known = [a or b for a, b in _FIELD.findall(listed[1])] if listed else list(attempt.columns)
    if name in known:
        return f"column '{qualifier:.60}.{name}' does not exist; column '{name}' is not in a table '{qualifier:.60}'"
    other_case = next((each for each in known if each.lower() == name.lower()), None)
    hint = suggestion(name, dict.fromkeys(known)) if other_case is None else f"; did you mean '{other_case}'?"
    return f"column '{name:.200}' does not exist{hint}"


_READS = "{} is refused: sql only reads; put and delete change a table"
_MESSAGES: Mapping[str, str | Callable[[_Attempt, re.Match[str]], str]] = {
    r'(?s:ParserError\("(.*?)"\))': _syntax,
    r"No field named (.+?)\.(?=\s|$)": _no_field,
    r"table '(?:datafusion\.public\.)?(.+?)' not found": lambda attempt, match: (
        f"table '{match[1]:.200}' does not exist{suggestion(match[1], attempt.names)}"
    ),
    r"(?:(?:DDL|DML|Statement) not supported|Unsupported SQL statement): (\w+)": _READS,
    r"Placeholder '\$?(.+?)' was not provided a value": "${0} has no value; give one in parameters={{{0!r}: …}}",
    r"No function matches the given name and argument types '(.+?)'\.": "no function takes {}; cast the arguments",
    r'column "(.+?)" must appear in the GROUP BY': "column {} must be in GROUP BY or in an aggregate function",
    "only supports a single SQL statement": "the query has several statements; give one",
    "Resources exhausted": lambda attempt, _: (
        f"the query {brief(attempt.query)} needs more than sql.memory_max = {format_size(attempt.memory)} at once; "
        "sorts and groups use files, but the smaller side of a join must fit: select fewer rows or columns, or raise "
        "the setting (sql_memory_max of connect)"
    ),
}
"""Patterns of DataFusion's messages, and their replacements, which use the groups of the match."""
