"""Check the arguments of reads against the columns, key and indexes of the table.

Each error is one line that names the argument and the nearest match. The module also finds the unknown column in a
filter that Lance rejected.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from memwal.flush import BaseTable
from memwal.flush.base.shape import Shape, version_without
from memwal.ingest.errors import Invalid
from memwal.ingest.suggest import suggestion
from memwal.memtable import IndexSpec, InvalidRows
from memwal.memtable.filter.expression import Node, shown
from memwal.memtable.filter.translation import checked
from memwal.memtable.index_spec import METRICS, vector_width
from memwal.memtable.text.query import TextParser
from memwal.wal.errors import first_line
from memwal.wal.panics import RustPanic


@dataclass(frozen=True)
class KnownColumns:
    """Columns, key and indexes of all base versions of one shape. `version`: the first of them that was read."""

    version: int
    shape: Shape
    key: list[str]
    schema: pa.Schema
    """Base columns as results have them: key columns not null, others nullable."""
    indexes: tuple[IndexSpec, ...]
    parsers: Mapping[str, TextParser]
    gone: Mapping[str, str]
    """Error texts for reads of columns of earlier shapes, by column."""

    @staticmethod
    def of(base: BaseTable, gone: Mapping[str, str] | None = None) -> KnownColumns:
        schema = pa.schema([pa.field(f.name, f.type, f.name not in base.key) for f in base.schema])
        parsers = {spec.column: TextParser(spec) for spec in base.indexes if spec.kind == "fts"}
        return KnownColumns(base.version, base.shape, list(base.key), schema, base.indexes, parsers, gone or {})

    def after(self, base: BaseTable) -> KnownColumns:
        """Return the columns of `base`, a version of another shape, with error texts for the columns that it lacks."""
        gone, ids = self.shape.gone(base.shape), self.shape.ids
        texts = dict(self.gone)
        for name, now in gone.items():
            version = version_without(base.dataset, name, ids[name], self.version)
            if now is None:
                texts[name] = f"column '{name}' was dropped from the table in version {version}"
            else:
                texts[name] = f"column '{name}' is called '{now}' since version {version} of the table"
        return KnownColumns.of(base, {name: text for name, text in texts.items() if name not in base.shape.rows.names})

    def projected(self, columns: Sequence[str]) -> pa.Schema:
        """Return the schema of results with `columns`."""
        return pa.schema([self.schema.field(name) for name in columns])


def checked_columns(
    columns: Sequence[str] | None,
    schema: pa.Schema,
    gone: Mapping[str, str] | None = None,
    what: str = "columns",
    added: Sequence[str] = (),
) -> list[str]:
    """Return the distinct columns to read; all for None.

    `gone`: error texts for former columns, by column. `what`: the argument, for messages. `added`: the columns that the
    read adds; Lance accepts no table columns of these names.
    Raises: Invalid for an unknown column, an empty list, and a table with a column that the read adds.
    """
    if clash := next((name for name in added if name in schema.names), None):
        raise Invalid(f"the table has a column {clash!r}, which this read adds to its result; rename the column")
    if columns is None:
        return list(schema.names)
    wanted = [columns] if isinstance(columns, str) else list(dict.fromkeys(columns))
    if not wanted:
        raise Invalid("columns: the list is empty; name at least one column, or omit it for all")
    for name in wanted:
        if name not in schema.names:
            raise _unknown(what, name, schema, gone)
    return wanted


def check_filter(
    filter: str, plan: Callable[[str], None], columns: Sequence[str], gone: Mapping[str, str] | None = None
) -> None:
    """Plan `filter` in Lance and DataFusion, so that it is valid at every level or at none. Raises: Invalid.

    `plan`: `BaseReads.check`. `columns`: of the table. `gone`: as for `checked_columns`.
    """
    try:
        tree = checked(filter, columns)  # before a planner reads it
    except InvalidRows as error:
        raise Invalid(str(error)) from None
    try:
        plan(filter)
    except InvalidRows as error:  # from DataFusion; its message includes the filter
        unknown = unknown_column(tree, columns, gone)
        raise Invalid(f"filter {shown(filter)}: {unknown}" if unknown else str(error)) from None
    except (RuntimeError, RustPanic):
        raise Invalid(f"filter {shown(filter)}: Lance's planner fails on it; write it in another way") from None
    except (ValueError, OSError) as error:
        reason = unknown_column(tree, columns, gone) or first_line(error).removeprefix("Invalid user input: ")
        raise Invalid(f"filter {shown(filter)}: {reason}") from None


def distinct(keys: pa.Table) -> pa.Table:
    """Return the distinct keys, in order of first appearance."""
    if keys.num_rows < 2:
        return keys
    if keys.num_columns == 1:
        return pa.table([pc.unique(keys.column(0))], names=keys.column_names)
    # Arrow guarantees no order of groups, so the first row of each group is kept and sorted.
    names = [str(column) for column in range(keys.num_columns)]  # the table's own names could clash with `at`
    numbered = keys.rename_columns(names).append_column("at", pa.array(np.arange(keys.num_rows)))
    first = numbered.group_by(names).aggregate([("at", "min")]).column("at_min")
    return keys.take(pa.array(np.sort(first.to_numpy())))


def _unknown(what: str, column: str, schema: pa.Schema, gone: Mapping[str, str] | None) -> Invalid:
    absent = f"column '{column!s:.200}' does not exist{suggestion(str(column), schema.names)}"
    return Invalid(f"{what}: {(gone or {}).get(column, absent)}")


def expect_indexed(column: str, kind: str, what: str, known: KnownColumns) -> None:
    """Raise Invalid if `column`, which a read (`what`) uses, does not exist or has no index of `kind`."""
    if column not in known.schema.names:
        raise _unknown(what, column, known.schema, known.gone)
    fit = [spec.column for spec in known.indexes if spec.kind == kind]
    if column in fit:
        return
    others = f"; columns with one: {', '.join(fit)}" if fit else ""
    raise Invalid(
        f"{what}: column '{column}' ({known.schema.field(column).type}) has no {kind} index{others}; "
        f'add one: table.create_index("{column}", "{kind}") or memwal index add CONFIG {column} {kind}'
    )


def only_vectors(argument: str, known: KnownColumns) -> str:
    """Return the only column with a vector index, or without such indexes the only vector column of the table.

    Raises: Invalid, with `argument`, for no or several columns.
    """
    indexed = [spec.column for spec in known.indexes if spec.kind == "ivf_pq"]
    columns = indexed or _vector_columns(known.schema)
    if len(columns) == 1:
        return columns[0]
    if columns:
        raise Invalid(f"{argument}: several columns hold vectors: {', '.join(columns)}; name one")
    raise Invalid(f"{argument}: no column of the table holds vectors")


def all_texts(argument: str, known: KnownColumns) -> list[str]:
    """Return the columns with an fts index. Raises: Invalid, with `argument`, if no column has one."""
    columns = [spec.column for spec in known.indexes if spec.kind == "fts"]
    if columns:
        return columns
    raise Invalid(f'{argument}: no column has an fts index; add one: table.create_index(COLUMN, "fts")')


def _vector_columns(schema: pa.Schema) -> list[str]:
    return [field.name for field in schema if vector_width(field.type) is not None]


@dataclass(frozen=True, eq=False)
class VectorQuery:
    """A checked vector search. `probes`, `refine`: None for the defaults; they affect the base table's index only."""

    column: str
    vector: npt.NDArray[np.float32]
    metric: str
    indexed: bool
    """Whether the column has an index of this metric; otherwise every row is compared."""
    probes: int | None = None
    refine: int | None = None
    low: float | None = None
    """Rows nearer than this are left out."""
    high: float | None = None
    """Rows at this distance or farther away are left out."""

    @property
    def exact(self) -> bool:
        """Whether every row must be compared: an index returns the nearest rows, not those beyond a distance."""
        return not self.indexed or self.low is not None

    def within(self, scores: npt.NDArray[np.float32]) -> npt.NDArray[np.bool_]:
        """Return which distances are in the range; NaN and inf (the vector has no distance) never are."""
        mask: npt.NDArray[np.bool_] = np.isfinite(scores)
        if self.low is not None:
            mask &= scores >= np.float32(self.low)
        if self.high is not None:
            mask &= scores < np.float32(self.high)
        return mask


