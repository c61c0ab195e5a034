"""The Spark session of `memwal run`: Java found, started quickly, silent on the user's terminal.

Spark talks to the terminal before it can be told not to (launcher, log4j, JVM warnings), and its tasks' tracebacks go
there too. So the JVM's output goes into a pipe of ours that keeps only the last lines, for the message when it fails
to start. Errors reach the user through `ingest.spark.errors` instead.

A standalone Spark master, looked at before Spark does: it tries for a minute one that is not there.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import IO, TYPE_CHECKING

from py4j.protocol import Py4JError

from memwal.ingest.errors import Invalid, Unavailable
from memwal.ingest.settings.load import Settings, SourceSettings
from memwal.ingest.settings.process_sections import KAFKA

_SCALA = "2.13"  # the only one that Spark 4 is built with
CONFIGURATION = {"spark.sql.subexpressionElimination.enabled": "false"}

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

JAVA_MIN = 17
_PACKAGE = "openjdk-17-jre-headless (Debian, Ubuntu), java-17-openjdk-headless (Fedora) or openjdk@17 (Homebrew)"
_KEPT_LINES = 50
_RENAMING = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
"""Writes and renames as the default one does, which starts a dozen processes (`chmod`, `readlink`) a micro-batch."""
_PLAIN_FILES = "org.apache.hadoop.fs.RawLocalFileSystem"
"""Local files as they are. Hadoop's own choice writes a second one with checksums beside each, which for the notes of a
micro-batch takes 16 ms more."""
_FILE_PARTS = "64"
"""Parts of the files of a micro-batch, of 4 to 128 MB each. By itself Spark makes as many as there are cores at that
moment; a dead letter knows its row by the part that it is in, so where executors come and go a replay would cut the
files elsewhere and write each letter again."""
_VERSION = re.compile(r'"?(?:1\.)?(\d+)')


def check_java(environ: Mapping[str, str]) -> int:
    """The major version of the Java that Spark will use. Raises: Invalid naming the package to install."""
    home = environ.get("JAVA_HOME", "")
    java = str(Path(home) / "bin" / "java") if home else shutil.which("java", path=environ.get("PATH")) or ""
    remedy = f"install Java {JAVA_MIN} or later: {_PACKAGE}"
    if not java:
        raise Invalid(f"Spark needs Java {JAVA_MIN} or later and there is none on PATH; {remedy}")
    where = f"JAVA_HOME={home}" if home else java
    version = _release(Path(java)) or _asked(java)
    if version is None:
        raise Invalid(f"Spark needs Java {JAVA_MIN} or later and {where} is no working Java; {remedy}")
    if version < JAVA_MIN:
        raise Invalid(f"Spark needs Java {JAVA_MIN} or later and {where} is Java {version}; {remedy}")
    return version


def _release(java: Path) -> int | None:
    """The version that a Java installation notes in its `release` file: 100 ms sooner than asking the JVM."""
    try:
        text = (java.resolve(strict=True).parent.parent / "release").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    line = next((line for line in text.splitlines() if line.startswith("JAVA_VERSION=")), "")
    return _major(line.partition("=")[2])


def _asked(java: str) -> int | None:
    try:
        # The path is the user's own JAVA_HOME or PATH, and Spark runs the same.
        answer = subprocess.run(  # noqa: S603
            [java, "-version"], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return _major(answer.stderr.partition("version")[2].strip())


def _major(version: str) -> int | None:
    """`"17.0.15"` -> 17, `"1.8.0_392"` -> 8."""
    match = _VERSION.match(version)
    return int(match[1]) if match else None


def configuration(
    settings: Settings, tasks: int, *, once: bool, local_checkpoints: bool = True, local_sources: bool = True
) -> dict[str, str]:
    """Spark's configuration: the defaults of an embedded run with `source.spark` over them. `tasks`: regions.
    `local_checkpoints`, `local_sources`: those of all queries are on local disks (or no files at all)."""
    # A short run is over before compiled code pays; a stream that goes on for days wants the best code.
    compiler = "-XX:TieredStopAtLevel=1 " if once else ""
    generate = "NO_CODEGEN" if once else "FALLBACK"
    defaults = {
        "spark.master": "local[2]",
        "spark.app.name": "memwal",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "ERROR",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.extraJavaOptions": f"{compiler}-XX:+UseSerialGC",
        "spark.executorEnv.PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        "spark.sql.catalogImplementation": "in-memory",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": str(tasks),
        # Micro-batches are small and alike: planning again after each stage, or compiling it, costs more than it saves.
        "spark.sql.adaptive.enabled": "false",
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.codegen.factoryMode": generate,
        "spark.sql.execution.arrow.maxRecordsPerBatch": "4096",
        # Over TCP every other task waits 40 ms for an acknowledgement of its first bytes (Nagle's algorithm).
        "spark.python.unix.domain.socket.enabled": "true",
        # The place in the Python program that made each part of a query, at three calls to the JVM apiece.
        "spark.python.sql.dataFrameDebugging.enabled": "false",
        "spark.sql.streaming.noDataMicroBatches.enabled": "false",
        "spark.sql.streaming.stopTimeout": "10s",
    }
    if local_checkpoints:
        # Spark's own choice asks programs (readlink, chmod) ten times for a file of a checkpoint, 50 ms, twice a
        # micro-batch. This one writes beside and renames too, and refuses a file that is there, by Java's own calls.
        defaults["spark.sql.streaming.checkpointFileManagerClass"] = _RENAMING
    if local_checkpoints and local_sources:  # what reads elsewhere may want the local files that it knows
        defaults["spark.hadoop.fs.file.impl"] = _PLAIN_FILES
    if not settings.source.spark.get("spark.master", "local[2]").startswith("local["):
        defaults["spark.sql.files.minPartitionNum"] = _FILE_PARTS
    return defaults | CONFIGURATION | connector(settings.source) | settings.source.spark


def start_session(conf: Mapping[str, str]) -> SparkSession:
    """A session with `conf`; the one of this process when there is one already (then `conf` is not applied).

    Raises: Unavailable with the JVM's last line when it does not start.
    """
    from pyspark.sql import SparkSession

    if active := SparkSession.getActiveSession():
        return active
    context = start_context(conf)
    try:
        return SparkSession(context)
    except Py4JError as error:  # it has been ended meanwhile, as by a cluster that does not take it
        raise Unavailable(f"Spark ended while it started; check [source] spark{standing_of(conf)}") from error


def start_context(conf: Mapping[str, str]) -> SparkContext:
    """A new Spark with `conf`, without what SQL needs, which takes a while. Raises: as `start_session`."""
    from pyspark import SparkConf, SparkContext
    from pyspark.errors import PySparkException
    from pyspark.java_gateway import launch_gateway

    silence_py4j()
    os.environ["PYSPARK_PYTHON"] = conf.get("spark.pyspark.python", sys.executable)
    os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    # The JVM is started by fork and then exec at once; Lance warns of forks that go on without it.
    warnings.filterwarnings("ignore", message="lance is not fork-safe")
    spark_conf = SparkConf(loadDefaults=False).setAll(list(conf.items()))
    tail: deque[str] = deque(maxlen=_KEPT_LINES)
    read_end, write_end = os.pipe()
    threading.Thread(target=_drain, args=(os.fdopen(read_end, errors="replace"), tail), daemon=True).start()
    try:
        gateway = launch_gateway(  # type: ignore[no-untyped-call]
            spark_conf, {"stdout": write_end, "stderr": write_end}
        )
        return SparkContext(conf=spark_conf, gateway=gateway)
    except (PySparkException, Py4JError, OSError) as error:
        raise _not_started(error, conf, tail) from error
    finally:
        os.close(write_end)


def _not_started(error: Exception, conf: Mapping[str, str], tail: Sequence[str]) -> Unavailable:
    """Why Spark did not start, in one line; `tail`: what its JVM wrote last."""
    of_java = [line.strip(": ") for line in str(error).splitlines() if line.startswith(":")]
    written = [line.strip() for line in reversed(tail) if line.strip()]
    said = next(iter((*of_java, *written, *str(error).splitlines())), type(error).__name__)
    return Unavailable(f"Spark did not start: {said}; check [source] spark{standing_of(conf)}")


def _drain(output: IO[str], tail: deque[str]) -> None:
    """Read the JVM's output to its end, so that it never blocks on a full pipe."""
    with output:
        tail.extend(output)


