"""Validate the fields of requests by protocol, name and form (`ingest.protocol`), and describe the daemon's
table."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from memwal.ingest.engine.api.arguments import brief, seconds
from memwal.ingest.engine.table.embedded import Table
from memwal.ingest.errors import Invalid
from memwal.ingest.protocol import ASK_WHO, expect_caller, expect_known
from memwal.ingest.service.daemon.operations import Operation
from memwal.wal.applied import SEQUENCE_MAX


def _is_region(value: Any) -> bool:
    return isinstance(value, str) and _REGION.fullmatch(value) is not None


_REGION = re.compile("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_Form = tuple[Callable[[Any], bool], str]
_A_NUMBER: _Form = (
    lambda value: type(value) is int and 0 <= value <= SEQUENCE_MAX,
    f"a whole number from 0 to {SEQUENCE_MAX}",
)
_A_TEXT: _Form = (lambda value: isinstance(value, str), "a text")
_A_BOOL: _Form = (lambda value: isinstance(value, bool), "true or false")
_FORMS: Mapping[str, _Form] = {
    **dict.fromkeys(("op", "table_name", "producer", "filter", "token", "from"), _A_TEXT),
    **dict.fromkeys(("sequence", "routing", "rows", "version", "read"), _A_NUMBER),
    **dict.fromkeys(("delete", "durable", "logged", "flush", "make_way", "explain"), _A_BOOL),
    "region": (_is_region, "the id of a region"),
    "regions": (
        lambda value: isinstance(value, list) and all(map(_is_region, value)) and len(set(value)) == len(value),
        "a list of ids of regions, each once",
    ),
    "timeout": (lambda value: seconds("timeout", value) is not None, "seconds above 0"),
    "parameters": (lambda value: isinstance(value, dict), "an object"),
}
"""Forms of the fields that the daemon itself uses, where they are not null; `api.reads` checks those of reads."""


def expect(request: Mapping[str, Any], operations: Mapping[str, Operation]) -> Operation:
    """Validate a request and return its operation, one of `operations`.

    Raises: Invalid for an incompatible protocol (operations in `ASK_WHO` are answered for every one), for an operation
    or a needed field that this daemon does not know, and for a field of another form.
    """
    op, told, needs = request.get("op"), request.get("protocol"), request.get("needs")
    if op not in ASK_WHO:
        expect_caller(told)
    for name, (fits, such) in _FORMS.items():
        if request.get(name) is not None and not fits(request[name]):
            raise Invalid(f"not a request of memwal: {name} is {brief(request[name])}; it must be {such}")
    operation = operations.get(str(op))
    if operation is None:
        expect_known(f"the operation {op!r:.60}", told)
    for name in needs if isinstance(needs, list) else ():
        if str(name) not in operation.fields and name != "table_name":
            expect_known(f"{name!r:.60}", told)
    return operation


def given(request: Mapping[str, Any], name: str) -> Any:
    """Return a field of a request. Raises: Invalid if it is missing or null."""
    if (value := request.get(name)) is None:
        raise Invalid(f"not a request of memwal: {name} is missing")
    return value


def names(request: Mapping[str, Any], field: str) -> list[str] | None:
    """Return a field of a request that is a list of names; None if it is missing. Raises: Invalid."""
    told = request.get(field)
    if told is None or (isinstance(told, list) and all(isinstance(name, str) for name in told)):
        return told
    raise Invalid(f"not a request of memwal: {field} = {brief(told)} is not a list of names")


def described(table: Table) -> dict[str, Any]:
    """Return the columns, rules and regions of `table` that a client needs; the schema in hex."""
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
