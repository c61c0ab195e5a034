"""The S3 store: the contract on a real server, options, the meaning of each answer, and the requests on the wire."""

from __future__ import annotations

import json
import os
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from botocore import exceptions as boto

from memwal.ingest.settings.load import load
from memwal.ingest.settings.reference import render_settings
from memwal.wal import ObjectStore, PutOutcome, StoreRefused, StoreUnavailable, SystemIds, open_store, probe
from memwal.wal.store.s3_answers import Meaning, meaning_of
from memwal.wal.store.s3_options import S3Options, read_options
from tests import fault_proxy as faults
from tests.conftest import wait_until
from tests.messages import raises
from tests.unit.test_wal_store import StoreContract

ROOT = Path(__file__).resolve().parents[2]
KEY = "_mem_wal/r/wal/0001.lance"
HTTP = {"endpoint": "http://127.0.0.1:9", "allow_http": "true"}
KEYS = {"access_key_id": "AKIAEXAMPLE", "secret_access_key": "very-secret-words"}


class TestS3Store(StoreContract):
    @pytest.fixture
    def store(self, s3_table: Any) -> ObjectStore:
        return open_store(s3_table.uri, s3_table.storage_options)

    def test_a_listing_of_several_pages_is_whole(self, store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
        names = [f"many/{number}/x" for number in range(17)]
        for name in names:
            store.put_if_absent(name, b"")
        monkeypatch.setattr("memwal.wal.store.s3._PAGE", 5)
        assert sorted(store.list("many/")) == sorted(names)
        assert len(store.children("many/")) == 17

    def test_names_with_blanks_and_percent_signs(self, s3_table: Any) -> None:
        encoded = open_store(f"{s3_table.uri}/a%20b", s3_table.storage_options)
        encoded.put_if_absent("x", b"1")
        assert open_store(f"{s3_table.uri}/a b/", s3_table.storage_options).get("x") == b"1"

    def test_time_of_writing_is_the_servers(self, store: ObjectStore) -> None:
        store.put_if_absent("now", b"")
        assert abs(store.describe("now")[0].modified - time.time()) < 60


# ---- options ---------------------------------------------------------------------------------------------------------


def options(given: dict[str, str], environ: dict[str, str] | None = None) -> S3Options:
    return read_options(given, "bucket", environ or {})


def test_names_in_any_case_with_and_without_prefix() -> None:
    plain = options(HTTP | KEYS | {"region": "eu-west-1", "session_token": "t"})
    loud = {"AWS_ENDPOINT_URL": HTTP["endpoint"], "AWS_ALLOW_HTTP": "TRUE", "AWS_REGION": "eu-west-1", "Token": "t"}
    assert options(loud | {f"aws_{name}": value for name, value in KEYS.items()}) == options(
        {**HTTP, **KEYS, "allow_http": "TRUE", "default_region": "eu-west-1", "aws_session_token": "t"}
    )
    assert (plain.endpoint, plain.region, plain.session_token) == (HTTP["endpoint"], "eu-west-1", "t")


def test_what_pylance_gets_reads_back_as_the_same() -> None:
    read = options(HTTP | KEYS | {"timeout": "9s"})
    assert options(dict(read.lance)) == read


def test_the_environment_counts_where_an_option_is_not_given() -> None:
    environ = {"AWS_ENDPOINT": "http://other:1", "AWS_REGION": "eu-west-1", "AWS_ALLOW_HTTP": "true", "TIMEOUT": "1s"}
    read = options(HTTP, environ)
    assert (read.endpoint, read.region, read.timeout) == (HTTP["endpoint"], "eu-west-1", 30.0)
    assert options({}, environ).endpoint == "http://other:1"


def test_keys_without_a_token_never_meet_the_environments_token() -> None:
    read = options(HTTP | KEYS, {"AWS_SESSION_TOKEN": "of another account"})
    assert read.session_token is None
    assert dict(read.lance)["aws_session_token"] == ""


def test_an_endpoint_means_path_style_and_a_region() -> None:
    read = options(HTTP)
    assert not read.virtual_hosted
    assert read.region == "us-east-1"
    assert dict(read.lance)["aws_region"] == "us-east-1"
    assert options({}).region is None


def test_virtual_hosted_endpoints_hold_the_bucket_as_lance_wants_it() -> None:
    read = options({"endpoint": "https://bucket.s3.example.org", "virtual_hosted_style_request": "true"})
    assert read.endpoint == "https://s3.example.org"
    assert dict(read.lance)["aws_endpoint"] == "https://bucket.s3.example.org"
    with raises(StoreRefused):
        options({"endpoint": "https://s3.example.org", "virtual_hosted_style_request": "true"})


def test_limits_and_extras() -> None:
    read = options(
        {
            "connect_timeout": "500ms",
            "timeout": "1m 30s",
            "pool_max_idle_per_host": "7",
            "allow_invalid_certificates": "yes",
            "server_side_encryption": "aws:kms",
            "sse_kms_key_id": "k",
            "request_payer": "true",
        }
    )
    assert (read.connect_timeout, read.timeout, read.pool, read.verify) == (0.5, 90.0, 7, False)
    payer = ("RequestPayer", "requester")
    assert (read.extra, read.put_extra) == (
        (payer,),
        (payer, ("ServerSideEncryption", "aws:kms"), ("SSEKMSKeyId", "k")),
    )


@pytest.mark.parametrize(
    "given",
    [
        {"acces_key_id": "x"},
        {"endpoint": "http://h:1"},
        {"endpoint": "localhost:9000"},
        {"endpoint": "https://no_host_name:1"},
        {"endpoint": "https://very:secret@h"},
        {"access_key_id": "x"},
        {"timeout": "5"},
        {"connect_timeout": "5 parsecs"},
        {"pool_max_idle_per_host": "none"},
        {"skip_signature": "perhaps"},
        {"conditional_put": "disabled"},
        {"server_side_encryption": "rot13"},
        {"region": "a", "aws_region": "b"},
    ],
)
def test_mistakes_are_refused_in_one_line(given: dict[str, str]) -> None:
    with raises(StoreRefused) as refused:
        options(given)
    assert "secret@" not in str(refused.value)


@pytest.mark.parametrize("uri", ["s3://bucket", "s3://bucket/", "s3:///path", "s3://bucket/a//b", "s3://bucket/a?b"])
def test_a_url_that_names_no_table_is_refused(uri: str) -> None:
    with raises(StoreRefused):
        open_store(uri)


def test_secrets_are_never_shown() -> None:
    with pytest.raises(StoreRefused) as refused:
        open_store("s3://AKIAEXAMPLE:very-secret-words@bucket/t")
    store = open_store("s3://bucket/t", HTTP | KEYS)
    for text in (str(refused.value), repr(store), repr(options(HTTP | KEYS | {"session_token": "very-secret-too"}))):
        assert "very-secret" not in text
        assert "AKIAEXAMPLE" not in text


def test_the_example_configuration_loads() -> None:
    environ = {"MEMWAL_S3_KEY": "AKIAEXAMPLE", "MEMWAL_S3_SECRET": "very-secret-words"}
    settings = load(ROOT / "configs" / "s3.toml", {})
    store = open_store(settings.table.uri, settings.storage_options(environ))
    assert store.url("") == "s3://my-bucket/tables/packages.lance"
    assert store.storage_options["aws_secret_access_key"] == "very-secret-words"
    assert "very-secret" not in render_settings(settings)


# ---- what an answer means --------------------------------------------------------------------------------------------


def response(status: int, code: str, **detail: str) -> boto.ClientError:
    said = {"Error": {"Code": code, **detail}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return boto.ClientError(said, "PutObject")


def below(error: Exception) -> boto.EndpointConnectionError:
    return boto.EndpointConnectionError(endpoint_url="http://h", error=error)


NOT_CONNECTED = aiohttp.ClientConnectorError(SimpleNamespace(ssl=None, host="h", port=1), OSError(111, "refused"))


@pytest.mark.parametrize(
    ("error", "meaning", "said"),
    [
        (response(412, "PreconditionFailed"), Meaning.EXISTS, ""),
        (response(304, "304"), Meaning.EXISTS, ""),
        (response(404, "NoSuchKey"), Meaning.MISSING, ""),
        (response(409, "ConditionalRequestConflict"), Meaning.NOTHING, "HTTP 409"),
        (response(409, "OperationAborted"), Meaning.NOTHING, "HTTP 409"),
        (response(400, "RequestTimeout"), Meaning.NOTHING, ""),
        (response(400, "BadDigest"), Meaning.NOTHING, "damaged on the way"),
        (response(429, "TooManyRequests"), Meaning.NOTHING, "fewer requests"),
        (response(500, "InternalError"), Meaning.UNKNOWN, "HTTP 500 InternalError"),
        (response(503, "SlowDown"), Meaning.UNKNOWN, "fewer requests"),
        (response(503, "503"), Meaning.UNKNOWN, "HTTP 503"),
        (response(504, "504"), Meaning.UNKNOWN, "HTTP 504"),
        (response(501, "NotImplemented"), Meaning.REFUSED, "no conditional writes"),
        (response(403, "InvalidAccessKeyId"), Meaning.REFUSED, "access_key_id"),
        (response(403, "SignatureDoesNotMatch"), Meaning.REFUSED, "secret_access_key"),
        (response(403, "AccessDenied"), Meaning.REFUSED, "s3:PutObject"),
        (response(403, "403"), Meaning.REFUSED, "s3:PutObject"),
        (response(400, "ExpiredToken"), Meaning.REFUSED, "session_token"),
        (response(404, "NoSuchBucket"), Meaning.REFUSED, "create it or correct table.uri"),
        (response(404, "404"), Meaning.REFUSED, "endpoint"),
        (response(301, "PermanentRedirect"), Meaning.REFUSED, "region"),
        (response(400, "AuthorizationHeaderMalformed", Region="eu-west-1"), Meaning.REFUSED, "it says eu-west-1"),
        (response(403, "RequestTimeTooSkewed"), Meaning.REFUSED, "clock"),
        (response(400, "Odd", Message="two\n lines"), Meaning.REFUSED, "HTTP 400 Odd: two lines"),
        (boto.NoCredentialsError(), Meaning.REFUSED, "access_key_id"),
        (boto.ProfileNotFound(profile="p"), Meaning.REFUSED, "AWS_PROFILE"),
        (boto.CredentialRetrievalError(provider="p", error_msg="m"), Meaning.NOTHING, "credentials"),
        (boto.SSLError(endpoint_url="u", error="e"), Meaning.REFUSED, "certificate"),
        (boto.ConnectTimeoutError(endpoint_url="u"), Meaning.NOTHING, "connect_timeout"),
        (below(NOT_CONNECTED), Meaning.NOTHING, "no connection"),
        (below(socket.gaierror("no such host")), Meaning.NOTHING, "no connection"),
        (below(aiohttp.ClientOSError(104, "reset")), Meaning.UNKNOWN, "broke"),
        (boto.ConnectionClosedError(endpoint_url="u"), Meaning.UNKNOWN, "closed"),
        (boto.ReadTimeoutError(endpoint_url="u"), Meaning.UNKNOWN, "no answer"),
        (boto.FlexibleChecksumError(error_msg="m"), Meaning.UNKNOWN, "checksum"),
        (TimeoutError(), Meaning.UNKNOWN, "no answer"),
    ],
)
def test_what_each_answer_means(error: Exception, meaning: Meaning, said: str) -> None:
    answer = meaning_of(error)
    assert answer.meaning is meaning
    assert said in answer.said


def test_a_fault_of_this_program_is_no_answer() -> None:
    with pytest.raises(TypeError):
        meaning_of(TypeError("ours"))


# ---- on the wire -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "outcome", "lands"),
    [
        (faults.answers(409, "ConditionalRequestConflict"), StoreUnavailable, False),
        (faults.answers(412, "PreconditionFailed"), PutOutcome.ALREADY_EXISTS, False),
        (faults.answers(503, "SlowDown"), PutOutcome.OUTCOME_UNKNOWN, False),
        (faults.lands_then_answers(500, "InternalError"), PutOutcome.OUTCOME_UNKNOWN, True),
        (faults.lands_then_resets(), PutOutcome.OUTCOME_UNKNOWN, True),
        (faults.resets(), PutOutcome.OUTCOME_UNKNOWN, False),
        (faults.lands_then_hangs(), PutOutcome.OUTCOME_UNKNOWN, True),
        (faults.hangs(), PutOutcome.OUTCOME_UNKNOWN, False),
        (faults.answers(501, "NotImplemented"), StoreRefused, False),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_conditional_put_is_one_request_whatever_is_answered(
    s3_table_through_proxy: Any, s3_table: Any, fault_proxy: Any, fault: Any, outcome: Any, lands: bool
) -> None:
    store = open_store(*s3_table_through_proxy, put_timeout=0.7 if fault.hangs else 60)
    store.put_if_absent("warm", b"")  # the next request uses a kept connection, as most do
    fault_proxy.forget()
    fault_proxy.inject(fault, method="PUT", key="slot")
    if isinstance(outcome, PutOutcome):
        assert store.put_if_absent("slot", b"bytes") is outcome
    else:
        with raises(outcome):
            store.put_if_absent("slot", b"bytes")
    assert fault_proxy.count("PUT", "slot") == 1
    if lands:
        wait_until(lambda: open_store(*s3_table).exists("slot"))  # the client may time out before the object lands
    else:
        assert not open_store(*s3_table).exists("slot")


def test_the_probe_takes_a_conflict_and_a_lost_answer_for_what_they_are(
    s3_table_through_proxy: Any, fault_proxy: Any
) -> None:
    store = open_store(*s3_table_through_proxy)
    fault_proxy.inject(faults.answers(409, "ConditionalRequestConflict"), method="PUT", key="probe/", times=2)
    probe(store, SystemIds())
    fault_proxy.heal()
    fault_proxy.inject(faults.lands_then_resets(), method="PUT", key="probe/", times=1)
    probe(store, SystemIds())
    assert store.list("") == []


def test_the_probe_refuses_storage_without_conditional_writes(s3_table_through_proxy: Any, fault_proxy: Any) -> None:
    fault_proxy.inject(faults.answers(501, "NotImplemented"), method="PUT", times=None)
    with raises(StoreRefused):
        probe(open_store(*s3_table_through_proxy), SystemIds())


def test_a_large_put_has_more_time_than_a_small_one(s3_table_through_proxy: Any, fault_proxy: Any) -> None:
    """The timeout grows by a second per MiB. With a fixed timeout of 10 s, a line that needs 12 s for an entry of 16
    MiB would never send it."""
    store = open_store(*s3_table_through_proxy, put_timeout=0.3)
    fault_proxy.inject(faults.slow(0.6), method="PUT", times=None)
    assert store.put_if_absent("small", b"x") is PutOutcome.OUTCOME_UNKNOWN
    assert store.put_if_absent("large", b"x" * (8 << 20)) is PutOutcome.CREATED


@pytest.mark.parametrize("ask", ["get", "exists", "list", "delete"])
def test_storage_that_hangs_is_given_up_within_the_timeout(
    s3_table_through_proxy: Any, fault_proxy: Any, ask: str
) -> None:
    open_store(*s3_table_through_proxy).put_if_absent("slot", b"x")
    store = open_store(*s3_table_through_proxy, put_timeout=0.5)
    fault_proxy.inject(faults.hangs(), times=None)
    fault_proxy.forget()
    with raises(StoreUnavailable):
        getattr(store, ask)("slot")
    assert len(fault_proxy.requests) == 1


@pytest.mark.usefixtures("retries_at_once")
def test_reads_are_tried_again_and_then_say_so(s3_table_through_proxy: Any, fault_proxy: Any) -> None:
    store = open_store(*s3_table_through_proxy)
    store.put_if_absent("a/1", b"one")
    fault_proxy.inject(faults.answers(503, "SlowDown"), method="GET", times=1)
    assert store.get("a/1") == b"one"
    fault_proxy.inject(faults.answers(500, "InternalError"), times=None)
    for read in (store.get, store.list):
        fault_proxy.forget()
        with raises(StoreUnavailable):
            read("a/1")
        assert len(fault_proxy.requests) == 3


@pytest.mark.parametrize(
    ("uri", "endpoint"),
    [
        ("s3://b/t", "u:hunter2@minio:9000"),
        ("s3://b/t", "https:/u:hunter2@minio"),
        ("s3a://u:hunter2@b/t", "https://minio"),
        ("s3://u:hunter2@b/t", "https://minio"),
    ],
)
def test_credentials_in_the_wrong_place_are_not_printed(uri: str, endpoint: str) -> None:
    with raises(StoreRefused) as raised:
        open_store(uri, {"endpoint": endpoint})
    assert "hunter2" not in str(raised.value)


def test_nobody_at_the_endpoint(s3_table: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: a connection is refused
        nowhere = f"http://127.0.0.1:{taken.getsockname()[1]}"
        store = open_store(s3_table.uri, s3_table.storage_options | {"endpoint": nowhere})
        for call in (lambda: store.put_if_absent(KEY, b""), lambda: store.get(KEY)):
            with raises(StoreUnavailable):
                call()


@pytest.mark.parametrize(
    "change",
    [
        {"access_key_id": "AKIAEXAMPLE"},
        {"secret_access_key": "very-secret-words"},
        {"session_token": "very-secret-words"},
    ],
)
def test_wrong_credentials(s3_table: Any, change: dict[str, str]) -> None:
    store = open_store(s3_table.uri, s3_table.storage_options | change)
    for call in (store.get, store.exists, store.list, store.delete, lambda key: store.put_if_absent(key, b"")):
        with raises(StoreRefused) as refused:
            call(KEY)
        assert s3_table.uri in str(refused.value)
        assert "very-secret" not in str(refused.value)


def test_a_missing_bucket_is_no_missing_key(s3_table: Any) -> None:
    store = open_store("s3://nobody-made-this/t", s3_table.storage_options)
    for call in (store.get, store.exists, store.list, store.children, lambda key: store.put_if_absent(key, b"")):
        with raises(StoreRefused):
            call(KEY)


def test_no_credentials_anywhere(s3_table: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    without = {name: value for name, value in s3_table.storage_options.items() if "key" not in name}
    with raises(StoreRefused):
        open_store(s3_table.uri, without).get(KEY)


def test_credentials_of_the_standard_chain(s3_table: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given = s3_table.storage_options
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", given["access_key_id"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", given["secret_access_key"])
    # Another pool size: clients are shared by options, and this one must look up the credentials again.
    without = {name: value for name, value in given.items() if "key" not in name} | {"pool_max_idle_per_host": "3"}
    assert open_store(s3_table.uri, without).put_if_absent(KEY, b"1") is PutOutcome.CREATED


# ---- integrity -------------------------------------------------------------------------------------------------------


@contextmanager
def damaging(endpoint: str, harm: Callable[[bytes], bytes], towards: str) -> Iterator[str]:
    """Run a relay to `endpoint` that damages the data sent to the "client" or to the "server"."""
    host, port = endpoint.removeprefix("http://").split(":")

    class Relay(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with socket.create_connection((host, int(port))) as server:
                ways = [(self.request, server, "server"), (server, self.request, "client")]
                threads = [threading.Thread(target=self.copy, args=way, daemon=True) for way in ways]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()

        def copy(self, source: socket.socket, target: socket.socket, way: str) -> None:
            with suppress(OSError):
                while data := source.recv(1 << 16):
                    target.sendall(harm(data) if way == towards else data)
            for each in (source, target):
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Relay) as relay:
        relay.daemon_threads = True
        threading.Thread(target=relay.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{relay.server_address[1]}"
        relay.shutdown()


def flip(data: bytes) -> bytes:
    return data.replace(b"fragile", b"fragilE")


def test_a_byte_that_flips_on_the_way_up_is_not_stored(s3_server: Any, s3_table: Any) -> None:
    with damaging(s3_server.endpoint, flip, "server") as endpoint:
        store = open_store(s3_table.uri, s3_server.options_at(endpoint))
        with raises(StoreUnavailable):
            store.put_if_absent(KEY, b"fragile goods")
    assert not open_store(*s3_table).exists(KEY)


def test_a_byte_that_flips_on_the_way_down_is_not_believed(s3_server: Any, s3_table: Any) -> None:
    open_store(*s3_table).put_if_absent(KEY, b"fragile goods")
    with damaging(s3_server.endpoint, flip, "client") as endpoint:
        store = open_store(s3_table.uri, s3_server.options_at(endpoint))
        with raises(StoreUnavailable):
            store.get(KEY)


def test_an_answer_that_is_cut_off_is_asked_for_again(s3_server: Any, s3_table: Any) -> None:
    open_store(*s3_table).put_if_absent(KEY, b"x" * 500_000)
    cut: list[int] = []

    def once(data: bytes) -> bytes:
        if len(data) > 10_000 and not cut:
            cut.append(1)
            raise OSError
        return data

    with damaging(s3_server.endpoint, once, "client") as endpoint:
        store = open_store(s3_table.uri, s3_server.options_at(endpoint))
        assert store.get(KEY) == b"x" * 500_000
    assert cut


# ---- one loop per process --------------------------------------------------------------------------------------------

FORKED = """
import atexit, json, os, sys, warnings
warnings.filterwarnings("ignore", message="lance is not fork-safe")
from memwal.wal import open_store
store = open_store(sys.argv[1], json.loads(sys.argv[2]))
store.put_if_absent("parent", b"1")
for number in range(2):
    child = os.fork()
    if child == 0:
        sys.exit(number and store.put_if_absent(f"child {number}", store.get("parent")).name != "CREATED")
    assert os.waitpid(child, 0)[1] == 0
print(sorted(store.list("")))
atexit.register(lambda: print(store.get("parent")))  # as the tables do that are still open at the end
"""


def test_forked_children_have_clients_of_their_own_and_the_end_is_quiet(s3_table: Any) -> None:
    program = [sys.executable, "-W", "default::ResourceWarning", "-c", FORKED]
    arguments = [s3_table.uri, json.dumps(s3_table.storage_options)]
    ran = subprocess.run([*program, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ran.stdout.splitlines() == ["['child 1', 'parent']", "b'1'"], ran.stderr
    assert "unclosed" not in ran.stderr
    assert "Traceback" not in ran.stderr


def test_stores_with_equal_options_share_their_connections(s3_table_through_proxy: Any, fault_proxy: Any) -> None:
    before = threading.active_count()
    for number in range(20):
        open_store(f"{s3_table_through_proxy.uri}/{number}", s3_table_through_proxy.storage_options).get(KEY)
    assert threading.active_count() <= before + 2
