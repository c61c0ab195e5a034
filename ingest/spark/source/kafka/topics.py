"""Describe topics with Kafka's admin client in the JVM of Spark, and compare their ids with those of a checkpoint.

The offsets of a checkpoint are valid only in the topics that they were read from.

Spark stores offsets by topic name. A topic that was deleted and created again has the same name but other records at
these offsets. Once it has as many records as the old topic, Spark continues in its middle and skips the earlier records
without a message. Therefore `memwal run` notes Kafka's id of each topic in a file of the checkpoint, and compares ids:

1. The query starts, also after a pause or an outage (`TopicGuard.start`). All existing topics of the source are
   described. An id that differs from the noted id ends the run; an id without a note is noted.
2. Spark plans a micro-batch: it reads the end offset of each partition, and writes the offsets into the checkpoint.
3. The micro-batch begins (`TopicGuard.begin`). Topics of these offsets without a noted id have appeared since step 1:
   their ids are read and noted on disk before anything of the micro-batch is sent.
4. All rows of the micro-batch are read, into the memory of the driver or into Spark's shuffle files
   (`ingest.spark.reading`).
5. All topics of the offsets are described again (`TopicGuard.check`). An id that differs from the noted id, or a
   missing topic, ends the run.
6. The rows are sent.

Kafka never assigns an id twice. If a topic has its noted id in step 5, it has existed without interruption since the id
was noted, so every offset and record read in between belongs to that topic. A topic that is recreated

- while the run is paused, waits for its source, or has ended, is detected by step 1, or by step 5 of the next
  micro-batch;
- between two micro-batches, or between steps 2 and 4, is detected by step 5;
- while rows are read, even if only some of them come from the new topic, is detected by step 5;
- between steps 5 and 6, or later, is detected by step 5 of the next micro-batch; the rows of this one are from the old
  topic. No task reads records in step 6: if Spark has lost shuffle files and repeats the reading, the task fails, and
  the sink starts again with step 3;
- between steps 2 and 3, when it has just appeared, is accepted: step 3 notes the newer id. Nothing of it is
  skipped, as new topics are read from their beginning. (Not detected: retention had deleted the beginning of the older
  topic.)

*A crash between 3 and 6: the ids are noted, and nothing was sent. A crash in 6: the next run compares in step 1, before
Spark replays the micro-batch.*

A broker may learn of a new topic later than others. Step 5 then misses a topic that was deleted, created, filled up to
the old offset and read within that delay; step 5 of the next micro-batch detects it.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, NamedTuple

from memwal.ingest.errors import Internal, Invalid
from memwal.ingest.settings.load import Settings
from memwal.ingest.settings.sections import SourceSettings
from memwal.ingest.spark.checkpoint_files import CheckpointFiles
from memwal.ingest.spark.errors import of_kafka
from memwal.ingest.spark.session import CONNECTOR
from memwal.ingest.spark.source.files import resolved_options
from memwal.ingest.suggest import suggestion

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LOG = logging.getLogger("memwal.pipeline")
NOTE = "memwal-topics"
"""File in a checkpoint with the ids of its topics by name, as JSON. Spark ignores it."""


class TopicGuard:
    """Compares topic ids for one streaming query; the steps are in the module's docstring.

    Thread safety. One thread at a time. Raises: Invalid if a topic was recreated or deleted; errors of `topics`. If
    `source.fail_on_data_loss` is false, the guard logs a line and notes the new id instead of raising Invalid.
    """

    def __init__(self, settings: Settings, topics: Admin, files: CheckpointFiles) -> None:
        self._settings, self._topics, self._files = settings, topics, files
        self._noted = noted(files)
        self._names: Collection[str] = ()

    def start(self) -> None:
        """Compare and note all topics before the query starts."""
        found = self._topics.wanted()
        check_places(self._settings, found, self._files)
        self._note({name: topic.id for name, topic in found.items()})

    def begin(self, batch_id: int) -> None:
        """Note the topics that appear with micro-batch `batch_id`."""
        self._names = self._settings.source.topics or self._planned(batch_id)
        new = [name for name in self._names if name not in self._noted]
        if new:
            self._note(self._topics.ids(new))

    def check(self) -> None:
        """Compare the topics of the micro-batch, after its rows were read and before they are sent."""
        found = self._topics.ids(self._names)
        for name in self._names:
            if name in found:
                _refuse_recreated(self._settings, name, self._noted.get(name), found[name])
            elif self._settings.source.fail_on_data_loss:
                raise Invalid(
                    f"source: topic {name!r} was deleted while it was read; create it again and set sink.checkpoint to "
                    "a new one, or set fail_on_data_loss = false, which continues with the other topics"
                )
        self._note(found)

    def close(self) -> None:
        """Close the connections to the brokers."""
        self._topics.close()

    def _note(self, found: Mapping[str, str]) -> None:
        """Note ids. Keep the ids of deleted topics, which may be created again."""
        noted = {**self._noted, **found}
        if noted != self._noted:
            self._files.write(NOTE, f"{json.dumps(noted)}\n")
            self._noted = noted

    def _planned(self, batch_id: int) -> list[str]:
        """Return the topics in the offsets that Spark has written for a micro-batch: JSON in the last line."""
        text = self._files.read(f"offsets/{batch_id}")
        if text is None:
            raise Invalid(
                f"sink.checkpoint: {self._settings.checkpoint} has lost the offsets of micro-batch {batch_id}; restore "
                "the checkpoint, or set a new one, which reads the source from starting_offsets"
            )
        return sorted(json.loads(text.splitlines()[-1]))


def check_places(settings: Settings, found: Mapping[str, Topic], files: CheckpointFiles) -> None:
    """Raise Invalid if reading cannot start, or continue, in the topics `found`. Reads only.

    It cannot start if `starting_offsets` is JSON without exactly the existing partitions, which Spark requires.
    """
    if has_begun(files):
        ids = noted(files)
        for name in sorted(found):
            _refuse_recreated(settings, name, ids.get(name), found[name].id)
        return
    text = settings.source.starting_offsets
    if text in ("earliest", "latest"):
        return
    given = {(topic, int(number)) for topic, partitions in json.loads(text).items() for number in partitions}
    there = {(name, number) for name, topic in found.items() for number in range(topic.partitions)}
    for topic, number in sorted(there - given):
        raise Invalid(
            f"source.starting_offsets: partition {number} of topic {topic!r} is missing; write an offset for every "
            "partition, -2 for the earliest and -1 for the latest"
        )
    for topic, number in sorted(given - there):
        raise Invalid(f"source.starting_offsets: there is no partition {number} of topic {topic!r}; remove it")


def has_begun(files: CheckpointFiles) -> bool:
    """Return whether Spark has written offsets into the checkpoint: of a micro-batch, or those to start at."""
    return bool(files.names("offsets") or files.names("sources/0"))


def noted(files: CheckpointFiles) -> dict[str, str]:
    """Return the noted ids by topic; empty if no query has started with the checkpoint."""
    text = files.read(NOTE) if has_begun(files) else None
    ids: dict[str, str] = json.loads(text) if text else {}
    return ids


def _refuse_recreated(settings: Settings, name: str, known: str | None, id: str) -> None:
    """Raise Invalid, or log, if the id of topic `name` differs from the noted id."""
    if known in (None, id):
        return
    said = f"source: topic {name!r} was deleted and created anew since {settings.checkpoint} was written"
    if settings.source.fail_on_data_loss:
        raise Invalid(
            f"{said}, so its offsets are not valid any more; set sink.checkpoint to a new one, which reads the "
            "source from starting_offsets, or fail_on_data_loss = false, which continues at the old offsets and "
            "leaves out the records before them"
        )
    _LOG.warning("%s; it is read from the old offsets on, as fail_on_data_loss = false says", said)


# ---- the admin client -----------------------------------------------------------------------------------------------


_ANSWER_WITHIN_MS = 20_000
_CLIENT_PREFIX = "kafka."
"""Prefix of options of Spark's source that are options of Kafka's client."""


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
        with _kafka_errors():
            properties = self._jvm.java.util.Properties()
            properties.put("default.api.timeout.ms", str(_ANSWER_WITHIN_MS))
            properties.put("request.timeout.ms", str(_ANSWER_WITHIN_MS // 2))
            for name, value in resolved_options(source).items():
                if name.startswith(_CLIENT_PREFIX):
                    properties.put(name.removeprefix(_CLIENT_PREFIX), value)
            properties.put("bootstrap.servers", source.brokers)
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
        raise of_kafka(error.java_exception) or Internal(said) from None
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
