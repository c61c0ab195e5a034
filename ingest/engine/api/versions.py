"""Read older versions of the base table: `checkout`, `tags`, `restore`, with the names of LanceDB."""

from __future__ import annotations

import datetime
from collections.abc import Collection
from typing import Any

import numpy as np
import pyarrow as pa

from memwal.flush.history.diff import compare_rows
from memwal.ingest.engine.api.arguments import ROWS_MAX, text, whole
from memwal.ingest.engine.api.explanation import Watch
from memwal.ingest.engine.api.lancedb_forms import LanceDBForms
from memwal.ingest.engine.api.operations import Operations
from memwal.ingest.errors import Invalid
from memwal.ingest.suggest import suggestion

_PIECE = 8_192
"""Rows that `restore` compares at a time."""


class Tags:
    """The tags of a table: names of versions, which are kept as long as they have one. Thread safety. Any thread."""

    def __init__(self, table: Operations) -> None:
        self._table = table

    def list(self) -> dict[str, dict[str, Any]]:
        """Return the version of each tag: {"name": {"version": 3}}."""
        return {name: {"version": version} for name, version in self._table.list_tags().items()}

    def get_version(self, tag: str) -> int:
        """Return the version of a tag. Raises: Invalid if it does not exist."""
        return version_of(self._table, text("tag", tag, "release"))

    def create(self, tag: str, version: int) -> None:
        """Name a version: `create_tag(tag, version)`."""
        self._table.create_tag(tag, version)

    def update(self, tag: str, version: int) -> None:
        """Move a tag to another version: `create_tag(tag, version, replace=True)`."""
        self._table.create_tag(tag, version, replace=True)

    def delete(self, tag: str) -> None:
        """Delete a tag: `drop_tag(tag)`."""
        self._table.drop_tag(tag)


def no_tag(name: str, tags: Collection[str]) -> Invalid:
    """Return the error for a tag that does not exist. `tags`: those of the table."""
    others = suggestion(name, tags) if tags else "; the table has no tags"
    return Invalid(f"the tag {name!r} does not exist{others}")


def version_of(table: Operations, version: Any) -> int:
    """Return the number of a version, given as a number, a tag, or a time: the newest version of that time.

    A time without a zone is in UTC, as in `list_versions`. Raises: Invalid if no such version is kept.
    """
    if isinstance(version, str):
        tags = table.list_tags()
        if version not in tags:
            raise no_tag(version, tags)
        return tags[version]
    if isinstance(version, datetime.datetime):
        given = version if version.tzinfo is not None else version.replace(tzinfo=datetime.UTC)
        older = [each["version"] for each in table.list_versions() if each["timestamp"] <= given]
        if not older:
            raise Invalid(f"no version of {given.isoformat()} or older is kept; list_versions() has those that are")
        return int(max(older))
    return whole("version", version, 1, ROWS_MAX)


class TableVersion(LanceDBForms):
    """One version of a table's base, for reading only. It does not include rows above the base.

    Thread safety. Every method from any thread. Errors. Only `ingest.errors` kinds; Invalid if the version is not kept.
    """

    def __init__(self, table: LanceDBForms, version: int) -> None:
        self.table, self.version = table, version
        self.key, self._sql_memory = table.key, table._sql_memory  # noqa: SLF001
        self.schema = self.scan(limit=0).schema  # also finds whether the version is kept

    def list_versions(self) -> list[dict[str, Any]]:
        """See `Operations.list_versions`."""
        return self.table.list_versions()

    def list_tags(self) -> dict[str, int]:
        """See `Operations.list_tags`."""
        return self.table.list_tags()

    def create_tag(self, name: str, version: int, *, replace: bool = False) -> None:
        """See `Operations.create_tag`."""
        self.table.create_tag(name, version, replace=replace)

    def drop_tag(self, name: str) -> None:
        """See `Operations.drop_tag`."""
        self.table.drop_tag(name)

    def close(self) -> None:
        """Close the table."""
        self.table.close()

    def _answer(self, read: str, level: str, /, *, explain: Watch | None = None, **request: Any) -> Any:
        del level  # the version is committed
        return self.table._answer(read, "committed", explain=explain, at=self.version, **request)  # noqa: SLF001

    @property
    def _described(self) -> str:
        return f"{self.table._described}, version {self.version}"  # noqa: SLF001

    @property
    def _shows(self) -> str:
        return "read-only, reads committed"

    @property
    def _location(self) -> str:
        return self.table._location  # noqa: SLF001

    def _refusal(self, method: str) -> Invalid:
        return Invalid(f"{method}: the table shows version {self.version}; call checkout_latest() first")

    def restored(self) -> int:
        """Write the rows that differ from the newest rows, and delete the rows that this version lacks; return their
        number.

        Takes time in proportion to the table. Raises: as `put`; Invalid for a table without a key, and if the version
        has other columns.
        """
        table, key, changed = self.table, list(self.key), 0
        if not key:
            raise Invalid("restore: the table has no key (append_only), so no row can be replaced")
        if (self.schema.names, self.schema.types) != (table.schema.names, table.schema.types):
            raise Invalid(f"restore: version {self.version} has other columns; check it out, and put its rows")
        for batch in table.scan(key):
            keys = pa.Table.from_batches([batch])
            gone = compare_rows(self.get(keys, columns=key), keys, key).added
            if len(gone):
                changed += table.delete(keys.take(pa.array(gone))).rows
        for batch in self.scan():
            for at in range(0, batch.num_rows, _PIECE):
                old = pa.Table.from_batches([batch.slice(at, _PIECE)])
                differ = compare_rows(table.get(old.select(key)), old, key)
                wanted = np.concatenate([differ.added, differ.changed])
                if len(wanted):
                    changed += table.put(old.take(pa.array(wanted))).rows
        return changed


def checked_out(table: LanceDBForms, version: Any) -> TableVersion:
    """Return a version of `table`, given as for `version_of`. Raises: Invalid if it is not kept."""
    return TableVersion(newest(table), version_of(table, version))


def newest(table: LanceDBForms) -> LanceDBForms:
    """Return the table of a version, or `table` itself."""
    return table.table if isinstance(table, TableVersion) else table
