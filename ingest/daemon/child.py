"""A daemon as a child process on loopback: what `memwal run` uses when no endpoints are configured.

The parent writes the configuration, pickled (secrets stay references), as one line to the child's standard input and
keeps that pipe open: it is the child's lifeline. The child answers with lines of JSON on its standard output: any
number of `{"replaying"}`, then `{"endpoint"}` or an error.

A child daemon that is started again, at its own address, when it ends: a stream under way finds it there again.

What was acknowledged is in the log, and what was not is sent again with its token (`ingest.client.retry`), so an end
costs time only. It is given up where it cannot start: at once where somebody must mend that (another process has its
port), else after as long as a micro-batch waits (storage does not answer).
"""

from __future__ import annotations

import base64
import json
import logging
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from memwal.ingest.errors import MemWalError, Unavailable, UnknownOutcome, classify, from_wire
from memwal.ingest.settings.load import Settings
from memwal.ingest.threads import Worker
from memwal.wal import Clock, SystemClock

if TYPE_CHECKING:
    from memwal.ingest.settings.load import Settings


class ChildDaemon:
    """A running child daemon.

    Thread safety. Any thread. Invariants. The child ends with this process, also when this process is killed.
    """

    def __init__(self, process: subprocess.Popen[str], endpoint: str) -> None:
        """Use `start_child`."""
        self._process = process
        self.endpoint = endpoint
        self.pid = process.pid

    def exit_code(self) -> int | None:
        """The child's exit code (negative: the signal that ended it), None while it runs."""
        return self._process.poll()

    def stop(self, timeout: float = 30.0) -> int:
        """Let go of the lifeline and wait for the child to drain; returns its exit code."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


def start_child(
    settings: Settings, replaying: Callable[[str], None] = lambda _: None, *, take_over: bool = False
) -> ChildDaemon:
    """Start a daemon for `settings` and wait until it serves; `replaying` is told how far its regions are opened.
    `take_over`: as for `serve`.

    Raises: what `serve` raises, in this process.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "memwal.ingest.daemon"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is for the parent, which then ends the child in order
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(base64.b64encode(pickle.dumps((settings, take_over))).decode() + "\n")
    process.stdin.flush()
    while "replaying" in (answer := _answer(process.stdout.readline())):
        replaying(str(answer["replaying"]))
    if "endpoint" in answer:
        return ChildDaemon(process, str(answer["endpoint"]))
    code = process.wait()
    if "kind" in answer:
        raise from_wire(answer)
    raise Unavailable(f"the daemon ended while starting (exit code {code}); see the lines above")


def how_it_ended(code: int) -> str:
    """An exit code in words; negative: the signal that ended the process."""
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _answer(line: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(line)
        return found
    except ValueError:
        return {}


_LOG = logging.getLogger("memwal.child")
LOOK_EVERY = 0.1
PAUSE_FIRST, PAUSE_MOST, STEADY = 0.1, 5.0, 60.0
"""Seconds after a start before the next one: at first, doubling, at most; and how long one must run for the pauses to
begin anew."""


class KeptChild:
    """A child daemon, whichever process it is by now.

    Thread safety. Any thread. Invariants. One process at a time; the next one has the address of the first.
    """

    def __init__(
        self, settings: Settings, replaying: Callable[[str], None] = lambda _: None, clock: Clock | None = None
    ) -> None:
        """Start it, and return when it serves. `replaying`: as for `start_child`. Raises: as `start_child`."""
        self._clock = clock or SystemClock()
        self._patience = settings.sink.stream_timeout
        self._child = start_child(settings, replaying)
        self.endpoint = self._child.endpoint
        daemon = settings.daemon.model_copy(update={"port": int(self.endpoint.rpartition(":")[2])})
        self._settings = settings.model_copy(update={"daemon": daemon})
        self._failure: MemWalError | None = None
        self._stopped = threading.Event()
        self._keeper = Worker("child-keeper", self._keep)

    @property
    def pid(self) -> int:
        """Of the process of this moment."""
        return self._child.pid

    @property
    def failure(self) -> MemWalError | None:
        """Why it is not started again any more, None while it runs or is to come back."""
        return self._failure

    def stop(self, timeout: float = 30.0) -> int:
        """As `ChildDaemon.stop`, for good."""
        self._stopped.set()
        self._keeper.wait()
        return self._child.stop(timeout)

    def _keep(self) -> None:
        pause, started = PAUSE_FIRST, self._clock.monotonic()
        while not self._stopped.wait(LOOK_EVERY):
            code = self._child.exit_code()
            if code is None:
                continue
            steady = self._clock.monotonic() - started >= STEADY
            pause = PAUSE_FIRST if steady else min(2 * pause, PAUSE_MOST)
            _LOG.warning("the daemon ended (%s) and is started again", how_it_ended(code))
            if not self._started_again(code, pause):
                return
            started = self._clock.monotonic()
            self._stopped.wait(pause)

    def _started_again(self, code: int, pause: float) -> bool:
        until = self._clock.monotonic() + self._patience
        while not self._stopped.is_set():
            try:
                self._child = start_child(self._settings)
                return True
            except Exception as error:  # noqa: BLE001 - told by whoever asks for `failure`
                found = classify(error)
                may_pass = isinstance(found, Unavailable | UnknownOutcome) and self._clock.monotonic() < until
                if not may_pass:
                    ended = f"the daemon ended ({how_it_ended(code)}) and cannot be started again"
                    self._failure = type(found)(f"{ended}: {found}", found.details)
                    return False
                _LOG.warning("the daemon does not start, will try again: %s", found)
            self._stopped.wait(pause)
        return False
