"""Open a Lance dataset, and determine why one cannot be opened.

pylance raises ValueError both for a missing table and for one that it cannot read: wrong credentials, an endpoint that
is down, a damaged manifest. Interpreted as "missing", a short storage failure would make memwal recreate the table.
Interpreted as damage, a single reset or refused GET would make an operator restore a backup. This module therefore
calls Lance several times with pauses, and also reads with memwal's own storage client, which has a distinct error for
each case. A dataset counts as damaged only if that client reads every byte of it and Lance still fails.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import lance

from memwal.flush.base.caches import Session
from memwal.wal import Clock, Corrupt, ObjectStore, SystemClock
from memwal.wal.errors import first_line
from memwal.wal.panics import RustPanic, panics_as_errors

T = TypeVar("T")

PAUSES = (0.05, 0.2, 0.8)
"""Seconds between the attempts of one read. Lance itself retries after a 5xx answer, but not after a 403 or a truncated
body.
"""

_VERSIONS, _MANIFEST = "_versions/", ".manifest"


def open_dataset(
    store: ObjectStore, uri: str, version: int | None = None, session: Session | None = None
) -> lance.LanceDataset | None:
    """Open the dataset at `uri`, the root of `store`, at its newest version or at `version`; None if it is missing.

    `session`: the session whose caches it uses; None for separate caches.

    Raises StoreRefused, StoreUnavailable; Corrupt if versions are listed that Lance cannot read; OSError of storage.
    """
    opened = _try(store, uri, version, session)
    if isinstance(opened, lance.LanceDataset):
        return opened
    keys = [key for key in store.list(_VERSIONS) if key.endswith(_MANIFEST)]
    if version is not None or not keys:
        return None
    for pause in PAUSES:  # it may have been created, or storage may have recovered, just now
        opened = _try(store, uri, version, session)
        if isinstance(opened, lance.LanceDataset):
            return opened
        store.get(keys[0])  # raises if reading is not allowed
        SystemClock().sleep(pause)
    raise Corrupt(
        f"{uri}: Lance cannot read the newest of {len(keys)} versions ({opened}); after a power cut open it with "
        "`memwal serve`, `memwal run` or memwal.open, which goes back to the version before; else restore it from a "
        "backup"
    )


def _try(store: ObjectStore, uri: str, version: int | None, session: Session | None) -> lance.LanceDataset | str:
    """Return the dataset, or in one line the reason why Lance cannot open it."""
    try:
        with panics_as_errors:
            return lance.dataset(uri, version=version, storage_options=store.storage_options, session=session)
    except (ValueError, RustPanic) as error:
        return first_line(error)


def read_again(store: ObjectStore, prefix: str, read: Callable[[], T], clock: Clock | None = None) -> T:
    """Return `read()` of the dataset whose keys begin with `prefix`; retry while Lance fails and storage answers.

    `clock`: the system's by default. Raises StoreRefused, StoreUnavailable if memwal's own client cannot read an object
    of the dataset; ValueError or RustPanic if Lance failed every time although the client reads all objects, so that
    some are damaged or missing; OSError of storage.
    """
    for pause in PAUSES:
        try:
            return _read(read)
        except (ValueError, OSError, RustPanic):
            if not any(_VERSIONS in key for key in store.list(prefix)):
                return _read(read)  # missing, or collected: a collection deletes the manifests first
            (clock or SystemClock()).sleep(pause)
    try:
        return _read(read)
    except (ValueError, RustPanic):
        for key in store.list(prefix):
            store.get(key)
        raise


def _read(read: Callable[[], T]) -> T:
    with panics_as_errors:
        return read()
