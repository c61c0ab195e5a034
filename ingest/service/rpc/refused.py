"""Count the requests that a listening process rejected, by interface and reason."""

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
    """The number of rejected requests since the start of the process.

    Thread safety. Any thread.
    """

    def __init__(self) -> None:
        self._lock, self._counts = threading.Lock(), Counter[tuple[Way, Why]]()

    def add(self, way: Way, why: Why) -> None:
        """Count one request."""
        with self._lock:
            self._counts[way, why] += 1

    def counts(self, way: Way) -> Mapping[Why, int]:
        """Return the rejected requests of one interface by reason, with 0 for reasons without any."""
        with self._lock:
            return {why: self._counts[way, why] for why in WHYS}
