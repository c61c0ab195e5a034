"""One put or delete on its way to the owners of its rows, in as many attempts as it takes.

Rows of which nothing was applied are sent again; they may have other owners by then. Rows that may be applied are sent
again only with their token, which every region knows them by; without one the caller is told.

A bound on the bytes that the callers of one client have on their way at the same time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from memwal.ingest.api.tokens import Applied, Receipt, RegionCounts, Token, refuse_going_down
from memwal.ingest.client.retry import verdict
from memwal.ingest.client.router import Call, Router
from memwal.ingest.client.scatter import Splitter
from memwal.ingest.errors import MemWalError, Unavailable, UnknownOutcome
from memwal.ingest.rpc.connection import Connection

Part = tuple[Connection, Sequence[str], pa.Table]
"""A daemon, its regions, and their rows."""

LIVING = 5.0
"""Seconds more for a daemon that has lost a region to say what became of rows without a token: nothing else tells."""


class RoutedWrite:
    """The state of one write between its attempts. Thread safety. One thread."""

    def __init__(
        self,
        router: Router,
        splitter: Callable[[], Splitter],
        rows: pa.Table,
        request: Mapping[str, Any],
        grace: float,
        *,
        may_go_down: bool = False,
    ) -> None:
        """`request`: of the op "write", for all parts. `grace`: seconds longer that an answer is waited for.
        `may_go_down`: the token's number is not known to be higher than all before, so regions are asked first.
        """
        self._may_go_down = may_go_down
        self._router, self._splitter, self._request, self._grace = router, splitter, request, grace
        self._given = rows.num_rows
        self._waiting: list[pa.Table] = [rows]
        self._checked = False
        self._acks: list[dict[str, Any]] = []
        self._unknown: UnknownOutcome | None = None

    def attempt(self, within: float) -> Receipt:
        """Send what was not acknowledged yet. Raises: the worst that happened to any part of it."""
        parts = self._parts()
        self._refuse_going_down(parts, within)
        request = self._request if self._request["timeout"] is None else {**self._request, "timeout": within}
        if self._checked:
            request = {**request, "routing": self._router.routing}  # rows that were split belong to its regions
        whole = within + self._grace
        calls = [Call(to, regions, partial(to.write, rows, request, whole)) for to, regions, rows in parts]
        answers = self._router.answers(calls, LIVING if request["token"] is None else 0.0)
        self._waiting = []
        failed: list[MemWalError] = []
        for (_, _, rows), answer in zip(parts, answers, strict=True):
            if not isinstance(answer, MemWalError):
                self._acks.append(answer)
            elif (rest := self._rest(rows, answer)) is not None:
                self._acks.append(answer.details)
                self._waiting.append(rest)
                failed.append(Unavailable(answer.message, answer.details))  # as it counts for the rows that are left
            else:
                self._waiting.append(rows)
                self._unknown = answer if isinstance(answer, UnknownOutcome) else self._unknown
                failed.append(answer)
        if failed:
            raise the_worst(failed, repeatable=self._request["token"] is not None, alone=self._router.alone)
        return self._receipt()

    def _refuse_going_down(self, parts: Sequence[Part], within: float) -> None:
        """Compare what all owners have applied, once: each compares its own regions only. Raises: Invalid."""
        token = Token.parse(self._request["token"])
        if token is None or len(parts) < 2 or not self._may_go_down:
            return
        asking = {"producer": token.producer, "routing": self._router.routing}
        calls = [
            Call(to, regions, partial(to.read, "applied", {**asking, "regions": regions}, timeout=within))
            for to, regions, _ in parts
        ]
        answers = self._router.answers(calls)
        failed = [answer for answer in answers if isinstance(answer, MemWalError)]
        if failed:
            raise the_worst(failed, repeatable=True, alone=self._router.alone)
        found = Applied.together(Applied(*answer) for answer in answers if not isinstance(answer, MemWalError))
        refuse_going_down(token, {"of one daemon": found.newest, "of another": found.everywhere})
        self._may_go_down = False

    def outcome(self, error: MemWalError) -> MemWalError:
        """What the caller is told when `error` ended the attempts: all but UnknownOutcome mean that nothing applied."""
        if isinstance(error, UnknownOutcome) or (self._unknown is None and not self._acks):
            return error
        if not self._acks and self._unknown is not None:
            return self._unknown
        if "positions" in error.details:
            return UnknownOutcome(error.message, error.details)
        missing = sum(rows.num_rows for rows in self._waiting)
        return UnknownOutcome(
            f"of {self._given} rows {self._given - missing} were applied, the others were not: {error}; retry with the "
            "same token"
        )

    def _parts(self) -> list[Part]:
        """What waits, by owner; looked into only where nobody owns all."""
        rows = self._waiting[0] if len(self._waiting) == 1 else pa.concat_tables(self._waiting)
        if self._router.sole is not None:
            return [(self._router.sole, self._router.regions, rows)]
        router, splitter = self._router, self._splitter()
        rows, buckets = self._bucketed(rows, splitter)
        self._waiting = [rows]
        present = np.unique(buckets).tolist()
        parts: list[Part] = []
        for endpoint, regions in router.owners(splitter.regions[bucket] for bucket in present).items():
            mine = [bucket for bucket in present if splitter.regions[bucket] in regions]
            part = rows if len(mine) == len(present) else rows.filter(pa.array(np.isin(buckets, mine)))
            parts.append((router.connection(endpoint), regions, part))
        return parts

    def _rest(self, rows: pa.Table, answer: MemWalError) -> pa.Table | None:
        """The rows that nobody has, where some regions have theirs and `answer` names them; else None.

        The same names are of other rows after a resize: by another routing than ours they tell nothing here.
        """
        if not isinstance(answer, UnknownOutcome) or "positions" not in answer.details:
            return None
        splitter, acked = self._splitter(), answer.details["positions"]
        if answer.details.get("routing") != splitter.routing:
            return None
        rows, buckets = self._bucketed(rows, splitter)
        have = [bucket for bucket, region in enumerate(splitter.regions) if region in acked]
        return rows.filter(pa.array(~np.isin(buckets, have)))

    def _bucketed(self, rows: pa.Table, splitter: Splitter) -> tuple[pa.Table, npt.NDArray[np.int32]]:
        """Rows, checked before they are split for the first time, and their buckets."""
        if not self._checked:
            rows = splitter.checked_keys(rows) if self._request["delete"] else splitter.checked(rows)
            self._checked = True
        return rows, splitter.buckets(rows)

    def _receipt(self) -> Receipt:
        positions = {region: position for ack in self._acks for region, position in ack["positions"].items()}
        # What an attempt of this call without an answer has applied, a later one hears of as applied before: it is this
        # call's work all the same.
        ours = self._unknown is not None
        applied = any(ack["applied"] for ack in self._acks) or not self._acks or ours
        told = {region: counts for ack in self._acks for region, counts in ack.get("regions", {}).items()}
        regions = {region: _counts(**counts, ours=ours) for region, counts in told.items()}
        return Receipt(self._given, applied, positions, sum(ack["skipped"] for ack in self._acks), regions)


def _counts(applied: int, repeated: int, skipped: int, *, ours: bool) -> RegionCounts:
    """`ours`: what is repeated may be this call's own."""
    return RegionCounts(applied + repeated, 0, skipped) if ours else RegionCounts(applied, repeated, skipped)


