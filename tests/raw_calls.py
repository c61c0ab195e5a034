"""Calls of a daemon without memwal's client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight

from memwal.ingest.service.rpc.exchange import command_of, exchanged, message_of, rows_of


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
