"""Calls of a daemon without memwal's client."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight

from memwal.ingest.service.rpc.exchange import command_of, exchanged, message_of, rows_of
from memwal.ingest.service.rpc.wire import pack


def message_from(
    client: flight.FlightClient, op: str, request: Mapping[str, Any], options: flight.FlightCallOptions | None = None
) -> Any:
    """Return the message that answers an operation."""
    command = command_of(op, request)
    return exchanged(client, command, options or flight.FlightCallOptions(), lambda _, reader: message_of(reader))


def rows_from(
    client: flight.FlightClient, op: str, request: Mapping[str, Any], options: flight.FlightCallOptions | None = None
) -> pa.Table:
    """Return the rows that answer an operation."""
    command = command_of(op, request)
    return exchanged(client, command, options or flight.FlightCallOptions(), lambda _, reader: rows_of(reader))


def raw(
    client: flight.FlightClient, command: bytes, options: flight.FlightCallOptions, sent: pa.Table | None
) -> list[Any]:
    """Send a command, and rows without a closing message, and return all parts of the answer."""

    def take(writer: Any, reader: Any) -> list[Any]:
        if sent is not None:
            writer.begin(sent.schema)
            writer.write_table(sent)
        writer.done_writing()
        return list(reader)

    return exchanged(client, command, options, take)


def answer_to_version_1(client: flight.FlightClient, action: str, request: Mapping[str, Any]) -> Any:
    """Return the answer to an action, as processes with version 1 of the protocol send it."""
    (answer,) = client.do_action(flight.Action(action, pack(request)))
    return json.loads(answer.body.to_pybytes())
