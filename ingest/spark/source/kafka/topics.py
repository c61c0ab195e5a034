"""Compare topic ids: the offsets of a checkpoint are valid only in the topics that they were read from.

Spark stores offsets by topic name. A topic that was deleted and created again has the same name but other records at
these offsets. Once it has as many records as the old topic, Spark continues in its middle and skips the earlier records
without a message. Therefore `memwal run` notes Kafka's id of each topic in a file of the checkpoint, and compares ids:

1. The query starts, also after a pause or an outage (`TopicGuard.start`). All existing topics of the source are
   described. An id that differs from the noted id ends the run; an id without a note is noted.
2. Spark plans a micro-batch: it reads the end offset of each partition, and writes the offsets into the checkpoint.
3. The micro-batch begins (`TopicGuard.begin`). Topics of these offsets without a noted id have appeared since step 1:
   their ids are read and noted on disk before anything of the micro-batch is sent.
4. All rows of the micro-batch are read, into the memory of the driver or into Spark's shuffle files
   (`ingest.spark.map_stage`).
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
from collections.abc import Collection, Iterable, Mapping
from typing import Protocol

from memwal.ingest.errors import Invalid
from memwal.ingest.settings.load import Settings
from memwal.ingest.spark.checkpoint_files import CheckpointFiles
from memwal.ingest.spark.source.kafka.admin import Topic

_LOG = logging.getLogger("memwal.pipeline")
NOTE = "memwal-topics"
"""File in a checkpoint with the ids of its topics by name, as JSON. Spark ignores it."""


class Describes(Protocol):
    """Describes topics; see `source.kafka.admin`."""

    def wanted(self) -> dict[str, Topic]:
        """Return the existing topics of the source."""

    def ids(self, names: Iterable[str]) -> dict[str, str]:
        """Return the ids of existing topics by name."""

    def close(self) -> None:
        """Close the connections."""


class TopicGuard:
    """Compares topic ids for one streaming query; the steps are in the module's docstring.

    Thread safety. One thread at a time. Raises: Invalid if a topic was recreated or deleted; errors of `topics`. If
    `source.fail_on_data_loss` is false, the guard logs a line and notes the new id instead of raising Invalid.
    """

    def __init__(self, settings: Settings, topics: Describes, files: CheckpointFiles) -> None:
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
    """Raise Invalid if reading cannot start, or continue, in the topics `found`. Reads only."""
    if not has_begun(files):
        _check_starting(settings.source.starting_offsets, found)
        return
    ids = noted(files)
    for name in sorted(found):
        _refuse_recreated(settings, name, ids.get(name), found[name].id)


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


def _check_starting(text: str, found: Mapping[str, Topic]) -> None:
    """Raise Invalid if `starting_offsets` is JSON without exactly the existing partitions, which Spark requires."""
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
