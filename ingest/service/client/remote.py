"""The table that `memwal.connect` returns: the methods of `Table`, executed by the daemons that own its regions.

A client keeps a list of its table's daemons and the regions that each of them owns (`client.router`). If one
daemon owns all regions, each call goes to it unchanged. Otherwise the client sends rows to the owners of their
buckets in parallel, and merges the answers to a read; they come from disjoint regions. A Spark task opens one stream
per region (`open_stream`), so that each region applies its part of a micro-batch whole.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeVar
from uuid import UUID

import numpy as np
import pyarrow as pa

from memwal.flush import CommitReport
from memwal.ingest import tracing
from memwal.ingest.engine.api.arguments import check_encoding, keys_or_filter, seconds, text, yes_or_no
from memwal.ingest.engine.api.changes import ChangesRequest, Piece, Position, unpacked
from memwal.ingest.engine.api.explanation import Watch, heard
from memwal.ingest.engine.api.filter_writes import FilterWrite, Update, Where, rows_of
from memwal.ingest.engine.api.keys import normalise_keys
from memwal.ingest.engine.api.lancedb_forms import LanceDBForms
from memwal.ingest.engine.api.missing import CallersColumns, Missing, missing_rule
from memwal.ingest.engine.api.reads import READS, SQL_MEMORY, check_level
from memwal.ingest.engine.api.rows import as_table, size_bound
from memwal.ingest.engine.api.tokens import Applied, HighestTokens, Receipt, Token, TokenLike
from memwal.ingest.errors import NOT_OWNER, RESIZED, Invalid, MemWalError, Unavailable, translate_errors
from memwal.ingest.protocol import known
from memwal.ingest.service.client.retry import Attempts, abandon_if_moved
from memwal.ingest.service.client.router import PROBE_TIMEOUT, Call, Router, endpoints_of
from memwal.ingest.service.client.scatter import Splitter, in_asked_order, merged, merged_status, with_key
from memwal.ingest.service.client.stream import RegionStream
from memwal.ingest.service.client.writes import InFlight, RoutedWrite, deciding_failure
from memwal.ingest.service.rpc.connection import Connection, as_vector, kept_columns
from memwal.ingest.service.rpc.tls import NO_TLS, ClientTls
from memwal.ingest.service.rpc.wire import without_views
from memwal.memtable import row_schema
from memwal.wal import Clock, Ids

T = TypeVar("T")

STATUS_TIMEOUT, READ_TIMEOUT, WRITE_TIMEOUT, STEP_TIMEOUT = 10.0, 120.0, 120.0, 1800.0
"""Seconds after which a call with all its attempts fails. The limit of a write exceeds the default put timeout and
retry budget. A step (flush, commit) may build an index."""
ANSWER_TIMEOUT = 5.0
"""Additional seconds beyond a put's own timeout, so that the daemon can answer with its own, more precise error."""

IN_FLIGHT_MAX = 64 << 20


class _Sent(NamedTuple):
    """The parts of a read besides its request: the rows that it sends (`ReadKind.sends`), and the receiver of its
    explanation."""

    rows: pa.Table | None
    explain: Watch | None


