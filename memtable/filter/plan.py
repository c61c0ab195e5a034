"""The plan of a filter text for one schema, cached, since readers apply one filter to many memtables."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import pyarrow as pa

from memwal.memtable.column_types import TOMBSTONE
from memwal.memtable.filter.conditions import Narrowing
from memwal.memtable.filter.expression import parse
from memwal.memtable.filter.narrowing import narrowings
from memwal.memtable.filter.predicate import referenced
from memwal.memtable.filter.translation import translate

# Plans kept, and the length of the text from which on only a few are kept. Together they bound the memory, which no
# memtable counts. A few are enough for one reader, which applies one filter to one memtable and SST after the other.
KEPT = 128
LONG = 2_000
LONG_KEPT = 4


@dataclass(eq=False)
class FilterPlan:
    """A filter as DataFusion's SQL, the columns it may mention, and the conditions for indexes (None: none).

    `exact`: conditions that are all of the filter, for Arrow; None if DataFusion has to evaluate it. `valid`:
    DataFusion accepted it once, so that it need not be evaluated on an empty selection.
    """

    sql: str
    columns: tuple[str, ...]
    narrowing: Narrowing | None
    exact: Narrowing | None
    valid: bool = False


def plan(predicate: str, schema: pa.Schema, indexed: tuple[str, ...]) -> FilterPlan:
    """The plan of `predicate` for rows of the row schema, narrowed by the columns `indexed`.

    Thread safety: any thread. Raises InvalidRows for a filter with too many operators.
    """
    make = _kept if len(predicate) <= LONG else _long_kept
    return make(predicate, schema, indexed)


def _plan(predicate: str, schema: pa.Schema, indexed: tuple[str, ...]) -> FilterPlan:
    base = pa.schema([f for f in schema if f.name != TOMBSTONE])
    sql, tree = translate(predicate, base), parse(predicate, base.names)
    every = {field.name: field.type for field in base}
    narrowed, exact = narrowings(tree, {name: every[name] for name in indexed}, every)
    return FilterPlan(sql, tuple(referenced(predicate, base)), narrowed, exact)


_kept = lru_cache(maxsize=KEPT)(_plan)
_long_kept = lru_cache(maxsize=LONG_KEPT)(_plan)
