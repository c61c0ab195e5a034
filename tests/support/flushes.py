"""Flushes that a test holds up."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from memwal.ingest.engine.region.core import RegionCore


@contextmanager
def flushes_held() -> Iterator[None]:
    """Block the flushes of all regions inside the context."""
    opened, publish = threading.Event(), RegionCore.publish_next

    def held(core: RegionCore) -> bool:
        assert opened.wait(60), "the test held flushes for too long"
        return publish(core)

    with patch.object(RegionCore, "publish_next", held):
        try:
            yield
        finally:
            opened.set()
