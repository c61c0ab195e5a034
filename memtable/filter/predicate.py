"""SQL filters with Lance's meaning: Lance plans its filters with the same engine, DataFusion.

Lance's changes to a predicate before DataFusion sees it, found by running pylance 14.0.2, are made here by rewriting
tokens:

    `name`      a column, taken literally
    "text"      a string, like 'text'
    name        a column, exactly or, failing that, without regard to case
    regexp_match(...)   in the place of a truth value: whether there is a match, never null; elsewhere its list
    l[1].a              a field of an element
    price = 0.1         compared in the column's own float type (see float_literals)
    price IN (0, 1)     0.0 and -0.0 are equal (see float_zeros)
    timestamp '...'     of microseconds (see timestamps)

Lance refuses some predicates that are accepted here (a string compared with a number, CASE, sub-queries). A reader
applies the same filter to the base table through Lance, which refuses it there.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from memwal.memtable.arrays import Mask, Positions
from memwal.memtable.errors import InvalidRows
from memwal.memtable.filter import depth, double_quotes, growth, placeholders, rereads, timestamps
from memwal.memtable.filter.float_literals import write_casts
from memwal.memtable.filter.float_zeros import write_zeros
from memwal.memtable.filter.sql_paths import access_paths
from memwal.memtable.filter.sql_places import closing, is_truth
from memwal.memtable.filter.struct_nulls import null_inside
from memwal.memtable.filter.tokens import Token, tokenize

if TYPE_CHECKING:
    from datafusion import SessionContext

POSITION = "_memtable_position"
SHOWN = 200
# Up to this many rows are evaluated with all their columns: planning the projection takes longer.
FEW = 8_192


def translate(predicate: str, schema: pa.Schema) -> str:
    """A Lance predicate as DataFusion's SQL: every column quoted exactly, every string in single quotes.

    Raises InvalidRows if it has too many operators, may make values of any size, or has a timestamp of nanoseconds.
    """
    if reason := problem(predicate, schema.names):
        raise InvalidRows(f"filter {shown(predicate)}: {reason}")
    tokens = tokenize(predicate, schema.names)
    solid = [token for token in tokens if token.kind != "gap"]
    kinds = {field.name: field.type for field in schema}
    written = list(map(_written, solid))
    write_casts(solid, written, kinds)
    _coerce_matches(solid, written)
    access_paths(solid, written)
    timestamps.write_units(solid, written, kinds)
    write_zeros(solid, written, kinds)
    rewritten = iter(written)
    return "".join(" " if token.kind == "gap" else next(rewritten) for token in tokens)


def problem(predicate: str, columns: Sequence[str]) -> str:
    """Return why a predicate is refused before a planner sees it, "" if it is not. `columns`: of the table."""
    checks = (depth, rereads, growth, timestamps, placeholders, double_quotes)
    return next((reason for check in checks if (reason := check.problem(predicate, columns))), "")


def evaluate(predicate: str, sql: str, rows: pa.Table, positions: Positions, n: int) -> Mask:
    """Which of the n rows satisfy the predicate; `rows` holds the rows at `positions`, all others are false.

    Raises InvalidRows naming the predicate and DataFusion's error.
    """
    rows = null_inside(rows).append_column(POSITION, pa.array(positions))
    # Without a batch there is no schema.
    batches = rows.to_batches() or [pa.RecordBatch.from_pylist([], schema=rows.schema)]
    mask = np.zeros(n, dtype=bool)
    try:
        frame = _context().read_batches(batches).filter(sql)
        found = (frame if len(positions) <= FEW else frame.select(POSITION)).collect()
    except Exception as error:  # noqa: BLE001 - DataFusion raises bare Exception
        raise InvalidRows(f"filter {shown(predicate)} is not valid: {_reason(error)}; correct it") from None
    for batch in found:
        mask[batch.column(POSITION).to_numpy()] = True
    return mask


@cache
def _context() -> SessionContext:
    """The shared session: making another takes as long as a small filter. read_batches() leaves no state in it.

    One partition: a memtable is small, and the cores belong to the region writers.
    """
    from datafusion import SessionConfig, SessionContext

    return SessionContext(SessionConfig().with_target_partitions(1))


def referenced(predicate: str, schema: pa.Schema) -> list[str]:
    """Columns that the predicate may mention: those whose name occurs anywhere in its text. Never misses one."""
    text = predicate.lower()
    return [name for name in schema.names if name.lower() in text or "`" in name]


def shown(predicate: str) -> str:
    """The predicate as it appears in an error message: quoted, on one line, cut where it is long."""
    return repr(predicate if len(predicate) <= SHOWN else predicate[:SHOWN] + "...")


def _written(token: Token) -> str:
    if token.kind == "column":
        return '"' + token.column.replace('"', '""') + '"'
    if token.kind == "double":
        return "'" + token.text[1:-1].replace('""', '"').replace("'", "''") + "'"
    return token.text


def _coerce_matches(tokens: list[Token], written: list[str]) -> None:
    """Turn each `regexp_match(...)` in the place of a truth value into one, in the texts `written`."""
    for place, token in enumerate(tokens[:-1]):
        if token.lower != "regexp_match" or tokens[place + 1].text != "(":
            continue
        end = closing(tokens, place + 1)
        if end < len(tokens) and is_truth(tokens, place, end):
            written[place] = "(" + written[place]
            written[end] += " IS NOT NULL)"


def _reason(error: Exception) -> str:
    """DataFusion's message on one line, without the name it gave our rows."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    line = line.removeprefix("DataFusion error: ").rstrip(".")
    return line.replace('"?table?".', "").replace("?table?.", "")[:SHOWN]
