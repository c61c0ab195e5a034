"""The failure matrix: the faults, a store that injects them, and the checks after each.

The rows are those of the design notes, and errors after the effect: the call took effect, and fails. At the port of a
store several faults are one: for an answer lost to a 500, a 503, a reset or a timeout the adapter always returns
OUTCOME_UNKNOWN. On the connection each is a separate row, injected by `tests.fault_proxy`.

    store = FaultyStore(inner, clock)
    …  # as it was before
    store.begin()
    store.arm(FAULTS["409"], Call("put_if_absent", key, 1))
    …  # claim, append, flush, commit, collect
    store.heal()

Inside the adapter for local files the steps are system calls, and each may fail after its effect: `SystemCalls`.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import memwal.flush.base.fsync
import memwal.wal.store.local
from memwal.wal import ObjectInfo, ObjectStore, PutOutcome, StoreRefused, StoreUnavailable
from tests.support.clock import FakeClock

_Keys = list[str]
_Infos = list[ObjectInfo]
_Answer = TypeVar("_Answer")

CREATES = frozenset({"put_if_absent"})
OVERWRITES = frozenset({"put", "delete"})
"""Calls that may have taken effect though they raise, and may be repeated."""
WRITES = CREATES | OVERWRITES
LISTS = frozenset({"list", "describe"})
EVERY = WRITES | LISTS | {"get", "exists", "children"}


class Killed(BaseException):
    """The process ended here."""


def killed(call: Callable[..., Any], *, after: bool) -> Callable[..., Any]:
    """Return `call` in a process that ends before or after it."""

    def ends(*args: Any, **kwargs: Any) -> None:
        if after:
            call(*args, **kwargs)
        raise Killed

    return ends


@dataclass(frozen=True)
class StoreFault:
    """The behaviour of one call of a store in a fault."""

    calls: frozenset[str]
    """The methods that the fault can affect."""
    lands: bool = False
    """Whether the call takes effect."""
    answer: PutOutcome | BaseException | None = None
    """The value to return or the error to raise; None: the store's own answer."""
    lands_later: bool = False
    """Whether it takes effect after the writer has stopped waiting (`FaultyStore.let_late_ones_land`)."""
    seconds: float = 0.0
    """Duration of the call."""
    drops_newest: bool = False
    """Whether a listing omits the object that was written last."""


FAULTS = {
    "409": StoreFault(CREATES, answer=PutOutcome.UNAVAILABLE),
    "lands then 500, 503, reset or timeout": StoreFault(CREATES, lands=True, answer=PutOutcome.OUTCOME_UNKNOWN),
    "reset before landing": StoreFault(CREATES, answer=PutOutcome.OUTCOME_UNKNOWN),
    "no answer, lands much later": StoreFault(CREATES, answer=PutOutcome.OUTCOME_UNKNOWN, lands_later=True),
    "412 by our own retry": StoreFault(CREATES, lands=True, answer=PutOutcome.ALREADY_EXISTS),
    "unavailable": StoreFault(EVERY, answer=StoreUnavailable("storage is away")),
    "permanent failure": StoreFault(EVERY, answer=StoreRefused("no permission")),
    "lands then unavailable": StoreFault(OVERWRITES, lands=True, answer=StoreUnavailable("storage went away")),
    "lands then refused": StoreFault(OVERWRITES, lands=True, answer=StoreRefused("no permission any more")),
    "slow": StoreFault(EVERY, lands=True, seconds=100.0),
    "listing behind by one": StoreFault(LISTS, lands=True, drops_newest=True),
    "killed before": StoreFault(EVERY, answer=Killed()),
    "killed after": StoreFault(WRITES, lands=True, answer=Killed()),
}
LASTING = ("409", "lands then 500, 503, reset or timeout", "reset before landing", "unavailable", "permanent failure")
"""Faults that may also be permanent."""
HARMLESS = ("409", "lands then 500, 503, reset or timeout", "reset before landing", "412 by our own retry", "slow")
"""Faults that, if they happen once, only the storage's log may show."""


@dataclass(frozen=True, order=True)
class Call:
    """One call of a store in a run: the `nth` of this method with this key, from 1.

    It has no number in the run, since threads that read in parallel change these numbers.
    """

    method: str
    key: str
    nth: int


_NOWHERE = Call("", "", 0)


