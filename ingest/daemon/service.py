"""The daemon's Arrow Flight service: a `Table` behind four kinds of call.

DoPut      {"op": "put", "region", "producer", "sequence", "routing", "rows"}  so many rows of one region, all or none
           (the Spark sink)
           {"op": "write", "delete", "durable", "token", "timeout"}    rows or keys of any number of regions;
           "routing" too where the sender has split them itself
           {"op": "delete", "filter", "version", "durable", "token", "timeout"}    keys, deleted if their row passes
DoGet      {"op": "get" | "scan" | "search" | "match", "regions", …}   the read's result; "scan" streams
           {"op": "explained get" | …}    the same with its explanation (`rpc.wire`)
           {"op": "changes", "since", "until", "images", "columns"}    the next changes, of all regions, whoever owns
           them; the stream's schema metadata `memwal:changes` has {"position", "more"}
DoAction   "changes_position" {"at"} |
           "count" | "explained count" {"regions", …} | "status" | "flush" | "commit" | "schema" | "regions" |
           "release"   JSON in, JSON out
           "indexes" | "create_index" {"column", "kind", "parameters"} | "drop_index" {"name"}   for all regions
           "base_version"              the newest version of the base table
           "applied" {"producer", "regions", "routing"}  the highest that each of them, and any, has applied
           "record" {"token", "durable", "regions", "routing"}  records the token as applied in each of them
           "schema" {"look": true}     looks first whether somebody changed the table's columns
           "regions"                   which regions are here; answers while they are being claimed, too
           "release" {"region", "flush", "read"}   releases a region, so that the asker can claim it, which has read
           its log up to that position
           "look"                      tells the daemon to look at the caller, a peer whose state changed
           `from`, on the last three: the endpoint of the peer that asks
DoExchange {"op": …} of a DoGet, "write" and "delete" of a DoPut, {"act": name, …} of a DoAction,
           by a caller that may give the call up (`rpc.exchange`): what has not begun then is not done

Several daemons may share a table, each with some of its regions. A call that names a region which is not here, or has
rows of one, fails with Unavailable and `{"reason": "not_owner" | "draining", "region", "owner"}`; nothing was written.
`table`, on all but "schema" and "regions": the id of the table that the caller means. Ports are reused, and regions of
all tables have the same ids, so a daemon of another table refuses the call as if it did not own the region.
With a token each call needs a role (`rpc.roles`): reads, counts and what else changes nothing `read`; DoPut, "record"
and a "schema" that looks `write`; the rest, and whatever names a peer, `admin`.
`regions`: ids of the regions to read; without it the read is of all regions, and this daemon must own them all. With it
`routing`: the version by which the caller knows them, since another routing has other rows under the same ids.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial, wraps
from typing import Any, TypeVar
from uuid import UUID

import pyarrow as pa
import pyarrow.flight as flight

from memwal.ingest import tracing
from memwal.ingest.api.changes import ChangesRequest, packed
from memwal.ingest.api.deletes import Where
from memwal.ingest.api.explanation import Explanation
from memwal.ingest.api.reads import READS, Reads
from memwal.ingest.api.results import RowStream
from memwal.ingest.api.tokens import Token
from memwal.ingest.caller import Caller
from memwal.ingest.daemon.spans import span_of_action, span_of_read, span_of_write, told_rows
from memwal.ingest.errors import Invalid, MemWalError, Unavailable, UnknownOutcome, classify
from memwal.ingest.refusals import being_resized, expect_routing, wrong_table
from memwal.ingest.region.backlog import Backlog
from memwal.ingest.rpc import trace_headers
from memwal.ingest.rpc.guard import Guard, role_of
from memwal.ingest.rpc.roles import Role, permits
from memwal.ingest.rpc.wire import (
    EXPLANATION,
    explained,
    raise_over_flight,
    read_closed,
    read_named,
    unpack,
)
from memwal.ingest.table.embedded import Table
from memwal.wal.panics import as_exception

T = TypeVar("T")

_LOG = logging.getLogger("memwal.access")
_CALL_SHOWN = 60
AUDITED = frozenset({"flush", "commit", "create_index", "drop_index", "release"})
"""Actions of admins that are logged; the others are looks of peers, several a second."""
_READ_ACTIONS = frozenset(
    {
        *(name for name, kind in READS.items() if kind.counts),
        *(explained(name) for name, kind in READS.items() if kind.counts),
        *("applied", "changes_position", "base_version", "status", "indexes", "schema", "regions"),
    }
)


@dataclass
class Place:
    """A daemon's endpoint, and the endpoints of all daemons of its table, its own among them. Callbacks for a peer that
    looks at it (`heard`), wants to be looked at (`look`) or asks for a region (`gives` returns whether it gets it).
    """

    endpoint: str = ""
    endpoints: Sequence[str] = ()
    heard: Callable[[str], object] = lambda _: None
    look: Callable[[str], object] = lambda _: None
    gives: Callable[[UUID, str], bool] = lambda *_: True
    ends: Callable[[], bool] = lambda: False
    """Returns whether the daemon was told to end."""


def _answering(method: Callable[..., T]) -> Callable[..., T]:
    """Decorate a handler so that its errors reach the client with their kind."""

    @wraps(method)
    def wrapped(self: FlightService, *args: Any) -> T:
        table = self.table
        try:
            with tracing.continued(trace_headers.received(args[0])) if tracing.on else tracing.OFF:
                return method(self, *args)
        except BaseException as error:
            raise_over_flight(self.told(classify(as_exception(error)), table))
            raise

    return wrapped


class FlightService(flight.FlightServerBase):  # type: ignore[misc]
    """The Flight server of one table; `table` is replaced after a resize.

    Thread safety. gRPC calls the handlers from many threads; `Table` takes them all.
    """

    def __init__(self, table: Table, location: str, place: Place | None = None, guard: Guard | None = None) -> None:
        """Listen at `location`, such as grpc://127.0.0.1:0, for callers that `guard` admits.

        `place`: this daemon's endpoint and its peers; None: a single daemon. Raises: OSError if the port is taken.
        """
        self._guard = guard or Guard()
        super().__init__(location, **trace_headers.taking_headers(self._guard.flight_options()))
        self.table, self._place = table, place or Place()
        self._refused = float("-inf")

    def told(self, error: MemWalError, table: Table) -> MemWalError:
        """Return `error` of a call to `table` as the caller should see it: a resize becomes a pause."""
        if isinstance(error, UnknownOutcome):
            return error
        try:
            return being_resized(table.base.uri) if table.closed else table.resizing.told(error)
        except Exception:  # noqa: BLE001 - storage does not answer: keep the error
            return error

    @_answering
    def do_put(
        self,
        context: flight.ServerCallContext,
        descriptor: flight.FlightDescriptor,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.FlightMetadataWriter,
    ) -> None:
        request = self._meant(unpack(descriptor.command)[0])
        self._expect(context, "write", request.get("op", "write"))
        rows = read_closed(reader, request.get("rows"))
        writer.write(json.dumps(self._write(request, rows)).encode())

    @_answering
    def do_get(self, _context: flight.ServerCallContext, ticket: flight.Ticket) -> flight.FlightDataStream:
        request, rows = unpack(ticket.ticket)
        told: list[Explanation] = []
        answer = self._read(self._meant(request), rows, told)
        if not isinstance(answer, RowStream):
            return flight.RecordBatchStream(answer)
        return flight.GeneratorStream(answer.schema, self._batches(answer, self.table, told))

    @_answering
    def do_exchange(
        self,
        context: flight.ServerCallContext,
        descriptor: flight.FlightDescriptor,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.MetadataRecordBatchWriter,
    ) -> None:
        request, keys = unpack(descriptor.command)
        request, caller = self._meant(request), Caller(context.is_cancelled)
        if "op" not in request:
            name = request.pop("act", "")
            self._expect(context, _role_for(name, request), name)
            answer = caller.run(partial(self._act, name, request))
        elif request["op"] in ("write", "delete"):
            self._expect(context, "write", request["op"])
            rows = read_closed(reader, None)
            answer = caller.run(partial(self._write, request, rows))
        else:
            table, told = self.table, list[Explanation]()
            read = caller.run(partial(self._read, request, keys, told))
            writer.begin(read.schema)
            for batch in self._batches(read, table, told) if isinstance(read, RowStream) else read.to_batches():
                if isinstance(batch, tuple):
                    writer.write_with_metadata(*batch)
                else:
                    writer.write_batch(batch)
            return
        writer.write_metadata(json.dumps(answer, default=str).encode())

    def _batches(self, rows: RowStream, table: Table, told: Sequence[Explanation]) -> Iterator[Any]:
        """Yield the rows as gRPC asks for them; it drops this generator, and so the rows, when the client has gone.
        `told`: has the explanation, if one is asked for, when all rows were read.
        """
        try:
            yield from rows
            for explanation in told:
                yield pa.RecordBatch.from_pylist([], rows.schema), explanation.to_json().encode()
        except MemWalError as error:
            raise_over_flight(self.told(error, table))
        finally:
            rows.close()

    @_answering
    def do_action(self, context: flight.ServerCallContext, action: flight.Action) -> Iterator[bytes]:
        request = self._meant(unpack(action.body.to_pybytes())[0])
        self._expect(context, _role_for(action.type, request), action.type)
        return iter([json.dumps(self._act(action.type, request), default=str).encode()])

    def _expect(self, context: flight.ServerCallContext, wanted: Role, call: str) -> None:
        """Raises: Invalid if the caller's token does not allow `call`. What admins do is logged."""
        role = role_of(context, self._guard)
        if not permits(role, wanted):
            named = repr(call)[:_CALL_SHOWN]  # the caller's own words
            self._tell_refused(named, role, context.peer())
            raise Invalid(
                f"the token has the role {role!r}, and {named} needs {wanted!r}; use a token with that role",
                {"reason": "role", "role": role, "needs": wanted},
            )
        if wanted == "admin" and call in AUDITED:
            fields = {"event": "admin", "call": call, "peer": context.peer()}
            _LOG.info("admin: %s by %s", call, context.peer(), extra=fields)

    def _tell_refused(self, call: str, role: Role, peer: str) -> None:
        """Log a refusal, one a second at most: callers must not fill the log."""
        now = self.table.regions.context.clock.monotonic()
        if now - self._refused >= 1.0:
            self._refused = now
            fields = {"event": "refused", "call": call, "role": role, "peer": peer}
            _LOG.warning("refused: %s by %s, whose token has the role %s", call, peer, role, extra=fields)

    def _meant(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return `request` without the table that it names. Raises: Unavailable if it names another one."""
        meant, table = request.pop("table", None), self.table
        if meant not in (None, table.id):
            raise wrong_table(table.base.uri)
        return request

    def _write(self, request: dict[str, Any], rows: pa.Table) -> dict[str, Any]:
        with span_of_write(request, rows):
            return self._written(request, rows)

    def _written(self, request: dict[str, Any], rows: pa.Table) -> dict[str, Any]:
        if request["op"] == "put":
            token = Token(request["producer"], request["sequence"])
            routing = request.get("routing", 1)  # senders without it have never seen a resized table
            return asdict(self.table.put_region(UUID(request["region"]), rows, token, routing))
        table = self.table  # a resize may replace it at any moment
        expect_routing(table.base.uri, request.get("routing"), table.base.routing_version)
        parsed = Token.parse(request["token"])
        options: dict[str, Any] = {"token": parsed, "durable": request["durable"], "timeout": request.get("timeout")}
        if request["op"] == "delete":
            return asdict(table.deletes.piece(rows, Where(request["filter"], request["version"]), **options))
        write = table.delete if request["delete"] else table.put
        return asdict(write(rows, **options))

    def _read(self, request: dict[str, Any], rows: pa.Table | None, told: list[Explanation]) -> pa.Table | RowStream:
        op, is_explained = read_named(request.pop("op"))
        if op == "changes":
            return packed(self.table.stored_changes.piece(ChangesRequest.of_json(request)))
        kind = READS.get(op)
        if kind is None or kind.counts or (rows is None) != (kind.sends is None):
            raise Invalid(f"unknown read {op!r}")
        if rows is not None:
            request[str(kind.sends)] = rows if kind.sends == "keys" else rows.column(0).combine_chunks()
        if is_explained:
            request["explain"] = told.append
        with span_of_read(op) as span:
            answer: pa.Table | RowStream = getattr(self._of(request), op)(**request)
            told_rows(span, answer)
        if isinstance(answer, RowStream) or not is_explained:
            return answer
        return answer.replace_schema_metadata({**(answer.schema.metadata or {}), EXPLANATION: told[0].to_json()})

    def _of(self, request: dict[str, Any]) -> Reads:
        """Return the reads of the regions that `request` names, and remove these from it."""
        regions, routing, table = request.pop("regions", None), request.pop("routing", None), self.table
        expect_routing(table.base.uri, routing, table.base.routing_version)
        return table if regions is None else table.only([UUID(region) for region in regions])

    def _act(self, name: str, request: dict[str, Any]) -> Any:
        acts: dict[str, Callable[[dict[str, Any]], Any]] = {
            **{name: partial(self._count, name) for name, kind in READS.items() if kind.counts},
            **{explained(name): partial(self._count_explained, name) for name, kind in READS.items() if kind.counts},
            "applied": self._applied,
            "changes_position": lambda request: self.table.changes_position(request["at"]),
            "record": self._record,
            "base_version": lambda _: self.table.deletes.base_version(),
            "status": lambda _: self.table.status(),
            "flush": lambda _: self.table.flush(),
            "commit": lambda _: asdict(self.table.commit()),
            "indexes": lambda _: self.table.list_indexes(),
            "create_index": self._create_index,
            "drop_index": lambda request: self.table.drop_index(request["name"]),
            "schema": self._schema,
            "regions": self._looked_at,
            "look": lambda request: self._place.look(request.get("from", "")),
            "release": self._release,
        }
        if name not in acts:
            raise Invalid(f"unknown action {name!r}")
        with span_of_action(name):
            return acts[name](request)

    def _count(self, name: str, request: dict[str, Any]) -> int:
        return int(getattr(self._of(request), name)(**request))

    def _count_explained(self, name: str, request: dict[str, Any]) -> dict[str, Any]:
        told: list[Explanation] = []
        count = self._count(name, {**request, "explain": told.append})
        return {"count": count, "explanation": told[0].as_dict()}

    def _applied(self, request: dict[str, Any]) -> Sequence[int | None]:
        table = self.table
        expect_routing(table.base.uri, request["routing"], table.base.routing_version)
        return table.applied(request["producer"], map(UUID, request["regions"]))

    def _create_index(self, request: dict[str, Any]) -> str:
        return self.table.create_index(request["column"], request["kind"], **request["parameters"])

    def _record(self, request: dict[str, Any]) -> dict[str, int]:
        table, token = self.table, Token.parse(request["token"])
        if token is None:
            raise Invalid("record: the token is missing")
        expect_routing(table.base.uri, request["routing"], table.base.routing_version)
        regions = map(UUID, request["regions"])
        return table.deletes.record(token, durable=request["durable"], timeout=None, regions=regions)

    def _schema(self, request: dict[str, Any]) -> dict[str, Any]:
        if request.get("look"):  # the caller has rows with unknown columns
            self.table.look()
        base = self.table.base
        return {
            "schema": base.schema.serialize().to_pybytes().hex(),
            "key": list(base.key),
            "identity": self.table.identity,
            "upsert": self.table.upsert,
            "version": base.rules.version,
            "on_duplicate": base.rules.on_duplicate,
            "indexes": [asdict(spec) for spec in base.indexes],
            "required": list(base.required),
            "ids": [str(region) for region in base.regions],
            "append_by": None if base.append_by is None else list(base.append_by),
            "routing": base.routing._asdict(),
            **self._regions(),
        }

    def _looked_at(self, request: dict[str, Any]) -> dict[str, Any]:
        if "from" in request:
            self._place.heard(request["from"])
        upkeep = self.table.upkeep
        waiting = asdict(Backlog.of_all(upkeep.waiting()))
        claiming = [str(region) for region in self.table.regions.coming]
        return {**self._regions(), "claiming": claiming, "waiting": waiting, "base_version": upkeep.caught_up}

    def _regions(self) -> dict[str, Any]:
        return {
            "endpoint": self._place.endpoint or None,
            "endpoints": list(self._place.endpoints),
            "table": self.table.identity["table"],
            "id": self.table.id,
            "routing_version": self.table.base.routing_version,
            "regions": self.table.regions.epochs,
            "draining": self.table.regions.draining or self._place.ends(),
        }

    def _release(self, request: dict[str, Any]) -> dict[str, Any]:
        region = UUID(request["region"])
        if "from" in request and not self._place.gives(region, request["from"]):
            raise Unavailable(
                f"region {region}: by the daemons seen here it does not belong to {request['from']}; ask again",
                {"reason": "disagree", "region": str(region)},
            )
        if "from" in request and "flush" not in request:
            epoch, released = self.table.give(region, int(request.get("read", 0)))
            return {"epoch": epoch, "ended": None if released is None else released.to_json()}
        return {"epoch": self.table.release(region, flush=request.get("flush"))}


def _role_for(action: str, request: Mapping[str, Any]) -> Role:
    """Return the role that an action needs. An action that is not known is refused later, to admins only."""
    if action == "regions" and "from" in request:
        return "admin"  # a peer, whose word counts for who serves what
    if action == "schema" and request.get("look"):
        return "write"
    return "read" if action in _READ_ACTIONS else "write" if action == "record" else "admin"
