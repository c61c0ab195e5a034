"""An OpenTelemetry collector on loopback: it receives spans over OTLP/HTTP and keeps them."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class Span:
    """An exported span. Ids are hexadecimal; `parent` is "" for a root."""

    name: str
    service: str
    trace: str
    id: str
    parent: str
    kind: int
    failed: bool
    attributes: dict[str, Any]


@dataclass
class Collector:
    """The exports received so far."""

    url: str
    bodies: list[bytes] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)

    def named(self, name: str) -> list[Span]:
        """Return the spans with a name."""
        return [span for span in list(self.spans) if span.name == name]

    def take(self, body: bytes) -> None:
        """Decode an export."""
        self.bodies.append(body)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            service = _values(resource.resource.attributes)["service.name"]
            for scope in resource.scope_spans:
                self.spans += [_span(each, service) for each in scope.spans]


@contextmanager
def collecting() -> Iterator[Collector]:
    """Run a collector inside the context."""
    collector = Collector("")

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            assert self.path == "/v1/traces"
            collector.take(gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body)
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *told: object) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector.url = f"http://127.0.0.1:{server.server_port}"
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            yield collector
        finally:
            server.shutdown()
            serving.join()


def _span(each: Any, service: str) -> Span:
    ids = (each.trace_id.hex(), each.span_id.hex(), each.parent_span_id.hex())
    return Span(each.name, service, *ids, each.kind, each.status.code == 2, _values(each.attributes))


def _values(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}