def vector_query(
    what: str,
    column: str,
    vector: Any,
    known: KnownColumns,
    *,
    metric: str | None = None,
    nprobes: int | None = None,
    refine_factor: int | None = None,
    distance_range: Sequence[float | None] | None = None,
) -> VectorQuery:
    """Check a vector search of `column`.

    `what`: the read or its argument, for messages. The other arguments: already checked by `Reads.search`.
    Raises: Invalid for an unknown column, one without vectors, an unknown metric and a vector that does not fit.
    """
    if column not in known.schema.names:
        raise _unknown(what, column, known.schema, known.gone)
    kind = known.schema.field(column).type
    if vector_width(kind) is None:
        fit = _vector_columns(known.schema)
        others = f"; columns of vectors: {', '.join(fit)}" if fit else ""
        raise Invalid(f"{what}: column '{column}' ({kind}) holds no vectors of a fixed size{others}")
    if metric is not None and metric not in METRICS:
        raise Invalid(f"metric '{metric:.60}' is unknown{suggestion(metric, METRICS)}")
    specs = (spec for spec in known.indexes if (spec.column, spec.kind) == (column, "ivf_pq"))
    own = next((str(spec.parameters.get("metric", "l2")) for spec in specs), None)
    chosen = metric or own or "l2"
    query = checked_vector(vector, column, kind)
    return VectorQuery(column, query, chosen, chosen == own, nprobes, refine_factor, *(distance_range or (None, None)))


