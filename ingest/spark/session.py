"""The Spark session of `memwal run`: finds Java, starts quickly, prints nothing on the user's terminal.

Spark writes to the terminal before it can be told not to (launcher, log4j, JVM warnings), and the tracebacks of its
tasks go there too. So the JVM's output goes into a pipe that keeps only the last lines, for the message if Spark does
not start. Errors reach the user through `ingest.spark.errors` instead.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, TYPE_CHECKING

from memwal.ingest.errors import Invalid, Unavailable
from memwal.ingest.secret_refs import resolve_spark
from memwal.ingest.settings.load import Settings, SourceSettings
from memwal.ingest.settings.process_sections import KAFKA

CONNECTOR = "spark-sql-kafka-0-10_2.13"  # of the only Scala that Spark 4 is built with
CONFIGURATION = {"spark.sql.subexpressionElimination.enabled": "false"}

if TYPE_CHECKING:
    from py4j.java_gateway import JavaGateway
    from pyspark import SparkConf, SparkContext
    from pyspark.sql import SparkSession

JAVA_MIN = 17
_PACKAGE = "openjdk-17-jre-headless (Debian, Ubuntu), java-17-openjdk-headless (Fedora) or openjdk@17 (Homebrew)"
_KEPT_LINES = 50
_RENAMING = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
"""Writes and renames as Spark's default does, which starts a dozen processes (`chmod`, `readlink`) per micro-batch."""
_PLAIN_FILES = "org.apache.hadoop.fs.RawLocalFileSystem"
"""Plain local files. Hadoop's default writes a second file with checksums beside each, which takes 16 ms more for the
notes of a micro-batch."""
_FILE_PARTS = "64"
"""Fewest parts of the files of a micro-batch, of 4 to 128 MB each. By default Spark makes as many as there are cores at
that moment. The id of a dead letter depends on the part of its row, so if executors come and go a replay would cut the
files differently and write each dead letter again."""
_VERSION = re.compile(r'"?(?:1\.)?(\d+)')


def check_spark() -> None:
    """Raise ModuleNotFoundError, whose text for users names the extra to install, if PySpark is not installed."""
    if find_spec("pyspark") is None:
        raise ModuleNotFoundError("No module named 'pyspark'", name="pyspark")


def check_java(environ: Mapping[str, str]) -> int:
    """Return the major version of the Java that Spark will use. Raises: Invalid naming the package to install."""
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
    """Return the version in the `release` file of a Java installation: 100 ms faster than asking the JVM."""
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
    """Return Spark's configuration: the defaults of an embedded run, overridden by `source.spark`. `tasks`: regions.
    `local_checkpoints`, `local_sources`: those of all queries are on local disks (or are no files at all).
    Raises: Invalid if a reference to a secret cannot be resolved."""
    # A short run ends before compilation pays; a stream that runs for days needs the best code.
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
        # It notes the line of Python code for each part of a query, with three calls to the JVM each.
        "spark.python.sql.dataFrameDebugging.enabled": "false",
        "spark.sql.streaming.noDataMicroBatches.enabled": "false",
        "spark.sql.streaming.stopTimeout": "10s",
        # A process killed while it wrote its first offsets leaves a temporary file, for which Spark would refuse the
        # checkpoint from then on. Spark looks for another query's files there; `pipeline.checkpoint` has its own mark.
        "spark.sql.streaming.verifyCheckpointDirectoryEmptyOnStart": "false",
    }
    if local_checkpoints:
        # Spark's default starts programs (readlink, chmod) ten times for a file of a checkpoint: 50 ms, twice per
        # micro-batch. This one also writes a temporary file, renames it and refuses an existing file, all in Java.
        defaults["spark.sql.streaming.checkpointFileManagerClass"] = _RENAMING
    if local_checkpoints and local_sources:  # other sources may need Hadoop's own local file system
        defaults["spark.hadoop.fs.file.impl"] = _PLAIN_FILES
    given = resolve_spark(settings.source.spark, os.environ)
    if not given.get("spark.master", "local[2]").startswith("local["):
        defaults["spark.sql.files.minPartitionNum"] = _FILE_PARTS
    return defaults | CONFIGURATION | connector(settings.source) | given


