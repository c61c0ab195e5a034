"""Mutual TLS: daemons that require a client certificate, and every memwal process that presents one."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import ssl
import sys
import urllib.error
from pathlib import Path
from typing import Any

import pyarrow.flight as flight
import pyarrow.parquet as pq
import pytest

import memwal
from memwal.ingest.errors import denies_access
from memwal.ingest.service.rpc import tls
from memwal.ingest.service.rpc.credentials import Access
from memwal.ingest.service.rpc.guard import Guard
from memwal.ingest.settings.load import load
from tests.certificates import Certificates, Pair
from tests.cluster import spread, start_daemon
from tests.conftest import PATIENCE, Cli, SmallConfig, Start, WaitUntil
from tests.integration.test_http_edge import fetch
from tests.messages import raises
from tests.spark_cluster import quick

REGIONS = 4
QUIET = {"commit": {"interval": "0s"}, "gc": {"interval": "0s"}}


def test_a_client_is_let_in_by_its_certificate_alone_and_told_why_not(
    small_config: SmallConfig, start: Start, certificates: Certificates, made: Any, cli: Cli
) -> None:
    config = small_config(daemon={"http_port": 0, **certificates.daemon}, **QUIET)
    running = start([sys.executable, "-m", "memwal.ingest.cli.app", "serve", str(config)])
    url = running.line_with("metrics, health and status at").rsplit(" ", 1)[1]
    endpoint = running.line_with("serving").rsplit(" ", 1)[1]

    def connected(presented: Pair | None) -> Any:
        tls = {} if presented is None else {"tls_cert": presented[0], "tls_key": presented[1]}
        return memwal.connect(endpoint, tls_ca=certificates.server_ca, **tls)

    for presented in (
        None,
        certificates.stranger,
        certificates.expired,
        (certificates.client[0], certificates.stranger[1]),
        (certificates.client[0], "absent.key"),
        (str(certificates.place / "absent.pem"), certificates.client[1]),
    ):
        with raises(memwal.Invalid):
            connected(presented)
    with raises(memwal.Invalid):
        memwal.connect(endpoint, tls_ca=certificates.server_ca, tls_cert=certificates.client[0])

    with connected(certificates.client) as table:
        table.put(made.rows(range(10)))
        assert table.count() == 10
    assert asyncio.run(_counted(endpoint, certificates)) == 10

    found = cli("query", config, "--filter", "id < 3", "--columns", "id", "--format", "json")
    assert (found.code, len(json.loads(found.out))) == (0, 3)
    assert endpoint in cli("status", config, "--json").out
    strangers = dict(zip(("CERT", "KEY"), certificates.stranger, strict=True))
    doubtful = {f"MEMWAL__DAEMON__TLS_CLIENT_{name}": path for name, path in strangers.items()}
    for command in ("status", "flush"):  # a live daemon is not treated as ended, and not fenced
        ran = cli(command, config, env=doubtful)
        assert (ran.code, len(ran.error_lines)) == (2, 1), ran.err
        assert "does not accept the client certificate" in ran.err
    assert cli("flush", config).code == 0

    for path, without in (("/health/livez", 200), ("/health/readyz", 200), ("/metrics", 403), ("/status", 403)):
        assert fetch(url + path, certificates.context(None))[0] == without, path
        assert fetch(url + path, certificates.context(certificates.client))[0] == 200
        with pytest.raises((urllib.error.URLError, ssl.SSLError, ConnectionError)):
            fetch(url + path, certificates.context(certificates.stranger))
    running.process.terminate()
    assert running.wait() == 0


async def _counted(endpoint: str, certificates: Certificates) -> int:
    certificate, key = certificates.client
    connecting = memwal.connect_async(endpoint, tls_ca=certificates.server_ca, tls_cert=certificate, tls_key=key)
    async with await connecting as table:
        return int(await table.count())


def test_daemons_hand_over_to_each_other(
    small_config: SmallConfig, start: Start, certificates: Certificates, made: Any, wait_until: WaitUntil
) -> None:
    endpoints = spread(2, REGIONS, "grpc+tls")
    # a daemon uses its certificate as a client too
    daemon = {**certificates.server_only, "tls_client_ca": str(certificates.server_ca)}
    config = small_config(regions={"count": REGIONS}, daemon={**daemon, "endpoints": endpoints}, **QUIET)
    first, second = (start_daemon(start, config, endpoint) for endpoint in endpoints)
    for running in (first, second):
        running.line_with("serving")
    tls = {"tls_ca": certificates.server_ca, "tls_cert": daemon["tls_cert"], "tls_key": daemon["tls_key"]}
    with memwal.connect(endpoints, **tls) as table:
        table.put(made.rows(range(40)))
        assert {region["owner"] for region in table.status()["regions"]} == set(endpoints)
        first.process.terminate()
        assert first.wait() == 0
        wait_until(lambda: {region["owner"] for region in table.status()["regions"]} == {endpoints[1]})
        table.put(made.rows(range(40, 60)))
        assert table.count() == 60
    second.process.terminate()
    assert second.wait() == 0
    assert not any("cannot look at the daemon" in line for line in (*first.errors, *second.errors))


def test_a_daemon_tells_why_it_cannot_look_at_its_peer_and_leaves_it_its_regions_at_first(
    small_config: SmallConfig, start: Start, certificates: Certificates, wait_until: WaitUntil
) -> None:
    """A peer that rejects the certificate counts as alive: its regions are not taken over like
    those of an ended peer.
    """
    from memwal.ingest.service.daemon.peers import Answer, Peer

    endpoints, seen = spread(2, REGIONS, "grpc+tls"), []
    config = small_config(regions={"count": REGIONS}, daemon={**certificates.daemon, "endpoints": endpoints}, **QUIET)
    start_daemon(start, config, endpoints[0]).line_with("serving")
    access = Access("", str(certificates.server_ca), *certificates.stranger)

    def checked(_: Peer, *told: Answer | bool | None) -> float:
        seen.append(told)
        return 0.25

    peer = Peer(endpoints[0], endpoints[1], "t", checked, access)
    try:
        wait_until(lambda: (None, False) in seen)
        assert peer.denies
    finally:
        peer.stop()
    assert (None, True) not in seen


def test_daemons_on_spark_and_the_sink_on_its_executors_present_theirs(
    small_config: SmallConfig, certificates: Certificates, tmp_path: Path, made: Any, cli: Cli
) -> None:
    (tmp_path / "in").mkdir()
    pq.write_table(made.table(range(40)), tmp_path / "in" / "0.parquet")
    config = small_config(
        daemon={**certificates.daemon, "on_spark": 2},
        regions={"count": REGIONS},
        source={"path": str(tmp_path / "in"), "spark": quick("local-cluster[2,2,1024]")},
    )
    ran = cli("run", config, "--once", process=True, timeout=3 * PATIENCE)
    assert ran.code == 0, ran.err
    assert "cannot look at the daemon" not in ran.err
    found = cli("query", config, "--limit", "100", "--columns", "id", "--format", "json")
    assert sorted(row["id"] for row in json.loads(found.out)) == list(range(40))


@pytest.mark.parametrize("listens", [True, False])
def test_who_takes_a_connection_and_does_not_answer_lives(listens: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped or overloaded daemon counts as alive: its regions are not taken over at once."""
    monkeypatch.setattr(tls, "_PROBE_TIMEOUT", 0.2)
    closed = flight.FlightUnavailableError("failed to connect to all addresses; last error: Socket closed")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        if not listens:
            server.close()
        error = tls.NO_TLS.translated(closed, f"grpc+tls://127.0.0.1:{port}")
    assert isinstance(error, memwal.Unavailable)
    assert denies_access(error) == listens


