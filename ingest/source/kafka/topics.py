"""The topics that a checkpoint has read: its offsets are valid for these only.

Spark keeps offsets by the names of topics. A topic that was deleted and created anew has the same name and other
records at the offsets; once it has as many as the old one, Spark would continue in the middle of it and skip the
records before, without a message. So a run notes the id that Kafka gives each topic, and the next run compares.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import NamedTuple

from memwal.ingest.errors import Invalid
from memwal.ingest.settings.load import Settings
from memwal.ingest.settings.paths import is_remote, local_path

_LOG = logging.getLogger("memwal.pipeline")
NOTE = "memwal-topics"
"""File in a checkpoint on a local disk: the ids of its topics by name; Spark ignores it."""


class Topic(NamedTuple):
    """A topic as the brokers describe it. `id`: changes if the topic is deleted and created anew."""

    id: str
    partitions: int


def check_places(settings: Settings, found: Mapping[str, Topic]) -> None:
    """Raise Invalid if reading cannot begin, or continue, in the topics `found`. Reads only."""
    if is_remote(settings.checkpoint):
        return
    known, offsets = _noted(settings), local_path(settings.checkpoint) / "offsets"
    if not offsets.is_dir() or not any(offsets.iterdir()):
        _check_starting(settings.source.starting_offsets, found)
        return
    for name in sorted(known.keys() & found.keys()):
        if known[name] == found[name].id:
            continue
        said = f"source: topic {name!r} was deleted and created anew since {settings.checkpoint} was written"
        if settings.source.fail_on_data_loss:
            raise Invalid(
                f"{said}, so its offsets are not valid any more; set sink.checkpoint to a new one, which reads the "
                "source from starting_offsets, or fail_on_data_loss = false, which continues at the old offsets and "
                "leaves out the records before them"
            )
        _LOG.warning("%s; it is read from the old offsets on, as fail_on_data_loss = false says", said)


def note_topics(settings: Settings, found: Mapping[str, Topic]) -> None:
    """Note the topics in the checkpoint, and keep notes of topics that no longer exist: they may come back."""
    if not is_remote(settings.checkpoint):
        noted = _noted(settings) | {name: topic.id for name, topic in found.items()}
        checkpoint = local_path(settings.checkpoint)
        checkpoint.mkdir(parents=True, exist_ok=True)
        whole = checkpoint / f".{NOTE}"
        whole.write_text(f"{json.dumps(noted)}\n")
        whole.replace(checkpoint / NOTE)


def _noted(settings: Settings) -> dict[str, str]:
    note = local_path(settings.checkpoint) / NOTE
    found: dict[str, str] = json.loads(note.read_text()) if note.exists() else {}
    return found


def _check_starting(text: str, found: Mapping[str, Topic]) -> None:
    """Raise Invalid unless `starting_offsets` has every partition, as Spark requires, or is a word."""
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