def start_session(conf: Mapping[str, str]) -> SparkSession:
    """Return a session with `conf`, or the session that this process already has (then `conf` is not applied).

    Raises: Unavailable with the JVM's last line if Spark does not start.
    """
    from py4j.protocol import Py4JError
    from pyspark.sql import SparkSession

    if active := SparkSession.getActiveSession():
        return active
    context = start_context(conf)
    try:
        return SparkSession(context)
    except Py4JError as error:  # Spark was stopped meanwhile, for example by a cluster that refuses it
        raise Unavailable(f"Spark ended while it started; check [source] spark{standing_of(conf)}") from error


def start_context(conf: Mapping[str, str]) -> SparkContext:
    """Start a new Spark with `conf`, without SQL, which takes a while to load. Raises: as `start_session`."""
    from py4j.protocol import Py4JError
    from pyspark import SparkConf, SparkContext
    from pyspark.errors import PySparkException

    silence_py4j()
    os.environ["PYSPARK_PYTHON"] = conf.get("spark.pyspark.python", sys.executable)
    os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    # The JVM is started by fork followed by exec; Lance warns of every fork.
    warnings.filterwarnings("ignore", message="lance is not fork-safe")
    spark_conf = SparkConf(loadDefaults=False).setAll(list(conf.items()))
    tail: deque[str] = deque(maxlen=_KEPT_LINES)
    read_end, write_end = os.pipe()
    threading.Thread(target=_drain, args=(os.fdopen(read_end, errors="replace"), tail), daemon=True).start()
    try:
        return SparkContext(conf=spark_conf, gateway=start_jvm(spark_conf, write_end))
    except (PySparkException, Py4JError, OSError) as error:
        raise _not_started(error, conf, tail) from error
    finally:
        os.close(write_end)


def start_jvm(conf: SparkConf, output: int) -> JavaGateway:
    """Start a JVM with `conf`, whose output goes to the file descriptor `output`; return PySpark's way to it.

    PySpark would put the configuration into the command line of the JVM, which every user of the machine can read. It
    is passed in files of a directory of this user instead, which is deleted once the JVM has read them.
    """
    from pyspark.java_gateway import launch_gateway

    given = os.environ.get(_SUBMIT)
    with TemporaryDirectory(prefix="memwal-spark-") as directory:
        properties = write_properties(Path(directory), dict(conf.getAll()))
        os.environ[_SUBMIT] = f"--properties-file {shlex.quote(str(properties))} {given or 'pyspark-shell'}"
        try:
            gateway: JavaGateway = launch_gateway(  # type: ignore[no-untyped-call]
                None, {"stdout": output, "stderr": output}
            )
        finally:
            os.environ.pop(_SUBMIT)
            if given is not None:
                os.environ[_SUBMIT] = given
    return gateway


_SUBMIT = "PYSPARK_SUBMIT_ARGS"
_JAVA_OPTIONS = ("spark.driver.defaultJavaOptions", "spark.driver.extraJavaOptions")


def write_properties(directory: Path, conf: Mapping[str, str]) -> Path:
    """Write `conf` as Java properties into a new file of `directory`, readable by this user only; return its path.

    Options of the JVM become arguments of its command line, so they go into an argument file: `@FILE`. Raises: Invalid
    if a quote in them is not closed.
    """
    lines = []
    for name, value in sorted(conf.items()):
        text = f'"@{_argument_file(directory, name, value)}"' if name in _JAVA_OPTIONS and value.strip() else value
        lines.append(f"{_escaped(name)}={_escaped(text)}\n")
    return _private(directory / "spark.properties", "".join(lines))


