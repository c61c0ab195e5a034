"""The plan of a filter text for one schema, cached, since readers apply one filter to many memtables."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import pyarrow as pa

from memwal.memtable.column_types import TOMBSTONE
from memwal.memtable.filter.conditions import Narrowing
from memwal.memtable.filter.expression import LONG
from memwal.memtable.filter.narrowing import narrowing
from memwal.memtable.filter.predicate import referenced
from memwal.memtable.filter.translation import checked, translate


@dataclass(eq=False)
class FilterPlan:
    """A filter as DataFusion's SQL, the columns it may mention, and the conditions for indexes (None without any).

    `exact`: conditions that make up the whole filter, for Arrow; None if DataFusion must evaluate it. `valid`:
    DataFusion accepted it once, so that it need not be evaluated on an empty selection.
    """

    sql: str
    columns: tuple[str, ...]
    narrowing: Narrowing | None
    exact: Narrowing | None
    valid: bool = False


def plan(predicate: str, schema: pa.Schema, indexed: tuple[str, ...]) -> FilterPlan:
    """Return the plan of `predicate` for rows of the row schema, narrowed by the columns `indexed`.

    Thread safety: any thread. Raises InvalidRows for a filter with too many operators.
    """
    return (_kept if len(predicate) <= LONG else _long_kept)(predicate, schema, indexed)


def _plan(predicate: str, schema: pa.Schema, indexed: tuple[str, ...]) -> FilterPlan:
    base = pa.schema([field for field in schema if field.name != TOMBSTONE])
    tree, every = checked(predicate, base.names), {field.name: field.type for field in base}
    conditions, whole = narrowing(tree, {name: every[name] for name in indexed}), narrowing(tree, every)
    exact = whole if whole is not None and whole.exact else None
    return FilterPlan(translate(predicate, base), tuple(referenced(predicate, base)), conditions, exact)


# Few plans of long texts are kept: together they bound the memory, which no memtable counts.
_kept = lru_cache(maxsize=128)(_plan)
_long_kept = lru_cache(maxsize=4)(_plan)
