"""Generations that the base table held once, and that somebody took back with Lance's `restore` of an older version.

Their SSTs were pruned when they were committed, so above what the table holds now generations are missing. Without a
reason that is `Corrupt`: the rows of a lost manifest, or of lost versions of the base, would be passed over in silence.
With `restore` it is what somebody wanted, and what was published since is committed on top of the version restored.

The reason is in the history of the base: the version that a restore made, and what the version below it held. Where
either was cleaned up meanwhile, the gap stays `Corrupt`.
"""

from __future__ import annotations

from collections.abc import Mapping
from uuid import UUID

from flush.table_state import read_state, versions
from wal import Corrupt, ObjectStore


def taken_back(store: ObjectStore, newest: int) -> Mapping[UUID, int]:
    """Per region the highest generation that a restore up to version `newest` took away; absent = none.

    Reads the manifests of all versions. Raises StoreUnavailable, StoreRefused.
    """
    found: dict[UUID, int] = {}
    for version in versions(store):
        if version > newest:
            break
        try:
            made = read_state(store, version)
            if made.transaction is None or made.transaction.operation != "restore":
                continue
            before = read_state(store, version - 1)
        except Corrupt:  # cleaned up
            continue
        for region, generation in before.committed.items():
            if generation > made.committed.get(region, 0):
                found[region] = max(generation, found.get(region, 0))
    return found