class RemoteTable(LanceDBForms):
    """A table served by daemons.

    Thread safety. Every method from any thread. Errors. Only `ingest.errors` kinds.
    """

    def __init__(
        self,
        location: str | Sequence[str],
        *,
        token: str | None = None,
        tls: ClientTls = NO_TLS,
        clock: Clock | None = None,
        ids: Ids | None = None,
        patience: float | None = None,
        wait: float = 0.0,
        restarts: float = 0.0,
        table: str | None = None,
        id: str | None = None,
        name: str | None = None,
        in_flight_max: int = IN_FLIGHT_MAX,
        find: Callable[[], Iterable[str]] | None = None,
        sql_memory: int = SQL_MEMORY,
    ) -> None:
        """Connect to the daemons at `location`; see `connect`.

        `patience`: seconds to wait for the first answer; None for no limit. `wait`: seconds to retry while no daemon
        answers (with a single daemon: only if `restarts` is set). `restarts`: see `Attempts`. `table`, `id`: the
        table's expected address and id; None for any. `name`: of the table, if the daemons serve a fleet. `find`: see
        `Router`. `sql_memory`: see `connect`.
        """
        self._sql_memory = sql_memory
        opened = partial(Connection, token=token, tls=tls, name=name)
        self.router = Router(endpoints_of(location), opened, clock, ids, find)
        self.clock, self.router.table, self.router.id = self.router.clock, table, id
        self._in_flight, self._restarts, self._rising = InFlight(in_flight_max), restarts, HighestTokens()
        self._patiently(lambda _: self._describe({}, patience), wait)

    @property
    def endpoint(self) -> str:
        """The known daemons, in the form that `connect` accepts."""
        return ",".join(self.router.endpoints)

    @property
    def identity(self) -> dict[str, Any]:
        """The table's address, and the epoch of each region that has an owner."""
        router = self.router
        if len(router.epochs()) < len(router.regions):
            router.learn(router.rounds)
        return {"table": router.table, "epochs": router.epochs()}

    # ---- write ---------------------------------------------------------------------------------------------------

    @translate_errors
    def put(
        self,
        rows: Any,
        *,
        missing: Missing | None = None,
        durable: bool = True,
        token: TokenLike = None,
        timeout: float | None = None,
    ) -> Receipt:
        """See `Operations.put`.

        The client repeats a put that was certainly not applied until `timeout` (two minutes without one). It repeats
        a put that may be applied only with its `token`. Raises also: UnknownOutcome if an owner was lost before its
        answer.
        """
        rule = missing_rule(missing, self.key, self.upsert)
        given = as_table(rows, self.schema, rule)
        if not set(given.column_names) <= set(self.schema.names):
            self.refresh()
            if isinstance(rows, Sequence):
                given = as_table(rows, self.schema, rule)
        check_encoding(given)
        request = {"op": "write", "delete": False, "durable": yes_or_no("durable", durable)}
        request |= self._nulls(given.column_names, rule)
        return self._write(without_views(given), request, Token.parse(token), timeout)

    @translate_errors
    def delete(
        self,
        keys: Any = None,
        *,
        filter: str | None = None,
        durable: bool = True,
        token: TokenLike = None,
        timeout: float | None = None,
    ) -> Receipt:
        """See `Operations.delete`. Repeated as a put is; a delete by filter, piece by piece."""
        if (where := keys_or_filter(keys, filter)) is not None:
            return FilterWrite(self, self._pieces, where, self.clock).run(token, durable=durable, timeout=timeout)
        request = {"op": "write", "delete": True, "durable": yes_or_no("durable", durable)}
        return self._write(normalise_keys(keys, self.schema, self.key), request, Token.parse(token), timeout)

    @translate_errors
    def update(
        self,
        where: str | None = None,
        values: Mapping[str, Any] | None = None,
        *,
        values_sql: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> Receipt:
        """See `Operations.update`. A piece that may have been applied is not repeated."""
        update = Update.of(values, values_sql, self.schema, self.key)
        write = FilterWrite(self, self._pieces, rows_of(where), self.clock, update)
        return write.run(None, durable=True, timeout=timeout)

    @property
    def _pieces(self) -> RoutedFilterWrites:
        version = partial(self._of_first, "base_version", {})
        return RoutedFilterWrites(self._write, self._record, lambda: int(self._patiently(version, READ_TIMEOUT)))

    @translate_errors
    def open_stream(
        self,
        region: UUID,
        token: Token,
        *,
        timeout: float | None = None,
        columns: Sequence[str] | None = None,
        deletes: bool = False,
        routing: int = 1,
        rows: int | None = None,
        nulls: Sequence[str] = (),
    ) -> RegionStream:
        """Start the stream of one region and micro-batch. Nothing is applied before `finish`.

        `columns`: the columns of the rows, in the order of the schema; None for all. Other columns keep their stored
        values, except that the columns `nulls` become null. `deletes`: whether the rows have a last column
        `_tombstone`, true where a row deletes its key. `routing`: version of the routing that the caller used to find
        `region`. `rows`: number of rows that will be written, if known; the region rejects a stream with a different
        number. `timeout`: seconds from now to the ack, after which the stream is abandoned; None for no limit.
        """
        schema = self.schema if columns is None else pa.schema([self.schema.field(name) for name in columns])
        if deletes:
            nullable = row_schema(schema, self.key)  # all columns except the key may be null
            schema = nullable.with_metadata(schema.metadata)
        router, limit = self.router, seconds("timeout", timeout) or float("inf")
        attempts = Attempts(router.clock, router.ids, limit, repeatable=True, restarts=self._restarts)

        name, asked, trace = str(region), list[Callable[[], bool]](), tracing.headers() if tracing.on else ()
        said = kept_columns(len(schema) - deletes + len(nulls) < len(self.schema), nulls)

        def open_put() -> Any:
            patience, to = attempts.patience(alone=router.alone), router.owner(name)
            asked[:] = [router.watch(to.endpoint, [name])]
            with tracing.continued(trace):
                left = None if patience == float("inf") else patience
                return to.open_put(name, token, schema, left, routing, rows, said)

        def again(error: MemWalError) -> None:
            router.before_next(attempts, error, router.rounds)

        def moved() -> bool:
            return any(each() for each in asked)

        within = (lambda call: call()) if router.alone else partial(abandon_if_moved, moved)
        return RegionStream(name, schema, open_put, again, within, router.clock)

    # ---- steps and state -----------------------------------------------------------------------------------------

    @translate_errors
    def flush(self) -> None:
        """See `Operations.flush`. Flushes at every owner, and again where a region changed its owner meanwhile."""
        self._patiently(lambda within: self._of_owners("flush", {}, within), STEP_TIMEOUT)

    @translate_errors
    def commit(self) -> CommitReport:
        """See `Operations.commit`. The owner of bucket 0 commits for all regions; no rows pass through the client."""
        return known(CommitReport, self._patiently(partial(self._of_first, "commit", {}), STEP_TIMEOUT))

    @translate_errors
    def create_index(self, /, column: str, kind: str, **parameters: Any) -> str:
        """See `Operations.create_index`. The owner of bucket 0 creates it; other owners use it from their next read or
        commit."""
        request = {"column": column, "kind": kind, "parameters": parameters}
        name: str = self._patiently(partial(self._of_first, "create_index", request), STEP_TIMEOUT)
        self.refresh()
        return name

    @translate_errors
    def drop_index(self, name: str) -> None:
        """See `Operations.drop_index`. The owner of bucket 0 drops it."""
        self._patiently(partial(self._of_first, "drop_index", {"name": name}), STEP_TIMEOUT, repeatable=False)
        self.refresh()

    @translate_errors
    def list_indexes(self) -> list[dict[str, Any]]:
        """See `Operations.list_indexes`."""
        return list(self._patiently(partial(self._of_first, "indexes", {}), READ_TIMEOUT))

    @translate_errors
    def list_versions(self) -> list[dict[str, Any]]:
        """See `Operations.list_versions`."""
        return [
            {"version": version, "timestamp": datetime.datetime.fromtimestamp(seconds, datetime.UTC)}
            for version, seconds in self._versions()["versions"]
        ]

    @translate_errors
    def list_tags(self) -> dict[str, int]:
        """See `Operations.list_tags`."""
        return dict(self._versions()["tags"])

    @translate_errors
    def create_tag(self, name: str, version: int, *, replace: bool = False) -> None:
        """See `Operations.create_tag`."""
        request = {"name": text("name", name, "release"), "version": version, "replace": replace}
        self._patiently(partial(self._of_first, "tag", request), READ_TIMEOUT, repeatable=replace)

    @translate_errors
    def drop_tag(self, name: str) -> None:
        """See `Operations.drop_tag`."""
        request = {"name": text("name", name, "release")}
        self._patiently(partial(self._of_first, "tag", request), READ_TIMEOUT, repeatable=False)

    def _versions(self) -> dict[str, Any]:
        return dict(self._patiently(partial(self._of_first, "versions", {}), READ_TIMEOUT))

    @translate_errors
    def status(self) -> dict[str, Any]:
        """See `Operations.status`. Merges the statuses of all daemons that answer."""
        router = self.router
        asked = () if router.alone else self._patiently(lambda _: tuple(router.asked()), READ_TIMEOUT)
        answering = router.endpoints if router.alone else asked
        calls = [partial(router.connection(each).act, "status", None, STATUS_TIMEOUT) for each in answering]
        if not calls:
            raise Unavailable(f"no daemon answers at {self.endpoint}; is one running?")
        answers = router.in_parallel(calls)
        found = [answer for answer in answers if not isinstance(answer, MemWalError)]
        if not found:
            raise deciding_failure(answers, repeatable=True, alone=router.alone)
        return merged_status(found)

    @translate_errors
    def applied(self, producer: str, timeout: float = READ_TIMEOUT, *, logged: bool = False) -> Applied:
        """See `Operations.applied`, for all regions. `timeout`: seconds to wait for regions without an owner."""
        request = {"producer": producer, **({"logged": True, "needs": ["logged"]} if logged else {})}
        found = self._patiently(partial(self._of_owners, "applied", request), timeout)
        return Applied.together(Applied(*each[: len(Applied._fields)]) for each in found)

    @translate_errors
    def refresh(self, *, look: bool = True) -> None:
        """Update `schema` to the table's columns. `look`: let a daemon check storage for changed columns first."""
        self._patiently(lambda within: self._describe({"look": True} if look else {}, within), READ_TIMEOUT)

    def close(self) -> None:
        """Close the connections; the daemons keep running."""
        self.router.close()

    # ---- inside --------------------------------------------------------------------------------------------------

    @cached_property
    def splitter(self) -> Splitter:
        """Routes rows. Created when rows first go to several daemons, and again after a change of columns."""
        return Splitter(self.schema, self.key, self._description)

    def _nulls(self, given: Sequence[str], rule: Missing | None) -> dict[str, Any]:
        """Return the fields of a request for columns that its rows lack. Raises: errors of `CallersColumns.nulls`."""
        if not set(given) <= set(self.schema.names):
            return {"nulls": []}  # the owner rejects the unknown column and names it
        try:
            nulls = self._callers_columns.nulls(given, self.schema, self.key, self.required, rule)
        except Invalid:
            self.refresh()  # columns that the rows lack may have been dropped
            nulls = self._callers_columns.nulls(given, self.schema, self.key, self.required, rule)
        return kept_columns(len(given) + len(nulls) < len(self.schema), nulls)

    def _describe(self, request: dict[str, Any], patience: float | None) -> None:
        described = self.router.describe(request, patience)
        self.schema = pa.ipc.read_schema(pa.py_buffer(bytes.fromhex(described["schema"])))
        self.key = tuple(described["key"])
        self.upsert: str = described["upsert"]
        self.version: str = described["version"]
        self.required = tuple(described["required"])
        if "_callers_columns" not in self.__dict__:
            self._callers_columns = CallersColumns(self.schema.names)
        self._description = described
        self.__dict__.pop("splitter", None)

    @property
    def _location(self) -> str:
        return self.router.table or ""

    @property
    def _described(self) -> str:
        return f"{self.router.table} at {self.endpoint}, {len(self.router.regions)} regions"

    def _patiently(
        self, call: Callable[[float], T], limit: float, *, repeatable: bool = True, reads: bool = False
    ) -> T:
        """Return the result of `call`, repeated as `client.retry` decides.

        `call` receives the seconds that it may take.
        """
        router = self.router
        attempts = Attempts(
            router.clock, router.ids, limit, repeatable=repeatable, restarts=self._restarts, reads=reads
        )
        while True:
            seen = router.rounds
            try:
                return call(attempts.patience(alone=router.alone))
            except MemWalError as error:
                self._before_next(attempts, error, seen)

    def _before_next(self, attempts: Attempts, error: MemWalError, seen: int) -> None:
        """Call `Router.before_next`; after a resize, load the table's new routing and its owners."""
        try:
            self.router.before_next(attempts, error, seen)
        except MemWalError as last:
            if last.details.get("reason") != RESIZED or "schema" not in self.__dict__:
                raise
            with suppress(Unavailable):  # the next attempt raises it
                self._describe({}, PROBE_TIMEOUT)
                self.router.learn(self.router.rounds)
            if last.details.get("routing") != self.router.routing or not attempts.left:  # not adopted everywhere yet
                attempts.after(Unavailable(last.message, {"reason": NOT_OWNER}), alone=False)

    def _write(self, rows: pa.Table, request: dict[str, Any], token: Token | None, timeout: float | None) -> Receipt:
        """Send `rows` to their owners. `request`: of the op "write", "delete" or "update", without token, timeout."""
        timeout = seconds("timeout", timeout)
        request = {**request, "token": None if token is None else str(token), "timeout": timeout}
        limit, grace = (WRITE_TIMEOUT, 0.0) if timeout is None else (timeout, ANSWER_TIMEOUT)
        checked = request["op"] != "write" or self._rising.rises(token)
        write = RoutedWrite(self.router, lambda: self.splitter, rows, request, grace, may_go_down=not checked)
        with self._in_flight.of(size_bound(rows), limit):
            try:
                receipt = self._patiently(write.attempt, limit, repeatable=token is not None)
                self._rising.taken(token)
                return receipt
            except MemWalError as error:
                raise write.outcome(error) from None

    def _record(self, token: Token, durable: bool, timeout: float | None) -> list[dict[str, int]]:
        """Record `token` in every region and return the owners' answers. Repeated until it is recorded."""
        request = {"token": str(token), "durable": durable}
        return self._patiently(partial(self._of_owners, "record", request), timeout or WRITE_TIMEOUT)

    def _answer(self, read: str, level: str, /, *, explain: Watch | None = None, **request: Any) -> Any:
        request["level"] = check_level(level)
        rows, sends = None, READS[read].sends
        if sends == "keys":
            rows = normalise_keys(request.pop("keys"), self.schema, self.key)
        elif sends == "vector":
            rows = as_vector(request.pop("vector"))
        return self._patiently(partial(self._read, read, request, _Sent(rows, explain)), READ_TIMEOUT, reads=True)

    def _changes_source(self) -> RemoteChanges:
        return RemoteChanges(lambda call: self._patiently(partial(self._any, call), READ_TIMEOUT, reads=True))

    def _any(self, call: Callable[[Connection, float], T], within: float) -> T:
        """Return the answer to a call that needs no particular owner, from the daemon of the first region."""
        router = self.router
        to, first = router.sole or router.owner(router.regions[0]), router.regions[0]
        return self._all_of([Call(to, [first], partial(call, to, within))])[0]

    def _read(self, read: str, request: dict[str, Any], sent: _Sent, within: float) -> Any:
        if sent.explain is not None:
            sent.explain.again()
        sole = self.router.sole
        if sole is None and request["level"] == "committed":  # needs no owner: any daemon answers for all regions
            sole = self.router.owner(self.router.regions[0])
        if sole is not None:
            make = partial(sole.read, read, request, sent.rows, within, heard(sent.explain, sole.endpoint))
            return self._all_of([Call(sole, self.router.regions, make)])[0]
        kind = READS[read]
        if kind.sends == "keys":
            return self._get(read, sent, request, within)
        answers = self._of_owners(read, with_key(kind, request, self.key), within, sent)
        if kind.counts:
            return sum(answers)
        return merged(kind, answers, request, self.key, whole=sent.explain is not None)

    def _of_owners(self, name: str, request: dict[str, Any], within: float, sent: _Sent | None = None) -> list[Any]:
        """Return the answers of every owner to a read of all regions, or to "flush". Raises: `deciding_failure`."""
        router, (rows, explain) = self.router, sent or (None, None)
        routing = router.routing  # read before the regions: if they change now, the daemons reject this version
        calls: list[Call[Any]] = []
        for endpoint, regions in router.owners(router.regions).items():
            to, asking = router.connection(endpoint), {**request, "regions": regions, "routing": routing}
            reading = partial(to.read, name, asking, rows, told=heard(explain, endpoint))
            make = partial(to.act, name, asking) if name == "flush" else reading
            calls.append(Call(to, regions, partial(make, timeout=within)))
        return self._all_of(calls)

    def _of_first(self, action: str, request: dict[str, Any], within: float) -> Any:
        """Return the answer of the owner of bucket 0, which acts for all regions."""
        first = self.router.regions[0]
        to = self.router.owner(first)
        return self._all_of([Call(to, [first], partial(to.act, action, request, within))])[0]

    def _all_of(self, calls: Sequence[Call[T]]) -> list[T]:
        answers = self.router.answers(calls)
        failed = [answer for answer in answers if isinstance(answer, MemWalError)]
        if failed:
            error = deciding_failure(failed, repeatable=True, alone=self.router.alone)
            ended = [each for failure in failed for each in failure.details.get("ended", ())]
            error.details.update({"ended": ended} if ended else {})
            raise error
        return [answer for answer in answers if not isinstance(answer, MemWalError)]

    def _get(self, read: str, sent: _Sent, request: dict[str, Any], within: float) -> pa.Table:
        """Read each key from the owner of its region."""
        router, splitter, columns, keys = self.router, self.splitter, request["columns"], sent.rows
        assert keys is not None
        buckets = splitter.buckets(keys)
        present = np.unique(buckets).tolist() or [0]
        wanted = None if columns is None else [*dict.fromkeys([*columns, *self.key])]
        calls: list[Call[Any]] = []
        # Regions come from the splitter: the router may have loaded another routing meanwhile.
        for endpoint, regions in router.owners(splitter.regions[bucket] for bucket in present).items():
            mine = [bucket for bucket in present if splitter.regions[bucket] in regions]
            asked, to = keys.filter(pa.array(np.isin(buckets, mine))), router.connection(endpoint)
            asking = {**request, "columns": wanted, "regions": regions, "routing": splitter.routing}
            make = partial(to.read, read, asking, asked, within, heard(sent.explain, endpoint))
            calls.append(Call(to, regions, make))
        found = in_asked_order(self._all_of(calls), keys)
        return found if columns is None else found.select([*dict.fromkeys(columns)])


# ---- changes, and writes by filter: `api.changes` and `api.filter_writes` have the algorithms -----------------------


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


@dataclass(frozen=True, slots=True)
class RoutedFilterWrites:
    """Sends pieces of keys, and tokens, to the owners of their regions. Each of the given senders retries.

    Thread safety. One thread.
    """

    write: Callable[[pa.Table, dict[str, Any], Token | None, float | None], Receipt]
    """Sends a request of the op "delete" or "update"."""
    send_record: Callable[[Token, bool, float | None], Iterable[Mapping[str, int]]]
    """Sends the operation "record"."""
    base_version: Callable[[], int]
    """Returns the newest version of the base table. Raises: errors of a read."""

    def piece(
        self, keys: pa.Table, where: Where, *, durable: bool, token: Token | None, timeout: float | None
    ) -> Receipt:
        """Delete or update those of `keys` whose newest row passes `where`. Raises: errors of `RemoteTable.put`."""
        request = {"op": "delete", "filter": where.filter, "version": where.version, "durable": durable}
        if where.update is not None:
            request |= {"op": "update", "expressions": dict(where.update.expressions)}
            keys = where.update.beside(keys)
        return self.write(keys, request, token, timeout)

    def record(self, token: Token, *, durable: bool, timeout: float | None) -> dict[str, int]:
        """Record `token` in every region and return their WAL positions. Raises: errors of `RemoteTable.put`."""
        return {region: at for owner in self.send_record(token, durable, timeout) for region, at in owner.items()}
