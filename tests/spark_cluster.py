"""A real standalone Spark for tests: a master and two workers, each in its own JVM, on loopback.

PySpark's own `spark-class` starts them as a cluster's scripts do, with only PATH, HOME, Java and locale of this
process's environment: executors get everything else from Spark, as on other hosts. Each has its own working
directory, and the second worker uses another host name.

    with SparkCluster.started(directory) as cluster:
        cluster.master            # spark://127.0.0.1:40123
        cluster.workers[0].kill()
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import psutil

from tests.spark_classes import jvm_options

HOSTS = ("127.0.0.1", "localhost")
"""Host names of the workers: two different ones, so that a test detects code that confuses them."""
CORES = 2
_READY_WITHIN = 120.0
_MASTER = r"Starting Spark master at (spark://\S+)"
_REGISTERED = "Successfully registered with master"
_KEPT = ("PATH", "HOME", "JAVA_HOME", "LANG", "LC_ALL")


@dataclass(frozen=True)
class Node:
    """The master or a worker.

    Thread safety. One thread, which must live as long as the node must: on Linux the node ends with it.
    """

    process: subprocess.Popen[bytes]
    place: Path
    """Its working directory; processes that it starts have directories below it."""

    def kill(self) -> None:
        """Send SIGKILL to this process only; processes that it started continue."""
        self.process.kill()
        self.process.wait(_READY_WITHIN)

    def executors(self) -> list[psutil.Process]:
        """Return the JVMs of its executors."""
        return self.running("CoarseGrainedExecutorBackend")

    def running(self, name: str) -> list[psutil.Process]:
        """Return its started processes with `name` in their command."""
        return [each for each in self.started() if _runs(each, name)]

    def started(self) -> list[psutil.Process]:
        """Return all other processes in its working directory: executors, their Pythons, and daemons that these
        started."""
        return [each for each in psutil.process_iter() if each.pid != self.process.pid and _is_below(each, self.place)]

    def says(self, pattern: str) -> re.Match[str]:
        """Wait until its log matches `pattern`; return the match. Raises: RuntimeError with its last lines."""
        deadline = time.monotonic() + _READY_WITHIN
        while self.process.poll() is None and time.monotonic() < deadline:
            if found := re.search(pattern, self.log.read_text(errors="replace")):
                return found
            time.sleep(0.05)
        raise RuntimeError(f"{self.place.name} did not start; its last words: {self.log.read_text()[-800:]}")

    @property
    def log(self) -> Path:
        """The file of its output."""
        return self.place.with_suffix(".log")


@dataclass
class SparkCluster:
    """A running master with its workers; see the module."""

    directory: Path
    environ: Mapping[str, str]
    nodes: list[Node] = field(default_factory=list)
    workers: list[Node] = field(default_factory=list)
    master: str = ""
    """The value of `spark.master`."""

    @classmethod
    @contextmanager
    def started(cls, directory: Path, environ: Mapping[str, str] | None = None) -> Iterator[SparkCluster]:
        """Run a cluster inside the context. `environ`: variables of its workers and executors."""
        cluster = cls(directory, environ or {})
        try:
            cluster.start()
            yield cluster
        finally:
            for node in reversed(cluster.nodes):  # workers before the master
                node.kill()
            for each in cluster.started_by_workers():
                with suppress(psutil.NoSuchProcess):
                    each.kill()

    def start(self) -> None:
        """Start all nodes; return once the master knows its workers. Raises: RuntimeError."""
        leader = self._launch("master", "master.Master", "--host", HOSTS[0], "--port", "0")
        self.master = leader.says(_MASTER)[1]
        for host in HOSTS:
            self.add_worker(host)
        for worker in self.workers:
            worker.says(_REGISTERED)

    def add_worker(self, host: str = HOSTS[0]) -> Node:
        """Start another worker without waiting for it."""
        number = len(self.workers)
        given = ["--host", host, "--cores", str(CORES), "--memory", "2g"]
        worker = self._launch(f"worker-{number}", "worker.Worker", *given, self.master)
        self.workers.append(worker)
        return worker

    def leader(self) -> Node:
        """Return the master's process."""
        return self.nodes[0]

    def started_by_workers(self) -> list[psutil.Process]:
        """Return the executors, and all processes that they started, with daemons and Pythons."""
        return [each for worker in self.workers for each in worker.started()]

    def _launch(self, name: str, main: str, *arguments: str) -> Node:
        place = self.directory.resolve() / name
        place.mkdir(parents=True)
        bound = [setpriv, "--pdeathsig", "KILL"] if (setpriv := shutil.which("setpriv")) else []
        home = spark_home()
        work = ["--work-dir", str(place)] if main.startswith("worker") else []
        command = [str(home / "bin" / "spark-class"), f"org.apache.spark.deploy.{main}", "--webui-port", "0", *work]
        with place.with_suffix(".log").open("ab") as output:
            process = subprocess.Popen(
                [*bound, *command, *arguments],
                cwd=place,
                env=self._environment(place, home),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        self.nodes.append(Node(process, place))
        return self.nodes[-1]

    def _environment(self, place: Path, home: Path) -> dict[str, str]:
        own = {name: os.environ[name] for name in _KEPT if name in os.environ}
        spark = {"SPARK_HOME": str(home), "SPARK_LOCAL_DIRS": str(place), "SPARK_DAEMON_MEMORY": "256m"}
        bound = {"SPARK_LOCAL_IP": HOSTS[0], "SPARK_DAEMON_JAVA_OPTS": jvm_options(), "TMPDIR": str(place)}
        return own | spark | bound | dict(self.environ)


def spark_home() -> Path:
    """Return the directory of PySpark's Spark."""
    spec = find_spec("pyspark")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def quick(cluster: str) -> dict[str, str]:
    """Return `[source.spark]` settings for the master `cluster`, with executors that start quickly."""
    return {
        "spark.master": cluster,
        "spark.executor.memory": "512m",
        "spark.executor.extraJavaOptions": jvm_options(),
        "spark.scheduler.maxRegisteredResourcesWaitingTime": "90s",
    }


def _runs(process: psutil.Process, name: str) -> bool:
    with suppress(psutil.NoSuchProcess):
        return any(name in word for word in process.cmdline())
    return False


def _is_below(process: psutil.Process, place: Path) -> bool:
    with suppress(psutil.Error):  # it has ended, or belongs to another user
        return place in (Path(process.cwd()), *Path(process.cwd()).parents)
    return False
