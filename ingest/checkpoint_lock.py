"""One run at a time with a checkpoint on a local disk.

Spark looks whether a file of a checkpoint is there, and then renames its own onto that name: two runs whose triggers
fire at the same moment, as triggers of one interval do, may both believe that the micro-batch of a number is theirs. Of
its rows each region has those of the run that came first, and the checkpoint counts those of the other as read.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from ingest.errors import Invalid
from ingest.source import is_remote, local_path

LOCK = "memwal-lock"
"""File in a checkpoint that a run holds locked; Spark leaves files it does not know alone. The lock ends with the run,
however that ends; the file stays."""


@contextmanager
def held(checkpoints: Sequence[str]) -> Iterator[None]:
    """Keep other runs on this host from `checkpoints`, but those on remote storage. Raises: Invalid where one runs."""
    with ExitStack() as locks:
        for checkpoint in checkpoints:
            if not is_remote(checkpoint):
                _lock(locks.enter_context(_file(local_path(checkpoint))), checkpoint)
        yield


def _file(checkpoint: Path) -> IO[bytes]:
    checkpoint.mkdir(parents=True, exist_ok=True)
    return (checkpoint / LOCK).open("ab")


def _lock(file: IO[bytes], checkpoint: str) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Invalid(
            f"sink.checkpoint: another run is under way with {checkpoint}; stop it, or give this one its own"
        ) from None
