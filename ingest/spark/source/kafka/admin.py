"""Describe topics with Kafka's admin client, in the JVM of Spark."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, NamedTuple

from memwal.ingest.errors import Internal, Invalid
from memwal.ingest.secret_refs import resolve
from memwal.ingest.settings.sections import SourceSettings
from memwal.ingest.spark.errors import of_java
from memwal.ingest.spark.session import CONNECTOR
from memwal.ingest.suggest import suggestion

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_ANSWER_WITHIN_MS = 20_000


class Topic(NamedTuple):
    """A topic as the brokers describe it. `id`: changes when a topic is deleted and created again."""

    id: str
    partitions: int


class Admin:
    """A connection to the brokers of a source, with the options of Spark's source. Reads only.

    Thread safety. One thread at a time. Raises: Invalid if Spark has no Kafka connector, or the brokers reject the
    credentials; Unavailable if no broker answers.
    """

    def __init__(self, spark: SparkSession, source: SourceSettings) -> None:
        self._source = source
        context: Any = spark.sparkContext
        self._jvm = context._jvm  # noqa: SLF001 - PySpark has no public access to JVM classes
        options = resolve(source.options, os.environ, "[source] options")
        with _kafka_errors():
            properties = self._jvm.java.util.Properties()
            for name, value in _client_options(source, options).items():
                properties.put(name, value)
            self._client = self._jvm.org.apache.kafka.clients.admin.AdminClient.create(properties)

    def wanted(self) -> dict[str, Topic]:
        """Return the existing topics of the source.

        Raises: Invalid if a topic is missing, or the pattern matches no topic.
        """
        with _kafka_errors():
            names = wanted(self._source, sorted(str(name) for name in self._client.listTopics().names().get()))
            return {
                name: Topic(str(each.topicId()), int(each.partitions().size())) for name, each in self._described(names)
            }

    def ids(self, names: Iterable[str]) -> dict[str, str]:
        """Return the ids of the existing topics among `names`, by name. Sends one request to one broker."""
        with _kafka_errors():
            return {name: str(each.topicId()) for name, each in self._described(names)}

    def close(self) -> None:
        """Close the connections."""
        from py4j.protocol import Py4JError

        with suppress(Py4JError, OSError):  # the JVM has ended
            self._client.close(self._jvm.java.time.Duration.ZERO)

    def _described(self, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
        from py4j.protocol import Py4JJavaError

        asked = sorted(names)
        described = self._client.describeTopics(self._jvm.java.util.ArrayList(asked)).topicNameValues()
        for name in asked:
            try:
                yield name, described.get(name).get()
            except Py4JJavaError as error:
                cause = error.java_exception.getCause()
                if cause is None or cause.getClass().getSimpleName() != "UnknownTopicOrPartitionException":
                    raise


@contextmanager
def _kafka_errors() -> Iterator[None]:
    """Convert errors of Kafka's client into the six kinds."""
    from py4j.protocol import Py4JError, Py4JJavaError

    try:
        yield
    except Py4JJavaError as error:
        said = f"Kafka: {str(error.java_exception).splitlines()[0]}"
        raise of_java(error.java_exception) or Internal(said) from None
    except (Py4JError, TypeError) as error:
        raise Invalid(
            "Spark has no Kafka connector; remove spark.jars and spark.jars.packages from [source] spark, or add "
            f"{CONNECTOR}:{version('pyspark')} and its dependencies there"
        ) from error


def wanted(source: SourceSettings, found: list[str]) -> list[str]:
    """Return the topics to read, from the existing topics `found`. Raises: Invalid."""
    for topic in source.topics:
        if topic not in found:
            hint = suggestion(topic, found) if found else "; it has no topics"
            raise Invalid(f"source.topics: create or correct {topic!r}, which is no topic at {source.brokers}{hint}")
    names = source.topics or [name for name in found if re.fullmatch(source.topic_pattern, name)]
    if not names:
        there = f"existing topics: {', '.join(found)}" if found else "there are no topics"
        raise Invalid(
            f"source.topic_pattern: {source.topic_pattern!r} matches no topic at {source.brokers}; {there}; correct it"
        )
    return names


def _client_options(source: SourceSettings, options: Mapping[str, str]) -> dict[str, str]:
    prefix = "kafka."
    given = {name.removeprefix(prefix): value for name, value in options.items() if name.startswith(prefix)}
    return {
        "default.api.timeout.ms": str(_ANSWER_WITHIN_MS),
        "request.timeout.ms": str(_ANSWER_WITHIN_MS // 2),
        **given,
        "bootstrap.servers": source.brokers,
    }
