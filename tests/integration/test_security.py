"""Bearer tokens and TLS: which clients get access, which calls are rejected, and that no secret is ever shown."""

from __future__ import annotations

import json
import pickle
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import memwal
from memwal.ingest.service.daemon.serve import check_addresses
from memwal.ingest.service.rpc.credentials import Access
from memwal.ingest.service.rpc.guard import Guard
from memwal.ingest.service.rpc.tls import ClientTls
from memwal.ingest.settings.load import load
from tests.certificates import Certificates
from tests.conftest import PATIENCE, Cli, SmallConfig, Start, WaitUntil
from tests.integration.test_http_edge import fetch, scraped
from tests.messages import raises

TOKEN = "a-token-that-nobody-may-ever-see"
ENV = {"MEMWAL_TEST_TOKEN": TOKEN}
BY_REFERENCE = {"token": "env:MEMWAL_TEST_TOKEN"}
QUIET = {"commit": {"interval": "0s"}, "gc": {"interval": "0s"}}


def serve(start: Start, config: Path) -> tuple[Any, str, str]:
    """Start a daemon with an HTTP edge; return the process, its endpoint, its URL."""
    running = start([sys.executable, "-m", "memwal.ingest.cli.app", "serve", str(config)], env=ENV)
    url = running.line_with("metrics, health and status at").rsplit(" ", 1)[1]
    return running, running.line_with("serving").rsplit(" ", 1)[1], url


def test_only_who_has_the_token_and_knows_the_certificate_is_let_in(
    small_config: SmallConfig, start: Start, certificates: Certificates, made: Any, cli: Cli
) -> None:
    log = {"level": "debug", "format": "json"}
    config = small_config(daemon={"http_port": 0, **certificates.server_only, **BY_REFERENCE}, log=log, **QUIET)
    running, endpoint, url = serve(start, config)
    assert endpoint.startswith("grpc+tls://127.0.0.1:")
    assert url.startswith("https://127.0.0.1:")
    ca = certificates.server_ca.read_bytes()
    for token in (None, "", "another", TOKEN + "x", TOKEN[:-1]):
        with raises(memwal.Invalid):
            memwal.connect(endpoint, token=token, tls_ca=ca)
    for location, authority in ((endpoint, None), (endpoint, Path(certificates.stranger[0]).read_bytes())):
        with raises(memwal.Unavailable):
            memwal.connect(location, token=TOKEN, tls_ca=authority)
    with raises(memwal.Unavailable):
        memwal.connect(endpoint.replace("grpc+tls", "grpc"), token=TOKEN)
    with raises(memwal.Invalid):
        memwal.connect(endpoint, token=TOKEN, tls_ca=certificates.server[1])
    doubtful = {**ENV, "MEMWAL__DAEMON__TLS_CA": certificates.stranger[0]}
    for command in ("status", "flush"):  # a live daemon is not treated as ended, and not fenced
        ran = cli(command, config, env=doubtful)
        assert (ran.code, len(ran.error_lines)) == (2, 1), ran.err
        assert "tls_ca" in ran.err

    with memwal.connect(endpoint, token=TOKEN, tls_ca=str(certificates.server_ca)) as table:
        table.put(made.rows(range(10)))
        assert table.count() == 10
    found = cli("query", config, "--filter", "id < 3", "--columns", "id", "--format", "json", env=ENV)
    assert (found.code, len(json.loads(found.out))) == (0, 3)
    assert endpoint in cli("status", config, "--json", env=ENV).out

    context = certificates.context()
    for path in ("/metrics", "/status", "/health/readyz"):
        for headers in ({}, {"Authorization": "Bearer another"}, {"Authorization": TOKEN}):
            if headers or path != "/health/readyz":
                assert fetch(url + path, context, **headers) == (401, '{"error": "missing or wrong token"}\n')
        assert fetch(url + path, context, Authorization=f"Bearer {TOKEN}")[0] == 200
    assert fetch(f"{url}/health/livez", context)[0] == 200
    assert fetch(f"{url}/health/readyz", context) == (200, '{"ready": true}\n')
    with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
        urllib.request.urlopen(f"{url}/health/livez", timeout=60)

    wrong = cli("query", config, "--filter", "id < 3", env={"MEMWAL_TEST_TOKEN": "another"})
    assert (wrong.code, len(wrong.error_lines)) == (2, 1)
    assert "missing or wrong token" in wrong.error_lines[0]
    shown = cli("config", "show", config, env=ENV)
    assert 'token = "env:MEMWAL_TEST_TOKEN"' in shown.out
    running.process.terminate()
    assert running.wait() == 0
    assert running.lines[-1].startswith("stopped; every acknowledged row is kept")
    said = [json.loads(line) for line in running.errors]
    assert {"claim", "serving", "drain"} <= {each.get("event") for each in said}
    outputs = [*running.lines, *running.errors, found.out, shown.out, wrong.err]
    assert not any(TOKEN in each for each in outputs)


