"""The health of a process as one sentence, with reasons and remedies: a pure function of data in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from memwal.ingest.engine.table.pauses import Paused, text_of
from memwal.ingest.service.ops.health import Reason

State = Literal["healthy", "busy", "warning", "failing"]
"""It works; it starts or ends; it works, but an operator should check something; something does not work."""
SLOW_WRITE = 5.0
"""Seconds without an ack after which a write causes a warning."""
_LATE = 10.0
"""Seconds beyond `commit.interval` after which commits count as late, unless twice the interval is longer."""
_LAG_SECONDS, _LAG_GROWS = 10.0, 1.1
"""A lag causes a warning if it exceeds the rows of this many seconds and grew by this factor in a minute."""
_LONGEST = 300
"""Maximum characters of an error in a sentence; the lists of the page contain the whole text."""
_ORDER: Mapping[State, int] = {"failing": 0, "warning": 1, "busy": 2, "healthy": 3}


@dataclass(frozen=True, slots=True)
class Situation:
    """The input of the sentence. Times in seconds; None if unknown.

    `reasons`: why the process is not ready (`ops.health`). `regions`: number of the table's regions. `alone`:
    whether this is the only daemon of the table. `behind` and `most`: by level, now and the maximum of the last
    minute. `interval`: `commit.interval`. `leads`: whether this process commits. `acks`, `rates`: see
    `History.figures`.
    """

    reasons: Sequence[Reason] = ()
    regions: int = 0
    alone: bool = True
    behind: Mapping[str, float | None] = field(default_factory=dict)
    most: Mapping[str, float | None] = field(default_factory=dict)
    interval: float = 0.0
    leads: bool = True
    acks: Mapping[str, Any] = field(default_factory=dict)
    rates: Mapping[str, float | None] = field(default_factory=dict)
    waiting_puts: int = 0
    skewed: str = ""
    """See `ops.skew.measured`."""
    puts_rejected: str = ""
    """Why the table accepts no rows."""
    gone: Sequence[str] = ()
    """Endpoints of daemons that do not answer."""
    run: bool = False
    lag_rows: float | None = None
    lag_before: float | None = None
    """`lag_rows` a minute ago."""
    paused: Paused = field(default_factory=dict)
    trigger: float = 0.0
    """Of a run: `source.trigger`."""
    freshness: float | None = None
    """Of a run: `RunMeter.lag_seconds`; None if no rows landed in the last minute."""
    freshness_max: float = 0.0
    """Of a run: `source.freshness_max`; 0 = no objective."""
    broken: Sequence[str] = ()
    """Of a fleet: the name and error of each broken table."""
    idle: str = ""
    """Where the regions of the table of a fleet are, if this daemon has none."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem or state to report: a title of few words, a sentence, and the remedy."""

    state: State
    reason: str
    title: str
    text: str
    todo: str = ""
    regions: tuple[str, ...] = ()


def health(situation: Situation) -> dict[str, Any]:
    """Return `state`, `title`, `text` and `todo` of the worst finding, and all other `findings`, worst first."""
    found = sorted(_findings(situation), key=lambda finding: _ORDER[finding.state])
    first, *rest = found or [Finding("healthy", "healthy", "Healthy", _healthy(situation))]
    return asdict(first) | {"findings": [asdict(finding) for finding in rest]}


def _findings(situation: Situation) -> Iterator[Finding]:
    by_reason: dict[str, list[Reason]] = {}
    for reason in situation.reasons:
        by_reason.setdefault(reason["reason"], []).append(reason)
    for name, reasons in by_reason.items():
        unlisted = _failing(name.replace("_", " ").capitalize(), "", "warning")
        yield _OF_REASON.get(name, unlisted)(situation, reasons)
    if situation.puts_rejected:
        todo = "Reads, deletes and commits of earlier rows continue."
        yield Finding("failing", "puts_rejected", "Puts are rejected", _sentence(situation.puts_rejected), todo)
    for what, (title, text, todo) in _OF_PAUSE.items():
        if what in situation.paused:
            # the title states the rest
            told = text_of(what, situation.paused[what]).partition(" paused")[2].lstrip(": ")
            yield Finding("busy", f"{what}_paused", title, f"{_sentence(told)} {text}", todo)
    if "commit_failing" not in by_reason and "commits" not in situation.paused and _is_late(situation):
        yield _late(situation)
    yield from _of_writes(situation)
    yield from _of_fleet(situation)
    if situation.skewed:
        yield Finding("warning", "skewed", "One region takes the rows", _sentence(situation.skewed))
    if situation.gone:
        count, other = len(situation.gone), "" if situation.run else "other "
        one = "A daemon does not answer" if situation.run else "Another daemon does not answer"
        title = f"{count} {other}daemons do not answer" if count > 1 else one
        text = f"No answer from {', '.join(situation.gone)}. Its regions are taken over by those that live."
        todo = "Start it again; it then gets its share of the regions back."
        yield Finding("warning", "daemon_gone", title, text, todo)
    yield from _of_lag(situation)


