"""The daemon's Arrow Flight service: a `Table` behind four kinds of call.

DoPut      {"op": "put", "region", "producer", "sequence", "routing", "rows"}  "rows" rows of one region, all or none
           (the Spark sink)
           {"op": "write", "delete", "durable", "token", "timeout"}    rows or keys of any number of regions;
           with "routing" if the sender has split them itself
           {"op": "delete", "filter", "version", "durable", "token", "timeout"}    keys, deleted if their row passes
DoGet      {"op": "get" | "scan" | "search" | "match", "regions", …}   the read's result; "scan" streams
           {"op": "explained get" | …}    the same with its explanation (`rpc.wire`)
           {"op": "changes", "since", "until", "images", "columns"}    the next changes, of all regions, whoever owns
           them; the stream's schema metadata `memwal:changes` has {"position", "more"}
DoAction   "changes_position" {"at"} | "base_version" |
           "count" | "explained count" {"regions", …} | "status" | "commit" | "schema" | "regions" |
           "release" | "flush" {"regions", "routing"}, without them: all regions here   JSON in, JSON out
           "indexes" | "create_index" {"column", "kind", "parameters"} | "drop_index" {"name"}   for all regions
           "applied" {"producer", "regions", "routing", "logged"}  the highest number that every region, that any
           region has applied, or logged
           "record" {"token", "durable", "regions", "routing"}  records the token as applied in each region
           "schema" {"look": true}     checks storage for changed columns first
           "regions"                   the regions here; answered during their claims, too
           "release" {"region", "flush", "read"}   releases a region so that the caller can claim it; the caller has
           read its log up to position "read"
           "look"                      makes the daemon check the caller, a peer with a changed state
           `from`, on the last three: the endpoint of the calling peer
DoExchange {"op": …} of a DoGet, "write" and "delete" of a DoPut, {"act": name, …} of a DoAction,
           for a caller that may cancel (`rpc.exchange`): work that has not begun by then is not done

Several daemons may share a table, each with some of its regions. A call that names a region owned elsewhere, or sends
rows of one, fails with Unavailable and `{"reason": "not_owner" | "draining", "region", "owner"}`; nothing was written.
`table`, on all but "schema" and "regions": the id of the caller's table. Ports are reused, and regions of all tables
have the same ids, so a daemon of another table rejects the call as if it did not own the region.
Settings of [daemon] limit calls: `calls_max`, `message_max`, `put_max`, `query_timeout`, `query_memory` (`limits`).
With tokens each call needs a role (`rpc.roles`): `read` for reads, counts and other calls without changes; `write` for
DoPut, "record" and a "schema" with "look"; `admin` for the rest, and for calls that name a peer.
`protocol`, `needs`, on all: the caller's version, and the fields that the daemon must know (`ingest.protocol`); the
daemon ignores other unknown fields.
`regions`: ids of the regions to read. Without it the read covers all regions, and this daemon must own all of them.
With it `routing`: the version that the caller knows, since another routing has other rows under the same ids.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial, wraps
from typing import Any, TypeVar
from uuid import UUID

import pyarrow as pa
import pyarrow.flight as flight

from memwal.ingest import protocol, tracing
from memwal.ingest.caller import Caller
from memwal.ingest.engine.api.changes import ChangesRequest, packed
from memwal.ingest.engine.api.deletes import Where
from memwal.ingest.engine.api.explanation import Explanation
from memwal.ingest.engine.api.reads import READS, Reads
from memwal.ingest.engine.api.results import RowStream
from memwal.ingest.engine.api.tokens import Token
from memwal.ingest.engine.region.state import Backlog
from memwal.ingest.engine.table.embedded import Table
from memwal.ingest.errors import Invalid, MemWalError, Unavailable, UnknownOutcome
from memwal.ingest.protocol import expect_known
from memwal.ingest.refusals import being_resized, expect_routing, wrong_table
from memwal.ingest.service.daemon import fields
from memwal.ingest.service.daemon.limits import Call, Calls, Limits, classified, why_refused
from memwal.ingest.service.daemon.permissions import COUNTS, UNCOUNTED, Permissions, role_for
from memwal.ingest.service.daemon.place import Place
from memwal.ingest.service.daemon.spans import span_of_action, span_of_read, span_of_write, told_rows
from memwal.ingest.service.ops.events import RecentEvents
from memwal.ingest.service.rpc import trace_headers
from memwal.ingest.service.rpc.guard import Guard
from memwal.ingest.service.rpc.wire import (
    EXPLANATION,
    explained,
    raise_over_flight,
    read_closed,
    read_named,
    unpack,
)
from memwal.ingest.settings.sections import DaemonSettings

T = TypeVar("T")
_EVENTS = 20
"""Maximum events in a status; the newest ones."""
_SENT_AT_ONCE = 1 << 20
"""Maximum bytes of an answer that is sent as a whole. The call of a larger one lasts until it is sent."""


def _answering(method: Callable[..., T]) -> Callable[..., T]:
    """Decorate a handler so that its errors reach the client with their kind."""

    @wraps(method)
    def wrapped(self: FlightService, *args: Any) -> T:
        table = self.table
        try:
            with tracing.continued(trace_headers.received(args[0])) if tracing.on else tracing.OFF:
                return method(self, *args)
        except BaseException as error:
            self._raise(classified(error), table)
            raise

    return wrapped


class FlightService(flight.FlightServerBase):  # type: ignore[misc]
    """The Flight server of one table. `table` is replaced after a resize.

    Thread safety. gRPC calls the handlers from many threads; `Table` accepts calls from all of them.
    """

    def __init__(
        self,
        table: Table,
        location: str,
        place: Place | None = None,
        guard: Guard | None = None,
        limits: Limits | None = None,
        events: RecentEvents | None = None,
    ) -> None:
        """Listen at `location`, such as grpc://127.0.0.1:0, for callers that `guard` admits, within `limits`.

        `place`: this daemon's endpoint and its peers; None: a single daemon. `events`: source of the newest events in
        a status.
        Raises: OSError if the port is in use.
        """
        self._events = events
        self._guard, self._limits = guard or Guard(), limits or Limits.of(DaemonSettings())
        self._calls = Calls(self._limits.calls)
        self._permissions = Permissions(self._guard, table.regions.context.clock)
        self.table, self._place = table, place or Place()
        super().__init__(location, **trace_headers.taking_headers(self._guard.flight_options()))

    def told(self, error: MemWalError, table: Table) -> MemWalError:
        """Return `error` of a call to `table` as the caller should see it: a resize becomes a pause."""
        if isinstance(error, UnknownOutcome):
            return error
        try:
            return being_resized(table.base.uri) if table.closed else table.resizing.told(error)
        except Exception:  # noqa: BLE001 - storage does not answer: keep the error
            return error

    def _raise(self, error: MemWalError, table: Table) -> None:
        """Raise `error` of a call to `table` in the form for clients; count rejections."""
        told = self.told(error, table)
        if (why := why_refused(told)) is not None:
            self._guard.refused.add("flight", why)
        raise_over_flight(told)

    @_answering
    def do_put(
        self,
        context: flight.ServerCallContext,
        descriptor: flight.FlightDescriptor,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.FlightMetadataWriter,
    ) -> None:
        with self._calls.enter():
            request = self._request(descriptor.command)[0]
            self._permissions.expect(context, "write", request.get("op", "write"))
            rows = read_closed(reader, request.get("rows"), self._limits.counted(self.table.schema))
            writer.write(json.dumps(self._write(request, rows)).encode())

    @_answering
    def do_get(self, context: flight.ServerCallContext, ticket: flight.Ticket) -> flight.FlightDataStream:
        with self._calls.enter() as call:
            request, rows = self._request(ticket.ticket)
            told, caller = list[Explanation](), self._caller(context)
            answer = caller.run(partial(self._read, request, rows, told))
            if not isinstance(answer, RowStream) and answer.nbytes <= _SENT_AT_ONCE:
                return flight.RecordBatchStream(answer)
            batches = self._batches(answer, self.table, told, caller, call.kept())
            return flight.GeneratorStream(answer.schema, batches)

    @_answering
    def do_exchange(
        self,
        context: flight.ServerCallContext,
        descriptor: flight.FlightDescriptor,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.MetadataRecordBatchWriter,
    ) -> None:
        with self._calls.enter() as call:
            request, keys = self._request(descriptor.command)
            if "op" not in request:
                name = request.pop("act", "")
                self._permissions.expect(context, role_for(name, request), name)
                caller = self._caller(context) if name in COUNTS else Caller(context.is_cancelled)
                answer = caller.run(partial(self._act, name, request))
            elif request["op"] in ("write", "delete"):
                self._permissions.expect(context, "write", request["op"])
                rows = read_closed(reader, None, self._limits.counted(self.table.schema))
                answer = Caller(context.is_cancelled).run(partial(self._write, request, rows))
            else:
                self._send(writer, self._caller(context), partial(self._read, request, keys), call)
                return
            writer.write_metadata(json.dumps(answer, default=str).encode())

    def _send(
        self, writer: Any, caller: Caller, read: Callable[[list[Explanation]], pa.Table | RowStream], call: Call
    ) -> None:
        """Send the rows of `read`, which appends its explanation to the list that it receives."""
        table, told = self.table, list[Explanation]()
        rows = caller.run(partial(read, told))
        writer.begin(rows.schema)
        sent = self._batches(rows, table, told, caller, call) if isinstance(rows, RowStream) else rows.to_batches()
        for batch in sent:
            if isinstance(batch, tuple):
                writer.write_with_metadata(*batch)
            else:
                writer.write_batch(batch)

    def _batches(
        self, rows: pa.Table | RowStream, table: Table, told: Sequence[Explanation], caller: Caller, call: Call
    ) -> Iterator[Any]:
        """Yield the rows as gRPC requests them. When the client has gone, gRPC drops this generator and so the rows.

        `told`: contains the explanation, if requested, after all rows were read. `call` ends with the rows.
        """
        try:
            if not isinstance(rows, RowStream):
                yield from rows.to_batches()
                return
            while (batch := caller.run(partial(next, rows, None))) is not None:
                yield batch
                caller.anew()
            for explanation in told:
                yield pa.RecordBatch.from_pylist([], rows.schema), explanation.to_json().encode()
        except MemWalError as error:
            self._raise(error, table)
        finally:
            if isinstance(rows, RowStream):
                rows.close()
            call.end()

    @_answering
    def do_action(self, context: flight.ServerCallContext, action: flight.Action) -> Iterator[bytes]:
        with nullcontext() if action.type in UNCOUNTED else self._calls.enter():
            request = self._request(action.body, action.type)[0]
            self._permissions.expect(context, role_for(action.type, request), action.type)
            act = partial(self._act, action.type, request)
            answer = self._caller(context).run(act) if action.type in COUNTS else act()
            return iter([json.dumps(answer, default=str).encode()])

    @_answering
    def _no_such_call(self, *_: Any) -> None:
        raise Invalid("a daemon answers DoPut, DoGet, DoAction and DoExchange only")

    list_flights = get_flight_info = list_actions = _no_such_call

    def get_schema(self, *_: Any) -> flight.SchemaResult:
        """Return no columns. pyarrow would send an error of this handler with its traceback (pyarrow 26)."""
        self._guard.refused.add("flight", "invalid")
        return flight.SchemaResult(pa.schema([]))

    def _caller(self, context: flight.ServerCallContext) -> Caller:
        """Return the caller of a read, with the limits of the read."""
        return self._limits.reader(context.is_cancelled, self.table.regions.context.clock.monotonic)

    def _request(self, command: Any, action: str = "") -> tuple[dict[str, Any], pa.Table | None]:
        """Return the request in a ticket, a descriptor or the body of `action`. Raises: Invalid."""
        self._limits.take_message(len(command or b""))
        request, rows = unpack(command or b"")
        if rows is not None:
            self._limits.take_keys(rows, self.table.schema)
        return self._meant(request, action or str(request.get("act", ""))), rows

    def _meant(self, request: dict[str, Any], call: str = "") -> dict[str, Any]:
        """Return `request` without the table that it names. Raises: Unavailable for another table; Invalid."""
        fields.expect(request, call)
        meant, table = request.pop("table", None), self.table
        if meant not in (None, table.id):
            raise wrong_table(table.base.uri)
        return request

    def _write(self, request: dict[str, Any], rows: pa.Table) -> dict[str, Any]:
        with span_of_write(request, rows):
            if request["op"] == "put":
                token = Token(request["producer"], request["sequence"])
                routing = request.get("routing", 1)  # senders without it know no resized table
                nulls = fields.names(request, "nulls")
                return asdict(self.table.put_region(UUID(request["region"]), rows, token, routing, nulls))
            table = self.table  # a resize may replace it at any moment
            expect_routing(table.base.uri, request.get("routing"), table.base.routing_version)
            parsed = Token.parse(request["token"])
            options: dict[str, Any] = {
                "token": parsed,
                "durable": request["durable"],
                "timeout": request.get("timeout"),
            }
            if request["op"] == "delete":
                where = Where(fields.given(request, "filter"), fields.given(request, "version"))
                return asdict(table.deletes.piece(rows, where, **options))
            if request["delete"]:
                return asdict(table.delete(rows, **options))
            return asdict(table.put_of_client(rows, fields.names(request, "nulls"), **options))

    def _read(self, request: dict[str, Any], rows: pa.Table | None, told: list[Explanation]) -> pa.Table | RowStream:
        op, is_explained = read_named(request.pop("op"))
        if op == "changes":
            return packed(self.table.stored_changes.piece(ChangesRequest.of_json(request)))
        kind = READS.get(op)
        if kind is None or kind.counts or (rows is None) != (kind.sends is None):
            expect_known(f"the read {op!r:.60}", request.get("protocol"))
        if rows is not None:
            request[str(kind.sends)] = rows if kind.sends == "keys" else rows.column(0).combine_chunks()
        if is_explained:
            request["explain"] = told.append
        with span_of_read(op) as span:
            answer: pa.Table | RowStream = getattr(self._of(request), op)(**fields.arguments(op, request))
            told_rows(span, answer)
        if isinstance(answer, RowStream) or not is_explained:
            return answer
        return answer.replace_schema_metadata({**(answer.schema.metadata or {}), EXPLANATION: told[0].to_json()})

    def _of(self, request: dict[str, Any]) -> Reads:
        """Return the reads of the regions that `request` names, and remove `regions` and `routing` from it."""
        regions, routing, table = request.pop("regions", None), request.pop("routing", None), self.table
        expect_routing(table.base.uri, routing, table.base.routing_version)
        return table if regions is None else table.only([UUID(region) for region in regions])

    def _act(self, name: str, request: dict[str, Any]) -> Any:
        acts = self._actions()
        if name not in acts:
            expect_known(f"the action {name!r:.60}", request.get("protocol"))
        with span_of_action(name):
            return acts[name](request)

    def _actions(self) -> dict[str, Callable[[dict[str, Any]], Any]]:
        return {
            **{name: partial(self._count, name) for name, kind in READS.items() if kind.counts},
            **{explained(name): partial(self._count_explained, name) for name, kind in READS.items() if kind.counts},
            "applied": self._applied,
            "changes_position": lambda request: self.table.changes_position(request["at"]),
            "record": self._record,
            "base_version": lambda _: self.table.deletes.base_version(),
            "status": lambda _: self._status(),
            "flush": self._flush,
            "commit": lambda _: asdict(self.table.commit()),
            "indexes": lambda _: self.table.list_indexes(),
            "create_index": lambda asked: self.table.create_index(
                asked["column"], asked["kind"], **asked["parameters"]
            ),
            "drop_index": lambda request: self.table.drop_index(request["name"]),
            "schema": self._schema,
            "regions": self._looked_at,
            "look": lambda request: self._place.look(request.get("from", "")),
            "release": self._release,
        }

    def _count(self, name: str, request: dict[str, Any]) -> int:
        return int(getattr(self._of(request), name)(**fields.arguments(name, request)))

    def _count_explained(self, name: str, request: dict[str, Any]) -> dict[str, Any]:
        told: list[Explanation] = []
        count = self._count(name, {**request, "explain": told.append})
        return {"count": count, "explanation": told[0].as_dict()}

    def _applied(self, request: dict[str, Any]) -> Sequence[int | None]:
        table = self.table
        expect_routing(table.base.uri, request["routing"], table.base.routing_version)
        return table.applied(request["producer"], map(UUID, request["regions"]), logged=bool(request.get("logged")))

    def _flush(self, request: dict[str, Any]) -> None:
        table, named = self.table, request.get("regions")
        expect_routing(table.base.uri, request.get("routing"), table.base.routing_version)
        table.flush() if named is None else table.upkeep.flush(table.regions.of(map(UUID, named)), every=True)

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
        return {**fields.described(self.table), **self._regions()}

    def _looked_at(self, request: dict[str, Any]) -> dict[str, Any]:
        if "from" in request:
            self._place.heard(request["from"])
        upkeep = self.table.upkeep
        waiting = asdict(Backlog.of_all(upkeep.waiting()))
        claiming = [str(region) for region in self.table.regions.coming]
        return {**self._regions(), "claiming": claiming, "waiting": waiting, "base_version": upkeep.caught_up}

    def _status(self) -> dict[str, Any]:
        """Return the status of the table, with the newest events of this daemon, newest first."""
        newest = [] if self._events is None else self._events.newest()[:_EVENTS]
        return self.table.status() | {"events": [event | {"daemon": self._place.endpoint} for event in newest]}

    def _regions(self) -> dict[str, Any]:
        return {
            "protocol": str(protocol.OURS),
            "endpoint": self._place.endpoint or None,
            "process": self._place.process,
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
