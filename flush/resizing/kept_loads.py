"""Restore the markers of loads that landed just before the switch of a resize, if the switch replaced them.

In arrow format the switch (flush.resizing.routing) replaces Lance's MemWAL index, which holds the markers. No commit
can come in between, because every region is sealed. But a load belongs to no region, and Lance detects no conflict with
it: it rebases the new index, planned on a version without the load. Until a region is opened nothing else is committed,
so a repeated load would write the same rows again; after that it would undo newer ones. The process that opens the
regions therefore restores the markers first. *Crash before this: the regions are sealed, and the next process does it.*
"""

from __future__ import annotations

from uuid import UUID

from memwal.flush.base.load_id import loads_in
from memwal.flush.base.manifest import highest
from memwal.flush.base.state import read_state
from memwal.flush.base.table import BaseTable
from memwal.flush.commits.append_pass import mark
from memwal.wal import Corrupt, ObjectStore
from memwal.wal.panics import panics_as_errors

_LOOK_BACK = 64
"""Versions. Few are made while all regions are sealed."""


def with_its_loads(base: BaseTable, store: ObjectStore) -> BaseTable:
    """Return the newest view with the markers of loads that a switch has replaced; `base` if none is missing.

    Raises OSError, RuntimeError of Lance; Corrupt, StoreUnavailable, StoreRefused.
    """
    if base.wal_format != "arrow":
        return base
    known = _known(store, base.version)
    while missing := {id: of for id, of in known.items() if base.committed.get(id, 0) < of}:
        try:
            with panics_as_errors:
                mark(base.dataset, missing)
        except (OSError, RuntimeError):
            if base.dataset.latest_version == base.dataset.version:
                raise
        base = BaseTable.open(base.uri, base.storage_options)
    return base


def _known(store: ObjectStore, newest: int) -> dict[UUID, int]:
    """Return the generations of loads in the versions up to `newest`, back to a restore.

    A restore removes loads on purpose.
    """
    known: dict[UUID, int] = {}
    for version in range(newest, max(0, newest - _LOOK_BACK), -1):
        try:
            state = read_state(store, version)
        except Corrupt:  # cleaned up
            break
        known = highest(known, {id: state.committed[id] for id in loads_in(state.committed)})
        if state.transaction is not None and state.transaction.operation == "restore":
            break
    return known
