"""What a daemon takes of a request, by its protocol and by the names of its fields (`ingest.rpc.protocol`), and what it
tells of its table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from inspect import signature
from typing import Any

from memwal.ingest.api.arguments import brief
from memwal.ingest.api.reads import READS, Reads
from memwal.ingest.errors import Invalid
from memwal.ingest.rpc.connection import ASK_WHO
from memwal.ingest.rpc.protocol import expect_caller, expect_known
from memwal.ingest.table.embedded import Table

_OF_WRITES = ("region", "producer", "sequence", "routing", "rows", "delete", "durable", "token", "timeout", "nulls")
_OF_REST = ("filter", "version", "regions", "since", "until", "images", "columns", "at", "column", "kind", "parameters")
_OF_TOKENS = ("logged",)
_OF_PEERS = ("name", "look", "flush", "read", "from")


def expect(request: Mapping[str, Any], call: str = "") -> None:
    """Raise Invalid if a request is of a protocol that this daemon does not talk to, or needs a field that it does not
    know. `call`: the action's name; those that ask who is here are answered to everybody.
    """
    told, needs = request.get("protocol"), request.get("needs")
    if call not in ASK_WHO:
        expect_caller(told)
    for name in needs if isinstance(needs, list) else ():
        if str(name) not in _known():
            expect_known(f"{name!r:.60}", told)


def arguments(read: str, request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a request that the read `read` takes."""
    return {name: request[name] for name in _taken(read) if name in request}


def names(request: Mapping[str, Any], field: str) -> list[str] | None:
    """Return a field of a request that is a list of names, None if it is missing. Raises: Invalid."""
    told = request.get(field)
    if told is None or (isinstance(told, list) and all(isinstance(name, str) for name in told)):
        return told
    raise Invalid(f"not a request of memwal: {field} = {brief(told)} is not a list of names")


def described(table: Table) -> dict[str, Any]:
    """Return what a client needs to know of the columns, rules and regions of `table`; the schema in hex."""
    base = table.base
    return {
        "schema": base.schema.serialize().to_pybytes().hex(),
        "key": list(base.key),
        "identity": table.identity,
        "upsert": table.upsert,
        "version": base.rules.version,
        "on_duplicate": base.rules.on_duplicate,
        "indexes": [asdict(spec) for spec in base.indexes],
        "required": list(base.required),
        "ids": [str(region) for region in base.regions],
        "append_by": None if base.append_by is None else list(base.append_by),
        "routing": base.routing._asdict(),
    }


@cache
def _taken(read: str) -> tuple[str, ...]:
    return tuple(name for name in signature(getattr(Reads, read)).parameters if name != "self")


@cache
def _known() -> frozenset[str]:
    return frozenset({*_OF_WRITES, *_OF_REST, *_OF_TOKENS, *_OF_PEERS}.union(*(_taken(read) for read in READS)))
