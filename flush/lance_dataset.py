"""Opening a Lance dataset and telling apart why it cannot be opened.

pylance raises ValueError for a table that is not there, and for one that it cannot read: wrong credentials, an endpoint
that is down, a damaged manifest. Taken for "not there", a passing fault of storage would have a table created anew. So
storage is asked by our own client, which answers each of these with its own error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import lance

from wal import Corrupt, ObjectStore

T = TypeVar("T")

_VERSIONS, _MANIFEST = "_versions/", ".manifest"


def open_dataset(store: ObjectStore, uri: str, version: int | None = None) -> lance.LanceDataset | None:
    """The dataset at `uri`, the root of `store`, at its newest version or at `version`; None where there is none.

    Raises StoreRefused, StoreUnavailable; Corrupt where versions are listed that Lance cannot read; OSError of storage.
    """
    opened = _try(store, uri, version)
    if isinstance(opened, lance.LanceDataset):
        return opened
    keys = [key for key in store.list(_VERSIONS) if key.endswith(_MANIFEST)]
    if version is not None or not keys:
        return None
    opened = _try(store, uri, version)  # it may have been created, or storage may have recovered, just now
    if isinstance(opened, lance.LanceDataset):
        return opened
    store.get(keys[0])  # says so where reading is not allowed
    raise Corrupt(f"{uri}: Lance cannot read the newest of {len(keys)} versions ({opened}); restore it from a backup")


def _try(store: ObjectStore, uri: str, version: int | None) -> lance.LanceDataset | str:
    """The dataset, or in one line why Lance has none."""
    try:
        return lance.dataset(uri, version=version, storage_options=store.storage_options)
    except ValueError as error:
        return (str(error).splitlines() or [type(error).__name__])[0].split(", /")[0]  # without Lance's source line


def read_again(store: ObjectStore, prefix: str, read: Callable[[], T]) -> T:
    """`read()`, a second time where Lance failed and storage answers our own client about `prefix`.

    Raises StoreRefused, StoreUnavailable; what the second `read` raises.
    """
    try:
        return read()
    except ValueError:
        store.list(prefix)
        return read()
