"""The columns and routing of the table that a Spark task writes to, opened once per Python worker."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache

from pydantic import SecretStr

from memwal.flush import BaseTable
from memwal.ingest.engine.api.rows import RowChecker
from memwal.ingest.engine.table.create import of_template
from memwal.ingest.refusals import expect_routing
from memwal.ingest.secret_refs import resolve
from memwal.ingest.settings.sections import TableSettings
from memwal.memtable import MemTable, row_schema


@dataclass(frozen=True, slots=True)
class Target:
    """A table as a worker needs it to route rows."""

    base: BaseTable
    checker: RowChecker


@lru_cache(maxsize=8)
def opened(uri: str, options: tuple[tuple[str, str], ...], routing: int = 1) -> Target:
    """Return the target table, opened once per Python worker and version of its routing.

    The cached object stays valid: the key never changes, and the owner checks rows again by its own columns (see
    `reopened`). Raises: Unavailable if the table has another routing.
    """
    secrets = {name: SecretStr(value) for name, value in options}
    base = BaseTable.open(uri, resolve(secrets, os.environ))
    expect_routing(uri, routing, base.routing_version)
    return Target(base, _checker(base))


def _checker(base: BaseTable) -> RowChecker:
    memtable = MemTable(row_schema(base.schema, base.key), base.key, base.indexes, generation=0)
    return RowChecker(memtable, base.required, base.rules)


OF_TEMPLATE = {"key", "append_only", "columns", "indexes", "upsert", "on_duplicate", "version"}
"""Settings of [table] that rows must fit."""


@lru_cache(maxsize=8)
def template_target(table: str) -> Target:
    """Return the target of rows that go to many tables. `table`: `OF_TEMPLATE` of the section [table], as JSON."""
    base = of_template(TableSettings.model_validate_json(table))
    return Target(base, _checker(base))


def reopened(target: Target, uri: str, options: tuple[tuple[str, str], ...], routing: int = 1) -> Target:
    """Return the table's current state, for rows with a column that `target` lacks and that may have been added
    since."""
    if target.base.latest().shape == target.base.shape:
        return target
    opened.cache_clear()
    return opened(uri, options, routing)
