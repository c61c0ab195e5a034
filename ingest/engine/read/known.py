"""Hold the columns, key and indexes that reads of one table shape use, and error texts for earlier columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from memwal.flush import BaseTable
from memwal.flush.base.shape import Shape, version_without
from memwal.memtable import IndexSpec
from memwal.memtable.text.query import TextParser


@dataclass(frozen=True)
class KnownColumns:
    """Columns, key and indexes of all base versions of one shape. `version`: the first version of that shape that was
    read.
    """

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
            texts[name] = _gone_text(name, now, version_without(base.dataset, name, ids[name], self.version))
        return KnownColumns.of(base, {name: text for name, text in texts.items() if name not in base.shape.rows.names})

    def projected(self, columns: Sequence[str]) -> pa.Schema:
        """Return the schema of results with `columns`."""
        return pa.schema([self.schema.field(name) for name in columns])


def _gone_text(name: str, now: str | None, version: int) -> str:
    """Return the error text for column `name`, called `now` since base version `version`; `now` None: the column was
    dropped.
    """
    if now is None:
        return f"column '{name}' was dropped from the table in version {version}"
    return f"column '{name}' is called '{now}' since version {version} of the table"
