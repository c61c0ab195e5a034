"""The ids and notes of loads.

    {table}/_mem_wal/loads/{id}.json           {"token": "books-2026"}: the token that a load's id is derived from, for
                                               `memwal log`; advice only
    {table}/_mem_wal/loading/{id}_{generation}_{32 hex}.json   {"until": Unix seconds}: an attempt at a load

An attempt begins with its note, before its process commits the rows acknowledged earlier (flush.commits.load), and
renews the note while it runs. Two kinds of code read the note.

**Automatic commits** wait while the note is renewed, for a bounded time (`table.commit_loop`). A load merges all
its rows in one version and restarts if another commit lands first; a daemon that commits every 30 seconds would prevent
a longer load from ever landing. This wait is advice, not needed for safety.

**Deletes with a condition** must not run beside a load.

    invariant: no load lands between a region's read of the newest rows of keys and the tombstones that it logs for the
    rows that match.

Otherwise the tombstones would hide the loaded rows, which were never checked against the condition. A region therefore
looks for notes first, in its own thread, and refuses the delete while an attempt is under way. The flush at the start
of an attempt passes through the same thread: the tombstones for rows that the region read before the flush are in the
log by then and are committed before the load is written; a later read finds the note. (model: Load!Settle,
Load!LookForNotes, Load!LookAt, Load!LogTombstone)

A killed process stops renewing its note, but its storage requests may still land late. Before its note is ignored,
its attempt is **ended**: its generation, and all uncommitted ones below it, are committed without rows, after which
Lance refuses to commit it with rows. A running attempt that is ended restarts with the next
generation. (model: Load!End)

A note has no effect once the load has landed or an equal or higher generation is committed. Clocks only decide when an
attempt is ended.

The outcome of a load (flush.commits.load) is recorded under the ids of its two markers. Neither id is a region. Each
attempt at a load has a generation, one above the committed generation. If it lands, its generation is committed
with the rows, for `load_id`. If another process ends it before it lands, its generation is
committed for `load_id` and `ended_id`. Lance commits no generation that is not above the committed one, so only one of
the two happens to each generation.

The ids are derived from the load's token: `load` or `void` in ASCII, then 12 bytes of the SHA-256 of the token, as a
UUID of version 8, which is reserved for custom ids (RFC 9562). Regions have ids of version 5 or 4, so the version
distinguishes the two.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

import lance

from memwal.flush.base.fsync import sync_table
from memwal.flush.base.table import BaseTable
from memwal.flush.commits.append_pass import mark
from memwal.wal import Clock, Ids, ObjectStore
from memwal.wal.layout import LOADING_PREFIX, load_key, loading_key
from memwal.wal.panics import panics_as_errors

_LOAD, _ENDED = b"load", b"void"
_VERSION, _VARIANT = 0x80, 0x80


def load_id(token: str) -> UUID:
    """Return the id of the load with `token`. Pure."""
    data = bytearray(_LOAD + hashlib.sha256(token.encode()).digest()[:12])
    data[6] = data[6] & 0x0F | _VERSION
    data[8] = data[8] & 0x3F | _VARIANT
    return UUID(bytes=bytes(data))


def ended_id(load: UUID) -> UUID:
    """Return the id of a load's ended attempts. Pure."""
    return UUID(bytes=_ENDED + load.bytes[len(_ENDED) :])


def is_load(id: UUID) -> bool:
    """Return whether `id` belongs to a load or its ended attempts, and not to a region. Pure."""
    return id.bytes.startswith((_LOAD, _ENDED)) and id.version == _VERSION >> 4


def is_ended(id: UUID) -> bool:
    """Return whether `id` belongs to the ended attempts at a load. Pure."""
    return is_load(id) and id.bytes.startswith(_ENDED)


def loads_in(committed: Iterable[UUID]) -> frozenset[UUID]:
    """Return the ids of loads, and of their ended attempts, among committed generations. Pure."""
    return frozenset(id for id in committed if is_load(id))


def has_landed(committed: Mapping[UUID, int], load: UUID) -> bool:
    """Return whether a load has landed in a base table with the generations `committed`. Pure."""
    return committed.get(load, 0) > committed.get(ended_id(load), 0)


def next_attempt(committed: Mapping[UUID, int], load: UUID) -> int:
    """Return the generation of an attempt at a load that has not landed. Pure."""
    return committed.get(load, 0) + 1


RENEW_EVERY, LASTS, LASTS_LONGEST = 10.0, 30.0, 60.0
"""Seconds. LASTS_LONGEST limits the validity of a note whatever its content, because clocks may differ."""
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
        """Write or rewrite the note. Raises StoreUnavailable, StoreRefused."""
        store.put(self.key, json.dumps({"until": clock.now() + LASTS}).encode())

    def withdraw(self, store: ObjectStore) -> None:
        """Delete the note. Requires: the attempt has landed or failed, and none of its storage requests is pending.

        Raises StoreUnavailable, StoreRefused.
        """
        store.delete(self.key)

    def is_renewed(self, store: ObjectStore, clock: Clock) -> bool:
        """Return whether its process has renewed the note recently. Raises StoreUnavailable, StoreRefused."""
        try:
            until = float(json.loads(store.get(self.key) or b"null")["until"])
        except (ValueError, TypeError, KeyError):
            return False
        return 0.0 < until - clock.now() <= LASTS_LONGEST


def begin_load(store: ObjectStore, base: BaseTable, id: UUID, clock: Clock, ids: Ids) -> LoadAttempt:
    """Write the note of a new attempt at a load. `base`: the newest version.

    Raises StoreUnavailable, StoreRefused.
    """
    attempt = LoadAttempt(id, next_attempt(base.committed, id), ids.uuid().hex)
    attempt.renew(store, clock)
    return attempt


def under_way(store: ObjectStore, newest: Callable[[], BaseTable]) -> list[LoadAttempt]:
    """Return the attempts that may still land.

    Costs one listing. `newest` returns the newest version of the base table and is only called if a note exists.
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
    """End the attempts that are not renewed, and delete notes without effect; return the attempts under way.

    `newest`: as for `under_way`.
    Durability. Ended attempts are synced to disk.
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
    """Commit generations without rows up to that of `attempt`, unless the load lands first."""
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
    """Record the source token of `id`. Raises StoreUnavailable, StoreRefused."""
    store.put(load_key(id), json.dumps({"token": token}).encode())


def noted_token(store: ObjectStore, id: UUID) -> str | None:
    """Return the source token of `id`; None if no note exists. Raises StoreUnavailable, StoreRefused."""
    try:
        return str(json.loads(store.get(load_key(id)) or b"null")["token"])
    except (ValueError, TypeError, KeyError):
        return None
