"""Topics are known by their ids: a checkpoint's offsets mean nothing in another one of the name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from memwal import Invalid
from memwal.ingest.settings.load import Settings, load
from memwal.ingest.source.kafka.topics import Topic, check_places, note_topics


def of(at: Path | str, **source: Any) -> Settings:
    """Settings with a checkpoint there."""
    given = {"format": "kafka", "brokers": "b:1", "topic_pattern": ".*", **source}
    return load({"table": {"uri": "t", "key": ["id"]}, "sink": {"checkpoint": str(at)}, "source": given}, {})


def begun(at: Path) -> None:
    """As Spark leaves a checkpoint."""
    (at / "offsets").mkdir(parents=True)
    (at / "offsets" / "0").touch()


def test_a_topic_that_was_created_anew_is_told_by_its_id(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    begun(tmp_path)
    first, other = {"a": Topic("A", 1), "b": Topic("B", 1)}, {"a": Topic("A", 4), "c": Topic("C", 1)}
    for found in (first, other):  # partitions and topics come and go
        check_places(of(tmp_path), found)
        note_topics(of(tmp_path), found)
    back = {"b": Topic("B2", 1)}
    with pytest.raises(Invalid, match=r"topic 'b' was deleted and created anew.*fail_on_data_loss") as e:
        check_places(of(tmp_path), back)
    assert len(e.value.lines) == 1
    check_places(of(tmp_path, fail_on_data_loss=False), back)
    assert "topic 'b' was deleted and created anew" in caplog.text
    note_topics(of(tmp_path), back)
    check_places(of(tmp_path), back)


def test_a_checkpoint_that_is_new_or_elsewhere_knows_no_topic(tmp_path: Path) -> None:
    for at in (tmp_path, "s3a://bucket/checkpoint"):
        note_topics(of(at), {"a": Topic("A", 1)})
        check_places(of(at), {"a": Topic("A2", 1)})


@pytest.mark.parametrize(
    ("offsets", "says"),
    [
        ({"a": {"0": 5}}, "partition 1 of topic 'a' is missing; write an offset for every partition"),
        ({"a": {"0": 5, "1": 5, "2": 5}}, "there is no partition 2 of topic 'a'"),
        ({"b": {"0": 5}}, "partition 0 of topic 'a' is missing"),
    ],
)
def test_starting_offsets_are_of_the_partitions_that_there_are(tmp_path: Path, offsets: Any, says: str) -> None:
    found = {"a": Topic("A", 2)}
    with pytest.raises(Invalid, match=says):
        check_places(of(tmp_path, starting_offsets=json.dumps(offsets)), found)
    check_places(of(tmp_path, starting_offsets='{"a": {"0": -2, "1": 17}}'), found)
    begun(tmp_path)
    check_places(of(tmp_path, starting_offsets=json.dumps(offsets)), found)
