"""Count which faults struck at which steps of the protocols.

A step is named by the part of the protocol whose code makes the call (`PARTS`; the innermost part on the stack), and by
what the call does, with the kind of object: `publish: put manifest`. Faults of a call are counted there. If another
actor kills or stops a process, the fault counts for each call that the process has in flight.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType
from typing import TYPE_CHECKING, Any

import memwal.flush.commits.committer
import memwal.flush.commits.expiry
import memwal.flush.commits.foreign_writes
import memwal.flush.commits.index_catchup
import memwal.flush.commits.load
import memwal.flush.commits.load_notes
import memwal.flush.commits.maintenance
import memwal.flush.commits.merge_passes
import memwal.flush.commits.plan
import memwal.flush.resizing.routing
import memwal.flush.sst.files
import memwal.flush.sst.flusher
import memwal.wal.fence
from memwal.flush import BaseTable, PlanCollector, SstCollector, collect_orphans
from memwal.flush.commits.append_pass import AppendedRows
from memwal.flush.commits.rounds import Rounds
from memwal.flush.resizing.steps import _Run
from memwal.ingest.engine.changes.reader import StoredChanges
from memwal.ingest.engine.read.reader import Reader
from memwal.ingest.engine.read.stored import StoredLevels
from memwal.ingest.engine.region.core import RegionCore
from memwal.ingest.engine.table import owner_notes
from memwal.ingest.engine.table.pauses import Pauses
from memwal.ingest.engine.table.regions import RegionSet
from memwal.ingest.engine.table.resize import Resizing
from memwal.wal import ManifestCollector, ReadAhead, ReadLease, WalAppender, WalCollector
from memwal.wal.fence import _Claimer
from memwal.wal.layout import kind_of

if TYPE_CHECKING:
    from tests.simulation.scheduler import Host, Scheduler

PARTS: dict[str, tuple[Callable[..., Any], ...]] = {
    "open": (BaseTable.open, BaseTable.latest),
    "claim": (memwal.wal.fence.claim, RegionSet.before_claim),
    "sentinel": (_Claimer.put_sentinel,),
    "replay": (_Claimer.replayed,),
    "settle": (memwal.wal.fence.settle_claim,),
    "read ahead": (ReadAhead.look,),
    "hand over": (RegionSet.release, RegionSet.give, RegionCore.end_reads, RegionCore.release),
    "owner's note": (owner_notes.announce, owner_notes.withdraw),
    "append": (WalAppender.append,),
    "ownership proof": (WalAppender._prove_ownership,),
    "lease proof": (ReadLease.prove,),
    "owner's look": (RegionCore.refresh,),
    "write SST": (memwal.flush.sst.files.write_sst,),
    "publish": (memwal.flush.sst.flusher.flush,),
    "commit": (memwal.flush.commits.committer.commit,),
    "plan": (memwal.flush.commits.plan.agree, Rounds.agreed),
    "foreign writes": (memwal.flush.commits.foreign_writes.look_back,),
    "deletes pass": (memwal.flush.commits.merge_passes.delete_pass,),
    "upserts pass": (memwal.flush.commits.merge_passes.upsert_pass,),
    "append pass": (AppendedRows.write, AppendedRows.append),
    "index catch-up": (memwal.flush.commits.index_catchup.catch_up,),
    "prune": (memwal.flush.commits.committer.prune_all,),
    "compact": (memwal.flush.commits.maintenance.compact,),
    "merge index segments": (memwal.flush.commits.maintenance.merge_segments,),
    "clean up versions": (memwal.flush.commits.maintenance.clean_up,),
    "expire": (memwal.flush.commits.expiry.ExpiredRows.collect,),
    "load": (memwal.flush.commits.load.load,),
    "notes of loads": (memwal.flush.commits.load_notes.begin_load, memwal.flush.commits.load_notes.end_abandoned),
    "collect entries": (WalCollector.collect,),
    "collect SSTs": (SstCollector.collect, SstCollector.list_region),
    "collect manifests": (ManifestCollector.collect,),
    "collect plans": (PlanCollector.collect,),
    "collect orphans": (collect_orphans,),
    "seal": (_Run.seal,),
    "drain": (_Run.drain,),
    "decide": (memwal.flush.resizing.routing.decide,),
    "switch": (memwal.flush.resizing.routing.finish,),
    "look for a resize": (Resizing.done, Resizing.look),
    "pause": (Pauses.pause, Pauses.resume, Pauses.now),
    "owners' notes": (owner_notes.find,),
    "read of storage": (StoredLevels.views,),
    "needs of the base": (memwal.flush.base_needs,),
    "change feed": (StoredChanges.piece,),
    "read": (Reader.get, Reader.scan, Reader.base),
}
"""The parts of the protocols, each with functions that do nothing else."""

Cells = Counter[tuple[str, str]]
"""Counts by step and fault; the fault "" counts the calls."""
COLUMNS: Mapping[str, tuple[str, ...]] = {
    "lost before": ("conflict", "reset before", "time-out before", "error before"),
    "lost after": ("reset after", "time-out after", "own retry", "link fails after", "look fails after",
                   "unavailable after", "error after"),
    "late": ("late",),
    "refused": ("refused", "unavailable"),
    "slow": ("slow",),
    "cut off": ("outage", "partition"),
    "stop": ("stop",),
    "kill": ("kill", "kill before", "kill after", "kill, answered"),
}  # fmt: skip
"""The columns of the table, and the faults in each."""


MUST_BE_KILLED = (
    "append",
    "claim",
    "sentinel",
    "write SST",
    "publish",
    "commit",
    "collect entries",
    "collect SSTs",
    "collect manifests",
    "prune",
    "switch",
    "load",
    "pause",
    "open",
    "call",
)
"""Parts within which the seeds of `make test` must have killed a process."""


class Coverage:
    """Counts of calls and faults of one run. One thread."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.cells: Cells = Counter()
        self._scheduler = scheduler
        self._doing: dict[int, tuple[Host, str]] = {}

    def strike(self, step: str, fault: str) -> None:
        """Count a call of a step. `fault`: "" if nothing went wrong."""
        self.cells[step, ""] += fault != "partition"
        if fault:
            self.cells[step, fault] += 1

    @contextmanager
    def doing(self, step: str) -> Iterator[None]:
        """Mark the running actor as being at this step, inside the context."""
        actor = self._scheduler.current
        if actor is None:
            yield
            return
        before, self._doing[actor.number] = self._doing.get(actor.number), (actor.host, step)
        try:
            yield
        finally:
            if before is None:
                del self._doing[actor.number]
            else:
                self._doing[actor.number] = before

    def struck(self, host: Host, fault: str) -> None:
        """Count a kill or a stop of a process for each step that its actors are at."""
        for at, step in list(self._doing.values()):
            if at is host:
                self.cells[step, fault] += 1


