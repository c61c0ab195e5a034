"""A write that a daemon acked for some regions only: whose rows are sent again, and whose are not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest

from ingest.errors import MemWalError, Unavailable, UnknownOutcome
from ingest.receipts import Receipt
from ingest.routed_write import RoutedWrite
from ingest.router import Call, Router
from ingest.splitting import Splitter

ROWS = pa.table({"id": list(range(8))})


class ByRest:
    """A splitter of as many regions as `count`: a row's is its id's rest."""

    def __init__(self, routing: int, count: int) -> None:
        self.routing, self.regions = routing, tuple(f"r{number}" for number in range(count))

    def checked(self, rows: pa.Table) -> pa.Table:
        return rows

    def buckets(self, rows: pa.Table) -> Any:
        return rows["id"].to_numpy().astype(np.int32) % len(self.regions)


class Alone:
    """A router and the one daemon behind it, which answers as `answers` say; remembers what it was sent."""

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
    request = {"delete": False, "durable": True, "token": token, "timeout": None}
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
    """Of 4 regions r0 has the rows 0 and 4, of 2 it has 2 and 6 too, which nobody has: all are sent again."""
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
