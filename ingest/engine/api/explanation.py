"""Define the explanation of a read (its levels, how each was searched, rows and milliseconds), and collect it.

1. A method of `Reads` with `explain` creates a `Watch` and passes it on; without `explain` it is None.
2. Each process that answers adds one part to the watch: a table in this process its own, a client those that the
   daemons send with their answers. A part is made when the answer is complete.
3. When the answer is complete, the watch calls `explain` with the `Explanation`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, TypeVar

import pyarrow as pa

from memwal.ingest.engine.api.arguments import brief
from memwal.ingest.engine.api.results import RowStream
from memwal.ingest.errors import Invalid
from memwal.wal import Clock, SystemClock, named

D = TypeVar("D")
_COUNTS = ("looked at", "found", "hidden", "deleted", "returned")
_NAMES = ("region", "level", "rows", "by", *_COUNTS, "ms", "how")
_NUMBERS = ("rows", *_COUNTS, "ms")


@dataclass(frozen=True, slots=True)
class ExplainedSearch:
    """How one level was searched. A read searches it once, a hybrid search twice; a filter of a ranked read adds one.

    - `by`: "key", "rows" (all of them), "filter", "order", "vector" or "text"; `how`: in words.
    - `indexes`: names of the used indexes ("key": a memtable's or SST's own key index), empty if every row was
      examined.
    - `looked_at`: rows or keys that were evaluated or compared one by one, None if unknown; `unindexed`: those of them
      that an index does not cover yet.
    - `found`: rows that pass, or candidates of a ranking.
    - `hidden`: rows that a newer level has. In the base table they are among `found`; in a level above they are left
      out before the search.
    - `deleted`: keys found as deleted.
    - `returned`: rows of the answer from this level; each row counts once.
    - `fetches`: how often candidates were fetched; `ms`: milliseconds.
    - For the base table: `lance`: Lance's plans, one per scan; `requests` to storage, and `bytes_read` by them.
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

    - `kind`: "memtable", "wal", "sst" or "base".
    - `rows`: number of rows, including older versions and tombstones (base table: without deleted ones).
    - `region`: None for the base table, which has the rows of all regions.
    - `state`: "active" or "frozen" (memtable), "loaded" from storage by this read or "cached" (SST).
    - `path`: the SST's directory within its region; `load_ms`: milliseconds for loading an SST.
    - `bytes`: of an SST as its writer recorded them, of the base table's files; None if unknown.
    - `positions`: first and last WAL entry; `fragments`: of the base table.
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
    """The answer of one process.

    - `endpoint`: the daemon's; None: this process.
    - `levels`: newest first in each region, the base table last.
    - `attempts`: captures, more than one if a commit overtook the read.
    - `capture_ms`, `open_ms`: for capturing the levels and opening the newest version of the base table.
    - `merge_ms`: `ms` minus these and the levels' milliseconds: checking the request, merging, and attempts that were
      overtaken.
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
    """The explanation of one read; `print` shows it as a table, `to_json` has everything.

    - `read`, `level`: as requested.
    - `rows`: of the answer (of a count, the rows counted).
    - `parts`: one for each process that answered.
    - `attempts`: of a client, more than one if it repeated a request to a daemon.
    - `ms`: milliseconds of the whole read; for a scan without the caller's time between batches.
    - `network_ms`: the part of `ms` beyond the slowest daemon's own time.
    - `complete`: False if a scan was closed before its last row.
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
        """Rows that the levels returned. More than `rows` if an offset, the fusion of a hybrid search, or the merge of
        several daemons' answers left some out.
        """
        return sum(level.returned for level in self.levels)

    @property
    def indexes(self) -> tuple[str, ...]:
        """The distinct indexes that were used at any level."""
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
        """Return the explanation from the result of `as_dict`; unknown names are left out."""
        parts = []
        for part in told["parts"]:
            levels = []
            for level in part["levels"]:
                searches = tuple(_made(ExplainedSearch, search) for search in level["searches"])
                levels.append(_made(ExplainedLevel, {**level, "searches": searches}))
            parts.append(_made(ExplainedPart, {**part, "levels": tuple(levels)}))
        return _made(Explanation, {**told, "parts": tuple(parts)})

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def _made(kind: type[D], values: Mapping[str, Any]) -> D:
    known = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    given = {name: value for name, value in values.items() if name in known}
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()})


# ---- as text -------------------------------------------------------------------------------------------------------


def _lines(told: Explanation) -> Iterator[str]:
    left_out = told.found - told.rows
    notes = [f"{told.read} at {told.level}: {_counted(told.rows, 'row')} in {_ms(told.ms)} ms"]
    if told.complete and left_out > 0:
        notes.append(f"{left_out:,} more were found and left out (offset, fusion or merging)")
    if not told.complete:
        notes.append("closed before its last row")
    if told.attempts > 1:
        notes.append(f"{told.attempts} attempts")
    if any(part.endpoint for part in told.parts):
        notes.append(f"{_ms(told.network_ms)} ms of it beyond the slowest daemon's own")
    yield "; ".join(notes)
    for part in told.parts:
        yield ""
        yield _moment(part)
        yield from _table([_cells(part, level, search) for level in part.levels for search in _searches(level)])


