"""A table that memwal and Lance's ShardWriter write in turn, and a dict of the rows that it must have."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import lance
import pyarrow as pa
from lance.mem_wal import ShardWriter

from memwal import wal
from memwal.flush import BaseTable

PRIMARY_KEY = {b"lance-schema:unenforced-primary-key": b"true"}


class SharedTable(ABC):
    """The table at `uri`. Each row is a function of its id and a version; `oracle` holds the version of each id."""

    def __init__(self, uri: str) -> None:
        self.uri, self.base, self.store = uri, BaseTable.open(uri), wal.open_store(uri)
        self.oracle: dict[int, int] = {}

    @abstractmethod
    def rows(self, ids: Iterable[int], version: int) -> pa.Table:
        """Return one row per id."""

    def keys(self, ids: Iterable[int]) -> pa.Table:
        """Return the key columns of rows."""
        return self.rows(ids, 0).select(list(self.base.key))

    # ---- memwal --------------------------------------------------------------------------------------------------

    def put(self, table: Any, ids: Sequence[int], version: int, **arguments: Any) -> None:
        """Put rows with memwal; the oracle follows if they were applied."""
        if table.put(self.rows(ids, version), **arguments).applied:
            self.oracle |= dict.fromkeys(ids, version)

    def delete(self, table: Any, ids: Sequence[int]) -> None:
        """Delete rows with memwal."""
        table.delete(self.keys(ids))
        self._forget(ids)

    # ---- ShardWriter ---------------------------------------------------------------------------------------------

    def writers(self, **limits: Any) -> list[ShardWriter]:
        """Return a writer of each region; each claims its region."""
        dataset = lance.dataset(self.uri)
        return [dataset.mem_wal_writer(str(region), **limits) for region in self.base.regions]

    def their_put(self, writers: Sequence[ShardWriter], ids: Sequence[int], version: int) -> None:
        """Put rows with ShardWriter."""
        self._routed(writers, self.rows(ids, version).cast(self.base.schema), ShardWriter.put)
        self.oracle |= dict.fromkeys(ids, version)

    def their_delete(self, writers: Sequence[ShardWriter], ids: Sequence[int]) -> None:
        """Delete rows with ShardWriter."""
        self._routed(writers, self.keys(ids), ShardWriter.delete)
        self._forget(ids)

    def found_by(self, bucket: int, writer: ShardWriter) -> pa.Table:
        """Return the rows of a region that its ShardWriter's scan finds; the scan finds the whole base."""
        found = writer.lsm_scanner().to_table()
        return found.filter(pa.array(self.base.route(found) == bucket))

    def of_bucket(self, bucket: int) -> dict[int, int]:
        """Return the oracle's part of a region."""
        routed = self.base.route(self.keys(self.oracle)) if self.oracle else ()
        return {id: self.oracle[id] for id, at in zip(self.oracle, routed, strict=True) if at == bucket}

    def manifests(self) -> list[wal.RegionManifest]:
        """Return the newest manifest of each region."""
        found = (wal.ManifestStore(self.store, region).latest() for region in self.base.regions)
        return [manifest for manifest in found if manifest is not None]

    def _routed(self, writers: Sequence[ShardWriter], sent: pa.Table, act: Any) -> None:
        buckets = self.base.route(sent)
        for bucket, writer in enumerate(writers):
            part = sent.filter(pa.array(buckets == bucket))
            if part.num_rows:
                act(writer, part)

    def _forget(self, ids: Iterable[int]) -> None:
        for id in ids:
            self.oracle.pop(id, None)
