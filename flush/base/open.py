"""Opening a Lance dataset and telling apart why it cannot be opened.

pylance raises ValueError for a table that is not there, and for one that it cannot read: wrong credentials, an endpoint
that is down, a damaged manifest. Taken for "not there", a passing fault of storage would have a table created anew.
Taken for damage, a GET that was reset or refused once would have somebody restore a backup. So Lance is asked several
times, with pauses in between, and storage is asked by our own client, which answers each of these with its own error.
What Lance cannot read is damaged only where our client reads every byte of it.
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
"""Seconds between the attempts at one read. Lance tries again by itself where storage answers 5xx, but not a body that
breaks off and not a 403."""

_VERSIONS, _MANIFEST = "_versions/", ".manifest"


def open_dataset(
    store: ObjectStore, uri: str, version: int | None = None, session: Session | None = None
) -> lance.LanceDataset | None:
    """The dataset at `uri`, the root of `store`, at its newest version or at `version`; None where there is none.

    `session`: whose caches it uses; None for caches of its own.

    Raises StoreRefused, StoreUnavailable; Corrupt where versions are listed that Lance cannot read; OSError of storage.
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
        store.get(keys[0])  # says so where reading is not allowed
        SystemClock().sleep(pause)
    raise Corrupt(f"{uri}: Lance cannot read the newest of {len(keys)} versions ({opened}); restore it from a backup")


def _try(store: ObjectStore, uri: str, version: int | None, session: Session | None) -> lance.LanceDataset | str:
    """The dataset, or in one line why Lance has none."""
    try:
        with panics_as_errors:
            return lance.dataset(uri, version=version, storage_options=store.storage_options, session=session)
    except (ValueError, RustPanic) as error:
        return first_line(error)


def read_again(store: ObjectStore, prefix: str, read: Callable[[], T], clock: Clock | None = None) -> T:
    """`read()` of the dataset whose keys begin with `prefix`, tried again while Lance fails and storage answers.

    `clock`: the system's by default. Raises StoreRefused, StoreUnavailable where our own client cannot read an object
    of it; ValueError or RustPanic where Lance failed every time and our client reads all of them: they are damaged, or
    missing; OSError of storage.
    """
    for pause in PAUSES:
        try:
            return _read(read)
        except (ValueError, OSError, RustPanic):
            if not any(_VERSIONS in key for key in store.list(prefix)):
                return _read(read)  # it is not there, or was collected, which begins with the manifests
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
