"""Open a store from a table's URI, and probe its conditional creation."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import unquote, urlsplit

import memwal.wal.store.event_loop  # noqa: F401 - see there: its exit handler must be registered before those of a store's users
from memwal.wal.clock import Clock, Ids, SystemClock
from memwal.wal.errors import StoreRefused
from memwal.wal.layout import PROBE_PREFIX
from memwal.wal.retries import WalOptions
from memwal.wal.slot import put_until_known
from memwal.wal.store.local import LocalStore
from memwal.wal.store.port import ObjectStore

_RACERS = 4
_SUPPORTED = "use a local path, file:// or s3://"
_INSTEAD = {
    "s3a": "write s3://",
    "s3n": "write s3://",
    "s3+ddb": "write s3://: conditional writes need no lock table",
}
"""Remedies for schemes of other programs."""


def open_store(
    root: str, storage_options: Mapping[str, str] | None = None, *, put_timeout: float = WalOptions.put_timeout
) -> ObjectStore:
    """Return the store whose keys are below `root`, a table's URI: a local path, file:// or s3://.

    `storage_options`: Lance's own; pass the store's `storage_options` to pylance. `put_timeout`: seconds that one
    attempt of a conditional create over a network may take.
    Creates nothing and sends no request.
    Raises StoreRefused for other schemes, for options that cannot work, and if the path is a file.
    """
    scheme, found, rest = root.partition("://")
    if found and "@" in rest.split("/")[0]:
        raise StoreRefused(f"a {scheme}:// URL must not hold credentials; give them as storage options")
    if not found:
        return _local(root, storage_options)
    if scheme == "file":
        return _local(unquote(urlsplit(root).path), storage_options)
    if scheme == "s3":
        return _s3(root, storage_options, put_timeout)
    raise StoreRefused(
        f"{root}: storage scheme {scheme!r} is not supported by this version; {_INSTEAD.get(scheme, _SUPPORTED)}"
    )


def _s3(root: str, storage_options: Mapping[str, str] | None, put_timeout: float) -> ObjectStore:
    # Imported here: the client library takes a quarter of a second, which a local table does not need.
    from memwal.wal.store.s3 import S3Store
    from memwal.wal.store.s3_options import read_options

    url = urlsplit(root)
    path = url.path.strip("/")
    try:
        segments = unquote(path, errors="strict").split("/")
    except UnicodeDecodeError:
        segments = [""]
    if not url.netloc or not path or url.query or url.fragment or {"", ".", ".."} & set(segments):
        raise StoreRefused(f"{root}: names no table; write s3://bucket/path/table.lance")
    options = read_options(storage_options or {}, url.netloc, os.environ)
    return S3Store(url.netloc, "/".join(segments), f"s3://{url.netloc}/{path}", options, put_timeout)


def _local(path: str, storage_options: Mapping[str, str] | None) -> LocalStore:
    if not path:
        raise StoreRefused("the table's path is empty; give a local path, such as ./packages.lance")
    if Path(path).exists() and not Path(path).is_dir():
        raise StoreRefused(f"{path}: is a file; a table is a directory, give its path")
    return LocalStore(path, storage_options)


def probe(store: ObjectStore, ids: Ids, clock: Clock | None = None, options: WalOptions | None = None) -> None:
    """Let four threads create one key concurrently; exactly one must win, and the key must hold its bytes.

    A thread that gets UNAVAILABLE or no answer retries as every writer does (`wal.slot`): S3 answers 409 to some.
    Leaves no object behind. `clock`: the system's by default.
    Raises: StoreRefused, with the observed outcomes; StoreUnavailable and OutcomeUnknown if storage gives no answer
    within the retry budget.
    """
    key = PROBE_PREFIX + ids.token()
    bodies = [f"racer {number}".encode() for number in range(_RACERS)]
    start = threading.Barrier(_RACERS)

    def race(body: bytes) -> bytes | None:
        start.wait()
        return put_until_known(store, key, body, clock=clock or SystemClock(), options=options or WalOptions())

    try:
        with ThreadPoolExecutor(_RACERS) as pool:
            try:
                taken_by = list(pool.map(race, bodies))
            except BaseException:
                start.abort()  # the other threads would wait forever for a thread that could not be started
                raise
        _judge(store, key, taken_by, bodies)
    finally:
        store.delete(key)


def _judge(store: ObjectStore, key: str, taken_by: list[bytes | None], bodies: list[bytes]) -> None:
    """Raise StoreRefused unless exactly one thread won.

    `taken_by`: for each thread the bytes that it read at the key after its create was refused, None for a winner.
    """
    winners = [body for body, by in zip(bodies, taken_by, strict=True) if by is None]
    found: set[bytes | None] = {by for by in taken_by if by is not None} or {store.get(key)}
    if len(winners) == 1 and found == set(winners):
        return
    seen = f"{len(winners)} x created, {len(bodies) - len(winners)} x already exists"
    raise StoreRefused(
        f"{store.url(key)}: {_RACERS} racing conditional creates of one key gave {seen}, and the key holds "
        f"{store.get(key)!r}; exactly one must win. This storage cannot hold a log: use storage with conditional "
        "writes"
    )
