"""The Spark session of `memwal run`: find Java, build the configuration, start Spark quickly and quietly; the Python of
Spark's workers.

Spark's launcher, log4j and the JVM print to the terminal before logging can be configured, and the tracebacks of tasks
go there too. Therefore the JVM writes into a pipe, and a thread keeps the last lines of it for the error message if
Spark does not start. Users see errors through `ingest.spark.errors`.

Tasks of the sink and of the data source import memwal. Unless PYSPARK_PYTHON is set, PySpark runs the `python3` on
PATH. For a program started by the Python of a virtual environment that is not activated, that is another Python,
without memwal.
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
from typing import IO, TYPE_CHECKING, Any

from memwal.ingest.errors import Invalid, Unavailable
from memwal.ingest.own_process import with_pandas
from memwal.ingest.secret_refs import resolve_spark
from memwal.ingest.settings.load import Settings
from memwal.ingest.settings.sections import KAFKA, SourceSettings
from memwal.ingest.spark.errors import of_spark

if TYPE_CHECKING:
    from py4j.java_gateway import JavaGateway
    from pyspark import SparkConf, SparkContext
    from pyspark.sql import SparkSession

CONNECTOR = "spark-sql-kafka-0-10_2.13"  # the only Scala version that Spark 4 supports
CONFIGURATION = {"spark.sql.subexpressionElimination.enabled": "false"}


JAVA_MIN = 17
_PACKAGE = "openjdk-17-jre-headless (Debian, Ubuntu), java-17-openjdk-headless (Fedora) or openjdk@17 (Homebrew)"
_KEPT_LINES = 50
_RENAMING = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
"""Spark's checkpoint file manager that writes and renames through the Hadoop file system.

It gives the same guarantees as Spark's default manager, which starts a dozen processes (`chmod`, `readlink`) per
micro-batch.
"""
_PLAIN_FILES = "org.apache.hadoop.fs.RawLocalFileSystem"
"""Hadoop's local file system without checksums.

Hadoop's default writes a second file with checksums beside each file, which adds 16 ms to the checkpoint files of a
micro-batch.
"""
_FILE_PARTS = "64"
"""Minimum number of partitions into which Spark splits the files of a micro-batch; each has 4 to 128 MB.

