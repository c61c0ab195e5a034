"""Two notes of loads beside the table. Both are advice: nothing that must be right depends on them.

    {table}/_mem_wal/loads/{id}.json     {"token": "books-2026"}: which token a load's id is made of, for `memwal log`
    {table}/_mem_wal/loading.json        {"by": id, "until": Unix seconds}: automatic commits wait until then

A load merges all its rows in one version, and begins again where another commit lands first. A daemon that commits
every 30 seconds would keep a load that takes longer from ever landing. So a load asks for a pause while it merges, and
renews the request; a committer looks before an automatic commit (`ingest.table.commit_loop`) and waits for a bounded
time. A process that was killed leaves a request that soon ends by itself. Two loads at once share one request: the
first to end withdraws it, and the other one renews it.
"""

from __future__ import annotations

import json
from uuid import UUID

from memwal.wal import Clock, ObjectStore
from memwal.wal.layout import LOADING_KEY, load_key

PAUSE_MAX = 60.0
"""Seconds from now on for which a request counts at most, whatever it says: clocks may differ."""


def note_token(store: ObjectStore, id: UUID, token: str) -> None:
    """Note which token `id` is made of. Raises StoreUnavailable, StoreRefused."""
    store.put(load_key(id), json.dumps({"token": token}).encode())


def noted_token(store: ObjectStore, id: UUID) -> str | None:
    """Return the token that `id` is made of; None where no note tells. Raises StoreUnavailable, StoreRefused."""
    try:
        return str(json.loads(store.get(load_key(id)) or b"null")["token"])
    except (ValueError, TypeError, KeyError):
        return None


def ask_to_wait(store: ObjectStore, id: UUID, clock: Clock, seconds: float) -> None:
    """Ask automatic commits to wait for the load `id`. Raises StoreUnavailable, StoreRefused."""
    store.put(LOADING_KEY, json.dumps({"by": str(id), "until": clock.now() + seconds}).encode())


def withdraw(store: ObjectStore) -> None:
    """Let automatic commits go on. Raises StoreUnavailable, StoreRefused."""
    store.delete(LOADING_KEY)


def is_asked_to_wait(store: ObjectStore, clock: Clock) -> bool:
    """Return whether a load asks automatic commits to wait now. Raises StoreUnavailable, StoreRefused."""
    try:
        until = float(json.loads(store.get(LOADING_KEY) or b"null")["until"])
    except (ValueError, TypeError, KeyError):
        return False
    return 0.0 < until - clock.now() <= PAUSE_MAX
