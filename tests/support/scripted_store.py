"""A store in memory that records its calls and runs code of the test before them."""

from __future__ import annotations

from collections.abc import Callable

from memwal.wal import ObjectInfo, PutOutcome
from memwal.wal.layout import parse_entry_key, parse_manifest_key
from tests.support.memory_store import MemoryStore

READS = frozenset({"get", "exists", "list"})


def _nothing(call: str, key: str) -> None:
    pass


class ScriptedStore(MemoryStore):
    """A store in memory with a list of its calls and a function that runs before each of them.

    Thread safety. As MemoryStore; `before` runs outside the lock, in the thread of the call.
    """

    def __init__(self, now: Callable[[], float] = float) -> None:
        super().__init__(now)
        self.calls: list[tuple[str, str]] = []
        """Method and key of each call, in order. `list_some` counts as `list`."""
        self.before: Callable[[str, str], object] = _nothing
        """Called with the method and the key of each call. It may raise an error, or change the store."""

    def run_once(self, call: str, part: str, act: Callable[[], object]) -> None:
        """Run `act` before the next call of the method `call` whose key contains `part`."""

        def before(name: str, key: str) -> None:
            if name == call and part in key:
                self.before = _nothing
                act()

        self.before = before

    def run_at(self, number: int, act: Callable[[], object]) -> None:
        """Run `act` before the call `number` from now on; the next call is number 1."""
        last = len(self.calls) + number

        def before(name: str, key: str) -> None:
            if len(self.calls) == last:
                self.before = _nothing
                act()

        self.before = before

    def fail_reads(self, error: Exception, failures: int = 10**9, after: int = 0) -> None:
        """Raise `error` in `failures` reads, after `after` other reads."""
        numbers = iter(range(after + failures))

        def before(name: str, key: str) -> None:
            if name in READS and next(numbers, -1) >= after:
                raise error

        self.before = before

    def transcript(self) -> list[str]:
        """Return the calls with the numbers of positions and versions, such as `get wal/3`."""
        return [f"{call} {_short(key)}" for call, key in self.calls]

    def keys(self, call: str) -> list[str]:
        """Return the keys of all calls of the method `call`, in order."""
        return [key for name, key in self.calls if name == call]

    def positions(self, call: str = "get") -> list[int]:
        """Return the positions of all calls of the method `call` with the key of an entry, in order."""
        return [key.position for key in map(parse_entry_key, self.keys(call)) if key is not None]

    def put_if_absent(self, key: str, data: bytes) -> PutOutcome:
        self._called("put_if_absent", key)
        return super().put_if_absent(key, data)

    def put(self, key: str, data: bytes) -> None:
        self._called("put", key)
        super().put(key, data)

    def get(self, key: str) -> bytes | None:
        self._called("get", key)
        return super().get(key)

    def exists(self, key: str) -> bool:
        self._called("exists", key)
        return super().exists(key)

    def describe(self, prefix: str) -> list[ObjectInfo]:
        self._called("describe", prefix)
        return super().describe(prefix)

    def list_some(self, prefix: str, most: int) -> list[str]:
        return self.list(prefix)[:most]

    def list(self, prefix: str) -> list[str]:
        self._called("list", prefix)
        return super().list(prefix)

    def delete(self, key: str) -> None:
        self._called("delete", key)
        super().delete(key)

    def _called(self, call: str, key: str) -> None:
        self.calls.append((call, key))
        self.before(call, key)


def _short(key: str) -> str:
    parsed = parse_entry_key(key) or parse_manifest_key(key)
    name = key.split("/", 2)[2]
    return f"{name.partition('/')[0]}/{parsed[1]}" if parsed else name
