"""A schema registry for tests: a real HTTP server on loopback with the part of Confluent's API that readers use."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from typing import Any

import fastavro


@dataclass
class SchemaRegistry:
    """Schemas by id and by subject; `asked` lists the requests. Thread safety. Any thread."""

    url: str = ""
    user: str = ""
    asked: list[str] = field(default_factory=list)
    schemas: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    @contextmanager
    def started(cls, user: str = "") -> Iterator[SchemaRegistry]:
        """Run a registry inside the context; `user`: required login, "name:password"."""
        registry = cls(user=user)

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, answer = registry.answer(self.path, self.headers.get("Authorization", ""))
                body = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                registry.asked.append(self.path)

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        registry.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield registry
        finally:
            server.shutdown()
            server.server_close()
            thread.join()

    def register(self, schema: dict[str, Any], references: list[dict[str, Any]] | None = None) -> int:
        """Register a schema; return its id. Its subject is `subject-<id>`, version 1; the newest schema is that of the
        values of every topic."""
        self.schemas.append({"schema": json.dumps(schema), "references": references or []})
        return len(self.schemas)

    def encoded(self, number: int, value: Any) -> bytes:
        """Return a value in the format of producers with a registry: 0, the id, Avro."""
        return b"\0" + number.to_bytes(4, "big") + avro(json.loads(self.schemas[number - 1]["schema"]), value)

    def answer(self, path: str, authorization: str) -> tuple[int, dict[str, Any]]:
        """Return status and body for a GET."""
        if self.user and authorization != f"Basic {base64.b64encode(self.user.encode()).decode()}":
            return 401, {"error_code": 401}
        kind, name = path.split("/")[1], path.split("/")[3 if path.startswith("/schemas") else 2]
        number = len(self.schemas) if path.endswith("-value/versions/latest") else int(name.removeprefix("subject-"))
        if kind not in ("schemas", "subjects") or not 0 < number <= len(self.schemas):
            return 404, {"error_code": 40403, "message": "Schema not found"}
        return 200, self.schemas[number - 1]


def avro(schema: dict[str, Any], value: Any) -> bytes:
    """Return plain Avro binary."""
    stream = BytesIO()
    fastavro.schemaless_writer(stream, fastavro.parse_schema(schema), value)
    return stream.getvalue()
