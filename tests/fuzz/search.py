"""Send requests until the time is over, and judge the effect of each on the daemon."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.fuzz.requests import Request, request
from tests.fuzz.scene import MEMORY, PATIENCE, Scene

RESTART_EVERY = 20_000
"""Number of requests after which the daemon is restarted, so that slow growth is not attributed to one request."""


@dataclass(frozen=True)
class Finding:
    """A request that the daemon did not survive, or answered wrongly."""

    number: int
    what: str
    request: Request

    def __str__(self) -> str:
        return f"request {self.number}: {self.what}\n    {self.request}"


@dataclass
class Report:
    """The findings, and how many requests got each answer."""

    findings: list[Finding] = field(default_factory=list)
    answers: Counter[str] = field(default_factory=Counter)
    sent: int = 0


@contextmanager
def scene(fault: str = "-") -> Iterator[Scene]:
    """Create the table and start its daemon; stop the daemon and delete the table on exit."""
    with tempfile.TemporaryDirectory(prefix="memwal-fuzz-") as place:
        made = Scene(Path(place), fault)
        made.create()
        try:
            made.start()
            yield made
        finally:
            made.kill()


def search(
    at: Scene,
    seed: int,
    numbers: Iterator[int],
    seconds: float,
    *,
    most: int = 10,
    tell: Callable[[Report], None] = lambda _: None,
    found: Callable[[Finding], None] = lambda _: None,
) -> Report:
    """Send the requests `numbers` of `seed` for `seconds`, or until there are `most` findings.

    `tell`: called from time to time with the report; `found`: called with each finding.
    """
    report, until = Report(), time.monotonic() + seconds
    for number in numbers:
        if time.monotonic() > until or len(report.findings) >= most:
            break
        at.start()
        asked = request(seed, number)
        what = judged(at, asked, report)
        report.sent += 1
        if what:
            report.findings.append(Finding(number, what, asked))
            found(report.findings[-1])
            if not at.alive:
                at.start()
        if report.sent % 200 == 0:
            tell(report)
        if report.sent % RESTART_EVERY == 0:
            at.stop()
    return report


def judged(at: Scene, asked: Request, report: Report) -> str:
    """Send a request; return a description of the misbehaviour, or "" for a good answer."""
    at.forget_peak()
    before, _ = at.memory()
    began = time.monotonic()
    answer = at.send(asked)
    took = time.monotonic() - began
    report.answers[answer.split(":")[0] if answer.startswith("INVALID") else answer[:100]] += 1
    _, peak = at.memory()
    lost = not at.alive or answer.startswith(("FlightUnavailable", "client"))
    if lost and (code := at.ended()) is not None:
        return f"the daemon ended with exit code {code} ({answer}); its log: {' | '.join(list(at.log)[-3:])}"
    if peak - before > MEMORY:
        return f"the daemon took {(peak - before) >> 20} MiB for it ({answer})"
    if answer == "late" or took > PATIENCE:
        at.kill()
        return f"no answer within {took:.0f} s"
    if answer.startswith("INTERNAL"):
        return f"an internal error: {answer}"
    return ""
