"""Show a progress bar on a terminal while regions are opened, if that takes more than one second.

Opening a region first reads its log, then applies the entries to a memtable; if indexes are built, that takes longer
than reading.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from uuid import UUID

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from memwal.ingest.engine.region.context import OnReplay
from memwal.wal import Clock, named

_SILENT = 1.0
"""Seconds before anything is shown."""
_EVERY = 0.25


class Unhurried:
    """Forward calls after the first second, and then at most four times a second.

    Thread safety. One thread.
    """

    def __init__(self, tell: OnReplay, clock: Clock) -> None:
        self._tell, self._clock = tell, clock
        self._next = clock.monotonic() + _SILENT

    def __call__(self, region: UUID, step: str, done: int, total: int) -> None:
        now = self._clock.monotonic()
        if now >= self._next:
            self._next = now + _EVERY
            self._tell(region, step, done, total)


@contextmanager
def replay_bar(clock: Clock, console: Console | None = None) -> Iterator[OnReplay | None]:
    """Provide the callback that shows a replay; None if standard error is not a terminal.

    `console`: standard error if not given.
    """
    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    progress = Progress(TextColumn("{task.description}"), BarColumn(), console=console, transient=True)
    task = progress.add_task("")

    def show(region: UUID, step: str, done: int, total: int) -> None:
        said = f"memwal: {in_words(region, step, done, total)}"
        progress.update(task, description=said, completed=done, total=total)
        progress.start()

    try:
        yield Unhurried(show, clock)
    finally:
        if progress.live.is_started:
            progress.stop()


def in_words(region: UUID, step: str, done: int, total: int) -> str:
    """Return a text such as "region 3: reading its log, 120 of 3,000 entries"."""
    return f"{named(region)}: {step} its log, {done:,} of {total:,} entries"
