"""How the SSTs of one table are written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from memwal.flush.base.table import BaseTable
from memwal.flush.sst.file_options import FileOptions
from memwal.flush.sst.indexes import SstIndexes


@dataclass(frozen=True)
class SstFormat:
    """What all SSTs of a table have in common.

    Thread safety. Immutable.
    """

    key: Sequence[str]
    """() for a table without a key."""
    storage_version: str | None
    """The base table's ("2.1"); None for Lance's newest. `files` may name another."""
    field_ids: Sequence[int] | None = None
    """Of the row schema (`BaseTable.row_field_ids`); None where they count from 0 without a gap."""
    files: FileOptions = field(default_factory=FileOptions)
    indexes: SstIndexes = field(default_factory=SstIndexes)

    @classmethod
    def of(cls, base: BaseTable, files: FileOptions | None = None, indexes: SstIndexes | None = None) -> SstFormat:
        """Return the format for the open version of `base`; without indexes unless they are given."""
        own = files or FileOptions(), indexes or SstIndexes()
        return cls(base.key, base.storage_version, base.row_field_ids, *own)