class FaultyStore:
    """A store that injects a fault at one call, or from one call on.

    Thread safety. Any thread.
    """

    def __init__(self, inner: ObjectStore, clock: FakeClock) -> None:
        self.inner, self.storage_options, self.remote = inner, inner.storage_options, inner.remote
        self._clock = clock
        self._lock = threading.Lock()
        self._written: list[str] = []
        self._late: list[Callable[[], Any]] = []
        self._fault: StoreFault | None = None
        self._at, self._lasting = _NOWHERE, False
        self.begin()

    def begin(self) -> None:
        """Count calls from here on."""
        self.calls: list[Call] = []
        self.hit = False
        self._count: Counter[tuple[str, str]] = Counter()

    def arm(self, fault: StoreFault, at: Call, *, lasting: bool = False) -> None:
        """Inject `fault` at the call `at`, and with `lasting` at every later call that it can affect."""
        self._fault, self._at, self._lasting = fault, at, lasting

    def heal(self) -> None:
        """End the fault."""
        self._fault, self._at, self._lasting = None, _NOWHERE, False

    def let_late_ones_land(self) -> None:
        """Let delayed calls take effect now."""
        late, self._late = self._late, []
        for call in late:
            call()

    def put_if_absent(self, key: str, data: bytes) -> PutOutcome:
        return self._do("put_if_absent", key, lambda: self.inner.put_if_absent(key, data))

    def put(self, key: str, data: bytes) -> None:
        self._do("put", key, lambda: self.inner.put(key, data))

    def get(self, key: str) -> bytes | None:
        return self._do("get", key, lambda: self.inner.get(key))

    def exists(self, key: str) -> bool:
        return self._do("exists", key, lambda: self.inner.exists(key))

    def children(self, prefix: str) -> _Keys:
        return self._do("children", prefix, lambda: self.inner.children(prefix))

    def describe(self, prefix: str) -> _Infos:
        return self._do("describe", prefix, lambda: self.inner.describe(prefix))

    def list_some(self, prefix: str, most: int) -> _Keys:
        return self._do("list", prefix, lambda: self.inner.list_some(prefix, most))

    def list(self, prefix: str) -> _Keys:
        return self._do("list", prefix, lambda: self.inner.list(prefix))

    def delete(self, key: str) -> None:
        self._do("delete", key, lambda: self.inner.delete(key))

    def leftovers(self, prefix: str) -> _Infos:
        return self.inner.leftovers(prefix)

    def remove_leftovers(self, prefix: str) -> None:
        self.inner.remove_leftovers(prefix)

    def url(self, key: str) -> str:
        return self.inner.url(key)

    def _do(self, method: str, key: str, call: Callable[[], _Answer]) -> _Answer:
        fault = self._due(method, key)
        if fault is None:
            return call()
        self._clock.advance(fault.seconds)
        answer: Any = call() if fault.lands else None
        if fault.lands_later:
            self._late.append(call)
        if isinstance(fault.answer, BaseException):
            raise type(fault.answer)(*fault.answer.args)
        if fault.drops_newest:
            return _behind(answer, self._written)  # type: ignore[return-value]
        return answer if fault.answer is None else fault.answer  # type: ignore[return-value]

    def _due(self, method: str, key: str) -> StoreFault | None:
        with self._lock:
            self._count[method, key] += 1
            call = Call(method, key, self._count[method, key])
            self.calls.append(call)
            if method in WRITES:
                self._written.append(key)
            starts = call == self._at
            due = starts or (self._lasting and self.hit)
            self.hit = self.hit or starts
            fault = self._fault
        return fault if due and fault is not None and method in fault.calls else None


def _behind(listed: list[Any], written: list[str]) -> list[Any]:
    """Return a listing, of keys or of infos, without its object that was `written` last."""
    names = {getattr(each, "key", each) for each in listed}
    newest = next((key for key in reversed(written) if key in names), None)
    return [each for each in listed if getattr(each, "key", each) != newest]


class WatchedStore(FaultyStore):
    """A store of local files that records the files around each call of one run.

    Thread safety. Any thread; one call at a time.
    """

    def __init__(self, inner: ObjectStore, root: Path) -> None:
        """`root`: the directory with every file that the run changes, also past the store."""
        self._root, self._serial = root, threading.RLock()
        self._around: list[tuple[Call, frozenset[Any], frozenset[Any]]] = []
        super().__init__(inner, FakeClock())

    def kills(self, possible: Callable[[Call], bool] = lambda _: True) -> Iterator[tuple[Call, bool]]:
        """Yield the calls before or after which a kill leaves the files in a state that no earlier kill left, and
        whether it comes after the call.

        `possible`: returns whether another run makes the call too, with the same key.
        """
        seen = set[frozenset[Any]]()
        for call, before, after in self._around:
            for files, comes_after in ((before, False), (after, True)):
                if files not in seen and possible(call) and (call.method in WRITES or not comes_after):
                    seen.add(files)
                    yield call, comes_after

    def _do(self, method: str, key: str, call: Callable[[], _Answer]) -> _Answer:
        with self._serial:
            before = self._files()
            try:
                return super()._do(method, key, call)
            finally:
                self._around.append((self.calls[-1], before, self._files()))

    def _files(self) -> frozenset[Any]:
        found = ((path, path.stat()) for path in self._root.rglob("*") if path.is_file())
        return frozenset((path, stat.st_size, stat.st_mtime_ns) for path, stat in found)


def copy_objects(source: ObjectStore, target: ObjectStore) -> None:
    """Copy every object of one store to another, empty one."""
    for key in source.list(""):
        data = source.get(key)
        assert data is not None
        target.put(key, data)


# ---- system calls --------------------------------------------------------------------------------------------------

STEPS = frozenset({"open", "write", "fsync", "link", "replace", "unlink", "stat"})
"""The system calls of the adapter for local files, and of the fsync of files that Lance wrote. close(2) is left out:
the garbage collector closes directories at unpredictable moments."""
CODES = (errno.EIO, errno.ESTALE, errno.EACCES, errno.ETIMEDOUT, errno.ENOENT, errno.EPERM, errno.ENOSPC)


class SystemCalls:
    """The `os` of the modules that write local files; one call fails after its effect.

    Thread safety. Any thread.
    """

    def __init__(self, number: int = -1, code: int = 0) -> None:
        """`number`: of the call that fails, from 0; `code`: its errno."""
        self._number, self._code = number, code
        self._lock = threading.Lock()
        self.calls: list[str] = []

    @contextmanager
    def installed(self) -> Iterator[SystemCalls]:
        """Install these calls in the modules inside the context."""
        with ExitStack() as patches:
            for module in (memwal.wal.store.local, memwal.flush.base.fsync):
                patches.enter_context(patch.object(module, "os", self))
            yield self

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        return self._around(name, real) if name in STEPS else real

    def _around(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            with self._lock:
                number = len(self.calls)
                self.calls.append(name)
            done = real(*args, **more)
            if number == self._number:
                if name == "open":
                    os.close(done)
                raise OSError(self._code, os.strerror(self._code))
            return done

        return call
