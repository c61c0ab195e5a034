"""Making what pylance wrote on a local disk survive a power cut.

pylance does not fsync. A published SST moves `replay_after`, so its rows are never replayed from the log
again: its bytes must be on the disk before the manifest edit. The same holds for a base-table version before the SSTs
that it replaces are pruned. Object stores need nothing of this: a finished
PUT is durable.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

MEM_WAL = "_mem_wal"


def sync_tree(path: str) -> None:
    """Fsync every file and directory below `path`, then the directory that holds it.

    `path`: what pylance opens; a URL, which no local directory has for its name, is left alone. Raises
    OSError.
    """
    root = Path(path)
    if not root.is_dir():
        return
    for each in [*root.rglob("*"), root, root.absolute().parent]:
        _sync(each)


def sync_table(path: str) -> None:
    """Fsync everything of the Lance table at `path` but its `_mem_wal`, which whoever writes there has synced.

    A file that is clean already costs microseconds; one that another process removes meanwhile is passed over.
    Raises OSError.
    """
    root = Path(path)
    if not root.is_dir():
        return
    parts = [part for part in root.iterdir() if part.name != MEM_WAL]
    for each in [*(below for part in parts for below in part.rglob("*")), *parts, root]:
        with suppress(FileNotFoundError):
            _sync(each)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
