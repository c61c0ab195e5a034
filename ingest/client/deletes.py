"""The steps of a delete by filter that the owners of the regions take; see `ingest.api.deletes`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pyarrow as pa

from memwal.ingest.api.deletes import Where
from memwal.ingest.api.tokens import Receipt, Token


class RoutedDeletes:
    """Sends pieces of keys and tokens to the owners of their regions. Thread safety. One thread."""

    def __init__(
        self,
        write: Callable[[pa.Table, dict[str, Any], Token | None, float | None], Receipt],
        record: Callable[[Token, bool, float | None], Iterable[Mapping[str, int]]],
        version: Callable[[], int],
    ) -> None:
        """`write`, `record`, `version`: send a request of the op "delete", the action "record" or "base_version", as
        often as it takes.
        """
        self._write, self._record, self._version = write, record, version

    def base_version(self) -> int:
        """Return the newest version of the base table. Raises: as a read."""
        return self._version()

    def piece(
        self, keys: pa.Table, where: Where, *, durable: bool, token: Token | None, timeout: float | None
    ) -> Receipt:
        """Delete those of `keys` whose newest row passes `where`. Raises: as `RemoteTable.put`."""
        request = {"op": "delete", "filter": where.filter, "version": where.version, "durable": durable}
        return self._write(keys, request, token, timeout)

    def record(self, token: Token, *, durable: bool, timeout: float | None) -> dict[str, int]:
        """Record `token` in every region; return their WAL positions. Raises: as `RemoteTable.put`."""
        return {region: at for owner in self._record(token, durable, timeout) for region, at in owner.items()}
