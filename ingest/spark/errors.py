"""Convert errors of Spark tasks, of Spark and of Kafka's client into the six kinds of `ingest.errors` (steps: README).

The message of a `TaskError` is one line:

    memwal-task-error:{"kind": "INVALID", "message": "…", "details": {…}}

The JSON is the wire form of `ingest.errors`. It contains no line break, so in any surrounding text the mark locates its
beginning and the JSON parser its end. Spark's own errors have no mark: the few that a user can correct are recognized
by Spark's error condition, and errors of Kafka's Java client by their class. Message text is never matched.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

from memwal.ingest.errors import SILENT, Internal, Invalid, MemWalError, Unavailable, classify, from_wire
from memwal.ingest.spark.task import MARK

_READ = "make the files of source.path readable for Spark, with the columns of [table]"
_ODD_TYPE = "write the column in a type that Spark reads, such as times in microseconds"
_SQL = "correct the sql of [source.columns], or delete_when"
_ODD_VALUE = "write try_divide, try_cast and the like in the sql of [source.columns] or delete_when"
_REMEDIES = {
    "FAILED_READ_FILE": _READ,
    "CANNOT_READ_FILE_FOOTER": _READ,
    "UNABLE_TO_INFER_SCHEMA": _READ,
    **dict.fromkeys(("PARQUET_TYPE_ILLEGAL", "PARQUET_TYPE_NOT_SUPPORTED", "PARQUET_TYPE_NOT_RECOGNIZED"), _ODD_TYPE),
    "PATH_NOT_FOUND": "correct source.path",
    "DATA_SOURCE_NOT_FOUND": "correct source.format, or name its package in spark.jars.packages of source.spark",
    "KAFKA_DATA_LOSS": "records are gone unread; to continue without them set fail_on_data_loss = false",
    **dict.fromkeys(("UNRESOLVED_ROUTINE", "UNRESOLVED_COLUMN", "DATATYPE_MISMATCH", "PARSE_SYNTAX_ERROR"), _SQL),
    **dict.fromkeys(("WRONG_NUM_ARGS", "FIELD_NOT_FOUND"), _SQL),
    **dict.fromkeys(("DIVIDE_BY_ZERO", "CAST_INVALID_INPUT", "CAST_OVERFLOW", "ARITHMETIC_OVERFLOW"), _ODD_VALUE),
    "CANNOT_PARSE_JSON_FIELD": "correct the record, or leave such rows out by dlq.mode",
    "MALFORMED_RECORD_IN_PARSING": "correct the record, or set mode in source.options",
}


_NO_MODULE = re.compile(r"ModuleNotFoundError: (No module named '[^']*')")
_OTHER_PYTHON = re.compile(r"\[PYTHON_VERSION_MISMATCH\] ([^\n]*?\.)\s")
_NO_PROGRAM = re.compile(r'Cannot run program "([^"]*)"')
_STATE = re.compile(r"\.?\s*SQLSTATE: \w+")
"""The code at the end of Spark's messages; removed from the text that users see."""


def found_in(text: str) -> MemWalError | None:
    """Return the marked error in `text`; None without a mark or if the JSON cannot be parsed."""
    _, mark, rest = text.partition(MARK)
    if not mark:
        return None
    try:
        wire, _ = json.JSONDecoder().raw_decode(rest)
    except ValueError:
        return None
    return from_wire(wire) if isinstance(wire, dict) else None


def of_spark(error: BaseException) -> MemWalError:
    """Return the error that ended a Spark job or query as one of the six kinds, in one line.

    memwal's own errors are recognized by their mark. A Spark error is Invalid if the user can correct it, else
    Internal.
    """
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException

    if isinstance(error, MemWalError):
        return error
    ours = found_in(str(error)) or _missing_on_executors(str(error))
    if ours is not None:
        return ours
    if not isinstance(error, PySparkException | Py4JJavaError):
        return classify(error)
    java = getattr(error, "java_exception", None)  # a Py4JJavaError, whose text is the JVM's whole stack
    of_kafka = of_captured(error) if java is None else of_java(java)
    if of_kafka is not None:
        return of_kafka
    causes = list(_captured(error) if java is None else _thrown(java))
    named = [name for name, _ in causes if name]
    condition = next(iter([name for name in reversed(named) if _remedy(name)] or reversed(named)), "")
    text, innermost = _first_line(str(error) if java is None else causes[0][1]), _first_line(causes[-1][1])
    said = _STATE.sub("", text if java is None or innermost in text else f"{text}: {innermost}")
    if remedy := _remedy(condition):
        return Invalid(f"Spark: {said}; {remedy}", {"condition": condition})
    return Internal(f"Spark: {said}", {"condition": condition})


