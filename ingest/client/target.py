"""The columns and routing of the table that a Spark task writes to, opened once per Python worker."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import pyarrow as pa
from pydantic import SecretStr

from memwal.flush import BaseTable
from memwal.ingest.api.rows import required_in_put
from memwal.ingest.refusals import expect_routing
from memwal.ingest.secret_refs import resolve
from memwal.memtable import MemTable, row_schema


@dataclass(frozen=True, slots=True)
class Target:
    """A table as a worker needs it to route rows. `checker`: a memtable without rows, which checks them."""

    base: BaseTable
    schema: pa.Schema
    required: tuple[str, ...]
    checker: MemTable

    def required_of(self, columns: Sequence[str]) -> tuple[str, ...]:
        """Return the columns that must have a value in rows with `columns`."""
        return required_in_put(self.required, columns, self.base.rules)


@lru_cache(maxsize=8)
def opened(uri: str, options: tuple[tuple[str, str], ...], routing: int = 1) -> Target:
    """Return the target table, opened once per Python worker and version of its routing: its key never changes, and the
    owner checks rows again by its columns (see `reopened`). Raises: Unavailable if the table has another routing.
    """
    secrets = {name: SecretStr(value) for name, value in options}
    base = BaseTable.open(uri, resolve(secrets, os.environ))
    expect_routing(uri, routing, base.routing_version)
    schema = row_schema(base.schema, base.key)
    checker = MemTable(schema, base.key, base.indexes, generation=0)
    return Target(base, schema, base.required, checker)


def reopened(target: Target, uri: str, options: tuple[tuple[str, str], ...], routing: int = 1) -> Target:
    """Return the table as it is now, for rows with a column that `target` lacks: it may have been added."""
    if target.base.latest().shape == target.base.shape:
        return target
    opened.cache_clear()
    return opened(uri, options, routing)