# ---- rejected settings ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "daemon",
    [
        {"tls_client_ca": "ca.pem"},
        {"tls_client_cert": "a.pem"},
        {"tls_client_key": "a.pem"},
    ],
)
def test_settings_that_do_not_fit_together(daemon: dict[str, Any], small_config: SmallConfig) -> None:
    with raises(memwal.Invalid):
        load(small_config(daemon=daemon), {})


def test_files_are_checked_before_anything_is_claimed(
    small_config: SmallConfig, certificates: Certificates, cli: Cli, uri: str
) -> None:
    broken = certificates.place / "broken.pem"
    broken.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    expired = dict(zip(("tls_client_cert", "tls_client_key"), certificates.expired, strict=True))
    for changes, said in (
        ({"tls_client_ca": "absent.pem"}, "daemon.tls_client_ca: absent.pem: No such file"),
        ({"tls_client_ca": certificates.client[1]}, "has no certificate in PEM"),
        ({"tls_client_ca": str(broken)}, "broken.pem is not the certificate of a CA in PEM form"),
        ({"tls_client_key": certificates.server[1]}, "must be a certificate and its key"),
        (expired, "daemon.tls_client_cert: .*: certificate has expired"),
    ):
        config = small_config(daemon={**certificates.daemon, **changes})
        ran = cli("config", "check", config)
        assert (ran.code, len(ran.error_lines)) == (2, 1), ran
        assert re.search(said, ran.err), ran
        ran = cli("doctor", config)
        assert ran.code != 0
        assert re.search(said, " ".join((ran.out + ran.err).split())), ran
        ran = cli("serve", config, process=True, timeout=PATIENCE)  # otherwise it would serve forever
        assert (ran.code, len(ran.error_lines)) == (2, 1), ran
        assert re.search(said, ran.err), ran
        assert not Path(uri).exists()


def test_what_a_process_presents(small_config: SmallConfig, certificates: Certificates) -> None:
    settings = load(small_config(daemon=certificates.daemon), {})
    tls = Access.of(settings).options({})["tls"]
    assert tls.certificate == Path(certificates.client[0]).read_bytes()
    assert "PRIVATE" not in repr(tls)
    assert "BEGIN" not in repr(Guard.of(settings.daemon, {}))
    assert Access.of(load(small_config(daemon=certificates.server_only), {})).options({})["tls"].certificate is None