def step_of(call: str) -> str:
    """Return the name of the step that makes a storage call: the innermost protocol part on the stack, and the call."""
    return f"{next(_parts(), 'other')}: {call}"


def parts_here() -> tuple[str, ...]:
    """Return the parts of the protocols that the running actor is within, innermost first."""
    return tuple(dict.fromkeys(_parts()))


def run_within(parts: tuple[str, ...], work: Callable[[], Any]) -> Any:
    """Run `work` that an actor within `parts` submitted, so that its calls count for these parts."""
    return work()


def _parts() -> Iterator[str]:
    frame = sys._getframe(2)
    while frame is not None:
        if (part := _CODES.get(frame.f_code)) is not None:
            yield part
        elif frame.f_code is run_within.__code__:
            yield from frame.f_locals["parts"]
        frame = frame.f_back  # type: ignore[assignment]


def _code(function: Callable[..., Any]) -> CodeType:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return getattr(function, "__func__", function).__code__  # type: ignore[attr-defined, no-any-return]


_CODES: dict[CodeType, str] = {_code(each): part for part, functions in PARTS.items() for each in functions}


def table(cells: Cells) -> str:
    """Format the coverage as Markdown: a part in each line, a kind of fault in each column; "–" if it cannot happen."""
    steps: dict[str, set[str]] = {}
    for step, _ in cells:
        steps.setdefault(_part(step), set()).add(step)
    lines = [f"| part | calls | {' | '.join(COLUMNS)} |", f"|---|{'---:|' * (len(COLUMNS) + 1)}"]
    for part in sorted(steps):
        calls = sum(cells[step, ""] for step in steps[part])
        counts = [_cell(cells, steps[part], column) for column in COLUMNS]
        lines.append(f"| {part} | {calls:,} | {' | '.join(counts)} |")
    return "\n".join(lines)


def _cell(cells: Cells, steps: set[str], column: str) -> str:
    if not any(_possible(step, column) for step in steps):
        return "–"
    return f"{sum(cells[step, fault] for step in steps for fault in COLUMNS[column]):,}"


def _part(step: str) -> str:
    return step.partition(": ")[0]


def _possible(step: str, column: str) -> bool:
    """Return whether a kind of fault can strike at a step."""
    called, by_lance = _part(step) == "call", ": lance " in step
    if column == "late":
        return called or ": put " in step
    if column == "refused":
        return not called and not by_lance
    return not by_lance or column not in ("slow", "cut off")


def kills(cells: Cells, part: str) -> int:
    """Return how often a process was killed within a part."""
    return sum(times for (step, fault), times in cells.items() if _part(step) == part and fault in COLUMNS["kill"])


__all__ = ["COLUMNS", "Cells", "Coverage", "kills", "kind_of", "step_of", "table"]
