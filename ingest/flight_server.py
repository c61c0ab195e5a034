"""The daemon's Arrow Flight service: a `Table` behind five kinds of call.

DoPut      {"op": "put", "region", "producer", "sequence"}  rows of one region, all or none (the Spark sink)
           {"op": "write", "delete", "durable", "token", "timeout"}    rows or keys of any number of regions
DoGet      {"op": "get" | "scan" | "search" | "match", …}   the read's result
DoAction   "count" | "status" | "flush" | "commit" | "schema"   JSON in, JSON out
           "schema" {"look": true}     looks first whether somebody changed the table's columns
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import wraps
from typing import Any, TypeVar
from uuid import UUID

import pyarrow as pa
import pyarrow.flight as flight

from ingest.errors import Invalid, classify
from ingest.flight_wire import closed_rows, raise_over_flight, unpack
from ingest.security import Guard
from ingest.table import Table
from ingest.tokens import Token

T = TypeVar("T")


def _answering(method: Callable[..., T]) -> Callable[..., T]:
    """Let a handler's errors reach the client with their kind."""

    @wraps(method)
    def wrapped(*args: Any) -> T:
        try:
            return method(*args)
        except Exception as error:
            raise_over_flight(classify(error))
            raise

    return wrapped


class FlightService(flight.FlightServerBase):  # type: ignore[misc]
    """Serves one table.

    Thread safety. gRPC calls the handlers from many threads; `Table` takes them all.
    """

    def __init__(self, table: Table, location: str, guard: Guard | None = None) -> None:
        """Listen at `location`, such as grpc://127.0.0.1:0, for those that `guard` admits.

        Raises: OSError when the port is taken.
        """
        super().__init__(location, **(guard or Guard()).flight_options())
        self._table = table

    @_answering
    def do_put(
        self,
        _context: flight.ServerCallContext,
        descriptor: flight.FlightDescriptor,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.FlightMetadataWriter,
    ) -> None:
        request, _ = unpack(descriptor.command)
        rows = _read_closed(reader)
        writer.write(json.dumps(self._write(request, rows)).encode())

    @_answering
    def do_get(self, _context: flight.ServerCallContext, ticket: flight.Ticket) -> flight.RecordBatchStream:
        request, rows = unpack(ticket.ticket)
        return flight.RecordBatchStream(self._read(request, rows))

    @_answering
    def do_action(self, _context: flight.ServerCallContext, action: flight.Action) -> Iterator[bytes]:
        request, _ = unpack(action.body.to_pybytes())
        return iter([json.dumps(self._act(action.type, request), default=str).encode()])

    def _write(self, request: dict[str, Any], rows: pa.Table) -> dict[str, Any]:
        if request["op"] == "put":
            token = Token(request["producer"], request["sequence"])
            return asdict(self._table.put_region(UUID(request["region"]), rows, token))
        write = self._table.delete if request["delete"] else self._table.put
        options = {"durable": request["durable"], "timeout": request.get("timeout")}
        return asdict(write(rows, token=Token.parse(request["token"]), **options))

    def _read(self, request: dict[str, Any], rows: pa.Table | None) -> pa.Table:
        op = request.pop("op")
        if op == "get":
            return self._table.get(rows, **request)
        if op == "search" and rows is not None:
            return self._table.search(vector=rows.column(0).combine_chunks(), **request)
        if op in ("scan", "match"):
            reads: dict[str, Callable[..., pa.Table]] = {"scan": self._table.scan, "match": self._table.match}
            return reads[op](**request)
        raise Invalid(f"unknown read {op!r}")

    def _act(self, name: str, request: dict[str, Any]) -> Any:
        if name == "count":
            return self._table.count(**request)
        if name == "status":
            return self._table.status()
        if name == "flush":
            return self._table.flush()
        if name == "commit":
            return asdict(self._table.commit())
        if name == "schema":
            if request.get("look"):  # the caller has columns that it does not know
                self._table.look()
            base = self._table.base
            return {
                "schema": base.schema.serialize().to_pybytes().hex(),
                "key": list(base.key),
                "identity": self._table.identity,
                "upsert": self._table.upsert,
            }
        raise Invalid(f"unknown action {name!r}")


def _read_closed(reader: flight.MetadataRecordBatchReader) -> pa.Table:
    """All rows of a DoPut stream. Raises: Invalid when it ended without its closing message."""
    batches: list[pa.RecordBatch] = []
    promised: int | None = None
    for chunk in reader:
        if chunk.data is not None and chunk.data.num_rows:
            batches.append(chunk.data)
        promised = closed_rows(chunk.app_metadata)
    rows = pa.Table.from_batches(batches, reader.schema)
    if promised != rows.num_rows:
        raise Invalid(f"the stream ended after {rows.num_rows} rows without being closed; nothing was applied")
    return rows