def the_worst(failed: Sequence[MemWalError], *, repeatable: bool, alone: bool) -> MemWalError:
    """Of several failures the one that decides what is next: what ends the call before what may pass."""
    order = {"raise": 0, "learn": 1, "wait": 2}

    def weight(error: MemWalError) -> tuple[int, bool]:
        return order[verdict(error, repeatable=repeatable, alone=alone)], not isinstance(error, UnknownOutcome)

    return min(failed, key=weight)


class InFlight:
    """Room for so many bytes; who finds none waits. What is larger than all of it goes alone.

    Thread safety. Any thread.
    """

    def __init__(self, most: int) -> None:
        """`most`: bytes."""
        self._most, self._taken = most, 0
        self._freed = threading.Condition()

    @contextmanager
    def of(self, size: int, timeout: float) -> Iterator[None]:
        """Hold `size` bytes of room. Raises: Unavailable if there was none for `timeout` seconds; nothing was sent."""
        with self._freed:
            if not self._freed.wait_for(lambda: not self._taken or self._taken + size <= self._most, timeout):
                raise Unavailable(
                    f"{self._taken} bytes are on their way already, and none arrived for {timeout:g} s; retry"
                )
            self._taken += size
        try:
            yield
        finally:
            with self._freed:
                self._taken -= size
                self._freed.notify_all()
