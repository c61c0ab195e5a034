"""A real standalone Spark for tests: a master and two workers, each a JVM of its own, on loopback.

They are started by PySpark's own `spark-class` as a cluster's scripts would, with nothing of this process's
environment but PATH, HOME, Java and locale: what executors have they have from Spark, as on other hosts. Their working
directories are their own, and the second worker goes by another host name.

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
"""Of the workers: two names, so that who takes one for the other is found out."""
CORES = 2
_READY_WITHIN = 120.0
_MASTER = r"Starting Spark master at (spark://\S+)"
_REGISTERED = "Successfully registered with master"
_KEPT = ("PATH", "HOME", "JAVA_HOME", "LANG", "LC_ALL")


@dataclass(frozen=True)
class Node:
    """The master or a worker.

    Thread safety. One thread, which must live as long as the node shall: on Linux the node ends with it.
    """

    process: subprocess.Popen[bytes]
    place: Path
    """Its working directory; what it starts has one below it."""

    def kill(self) -> None:
        """SIGKILL to this one process; what it has started lives on, as long as that wants to."""
        self.process.kill()
        self.process.wait(_READY_WITHIN)

    def executors(self) -> list[psutil.Process]:
        """The executors' JVMs that it runs."""
        return self.running("CoarseGrainedExecutorBackend")

    def running(self, name: str) -> list[psutil.Process]:
        """What of that has `name` in its command."""
        return [each for each in self.started() if _runs(each, name)]

    def started(self) -> list[psutil.Process]:
        """All processes of its working directory but itself: executors, their Pythons, daemons that these started."""
        return [each for each in psutil.process_iter() if each.pid != self.process.pid and _is_below(each, self.place)]

    def says(self, pattern: str) -> re.Match[str]:
        """Where its log has `pattern`, once it has. Raises: RuntimeError with its last words."""
        deadline = time.monotonic() + _READY_WITHIN
        while self.process.poll() is None and time.monotonic() < deadline:
            if found := re.search(pattern, self.log.read_text(errors="replace")):
                return found
            time.sleep(0.05)
        raise RuntimeError(f"{self.place.name} did not start; its last words: {self.log.read_text()[-800:]}")

    @property
    def log(self) -> Path:
        """What it writes."""
        return self.place.with_suffix(".log")


@dataclass
class SparkCluster:
    """A running master with its workers; see the module."""

    directory: Path
    environ: Mapping[str, str]
    nodes: list[Node] = field(default_factory=list)
    workers: list[Node] = field(default_factory=list)
    master: str = ""
    """What `spark.master` takes."""

    @classmethod
    @contextmanager
    def started(cls, directory: Path, environ: Mapping[str, str] | None = None) -> Iterator[SparkCluster]:
        """A cluster for as long as the `with` lasts. `environ`: variables that its workers and executors have."""
        cluster = cls(directory, environ or {})
        try:
            cluster.start()
            yield cluster
        finally:
            for node in reversed(cluster.nodes):  # workers before the master, who would tell them
                node.kill()
            for each in cluster.started_by_workers():
                with suppress(psutil.NoSuchProcess):
                    each.kill()

    def start(self) -> None:
        """Start all; returns once the master knows its workers. Raises: RuntimeError."""
        leader = self._launch("master", "master.Master", "--host", HOSTS[0], "--port", "0")
        self.master = leader.says(_MASTER)[1]
        for host in HOSTS:
            self.add_worker(host)
        for worker in self.workers:
            worker.says(_REGISTERED)

    def add_worker(self, host: str = HOSTS[0]) -> Node:
        """Another worker, which is not waited for."""
        number = len(self.workers)
        given = ["--host", host, "--cores", str(CORES), "--memory", "2g"]
        worker = self._launch(f"worker-{number}", "worker.Worker", *given, self.master)
        self.workers.append(worker)
        return worker

    def leader(self) -> Node:
        """The master's process."""
        return self.nodes[0]

    def started_by_workers(self) -> list[psutil.Process]:
        """Executors, and all that they have started, daemons and Pythons among it."""
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
    """PySpark's own Spark."""
    spec = find_spec("pyspark")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def quick(cluster: str) -> dict[str, str]:
    """What `[source.spark]` says for a Spark of the master `cluster` whose executors start quickly."""
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
    with suppress(psutil.Error):  # it has ended, or is somebody else's
        return place in (Path(process.cwd()), *Path(process.cwd()).parents)
    return False
