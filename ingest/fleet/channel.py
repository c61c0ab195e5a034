"""The line between the driver of `serve --on-spark` and its barrier tasks: a TCP connection from each task.

Spark lets a task say nothing to its driver before it ends, nor the driver to a task but "be killed". So each task calls
the driver's desk, shows the secret that came with its code, and says when its daemons serve. The line is a lifeline as
well: its end, however it came about, tells the task to drain its daemons. Lines of JSON; nothing of the table and no
secret of the user's passes here, and what the driver is told it uses as addresses only.

task to driver      {"secret", "attempt", "task"}, then {"endpoints": […]} once they serve
driver to task      nothing, until it hangs up
"""

from __future__ import annotations

import hmac
import json
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from memwal.ingest.errors import Unavailable

HELLO_WITHIN = 10.0
"""Seconds that a caller has to say who it is."""
_LONGEST = 1 << 16


class Desk:
    """The driver's end of all lines.

    Thread safety. Any thread. Invariants. Only tasks of the attempt that is expected are listened to; where the line of
    one of them ends all are hung up on, since its daemons drain, and nobody else would start them again.
    """

    def __init__(self, host: str, bind: str, secret: str) -> None:
        """`host`: by which executors reach the driver; `bind`: what it listens on. Raises: Unavailable."""
        try:
            family = socket.getaddrinfo(bind, 0, type=socket.SOCK_STREAM)[0][0]
            self._socket = socket.create_server((bind, 0), family=family)
        except OSError as error:
            raise Unavailable(f"spark.driver.bindAddress: the driver cannot listen on {bind} ({error})") from None
        self.address = (host, int(self._socket.getsockname()[1]))
        self._secret = secret
        self._lock = threading.Lock()
        self._lines: set[socket.socket] = set()
        self._attempt, self._ready = 0, dict[int, list[str]]()
        self._tasks = 0
        self._told: Callable[[list[str]], None] = _nobody
        threading.Thread(target=self._accept, name="desk", daemon=True).start()

    def expect(self, attempt: int, tasks: int, told: Callable[[list[str]], None]) -> None:
        """Hang up, and listen to the tasks of `attempt` from now on; `told`: the endpoints of all once all serve."""
        with self._lock:
            self._attempt, self._tasks, self._told, self._ready = attempt, tasks, told, {}
        self.hang_up()

    def forget(self) -> None:
        """Hang up, and on whoever calls from now on."""
        self.expect(0, 0, _nobody)

    def hang_up(self) -> None:
        """End every line: the tasks drain their daemons."""
        with self._lock:
            lines, self._lines = self._lines, set()
        for line in lines:
            with suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Hang up and listen no more."""
        self.forget()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    # ---- inside --------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                line, _ = self._socket.accept()
                threading.Thread(target=self._listen, args=(line,), name="line", daemon=True).start()

    def _listen(self, line: socket.socket) -> None:
        with line, suppress(OSError, ValueError, KeyError, TypeError), line.makefile("r") as said:
            line.settimeout(HELLO_WITHIN)
            hello = json.loads(said.readline(_LONGEST))
            if not self._admits(hello, line):
                return
            line.settimeout(None)
            try:
                while text := said.readline(_LONGEST):
                    self._serves(hello, [str(each) for each in json.loads(text)["endpoints"]])
            finally:
                self._lost(hello["attempt"])

    def _admits(self, hello: Mapping[str, Any], line: socket.socket) -> bool:
        if not hmac.compare_digest(str(hello["secret"]).encode(), self._secret.encode()):
            return False
        with self._lock:
            if hello["attempt"] != self._attempt or not self._attempt:
                return False
            line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self._lines.add(line)
            return True

    def _lost(self, attempt: int) -> None:
        """A line has ended: so does the attempt, for tasks that call later too."""
        with self._lock:
            over = attempt == self._attempt
            self._attempt = 0 if over else self._attempt
        if over:
            self.hang_up()

    def _serves(self, hello: Mapping[str, Any], endpoints: Sequence[str]) -> None:
        with self._lock:
            if hello["attempt"] != self._attempt:
                return
            self._ready[int(hello["task"])] = list(endpoints)
            told, ready = self._told, self._ready
            whole = len(ready) == self._tasks
        if whole:
            told([each for task in sorted(ready) for each in ready[task]])


class Line:
    """A task's end of its line.

    Thread safety. Any thread.
    """

    def __init__(self, address: tuple[str, int], secret: str, attempt: int, task: int) -> None:
        """Call the desk. Raises: Unavailable where nobody answers."""
        self.ended = threading.Event()
        try:
            self._socket = socket.create_connection(address, HELLO_WITHIN)
            self._say({"secret": secret, "attempt": attempt, "task": task})
        except OSError as error:
            raise Unavailable(
                f"an executor cannot reach the driver at {address[0]}:{address[1]} ({error.strerror or error}); set "
                "spark.driver.host and spark.driver.bindAddress in [source.spark] to an address that executors reach"
            ) from None
        self._socket.settimeout(None)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        threading.Thread(target=self._watch, name="line", daemon=True).start()

    def serves(self, endpoints: Sequence[str]) -> None:
        """The daemons of this task serve at `endpoints`."""
        with suppress(OSError):  # the line has ended: `ended` says so
            self._say({"endpoints": list(endpoints)})

    def close(self) -> None:
        """Hang up."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _say(self, what: Mapping[str, Any]) -> None:
        self._socket.sendall(json.dumps(what).encode() + b"\n")

    def _watch(self) -> None:
        with self._socket, suppress(OSError):
            while self._socket.recv(_LONGEST):
                pass
        self.ended.set()


def _nobody(_endpoints: list[str]) -> None:
    """Nobody is waited for."""
