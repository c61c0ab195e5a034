"""Compatibility of protocol versions, and the error of incompatible ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from memwal.ingest import protocol
from memwal.ingest.errors import Invalid
from memwal.ingest.protocol import Version, expect_caller, expect_known, known, refusal_of_daemon
from memwal.ingest.service.daemon import fields
from memwal.ingest.service.daemon.service import FlightService
from tests.messages import raises

OPERATIONS = FlightService.operations


@pytest.fixture(autouse=True)
def ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "OURS", Version(2, 5))


@pytest.mark.parametrize(
    ("told", "behind"),
    [("2.4", None), ("2.5", None), ("2.6", None), ("2.3", "them"), ("2.7", "us"), ("1.5", "them"), ("3.5", "us")],
)
def test_neighbours_of_one_major_version_talk_to_each_other(told: str, behind: str | None) -> None:
    refusal = refusal_of_daemon({"protocol": told, "table": "t", "id": "i"}, "grpc://a:1")
    if behind is None:
        assert refusal is None
        expect_caller(told)
        return
    assert refusal is not None
    assert refusal.details == {"reason": "protocol", "ours": "2.5", "theirs": told, "table": "t", "id": "i"}
    upgraded = "the daemon at grpc://a:1" if behind == "them" else "this process"
    assert str(refusal) == (
        f"the daemon at grpc://a:1 speaks protocol {told}, and this process 2.5, which talks to 2.4 to 2.6: "
        f"upgrade {upgraded} first"
    )
    with raises(Invalid):
        expect_caller(told)


def test_who_states_no_version_is_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal_of_daemon({}, "grpc://a:1") is not None
    monkeypatch.setattr(protocol, "OURS", Version(1, 1))
    assert refusal_of_daemon({}, "grpc://a:1") is None
    expect_caller(None)


@pytest.mark.parametrize("told", ["", "2", "2.", "2.x", "-2.5", "2.5.1", 2.5e9, [], {"a": 1}, "9" * 50])
def test_a_version_that_is_none_is_refused(told: Any) -> None:
    with raises(Invalid):
        expect_caller(told)
    refusal = refusal_of_daemon({"protocol": told, "table": "t", "id": "i"}, "grpc://a:1")
    assert refusal is not None
    assert refusal.details == {"reason": "protocol", "table": "t", "id": "i"}
    assert str(refusal).startswith("the daemon at grpc://a:1 answers protocol = ")


def test_a_call_that_a_daemon_does_not_know_says_what_to_upgrade() -> None:
    with raises(Invalid):
        expect_known("the action 'compress'", "2.6")
    with raises(Invalid):
        expect_known("the action 'compress'", "2.5")


def test_fields_that_are_not_known_are_left_out_unless_they_are_needed() -> None:
    request = {"op": "get", "protocol": "2.6", "keys": None, "columns": ["a"], "newest_first": True, "level": "latest"}
    operation = fields.expect(request, OPERATIONS)
    assert operation.fields & set(request) == {"keys", "columns", "level"}
    fields.expect(request | {"needs": ["columns", "level", "routing", "explain"]}, OPERATIONS)
    with raises(Invalid):
        fields.expect(request | {"needs": ["columns", "newest_first"]}, OPERATIONS)
    for nothing in (7, "columns", {"a": 1}, None, []):
        fields.expect(request | {"needs": nothing}, OPERATIONS)
    for needs in ([[1], {}], ["token"]):
        with raises(Invalid):
            fields.expect(request | {"needs": needs}, OPERATIONS)


@pytest.mark.parametrize("call", ["schema", "regions"])
def test_who_asks_which_table_is_here_is_answered_whatever_it_speaks(call: str) -> None:
    fields.expect({"op": call, "protocol": "9.0"}, OPERATIONS)
    with pytest.raises(Invalid):
        fields.expect({"op": "status", "protocol": "9.0"}, OPERATIONS)


@dataclass
class Told:
    rows: int
    seconds: float = 0.0


def test_an_answer_of_a_later_version_is_read() -> None:
    assert known(Told, {"rows": 3, "seconds": 0.5, "cost": 7}) == Told(3, 0.5)
    assert known(Told, {"rows": 3}) == Told(3)
