"""Trace headers on Flight calls: `traceparent` and `tracestate` of the W3C, as OpenTelemetry writes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow.flight as flight

from memwal.ingest import tracing

_NAME = "trace"


def sent_headers() -> list[tuple[bytes, bytes]]:
    """Return the headers to send with a call, so that the daemon's spans become children of this process's span."""
    return [(name.encode(), value.encode()) for name, value in tracing.headers()]


def received(context: flight.ServerCallContext) -> tracing.Headers:
    """Return the headers that a server received with a call."""
    found = context.get_middleware(_NAME)
    return () if found is None else found.headers


def taking_headers(options: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a Flight server, with the middleware that `received` needs if tracing is on."""
    if not tracing.on:
        return options
    return {**options, "middleware": {**options.get("middleware", {}), _NAME: _TraceFactory()}}


class _Trace(flight.ServerMiddleware):  # type: ignore[misc]
    """Holds the headers of a call."""

    def __init__(self, headers: tracing.Headers) -> None:
        super().__init__()
        self.headers = headers


class _TraceFactory(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    def start_call(self, _info: flight.CallInfo, headers: Mapping[str, list[str | bytes]]) -> _Trace:
        given = ((name.lower(), values[0]) for name, values in headers.items() if values)
        return _Trace(tuple((name, _text(value)) for name, value in given if name in tracing.FIELDS))


def _text(value: str | bytes) -> str:
    return value.decode("ascii", "replace") if isinstance(value, bytes) else value
