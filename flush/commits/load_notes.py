"""Notes of loads beside the table.

    {table}/_mem_wal/loads/{id}.json           {"token": "books-2026"}: which token a load's id is made of, for
                                               `memwal log`; advice only
    {table}/_mem_wal/loading/{id}_{generation}_{32 hex}.json   {"until": Unix seconds}: an attempt at a load

An attempt begins with its note, before its process commits what was acknowledged before (flush.commits.load), and
renews it while it runs. It has two readers.

**Automatic commits** wait as long as the note is renewed, for a bounded time (`ingest.table.commit_loop`): a load
merges all its rows in one version, and begins again where another commit lands first, so a daemon that commits every
30 seconds would keep a load that takes longer from ever landing. That is advice.

**Deletes with a condition** must not run beside a load.

    invariant: no load lands between a region's look at the newest rows of keys and the tombstones that it logs for
    those that pass.

Else the tombstones hide the loaded rows, which nobody has looked at. So a region looks for notes first, in its own
thread, and refuses while an attempt is under way. The flush that an attempt begins with goes through that thread: what
the region looked at before has its tombstones in the log by then, and is committed before the load is written; whatever
the region looks at later finds the note. (model: Load!Settle, Load!LookForNotes, Load!LookAt, Load!LogTombstone)

The note of a process that was killed is no longer renewed, but what it has asked of storage may land late. So before
such a note is passed over, its attempt is **ended**: its generation is committed without rows, and all below that are
not, after which Lance refuses to commit it with them (flush.base.load_id). An attempt that is ended while it runs
begins again, with the next generation. (model: Load!End)

A note says nothing once the load has landed, or a generation as high is committed. Clocks only decide when an attempt
is ended.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

import lance

from memwal.flush.base.fsync import sync_table
from memwal.flush.base.load_id import ended_id, has_landed, is_load, next_attempt
from memwal.flush.base.table import BaseTable
from memwal.flush.commits.append_pass import mark
from memwal.wal import Clock, Ids, ObjectStore
from memwal.wal.layout import LOADING_PREFIX, load_key, loading_key
from memwal.wal.panics import panics_as_errors

RENEW_EVERY, LASTS, LASTS_LONGEST = 10.0, 30.0, 60.0
"""Seconds. The longest is for which a note counts at most, whatever it says: clocks may differ."""
_NAME = re.compile(r"([0-9a-f-]{36})_([1-9][0-9]*)_([0-9a-f]{32})\.json")


@dataclass(frozen=True)
class LoadAttempt:
    """One attempt of one process at a load."""

    id: UUID
    generation: int
    unique: str
    """32 hex digits."""

    @property
    def key(self) -> str:
        """The key of its note."""
        return loading_key(f"{self.id}_{self.generation}_{self.unique}")

    def may_land(self, committed: Mapping[UUID, int]) -> bool:
        """Return whether the attempt may land in a base table with the generations `committed`. Pure."""
        return not has_landed(committed, self.id) and self.generation > committed.get(self.id, 0)

    def renew(self, store: ObjectStore, clock: Clock) -> None:
        """Write the note, or write it once more. Raises StoreUnavailable, StoreRefused."""
        store.put(self.key, json.dumps({"until": clock.now() + LASTS}).encode())

    def withdraw(self, store: ObjectStore) -> None:
        """Delete the note. Requires: the attempt has landed or failed, and nothing that it asked of storage is left.

        Raises StoreUnavailable, StoreRefused.
        """
        store.delete(self.key)

    def is_renewed(self, store: ObjectStore, clock: Clock) -> bool:
        """Return whether its process has renewed the note lately. Raises StoreUnavailable, StoreRefused."""
        try:
            until = float(json.loads(store.get(self.key) or b"null")["until"])
        except (ValueError, TypeError, KeyError):
            return False
        return 0.0 < until - clock.now() <= LASTS_LONGEST


def begin_load(store: ObjectStore, base: BaseTable, id: UUID, clock: Clock, ids: Ids) -> LoadAttempt:
    """Note a new attempt at a load. `base`: the newest version.

    Raises StoreUnavailable, StoreRefused.
    """
    attempt = LoadAttempt(id, next_attempt(base.committed, id), ids.uuid().hex)
    attempt.renew(store, clock)
    return attempt


def under_way(store: ObjectStore, newest: Callable[[], BaseTable]) -> list[LoadAttempt]:
    """Return the attempts that may still land. One listing; `newest`, asked if there is a note, returns the newest
    version of the base table.

    Raises StoreUnavailable, StoreRefused; what `newest` raises.
    """
    noted = _noted(store)
    committed = newest().committed if noted else {}
    return [each for each in noted if each.may_land(committed)]


def _noted(store: ObjectStore) -> Sequence[LoadAttempt]:
    parsed = [_NAME.fullmatch(key.removeprefix(LOADING_PREFIX)) for key in store.list(LOADING_PREFIX)]
    found = [LoadAttempt(UUID(name[1]), int(name[2]), name[3]) for name in parsed if name]
    return [each for each in found if is_load(each.id)]


def is_asked_to_wait(store: ObjectStore, clock: Clock, base: BaseTable) -> bool:
    """Return whether automatic commits should wait for a load now. `base`: a recent version of the base table.

    Raises StoreUnavailable, StoreRefused.
    """
    return any(each.is_renewed(store, clock) for each in under_way(store, lambda: base))


def end_abandoned(store: ObjectStore, newest: Callable[[], BaseTable], clock: Clock) -> list[LoadAttempt]:
    """End the attempts that nobody renews, and delete the notes that say nothing any more; return the attempts that are
    under way. `newest`: as of `under_way`.

    Durability. What is ended is synced to the disk.
    Raises OSError, RuntimeError of Lance; StoreUnavailable, StoreRefused; what `newest` raises.
    """
    left = list[LoadAttempt]()
    for attempt in _noted(store):
        if attempt.may_land(newest().committed):
            if attempt.is_renewed(store, clock):
                left.append(attempt)
                continue
            _end(attempt, newest)
        attempt.withdraw(store)
    return left


def _end(attempt: LoadAttempt, newest: Callable[[], BaseTable]) -> None:
    """Commit generations without rows until that of `attempt` is, unless the load lands first."""
    while attempt.may_land((base := newest()).committed):
        generation = next_attempt(base.committed, attempt.id)
        dataset = lance.dataset(base.uri, version=base.version, storage_options=dict(base.storage_options) or None)
        try:
            with panics_as_errors:
                mark(dataset, {attempt.id: generation, ended_id(attempt.id): generation})
        except (OSError, RuntimeError):
            if dataset.latest_version == base.version:
                raise
        else:
            sync_table(dataset)


def note_token(store: ObjectStore, id: UUID, token: str) -> None:
    """Note which token `id` is made of. Raises StoreUnavailable, StoreRefused."""
    store.put(load_key(id), json.dumps({"token": token}).encode())


def noted_token(store: ObjectStore, id: UUID) -> str | None:
    """Return the token that `id` is made of; None where no note tells. Raises StoreUnavailable, StoreRefused."""
    try:
        return str(json.loads(store.get(load_key(id)) or b"null")["token"])
    except (ValueError, TypeError, KeyError):
        return None
