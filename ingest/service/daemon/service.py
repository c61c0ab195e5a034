"""The daemon's Arrow Flight service: a `Table` behind one kind of call, DoExchange.

The command of the descriptor is a JSON object (`rpc.wire`). `op` names the operation; the other fields are those of
the operation. `FlightService.operations` is the table of operations, with the role that a caller needs.

    get, search, candidates {"regions", …}   reads that send keys or a vector with the request
    scan, match, count, facets {"regions", …}   the other reads; a scan streams its rows
    changes {"since", "until", "images", "columns"}   the next changes, of all regions, whoever owns them; the metadata
        `memwal:changes` of the schema has {"position", "more"}
    changes_position {"at"}, base_version, versions, status, indexes
    tag {"name", "version", "replace"}   names a version; without "version", drops the name
    applied {"producer", "regions", "routing", "logged"}   the highest number that every region, that any region has
        applied, or logged
    put {"region", "producer", "sequence", "routing", "rows", "nulls"}   "rows" rows of one region, all or none (the
        Spark sink)
    write {"delete", "durable", "token", "timeout", "nulls"}   rows or keys of any number of regions; with "routing" if
        the sender has split them itself
    delete {"filter", "version", "durable", "token", "timeout"}   keys, deleted if their row passes
    update {…, "expressions"}   as delete, but sets columns, whose new values are beside the keys, or SQL expressions
    record {"token", "durable", "regions", "routing"}   records the token as applied in each region
    flush {"regions", "routing"}             these regions, or without them all regions here
    commit, create_index {"column", "kind", "parameters"}, drop_index {"name"}   for all regions
    schema {"look"}                          the description of the table; "look": checks storage for changed columns
        first
    regions                                  the regions here; answered during their claims, too
    release {"region", "flush", "read"}      releases a region so that the caller can claim it; the caller has read its
        log up to position "read"
    look                                     makes the daemon check the caller, a peer with a changed state
    `from`, on the last three: the endpoint of the calling peer

After the request of a put, write or delete, the rows follow as the stream of the call, with a closing message
(`rpc.wire`). Nothing is applied before it. The answer is a stream of rows (all reads but count, and changes) or one
message with JSON. With `"explain": true`, one more message ends the answer of a read: its `Explanation` as JSON. If
the caller cancels the call, work that has not begun by then is not done.

Several daemons may share a table, each with some of its regions. A call that names a region owned elsewhere, or sends
rows of one, fails with Unavailable and `{"reason": "not_owner" | "draining", "region", "owner", "epoch"}`; nothing was
written. `epoch`: the owner's, 0 if it has yet to claim the region.
`table`, on all but "schema" and "regions": the id of the caller's table. Ports are reused, and regions of all tables
have the same ids, so a daemon of another table rejects the call as if it did not own the region.
Settings of [daemon] limit calls: `calls_max`, `message_max`, `put_max`, `query_timeout`, `query_memory` (`limits`).
`protocol`, `needs`, on all: the caller's version, and the fields that the daemon must know (`ingest.protocol`); the
daemon ignores other unknown fields.
`regions`: ids of the regions to read. Without it the read covers all regions, and this daemon must own all of them.
`at`, on reads: the version of the base table to read, whoever owns the regions.
With it `routing`: the version that the caller knows, since another routing has other rows under the same ids.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial, wraps
from typing import Any, ClassVar, TypeVar
from uuid import UUID

import pyarrow as pa
import pyarrow.flight as flight

from memwal.ingest import protocol, tracing
from memwal.ingest.caller import Caller
from memwal.ingest.engine.api.arguments import ROWS_MAX, whole
from memwal.ingest.engine.api.changes import ChangesRequest, packed
from memwal.ingest.engine.api.explanation import Explanation
from memwal.ingest.engine.api.filter_writes import Update, Where
from memwal.ingest.engine.api.reads import Reads
from memwal.ingest.engine.api.results import RowStream
from memwal.ingest.engine.api.tokens import Token
from memwal.ingest.engine.region.state import Backlog
from memwal.ingest.engine.table.embedded import Table
from memwal.ingest.errors import Invalid, MemWalError, Unavailable, UnknownOutcome
from memwal.ingest.refusals import being_resized, expect_routing, wrong_table
from memwal.ingest.service.daemon import fields
from memwal.ingest.service.daemon.limits import Calls, Limits, classified, why_refused
from memwal.ingest.service.daemon.operations import Operation, reads, span_of
from memwal.ingest.service.daemon.peers import Place
from memwal.ingest.service.ops.events import RecentEvents
from memwal.ingest.service.rpc import trace_headers
from memwal.ingest.service.rpc.guard import AccessLog, Guard, role_of
from memwal.ingest.service.rpc.wire import raise_over_flight, read_closed, unpack, unpack_rows
from memwal.ingest.settings.sections import DaemonSettings
from memwal.wal import named

T = TypeVar("T")
_EVENTS = 20
"""Maximum events in a status; the newest ones."""


def _answering(method: Callable[..., T]) -> Callable[..., T]:
    """Decorate a handler so that its errors reach the client with their kind, and rejections are counted."""

    @wraps(method)
    def wrapped(self: FlightService, *args: Any) -> T:
        table = self.table
        try:
            with tracing.continued(trace_headers.received(args[0])) if tracing.on else tracing.OFF:
                return method(self, *args)
        except BaseException as error:
            told = self.told(classified(error), table)
            if (why := why_refused(told)) is not None:
                self._guard.refused.add("flight", why)
            raise_over_flight(told)
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
        self._guard, self._limits = guard or Guard(), limits or Limits(DaemonSettings())
        self.calls = Calls(self._limits.daemon.calls_max)
        self._log = AccessLog(table.regions.context.clock)
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

    # ---- calls ---------------------------------------------------------------------------------------------------

    @_answering
    def do_exchange(
        self,
        context: flight.ServerCallContext,
        descriptor: flight.FlightDescriptor,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.MetadataRecordBatchWriter,
    ) -> None:
        operation, request, rows = self._request(descriptor.command)
        with self.calls.enter() if operation.counted else nullcontext():
            operation.expect_permitted(role_of(context, self._guard), request, context.peer(), self._log)
            self._take_rows(operation, request, rows, reader)
            explanations = list[Explanation]()
            if request.pop("explain", None):
                request["explain"] = explanations.append
            clock = self.table.regions.context.clock
            gone = context.is_cancelled
            caller = self._limits.reader(gone, clock.monotonic) if operation.bounded else Caller(gone)
            answer = caller.run(partial(self._handled, operation, request))
            if isinstance(answer, pa.Table):
                writer.begin(answer.schema)
                writer.write_table(answer)
            elif isinstance(answer, RowStream):
                with answer:
                    writer.begin(answer.schema)
                    while (batch := caller.run(partial(next, answer, None))) is not None:
                        writer.write_batch(batch)  # waits until gRPC accepts it
                        caller.anew()
            else:
                writer.write_metadata(_message(answer))
            for explanation in explanations:
                writer.write_metadata(explanation.to_json().encode())

    @_answering
    def do_action(self, context: flight.ServerCallContext, action: flight.Action) -> Iterator[bytes]:
        """Answer a process with version 1 of the protocol, so that it can report the mismatch (`ingest.protocol`)."""
        if action.type not in protocol.ASK_WHO:
            protocol.expect_caller(None)
        operation, request, _ = self._request(action.body, action.type)
        operation.expect_permitted(role_of(context, self._guard), request, context.peer(), self._log)
        return iter([_message(self._handled(operation, request))])

    @_answering
    def _of_version_1(self, *_: Any) -> None:
        protocol.expect_caller(None)

    @_answering
    def _no_such_call(self, *_: Any) -> None:
        raise Invalid("a daemon answers DoExchange only")

    do_get = do_put = _of_version_1
    list_flights = get_flight_info = list_actions = _no_such_call

    def get_schema(self, *_: Any) -> flight.SchemaResult:
        """Return no columns. pyarrow would send an error of this handler with its traceback (pyarrow 26)."""
        self._guard.refused.add("flight", "invalid")
        return flight.SchemaResult(pa.schema([]))

    def _request(self, command: Any, named: str | None = None) -> tuple[Operation, dict[str, Any], memoryview]:
        """Return the operation that a command names, its fields, and its encoded rows. `named`: the operation, if the
        command names none.

        Raises: Invalid; Unavailable for another table.
        """
        self._limits.take_message(len(command or b""))
        request, rows = unpack(command or b"")
        request["op"] = named or request.get("op", request.pop("act", None))
        operation = fields.expect(request, self.operations)
        meant, table = request.pop("table", None), self.table
        if meant not in (None, table.id):
            raise wrong_table(table.base.uri)
        return operation, request, rows

    def _take_rows(self, operation: Operation, request: dict[str, Any], encoded: memoryview, reader: Any) -> None:
        """Add the rows that the caller sends to `request`. Raises: Invalid; errors of `read_closed`."""
        sends = operation.sends
        if bool(encoded) != (sends in ("keys", "vector")):
            raise Invalid(
                f"not a request of memwal: {request['op']} {'takes no rows' if encoded else 'lacks its rows'}"
            )
        if sends == "rows":
            request["rows"] = read_closed(reader, request.get("rows"), self._limits.counted(self.table.schema))
        elif sends is not None:
            rows = unpack_rows(encoded)
            self._limits.take_keys(rows, self.table.schema)
            request[sends] = rows if sends == "keys" else rows.column(0).combine_chunks()

    def _handled(self, operation: Operation, request: dict[str, Any]) -> Any:
        with span_of(operation, request) as span:
            answer = operation.handle(self, request)
            if span is not None and isinstance(answer, pa.Table):
                tracing.note(span, rows=answer.num_rows, bytes=answer.nbytes)
            return answer

    # ---- operations ----------------------------------------------------------------------------------------------

    def _read(self, request: dict[str, Any]) -> Any:
        op, of = request["op"], self._of(request)
        return getattr(of, op)(**{name: request[name] for name in self.operations[op].fields if name in request})

    def _of(self, request: dict[str, Any]) -> Reads:
        """Return the reads of the regions that `request` names, and remove `regions` and `routing` from it."""
        regions, routing, table = request.pop("regions", None), request.pop("routing", None), self.table
        expect_routing(table.base.uri, routing, table.base.routing_version)
        if (version := request.pop("at", None)) is not None:
            return table.at(whole("at", version, 1, ROWS_MAX))
        return table if regions is None else table.only([UUID(region) for region in regions])

    def _versions(self, _: dict[str, Any]) -> dict[str, Any]:
        versions = [[each["version"], each["timestamp"].timestamp()] for each in self.table.list_versions()]
        return {"versions": versions, "tags": self.table.list_tags()}

    def _tag(self, request: dict[str, Any]) -> None:
        if (version := request.get("version")) is None:
            return self.table.drop_tag(request["name"])
        return self.table.create_tag(request["name"], version, replace=bool(request.get("replace")))

    def _changes(self, request: dict[str, Any]) -> pa.Table:
        return packed(self.table.stored_changes.piece(ChangesRequest.of_json(request)))

    def _put(self, request: dict[str, Any]) -> dict[str, Any]:
        token, nulls = Token(request["producer"], request["sequence"]), fields.names(request, "nulls")
        region, routing = UUID(request["region"]), request["routing"]
        return asdict(self.table.put_region(region, request["rows"], token, routing, nulls))

    def _write(self, request: dict[str, Any]) -> dict[str, Any]:
        table, rows = self.table, request["rows"]  # a resize may replace the table at any moment
        expect_routing(table.base.uri, request.get("routing"), table.base.routing_version)
        options: dict[str, Any] = {
            "token": Token.parse(request["token"]),
            "durable": request["durable"],
            "timeout": request.get("timeout"),
        }
        if request["op"] != "write":
            update, key = None, list(table.key)
            if request["op"] == "update":
                update = Update.sent(rows, fields.given(request, "expressions"), table.schema, key)
            where = Where(fields.given(request, "filter"), fields.given(request, "version"), update)
            return asdict(table.writes.piece(rows if update is None else rows.select(key), where, **options))
        if request["delete"]:
            return asdict(table.delete(rows, **options))
        return asdict(table.put_of_client(rows, fields.names(request, "nulls"), **options))

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
        return table.writes.record(token, durable=request["durable"], timeout=None, regions=regions)

    def _schema(self, request: dict[str, Any]) -> dict[str, Any]:
        if request.get("look"):  # the caller has rows with unknown columns
            self.table.look()
        return {**fields.described(self.table), **self._regions()}

    def _looked_at(self, request: dict[str, Any]) -> dict[str, Any]:
        if request.get("from"):
            self._place.heard(request["from"])
        upkeep = self.table.upkeep
        waiting = asdict(Backlog.of_all(upkeep.waiting()))
        claiming = [str(region) for region in self.table.regions.coming]
        return {**self._regions(), "claiming": claiming, "waiting": waiting, "base_version": upkeep.caught_up}

    def _status(self, _: dict[str, Any]) -> dict[str, Any]:
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
                f"{named(region)}: by the daemons seen here it does not belong to {request['from']}; ask again",
                {"reason": "disagree", "region": str(region)},
            )
        if "from" in request and "flush" not in request:
            epoch, released = self.table.give(region, int(request.get("read", 0)))
            return {"epoch": epoch, "ended": None if released is None else released.to_json()}
        return {"epoch": self.table.release(region, flush=request.get("flush"))}

    operations: ClassVar[Mapping[str, Operation]] = {
        **reads(_read),
        "changes": Operation("read", _changes, "since until images columns", bounded=True),
        "changes_position": Operation("read", lambda self, asked: self.table.changes_position(asked["at"]), "at"),
        "base_version": Operation("read", lambda self, _: self.table.writes.base_version()),
        "versions": Operation("read", _versions),
        "tag": Operation("write", _tag, "name version replace", traced=True),
        "status": Operation("read", _status),
        "indexes": Operation("read", lambda self, _: self.table.list_indexes()),
        "applied": Operation("read", _applied, "producer regions routing logged"),
        "schema": Operation("read", _schema, "look", needs_more={"look": "write"}),
        "regions": Operation("read", _looked_at, "from", needs_more={"from": "admin"}, counted=False),
        "put": Operation("write", _put, "region producer sequence routing rows nulls", "rows", traced=True),
        "write": Operation("write", _write, "delete durable token timeout routing nulls", "rows", traced=True),
        "delete": Operation("write", _write, "filter version durable token timeout routing", "rows", traced=True),
        "update": Operation(
            "write", _write, "filter version expressions durable token timeout routing", "rows", traced=True
        ),
        "record": Operation("write", _record, "token durable regions routing", traced=True),
        "flush": Operation("admin", _flush, "regions routing", counted=False, audited=True, traced=True),
        "commit": Operation(
            "admin", lambda self, _: asdict(self.table.commit()), counted=False, audited=True, traced=True
        ),
        "create_index": Operation(
            "admin",
            lambda self, asked: self.table.create_index(asked["column"], asked["kind"], **asked["parameters"]),
            "column kind parameters",
            audited=True,
            traced=True,
        ),
        "drop_index": Operation(
            "admin", lambda self, asked: self.table.drop_index(asked["name"]), "name", audited=True, traced=True
        ),
        "release": Operation("admin", _release, "region flush read from", counted=False, audited=True, traced=True),
        "look": Operation("admin", lambda self, asked: self._place.look(asked.get("from", "")), "from", counted=False),
    }


def _message(answer: Any) -> bytes:
    return json.dumps(answer, default=str).encode()
