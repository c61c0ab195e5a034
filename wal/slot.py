"""Write one slot until its outcome is known.

A slot is a key that several writers may compete for: the next WAL position, the next manifest version. One rule holds
for all slots: retry the *same bytes* at the *same key*, and never write the next key before the outcome of this one is
known.

 1. Put if absent. CREATED: the write succeeded.
 2. ALREADY_EXISTS: read the object back. If the bytes are equal, an earlier attempt succeeded and its answer was lost.
    Otherwise the slot is taken. Every writer puts a fresh 128-bit id into its bytes, so two writers never propose the
    same bytes.
 3. UNAVAILABLE, OUTCOME_UNKNOWN, or no object to read back: wait, then return to step 1. A key that is missing on
    read-back proves nothing, since the put may land later; only a conditional put of the slot settles the outcome.
 4. Budget spent: OutcomeUnknown if any attempt may have landed, else StoreUnavailable.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from memwal.wal.clock import Clock
from memwal.wal.errors import OutcomeUnknown, StoreRefused, StoreUnavailable
from memwal.wal.retries import RetryBudget, WalOptions
from memwal.wal.store.port import ObjectStore, PutOutcome


@dataclass
class _Attempts:
    """The attempts to write one slot so far."""

    key: str
    count: int = 0
    may_have_landed: bool = False
    reason: str = ""

    def give_up(self, seconds: float) -> NoReturn:
        said = f": {self.reason}" if self.reason else ""
        tries = f"{self.count} attempts in {seconds:.1f}s"
        if self.may_have_landed:
            raise OutcomeUnknown(f"{self.key}: no answer after {tries}{said}; it may exist now or later")
        raise StoreUnavailable(f"{self.key}: storage unavailable, {tries}{said}; nothing was written, try again")


def put_until_known(
    store: ObjectStore,
    key: str,
    data: bytes,
    *,
    clock: Clock,
    options: WalOptions,
    on_doubt: Callable[[], object] | None = None,
) -> bytes | None:
    """Put `data` at `key` if absent. Return None once it is durable, or the bytes of another writer in the slot.

    `data` must contain a unique id. `on_doubt` is called before other bytes are returned if an earlier attempt may have
    landed: where slots of this kind are collected, that attempt may have filled the slot before.
    Raises: OutcomeUnknown or StoreUnavailable when `options.retry_budget` is spent; StoreRefused at once.
    """
    outcome = _put(store, key, data)
    if outcome is PutOutcome.CREATED:
        return None
    attempts, budget = _Attempts(key), RetryBudget(clock, options)
    while True:
        settled, found = _judge(store, data, outcome, attempts)
        if settled:
            if found is not None and attempts.may_have_landed and on_doubt is not None:
                on_doubt()
            return found
        if not budget.wait():
            attempts.give_up(budget.seconds)
        try:
            outcome = _put(store, key, data)
        except StoreRefused as error:
            if not attempts.may_have_landed:
                raise
            raise OutcomeUnknown(f"{key}: may exist now or later, and storage refuses: {error}") from error


def _put(store: ObjectStore, key: str, data: bytes) -> PutOutcome | StoreUnavailable:
    try:
        return store.put_if_absent(key, data)
    except StoreUnavailable as error:
        return error


def _judge(
    store: ObjectStore, data: bytes, outcome: PutOutcome | StoreUnavailable, attempts: _Attempts
) -> tuple[bool, bytes | None]:
    """Return whether the outcome is settled, and the other writer's bytes in the slot (None if `data` was written).

    Records in `attempts` what an unsettled answer means.
    """
    attempts.count += 1
    if outcome is PutOutcome.CREATED:
        return True, None
    if outcome is PutOutcome.ALREADY_EXISTS:
        return _read_back(store, data, attempts)
    if outcome is PutOutcome.OUTCOME_UNKNOWN:
        attempts.may_have_landed = True
    if isinstance(outcome, StoreUnavailable):
        attempts.reason = str(outcome)
    return False, None


def _read_back(store: ObjectStore, data: bytes, attempts: _Attempts) -> tuple[bool, bytes | None]:
    try:
        found = store.get(attempts.key)
    except (StoreUnavailable, StoreRefused) as error:
        found, attempts.reason = None, str(error)
    if found is None:
        # The object exists and may hold `data`, but cannot be read: this counts as unknown.
        attempts.may_have_landed = True
        return False, None
    return True, None if found == data else found