# ---- reasons of health ----------------------------------------------------------------------------------------------


def _busy(title: str, todo: str) -> Callable[[Situation, Sequence[Reason]], Finding]:
    return lambda _, reasons: Finding("busy", reasons[0]["reason"], title, _sentence(reasons[0]["text"]), todo)


def _failing(title: str, todo: str, state: State = "failing") -> Callable[[Situation, Sequence[Reason]], Finding]:
    def finding(situation: Situation, reasons: Sequence[Reason]) -> Finding:
        regions = tuple(reason["region"] for reason in reasons if "region" in reason)
        of = f" in {len(regions)} of {situation.regions} regions" if regions and situation.regions else ""
        return Finding(state, reasons[0]["reason"], f"{title}{of}", _sentence(reasons[0]["text"]), todo, regions)

    return finding


def _of_commits(situation: Situation, reasons: Sequence[Reason]) -> Finding:
    behind = situation.behind.get("committed") or 0.0
    waited = f"Rows have waited {duration(behind)} for the base table. " if behind else ""
    made = _failing("Commits are stuck" if _is_late(situation) else "Commits fail", _COMMIT)(situation, reasons)
    return replace(made, text=f"{waited}Last error: {made.text} {_SAFE}")


def _of_fences(situation: Situation, reasons: Sequence[Reason]) -> Finding:
    alone = (
        "If the other writer should serve this table, stop this daemon. If not, end the other writer: this daemon then "
        "claims its regions again, after daemon.claim_again."
    )
    todo = alone if situation.alone else "This daemon drops these regions and asks the others for its share by itself."
    made = _failing("Fenced by another writer", f"Nothing that was acknowledged is lost. {todo}")
    return made(situation, reasons)


def _of_freshness(situation: Situation, reasons: Sequence[Reason]) -> Finding:
    todo = (
        "Find the slow part: Spark's steps (memwal_run_step_seconds), acks, or storage (appends of the daemons). Add "
        "regions and daemons, or Spark executors. After a start, the run may still be reading a backlog."
    )
    if situation.trigger >= situation.freshness_max:
        todo = (
            f"Rows wait up to source.trigger, {duration(situation.trigger)}, for their micro-batch: shorten it, or "
            "raise source.freshness_max."
        )
    return Finding("warning", "not_fresh", "Rows are searchable too late", _sentence(reasons[0]["text"]), todo)


_SAFE = "Rows stay safe in the log and in SSTs, and reads find them."
_COMMIT = (
    "Commits are tried again by themselves. Correct what the error names; “memwal verify CONFIG” checks every file, "
    "“memwal commit CONFIG” commits now."
)
_OF_REASON: Mapping[str, Callable[[Situation, Sequence[Reason]], Finding]] = {
    "claiming": _busy("Starting", "Wait: calls are answered once the regions are claimed."),
    "starting": _busy("Starting", "Wait: rows flow once Spark and the daemon run."),
    "draining": _busy("Ending", "Nothing to do: calls under way are finished, acknowledged rows are in the log."),
    "resizing": _busy("Being resized", "Wait: writes go on when the new regions are claimed."),
    "region_fenced": _of_fences,
    "region_poisoned": _failing(
        "Stopped after a failure of storage",
        "Acknowledged rows are in the log. Check the storage; a single daemon ends and must be started again, one of "
        "several claims the regions again by itself.",
    ),
    "flush_failing": _failing(
        "Flushes fail",
        "Rows stay safe in the log, and reads find them; puts are taken until memtable.unflushed_max. Check that the "
        "storage can be written (space, permissions); flushes are tried again by themselves.",
    ),
    "commit_failing": _of_commits,
    "region_not_claimed": _failing(
        "Regions without an owner",
        "Wait some seconds: this daemon claims them. If it does not, see the events.",
        "warning",
    ),
    "no_daemon": _failing(
        "No daemon answers",
        "Micro-batches wait and are sent again. “memwal run” restarts a daemon of its own; check that daemons of your "
        "own run: “memwal status CONFIG”.",
    ),
    "cannot_be_opened": _failing(
        "Cannot be opened", "Correct what the error names; the next call of the table tries again."
    ),
    "not_fresh": _of_freshness,
    "source_silent": _failing(
        "The source does not answer", "The run waits up to source.outage_max and goes on by itself. Check the source."
    ),
}


# ---- what reasons do not say ----------------------------------------------------------------------------------------


_OF_PAUSE: Mapping[str, tuple[str, str, str]] = {
    "ingestion": (
        "Ingestion is paused",
        "Rows wait in the source; the table can be read and put to.",
        "“memwal resume CONFIG” continues it.",
    ),
    "commits": (
        "Commits are paused",
        "Rows wait in memtables and SSTs, where reads find them; puts wait once commit.pending_max SSTs do.",
        "“memwal resume CONFIG --commits” continues them, “memwal commit CONFIG” commits once.",
    ),
}