By default Spark uses the current number of cores. The id of a dead letter depends on the partition of its row: if the
number of executors changes, a replay would split the files differently and write each dead letter twice.
"""
_VERSION = re.compile(r'"?(?:1\.)?(\d+)')


def check_spark() -> None:
    """Raise ModuleNotFoundError if PySpark is not installed. The text that users see names the extra to install."""
    if find_spec("pyspark") is None:
        raise ModuleNotFoundError("No module named 'pyspark'", name="pyspark")


def check_java(environ: Mapping[str, str]) -> int:
    """Return the major version of the Java that Spark will use.

    Raises: Invalid, with the package to install, if Java is missing, does not work or is too old.
    """
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
    """Return the version in the `release` file of a Java installation, which is 100 ms faster than running the JVM."""
    try:
        text = (java.resolve(strict=True).parent.parent / "release").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    line = next((line for line in text.splitlines() if line.startswith("JAVA_VERSION=")), "")
    return _major(line.partition("=")[2])


def _asked(java: str) -> int | None:
    try:
        # The path comes from the user's JAVA_HOME or PATH, and Spark runs the same program.
        answer = subprocess.run(  # noqa: S603
            [java, "-version"], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return _major(answer.stderr.partition("version")[2].strip())


def _major(version: str) -> int | None:
    """Return the major version: `"17.0.15"` -> 17, `"1.8.0_392"` -> 8."""
    match = _VERSION.match(version)
    return int(match[1]) if match else None


def configuration(
    settings: Settings, tasks: int, *, once: bool, local_checkpoints: bool = True, local_sources: bool = True
) -> dict[str, str]:
    """Return Spark's configuration: the defaults of an embedded run, overridden by `source.spark`.

    `tasks`: number of regions. `local_checkpoints`: the checkpoints of all queries are on local disks. `local_sources`:
    the sources of all queries are local files, or not files.

    Raises: Invalid if a reference to a secret cannot be resolved.
    """
    # A short run ends before optimized code saves time; a stream that runs for days needs it.
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
        # Micro-batches are small and alike: adaptive planning and code generation cost more than they save.
        "spark.sql.adaptive.enabled": "false",
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.codegen.factoryMode": generate,
        "spark.sql.execution.arrow.maxRecordsPerBatch": "4096",
        # Over TCP every second task waits 40 ms for an acknowledgement of its first bytes (Nagle's algorithm).
        "spark.python.unix.domain.socket.enabled": "true",
        # With this on, PySpark records the line of Python code of each part of a query, with three calls to the JVM
        # each.
        "spark.python.sql.dataFrameDebugging.enabled": "false",
        "spark.sql.streaming.noDataMicroBatches.enabled": "false",
        "spark.sql.streaming.stopTimeout": "10s",
        # A process killed while it writes its first offsets leaves a temporary file, and Spark would then reject the
        # checkpoint at each start. Spark's check detects files of another query; `pipeline.checkpoint` has its own mark
        # for that.
        "spark.sql.streaming.verifyCheckpointDirectoryEmptyOnStart": "false",
    }
    if local_checkpoints:
        # Spark's default runs programs (readlink, chmod) ten times per checkpoint file: 50 ms, twice per micro-batch.
        # This manager also writes a temporary file, renames it and rejects an existing file, all in Java.
        defaults["spark.sql.streaming.checkpointFileManagerClass"] = _RENAMING
    if local_checkpoints and local_sources:  # other sources may need Hadoop's default local file system
        defaults["spark.hadoop.fs.file.impl"] = _PLAIN_FILES
    given = resolve_spark(settings.source.spark, os.environ)
    if not given.get("spark.master", "local[2]").startswith("local["):
        defaults["spark.sql.files.minPartitionNum"] = _FILE_PARTS
    return defaults | CONFIGURATION | connector(settings.source) | given


def start_session(conf: Mapping[str, str]) -> SparkSession:
    """Return a session with `conf`. If this process has an active session, return that one and ignore `conf`.

    Raises: Unavailable with the JVM's last line if Spark does not start.
    """
    from py4j.protocol import Py4JError
    from pyspark.sql import SparkSession

    if active := SparkSession.getActiveSession():
        return active
    context = start_context(conf)
    try:
        return SparkSession(context)
    except Py4JError as error:  # Spark was stopped meanwhile, for example because a cluster rejected it
        raise Unavailable(f"Spark ended while it started; check [source] spark{standing_of(conf)}") from error


def start_context(conf: Mapping[str, str]) -> SparkContext:
    """Start a new Spark with `conf`, without SQL, which takes long to load. Raises: as `start_session`."""
    with_pandas()
    from py4j.protocol import Py4JError
    from pyspark import SparkConf, SparkContext
    from pyspark.errors import PySparkException

    silence_py4j()
    os.environ["PYSPARK_PYTHON"] = conf.get("spark.pyspark.python", sys.executable)
    os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    # The JVM is started by fork followed by exec, which is safe; Lance warns of every fork.
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
    """Start a JVM with `conf` and return PySpark's gateway to it. `output`: file descriptor for the JVM's output.

    PySpark would put the configuration on the command line of the JVM, which every user of the machine can read.
    Therefore it is passed in files in a private directory, which is deleted once the JVM has read them.
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
    """Write `conf` as Java properties into a new file of `directory` that only this user can read; return its path.

    JVM options become arguments of a command line, so they go into an argument file, passed as `@FILE`.

    Raises: Invalid if a quote in the JVM options is not closed.
    """
    lines = []
    for name, value in sorted(conf.items()):
        text = value
        if name in _JAVA_OPTIONS and value.strip():
            try:
                options = shlex.split(value)
            except ValueError as error:
                raise Invalid(f"[source] spark.{name}: {str(error).lower()}; correct the quotes") from None
            quoted = (option.replace("\\", "\\\\").replace('"', '\\"') for option in options)
            file = _private(directory / name, "".join(f'"{option}"\n' for option in quoted))
            text = f'"@{file}"'
        lines.append(f"{_escaped(name)}={_escaped(text)}\n")
    return _private(directory / "spark.properties", "".join(lines))


def _escaped(text: str) -> str:
    """Return `text`, escaped for a Java properties file."""
    return re.sub(r"[\\=:#! ]", r"\\\g<0>", text).replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")


def _private(path: Path, text: str) -> Path:
    path.touch(mode=0o600, exist_ok=False)
    path.write_text(text, encoding="utf-8")
    return path


