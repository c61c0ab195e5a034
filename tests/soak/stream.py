"""Rows of the soak: an endless stream into Kafka, and the puts of writers, over a bounded number of keys.

A row is a function of its key and a version, so the versions determine the whole table. Keys of the stream are 0 to
`KEYS` - 1; each writer has `OWN_KEYS` of its own.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tests.conftest import Made
from tests.kafka_server import KafkaServer, Record

KEYS, OWN_KEYS = 2000, 300
_DELETED, _EVERY = 0.15, 0.5
State = dict[int, int]
"""The version of each key in a table."""


class Stream:
    """Updates, deletes and new rows for a topic, at a steady rate, in its own thread between `start` and `stop`.

    Thread safety. `state`, `produced` and `version` may be read while it runs; `state` is exact after `stop`.
    """

    def __init__(self, kafka: KafkaServer, topic: str, rate: float, seed: int) -> None:
        """`rate`: records per second."""
        self._kafka, self._topic, self._rate = kafka, topic, rate
        self._chance, self._made = random.Random(seed), Made()
        self._over, self._thread = threading.Event(), threading.Thread(target=self._produce, name="stream", daemon=True)
        self.state: State = {}
        self.produced = 0
        self.failed: RuntimeError | None = None

    def start(self) -> None:
        """Begin to produce."""
        self._thread.start()

    def stop(self) -> None:
        """Stop; every record is in the topic then. Raises: the error that ended the thread earlier."""
        self._over.set()
        self._thread.join()
        if self.failed is not None:
            raise self.failed

    def _produce(self) -> None:
        due = time.monotonic()
        try:
            while not self._over.wait(max(0.0, due - time.monotonic())):
                due = max(due + _EVERY, time.monotonic() - 10 * _EVERY)  # do not flood a broker that stood still
                self._kafka.produce(self._topic, [self._record() for _ in range(int(self._rate * _EVERY))])
        except RuntimeError as error:
            self.failed = error

    def _record(self) -> Record:
        """Return one more record. Its version is its number, so versions of a key rise."""
        id, self.produced = self._chance.randrange(KEYS), self.produced + 1
        key = json.dumps({"id": id}).encode()
        if self._chance.random() < _DELETED:
            self.state.pop(id, None)
            return Record(None, key)
        self.state[id] = self.produced
        return Record(json.dumps(self._made.row(id, self.produced)).encode(), key)


@dataclass(frozen=True)
class Step:
    """The n-th write of a writer."""

    ids: tuple[int, ...]
    deletes: bool


@dataclass(frozen=True)
class Plan:
    """The writes of a writer as a function of its number and the step's, so that a journal keeps numbers only."""

    writer: int
    seed: int

    def step(self, n: int) -> Step:
        """Return step n, from 1 on; its rows have version n."""
        chance = random.Random(f"{self.seed}/{self.writer}/{n}")
        first = 1_000_000 * (self.writer + 1)
        return Step(tuple(chance.sample(range(first, first + OWN_KEYS), 5)), deletes=chance.random() < _DELETED)

    def apply(self, state: State, n: int) -> None:
        """Apply step n to `state`."""
        step = self.step(n)
        for id in step.ids:
            if step.deletes:
                state.pop(id, None)
            else:
                state[id] = n

    def state(self, upto: int) -> State:
        """Return the state after steps 1 to `upto`."""
        state: State = {}
        for n in range(1, upto + 1):
            self.apply(state, n)
        return state


def version_of(name: str) -> int:
    """Return the version of a row from its column `name`."""
    return int(name.rpartition(" v")[2])


def mismatch(found: Mapping[int, int], expected: Mapping[int, int]) -> str:
    """Compare the versions of a table; return the differences in a line, "" if both are equal."""
    missing, more = expected.keys() - found.keys(), found.keys() - expected.keys()
    other = {id for id in expected.keys() & found.keys() if expected[id] != found[id]}
    if not missing and not more and not other:
        return ""
    return (
        f"{len(missing)} rows are missing {_some(missing)}, {len(more)} should not be there {_some(more)}, "
        f"{len(other)} have another version {[(id, found[id], expected[id]) for id in sorted(other)[:3]]}"
    )


def _some(ids: Iterable[int]) -> list[int]:
    return sorted(ids)[:3]
