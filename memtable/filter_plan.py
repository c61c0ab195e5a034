"""What a filter text means for one schema: worked out once, since readers ask the same of many memtables."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import pyarrow as pa

from memtable.narrowing import Condition, conditions
from memtable.predicate import referenced, translate
from memtable.schema import TOMBSTONE

# Plans kept, and the longest text of one: together they bound what is held, which no memtable counts.
KEPT = 128
LONGEST_KEPT = 2_000


@dataclass(frozen=True)
class FilterPlan:
    """A filter as DataFusion's SQL, the columns it may mention, and the conditions an index may narrow."""

    sql: str
    columns: tuple[str, ...]
    conditions: tuple[Condition, ...]


def plan(predicate: str, schema: pa.Schema, indexed: tuple[str, ...]) -> FilterPlan:
    """The plan of `predicate` for rows of the row schema, narrowed by the columns `indexed`.

    Thread safety: any thread. Raises InvalidRows for a filter with too many operators.
    """
    make = _kept if len(predicate) <= LONGEST_KEPT else _plan
    return make(predicate, schema, indexed)


def _plan(predicate: str, schema: pa.Schema, indexed: tuple[str, ...]) -> FilterPlan:
    base = pa.schema([f for f in schema if f.name != TOMBSTONE])
    sql = translate(predicate, base)
    kinds = {name: schema.field(name).type for name in indexed}
    return FilterPlan(sql, tuple(referenced(predicate, base)), tuple(conditions(sql, kinds)))


_kept = lru_cache(maxsize=KEPT)(_plan)
