"""Disturb the soak: one deed after the other, chosen by a seed, a minute apart on average.

The deck of deeds is shuffled whenever it is used up, so that each deed has its turn. After a quarter of the run
all daemons are restarted one after the other; from then on daemon 0 is neither killed nor ended, so that one daemon
lives long enough to show slow growth.
"""

from __future__ import annotations

import random
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

import psutil

from tests import fault_proxy as faults
from tests.chaos import REGIONS, Kept
from tests.conftest import wait_until
from tests.soak.scene import PATIENCE, Scene

DECK = {
    "kill a daemon": 3,
    "kill the driver": 2,
    "kill an executor": 2,
    "kill a client": 2,
    "end a daemon": 1,
    "stop a daemon for a while": 2,
    "resize": 1,
    "outage of storage": 1,
    "stop the broker for a while": 1,
    "pause ingestion": 1,
    "pause commits": 1,
    "collect": 1,
}
"""How often each deed is in the deck."""
_OTHER_REGIONS = 6
_WHILE = (4.0, 9.0)
"""Seconds for which a process stands still: longer than a lease and than peers wait, shorter than
`wal.retry_budget`."""


class Hand:
    """Disturbs a scene in its own thread, between `start` and `stop`.

    Thread safety. `done` and `wrong` may be read during the run.
    """

    def __init__(self, scene: Scene, seconds: float, every: float, faults: float, seed: int) -> None:
        """`seconds`: length of the run; `every`: seconds between two deeds; `faults`: share of requests that always
        fail."""
        self.scene, self.every, self.faults = scene, every, faults
        self._chance, self._deck, self._regions = random.Random(seed), list[str](), REGIONS
        self._began, self._roll_at, self.rolled = 0.0, seconds / 4, False
        self._over, self._thread = threading.Event(), threading.Thread(target=self._run, name="hand", daemon=True)
        self.done: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.log: list[tuple[float, str]] = []
        """The start of each deed, in seconds since the start of the run."""

    def start(self) -> None:
        """Start; the time of the run starts now."""
        self._began = time.monotonic()
        self._thread.start()

    def stop(self, meanwhile: Callable[[], None]) -> None:
        """Stop after the deed in progress; call `meanwhile` repeatedly until then."""
        self._over.set()
        while self._thread.is_alive():
            meanwhile()
            self._thread.join(1.0)

    def kills(self) -> int:
        """Return the number of processes killed or ended so far."""
        return sum(number for deed, number in self.done.items() if deed.startswith(("kill", "end", "restart")))

    def _run(self) -> None:
        while not self._over.wait(self._chance.uniform(0.5, 1.5) * self.every):
            if not self.rolled and time.monotonic() - self._began > self._roll_at:
                deed, act = "restart the daemons one by one", self._roll
                self.rolled = True
            else:
                deed = self._draw()
                act = self._deeds()[deed]
            self.log.append((round(time.monotonic() - self._began, 1), deed))
            try:
                act()
            except Exception as error:  # noqa: BLE001 - the run continues after any error, and reports it at its end
                self.wrong.append(f"{deed}: {type(error).__name__}: {error}")
            self.done[deed] += 1

    def _draw(self) -> str:
        if not self._deck:
            self._deck = [deed for deed, number in DECK.items() for _ in range(number)]
            self._chance.shuffle(self._deck)
        return self._deck.pop()

    def _deeds(self) -> dict[str, Callable[[], None]]:
        scene = self.scene
        return {
            "kill a daemon": lambda: self._daemon().kill(),
            "kill the driver": self._kill_driver,
            "kill an executor": self._kill_executor,
            "kill a client": self._kill_client,
            "end a daemon": lambda: self._daemon().signal(signal.SIGTERM),
            "stop a daemon for a while": self._stop_daemon,
            "resize": self._resize,
            "outage of storage": self._outage,
            "stop the broker for a while": self._stop_broker,
            "pause ingestion": self._pause,
            "pause commits": lambda: self._pause("--commits"),
            "collect": lambda: self._command("gc", str(scene.config)),
        }

    def _daemon(self) -> Kept:
        """Choose a daemon that may be killed."""
        return self._chance.choice(self.scene.daemons[1:] if self.rolled else self.scene.daemons)

    def _kill_client(self) -> None:
        self.scene.clients[self._chance.choice(sorted(self.scene.clients))].kill()

    def _kill_driver(self) -> None:
        """Kill the driver once it has executors: if it were killed at every start, it would read nothing."""
        wait_until(self.scene.run.executors, PATIENCE, 0.5)
        self.scene.run.kill()

    def _kill_executor(self) -> None:
        for executor in self.scene.run.executors():
            with suppress(psutil.NoSuchProcess):
                executor.kill()

    def _stop_daemon(self) -> None:
        daemon = self._chance.choice(self.scene.daemons)
        daemon.signal(signal.SIGSTOP)
        self._wait()
        daemon.signal(signal.SIGCONT)

    def _stop_broker(self) -> None:
        self.scene.kafka.pause()
        self._wait()
        self.scene.kafka.resume()

    def _outage(self) -> None:
        proxy = self.scene.place.proxy
        assert proxy is not None
        proxy.inject(self._chance.choice((faults.answers(503, "SlowDown"), faults.resets())), times=None)
        self._wait()
        proxy.heal()
        if self.faults:
            self.scene.place.hurt(self.faults)

    def _pause(self, *what: str) -> None:
        self._command("pause", str(self.scene.config), *what, "--reason", "the soak")
        self._wait()
        self._command("resume", str(self.scene.config), *what)

    def _resize(self) -> None:
        self._regions = _OTHER_REGIONS if self._regions == REGIONS else REGIONS
        self._command("regions", "resize", str(self.scene.config), "--to", str(self._regions))

    def _roll(self) -> None:
        """End each daemon by SIGTERM, and wait until both serve again."""
        for daemon in self.scene.daemons:
            before = daemon.starts
            daemon.signal(signal.SIGTERM)
            wait_until(lambda: daemon.starts > before and self._all_owned(), PATIENCE, 0.5)  # noqa: B023

    def _all_owned(self) -> bool:
        return len(self.scene.epochs()) >= self._regions

    def _command(self, *words: str) -> None:
        """Run a command; repeat it up to five times if storage does not answer, as an operator would."""
        said = ""
        for _ in range(5):
            try:
                ran = self.scene.command(*words)
            except subprocess.TimeoutExpired as error:
                said = str(error)
                continue
            if ran.returncode == 0:
                return
            said = f"exit code {ran.returncode}: {ran.stderr.strip()[-300:]}"
            time.sleep(1.0)
        raise AssertionError(f"memwal {words[0]}: {said}")

    def _wait(self) -> None:
        time.sleep(self._chance.uniform(*_WHILE))
