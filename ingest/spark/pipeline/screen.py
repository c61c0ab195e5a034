"""Show the progress of running pipelines: a live panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from memwal.ingest.spark.pipeline.metrics import Figures
from memwal.wal import Clock

_PER_SECOND = 4
_REGIONS_SHOWN = 8


class Screen:
    """The console of a run: for each pipeline a panel on a terminal, plain lines elsewhere.

    Thread safety. One thread.
    """

    def __init__(self, console: Console, tables: Sequence[str], clock: Clock) -> None:
        """`tables`: the name of each pipeline."""
        live = console.is_terminal
        self._live = Live(console=console, refresh_per_second=_PER_SECOND, transient=True) if live else None
        self._console, self._many = console, len(tables) > 1
        self.boards = tuple(Progress(self, table, clock) for table in tables)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
            self.refresh()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def phase(self, text: str) -> None:
        """Show that all pipelines enter another phase."""
        for board in self.boards if self._live is not None else ():
            board.phase(text)
        if self._live is None:
            self._print(text)

    def refresh(self) -> None:
        """Redraw the panel, on a terminal."""
        if self._live is not None:
            self._live.update(Group(*(board.panel() for board in self.boards)))

    def line(self, table: str, text: str) -> None:
        """Print a line about a pipeline, unless the console is a terminal."""
        if self._live is None:
            self._print(f"{table}: {text}" if self._many else text)

    def _print(self, text: str) -> None:
        self._console.out(f"memwal: {text}", highlight=False)


class Progress:
    """The phase of one pipeline and its figures, on a `Screen`.

    Thread safety. One thread.
    """

    def __init__(self, screen: Screen, table: str, clock: Clock) -> None:
        """Use `Screen.boards` instead."""
        self._screen, self._table, self._clock = screen, table, clock
        self._phase, self._note = "starting", ""
        self._began = clock.monotonic()
        self._figures: Figures | None = None
        self._status: dict[str, Any] = {}
        self._files = ""
        self._printed_batch = -1

    def phase(self, text: str) -> None:
        """Show that the pipeline enters another phase."""
        self._phase, self._note = text, ""
        self._screen.line(self._table, text)
        self._screen.refresh()

    def note(self, text: str) -> None:
        """Show `text` beside the phase, on a terminal."""
        self._note = text
        self._screen.refresh()

    def show(self, figures: Figures, status: dict[str, Any], files: str = "") -> None:
        """Show new figures. `status`: as from `Table.status`. `files`: such as "6/10"."""
        self._figures, self._status, self._files = figures, status or self._status, files
        if figures.batch_id > self._printed_batch:
            self._printed_batch = figures.batch_id
            bad = f"{figures.bad:,} bad, " if figures.bad else ""
            queued = sum(int(region["memtable_rows"]) for region in self._status.get("regions", []))
            self._screen.line(
                self._table,
                f"micro-batch {figures.batch_id}: {figures.rows:,} rows in, {bad}"
                f"{figures.rows_per_second:,.0f} rows/s, "
                + (
                    f"{len(self._status['tables']):,} tables"
                    if "tables" in self._status
                    else f"{queued:,} in memtables, base version {self._status.get('base_version', '-')}"
                ),
            )
        self._screen.refresh()

    def panel(self) -> RenderableType:
        """Return the panel for a terminal."""
        seconds = int(self._clock.monotonic() - self._began)
        phase = f"{self._phase}: {self._note}" if self._note else self._phase
        title = f"[bold]{escape(self._table)}[/]  {escape(phase)}  [dim]{seconds // 60}:{seconds % 60:02d}[/]"
        head = Spinner("dots", Text.from_markup(title))
        if (figures := self._figures) is None:
            return head
        parts = [
            f"{figures.rows:,} rows in",
            f"{figures.rows_per_second:,.0f}/s",
            f"batch {max(0, figures.batch_id)}",
            f"{figures.bad:,} bad" if figures.bad else "",
            f"file {self._files}" if self._files else "",
            f"base v{self._status['base_version']}: {self._status['rows']:,}" if self._status.get("regions") else "",
            f"{len(self._status['tables']):,} tables" if "tables" in self._status else "",
        ]
        return Group(head, Text("  " + " · ".join(filter(None, parts))), self._regions(figures))

    def _regions(self, figures: Figures) -> Table:
        table = Table(box=None, padding=(0, 1), header_style="dim", show_edge=False)
        table.add_column("region")
        for name in ("rows in", "memtable rows", "WAL position", "SSTs", "generation"):
            table.add_column(name, justify="right")
        regions = self._status.get("regions", [])
        for region in regions[:_REGIONS_SHOWN]:
            table.add_row(
                f"{region['bucket']}  {region['id'][:8]}",
                f"{figures.by_region.get(region['id'], 0):,}",
                f"{region['memtable_rows']:,}",
                f"{region['wal_position']:,}",
                f"{len(region['ssts']):,}",
                f"{region['generation']:,}",
            )
        if len(regions) > _REGIONS_SHOWN:
            table.add_row(f"{len(regions) - _REGIONS_SHOWN} more", "", "", "", "", "")
        return table
