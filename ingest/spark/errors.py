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
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from memwal.ingest.errors import SILENT, Internal, Invalid, MemWalError, Unavailable, classify, from_wire
from memwal.ingest.spark.task import MARK

_READ = "make the files of source.path readable for Spark, with the columns of [table]"
_ODD_TYPE = "write the column in a type that Spark reads, such as times in microseconds"
_SQL = "correct the sql of [source.columns], delete_when or [route]"
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
    thrown = error if java is None else java
    if (kafka := of_kafka(thrown)) is not None:
        return kafka
    causes = list(_chain(thrown))
    named = [cause.condition for cause in causes if cause.condition]
    condition = next(iter([name for name in reversed(named) if _remedy(name)] or reversed(named)), "")
    text, innermost = _first_line(causes[0].text), _first_line(causes[-1].text)
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


class _Cause(NamedTuple):
    """An exception: its Java class and Spark's error condition, each "" if unknown, and its text."""

    java: str
    condition: str
    text: str


def _chain(error: Any) -> Iterator[_Cause]:
    """Yield an exception of the JVM or of PySpark, then its causes.

    For a Java class that it does not know, PySpark keeps the text of `toString`, which begins with the class name.
    """
    from py4j.protocol import Py4JError

    while error is not None:
        condition = ""
        if isinstance(error, BaseException):
            condition = getattr(error, "getCondition", lambda: None)() or ""
            yield _Cause(str(getattr(error, "_desc", None) or "").partition(": ")[0], condition, str(error))
            error = getattr(error, "_cause", None) or error.__cause__
        else:
            with suppress(Py4JError):  # not an exception class of Spark
                condition = str(error.getCondition() or "")
            java = str(error.getClass().getName())
            yield _Cause(java, condition, str(error.getMessage() or java))
            error = error.getCause()


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "an error without a text")


_PACKAGE = "org.apache.kafka.common."
_REFUSED = ("AuthenticationException", "AuthorizationException", "ConfigException")
_LOST = "org.apache.spark.sql.kafka010.KafkaIllegalStateException"
"""The class that Spark's source throws if offsets of its checkpoint no longer exist."""
_REASON = "Reason: "
_NO_TOPIC = "UnknownTopicOrPartitionException"


def of_kafka(error: Any) -> MemWalError | None:
    """Return the error for an exception (see `_chain`) caused by Kafka's client; None for any other exception."""
    for name, _, text in _chain(error):
        if name == _LOST:
            return _lost(text.removeprefix(f"{name}: "))
        if not name.startswith(_PACKAGE) or name == f"{_PACKAGE}KafkaException":  # a wrapper: its cause has the reason
            continue
        short = name.rpartition(".")[2]
        said = text.removeprefix(name).removeprefix(": ").split("\n")[0].strip()[:300] or short
        if short.endswith(_REFUSED):
            return Invalid(f"source: Kafka refuses us: {said}; correct brokers or options of [source]")
        if short == _NO_TOPIC:
            return Invalid(f"source.topics: a topic is gone: {said}; create it again, or correct topics")
        remedy = "nothing acknowledged is lost; run the same command again when Kafka answers"
        return Unavailable(f"source: Kafka does not answer: {said}; {remedy}", {"reason": SILENT})
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
