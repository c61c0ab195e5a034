"""Requests that a listening process refused, counted by the way in and the reason."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from typing import Literal, get_args

Way = Literal["flight", "http"]
Why = Literal["token", "certificate", "role", "site", "invalid", "size", "busy", "time", "memory"]
WAYS: tuple[Way, ...] = get_args(Way)
WHYS: tuple[Why, ...] = get_args(Why)


class Refused:
    """The number of refused requests since the start of the process.

    Thread safety. Any thread.
    """

    def __init__(self) -> None:
        self._lock, self._counts = threading.Lock(), Counter[tuple[Way, Why]]()

    def add(self, way: Way, why: Why) -> None:
        """Count one request."""
        with self._lock:
            self._counts[way, why] += 1

    def counts(self, way: Way) -> Mapping[Why, int]:
        """Return the requests that came this way, by reason; every reason is there."""
        with self._lock:
            return {why: self._counts[way, why] for why in WHYS}
