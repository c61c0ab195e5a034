"""The store port of a simulated process: every call takes time, lets other actors run, and may fail.

    before landing   409 (unavailable) | reset | unavailable with a reason | refused | process killed
    after landing    500, 503, reset, time-out: no answer | 412 by a retry inside the client | process killed
                     a system call of the adapter for local files fails after its link: the link itself, the check
    after an effect  a deletion or an overwrite raises although it took effect
    in between       the put lands much later, still as put-if-absent
    at any call      slow | an outage, for one machine or all
    listings         behind by one: the newest object is missing

Other actors may run at two moments of a call, before and after it takes effect: a process that is killed or stopped
between them has done something that it does not know.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NoReturn, TypeVar
from unittest.mock import patch

import memwal.wal.store.local
from memwal.wal import LocalStore, ObjectInfo, PutOutcome, StoreRefused, StoreUnavailable
from memwal.wal.layout import kind_of, parse_entry_key, parse_manifest_key, parse_rev, regions
from tests.simulation.coverage import step_of
from tests.simulation.fates import strikes
from tests.simulation.scheduler import START, Host, Killed, Scheduler

PUT_FAULTS = (
    "conflict",
    "reset before",
    "reset after",
    "time-out before",
    "time-out after",
    "late",
    "own retry",
    "unavailable",
    "refused",
    "link fails after",
    "look fails after",
    "kill before",
    "kill after",
    "slow",
)
CALL_FAULTS = ("unavailable", "unavailable after", "slow", "kill before", "kill after")
OUTAGES = ("unavailable", "conflict", "reset before", "reset after", "look fails after")
_OF_PUTS = frozenset({"look fails after"})
"""Outages where only puts fail."""
_LATENCIES = (0.0, 0.0, 0.001, 0.002, 0.005, 0.02, 0.05)
_PUT_TIMEOUT = 2.0
_PUTS_WORSE = 3
"""Fault rate of puts relative to other calls, which are far more frequent."""
_MOST = 0.6
"""Maximum share of puts of one kind that have a fault, since some must succeed."""
_DEATHS = 0.2
"""Share of the fatal faults of other calls that really kill: a life must be long enough to make progress."""
_NOTE = "/owner.json"
_LANCES_OWN = ("_versions/", "_transactions/")
_FIXED_NAMES = {"bloom_filter.bin", "page_data.lance", "page_lookup.lance"}

_READS = frozenset({"get", "exists", "children", "list", "describe"})

_T = TypeVar("_T")


@dataclass
class Weather:
    """The frequency and the kinds of faults of a run."""

    rate: float
    """Share of the calls that have a fault."""
    put_faults: tuple[str, ...]
    call_faults: tuple[str, ...]
    lag: float
    """Share of the listings that are behind by one."""
    speed: float = 1.0
    """Factor on every latency; some machines are ten times slower."""
    lance_writes_worse: float = 1.0
    """Factor on `rate` for what Lance writes in one call, which is many requests."""
    manifests_worse: float = 1.0
    """Factor on `rate` for puts of region manifests, which are rare: claims, publications, prunes."""
    pace: float = 1.0
    """Factor on every latency and every pause of Lance."""
    outages: list[tuple[float, str, Host | None]] = field(default_factory=list)
    """Outages: until when, the answer to every put, and the affected host (None: all hosts)."""

    def clear(self) -> None:
        """End all faults from now on."""
        self.rate = self.lag = 0.0
        self.outages.clear()


@dataclass
class Disk:
    """The storage itself, which outlives every process: objects on a RAM disk, ages in simulated time."""

    inner: LocalStore
    scheduler: Scheduler
    created: dict[str, float] = field(default_factory=dict)
    """Creation times, in order of creation."""
    seen: dict[str, float] = field(default_factory=dict)
    """For files that Lance wrote itself, when they were listed first."""
    refilled: set[tuple[str, bytes]] = field(default_factory=set)
    """Objects put into slots that had been filled and collected."""
    pending: list[tuple[str, bytes]] = field(default_factory=list)
    """Unanswered puts that have not landed yet."""

    def modified(self, key: str) -> float:
        """Return when an object was written; for a file that Lance wrote itself, when it was listed first."""
        return self.created.get(key) or self.seen.setdefault(key, START + self.scheduler.elapsed)

    def create(self, key: str, data: bytes) -> PutOutcome:
        """Execute a put-if-absent that reaches the storage."""
        outcome = None
        try:
            outcome = self.inner.put_if_absent(key, data)
        finally:
            if outcome is PutOutcome.CREATED and key in self.created:
                self.refilled.add((key, data))
            if outcome is PutOutcome.CREATED or (key not in self.created and self.inner.exists(key)):
                self.created[key] = START + self.scheduler.elapsed
        return outcome

    def land(self, key: str, data: bytes) -> None:
        """Execute a delayed put."""
        if (key, data) in self.pending:
            self.pending.remove((key, data))
            self.scheduler.note(f"late put {short(key)} -> {self.create(key, data).value}")

    def send_late(self, key: str, data: bytes, delay: float) -> None:
        """Let a put land `delay` seconds from now."""
        self.pending.append((key, data))

        def arrive() -> None:
            self.scheduler.pause(delay)
            self.land(key, data)

        self.scheduler.spawn("network", arrive, Host("network"), background=True)


class SimulatedStore:
    """The `wal.ObjectStore` of one process. One thread. At every method other actors may run."""

    remote = False

    def __init__(self, disk: Disk, weather: Weather, scheduler: Scheduler, host: Host) -> None:
        self.storage_options: dict[str, str] = {}
        self._disk, self._inner, self._weather = disk, disk.inner, weather
        self._scheduler, self._host, self._coverage = scheduler, host, scheduler.coverage
        self._speed = weather.speed * scheduler.random.choice((1, 1, 1, 10))

    def put_if_absent(self, key: str, data: bytes) -> PutOutcome:
        worse = self._weather.manifests_worse if parse_manifest_key(key) is not None else 1.0
        outage = self._outage()
        fault, step = outage or self._fault(self._weather.put_faults, worse), step_of(f"put {kind_of(key)}")
        if ends := self._ends():
            outage, fault = "", ends
        self._coverage.strike(step, "outage" if outage else fault)
        with self._coverage.doing(step):
            self._scheduler.pause(self._latency(fault))
            outcome = self._put(key, data, fault)
            self._say(f"put {short(key)}", fault, outcome.value)
            self._scheduler.pause(self._latency(fault))
        self._kill(fault == "kill after")
        return outcome

    def put(self, key: str, data: bytes) -> None:
        self._call("hint", key, lambda: self._inner.put(key, data))

    def get(self, key: str) -> bytes | None:
        # Lengths vary: manifests of the base table contain times and random names, notes contain the process.
        said = _existence if key.startswith(_LANCES_OWN) or key.endswith(_NOTE) else _size
        return self._call("get", key, lambda: self._inner.get(key), said)

    def exists(self, key: str) -> bool:
        return self._call("exists", key, lambda: self._inner.exists(key), str)

    def children(self, prefix: str) -> list[str]:
        return self._call("children", prefix, lambda: self._inner.children(prefix), _count)

    def leftovers(self, prefix: str) -> list[ObjectInfo]:
        """Return an empty list: no process is killed inside a put of the disk."""
        return []

    def list_some(self, prefix: str, most: int) -> list[str]:
        return self._call("list", prefix, lambda: sorted(self._listed(prefix))[:most], _count)

    def list(self, prefix: str) -> list[str]:
        return self._call("list", prefix, lambda: sorted(self._listed(prefix)), _count)

    def describe(self, prefix: str) -> list[ObjectInfo]:
        def described() -> list[ObjectInfo]:
            sizes = {each.key: each.size for each in self._inner.describe(prefix)}
            return [ObjectInfo(key, sizes[key], self._disk.modified(key)) for key in self._listed(prefix)]

        return self._call("describe", prefix, described, _count)

    def delete(self, key: str) -> None:
        self._call("delete", key, lambda: self._inner.delete(key))

    def remove_leftovers(self, prefix: str) -> None:
        """Remove directories only, which no actor sees, so other actors do not run here."""
        self._inner.remove_leftovers(prefix)

    def url(self, key: str) -> str:
        """Return the URL of a key, without a call of the storage."""
        return self._inner.url(key)

    # ---- inside --------------------------------------------------------------------------------------------------

    def _call(self, verb: str, key: str, effect: Callable[[], _T], said: Callable[[_T], str] = lambda _: "done") -> _T:
        outage, step = self._outage(), step_of("read" if verb in _READS else f"{verb} {kind_of(key)}")
        away = bool(outage) and outage not in _OF_PUTS
        fault = "unavailable" if away else self._fault(self._weather.call_faults)
        if ends := self._ends():
            away, fault = False, ends
        self._coverage.strike(step, "outage" if away else fault)
        with self._coverage.doing(step):
            self._scheduler.pause(self._latency(fault))
            self._kill(fault == "kill before")
            if fault == "unavailable":
                self._say(f"{verb} {short(key)}", fault, "")
                raise StoreUnavailable(f"{verb} {short(key)}: the simulated storage is away")
            found = effect()
            self._say(f"{verb} {short(key)}", fault, said(found))
            if fault == "unavailable after":
                raise StoreUnavailable(f"{verb} {short(key)}: the simulated storage went away")
            self._scheduler.pause(self._latency(fault))
        self._kill(fault == "kill after")
        return found

    def _put(self, key: str, data: bytes, fault: str) -> PutOutcome:
        self._kill(fault == "kill before")
        if fault in ("unavailable", "refused"):
            self._say(f"put {short(key)}", fault, "")
            self._refuse(fault, key)
        if fault == "conflict":
            return PutOutcome.UNAVAILABLE
        if fault in ("reset before", "time-out before"):
            return PutOutcome.OUTCOME_UNKNOWN
        if fault == "late":
            self._disk.send_late(key, data, self._scheduler.random.choice((0.1, 1.0, 5.0, 30.0, 200.0)))
            return PutOutcome.OUTCOME_UNKNOWN
        with _failing_system_call(fault):
            outcome = self._disk.create(key, data)
        if fault in ("reset after", "time-out after"):
            return PutOutcome.OUTCOME_UNKNOWN
        return PutOutcome.ALREADY_EXISTS if fault == "own retry" else outcome

    @staticmethod
    def _refuse(fault: str, key: str) -> NoReturn:
        if fault == "refused":
            raise StoreRefused(f"{short(key)}: the simulated storage refuses")
        raise StoreUnavailable(f"{short(key)}: the simulated storage is away")

    def _listed(self, prefix: str) -> list[str]:
        found = sorted(self._inner.list(prefix))
        if self._weather.lag and self._scheduler.random.random() < self._weather.lag:
            newest = next((key for key in reversed(self._disk.created) if key.startswith(prefix)), None)
            return [key for key in found if key != newest]
        return found

    def _fault(self, kinds: tuple[str, ...], worse: float = 1.0) -> str:
        random = self._scheduler.random
        of_a_put = kinds is self._weather.put_faults
        rate = min(self._weather.rate * (_PUTS_WORSE if of_a_put else 1) * worse, _MOST)
        if self._scheduler.current is None or not kinds or random.random() >= rate:
            return ""
        fault = random.choice(kinds)
        return "" if fault.startswith("kill") and not of_a_put and random.random() >= _DEATHS else fault

    def _ends(self) -> str:
        """Return the fault that kills the process at this call, if that is its fate."""
        return "" if self._host.fate is None or self._scheduler.current is None else strikes(self._host, self._coverage)

    def _outage(self) -> str:
        now = self._scheduler.elapsed
        for until, kind, host in self._weather.outages:
            if now < until and host in (None, self._host) and self._scheduler.current is not None:
                return kind
        return ""

    def _latency(self, fault: str) -> float:
        if fault.startswith("time-out"):
            return _PUT_TIMEOUT / 2
        return (
            self._scheduler.random.choice(_LATENCIES)
            * self._speed
            * self._weather.pace
            * (10 if fault == "slow" else 1)
        )

    def _kill(self, now: bool) -> None:
        if now:
            self._scheduler.note("is killed")
            self._scheduler.kill(self._host)
            raise Killed

    def _say(self, name: str, fault: str, answer: str) -> None:
        self._scheduler.note(f"{name} -> {answer}{f'  [{fault}]' if fault else ''}")


class _FailingSystemCall:
    """The `os` of the adapter for local files: `name` fails once, after its effect, at or after a link."""

    def __init__(self, name: str) -> None:
        self._name, self._linked = name, False

    def __getattr__(self, name: str) -> Any:
        return self._fails if name == self._name else getattr(os, name)

    def link(self, *args: Any, **more: Any) -> None:
        os.link(*args, **more)
        self._linked = True
        if self._name == "link":
            self._fails()

    def _fails(self, *args: Any, **more: Any) -> Any:
        if not self._linked:
            return getattr(os, self._name)(*args, **more)
        self._linked = False
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))  # before the link it is a refusal


def _failing_system_call(fault: str) -> AbstractContextManager[Any]:
    if not fault.endswith("fails after"):
        return nullcontext()
    return patch.object(
        memwal.wal.store.local, "os", _FailingSystemCall("link" if fault.startswith("link") else "stat")
    )


@lru_cache(4096)
def short(key: str) -> str:
    """Return a key in a readable form that is the same in every run: pylance gives its files random names."""
    region = _SEGMENT.sub("_indices/*/", _REGION.sub(lambda found: _number(found[1]), key))
    if (entry := parse_entry_key(key)) is not None:
        return f"{_number(str(entry.region))}wal/{entry.position}"
    if (manifest := parse_manifest_key(key)) is not None:
        return f"{_number(str(manifest.region))}manifest/{manifest.version}"
    if (plan := _PLAN.search(key)) is not None:
        return f"{region.partition('commits')[0]}commits/{parse_rev(plan[1])}"
    folder, _, name = region.rpartition("/")
    inside = ("_gen_" in folder and name and name not in _FIXED_NAMES) or folder == "_transactions"
    return f"{folder}/*" if inside else region


_REGION = re.compile(r"_mem_wal/([0-9a-f-]{36})/")
_SEGMENT = re.compile(r"_indices/[0-9a-f-]{36}/")
_PLAN = re.compile(r"/commits/([01]{64})\.json")


def _number(region: str) -> str:
    return f"r{region[:4]}/"


def _size(data: bytes | None) -> str:
    return "nothing" if data is None else f"{len(data)} bytes"


def _existence(data: bytes | None) -> str:
    return "nothing" if data is None else "found"


def _count(found: list[object] | list[str] | list[ObjectInfo]) -> str:
    return f"{len(found)} found"


__all__ = ["CALL_FAULTS", "OUTAGES", "PUT_FAULTS", "Disk", "SimulatedStore", "Weather", "regions", "short"]
