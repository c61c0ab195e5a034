"""The channel between the driver of `serve --on-spark` and its barrier tasks: a TCP connection from each task.

Spark gives a task no way to report anything before it ends, and gives the driver no way to signal a task except to
kill it. So each task connects to the driver, sends the secret that arrived with its code, and reports when its
daemons serve. The connection is also a lifeline: when it ends, for any reason, the task drains its daemons. Messages
are lines of JSON. They contain no rows and no user secrets, and the driver uses their content only as addresses.

    task to driver      {"secret", "attempt", "task"}, then {"endpoints": […]} once the daemons serve
    driver to task      nothing; the end of the connection
"""

from __future__ import annotations

import hmac
import json
import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from memwal.ingest.errors import Unavailable

HELLO_WITHIN = 10.0
"""Seconds for a task to send its secret after it has connected."""
STRANGERS_MAX = 64
"""Maximum connections without a secret yet; a further one closes the oldest. A task sends its secret at once."""
ACCEPT_PAUSE = 0.1
"""Seconds until the next attempt after a failed `accept`: the process may have no free file descriptor."""
_LONGEST, _HELLO_LONGEST = 1 << 16, 1 << 10
"""Maximum characters of a message, and of the first message."""


class DriverChannel:
    """The driver's end of the connections of all tasks.

    Thread safety. Any thread.
    Invariants. Only tasks of the expected attempt are accepted. If the connection of one of them ends, all are
    closed: their daemons drain, and only a new attempt starts them again. At most STRANGERS_MAX connections wait for
    their secret. A failed `accept` is repeated until `close`.
    """

    def __init__(self, host: str, bind: str, secret: str) -> None:
        """Listen on `bind`. `host`: the driver's address for executors. Raises: Unavailable."""
        try:
            family = socket.getaddrinfo(bind, 0, type=socket.SOCK_STREAM)[0][0]
            self._socket = socket.create_server((bind, 0), family=family)
        except OSError as error:
            raise Unavailable(f"spark.driver.bindAddress: the driver cannot listen on {bind} ({error})") from None
        self.address = (host, int(self._socket.getsockname()[1]))
        self._secret = secret
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._strangers = deque[socket.socket]()
        self._closed = threading.Event()
        self._attempt, self._ready = 0, dict[int, list[str]]()
        self._tasks = 0
        self._told: Callable[[list[str]], None] = _ignore
        threading.Thread(target=self._accept, name="driver-channel", daemon=True).start()

    def expect(self, attempt: int, tasks: int, told: Callable[[list[str]], None]) -> None:
        """Close all connections, and accept the tasks of `attempt` from now on.

        `told`: called with the endpoints of all daemons once all serve.
        """
        with self._lock:
            self._attempt, self._tasks, self._told, self._ready = attempt, tasks, told, {}
        self.hang_up()

    def forget(self) -> None:
        """Close all connections, and reject new ones."""
        self.expect(0, 0, _ignore)

    def hang_up(self) -> None:
        """Close all connections, so that the tasks drain their daemons."""
        with self._lock:
            connections, self._connections = self._connections, set()
        for connection in connections:
            _shut(connection)

    def close(self) -> None:
        """Close all connections and stop listening."""
        self._closed.set()
        self.forget()
        with self._lock:
            strangers = list(self._strangers)
        for connection in strangers:
            _shut(connection)
        _shut(self._socket)
        self._socket.close()

    # ---- inside --------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        """Accept connections, each read in its own thread. At the limit, close the oldest one without a secret."""
        while not self._closed.is_set():
            try:
                connection, _ = self._socket.accept()
            except OSError:
                self._closed.wait(ACCEPT_PAUSE)
                continue
            with self._lock:
                self._strangers.append(connection)
                oldest = self._strangers.popleft() if len(self._strangers) > STRANGERS_MAX else None
            if oldest is not None:
                _shut(oldest)
            try:
                threading.Thread(target=self._listen, args=(connection,), name="task", daemon=True).start()
            except RuntimeError:  # the system cannot start another thread
                self._forget_stranger(connection)
                connection.close()

    def _forget_stranger(self, connection: socket.socket) -> None:
        with self._lock, suppress(ValueError):
            self._strangers.remove(connection)

    def _listen(self, connection: socket.socket) -> None:
        faults = (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError)
        with connection, suppress(*faults), connection.makefile("r") as messages:
            late = threading.Timer(HELLO_WITHIN, _shut, [connection])
            late.daemon = True
            try:
                late.start()
                hello = json.loads(messages.readline(_HELLO_LONGEST))
            finally:
                late.cancel()
                self._forget_stranger(connection)
            if not self._admits(hello, connection):
                return
            try:
                while text := messages.readline(_LONGEST):
                    self._serves(hello, [str(each) for each in json.loads(text)["endpoints"]])
            finally:
                self._lost(hello["attempt"])

    def _admits(self, hello: Mapping[str, Any], connection: socket.socket) -> bool:
        if not hmac.compare_digest(str(hello["secret"]).encode(), self._secret.encode()):
            return False
        with self._lock:
            if hello["attempt"] != self._attempt or not self._attempt:
                return False
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self._connections.add(connection)
            return True

    def _lost(self, attempt: int) -> None:
        """End the attempt, because one of its connections has ended. Later connections of its tasks are
        rejected too."""
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


class TaskChannel:
    """A task's end of its connection to the driver.

    Thread safety. Any thread.
    """

    def __init__(self, address: tuple[str, int], secret: str, attempt: int, task: int) -> None:
        """Connect to the driver. Raises: Unavailable if no process answers at `address`."""
        self.ended = threading.Event()
        """Set when the connection has ended."""
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
        threading.Thread(target=self._watch, name="task-channel", daemon=True).start()

    def serves(self, endpoints: Sequence[str]) -> None:
        """Report that the daemons of this task serve at `endpoints`."""
        with suppress(OSError):  # the connection has ended: `ended` is set
            self._say({"endpoints": list(endpoints)})

    def close(self) -> None:
        """Close the connection."""
        _shut(self._socket)

    def _say(self, what: Mapping[str, Any]) -> None:
        self._socket.sendall(json.dumps(what).encode() + b"\n")

    def _watch(self) -> None:
        with self._socket, suppress(OSError):
            while self._socket.recv(_LONGEST):
                pass
        self.ended.set()


def _shut(connection: socket.socket) -> None:
    """Shut down a socket, which wakes a thread that waits for it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _ignore(_endpoints: list[str]) -> None:
    """Accept endpoints when no task is expected."""
