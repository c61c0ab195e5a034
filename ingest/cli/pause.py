"""`memwal pause` and `memwal resume`: stop and continue the ingestion into a table, or its automatic commits."""

from __future__ import annotations

import getpass
import socket
from collections.abc import Mapping

from rich.console import Console

from memwal import wal
from memwal.ingest.cli.open import open_base
from memwal.ingest.engine.table.pauses import Pauses, What, text_of
from memwal.ingest.service.ops.sentence import duration
from memwal.ingest.settings.load import Settings

_DONE: Mapping[What, str] = {
    "ingestion": "no micro-batch begins, the one under way is finished; puts by others, reads and commits go on",
    "commits": "no process commits by itself; `memwal commit` does, and flushes, puts and reads go on",
}
_RESUME: Mapping[What, str] = {"ingestion": "memwal resume CONFIG", "commits": "memwal resume CONFIG --commits"}


def pause(settings: Settings, environ: Mapping[str, str], console: Console, what: What, reason: str) -> int:
    """Pause `what` of the table, and print the effect. Raises: Invalid if the table does not exist; wal errors."""
    found, new = _pauses(settings, environ).pause(what, _here(), reason)
    told = text_of(what, found.told())
    done = f"{_DONE[what]}; `{_RESUME[what]}` ends the pause" if new else "nothing was changed"
    told = told if new else told.replace("paused", "paused already", 1)
    console.out(f"{settings.table.uri}: {told}\n{done}", highlight=False)
    return 0


def resume(settings: Settings, environ: Mapping[str, str], console: Console, what: What) -> int:
    """End the pause of `what`, and print what was paused. Raises: errors of `pause`."""
    pauses = _pauses(settings, environ)
    ended = pauses.resume(what)
    if ended is None:
        console.out(f"{settings.table.uri}: {what} {'are' if what == 'commits' else 'is'} not paused", highlight=False)
    else:
        lasted = f" after {duration(max(0.0, wal.SystemClock().now() - ended.since))}" if ended.since else ""
        console.out(f"{settings.table.uri}: {what} resumed{lasted}", highlight=False)
    for other, told in pauses.now().items():
        console.out(f"{text_of(other, told)}; `{_RESUME[other]}` ends that pause", highlight=False)  # type: ignore[index]
    return 0


def _pauses(settings: Settings, environ: Mapping[str, str]) -> Pauses:
    _, store = open_base(settings, environ)
    return Pauses(store, wal.SystemClock(), options=settings.wal.options())


def _here() -> str:
    """Return who runs this command, so that others can contact them."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a container may run as a user without a name
        user = "somebody"
    return f"{user}@{socket.gethostname()}"
