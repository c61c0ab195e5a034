"""Waits of the product that a test of one process leaves out. Imports no pytest: started programs use it too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import memwal.flush.base.open as reading
from memwal.flush.commits.rounds import Rounds


@contextmanager
def as_only_process() -> Iterator[None]:
    """Leave out waits for other processes and for storage that may recover; local files without other users do not.

    A dataset that cannot be read is read as often as usual, without pauses. A commit does not wait up to
    `flush.commits.committer.COURTESY` seconds for a committer that planned the same SSTs and has ended.
    """
    pauses = (0.0,) * len(reading.PAUSES)
    with patch.object(reading, "PAUSES", pauses), patch.object(Rounds, "_gave_way", lambda *_: False):
        yield