def _argument_file(directory: Path, name: str, value: str) -> Path:
    try:
        options = shlex.split(value)
    except ValueError as error:
        raise Invalid(f"[source] spark.{name}: {str(error).lower()}; correct the quotes") from None
    quoted = (option.replace("\\", "\\\\").replace('"', '\\"') for option in options)
    return _private(directory / name, "".join(f'"{option}"\n' for option in quoted))


def _escaped(text: str) -> str:
    """Return `text` as Java's properties have it."""
    return re.sub(r"[\\=:#! ]", r"\\\g<0>", text).replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")


def _private(path: Path, text: str) -> Path:
    path.touch(mode=0o600, exist_ok=False)
    path.write_text(text, encoding="utf-8")
    return path


def _not_started(error: Exception, conf: Mapping[str, str], tail: Sequence[str]) -> Unavailable:
    """Return why Spark did not start, in one line; `tail`: the last output of its JVM."""
    of_java = [line.strip(": ") for line in str(error).splitlines() if line.startswith(":")]
    written = [line.strip() for line in reversed(tail) if line.strip()]
    said = next(iter((*of_java, *written, *str(error).splitlines())), type(error).__name__)
    return Unavailable(f"Spark did not start: {said}; check [source] spark{standing_of(conf)}")


def _drain(output: IO[str], tail: deque[str]) -> None:
    """Read the JVM's output to its end, so that it never blocks on a full pipe."""
    with output:
        tail.extend(output)


def silence_py4j() -> None:
    """Drop py4j's log records: when the JVM dies, py4j logs a traceback for each call that finds it dead, while the
    pipeline reports it in one line. Some records go to the root logger; those of other libraries are kept there.
    """
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    root = logging.getLogger()
    root.removeFilter(_not_of_py4j)
    root.addFilter(_not_of_py4j)


def _not_of_py4j(record: logging.LogRecord) -> bool:
    return Path(record.pathname).parent.name != "py4j"


STANDALONE = "spark://"
ANSWERS_WITHIN = 5.0
"""Seconds in which a master must accept a connection."""


def check_master(conf: Mapping[str, str]) -> None:
    """Raise Unavailable if none of the standalone masters answers; Invalid if an address is malformed.

    Spark itself tries for a minute to reach a master that does not answer.
    """
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
    """Return what else to check if Spark does not start or ends; "" unless the master is a standalone one."""
    from pyspark import __version__

    master = conf.get("spark.master", "")
    if not master.startswith(STANDALONE):
        return ""
    return f", and see that a master of Spark {__version__} listens at {master}: its page has another port"


def _problem_of(address: str, master: str) -> str:
    """Return why a master does not answer, "" if it does."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise Invalid(f"source.spark: spark.master is {master}; write {STANDALONE}host:port; the default port is 7077")
    try:
        socket.create_connection((host.strip("[]"), int(port)), ANSWERS_WITHIN).close()
    except (OSError, OverflowError) as error:
        return getattr(error, "strerror", None) or str(error)
    return ""


def connector(source: SourceSettings) -> dict[str, str]:
    """Return the Spark configuration that fetches the Kafka connector.

    Empty if `source.spark` names jars or packages, or if the connector is among Spark's own jars, as in our container
    image.
    """
    given = {"spark.jars", "spark.jars.packages"} & set(source.spark)
    if source.format != KAFKA or given or any(_spark_jars().glob(f"{CONNECTOR}-*.jar")):
        return {}
    return {"spark.jars.packages": f"org.apache.spark:{CONNECTOR}:{version('pyspark')}"}


def _spark_jars() -> Path:
    """Return the directory of the jars that Spark always loads."""
    spec = find_spec("pyspark")
    home = os.environ.get("SPARK_HOME") or Path(spec.origin if spec and spec.origin else "").parent
    return Path(home) / "jars"