def _not_started(error: Exception, conf: Mapping[str, str], tail: Sequence[str]) -> Unavailable:
    """Return the error that says in one line why Spark did not start. `tail`: the last output of its JVM."""
    of_java = [line.strip(": ") for line in str(error).splitlines() if line.startswith(":")]
    written = [line.strip() for line in reversed(tail) if line.strip()]
    said = next(iter((*of_java, *written, *str(error).splitlines())), type(error).__name__)
    return Unavailable(f"Spark did not start: {said}; check [source] spark{standing_of(conf)}")


def _drain(output: IO[str], tail: deque[str]) -> None:
    """Read the JVM's output to its end, so that the JVM never blocks on a full pipe."""
    with output:
        tail.extend(output)


def silence_py4j() -> None:
    """Drop py4j's log records, and PySpark's of errors in SQL, which it raises too.

    When the JVM dies, py4j logs a traceback for each failed call, while the pipeline reports the failure in one line.
    py4j also logs to the root logger; the filter there keeps the records of other libraries.
    """
    for name in ("py4j", "SQLQueryContextLogger"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    root = logging.getLogger()
    root.removeFilter(_not_of_py4j)
    root.addFilter(_not_of_py4j)


def _not_of_py4j(record: logging.LogRecord) -> bool:
    return Path(record.pathname).parent.name != "py4j"


STANDALONE = "spark://"
ANSWERS_WITHIN = 5.0
"""Seconds within which a master must accept a connection."""


def check_master(conf: Mapping[str, str]) -> None:
    """Raise Unavailable if no standalone master accepts a connection; Invalid if an address is malformed.

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
    """Return what else to check if Spark does not start or ends; "" unless `conf` names a standalone master."""
    from pyspark import __version__

    master = conf.get("spark.master", "")
    if not master.startswith(STANDALONE):
        return ""
    return f", and see that a master of Spark {__version__} listens at {master}: its page has another port"


def _problem_of(address: str, master: str) -> str:
    """Return why a master does not answer; "" if it does."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise Invalid(f"source.spark: spark.master is {master}; write {STANDALONE}host:port; the default port is 7077")
    try:
        socket.create_connection((host.strip("[]"), int(port)), ANSWERS_WITHIN).close()
    except (OSError, OverflowError) as error:
        return getattr(error, "strerror", None) or str(error)
    return ""


def connector(source: SourceSettings) -> dict[str, str]:
    """Return the Spark configuration that downloads the Kafka connector.

    Empty if `source.spark` names jars or packages, or if the connector is among Spark's jars, as in memwal's container
    image.
    """
    given, spec = {"spark.jars", "spark.jars.packages"} & set(source.spark), find_spec("pyspark")
    home = os.environ.get("SPARK_HOME") or Path(spec.origin if spec and spec.origin else "").parent
    if source.format != KAFKA or given or any((Path(home) / "jars").glob(f"{CONNECTOR}-*.jar")):
        return {}
    return {"spark.jars.packages": f"org.apache.spark:{CONNECTOR}:{version('pyspark')}"}


# ---- workers --------------------------------------------------------------------------------------------------------


_LOG = logging.getLogger("memwal.spark")
_VARIABLE = "PYSPARK_PYTHON"


def use_own_python(spark: SparkSession) -> None:
    """Make workers run the Python of this process, if Spark runs on this host and PYSPARK_PYTHON is not set.

    A Spark Connect session is not changed: its workers belong to a server.
    """
    context: Any = getattr(spark, "sparkContext", None)
    if context is None or _VARIABLE in os.environ or not str(context.master).startswith("local"):
        return
    if context.pythonExec != sys.executable:
        _LOG.info("Spark's Python workers run %s; set %s for another Python", sys.executable, _VARIABLE)
        context.pythonExec = sys.executable


def check_workers(spark: SparkSession) -> None:
    """Call `use_own_python`; if workers run another Python or on other hosts, run a task that checks for memwal.

    Raises: Invalid if memwal is missing or the Python cannot be used; Internal if Spark cannot run the task.
    """
    use_own_python(spark)
    context: Any = getattr(spark, "sparkContext", None)
    if context is None or (context.pythonExec == sys.executable and str(context.master).startswith("local")):
        return
    try:
        # The task uses the standard library only: a worker without memwal cannot import memwal's functions.
        (found,) = context.parallelize(["memwal"], 1).map(find_spec).map(bool).collect()
    except Exception as error:
        raise of_spark(error) from error
    if not found:
        raise Invalid(
            f"Spark's Python workers run {context.pythonExec}, which cannot import memwal: set {_VARIABLE} to a Python "
            f"that has it on every host ({sys.executable} has it here), or bring it by spark.submit.pyFiles or "
            "spark.archives"
        )
