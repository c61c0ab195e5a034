"""Fixtures: the S3 server, a place on it for one test, and a proxy that injects faults."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from unittest.mock import patch

import pytest

from tests.fault_proxy import FaultProxy
from tests.s3_server import S3Server

BUCKET = "memwal-tests"
_numbers = itertools.count(1)


@dataclass(frozen=True)
class S3Table:
    """Place of a test's table on the S3 server; the table does not exist yet."""

    uri: str
    storage_options: dict[str, str]

    def __iter__(self) -> Iterator[object]:
        """Allow `uri, storage_options = s3_table`."""
        return iter((self.uri, self.storage_options))


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """Run a real S3 server on loopback, for all tests of the run, with the bucket `memwal-tests`."""
    with S3Server.started(tmp_path_factory.mktemp("s3")) as server:
        server.make_bucket(BUCKET)
        yield server


@pytest.fixture
def s3_table(s3_server: S3Server) -> S3Table:
    """Return a URI on the S3 server that no other test uses, and its storage options."""
    return S3Table(f"s3://{BUCKET}/{next(_numbers)}/table.lance", s3_server.storage_options)


@pytest.fixture(scope="session")
def _proxy(s3_server: S3Server) -> Iterator[FaultProxy]:
    with FaultProxy(s3_server.endpoint) as proxy:
        yield proxy


@pytest.fixture
def fault_proxy(_proxy: FaultProxy) -> Iterator[FaultProxy]:
    """Return a proxy in front of the S3 server, without rules and with an empty log."""
    yield _proxy
    _proxy.heal()
    _proxy.forget()


@pytest.fixture
def retries_at_once() -> Iterator[None]:
    """Let memwal's S3 client retry as often as usual, but without pauses, which last up to 1 s, then up to 2 s."""
    from botocore.retries.standard import ExponentialBackoff  # imported here: every test process loads this module

    with patch.object(ExponentialBackoff, "delay_amount", lambda *_: 0.0):
        yield


@pytest.fixture
def s3_table_through_proxy(s3_table: S3Table, s3_server: S3Server, fault_proxy: FaultProxy) -> S3Table:
    """Return the same as `s3_table`, through the proxy: the same objects, with the injected faults."""
    return S3Table(s3_table.uri, s3_server.options_at(fault_proxy.endpoint))