def silence_py4j() -> None:
    """Keep py4j's log records out of the output: when the JVM dies it logs the traceback of each call that finds it
    dead, and the pipeline says it in one line. Some of them go to the root logger; others' records there stay.
    """
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    root = logging.getLogger()
    root.removeFilter(_not_of_py4j)
    root.addFilter(_not_of_py4j)


def _not_of_py4j(record: logging.LogRecord) -> bool:
    return Path(record.pathname).parent.name != "py4j"


STANDALONE = "spark://"
ANSWERS_WITHIN = 5.0
"""Seconds that a master has to take a connection."""


def check_master(conf: Mapping[str, str]) -> None:
    """Refuse a Spark whose masters do not answer, one of them is enough. Raises: Invalid, Unavailable."""
    master = conf.get("spark.master", "")
    if not master.startswith(STANDALONE):
        return
    problems = [_problem_of(address, master) for address in master.removeprefix(STANDALONE).split(",")]
    if all(problems):
        raise Unavailable(
            f"Spark's master does not answer at {master} ({problems[-1]}); start it, or correct spark.master in "
            "[source.spark]"
        )


def standing_of(conf: Mapping[str, str]) -> str:
    """What else to look at where Spark does not start or ends, of a standalone master."""
    from pyspark import __version__

    master = conf.get("spark.master", "")
    if not master.startswith(STANDALONE):
        return ""
    return f", and see that a master of Spark {__version__} listens at {master}: its page has another port"


def _problem_of(address: str, master: str) -> str:
    """Why a master does not answer, "" where it does."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise Invalid(f"source.spark: spark.master is {master}; write {STANDALONE}host:port, the port is mostly 7077")
    try:
        socket.create_connection((host.strip("[]"), int(port)), ANSWERS_WITHIN).close()
    except (OSError, OverflowError) as error:
        return getattr(error, "strerror", None) or str(error)
    return ""


def connector(source: SourceSettings) -> dict[str, str]:
    """Spark configuration that brings its Kafka connector, unless `source.spark` says where it comes from."""
    given = {"spark.jars", "spark.jars.packages"} & set(source.spark)
    if source.format != KAFKA or given:
        return {}
    return {"spark.jars.packages": f"org.apache.spark:spark-sql-kafka-0-10_{_SCALA}:{version('pyspark')}"}