def _is_late(situation: Situation) -> bool:
    behind, interval = situation.behind.get("committed"), situation.interval
    return behind is not None and interval > 0 and behind > max(2 * interval, interval + _LATE)


def _late(situation: Situation) -> Finding:
    behind = duration(situation.behind["committed"] or 0.0)
    text = f"Rows have waited {behind} for the base table; commit.interval is {duration(situation.interval)}. {_SAFE}"
    todo = "See the commits and events below: a commit may be slow, or another program may hold the table."
    if not situation.leads:
        todo = "Another daemon commits for all: look at its page, and at the daemons below."
    return Finding("warning", "commit_late", "Commits are late", text, todo)


def _of_writes(situation: Situation) -> Iterator[Finding]:
    if situation.waiting_puts:
        text = (
            f"{situation.waiting_puts:,} puts wait for room: flushes or commits are slower than the rows that arrive."
        )
        todo = "See flushes and commits below; add daemons, or raise memtable.unflushed_max or commit.pending_max."
        yield Finding("warning", "back_pressure", "Puts wait", text, todo)
    latest = situation.behind.get("latest") or 0.0
    if latest > SLOW_WRITE and not situation.run:
        text = f"The oldest write has waited {duration(latest)} for its ack: storage is slow, or does not answer."
        todo = "Nothing is lost: the writer waits up to wal.retry_budget, then it stops itself. Check the storage."
        yield Finding("warning", "slow_writes", "Writes are slow", text, todo)


def _of_fleet(situation: Situation) -> Iterator[Finding]:
    if situation.broken:
        count = len(situation.broken)
        title = f"{count:,} tables are broken" if count > 1 else "A table is broken"
        more = f" {count - 1:,} more: sort the tables by state." if count > 1 else ""
        todo = "The others are served. Correct what the error names; the next call of the table tries again."
        yield Finding("warning", "table_broken", title, f"{_sentence(situation.broken[0])}{more}", todo)
    if situation.idle:
        yield Finding("healthy", "idle", "Idle here", _sentence(situation.idle))


def _of_lag(situation: Situation) -> Iterator[Finding]:
    if "ingestion" in situation.paused:
        return
    lag, before = situation.lag_rows, situation.lag_before
    rate = situation.rates.get("put") or 0.0
    if lag is None or before is None or lag <= _LAG_SECONDS * rate or lag <= before * _LAG_GROWS:
        return
    text = (
        f"The source is {lag:,.0f} rows ahead, {before:,.0f} a minute ago; {rate:,.0f} rows/s are taken. "
        "Rows arrive faster than they are ingested."
    )
    todo = "Add regions and daemons, or Spark executors; see the times of acks and the commits below for what is slow."
    yield Finding("warning", "lag_grows", "Falling behind", text, todo)


def _healthy(situation: Situation) -> str:
    searchable = situation.freshness if situation.run else situation.acks.get("p50")
    most, now = situation.most.get("committed"), situation.behind.get("committed")
    if searchable is None:
        what = "landed in the source" if situation.run else "arrived"
        return f"No rows have {what} in the last minute. {_uncommitted(now)}"
    after = "after they land in the source" if situation.run else "after they arrive at this daemon"
    if situation.interval <= 0:
        return f"Rows are searchable {duration(searchable)} {after}. They are committed on demand only."
    if not most or now is None:
        return f"Rows are searchable {duration(searchable)} {after}."
    if now >= most:  # no commit was seen yet
        return f"Rows are searchable {duration(searchable)} {after}. {_uncommitted(now)}"
    return f"Rows are searchable {duration(searchable)} {after}, and committed at most {duration(most)} after that."


def _uncommitted(now: float | None) -> str:
    if now is None:
        return ""
    return f"The oldest row that is not committed is {duration(now)} old." if now else "All rows are committed."


def duration(seconds: float) -> str:
    """Return a time for people: 4 ms, 0.02 s, 12 s, 4 min, 3 h."""
    if 0 < seconds < 0.01:
        return f"{seconds * 1e3:.2g} ms"
    for below, digits in ((0.1, 3), (1.0, 2), (10.0, 1), (120.0, 0)):
        if seconds < below:
            text = f"{seconds:.{digits}f}"
            return f"{text.rstrip('0').rstrip('.') if '.' in text else text} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def _sentence(text: str) -> str:
    """Return the first line of a message as a sentence, with a capital letter and a full stop; a long line is cut."""
    line = (text.strip().splitlines() or [""])[0]
    line = line if len(line) <= _LONGEST else f"{line[:_LONGEST]}…"
    return line[:1].upper() + line[1:] + ("" if line.endswith((".", "!", "?", "…")) else ".")
