"""Run `memwal` with another version of the protocol: `other_protocol.py MAJOR.MINOR serve CONFIG`.

It differs as a later minor version may: its calls and answers have unknown fields.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from memwal.ingest import protocol
from memwal.ingest.cli.app import main
from memwal.ingest.service.daemon.operations import Operation
from memwal.ingest.service.daemon.service import FlightService
from memwal.ingest.service.rpc import exchange

NEW = {"of_a_later_version": {"known": "to nobody"}}


def more_is_said() -> None:
    """Add a field to every request."""
    pack = exchange.pack
    exchange.pack = lambda request, rows=None: pack({**request, **NEW}, rows)


def more_is_answered(operation: Operation) -> Operation:
    """Return an operation with a field more in its answers, also in nested objects."""

    def answered(service: Any, table: Any, request: dict[str, Any]) -> dict[str, Any]:
        told = dict(operation.handle(service, table, request))
        inside = {key: value | NEW for key, value in told.items() if key in ("waiting", "identity")}
        lists = {"indexes": [each | NEW for each in told["indexes"]]} if "indexes" in told else {}
        return told | inside | lists | NEW

    return replace(operation, handle=answered)


protocol.OURS = protocol.Version(*map(int, sys.argv.pop(1).split(".")))
more_is_said()
changed = ("schema", "regions", "put", "write", "delete", "release")
FlightService.operations = {
    name: more_is_answered(each) if name in changed else each for name, each in FlightService.operations.items()
}
main()
