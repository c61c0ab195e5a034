"""A write that a daemon acked for some regions only: which rows the client sends again, and which it does not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest

from memwal.ingest.engine.api.tokens import HighestTokens, Receipt, Token
from memwal.ingest.errors import Invalid, MemWalError, Unavailable, UnknownOutcome
from memwal.ingest.service.client.remote import RemoteTable, _Sent
from memwal.ingest.service.client.router import Call, Router
from memwal.ingest.service.client.scatter import Splitter
from memwal.ingest.service.client.writes import RoutedWrite

ROWS = pa.table({"id": list(range(8))})


class ByRest:
    """A splitter with `count` regions: the region of a row is its id modulo `count`."""

    def __init__(self, routing: int, count: int) -> None:
        self.routing, self.regions = routing, tuple(f"r{number}" for number in range(count))

    def checked(self, rows: pa.Table) -> pa.Table:
        return rows

    def buckets(self, rows: pa.Table) -> Any:
        return rows["id"].to_numpy().astype(np.int32) % len(self.regions)


class Alone:
    """A router and its only daemon, which gives `answers` in order and records the rows that it receives."""

    def __init__(self, answers: Sequence[Any]) -> None:
        self.sole, self.alone, self.routing, self.regions = self, False, 1, ("r0", "r1")
        self._answers, self.sent = list(answers), list[list[int]]()

    def write(self, rows: pa.Table, _request: dict[str, Any], _within: float) -> Any:
        self.sent.append(rows["id"].to_pylist())
        return self._answers.pop(0)

    def answers(self, calls: Sequence[Call[Any]], _grace: float) -> list[Any]:
        return [call.make() for call in calls]


def acked(regions: Sequence[str]) -> dict[str, Any]:
    return {"positions": dict.fromkeys(regions, 7), "applied": True, "skipped": 0}


def in_part(routing: int) -> UnknownOutcome:
    return UnknownOutcome("1 of 4 regions applied their rows", {**acked(["r0"]), "routing": routing})


def write(alone: Alone, token: str | None = "loader:1") -> RoutedWrite:
    request = {"op": "write", "delete": False, "durable": True, "token": token, "timeout": None}
    splitter = cast("Splitter", ByRest(routing=1, count=2))
    return RoutedWrite(cast("Router", alone), lambda: splitter, ROWS, request, 0.0)


def attempted(writing: RoutedWrite) -> Receipt | MemWalError:
    try:
        return writing.attempt(1.0)
    except MemWalError as error:
        return error


def test_only_the_rows_of_the_other_regions_are_sent_again() -> None:
    alone = Alone([in_part(routing=1), acked(["r1"])])
    writing = write(alone)
    assert isinstance(attempted(writing), Unavailable)
    receipt = attempted(writing)
    assert isinstance(receipt, Receipt)
    assert (receipt.rows, receipt.positions) == (8, {"r0": 7, "r1": 7})
    assert alone.sent == [list(range(8)), [1, 3, 5, 7]]


def test_regions_of_another_routing_tell_nothing_of_our_rows() -> None:
    """With 4 regions r0 has applied the rows 0 and 4. With 2 regions r0 also has the rows 2 and 6, which no region has
    applied. So the ack of r0 cannot be used, and the client sends all rows again."""
    alone = Alone([in_part(routing=2), acked(["r0", "r1", "r2", "r3"])])
    writing = write(alone)
    assert isinstance(attempted(writing), UnknownOutcome)
    assert isinstance(attempted(writing), Receipt)
    assert alone.sent == [list(range(8)), list(range(8))]


@pytest.mark.parametrize("routing", [1, 2])
def test_without_a_token_only_what_nobody_has_may_be_sent_again(routing: int) -> None:
    alone = Alone([in_part(routing)])
    writing = write(alone, token=None)
    error = attempted(writing)
    assert isinstance(error, Unavailable if routing == 1 else UnknownOutcome)
    assert isinstance(writing.outcome(error), UnknownOutcome)


def repeated(regions: Sequence[str]) -> dict[str, Any]:
    return {**acked(regions), "applied": False}


def test_what_an_attempt_without_an_answer_applied_is_this_calls_work() -> None:
    """A daemon is killed after it has written the entry and before it answers; the next owner knows the token."""
    writing = write(Alone([UnknownOutcome("the daemon was lost"), repeated(["r0", "r1"])]))
    assert isinstance(attempted(writing), UnknownOutcome)
    receipt = attempted(writing)
    assert isinstance(receipt, Receipt)
    assert receipt.applied


@pytest.mark.parametrize("first", [[], [Unavailable("storage is away; nothing was applied")]])
def test_what_an_earlier_call_applied_is_told(first: list[MemWalError]) -> None:
    writing = write(Alone([*first, repeated(["r0", "r1"])]))
    for _ in first:
        assert isinstance(attempted(writing), Unavailable)
    receipt = attempted(writing)
    assert isinstance(receipt, Receipt)
    assert not receipt.applied


class Daemon:
    """The owner of one region, which has applied the numbers of a producer up to `applied`."""

    def __init__(self, region: str, applied: int | None) -> None:
        self.endpoint = self.region = region
        self._applied, self.asked, self.written = applied, 0, 0

    def read(self, name: str, request: dict[str, Any], *, timeout: float) -> list[int | None]:
        assert (name, request["producer"], request["regions"]) == ("applied", "loader", [self.region])
        assert timeout > 0
        self.asked += 1
        return [self._applied, self._applied]

    def write(self, rows: pa.Table, _request: dict[str, Any], _within: float) -> dict[str, Any]:
        self.written += rows.num_rows
        counts = {"applied": rows.num_rows, "repeated": 0, "skipped": 0}
        return acked([self.region]) | {"regions": {self.region: counts}}


class Two:
    """A router to two daemons."""

    def __init__(self, *applied: int | None) -> None:
        self.sole, self.alone, self.routing, self.regions = None, False, 1, ("r0", "r1")
        self.daemons = {name: Daemon(name, each) for name, each in zip(self.regions, applied, strict=True)}

    def owners(self, regions: Iterable[str]) -> dict[str, list[str]]:
        return {name: [name] for name in regions}

    def connection(self, endpoint: str) -> Daemon:
        return self.daemons[endpoint]

    def answers(self, calls: Sequence[Call[Any]], _grace: float = 0.0) -> list[Any]:
        return [call.make() for call in calls]


@pytest.mark.parametrize(
    ("applied", "may_go_down", "refused"),
    [
        ((5, 4), True, False),  # all rows of loader:4 are applied: a replay
        ((5, 3), True, True),
        ((5, None), True, True),
        ((4, None), True, False),  # the rest of a write that was cut short
        ((None, None), True, False),
        ((5, 3), False, False),  # this client has put loader:3, so its next numbers must be higher
    ],
)
def test_a_token_is_compared_over_daemons_before_anything_is_sent(
    applied: tuple[int | None, int | None], may_go_down: bool, refused: bool
) -> None:
    two = Two(*applied)
    request = {"op": "write", "delete": False, "durable": True, "token": "loader:4", "timeout": None}
    splitter = cast("Splitter", ByRest(routing=1, count=2))
    writing = RoutedWrite(cast("Router", two), lambda: splitter, ROWS, request, 0.0, may_go_down=may_go_down)
    answer = attempted(writing)
    assert isinstance(answer, Invalid) is refused
    assert {daemon.written for daemon in two.daemons.values()} == {0 if refused else 4}
    assert {daemon.asked for daemon in two.daemons.values()} == {1 if may_go_down else 0}
    if isinstance(answer, Receipt):
        assert answer.regions["r1"].applied == 4


def test_a_client_asks_about_each_name_once() -> None:
    rising = HighestTokens()
    assert not rising.rises(Token("loader", 4))
    rising.taken(Token("loader", 4))
    assert rising.rises(Token("loader", 5))
    assert not rising.rises(Token("loader", 4))
    assert not rising.rises(Token("loader", 3))
    assert not rising.rises(Token("other", 9))


class Several(Alone):
    """Like `Alone`, for a table that has another daemon too. Records the routing that each call states."""

    def __init__(self, answers: Sequence[Any]) -> None:
        super().__init__(answers)
        self.sole, self.routings = None, list[int]()  # type: ignore[assignment]

    def owners(self, regions: Iterable[str]) -> dict[str, list[str]]:
        return {"grpc://a:1": [*regions]}

    def connection(self, _endpoint: str) -> Any:
        return self

    def write(self, rows: pa.Table, request: dict[str, Any], within: float) -> Any:
        self.routings.append(request["routing"])
        return super().write(rows, request, within)

    def read(self, _read: str, request: dict[str, Any], keys: pa.Table, _within: float, _told: Any) -> pa.Table:
        self.routings.append(request["routing"])
        self.asked = request["regions"]
        return keys

    def answers(self, calls: Sequence[Call[Any]], _grace: float = 0.0) -> list[Any]:
        return super().answers(calls, 0.0)


def test_rows_are_meant_by_the_routing_that_has_split_them() -> None:
    """Another thread's call may have adopted a resize meanwhile: a region with the same id then has other rows."""
    several = Several([acked(["r0", "r1"])])
    several.routing = 2
    writing = write(several)  # its splitter knows routing 1
    assert isinstance(attempted(writing), Receipt)
    assert several.routings == [1]


def test_keys_are_asked_for_by_the_routing_that_has_split_them() -> None:
    several, table = Several([]), object.__new__(RemoteTable)
    several.routing, several.regions = 2, ("r0", "r1")  # four regions before the resize
    table.__dict__ |= {"router": several, "splitter": ByRest(routing=1, count=4)}
    assert table._get("get", _Sent(ROWS, None), {"columns": None}, 1.0) == ROWS
    assert (several.routings, several.asked) == ([1], ["r0", "r1", "r2", "r3"])
