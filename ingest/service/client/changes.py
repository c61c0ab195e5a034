"""Changes of a table through its daemons. Any daemon reads them from storage, for all regions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa

from memwal.ingest.engine.api.changes import ChangesRequest, Piece, Position, unpacked
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
