"""What a read tells about itself: the levels that it read, how each was searched, rows and milliseconds.

1. A method of `Reads` that is given `explain` makes a `Watch` and hands it on; without `explain` it is None.
2. Each process that answers adds one part to the watch: a table in this process its own, a client those that the
   daemons send with their answers. A part is made when the answer is whole.
3. When the answer is whole, the watch calls `explain` with the `Explanation`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa

from memwal.ingest.api.results import RowStream
from memwal.ingest.errors import Invalid

if TYPE_CHECKING:
    from memwal.wal.clock import Clock

T = TypeVar("T")
D = TypeVar("D")


@dataclass(frozen=True, slots=True)
class ExplainedSearch:
    """How one level was searched. A read searches it once; a hybrid search twice, a filter of a ranked read adds one.

    `by`: "key", "rows" (all of them), "filter", "order", "vector" or "text". `how`: in words. `indexes`: the indexes
    that were used, none if every row was looked at. `looked_at`: rows or keys that were evaluated or compared one by
    one, None where that is not known. `unindexed`: those of them that an index does not cover yet. `found`: rows that
    pass, or candidates of a ranking. `hidden`: those of them that a newer level has. `deleted`: keys found as deleted.
    `returned`: rows of the answer from here; each row counts once. `fetches`: how often candidates were fetched.
    `ms`: milliseconds. Of the base also `lance`: Lance's plans, one for each scan, `requests` to storage and the
    `bytes_read` by them.
    """

    by: str
    how: str = ""
    indexes: tuple[str, ...] = ()
    looked_at: int | None = 0
    unindexed: int = 0
    found: int = 0
    hidden: int = 0
    deleted: int = 0
    returned: int = 0
    fetches: int = 0
    ms: float = 0.0
    requests: int = 0
    bytes_read: int = 0
    lance: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ExplainedLevel:
    """One level of the moment that was read: a memtable, a tail of the WAL, an SST, or the base table.

    `kind`: "memtable", "wal", "sst" or "base". `rows`: that it has, older versions and tombstones included (base:
    without deleted ones). `state`: "active" or "frozen" (memtable), "loaded" from storage by this read or "cached"
    (SST). `path`: the SST's directory within its region. `bytes`: of an SST as its writer recorded them, of the base's
    files; None where not known. `positions`: first and last WAL entry. `fragments`: of the base. `load_ms`:
    milliseconds for loading an SST. `region`: None of the base, whose rows are of all regions that were read.
    """

    kind: str
    rows: int
    region: str | None = None
    generation: int | None = None
    state: str | None = None
    path: str | None = None
    bytes: int | None = None
    positions: tuple[int, int] | None = None
    fragments: int | None = None
    load_ms: float = 0.0
    searches: tuple[ExplainedSearch, ...] = ()

    @property
    def returned(self) -> int:
        """Rows of the answer from this level."""
        return sum(search.returned for search in self.searches)


@dataclass(frozen=True, slots=True)
class ExplainedPart:
    """What one process answered. `endpoint`: the daemon's; None: this process. `levels`: newest first in each region,
    the base last. `attempts`: captures, more than one if a commit overtook the read. `capture_ms` and `open_ms`: for
    capturing the levels and opening the newest version of the base. `merge_ms`: the rest of `ms` beyond these and the
    levels': checking the request, merging, and attempts that were overtaken.
    """

    table: str
    base_version: int
    regions: tuple[str, ...]
    levels: tuple[ExplainedLevel, ...]
    endpoint: str | None = None
    attempts: int = 1
    capture_ms: float = 0.0
    open_ms: float = 0.0
    merge_ms: float = 0.0
    ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Explanation:
    """What one read did; `print` shows it as a table, `to_json` has everything.

    `read`, `level`: as asked. `rows`: of the answer (of a count, the rows counted). `parts`: one for each process that
    answered. `attempts`: of a client, more than one if a daemon was asked again. `ms`: milliseconds of the whole read,
    of a scan without the time of the caller between batches. `network_ms`: those of them beyond the slowest daemon's
    own. `complete`: False if a scan was closed before its last row.
    """

    read: str
    level: str
    rows: int
    ms: float
    parts: tuple[ExplainedPart, ...]
    attempts: int = 1
    network_ms: float = 0.0
    complete: bool = True

    @property
    def levels(self) -> tuple[ExplainedLevel, ...]:
        """The levels of all parts."""
        return tuple(level for part in self.parts for level in part.levels)

    @property
    def found(self) -> int:
        """Rows that the levels returned. More than `rows` where an offset, the fusion of a hybrid search, or the merge
        of several daemons' answers left some out.
        """
        return sum(level.returned for level in self.levels)

    @property
    def indexes(self) -> tuple[str, ...]:
        """The indexes that were used at any level, each once."""
        used = (index for level in self.levels for search in level.searches for index in search.indexes)
        return tuple(dict.fromkeys(used))

    def as_dict(self) -> dict[str, Any]:
        """Return everything as values for JSON."""
        return asdict(self)

    def to_json(self, indent: int | None = None) -> str:
        """Return everything as JSON."""
        return json.dumps(self.as_dict(), indent=indent)

    @staticmethod
    def of(told: Mapping[str, Any]) -> Explanation:
        """Return what `as_dict` gave; names that this version does not have are left out."""
        parts = []
        for part in told["parts"]:
            levels = []
            for level in part["levels"]:
                searches = tuple(_made(ExplainedSearch, search) for search in level["searches"])
                levels.append(_made(ExplainedLevel, {**level, "searches": searches}))
            parts.append(_made(ExplainedPart, {**part, "levels": tuple(levels)}))
        return _made(Explanation, {**told, "parts": tuple(parts)})

    def __str__(self) -> str:
        from memwal.ingest.api.explain_text import as_text

        return as_text(self)


Explain = Callable[[Explanation], object]


class Watch:
    """Collects the explanation of one read.

    Thread safety. One thread at a time; `add` from any.
    """

    def __init__(self, read: str, level: str, explain: Explain, clock: Clock) -> None:
        self.clock = clock
        self._read, self._level, self._explain = read, level, explain
        self._parts: list[Callable[[float], ExplainedPart | None]] = []
        self._attempts, self._busy, self._since = 0, 0.0, clock.monotonic()

    def add(self, part: Callable[[float], ExplainedPart | None]) -> None:
        """Add the part of a process that answers. It is called when the answer is whole, with the milliseconds of the
        read; None: the process told nothing.
        """
        self._parts.append(part)

    def again(self) -> None:
        """Begin an attempt; parts of earlier ones are dropped."""
        self._attempts, self._parts = self._attempts + 1, []

    def heard(self, endpoint: str) -> Callable[[Mapping[str, Any]], None]:
        """Return what takes the explanation that the daemon at `endpoint` sends, as `Explanation.as_dict` gave it."""
        sent: list[Mapping[str, Any]] = []
        self.add(lambda _: replace(Explanation.of(sent[0]).parts[0], endpoint=endpoint) if sent else None)
        return sent.append

    def ended(self, answer: T) -> T:
        """Call `explain`, of a stream at its end, and return the answer."""
        self._pause()
        if isinstance(answer, RowStream):
            return RowStream(answer.schema, self._batches(answer), answer.close)  # type: ignore[return-value]
        self._tell(answer.num_rows if isinstance(answer, pa.Table) else int(answer))  # type: ignore[call-overload]
        return answer

    def _batches(self, rows: RowStream) -> Iterator[pa.RecordBatch]:
        given = 0
        self._resume()
        with rows:
            for batch in rows:
                given += batch.num_rows
                self._pause()
                try:
                    yield batch
                except GeneratorExit:
                    self._tell(given, complete=False)
                    raise
                self._resume()
        self._pause()
        self._tell(given)

    def _pause(self) -> None:
        self._busy += self.clock.monotonic() - self._since

    def _resume(self) -> None:
        self._since = self.clock.monotonic()

    def _tell(self, rows: int, *, complete: bool = True) -> None:
        ms = 1e3 * self._busy
        parts = tuple(part for made in self._parts if (part := made(ms)) is not None)
        slowest = max((part.ms for part in parts if part.endpoint), default=ms)
        attempts = max(1, self._attempts)
        self._explain(Explanation(self._read, self._level, rows, ms, parts, attempts, max(0.0, ms - slowest), complete))


def watching(read: str, level: str, explain: Explain | None) -> Watch | None:
    """Return a watch that calls `explain`, None for None. Raises: Invalid if it is no function."""
    if explain is None:
        return None
    if not callable(explain):
        raise Invalid(f"explain={explain!r}: give a function that takes the explanation, such as explain=print")
    # Imported here: this package is heavy, and reads that nobody explains do not need it.
    from memwal.wal.clock import SystemClock

    return Watch(read, level, explain, SystemClock())


def heard(watch: Watch | None, endpoint: str) -> Callable[[Mapping[str, Any]], None] | None:
    """Return what takes the explanation of the daemon at `endpoint`; None without a watch."""
    return None if watch is None else watch.heard(endpoint)


def ended(watch: Watch | None, answer: T) -> T:
    """Return `answer`, told to `watch`."""
    return answer if watch is None else watch.ended(answer)


def _made(kind: type[D], values: Mapping[str, Any]) -> D:
    known = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    given = {name: value for name, value in values.items() if name in known}
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()})
