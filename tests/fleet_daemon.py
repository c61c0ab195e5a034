"""A daemon of a fleet with HTTP, in a process of its own."""

from __future__ import annotations

import http.client
import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

import memwal

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), ("v", pa.float64())])


class FleetDaemon:
    """Tables named in a prefix, served by one daemon."""

    def __init__(
        self,
        folder: Path,
        names: Sequence[str],
        start: Callable[..., Any],
        settings: str = "",
        env: Mapping[str, str] | None = None,
        broken: Sequence[str] = (),
    ) -> None:
        """Create the tables, empty and with one region, and serve them. `settings`: more TOML. `broken`: names of
        tables that lack their versions, and so cannot be opened."""
        prefix = folder / "tables"
        prefix.mkdir()
        first = prefix / f"{names[0]}.lance"
        memwal.open(first, schema=SCHEMA, key="id", regions=1).close()
        for name in (*names[1:], *broken):
            shutil.copytree(first, prefix / f"{name}.lance")
        for name in broken:
            shutil.rmtree(prefix / f"{name}.lance" / "_versions")
        config = folder / "fleet.toml"
        config.write_text(f"""{settings}
[table]
key = ["id"]
columns = {{ id = "int64", v = "float64" }}
[fleet]
prefix = "{prefix}"
[commit]
interval = "0s"
[gc]
interval = "0s"
""")
        self.prefix = prefix
        self.running = start([sys.executable, "-m", "memwal.ingest.cli.app", "serve", str(config)], env=env)
        self.url = self.running.line_with("metrics, health and status at").split()[-1]
        self.endpoint = self.running.line_with("serving").split()[-1]

    def connect(self, name: str, token: str | None = None) -> Any:
        """Return a client of a table."""
        return memwal.connect(self.endpoint, table=name, token=token)

    def ask(self, method: str, path: str, body: Any = None, token: str | None = None, **more: str) -> tuple[int, Any]:
        """Send a request; return the status and the body, parsed if it is JSON. `more`: headers."""
        connection = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=60)
        headers = {"Content-Type": "application/json"} if body is not None else {}
        headers |= {name.replace("_", "-"): value for name, value in more.items()}
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            text = answer.read()
            is_json = answer.headers["Content-Type"] == "application/json"
            return answer.status, json.loads(text) if is_json else text.decode()
        finally:
            connection.close()

    def get(self, path: str, token: str | None = None) -> Any:
        """Return the body of a page that is answered with status 200."""
        status, body = self.ask("GET", path, token=token)
        assert status == 200, body
        return body

    def names(self, query: str = "", token: str | None = None) -> list[str]:
        """Return the names that /tables returns."""
        return [each["name"] for each in self.get(f"/tables?{query}", token)["tables"]]
