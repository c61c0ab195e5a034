"""Opening a store from a table's URI, and finding out whether it keeps its word."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import unquote, urlsplit

from wal.clock import Ids
from wal.errors import StoreRefused
from wal.layout import PROBE_PREFIX
from wal.store import ObjectStore, PutOutcome
from wal.store_local import LocalStore
from wal.store_memory import MemoryStore

_RACERS = 4


def open_store(root: str, storage_options: Mapping[str, str] | None = None) -> ObjectStore:
    """The store whose keys are below `root`, a table's URI: a local path, file:// or memory://.

    Each memory:// store is new and empty. Creates nothing.
    Raises StoreRefused for other schemes, and where the path is a file.
    """
    scheme, found, _ = root.partition("://")
    if not found:
        return _local(root, storage_options)
    if scheme == "file":
        return _local(unquote(urlsplit(root).path), storage_options)
    if scheme == "memory":
        return MemoryStore()
    raise StoreRefused(
        f"{root}: storage scheme {scheme!r} is not supported by this version; use a local path, file:// or memory://"
    )


def _local(path: str, storage_options: Mapping[str, str] | None) -> LocalStore:
    if not path:
        raise StoreRefused("the table's path is empty; give a local path, such as ./packages.lance")
    if Path(path).exists() and not Path(path).is_dir():
        raise StoreRefused(f"{path}: is a file; a table is a directory, give its path")
    return LocalStore(path, storage_options)


def probe(store: ObjectStore, ids: Ids) -> None:
    """Let four threads create one key at once; exactly one may win, and the key must hold its bytes.

    Leaves nothing behind. Raises StoreRefused, saying what was seen, and what `put_if_absent` raises.
    """
    key = PROBE_PREFIX + ids.token()
    bodies = [f"racer {number}".encode() for number in range(_RACERS)]
    start = threading.Barrier(_RACERS)

    def race(body: bytes) -> PutOutcome:
        start.wait()
        return store.put_if_absent(key, body)

    try:
        with ThreadPoolExecutor(_RACERS) as pool:
            outcomes = list(pool.map(race, bodies))
        _judge(store, key, outcomes, bodies)
    finally:
        store.delete(key)


def _judge(store: ObjectStore, key: str, outcomes: list[PutOutcome], bodies: list[bytes]) -> None:
    winners = [body for body, outcome in zip(bodies, outcomes, strict=True) if outcome is PutOutcome.CREATED]
    found = store.get(key)
    if len(winners) == 1 and found == winners[0]:
        return
    seen = ", ".join(f"{count} x {outcome.value}" for outcome, count in Counter(outcomes).items())
    raise StoreRefused(
        f"{store.url(key)}: {_RACERS} racing conditional creates of one key gave {seen}, and the key holds {found!r}; "
        "exactly one must win. This storage cannot hold a log: use one that supports conditional writes"
    )
