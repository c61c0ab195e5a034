"""Send one put or delete to the owners of its rows, in repeated attempts.

Rows that were certainly not applied are sent again, possibly to other owners. Rows that may be applied are sent again
only with their token, so that every region recognises them; without a token the caller gets UnknownOutcome.

`InFlight` limits the bytes that the callers of one client have in flight.
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

from memwal.ingest.caller import ending, expect_waiting, left
from memwal.ingest.engine.api.tokens import Applied, Receipt, RegionCounts, Token, check_rises
from memwal.ingest.errors import MemWalError, Unavailable, UnknownOutcome
from memwal.ingest.protocol import known
from memwal.ingest.service.client.retry import verdict
from memwal.ingest.service.client.router import Call, Router
from memwal.ingest.service.client.scatter import Splitter
from memwal.ingest.service.rpc.connection import Connection

Part = tuple[Connection, Sequence[str], pa.Table]
"""A daemon, its regions, and their rows."""

LIVING = 5.0
"""Seconds to wait for the answer of a daemon that lost a region, for rows without a token: only this daemon knows
whether it applied them."""


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
        """Prepare a write of `rows`.

        `request`: of the op "write", "delete" or "update", for all parts. `grace`: seconds to wait for an answer beyond
        the call's timeout. `may_go_down`: the token's number may be below an earlier one of its name, so the regions
        are asked first.
        """
        self._may_go_down = may_go_down
        self._router, self._splitter, self._request, self._grace = router, splitter, request, grace
        self._given = rows.num_rows
        self._waiting: list[pa.Table] = [rows]
        self._checked = False
        self._routing = router.routing
        self._acks: list[dict[str, Any]] = []
        self._unknown: UnknownOutcome | None = None

    def attempt(self, within: float) -> Receipt:
        """Send the rows that are not acknowledged yet and return the receipt. Raises: `deciding_failure`."""
        parts = self._parts()
        self._refuse_going_down(parts, within)
        request = self._request if self._request["timeout"] is None else {**self._request, "timeout": within}
        if self._checked:
            request = {**request, "routing": self._routing}  # split rows belong to the regions of this routing
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
                failed.append(Unavailable(answer.message, answer.details))  # retryable for the remaining rows
            else:
                self._waiting.append(rows)
                self._unknown = answer if isinstance(answer, UnknownOutcome) else self._unknown
                failed.append(answer)
        if failed:
            raise deciding_failure(failed, repeatable=self._request["token"] is not None, alone=self._router.alone)
        return self._receipt()

    def _refuse_going_down(self, parts: Sequence[Part], within: float) -> None:
        """Compare the newest applied tokens of all owners once, since each owner compares only its own. Raises:
        Invalid."""
        token = Token.parse(self._request["token"])
        if token is None or len(parts) < 2 or not self._may_go_down:
            return
        asking = {"producer": token.producer, "routing": self._routing}
        calls = [
            Call(to, regions, partial(to.read, "applied", {**asking, "regions": regions}, timeout=within))
            for to, regions, _ in parts
        ]
        answers = self._router.answers(calls)
        failed = [answer for answer in answers if isinstance(answer, MemWalError)]
        if failed:
            raise deciding_failure(failed, repeatable=True, alone=self._router.alone)
        found = Applied.together(Applied(*answer) for answer in answers if not isinstance(answer, MemWalError))
        check_rises(token, {"of one daemon": found.newest, "of another": found.everywhere})
        self._may_go_down = False

    def outcome(self, error: MemWalError) -> MemWalError:
        """Return the error for the caller after `error` ended the attempts. Every kind except UnknownOutcome means
        that nothing was applied."""
        if isinstance(error, UnknownOutcome) or (self._unknown is None and not self._acks):
            return error
        if not self._acks and self._unknown is not None:
            return self._unknown
        if "positions" in error.details:
            return UnknownOutcome(error.message, error.details)
        missing = sum(rows.num_rows for rows in self._waiting)
        advice = "" if "same token" in str(error) else "; retry with the same token"
        return UnknownOutcome(
            f"of {self._given} rows {self._given - missing} were applied, the others were not: {error}{advice}"
        )

    def _parts(self) -> list[Part]:
        """Return the unsent rows by owner. Rows are routed only if no daemon owns all regions."""
        rows = self._waiting[0] if len(self._waiting) == 1 else pa.concat_tables(self._waiting)
        router, self._routing = self._router, self._router.routing
        if (sole := router.sole) is not None:
            return [(sole, router.regions, rows)]
        splitter = self._splitter()
        self._routing = splitter.routing
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
        """Return the rows that were not applied, if `answer` names the regions that applied their rows; else None.

        After a resize the same region ids contain other rows, so an answer with another routing than the splitter's
        is ignored.
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
        """Return rows and their buckets. Rows are checked before the first split."""
        if not self._checked:
            op = self._request["op"]
            deletes = op != "write" or self._request["delete"]
            rows = splitter.checked_keys(rows, and_values=op == "update") if deletes else splitter.checked(rows)
            self._checked = True
        return rows, splitter.buckets(rows)

    def _receipt(self) -> Receipt:
        positions = {region: position for ack in self._acks for region, position in ack["positions"].items()}
        # An attempt without an answer may have applied rows, which a later attempt of this call reports as repeated.
        # They count as applied by this call.
        ours = self._unknown is not None
        applied = any(ack["applied"] for ack in self._acks) or not self._acks or ours
        told = {region: counts for ack in self._acks for region, counts in ack.get("regions", {}).items()}
        regions = {region: _counts(known(RegionCounts, counts), ours=ours) for region, counts in told.items()}
        counted = self._request.get("delete") and not ours  # no later count includes rows that a lost attempt deleted
        rows = sum(ack["rows"] for ack in self._acks) if counted else self._given
        return Receipt(rows, applied, positions, sum(ack["skipped"] for ack in self._acks), regions)


def _counts(told: RegionCounts, *, ours: bool) -> RegionCounts:
    """Return the counts of a region. `ours`: repeated rows may be this call's own, so they count as applied."""
    return RegionCounts(told.applied + told.repeated, 0, told.skipped) if ours else told


def deciding_failure(failed: Sequence[MemWalError], *, repeatable: bool, alone: bool) -> MemWalError:
    """Return the failure that decides the next step: a failure that ends the call takes precedence over a temporary
    one."""
    order = {"raise": 0, "learn": 1, "wait": 2}

    def weight(error: MemWalError) -> tuple[int, bool]:
        return order[verdict(error, repeatable=repeatable, alone=alone)], not isinstance(error, UnknownOutcome)

    return min(failed, key=weight)


class InFlight:
    """A limit on bytes in flight; callers wait for room. A call larger than the limit runs alone.

    Thread safety. Any thread.
    """

    def __init__(self, most: int) -> None:
        """Set the limit to `most` bytes."""
        self._most, self._taken = most, 0
        self._freed = threading.Condition()

    @contextmanager
    def of(self, size: int, timeout: float) -> Iterator[None]:
        """Hold `size` bytes of room. Raises: Unavailable after `timeout` seconds without room; nothing was sent."""

        def has_room() -> bool:
            return not self._taken or self._taken + size <= self._most or left()

        with ending(self._wake), self._freed:
            if not self._freed.wait_for(has_room, timeout):
                raise Unavailable(
                    f"{self._taken} bytes are in flight already, and no room came free for {timeout:g} s; retry"
                )
            expect_waiting()
            self._taken += size
        try:
            yield
        finally:
            with self._freed:
                self._taken -= size
                self._freed.notify_all()

    def _wake(self) -> None:
        with self._freed:
            self._freed.notify_all()