def test_daemons_that_share_a_table_let_each_other_in(
    small_config: SmallConfig, start: Start, certificates: Certificates, made: Any
) -> None:
    config = small_config(
        daemon={"workers": 2, **certificates.server_only, **BY_REFERENCE}, regions={"count": 4}, **QUIET
    )
    running = start([sys.executable, "-m", "memwal.ingest.cli.app", "serve", str(config)], env=ENV)
    endpoint = running.line_with("serving").rsplit(" ", 1)[1]
    with memwal.connect(endpoint, token=TOKEN, tls_ca=certificates.server_ca.read_bytes()) as table:
        table.put(made.rows(range(40)))
        assert table.count() == 40
        status = table.status()
        assert len(status["regions"]) == 4
        assert {region["owner"] for region in status["regions"]} <= set(table.endpoint.split(","))
    running.process.terminate()
    assert running.wait() == 0
    assert not any("cannot look at the daemon" in line or TOKEN in line for line in running.errors)


def test_a_pipeline_reaches_its_daemon_through_both(
    small_config: SmallConfig,
    start: Start,
    certificates: Certificates,
    tmp_path: Path,
    made: Any,
    wait_until: WaitUntil,
) -> None:
    """The sink's tasks, the driver, and the driver's own HTTP edge, which requires the same token."""
    (tmp_path / "in").mkdir()
    for number in range(2):
        pq.write_table(made.table(range(number * 20, number * 20 + 20)), tmp_path / "in" / f"{number}.parquet")
    config = small_config(
        daemon=certificates.server_only | BY_REFERENCE,
        sink={"http_port": 0},
        source={"path": str(tmp_path / "in")},
        log={"level": "info", "format": "json"},
    )
    running = start([sys.executable, "-m", "memwal.ingest.cli.app", "run", str(config)], env=ENV)
    url = running.line_with("metrics, health and status at").rsplit(" ", 1)[1]
    context, headers = certificates.context(), {"Authorization": f"Bearer {TOKEN}"}

    def told(name: str) -> float:
        return scraped(url, context, **headers)(name)

    assert fetch(f"{url}/metrics", context)[0] == 401
    wait_until(lambda: told("memwal_run_rows_total") == 40, timeout=3 * PATIENCE, every=0.5)  # Spark's start takes long
    wait_until(lambda: told("memwal_run_queryable_seconds_count") == 40)  # the last counter of a micro-batch
    assert told("memwal_run_micro_batches_total") == told("memwal_run_batch_id") + 1 == 2
    assert told("memwal_run_ack_seconds_count") == 4
    assert told("memwal_source_lag_seconds") > 0
    assert told("memwal_run_last_batch_timestamp_seconds") > 0
    assert fetch(f"{url}/health/readyz", context, **headers) == (200, '{"ready": true, "reasons": []}\n')
    status = json.loads(fetch(f"{url}/status", context, **headers)[1])
    assert (status["rows"], status["micro_batches"], status["not_ready"]) == (40, 2, [])
    assert fetch(f"{url}/live", context)[0] == 401

    def shown() -> Any:
        """Return the data of the page at / once the daemon has reported the newest rows, else None."""
        found = json.loads(fetch(f"{url}/live", context, **headers)[1])
        return found if sum(region["memtable_rows"] for region in found["regions"]) == 40 else None

    live = wait_until(shown)
    assert (live["kind"], live["run"]["rows"], live["health"]["state"]) == ("run", 40, "healthy")
    assert {region["owner"] for region in live["regions"]} == {daemon["endpoint"] for daemon in live["daemons"]}
    asked = json.dumps({"filter": "id < 5", "limit": 10}).encode()
    request = urllib.request.Request(f"{url}/query", asked, {**headers, "Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60, context=context) as answer:
        assert len(json.loads(answer.read())["rows"]) == 5, "the run's daemon answers"
    running.process.terminate()
    assert running.wait() == 0, running.errors
    assert not any(TOKEN in line for line in (*running.lines, *running.errors))


# ---- rejected settings and calls -----------------------------------------------------------------------------------


def test_an_address_that_others_reach_needs_token_and_tls(
    small_config: SmallConfig, certificates: Certificates
) -> None:
    everything = certificates.server_only | BY_REFERENCE
    for names in ((), ("token",), ("tls_cert", "tls_key")):
        given = {name: everything[name] for name in names}
        settings = load(small_config(f"{len(names)}.toml", daemon={"host": "0.0.0.0", **given}), ENV)
        with raises(memwal.Invalid) as refused:
            check_addresses(settings, ENV)
        assert all(name in str(refused.value) for name in ("daemon.token", "daemon.tls_cert", "daemon.tls_key"))
    guard = check_addresses(load(small_config(daemon={"host": "0.0.0.0", **everything}), ENV), ENV)
    assert guard.complete
    assert TOKEN not in repr(guard)


@pytest.mark.parametrize(
    "daemon",
    [
        {"token": TOKEN},
        {"token": "env:"},
        {"tls_cert": "a.pem"},
        {"tls_key": "a.pem"},
        {"endpoints": ["https://host:1"]},
    ],
)
def test_settings_that_are_wrong_are_refused_and_no_secret_repeated(
    daemon: dict[str, Any], small_config: SmallConfig
) -> None:
    with raises(memwal.Invalid) as refused:
        load(small_config(daemon=daemon), {})
    assert TOKEN not in str(refused.value)


def test_what_references_and_files_hold_is_checked_before_anything_is_claimed(
    small_config: SmallConfig, certificates: Certificates, tmp_path: Path
) -> None:
    empty = tmp_path / "empty"
    empty.write_text(" \n")
    for changes, environ in (
        ({}, {}),
        ({"token": f"file:{empty}"}, {}),
        ({"tls_key": str(certificates.server_ca)}, ENV),
        ({"tls_cert": str(tmp_path / "none.pem")}, ENV),
    ):
        settings = load(small_config(daemon={**certificates.server_only, **BY_REFERENCE, **changes}), {})
        with raises(memwal.Invalid):
            Guard.of(settings.daemon, environ)


def test_a_token_travels_by_reference_and_never_in_clear(
    small_config: SmallConfig, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = load(small_config(daemon=certificates.server_only | BY_REFERENCE), ENV)
    access = Access.of(settings)
    pickled = pickle.dumps((settings, access))
    assert TOKEN.encode() not in pickled
    assert pickle.loads(pickled)[1] == access
    assert access.options(ENV) == {"token": TOKEN, "tls": ClientTls(certificates.server_ca.read_bytes())}
    assert Access().options({}) == {"token": None, "tls": ClientTls()}
    with raises(memwal.Invalid) as refused:
        memwal.connect(["grpc://127.0.0.1:1", "grpc://10.0.0.1:1"], token=TOKEN)
    assert TOKEN not in str(refused.value)
