"""A daemon as a child process on loopback, for `memwal run` without configured endpoints.

The parent writes the configuration, pickled (secrets stay references), as one line to the child's standard input and
keeps that pipe open: it is the child's lifeline. The child answers with lines of JSON on its standard output: any
number of `{"replaying"}`, then `{"endpoint"}` or an error.

`RestartingDaemon` restarts a child that exits, on its old port, where open streams reconnect. Acknowledged rows are
in the log, and clients send the others again with their token (`client.retry`), so an exit costs only time. If
the child cannot start, the parent stops restarting it: at once if an operator must fix the cause (another process
uses the port), otherwise after the waiting time of a micro-batch (storage does not answer).
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
from typing import Any

from memwal.ingest.errors import MemWalError, Unavailable, UnknownOutcome, classify, from_wire
from memwal.ingest.settings.load import Settings
from memwal.ingest.threads import Worker
from memwal.wal import Clock, SystemClock
from memwal.wal.retries import Backoff


class ChildDaemon:
    """A running child daemon.

    Thread safety. Any thread.
    Invariants. The child ends with this process, even if this process is killed.
    """

    def __init__(self, process: subprocess.Popen[str], endpoint: str) -> None:
        """Use `start_child` instead."""
        self._process = process
        self.endpoint = endpoint
        self.pid = process.pid

    def exit_code(self) -> int | None:
        """Return the exit code of the child (negative: the signal that ended it); None while it runs."""
        return self._process.poll()

    def stop(self, timeout: float = 30.0) -> int:
        """Close the lifeline and wait for the child to drain; return its exit code."""
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
    """Start a daemon for `settings` and wait until it serves.

    `replaying`: called with texts about the progress of opening regions. `take_over`: see `serve`.
    Raises: the error that `serve` raised in the child.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "memwal.ingest.service.daemon"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C reaches only the parent, which ends the child in order
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
    """Return a description of an exit code; a negative one is the signal that ended the process."""
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _answer(line: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(line)
        return found
    except ValueError:
        return {}


STEADY = 60.0
"""Seconds between two starts after which the pauses start over."""


class Restarts:
    """The minimum time between two starts of a process or job that keeps ending: doubles until one ran for STEADY
    seconds.

    Thread safety. One thread.
    """

    def __init__(self, clock: Clock, first: float, longest: float) -> None:
        """Start with pauses of `first`, up to `longest` seconds."""
        self._clock, self._backoff = clock, Backoff(first, longest)
        self._started = self._due = clock.monotonic()

    def started(self) -> None:
        """Record a start now."""
        now = self._clock.monotonic()
        if now - self._started >= STEADY:
            self._backoff.reset()
        self._started, self._due = now, now + self._backoff.pause()

    @property
    def left(self) -> float:
        """Seconds until the next start is allowed; 0 if it is allowed now."""
        return max(0.0, self._due - self._clock.monotonic())


_LOG = logging.getLogger("memwal.child")
LOOK_EVERY = 0.1
PAUSE_FIRST, PAUSE_MOST = 0.1, 5.0
"""Seconds between two starts, doubling."""


class RestartingDaemon:
    """A child daemon that is restarted on its old port when it exits.

    Thread safety. Any thread.
    Invariants. One process at a time; each has the address of the first.
    """

    def __init__(self, settings: Settings, replaying: Callable[[str], None] = lambda _: None) -> None:
        """Start the child, and return when it serves. `replaying`: see `start_child`. Raises: errors of
        `start_child`."""
        self._clock = SystemClock()
        self._patience = settings.sink.stream_timeout
        self._child = start_child(settings, replaying)
        self.endpoint = self._child.endpoint
        daemon = settings.daemon.model_copy(update={"port": int(self.endpoint.rpartition(":")[2])})
        self._settings = settings.model_copy(update={"daemon": daemon})
        self.failure: MemWalError | None = None
        """Why the child is not restarted; None while it runs or restarts."""
        self._stopped = threading.Event()
        self._keeper = Worker("child-keeper", self._keep)

    @property
    def pid(self) -> int:
        """Process id of the current child."""
        return self._child.pid

    def stop(self, timeout: float = 30.0) -> int:
        """Stop the child as `ChildDaemon.stop` does, and do not restart it."""
        self._stopped.set()
        self._keeper.wait()
        return self._child.stop(timeout)

    def _keep(self) -> None:
        restarts = Restarts(self._clock, PAUSE_FIRST, PAUSE_MOST)
        restarts.started()
        while not self._stopped.wait(LOOK_EVERY):
            code = self._child.exit_code()
            if code is None:
                continue
            _LOG.warning("the daemon ended (%s) and is started again", how_it_ended(code))
            if not self._started_again(code, restarts):
                return

    def _started_again(self, code: int, restarts: Restarts) -> bool:
        until = self._clock.monotonic() + self._patience
        while not self._stopped.wait(restarts.left):
            restarts.started()
            try:
                self._child = start_child(self._settings)
                return True
            except Exception as error:  # noqa: BLE001 - readers of `failure` raise it
                found = classify(error)
                may_pass = isinstance(found, Unavailable | UnknownOutcome) and self._clock.monotonic() < until
                if not may_pass:
                    ended = f"the daemon ended ({how_it_ended(code)}) and cannot be started again"
                    self.failure = type(found)(f"{ended}: {found}", found.details)
                    return False
                _LOG.warning("the daemon does not start, will try again: %s", found)
        return False