def _missing_on_executors(text: str) -> Invalid | None:
    """Return the error if executors lack what every memwal task needs: then no task can report an error itself."""
    if module := _NO_MODULE.search(text):
        return Invalid(
            f"executors cannot import memwal ({module[1]}): install it where they run, set spark.pyspark.python in "
            "[source.spark] or PYSPARK_PYTHON to a Python that has it, or bring it by spark.submit.pyFiles, "
            "spark.archives or spark.executorEnv.PYTHONPATH"
        )
    if python := _OTHER_PYTHON.search(text):
        return Invalid(f"{python[1]} Set spark.pyspark.python in [source.spark] to the Python that has memwal")
    if program := _NO_PROGRAM.search(text):
        return Invalid(
            f"executors have no {program[1]}: set spark.pyspark.python in [source.spark] to the Python that has memwal"
        )
    return None


def _remedy(condition: str) -> str | None:
    return _REMEDIES.get(condition.partition(".")[0])


def _captured(error: BaseException) -> Iterator[tuple[str, str]]:
    """Yield Spark's error condition (or "") and the text of a PySpark exception and of each of its causes."""
    current: Any = error
    while current is not None:
        yield getattr(current, "getCondition", lambda: None)() or "", str(current)
        current = getattr(current, "_cause", None) or getattr(current, "__cause__", None)


def _thrown(java: Any) -> Iterator[tuple[str, str]]:
    """As `_captured`, for an exception in the JVM."""
    from py4j.protocol import Py4JError

    while java is not None:
        condition = ""
        with suppress(Py4JError):  # not an exception class of Spark
            condition = str(java.getCondition() or "")
        yield condition, str(java.getMessage() or java.toString())
        java = java.getCause()


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "an error without a text")


_PACKAGE = "org.apache.kafka.common."
_REFUSED = ("AuthenticationException", "AuthorizationException", "ConfigException")
_LOST = "org.apache.spark.sql.kafka010.KafkaIllegalStateException"
"""The class that Spark's source throws if offsets of its checkpoint no longer exist."""
_REASON = "Reason: "
_NO_TOPIC = "UnknownTopicOrPartitionException"


def of_java(thrown: Any) -> MemWalError | None:
    """Return the error for a Java exception caused by Kafka's client; None for any other exception."""
    return _of_kafka(_causes_of_java(thrown))


def of_captured(error: BaseException) -> MemWalError | None:
    """As `of_java`, for an exception that PySpark made from a Java exception.

    For a Java class that it does not know, PySpark keeps the text of `toString`, which begins with the class name.
    """
    return _of_kafka(_captured_causes(error))


def _causes_of_java(thrown: Any) -> Iterator[tuple[str, str]]:
    while thrown is not None:
        yield str(thrown.getClass().getName()), str(thrown.getMessage() or "")
        thrown = thrown.getCause()


def _captured_causes(error: BaseException) -> Iterator[tuple[str, str]]:
    current: Any = error
    while current is not None:
        name, _, said = str(getattr(current, "_desc", None) or "").partition(": ")
        yield name, said
        current = getattr(current, "_cause", None)


def _of_kafka(causes: Iterable[tuple[str, str]]) -> MemWalError | None:
    for name, said in causes:
        if name == _LOST:
            return _lost(said)
        if not name.startswith(_PACKAGE) or name == f"{_PACKAGE}KafkaException":  # a wrapper: its cause has the reason
            continue
        short = name.rpartition(".")[2]
        text = (said.splitlines() or [""])[0].strip()[:300] or short
        if short.endswith(_REFUSED):
            return Invalid(f"source: Kafka refuses us: {text}; correct brokers or options of [source]")
        if short == _NO_TOPIC:
            return Invalid(f"source.topics: a topic is gone: {text}; create it again, or correct topics")
        remedy = "nothing acknowledged is lost; run the same command again when Kafka answers"
        return Unavailable(f"source: Kafka does not answer: {text}; {remedy}", {"reason": SILENT})
    return None


def _lost(said: str) -> Invalid:
    """Return the error for lost records; one line of the Java text contains the reason."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    told = [line.removeprefix(_REASON) for line in lines if line.startswith(_REASON)]
    why = (told or lines or [_LOST])[0].rstrip(".")
    return Invalid(
        f"source: records are gone unread: {why}; to read a topic that was created anew from its start, set a new "
        "sink.checkpoint; to continue with the records that exist, set fail_on_data_loss = false"
    )
