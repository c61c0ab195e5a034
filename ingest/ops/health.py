"""Whether a process is ready, and why not: what /health/readyz answers.

Ready means that writes and reads are taken now. A process holds reasons against that itself (it starts, it drains), and
the table's regions give theirs: fenced, poisoned, flushes that fail; so does storage that does not answer when asked.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any
from uuid import UUID

Reason = dict[str, str]
"""`reason`: one word for programs; `text`: one line for people; `region`: its id, where it is about one."""

_OF_STATE = {"fenced": "region_fenced", "poisoned": "region_poisoned", "flush_failing": "flush_failing"}


class Health:
    """The reasons that a process itself holds against being ready.

    Thread safety. Any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[str, Reason] = {}

    def hold(self, reason: str, text: str, region: str = "") -> None:
        """Not ready from now on, for this reason (of this region); said again, the newer text counts."""
        about = {"region": region} if region else {}
        with self._lock:
            self._held[f"{reason} {region}"] = {"reason": reason, "text": text, **about}

    def release(self, reason: str, region: str = "") -> None:
        """That is over."""
        with self._lock:
            self._held.pop(f"{reason} {region}", None)

    def reasons(self) -> list[Reason]:
        """What is held now, in the order in which it came."""
        with self._lock:
            return list(self._held.values())


def of_regions(regions: Iterable[Mapping[str, Any]]) -> list[Reason]:
    """What the regions of `Table.status()` have against being ready."""
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
    """What `commit_failures` of `Table.status()` have against being ready."""
    return [
        {"reason": "commit_failing", "text": each["error"]} | ({"region": each["region"]} if each["region"] else {})
        for each in failures
    ]


def not_here(missing: Iterable[UUID]) -> list[Reason]:
    """What regions have against it that belong here, by the daemons that live, and are not."""
    text = "it belongs to this daemon, which has not claimed it yet, or lost it"
    return [{"reason": "region_not_claimed", "text": text, "region": str(region)} for region in missing]
