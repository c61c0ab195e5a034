"""Readiness: the reasons why a process is not ready, which /health/readyz returns.

A ready process accepts writes and reads now. Reasons come from the process itself (it starts or drains), from the
table's regions (fenced, poisoned, failing flushes), and from storage that does not answer.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any
from uuid import UUID

Reason = dict[str, str]
"""`reason`: one word for programs; `text`: one line for people; `region`: the id, if the reason concerns one region."""

_OF_STATE = {"fenced": "region_fenced", "poisoned": "region_poisoned", "flush_failing": "flush_failing"}


class Health:
    """The reasons of the process itself.

    Thread safety. Any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[str, Reason] = {}

    def hold(self, reason: str, text: str) -> None:
        """Add a reason: the process is not ready until `release`. A repeated call replaces the text."""
        with self._lock:
            self._held[reason] = {"reason": reason, "text": text}

    def release(self, reason: str) -> None:
        """Remove a reason."""
        with self._lock:
            self._held.pop(reason, None)

    def reasons(self) -> list[Reason]:
        """Return the current reasons, oldest first."""
        with self._lock:
            return list(self._held.values())


def of_regions(regions: Iterable[Mapping[str, Any]]) -> list[Reason]:
    """Return the reasons in the regions of `Table.status()`."""
    return [
        {
            "reason": _OF_STATE[state["state"]],
            "text": str(state["failure"] or state["flush_error"]),
            "region": str(state["id"]),
        }
        for state in regions
        if state["state"] in _OF_STATE
    ]


def of_commits(failures: Iterable[Mapping[str, str]]) -> list[Reason]:
    """Return the reasons in `commit_failures` of `Table.status()`."""
    return [
        {"reason": "commit_failing", "text": failure["error"]}
        | ({"region": failure["region"]} if failure["region"] else {})
        for failure in failures
    ]


def unclaimed_regions(missing: Iterable[UUID]) -> list[Reason]:
    """Return the reasons of regions that belong to this daemon, given the live daemons, but are not claimed."""
    text = "it belongs to this daemon, which has not claimed it yet or has lost it"
    return [{"reason": "region_not_claimed", "text": text, "region": str(region)} for region in missing]
