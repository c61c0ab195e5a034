"""Kill `memwal run` and its daemon with SIGKILL, then run the same configuration to its end: the final table is the
same as without kills.

Meanwhile a reader reads the packages at level `latest`, which returns only acknowledged rows. Each package that one
read returns is in every later read, at the same or a newer version, whichever process is killed in between.
"""

from __future__ import annotations

import json
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import lance
import psutil
import pytest

import memwal
from tests.conftest import extent

CONFIG = Path(__file__).resolve().parent.parent.parent / "configs" / "quickstart.toml"
Versions = dict[str, str]


class Life:
    """One `memwal run` and its current child daemon."""

    def __init__(self, running: Any, uri: Path, wait_until: Callable[..., Any]) -> None:
        self.running, self._uri, self._wait_until = running, uri, wait_until
        self.processes: list[psutil.Process] = []

    @property
    def ended(self) -> bool:
        return self.running.process.poll() is not None

    def daemon(self) -> psutil.Process | None:
        """Return the child daemon's process, or None while no child daemon runs."""
        with suppress(psutil.Error):  # some processes of Spark end at once
            self.processes = psutil.Process(self.running.process.pid).children(recursive=True)
            for each in self.processes:
                with suppress(psutil.Error):
                    if "memwal.ingest.service.daemon" in " ".join(each.cmdline()):
                        return each
        return None

    def kill_daemon(self) -> None:
        """Send SIGKILL to the child daemon, once it runs."""
        daemon = self._wait_until(self.daemon)
        daemon.kill()

    def reads(self) -> Iterator[Versions]:
        """Read the table at level `latest` again and again, until the run ends."""
        while not self.ended:
            table = self._wait_until(lambda: self._connected() or self.ended)
            with suppress(memwal.MemWalError):
                while table is not True:
                    yield versions(table.scan(["package", "version"]).read_all().to_pylist())
                    time.sleep(0.1)

    def _connected(self) -> Any:
        """Return a client of the current daemon, or None: an owner note may still name a killed daemon."""
        daemon = self.daemon()
        with suppress(psutil.Error, memwal.MemWalError, ValueError, OSError):
            connections = [] if daemon is None else daemon.net_connections("tcp")
            listening = {each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN}
            for note in (self._uri / "_mem_wal").glob("*/owner.json"):
                endpoint = json.loads(note.read_text()).get("endpoint", "")  # none while the daemon starts
                if endpoint and int(endpoint.rsplit(":", 1)[1]) in listening:
                    return memwal.connect(endpoint)
        return None


def versions(rows: list[dict[str, str]]) -> Versions:
    """Return the version of each package; assert that no package occurs twice."""
    found = {row["package"]: row["version"] for row in rows}
    assert len(found) == len(rows), "a package came back twice"
    return found


@pytest.fixture(scope="module")
def start_run(
    tmp_path_factory: pytest.TempPathFactory, start_for_module: Callable[..., Any], wait_until: Callable[..., Any]
) -> Callable[[], tuple[Life, Path, dict[str, str]]]:
    """Return a function that starts the command, always with the same arguments and on the same table."""
    directory = tmp_path_factory.mktemp("kill")
    config = directory / CONFIG.name
    shutil.copy(CONFIG, config)
    env = {
        "MEMWAL__TABLE__URI": str(directory / "packages.lance"),
        "MEMWAL__SOURCE__FEED": str(CONFIG.parent / "quickstart"),
        "MEMWAL__SOURCE__PATH": str(directory / "landing"),
        "MEMWAL__SOURCE__FEED_EVERY": "100ms",
        "MEMWAL__MEMTABLE__ROWS_MAX": "700",
        "MEMWAL__COMMIT__INTERVAL": "1s",
    }

    def run() -> tuple[Life, Path, dict[str, str]]:
        arguments = [sys.executable, "-m", "memwal.ingest.cli.app", "run", str(config)]
        running = start_for_module(arguments, cwd=directory, env=env)
        return Life(running, directory / "packages.lance", wait_until), config, env

    return run


class Seen:
    """The newest version of each package that a read at level `latest` has returned."""

    def __init__(self, packages: Any) -> None:
        self.newest: Versions = {}
        self._packages = packages

    def check(self, found: Versions) -> None:
        """Assert that a read misses no package, that no version went back and that no version is invented.

        Later calls expect everything in `found`.
        """
        missing = set(self.newest) - set(found)
        assert not missing, f"{len(missing)} packages that were there are gone, such as {sorted(missing)[:3]}"
        for name, version in found.items():
            assert version in self._packages.allowed[name]
            final = self._packages.newest[name]["version"]
            assert version == final or self.newest.get(name) != final, f"{name} went back to {version}"
        self.newest = found


LIVES = extent(
    ((("daemon", 2000), ("run", "updated")),),
    ((("daemon", 1), ("run", 2000)), (("daemon", "updated"), ("run", "updated"))),
)
"""Per run, the kills in order: the process to kill, and when: at a number of packages read, or at the first updates."""


@pytest.mark.timeout(1800)
def test_a_run_killed_again_and_again_ends_in_the_same_table(
    start_run: Callable[[], tuple[Life, Path, dict[str, str]]],
    cli: Callable[..., Any],
    packages: Any,
    wait_until: Callable[..., Any],
) -> None:
    seen = Seen(packages)
    for kills in LIVES:
        life, config, env = start_run()
        waiting = list(kills)
        for found in life.reads():
            seen.check(found)
            updated = sum(found[name] == packages.newest[name]["version"] for name in packages.changed if name in found)
            victim, when = waiting[0] if waiting else ("", 0)
            if waiting and (updated > 100 if when == "updated" else len(found) >= when):
                waiting.pop(0)
                life.kill_daemon() if victim == "daemon" else life.running.process.kill()
        assert not waiting, f"the run ended before {waiting} was seen: {life.running.lines} {life.running.errors}"
        code = life.running.wait()
        again = [line for line in life.running.errors if "the daemon ended (signal 9) and is started again" in line]
        assert len(again) == 1, life.running.errors
        assert code == -signal.SIGKILL, life.running.errors
        wait_until(lambda life=life: not any(each.is_running() for each in life.processes))
        left = cli("query", config, "--columns", "package,version", "--limit", "9999", "--format", "json", env=env)
        assert left.code == 0, left.err
        seen.check(versions(json.loads(left.out)))
    ran = cli("run", config, "--once", env=env)
    assert ran.code == 0, ran.err
    rows = lance.dataset(env["MEMWAL__TABLE__URI"]).to_table().to_pylist()
    assert len(rows) == 4000
    assert {row["package"]: row for row in rows} == packages.newest
    assert "nothing pending" in cli("status", config, env=env).out
