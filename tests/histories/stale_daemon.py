"""Run a daemon with a planted fault: `python -m tests.histories.stale_daemon serve CONFIG`.

It answers reads from memory without a proof that it still owns their regions, unless it knows that it does not. The
judge must reject its history.
"""

from __future__ import annotations

from unittest.mock import patch

from memwal.ingest.cli.app import main
from memwal.ingest.service.daemon.balancer import Balancer
from memwal.wal import ReadLease


def _covers(lease: ReadLease, _: int) -> bool:
    return not lease.guard.fenced


if __name__ == "__main__":
    with (
        patch.object(ReadLease, "covers", _covers),
        patch.object(ReadLease, "fresh", property(lambda lease: not lease.guard.fenced)),
        patch.object(Balancer, "_check", lambda *_: None),
    ):
        main()
