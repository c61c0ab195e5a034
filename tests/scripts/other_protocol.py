"""Run `memwal` with another version of the protocol: `other_protocol.py MAJOR.MINOR serve CONFIG`.

It differs as a later minor version may: its calls and answers have unknown fields.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from memwal.ingest import protocol
from memwal.ingest.cli.app import main
from memwal.ingest.service.daemon import peers, service
from memwal.ingest.service.rpc import connection

NEW = {"of_a_later_version": {"known": "to nobody"}}


def more_is_said(module: Any) -> None:
    """Add a field to every request that `module` packs."""
    pack = module.pack
    module.pack = lambda request, rows=None: pack({**request, **NEW}, rows)


def more_is_answered(name: str) -> None:
    """Add a field to the answers of a method of the service, also to nested objects."""
    method: Callable[..., Mapping[str, Any]] = getattr(service.FlightService, name)

    def answered(self: Any, *given: Any) -> dict[str, Any]:
        told = dict(method(self, *given))
        inside = {key: value | NEW for key, value in told.items() if key in ("waiting", "identity")}
        lists = {"indexes": [each | NEW for each in told["indexes"]]} if "indexes" in told else {}
        return told | inside | lists | NEW

    setattr(service.FlightService, name, answered)


protocol.OURS = protocol.Version(*map(int, sys.argv.pop(1).split(".")))
for each in (peers, connection):
    more_is_said(each)
for answer in ("_regions", "_looked_at", "_schema", "_write", "_release"):
    more_is_answered(answer)
main()
