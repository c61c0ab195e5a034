"""A place for one table on a separate S3 server, behind a proxy that counts requests, delays them and injects faults.

with on_s3(directory, latency=0.02) as place:
    config.write_text(toml({"table": {**place.section, "key": ["id"]}}))  # processes get `place.environ`
    …
    print(place.counted())
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests import fault_proxy as faults
from tests.fault_proxy import FaultProxy
from tests.s3_server import S3Server

BUCKET = "memwal-place"
SECRETS = {"access_key_id": "S3_PLACE_KEY", "secret_access_key": "S3_PLACE_SECRET"}
"""Storage options that a configuration only refers to, with the variables that contain them."""


@dataclass(frozen=True)
class Place:
    """The place of a table: on local disk, without options, or on S3."""

    uri: str
    options: Mapping[str, str] = field(default_factory=dict)
    """The table's storage options in this process: directly to the server, without the proxy."""
    proxy: FaultProxy | None = None

    @property
    def section(self) -> dict[str, Any]:
        """The [table] settings of the place."""
        if not self.options:
            return {"uri": self.uri}
        options = {**self.options, **{option: f"env:{name}" for option, name in SECRETS.items()}}
        return {"uri": self.uri, "storage_options": options | ({"endpoint": self.proxy.endpoint} if self.proxy else {})}

    @property
    def environ(self) -> dict[str, str]:
        """Environment variables that processes need."""
        return {name: self.options[option] for option, name in SECRETS.items() if option in self.options}

    def counted(self) -> Counter[str]:
        """Return the number of requests so far, by method."""
        return Counter(each.method for each in self.proxy.requests) if self.proxy else Counter()

    def failed(self) -> Counter[str]:
        """Return the number of failed requests, by fault."""
        return Counter(each.fault for each in self.proxy.requests if each.fault) if self.proxy else Counter()

    def hurt(self, share: float) -> None:
        """Fail this share of all requests from now on, each in one of storage's ways to fail."""
        assert self.proxy is not None
        ways = (
            faults.answers(503, "SlowDown"),
            faults.answers(500, "InternalError"),
            faults.resets(),
            faults.lands_then_resets(),
            faults.lands_then_answers(500, "InternalError"),
            faults.slow(1.0),
        )
        for fault in ways:
            self.proxy.inject(fault, times=None, share=share / len(ways))
        conflict = faults.answers(409, "ConditionalRequestConflict")  # of a request with a condition
        self.proxy.inject(conflict, method="PUT", key="/(wal|manifest)/", times=None, share=share)


@contextmanager
def on_s3(directory: Path, latency: float = 0.0, *, proxied: bool = True) -> Iterator[Place]:
    """Run a server and a proxy inside the context; every request takes `latency` seconds longer.

    `proxied` False: no proxy, which costs about as much processor time as the requests that it passes on.
    """
    with ExitStack() as stack:
        server = stack.enter_context(S3Server.started(directory / "s3"))
        server.make_bucket(BUCKET)
        proxy = stack.enter_context(FaultProxy(server.endpoint)) if proxied else None
        if proxy is not None:
            proxy.latency = latency
        yield Place(f"s3://{BUCKET}/table.lance", server.storage_options, proxy)
