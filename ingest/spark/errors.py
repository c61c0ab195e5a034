"""How an error of a Spark task reaches the user as the kind it is.

A task fails in a Python worker; the JVM wraps what that worker printed, twice, and hands the driver a text of a hundred
lines. So the task raises `TaskError`, whose message is one line that only this module writes and reads:

    memwal-task-error:{"kind": "INVALID", "message": "…", "details": {…}}

The JSON is the wire form of `ingest.errors`; it holds no line break, so whatever is wrapped around it, it is found
again by its mark and ends where the JSON ends. Errors of Spark itself carry no mark; the few that a user can mend are
told by Spark's error condition, never by their text.

What Kafka's Java client throws, as the kind it is for whoever runs memwal: told by its class, never by its text.
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
    "KAFKA_DATA_LOSS": "records are gone unread; to go on without them set fail_on_data_loss = false",
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
"""A code behind Spark's texts that says less than they do."""


def found_in(text: str) -> MemWalError | None:
    """The error that `text` carries, None when it carries none."""
    _, mark, rest = text.partition(MARK)
    if not mark:
        return None
    try:
        wire, _ = json.JSONDecoder().raw_decode(rest)
    except ValueError:
        return None
    return from_wire(wire) if isinstance(wire, dict) else None


def of_spark(error: BaseException) -> MemWalError:
    """What ended a Spark job or query, as the kind it is, in one line.

    Ours by its mark; Spark's own by its error condition when the user can mend it, else Internal.
    """
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException

    if isinstance(error, MemWalError):
        return error
    ours = found_in(str(error)) or _of_executors(str(error))
    if ours is not None:
        return ours
    if not isinstance(error, PySparkException | Py4JJavaError):
        return classify(error)
    java = getattr(error, "java_exception", None)  # of Py4JJavaError, whose text is the whole stack of the JVM
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


def _of_executors(text: str) -> Invalid | None:
    """What executors lack for any task of ours, before one can say anything."""
    if module := _NO_MODULE.search(text):
        return Invalid(
            f"executors cannot import memwal ({module[1]}): install it where they run, or bring it by "
            "spark.submit.pyFiles, spark.archives or spark.executorEnv.PYTHONPATH in [source.spark]"
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
    """Spark's names for what PySpark made an exception of, and for its causes, "" where it has none; with the texts."""
    current: Any = error
    while current is not None:
        yield getattr(current, "getCondition", lambda: None)() or "", str(current)
        current = getattr(current, "_cause", None) or getattr(current, "__cause__", None)


def _thrown(java: Any) -> Iterator[tuple[str, str]]:
    """The same of an exception of the JVM."""
    from py4j.protocol import Py4JError

    while java is not None:
        condition = ""
        with suppress(Py4JError):  # not one of Spark's own
            condition = str(java.getCondition() or "")
        yield condition, str(java.getMessage() or java.toString())
        java = java.getCause()


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "an error without a text")


_PACKAGE = "org.apache.kafka.common."
_REFUSED = ("AuthenticationException", "AuthorizationException", "ConfigException")
_LOST = "org.apache.spark.sql.kafka010.KafkaIllegalStateException"
"""What Spark's source throws where offsets of its checkpoint are not there any more."""
_REASON = "Reason: "
_NO_TOPIC = "UnknownTopicOrPartitionException"


def of_java(thrown: Any) -> MemWalError | None:
    """The kind of a Java exception that Kafka's client is behind; None for any other."""
    return _told(_causes_of_java(thrown))


def of_captured(error: BaseException) -> MemWalError | None:
    """The same of an exception that PySpark made of a Java one. Of causes that it has no class for it keeps what
    Java's `toString` says, which begins with the name of the class.
    """
    return _told(_captured_causes(error))


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


def _told(causes: Iterable[tuple[str, str]]) -> MemWalError | None:
    for name, said in causes:
        if name == _LOST:
            return _lost(said)
        if not name.startswith(_PACKAGE) or name == f"{_PACKAGE}KafkaException":  # a wrapper, its cause says more
            continue
        short = name.rpartition(".")[2]
        text = (said.splitlines() or [""])[0].strip()[:300] or short
        if short.endswith(_REFUSED):
            return Invalid(f"source: Kafka refuses us: {text}; correct brokers or options of [source]")
        if short == _NO_TOPIC:
            return Invalid(f"source.topics: a topic is gone: {text}; create it again, or correct topics")
        remedy = "nothing acknowledged is lost; run the same command again when it does"
        return Unavailable(f"source: Kafka does not answer: {text}; {remedy}", {"reason": SILENT})
    return None


def _lost(said: str) -> Invalid:
    """Its text is of several lines, one of which says what happened."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    told = [line.removeprefix(_REASON) for line in lines if line.startswith(_REASON)]
    why = (told or lines or [_LOST])[0].rstrip(".")
    return Invalid(
        f"source: records are gone unread: {why}; a topic that was created anew is read from its start with a new "
        "sink.checkpoint, and fail_on_data_loss = false goes on with what is there"
    )