def _moment(part: ExplainedPart) -> str:
    regions = _counted(len(part.regions), "region") if part.regions else "no region, the base only"
    where = f"{part.endpoint} in {_ms(part.ms)} ms: " if part.endpoint else ""
    steps = f"capture {_ms(part.capture_ms)} ms, base opened {_ms(part.open_ms)} ms, merge {_ms(part.merge_ms)} ms"
    again = f", {part.attempts} attempts" if part.attempts > 1 else ""
    return f"{where}version {part.base_version} of {part.table}, {regions}; {steps}{again}"


def _searches(level: ExplainedLevel) -> Sequence[ExplainedSearch]:
    return level.searches or (ExplainedSearch("", "not asked: newer levels have all that was asked for"),)


def _cells(part: ExplainedPart, level: ExplainedLevel, search: ExplainedSearch) -> dict[str, str]:
    counts = {name: getattr(search, name.replace(" ", "_")) for name in _COUNTS}
    asked = bool(search.by)
    return {
        "region": named(level.region).removeprefix("region ") if level.region else "",
        "level": _level(part, level),
        "rows": f"{level.rows:,}",
        "by": search.by,
        **{name: f"{count:,}" if count is not None and asked else "" for name, count in counts.items()},
        "ms": _ms(search.ms) if asked else "",
        "how": "; ".join(_how(level, search)),
    }


def _level(part: ExplainedPart, level: ExplainedLevel) -> str:
    if level.kind == "base":
        return f"base {part.base_version}"
    if level.kind == "wal":
        first, last = level.positions or (0, 0)
        return f"wal {first}" if first == last else f"wal {first}–{last}"
    return f"{level.kind} {level.generation} {level.state}"


def _how(level: ExplainedLevel, search: ExplainedSearch) -> Iterator[str]:
    if search.how:
        yield search.how
    if search.fetches > 1:
        yield f"fetched {search.fetches} times"
    if level.load_ms and search is _searches(level)[0]:
        yield f"loaded in {_ms(level.load_ms)} ms"
    if search.requests:
        yield f"{_counted(search.requests, 'request')}, {search.bytes_read:,} bytes"


def _table(rows: list[dict[str, str]]) -> Iterator[str]:
    """Align the cells; omit columns without any value, and "deleted" if it is 0 everywhere."""
    names = [name for name in _NAMES if any(row[name] not in ("", "0" if name == "deleted" else "") for row in rows)]
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in names}
    for row in ({name: name for name in names}, *rows):
        cells = (row[name].rjust(widths[name]) if name in _NUMBERS else row[name].ljust(widths[name]) for name in names)
        yield "  ".join(cells).rstrip()


def _ms(ms: float) -> str:
    return f"{ms:,.1f}" if ms >= 0.1 or not ms else f"{ms:.2f}"


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


T = TypeVar("T")
Explain = Callable[[Explanation], object]


class Watch:
    """Collect the explanation of one read.

    Thread safety. One thread at a time; `add` from any.
    """

    def __init__(self, read: str, level: str, explain: Explain, clock: Clock) -> None:
        self.clock = clock
        self._read, self._level, self._explain = read, level, explain
        self._parts: list[Callable[[float], ExplainedPart | None]] = []
        self._attempts, self._busy, self._since = 0, 0.0, clock.monotonic()

    def add(self, part: Callable[[float], ExplainedPart | None]) -> None:
        """Add the part of a process that answers.

        It is called when the answer is complete, with the milliseconds of the read; None: the process sent no part.
        """
        self._parts.append(part)

    def again(self) -> None:
        """Begin an attempt; parts of earlier ones are dropped."""
        self._attempts, self._parts = self._attempts + 1, []

    def heard(self, endpoint: str) -> Callable[[Mapping[str, Any]], None]:
        """Return a receiver for the explanation that the daemon at `endpoint` sends, in the form of
        `Explanation.as_dict`.
        """
        sent: list[Mapping[str, Any]] = []
        self.add(lambda _: replace(Explanation.of(sent[0]).parts[0], endpoint=endpoint) if sent else None)
        return sent.append

    def ended(self, answer: T) -> T:
        """Call `explain` (for a stream at its end) and return the answer."""
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
    """Return a watch that calls `explain`, None for None. Raises: Invalid if it is not a function."""
    if explain is None:
        return None
    if not callable(explain):
        raise Invalid(f"explain = {brief(explain)}: give a function that takes the explanation, such as explain=print")
    return Watch(read, level, explain, SystemClock())


def heard(watch: Watch | None, endpoint: str) -> Callable[[Mapping[str, Any]], None] | None:
    """Return a receiver for the explanation of the daemon at `endpoint`; None without a watch."""
    return None if watch is None else watch.heard(endpoint)


def ended(watch: Watch | None, answer: T) -> T:
    """Return `answer`, reported to `watch`."""
    return answer if watch is None else watch.ended(answer)
