"""Pause the ingestion of a pipeline: no micro-batch begins, and the one in progress is finished.

1. About once a second, a thread of the run reads the table's pauses (`table.pauses`). A pause over HTTP takes
   effect at once.
2. The gate is closed: a micro-batch that Spark begins now waits there, before any of its rows is read.
3. The query is stopped once no micro-batch is in the sink. By then Spark has noted the offsets of the last one. A
   micro-batch that waits at the gate begins again later with the same rows. The source is not read during the pause.
4. After the pause the query is started again from its checkpoint.

*Crash anywhere: the next run reads the pause, and does not start the query.*
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from memwal import wal
from memwal.ingest.engine.table.pauses import PauseWatch, What, text_of
from memwal.ingest.errors import Unavailable
from memwal.ingest.settings.load import Settings
from memwal.ingest.threads import Periodic

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

_LOG = logging.getLogger("memwal.pauses")
Write = Callable[["DataFrame", int], None]
_LOOK_EVERY = 0.5
"""Seconds between two checks whether the last read of the pauses is still recent."""


class Gate:
    """Lets micro-batches begin, or makes them wait.

    Thread safety. Any thread; micro-batches begin in a thread of Spark.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._closed = self._left = False
        self._waiting = 0

    def before(self, write: Write) -> Write:
        """Return `write` behind the gate."""

        def entered(frame: DataFrame, batch_id: int) -> None:
            with self._changed:
                self._waiting += 1
                try:
                    self._changed.wait_for(lambda: self._left or not self._closed)
                finally:
                    self._waiting -= 1
                if self._left:
                    raise Unavailable("ingestion was paused before this micro-batch began; it begins again later")
            write(frame, batch_id)

        return entered

    @property
    def holds(self) -> bool:
        """Whether a micro-batch waits at the gate, so that none is in the sink."""
        return self._waiting > 0

    def close(self) -> None:
        """Make micro-batches wait."""
        with self._changed:
            self._closed = True

    def open(self) -> None:
        """Let micro-batches begin."""
        if not self._closed:
            return
        with self._changed:
            self._closed = self._left = False
            self._changed.notify_all()

    def leave(self) -> None:
        """End the wait of a micro-batch whose query is being stopped: it fails, and begins again later."""
        with self._changed:
            self._left = self._closed
            self._changed.notify_all()


class Pausing:
    """Reads the pauses of one pipeline's table, and holds its micro-batches.

    Thread safety. One thread, which runs the pipeline; `watch` and `gate` from any thread.
    """

    def __init__(self, settings: Settings, environ: Mapping[str, str], clock: wal.Clock) -> None:
        store = wal.open_store(settings.place, settings.storage_options(environ))
        self.watch = PauseWatch(store, clock, wal.SystemIds(), settings.wal.options())
        self.gate = Gate()
        self.stands = False
        """Whether a pause has stopped the query."""
        self._looks = Periodic("pauses", self.watch.recent, _LOOK_EVERY)

    def start(self) -> None:
        """Read the pauses, and start the thread that repeats it. Raises: wal errors."""
        self.watch.look()
        self._looks.start()

    def stop(self) -> None:
        """Stop the thread."""
        self._looks.stop()

    def held(self, what: What) -> Mapping[str, Any] | None:
        """Return the pause of `what`; None if it is not paused.

        If storage does not answer, the last known pause counts: a step that a run does only once must not be skipped.
        """
        try:
            return self.watch.look().get(what)
        except wal.WalError as error:
            _LOG.warning("cannot look whether %s are paused, going by the last look: %s", what, error)
            return self.watch.last.get(what)

    @property
    def told(self) -> str | None:
        """One line about the pause of the ingestion; None if it is not paused."""
        held = self.watch.last.get("ingestion")
        return None if held is None else text_of("ingestion", held)

    @property
    def state(self) -> str:
        """`running`, `pausing` while a micro-batch is being finished, or `paused`."""
        return "paused" if self.stands else "running" if self.told is None else "pausing"

    def may_stop(self, query: StreamingQuery | None) -> bool:
        """Return whether `query` can be stopped without interrupting a micro-batch. Closes the gate."""
        self.gate.close()
        if query is None or self.gate.holds:
            return True
        status: Mapping[str, Any] = query.status
        return bool(query.isActive and not status["isTriggerActive"])


def refuse_paused(settings: Settings, environ: Mapping[str, str], clock: wal.Clock) -> None:
    """Raise Unavailable if the ingestion into the table is paused."""
    told = Pausing(settings, environ, clock)
    if "ingestion" in told.watch.look():
        raise Unavailable(f"{settings.place}: {told.told}; `memwal resume CONFIG` ends the pause")
