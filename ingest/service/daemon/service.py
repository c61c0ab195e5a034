"""The daemon's Arrow Flight service: its tables behind one kind of call, DoExchange.

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
    flush {"regions", "routing", "make_way"} these regions, or without them all here; "make_way": for a resize, all
    commit, create_index {"column", "kind", "parameters"}, drop_index {"name"}   for all regions
    schema {"look"}                          the description of the table; "look": checks storage for changed columns
        first
    regions                                  the regions here; answered during their claims, too. In a fleet without
        "table_name": of every open table, by name, in "tables"
    tables                                   the tables of the daemon
    create                                   creates the table `table_name` from the template of the fleet
    release {"region", "flush", "read"}      releases a region so that the caller can claim it; the caller has read its
        log up to position "read"
    look                                     makes the daemon check the caller, a peer with a changed state
    `from`, on "regions", "release" and "look": the endpoint of the calling peer

After the request of a put, write or delete, the rows follow as the stream of the call, with a closing message
(`rpc.wire`). Nothing is applied before it. The answer is a stream of rows (all reads but count, and changes) or one
message with JSON. With `"explain": true`, one more message ends the answer of a read: its `Explanation` as JSON. If
the caller cancels the call, work that has not begun by then is not done.

Several daemons may share a table, each with some of its regions. A call that names a region owned elsewhere, or sends
rows of one, fails with Unavailable and `{"reason": "not_owner" | "draining", "region", "owner", "epoch"}`; nothing was
written. `epoch`: the owner's, 0 if it has yet to claim the region.
`table_name`, on all: the name of the table, if the daemon serves a fleet.
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
from contextlib import ExitStack, contextmanager
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
from memwal.ingest.refusals import being_resized
from memwal.ingest.service.daemon import fields
from memwal.ingest.service.daemon.limits import Calls, Limits, classified, why_refused
from memwal.ingest.service.daemon.operations import Operation, reads, span_of
from memwal.ingest.service.daemon.peers import Place
from memwal.ingest.service.daemon.placement import TableRegion
from memwal.ingest.service.daemon.tables import Tables
from memwal.ingest.service.ops.events import RecentEvents
from memwal.ingest.service.rpc import trace_headers
from memwal.ingest.service.rpc.guard import AccessLog, Grant, Guard, grant_of
from memwal.ingest.service.rpc.wire import raise_over_flight, read_closed, unpack, unpack_rows
from memwal.ingest.settings.sections import DaemonSettings
from memwal.wal import SystemClock, named

T = TypeVar("T")
_EVENTS = 20
"""Maximum events in a status; the newest ones."""


def _answering(method: Callable[..., T]) -> Callable[..., T]:
    """Decorate a handler so that its errors reach the client with their kind, and rejections are counted."""

    @wraps(method)
    def wrapped(self: FlightService, *args: Any) -> T:
        try:
            with tracing.continued(trace_headers.received(args[0])) if tracing.on else tracing.OFF:
                return method(self, *args)
        except BaseException as error:
            told = classified(error)
            if (why := why_refused(told)) is not None:
                self._guard.refused.add("flight", why)
            raise_over_flight(told)
            raise

    return wrapped


class FlightService(flight.FlightServerBase):  # type: ignore[misc]
    """The Flight server of a daemon's tables.

    Thread safety. gRPC calls the handlers from many threads; `Table` accepts calls from all of them.
    """

    def __init__(
        self,
        tables: Tables,
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
        self._log = AccessLog(SystemClock())
        self.tables, self._place = tables, place or Place()
        super().__init__(location, **trace_headers.taking_headers(self._guard.flight_options()))

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
        with ExitStack() as stack:
            if operation.counted:
                stack.enter_context(self.calls.enter())
            grant = self._permitted(operation, request, context)
            table = stack.enter_context(self._table_of(operation, request, grant))
            self._take_rows(operation, request, rows, reader, table)
            explanations = list[Explanation]()
            if request.pop("explain", None):
                request["explain"] = explanations.append
            gone, clock = context.is_cancelled, SystemClock() if table is None else table.regions.context.clock
            caller = self._limits.reader(gone, clock.monotonic) if operation.bounded else Caller(gone)
            answer = caller.run(partial(self._handled, operation, table, request))
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
        grant = self._permitted(operation, request, context)
        with self._table_of(operation, request, grant) as table:
            return iter([_message(self._handled(operation, table, request))])

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

        Raises: Invalid.
        """
        self._limits.take_message(len(command or b""))
        request, rows = unpack(command or b"")
        request["op"] = named or request.get("op", request.pop("act", None))
        return fields.expect(request, self.operations), request, rows

    def _permitted(self, operation: Operation, request: dict[str, Any], context: flight.ServerCallContext) -> Grant:
        """Return the rights of the caller. Raises: Invalid if they do not permit `request`."""
        grant = grant_of(context, self._guard)
        operation.expect_permitted(grant, request, context.peer(), self._log)
        if operation.of_daemon:
            request["covers"] = grant.covers
        return grant

    @contextmanager
    def _table_of(self, operation: Operation, request: dict[str, Any], grant: Grant) -> Iterator[Table | None]:
        """Return the context of a call to the table that `request` names; None if the call names none.

        Errors in it become those that the caller should see: a resize becomes a pause.
        """
        if operation.of_daemon:
            yield None
            return
        with self.tables.using(request.get("table_name"), request.pop("table", None), grant.covers) as table:
            try:
                yield table
            except Exception as error:
                raise _told(classified(error), table) from error

    def _take_rows(
        self, operation: Operation, request: dict[str, Any], encoded: memoryview, reader: Any, table: Table | None
    ) -> None:
        """Add the rows that the caller sends to `request`. Raises: Invalid; errors of `read_closed`."""
        sends = operation.sends
        if bool(encoded) != (sends in ("keys", "vector")):
            raise Invalid(
                f"not a request of memwal: {request['op']} {'takes no rows' if encoded else 'lacks its rows'}"
            )
        if sends is None:
            return
        assert table is not None
        if sends == "rows":
            request["rows"] = read_closed(reader, request.get("rows"), self._limits.counted(table.schema))
        else:
            rows = unpack_rows(encoded)
            self._limits.take_keys(rows, table.schema)
            request[sends] = rows if sends == "keys" else rows.column(0).combine_chunks()

    def _handled(self, operation: Operation, table: Table | None, request: dict[str, Any]) -> Any:
        with span_of(operation, request) as span:
            answer = operation.handle(self, table, request)
            if span is not None and isinstance(answer, pa.Table):
                tracing.note(span, rows=answer.num_rows, bytes=answer.nbytes)
            return answer

    # ---- operations ----------------------------------------------------------------------------------------------

    def _read(self, table: Table, request: dict[str, Any]) -> Any:
        op, of = request["op"], self._of(table, request)
        return getattr(of, op)(**{name: request[name] for name in self.operations[op].fields if name in request})

    def _of(self, table: Table, request: dict[str, Any]) -> Reads:
        """Return the reads of the regions that `request` names, and remove `regions` and `routing` from it."""
        regions, routing = request.pop("regions", None), request.pop("routing", None)
        with table.gate.passing(routing):
            if (version := request.pop("at", None)) is not None:
                return table.at(whole("at", version, 1, ROWS_MAX))
            return table if regions is None else table.only([UUID(region) for region in regions])

    def _versions(self, table: Table, _: dict[str, Any]) -> dict[str, Any]:
        versions = [[each["version"], each["timestamp"].timestamp()] for each in table.list_versions()]
        return {"versions": versions, "tags": table.list_tags()}

    def _tag(self, table: Table, request: dict[str, Any]) -> None:
        if (version := request.get("version")) is None:
            return table.drop_tag(request["name"])
        return table.create_tag(request["name"], version, replace=bool(request.get("replace")))

    def _changes(self, table: Table, request: dict[str, Any]) -> pa.Table:
        return packed(table.stored_changes.piece(ChangesRequest.of_json(request)))

    def _put(self, table: Table, request: dict[str, Any]) -> dict[str, Any]:
        token, nulls = Token(request["producer"], request["sequence"]), fields.names(request, "nulls")
        region, routing = UUID(request["region"]), request["routing"]
        return asdict(table.put_region(region, request["rows"], token, routing, nulls))

    def _write(self, table: Table, request: dict[str, Any]) -> dict[str, Any]:
        with table.gate.passing(request.get("routing")):
            return self._written(table, request, request["rows"])

    def _written(self, table: Table, request: dict[str, Any], rows: pa.Table) -> dict[str, Any]:
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

    def _applied(self, table: Table, request: dict[str, Any]) -> Sequence[int | None]:
        regions, logged = map(UUID, request["regions"]), bool(request.get("logged"))
        with table.gate.passing(request["routing"]):
            return table.applied(request["producer"], regions, logged=logged)

    def _flush(self, table: Table, request: dict[str, Any]) -> None:
        named = request.get("regions")
        if request.get("make_way"):
            table.resizing.make_way(request.get("routing"))
            return
        with table.gate.passing(request.get("routing")):
            writers = table.regions.of(map(UUID, named or ()))
        table.flush() if named is None else table.upkeep.flush(writers, every=True)

    def _record(self, table: Table, request: dict[str, Any]) -> dict[str, int]:
        token = Token.parse(request["token"])
        if token is None:
            raise Invalid("record: the token is missing")
        regions = map(UUID, request["regions"])
        with table.gate.passing(request["routing"]):
            return table.writes.record(token, durable=request["durable"], timeout=None, regions=regions)

    def _schema(self, table: Table, request: dict[str, Any]) -> dict[str, Any]:
        if request.get("look"):  # the caller has rows with unknown columns
            table.look()
        return {**fields.described(table), **self._here(), **_regions(table)}

    def _looked_at(self, _: None, request: dict[str, Any]) -> dict[str, Any]:
        """Return the regions here, of one table if it is named or the only one, else of every open table.

        A caller that names a table is also told which of its regions the next call claims here.
        """
        if request.get("from"):
            self._place.heard(request["from"])
        covers = request["covers"]
        if (name := request.get("table_name")) is not None:
            with self.tables.using(name, None, covers) as table:
                found = _regions_and_claims(table)
                claimable = [str(region) for region in table.regions.order if table.regions.claimable(region)]
                return {**self._here(), **found, "claiming": [*found["claiming"], *claimable]}
        tables = self.tables.open()
        if "" in tables:
            return {**self._here(), **_regions_and_claims(tables[""])}
        told = {name: _regions_and_claims(each) for name, each in tables.items() if covers(name)}
        return {**self._here(), "table": self._place.address, "id": None, "regions": {}, "claiming": [], "tables": told}

    def _status(self, table: Table, _: dict[str, Any]) -> dict[str, Any]:
        """Return the status of the table, with the newest events of this daemon, newest first."""
        newest = [] if self._events is None else self._events.newest()[:_EVENTS]
        return table.status() | {"events": [event | {"daemon": self._place.endpoint} for event in newest]}

    def _here(self) -> dict[str, Any]:
        place = self._place
        return {
            "protocol": str(protocol.OURS),
            "endpoint": place.endpoint or None,
            "process": place.process,
            "endpoints": list(place.endpoints),
            "draining": place.ends() or any(table.regions.draining for table in self.tables.open().values()),
        }

    def _release(self, table: Table, request: dict[str, Any]) -> dict[str, Any]:
        region = UUID(request["region"])
        ours = TableRegion(request.get("table_name", ""), region)
        if "from" in request and not self._place.gives(ours, request["from"]):
            raise Unavailable(
                f"{named(region)}: by the daemons seen here it does not belong to {request['from']}; ask again",
                {"reason": "disagree", "region": str(region)},
            )
        if "from" in request and "flush" not in request:
            epoch, released = table.give(region, int(request.get("read", 0)))
            return {"epoch": epoch, "ended": None if released is None else released.to_json()}
        return {"epoch": table.release(region, flush=request.get("flush"))}

    def _look(self, _: None, request: dict[str, Any]) -> None:
        self._place.look(request.get("from", ""))

    def _listed(self, _: None, request: dict[str, Any]) -> dict[str, Any]:
        listed = self.tables.listed()
        return {**self._here(), "tables": [each for each in listed if request["covers"](each["name"])]}

    def _create(self, _: None, request: dict[str, Any]) -> None:
        self.tables.create(fields.given(request, "table_name"))

    operations: ClassVar[Mapping[str, Operation]] = {
        **reads(_read),
        "changes": Operation("read", _changes, "since until images columns", bounded=True),
        "changes_position": Operation("read", lambda _, table, asked: table.changes_position(asked["at"]), "at"),
        "base_version": Operation("read", lambda _, table, __: table.writes.base_version()),
        "versions": Operation("read", _versions),
        "tag": Operation("write", _tag, "name version replace", traced=True),
        "status": Operation("read", _status),
        "indexes": Operation("read", lambda _, table, __: table.list_indexes()),
        "applied": Operation("read", _applied, "producer regions routing logged"),
        "schema": Operation("read", _schema, "look", needs_more={"look": "write"}),
        "regions": Operation("read", _looked_at, "from", needs_more={"from": "admin"}, counted=False, of_daemon=True),
        "tables": Operation("read", _listed, of_daemon=True),
        "create": Operation("write", _create, of_daemon=True, traced=True),
        "put": Operation("write", _put, "region producer sequence routing rows nulls", "rows", traced=True),
        "write": Operation("write", _write, "delete durable token timeout routing nulls", "rows", traced=True),
        "delete": Operation("write", _write, "filter version durable token timeout routing", "rows", traced=True),
        "update": Operation(
            "write", _write, "filter version expressions durable token timeout routing", "rows", traced=True
        ),
        "record": Operation("write", _record, "token durable regions routing", traced=True),
        "flush": Operation("admin", _flush, "regions routing make_way", counted=False, audited=True, traced=True),
        "commit": Operation(
            "admin", lambda _, table, __: asdict(table.commit()), counted=False, audited=True, traced=True
        ),
        "create_index": Operation(
            "admin",
            lambda _, table, asked: table.create_index(asked["column"], asked["kind"], **asked["parameters"]),
            "column kind parameters",
            audited=True,
            traced=True,
        ),
        "drop_index": Operation(
            "admin", lambda _, table, asked: table.drop_index(asked["name"]), "name", audited=True, traced=True
        ),
        "release": Operation("admin", _release, "region flush read from", counted=False, audited=True, traced=True),
        "look": Operation("admin", _look, "from", counted=False, of_daemon=True),
    }


def _message(answer: Any) -> bytes:
    return json.dumps(answer, default=str).encode()


def _regions(table: Table) -> dict[str, Any]:
    return {
        "table": table.identity["table"],
        "id": table.id,
        "routing_version": table.base.routing_version,
        "regions": table.regions.epochs,
    }


def _regions_and_claims(table: Table) -> dict[str, Any]:
    upkeep = table.upkeep
    return {
        **_regions(table),
        "claiming": [str(region) for region in table.regions.coming],
        "waiting": asdict(Backlog.of_all(upkeep.waiting())),
        "base_version": upkeep.caught_up,
    }


def _told(error: MemWalError, table: Table) -> MemWalError:
    """Return `error` of a call to `table` as the caller should see it: a resize becomes a pause."""
    if isinstance(error, UnknownOutcome):
        return error
    try:
        return being_resized(table.base.uri) if table.closed else table.resizing.told(error)
    except Exception:  # noqa: BLE001 - storage does not answer: keep the error
        return error
