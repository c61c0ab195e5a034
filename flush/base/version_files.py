"""List the files of each base-table version with their sizes: the bytes that the version keeps on storage.

    data/{name}.lance            with the directory data/{name}/, where Lance puts large values
    _deletions/{name}            deleted rows of a fragment
    _indices/{uuid}/             one segment of an index; counted as one file
    _versions/, _transactions/   the manifest and its transaction

Versions share most of their files, so bytes are always those of a set of versions: `stored_bytes`. Files of other
tables, which a shallow clone refers to, are not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import lance

from memwal.flush.base.manifest import manifest_version
from memwal.flush.base.state import TableState, read_state
from memwal.wal import ObjectInfo, ObjectStore

_DATA, _DELETIONS, _INDICES, _TRANSACTIONS = "data/", "_deletions/", "_indices/", "_transactions/"
_VERSIONS = "_versions/"
_LISTINGS = 3
"""Attempts to list the tags; two in a row fail only if two tags are deleted within milliseconds."""

Files = Mapping[str, int]
"""Key below the table's root -> size in bytes; an index segment has the key of its directory."""


@dataclass(frozen=True)
class StoredVersion:
    """A version on storage. `written`: Unix seconds, by the clock of the storage."""

    version: int
    written: float


def stored_versions(store: ObjectStore) -> list[StoredVersion]:
    """Return the versions of the table at the root of `store`, ascending. One listing.

    Raises StoreUnavailable, StoreRefused.
    """
    return sorted((each for info in store.describe(_VERSIONS) if (each := _stored(info))), key=lambda it: it.version)


def tagged_versions(dataset: lance.LanceDataset) -> set[int]:
    """Return the tagged versions of the main branch. Raises OSError, ValueError of Lance."""
    return {int(tag["version"]) for tag in tags_of(dataset).values() if tag.get("branch") is None}


def tags_of(dataset: lance.LanceDataset) -> Mapping[str, Any]:
    """Return the tags of a table by name, as Lance describes them. Raises OSError, ValueError of Lance."""
    for _ in range(_LISTINGS - 1):
        with suppress(OSError, ValueError):  # Lance lists the tags, then reads each: one was deleted in between
            return dataset.tags.list()
    return dataset.tags.list()


def stored_bytes(versions: Iterable[Files]) -> int:
    """Return the bytes of the files that at least one of `versions` has. Pure."""
    every: dict[str, int] = {}
    for files in versions:
        every.update(files)
    return sum(every.values())


class VersionFiles:
    """Looks up the files of versions. Sizes are those of a single listing.

    Thread safety. One thread. Errors. Methods raise StoreUnavailable, StoreRefused; `of` also Corrupt for a version
    that is not on storage or cannot be parsed.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def of(self, version: int) -> Files:
        """Return the files of `version`. Reads its manifest; files that are not on storage are omitted."""
        return self.of_state(read_state(self._store, version, transaction=False))

    def of_state(self, state: TableState) -> Files:
        """Return the files of the version described by `state`."""
        keys = [key for fragment in state.fragments.values() for key in fragment.files]
        keys += [key.removesuffix(".lance") for key in keys]
        keys += [fragment.deletion_file for fragment in state.fragments.values() if fragment.deletion_file]
        keys += [f"{_INDICES}{segment}" for segments in state.indexes.values() for segment in segments]
        keys += [state.transaction_key, f"{_VERSIONS}{state.version}"]
        return {key: self.sizes[key] for key in keys if key in self.sizes}

    @cached_property
    def sizes(self) -> Counter[str]:
        """Size of each file of the base table, those without a version too; of directories of large values and of index
        segments, the sum.
        """
        sizes: Counter[str] = Counter()
        for folder in (_DATA, _DELETIONS, _TRANSACTIONS, _INDICES):
            for info in self._store.describe(folder):
                first, _, _ = info.key.removeprefix(folder).partition("/")
                sizes[folder + first] += info.size
        for info in self._store.describe(_VERSIONS):
            if (each := _stored(info)) is not None:
                sizes[f"{_VERSIONS}{each.version}"] = info.size
        return sizes


def _stored(info: ObjectInfo) -> StoredVersion | None:
    version = manifest_version(info.key)
    return None if version is None else StoredVersion(version, info.modified)
