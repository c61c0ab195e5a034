"""The checkpoint of a stream: where it may be, whose it is, and one run at a time with it.

One of another table would skip, in silence, every row that it counts as done; so it names its table.

Spark looks whether a file of a checkpoint is there, and then renames its own onto that name: two runs whose triggers
fire at the same moment, as triggers of one interval do, may both believe that the micro-batch of a number is theirs. Of
its rows each region has those of the run that came first, and the checkpoint counts those of the other as read. So a
run locks its checkpoint on a local disk.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from memwal.flush import BaseTable
from memwal.ingest.errors import Invalid
from memwal.ingest.settings.load import Settings
from memwal.ingest.settings.paths import is_remote, local_path

MARKER = "memwal-table"
"""File in a checkpoint that holds the id of the table it belongs to; Spark leaves files it does not know alone."""
LOCK = "memwal-lock"
"""File in a checkpoint that a run holds locked. The lock ends with the run, however that ends; the file stays."""


def check_checkpoint(settings: Settings) -> None:
    """Raises: Invalid where the default would lie beside a table that only a storage URL reaches."""
    if not settings.sink.checkpoint and is_remote(settings.table.uri):
        raise Invalid(
            "sink.checkpoint is not set, and Spark keeps none beside a table on object storage by itself; "
            "write a local directory, or a Hadoop URL such as s3a:// for a Spark that has its file system"
        )


def refuse_old_checkpoint(settings: Settings, base: BaseTable | None) -> None:
    """Raises: Invalid where it is another table's. `base`: None when the table is to be created."""
    if is_remote(settings.checkpoint):
        return
    checkpoint = local_path(settings.checkpoint)
    offsets, marker = checkpoint / "offsets", checkpoint / MARKER
    begun = offsets.is_dir() and any(offsets.iterdir())
    if begun and (base is None or not marker.exists() or marker.read_text().strip() != base.table_id):
        raise Invalid(
            f"sink.checkpoint: {settings.checkpoint} belongs to another table than the one at {settings.table.uri}; "
            "delete it to read the source from its beginning, or put its table back"
        )


def mark_checkpoint(settings: Settings, base: BaseTable) -> None:
    """Note in the checkpoint which table it belongs to, before Spark writes its first offset."""
    if not is_remote(settings.checkpoint):
        checkpoint = local_path(settings.checkpoint)
        checkpoint.mkdir(parents=True, exist_ok=True)
        (checkpoint / MARKER).write_text(f"{base.table_id}\n")


def unfinished(settings: Settings) -> tuple[str, int] | None:
    """Query and number of the micro-batch that is begun and not noted as done; None where there is none, or where only
    Spark can read the checkpoint.
    """
    if is_remote(settings.checkpoint):
        return None
    checkpoint = local_path(settings.checkpoint)
    try:
        query = str(json.loads((checkpoint / "metadata").read_text())["id"])
        begun, done = (max(_numbers(checkpoint / name), default=-1) for name in ("offsets", "commits"))
    except FileNotFoundError:
        return None
    return (query, begun) if begun > done else None


def _numbers(directory: Path) -> list[int]:
    """Of the micro-batches that Spark notes there."""
    return [int(file.name) for file in directory.iterdir() if file.name.isdecimal()] if directory.exists() else []


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
