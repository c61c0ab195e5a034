"""What a filter text means for one schema: worked out once, since readers ask the same of many memtables."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import pyarrow as pa

from memwal.memtable.filter.conditions import Narrowing
from memwal.memtable.filter.predicate import referenced, translate
from memwal.memtable.schema import TOMBSTONE

# Plans kept, and from which length of the text on only a few are: together they bound what is held, which no memtable
# counts. Few are enough for one reader, who asks the same of one memtable and SST after the other.
KEPT = 128
LONG = 2_000
LONG_KEPT = 4


@dataclass(eq=False)
class FilterPlan:
    """A filter as DataFusion's SQL, the columns it may mention, and what an index may narrow (None: nothing).

    `valid`: DataFusion took it once, so that it need not be asked of no rows.
    """

    sql: str
    columns: tuple[str, ...]
    narrowing: Narrowing | None
    valid: bool = False


def plan(predicate: str, schema: pa.Schema, indexed: tuple[str, ...]) -> FilterPlan:
    """The plan of `predicate` for rows of the row schema, narrowed by the columns `indexed`.

    Thread safety: any thread. Raises InvalidRows for a filter with too many operators.
    """
    make = _kept if len(predicate) <= LONG else _long_kept
    return make(predicate, schema, indexed)


def _plan(predicate: str, schema: pa.Schema, indexed: tuple[str, ...]) -> FilterPlan:
    from memwal.memtable.filter.narrowing import (
        narrowing,  # not above: sqlglot takes a tenth of a second, which a put has no use for
    )

    base = pa.schema([f for f in schema if f.name != TOMBSTONE])
    sql = translate(predicate, base)
    kinds = {name: schema.field(name).type for name in indexed}
    return FilterPlan(sql, tuple(referenced(predicate, base)), narrowing(sql, kinds))


_kept = lru_cache(maxsize=KEPT)(_plan)
_long_kept = lru_cache(maxsize=LONG_KEPT)(_plan)
