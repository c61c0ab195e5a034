"""The tests' fault proxy does to a request exactly what its configuration states.

The tests use plain botocore and pylance: no code of memwal is between the test and the wire.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from botocore.exceptions import (
    ClientError,
    ConnectionClosedError,
    HTTPClientError,
    IncompleteReadError,
    ReadTimeoutError,
    ResponseStreamingError,
)

from tests.conftest import wait_until
from tests.fault_proxy import (
    FaultProxy,
    answers,
    hangs,
    kills_after,
    kills_before,
    lands_later,
    lands_then_answers,
    lands_then_breaks_off,
    lands_then_hangs,
    lands_then_resets,
    listing_behind,
    resets,
    slow,
    swallows,
)
from tests.s3_fixtures import BUCKET, S3Table
from tests.s3_server import S3Server

Put = Callable[..., int | str]


def said(call: Callable[[], Any]) -> int | str:
    """Return the status of the answer, or the name of the error in its place."""
    try:
        return int(call()["ResponseMetadata"]["HTTPStatusCode"])
    except ClientError as error:
        return int(error.response["ResponseMetadata"]["HTTPStatusCode"])
    except ConnectionClosedError:
        return "reset"
    except ReadTimeoutError:
        return "timeout"
    except HTTPClientError as error:
        return "reset" if "reset" in str(error).lower() else str(error)


@pytest.fixture
def client(s3_server: S3Server, fault_proxy: FaultProxy) -> Any:
    """Return a client that reaches the server through the proxy."""
    return s3_server.client_at(fault_proxy.endpoint)


@pytest.fixture
def put(client: Any, s3_server: S3Server, fault_proxy: FaultProxy, prefix: str) -> Put:
    """Return a put-if-absent of a key below the test's prefix; with `told` "timeout" the client waits only half a
    second.
    """
    impatient = s3_server.client_at(fault_proxy.endpoint, read_timeout=0.5)

    def put(key: str = "k", body: bytes = b"one", told: int | str = "") -> int | str:
        asking = impatient if told == "timeout" else client
        return said(lambda: asking.put_object(Bucket=BUCKET, Key=prefix + key, Body=body, IfNoneMatch="*"))

    return put


@pytest.fixture
def prefix(s3_table: S3Table) -> str:
    return s3_table.uri.removeprefix(f"s3://{BUCKET}/") + "/"


@pytest.fixture
def stored(s3_server: S3Server, prefix: str) -> Callable[..., bytes | None]:
    """Read the server's content without the proxy."""

    def get(key: str = "k") -> bytes | None:
        try:
            return bytes(s3_server.client.get_object(Bucket=BUCKET, Key=prefix + key)["Body"].read())
        except s3_server.client.exceptions.NoSuchKey:
            return None

    return get


def test_without_rules_nothing_changes(put: Put, stored: Any, fault_proxy: FaultProxy, prefix: str) -> None:
    big = bytes(range(256)) * 20_000
    assert [put("big", big), put("big", big), put("big/2", b"")] == [200, 412, 200]
    assert stored("big") == big
    assert [(each.method, each.key, each.status) for each in fault_proxy.requests] == [
        ("PUT", f"{prefix}big", 200),
        ("PUT", f"{prefix}big", 412),
        ("PUT", f"{prefix}big/2", 200),
    ]


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (409, "ConditionalRequestConflict"),
        (412, "PreconditionFailed"),
        (403, "AccessDenied"),
        (500, "InternalError"),
        (501, "NotImplemented"),
        (503, "SlowDown"),
    ],
)
def test_an_answer_in_place_of_the_request(
    put: Put, stored: Any, fault_proxy: FaultProxy, status: int, code: str
) -> None:
    fault_proxy.inject(answers(status, code), method="PUT")
    assert put() == status
    assert stored() is None
    assert put() == 200


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (lands_then_answers(500, "InternalError"), 500),
        (lands_then_answers(503, "SlowDown"), 503),
        (lands_then_resets(), "reset"),
        (lands_then_hangs(), "timeout"),
        (kills_after(lambda: None), "reset"),
    ],
)
def test_what_landed_is_found_though_the_answer_was_lost(
    put: Put, stored: Any, fault_proxy: FaultProxy, fault: Any, told: int | str
) -> None:
    fault_proxy.inject(fault)
    assert put(told=told) == told
    wait_until(lambda: stored() == b"one")  # a client that does not wait for the answer may get here first
    assert put() == 412


@pytest.mark.parametrize(
    ("fault", "told"), [(resets(), "reset"), (hangs(), "timeout"), (kills_before(lambda: None), "reset")]
)
def test_what_was_cut_before_never_lands(put: Put, stored: Any, fault_proxy: FaultProxy, fault: Any, told: str) -> None:
    fault_proxy.inject(fault)
    assert put(told=told) == told
    assert stored() is None
    assert put() == 200


def test_an_answer_can_break_off(put: Put, client: Any, prefix: str, fault_proxy: FaultProxy) -> None:
    assert put(body=b"x" * 100_000) == 200
    fault_proxy.inject(lands_then_breaks_off(), method="GET")
    answer = client.get_object(Bucket=BUCKET, Key=f"{prefix}k")
    with pytest.raises((IncompleteReadError, ResponseStreamingError)):
        answer["Body"].read()


def test_a_swallowed_put_is_answered_and_not_there(put: Put, stored: Any, fault_proxy: FaultProxy) -> None:
    fault_proxy.inject(swallows())
    assert put() == 200
    assert stored() is None


def test_a_request_can_land_much_later(put: Put, stored: Any, fault_proxy: FaultProxy) -> None:
    fault_proxy.inject(lands_later())
    fault_proxy.inject(lands_later(), key="other$")
    assert [put("k"), put("other")] == ["reset", "reset"]
    assert put("k", b"two") == 200
    assert stored("other") is None
    assert fault_proxy.release() == [412, 200]
    assert (stored("k"), stored("other")) == (b"two", b"one")


def test_slow(put: Put, fault_proxy: FaultProxy) -> None:
    fault_proxy.inject(slow(0.2))
    began = time.monotonic()
    assert put() == 200
    assert time.monotonic() - began >= 0.2
    assert fault_proxy.requests[0].seconds >= 0.2


def test_a_listing_behind_by_one_misses_the_newest(client: Any, put: Put, fault_proxy: FaultProxy, prefix: str) -> None:
    def listed() -> list[str]:
        found = client.list_objects_v2(Bucket=BUCKET, Prefix=f"{prefix}wal/").get("Contents", [])
        return [each["Key"].removeprefix(prefix) for each in found]

    for key in ("wal/1", "wal/2", "hint"):
        put(key)
    fault_proxy.inject(listing_behind(), method="LIST")
    assert listed() == ["wal/1"]
    assert listed() == ["wal/1", "wal/2"]


def test_rules_choose_by_method_key_and_number(put: Put, fault_proxy: FaultProxy) -> None:
    fault_proxy.inject(answers(503, "SlowDown"), method="PUT", key="/wal/", skip=1, times=2)
    assert [put("wal/1"), put("manifest/1"), put("wal/2"), put("wal/3"), put("wal/4")] == [200, 200, 503, 503, 200]
    assert (fault_proxy.count("PUT", "/wal/"), fault_proxy.count(), fault_proxy.count("GET")) == (4, 5, 0)
    fault_proxy.inject(answers(500, "InternalError"), times=None)
    assert [put("a"), put("b")] == [500, 500]
    fault_proxy.heal()
    assert put("a") == 200
