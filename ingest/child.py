"""A daemon as a child process on loopback: what `memwal run` uses when no endpoints are configured.

The parent writes the configuration, pickled (secrets stay references), as one line to the child's standard input and
keeps that pipe open: it is the child's lifeline. The child answers with lines of JSON on its standard output: any
number of `{"replaying"}`, then `{"endpoint"}` or an error.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ingest.errors import Unavailable, from_wire, to_wire

if TYPE_CHECKING:
    from ingest.settings import Settings


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
        [sys.executable, "-m", "ingest.child"],
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


def _say(answer: dict[str, Any]) -> None:
    with suppress(BrokenPipeError):  # the parent is gone: the lifeline ends this process
        sys.stdout.write(json.dumps(answer, default=str) + "\n")
        sys.stdout.flush()


def main() -> int:
    """The child's side: read the configuration, serve, say what went wrong."""
    from ingest.no_pandas import leave_pandas_out

    leave_pandas_out()
    from ingest.daemon import serve
    from ingest.errors import classify
    from ingest.logs import silence_grpc
    from ingest.replay_progress import Unhurried, in_words
    from wal import SystemClock
    from wal.panics import as_exception

    silence_grpc()
    try:
        settings, take_over = pickle.loads(base64.b64decode(sys.stdin.readline()))  # noqa: S301 - our parent wrote it
        replaying = Unhurried(lambda *told: _say({"replaying": in_words(*told)}), SystemClock())
        return serve(
            settings,
            os.environ,
            lifeline=sys.stdin,
            ready=lambda endpoint: _say({"endpoint": endpoint}),
            on_replay=replaying,
            take_over=take_over,
        )
    except BaseException as error:  # noqa: BLE001 - the edge of this process
        found = classify(as_exception(error))
        _say(to_wire(found))
        return found.exit_code


if __name__ == "__main__":
    sys.exit(main())
