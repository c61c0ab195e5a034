"""One put or delete on its way to the owners of its rows, in as many attempts as it takes.

Rows of which nothing was applied are sent again; they may have other owners by then. Rows that may be applied are sent
again only with their token, which every region knows them by; without one the caller is told.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ingest.attempts import verdict
from ingest.connection import Connection
from ingest.errors import MemWalError, Unavailable, UnknownOutcome
from ingest.receipts import Receipt
from ingest.router import Router
from ingest.splitting import Splitter

Part = tuple[Connection, pa.Table]


class RoutedWrite:
    """The state of one write between its attempts. Thread safety. One thread."""

    def __init__(
        self, router: Router, splitter: Callable[[], Splitter], rows: pa.Table, request: Mapping[str, Any], grace: float
    ) -> None:
        """`request`: of the op "write", for all parts. `grace`: seconds longer that an answer is waited for."""
        self._router, self._splitter, self._request, self._grace = router, splitter, request, grace
        self._given = rows.num_rows
        self._waiting: list[pa.Table] = [rows]
        self._checked = False
        self._acks: list[dict[str, Any]] = []
        self._unknown: UnknownOutcome | None = None

    def attempt(self, within: float) -> Receipt:
        """Send what was not acknowledged yet. Raises: the worst that happened to any part of it."""
        parts = self._parts()
        request = self._request if self._request["timeout"] is None else {**self._request, "timeout": within}
        calls = [partial(to.write, rows, request, within + self._grace) for to, rows in parts]
        answers = self._router.side_by_side(calls)
        self._waiting = []
        for (_, rows), answer in zip(parts, answers, strict=True):
            if isinstance(answer, UnknownOutcome) and "positions" in answer.details:
                self._acks.append(answer.details)
                self._waiting.append(self._without(rows, answer.details["positions"]))
            elif isinstance(answer, MemWalError):
                self._waiting.append(rows)
                self._unknown = answer if isinstance(answer, UnknownOutcome) else self._unknown
            else:
                self._acks.append(answer)
        if self._waiting:
            raise the_worst(
                [_of_the_rest(answer) for answer in answers],
                repeatable=self._request["token"] is not None,
                alone=self._router.alone,
            )
        return self._receipt()

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
            return [(self._router.sole, rows)]
        router = self._router
        rows, buckets = self._bucketed(rows)
        self._waiting = [rows]
        present = np.unique(buckets).tolist()
        parts = []
        for endpoint, regions in router.owners(router.regions[bucket] for bucket in present).items():
            mine = [bucket for bucket in present if router.regions[bucket] in regions]
            part = rows if len(mine) == len(present) else rows.filter(pa.array(np.isin(buckets, mine)))
            parts.append((router.connection(endpoint), part))
        return parts

    def _without(self, rows: pa.Table, regions: Collection[str]) -> pa.Table:
        """The rows that are not of `regions`, which have theirs."""
        rows, buckets = self._bucketed(rows)
        have = [bucket for bucket, region in enumerate(self._router.regions) if region in regions]
        return rows.filter(pa.array(~np.isin(buckets, have)))

    def _bucketed(self, rows: pa.Table) -> tuple[pa.Table, npt.NDArray[np.int32]]:
        """Rows, checked before they are split for the first time, and their buckets."""
        splitter = self._splitter()
        if not self._checked:
            rows = splitter.checked_keys(rows) if self._request["delete"] else splitter.checked(rows)
            self._checked = True
        return rows, splitter.buckets(rows)

    def _receipt(self) -> Receipt:
        positions = {region: position for ack in self._acks for region, position in ack["positions"].items()}
        applied = any(ack["applied"] for ack in self._acks) if self._acks else True
        return Receipt(self._given, applied, positions, sum(ack["skipped"] for ack in self._acks))


def _of_the_rest(answer: Any) -> Any:
    """An answer as it counts for the rows that are left: where some regions have theirs, the others applied nothing."""
    if isinstance(answer, UnknownOutcome) and "positions" in answer.details:
        return Unavailable(answer.message, answer.details)
    return answer


def the_worst(answers: Sequence[Any], *, repeatable: bool, alone: bool) -> MemWalError:
    """Of the failures among `answers` the one that decides what is next: what ends the call before what may pass."""
    order = {"raise": 0, "learn": 1, "wait": 2}

    def weight(error: MemWalError) -> tuple[int, bool]:
        return order[verdict(error, repeatable=repeatable, alone=alone)], not isinstance(error, UnknownOutcome)

    return min((answer for answer in answers if isinstance(answer, MemWalError)), key=weight)
