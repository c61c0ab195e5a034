"""Decide how a put treats columns of the table that its rows lack.

In a table with a key, nulls would silently erase stored values. The put is rejected unless its caller chooses: "null"
sets the columns to null, "keep" updates only the given columns. New rows have nulls either way. Tables with upsert =
"merge" keep by default. In tables without a key, and with upsert = "insert", a put changes no stored row, so the
columns become null without a choice.

Columns that another program adds while a caller has the table open are always kept: the caller does not know them, and
a running program need not stop for them. The caller's process decides, because only it knows which columns the caller
knows. A region keeps every column that a write lacks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, Literal, get_args

import pyarrow as pa

from memwal.ingest.engine.api.arguments import shown
from memwal.ingest.errors import Invalid

Missing = Literal["null", "keep"]
"""How a put treats columns that its rows lack: set them to null, or keep their stored values."""
ARGUMENT, SETTING, OPTION = 'missing="{}"', 'sink.missing = "{}"', '.option("missing", "{}")'
"""The form of a choice in a call, in a configuration, and for a data source of Spark."""
_NAMED = 10


def choices(form: str = ARGUMENT) -> str:
    """Return the choices of a caller for a message. `form`: how the caller writes a choice."""
    return f"choose {form.format('null')} (set them to null) or {form.format('keep')} (keep their stored values)"


def keeps(key: Sequence[str], upsert: str) -> bool:
    """Return whether a put can keep stored values: the table has a key, and puts change stored rows."""
    return bool(key) and upsert != "insert"


def missing_rule(missing: Any, key: Sequence[str], upsert: str) -> Missing | None:
    """Return how a put treats columns that its rows lack; None rejects the put.

    `missing`: the caller's argument, None for the default. Raises: Invalid for an unknown argument.
    """
    if missing is not None and missing not in get_args(Missing):
        raise Invalid(f"missing = {shown(missing)}: {choices()}")
    if not keeps(key, upsert):
        return "null"
    return missing or ("keep" if upsert == "merge" else None)


def named(columns: Iterable[str]) -> str:
    """Return names of columns for a message."""
    names = [f"'{name:.60}'" for name in columns]
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"column{'s' if len(names) > 1 else ''} {', '.join(names[:_NAMED])}{more}"


class CallersColumns:
    """The columns that a caller knows: those of the table when the caller opened it, and those that its puts named.

    Thread safety. Any thread.
    """

    def __init__(self, columns: Iterable[str]) -> None:
        self._known = frozenset(columns)
        self._whole: pa.Schema | None = None

    def know(self, schema: pa.Schema) -> None:
        """Record a put of all columns of `schema`, the table's. Costs nothing for the object of the last such put."""
        if schema is not self._whole:
            self._known, self._whole = self._known.union(schema.names), schema

    def nulls(
        self,
        given: Sequence[str],
        schema: pa.Schema,
        key: Sequence[str],
        required: Collection[str],
        missing: Missing | None,
        remedy: str = choices(),
    ) -> list[str]:
        """Return the columns that a put of the columns `given` sets to null. Other columns that it lacks are kept.

        `schema`, `key`, `required`: of the table; a required column cannot be null. `missing`: as in `missing_rule`.
        `remedy`: for the message.
        Raises: Invalid with the columns if `missing` is None, or if a column is required.
        """
        if not self._known.issuperset(given):
            self._known = self._known.union(given)
        if len(given) == len(schema) or missing == "keep" or not set(key) <= set(given):
            return []  # rows without their key are rejected when they are checked
        lacking = [name for name in schema.names if name in self._known and name not in given]
        if lacking and missing is None:
            verb, pronoun = ("are", "them") if len(lacking) > 1 else ("is", "it")
            raise Invalid(f"rows: the {named(lacking)} of the table {verb} missing; add {pronoun}, or {remedy}")
        for name in lacking:
            if name in required:
                raise Invalid(f"required column '{name}' is missing: add it to the rows")
        return lacking
