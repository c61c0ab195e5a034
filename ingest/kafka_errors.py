"""What Kafka's Java client throws, as the kind it is for whoever runs memwal: told by its class, never by its text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from ingest.errors import Invalid, MemWalError, Unavailable

_PACKAGE = "org.apache.kafka.common."
_REFUSED = ("AuthenticationException", "AuthorizationException", "ConfigException")
SILENT = "source_silent"
"""Why a run is Unavailable, in the details of the error: the source does not answer, which passes by itself."""
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