def checked_vector(vector: Any, column: str, kind: pa.DataType) -> npt.NDArray[np.float32]:
    """Return `vector` as float32[width of `column`].

    Raises: Invalid, with both widths, or the first number that is NaN or infinite.
    """
    arrow = isinstance(vector, pa.Array | pa.ChunkedArray)
    # NumPy reads values of these types unchanged, one number per value.
    numbers = arrow and (pa.types.is_integer(vector.type) or pa.types.is_floating(vector.type))
    if arrow and (not numbers or len(vector) != kind.list_size):
        raise Invalid(
            f"search: the vector for column '{column}' has {len(vector)} values of the type {vector.type!s:.60}; "
            f"give {kind.list_size} numbers"
        )
    try:
        values = np.asarray(vector.values if isinstance(vector, pa.FixedSizeListScalar) else vector, dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise Invalid(
            f"search: the vector for column '{column}' is not a list of numbers ({first_line(error):.200})"
        ) from None
    if values.ndim != 1 or len(values) != kind.list_size:
        shape = " x ".join(map(str, values.shape)) or "1 number, not a list"
        raise Invalid(
            f"search: the vector has width {shape}, column '{column}' has {kind.list_size}; "
            f"give {kind.list_size} numbers"
        )
    if not np.isfinite(values).all():
        at = int(np.flatnonzero(~np.isfinite(values))[0])
        raise Invalid(f"search: the vector for column '{column}' has {values[at]} at {at}; give finite numbers only")
    if pa.types.is_float16(kind.value_type):
        # Lance rounds the query to float16; the other levels do the same.
        with np.errstate(over="ignore"):
            values = values.astype(np.float16).astype(np.float32)
        if not np.isfinite(values).all():
            at = int(np.flatnonzero(~np.isfinite(values))[0])
            raise Invalid(f"search: the vector for column '{column}' has a number at {at} that no float16 holds")
    return values


LARGE = 10_000
"""Smaller requests are not compared with the table: counting its rows costs more than requesting that number of
rows.
"""


def at_most(wanted: int, rows: Callable[[], int]) -> int:
    """Return how many rows to request: `wanted`, but at most as many as exist. `rows`: counts them.

    Lance, DataFusion and faiss allocate memory for the requested number of rows, and end the process if the allocation
    fails.
    """
    return wanted if wanted <= LARGE else max(1, min(wanted, rows()))


def unknown_column(filter: Node, columns: Sequence[str], gone: Mapping[str, str] | None = None) -> str | None:
    """Return an error text for the first name in `filter` that is not a column; None if all are columns.

    The comparison ignores case. `gone`: error texts for former columns, by column.
    """
    if filter.kind in ("name", "column") and filter.text.lower() not in {column.lower() for column in columns}:
        absent = f"column '{filter.text:.200}' does not exist{suggestion(filter.text, columns)}"
        return (gone or {}).get(filter.text, absent)
    problems = (unknown_column(part, columns, gone) for part in filter.parts)
    return next((problem for problem in problems if problem is not None), None)
