"""The changes and the deletes by filter of a table through its daemons: the steps that daemons execute.

`api.changes` and `api.deletes` have the algorithms, which are the same for a table in this process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pyarrow as pa

from memwal.ingest.engine.api.changes import ChangesRequest, Piece, Position, unpacked
from memwal.ingest.engine.api.deletes import Where
from memwal.ingest.engine.api.tokens import Receipt, Token
from memwal.ingest.service.rpc.connection import Connection

Ask = Callable[[Callable[[Connection, float], Any]], Any]
"""Makes a call to a daemon, repeated where that is safe. The call receives the seconds that it may take."""


class RemoteChanges:
    """Changes of a table, read through one of its daemons, which caches what it read for the next piece.

    Thread safety. Any thread. Errors. Only `ingest.errors` kinds.
    """

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    def piece(self, request: ChangesRequest) -> Piece:
        """See `ChangesSource`."""
        rows: pa.Table = self._ask(lambda to, within: to.changes(request.to_json(), within))
        return unpacked(rows)

    def position(self, at: str) -> Position:
        """See `ChangesSource`."""
        return Position.of_json(self._ask(lambda to, within: to.act("changes_position", {"at": at}, within)), "at")


class RoutedDeletes:
    """Sends pieces of keys, and tokens, to the owners of their regions. Thread safety. One thread."""

    def __init__(
        self,
        write: Callable[[pa.Table, dict[str, Any], Token | None, float | None], Receipt],
        record: Callable[[Token, bool, float | None], Iterable[Mapping[str, int]]],
        version: Callable[[], int],
    ) -> None:
        """Use the given senders. Each of them retries.

        `write`: sends a request of the op "delete". `record`: the operation "record". `version`: the operation
        "base_version".
        """
        self._write, self._record, self._version = write, record, version

    def base_version(self) -> int:
        """Return the newest version of the base table. Raises: errors of a read."""
        return self._version()

    def piece(
        self, keys: pa.Table, where: Where, *, durable: bool, token: Token | None, timeout: float | None
    ) -> Receipt:
        """Delete those of `keys` whose newest row passes `where`. Raises: errors of `RemoteTable.put`."""
        request = {"op": "delete", "filter": where.filter, "version": where.version, "durable": durable}
        return self._write(keys, request, token, timeout)

    def record(self, token: Token, *, durable: bool, timeout: float | None) -> dict[str, int]:
        """Record `token` in every region and return their WAL positions. Raises: errors of `RemoteTable.put`."""
        return {region: at for owner in self._record(token, durable, timeout) for region, at in owner.items()}
