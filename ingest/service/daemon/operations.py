"""The properties of a daemon's operations: the role of the caller, limits, log and span of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from inspect import signature
from typing import Any, Literal

from memwal.ingest import tracing
from memwal.ingest.engine.api.reads import READS, Reads
from memwal.ingest.errors import Invalid
from memwal.ingest.service.rpc.guard import AccessLog, Grant
from memwal.ingest.settings.sections import Role

Handler = Callable[[Any, Any, dict[str, Any]], Any]
"""Executes an operation. Receives the service, the table and the request, and returns rows or a value for JSON."""


@dataclass(frozen=True)
class Operation:
    """One operation of a daemon. `daemon.service` has the table of all of them."""

    role: Role
    """The role that a caller needs."""
    handle: Handler
    takes: str = ""
    """The names of its fields besides those of every operation, separated by spaces."""
    sends: Literal["keys", "vector", "rows"] | None = None
    """The field for the rows of the request. "keys" and "vector" are a part of the request. "rows" follow it, up to
    their closing message."""
    needs_more: Mapping[str, Role] = field(default_factory=dict)
    """Roles that a caller needs who sets these fields."""
    counted: bool = True
    """Whether it counts against `daemon.calls_max`. Peers consider a daemon that does not answer dead, and the
    operations that make room for waiting puts must not wait for them."""
    bounded: bool = False
    """Whether the limits of reads apply."""
    of_daemon: bool = False
    """Whether it concerns the daemon: its handler receives None instead of a table."""
    audited: bool = False
    """Whether it is logged. The other operations of admins are checks by peers, several a second."""
    traced: bool = False
    """Whether it has a span, within the trace of its caller."""

    @cached_property
    def fields(self) -> frozenset[str]:
        """The names of its fields."""
        return frozenset(self.takes.split())

    def expect_permitted(self, grant: Grant, request: Mapping[str, Any], peer: str, log: AccessLog) -> None:
        """Check the rights of the caller at the address `peer`, and log actions of admins.

        Raises: Invalid if they do not permit `request`.
        """
        wanted = next((more for name, more in self.needs_more.items() if request.get(name)), self.role)
        whole, named = self.of_daemon and wanted == "admin", request.get("table_name")
        lists, table = self.of_daemon and not whole and named is None, None if whole else named
        refused = log.refusal(grant, wanted, repr(request["op"]), peer, table, any_table=lists)
        if refused is not None:
            told = {"reason": "role", "role": grant.role, "needs": wanted}
            raise Invalid(refused, told | ({"tables": list(grant.tables)} if grant.tables else {}))
        if self.audited:
            log.admin(request["op"], peer)


def reads(handle: Handler) -> dict[str, Operation]:
    """Return the operations of `READS`. `handle`: executes each of them."""
    operations = {}
    for name, kind in READS.items():
        _, *arguments = signature(getattr(Reads, name)).parameters  # without self
        takes = " ".join(("regions", "routing", "at", *arguments))
        operations[name] = Operation("read", handle, takes, kind.sends, bounded=True, traced=True)
    return operations


def span_of(operation: Operation, request: Mapping[str, Any]) -> AbstractContextManager[Any]:
    """Return the span of a request, or a context without one.

    The span of a write has its rows and bytes, and for a stream from Spark the region and the batch_id. The span of a
    streaming read ends where its rows begin.
    """
    if not (tracing.on and operation.traced):
        return tracing.OFF
    name, told = request["op"], dict[str, Any]()
    if operation.sends == "rows":
        told = {"rows": request["rows"].num_rows, "bytes": request["rows"].nbytes}
        if name == "put":
            told |= {"region": request["region"], "batch_id": request["sequence"]}
        name = "delete" if request.get("delete") else "put" if name in ("put", "write") else name
    return tracing.span(f"memwal.daemon.{name}", "SERVER", **told)
