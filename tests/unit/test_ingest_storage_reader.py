"""Reads from storage while a collection deletes log entries."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memwal.flush import BaseTable
from memwal.ingest.engine.read.stored import StoredLevels
from memwal.ingest.errors import Unavailable, classify
from memwal.wal import LocalStore, ManifestStore, Overtaken, bucket_region
from memwal.wal.layout import entry_key, wal_prefix

REGION = bucket_region(0)


class Collecting(LocalStore):
    """Runs `before_tail` just before a tail is listed."""

    def __init__(self, root: str | Path, before_tail: Callable[[], None]) -> None:
        super().__init__(root)
        self.before_tail = before_tail

    def list_some(self, prefix: str, most: int) -> list[str]:
        if prefix == wal_prefix(REGION):
            self.before_tail()
        return super().list_some(prefix, most)


class Scene:
    """A table of one region. Before each of the next `times` reads of its tail, its rows are flushed and their entries
    are collected."""

    def __init__(self, table: Any, made: Any, uri: str, times: int) -> None:
        self.table, self.made, self.times, self.rows = table, made, times, 0
        self.store = Collecting(uri, self.collect)
        self.base = BaseTable.find(uri, {})
        self.put()

    def put(self) -> None:
        for _ in range(3):
            self.table.put(self.made.table([self.rows]))
            self.rows += 1

    def collect(self) -> None:
        if not self.times:
            return
        self.times -= 1
        before = ManifestStore(self.store, REGION).latest()
        self.table.flush()
        after = ManifestStore(self.store, REGION).latest()
        assert before is not None
        assert after is not None
        for position in range(before.replay_after + 1, after.replay_after):
            self.store.delete(entry_key(REGION, position, "lance"))
        self.put()


@pytest.mark.parametrize("times", [1, 4])
def test_a_reader_that_was_overtaken_captures_the_region_again(
    open_small: Callable[..., Any], made: Any, uri: str, times: int
) -> None:
    scene = Scene(open_small(regions=1), made, uri, times)
    assert scene.base is not None
    (view,) = StoredLevels(scene.store).views(scene.base, "durable")
    assert len(view.ssts) == times
    assert sum(snapshot.n for snapshot in view.memtables) == 3
    assert scene.rows == 3 * (times + 1)


def test_one_that_is_overtaken_every_time_is_told_to_try_again(
    open_small: Callable[..., Any], made: Any, uri: str
) -> None:
    scene = Scene(open_small(regions=1), made, uri, 100)
    assert scene.base is not None
    with pytest.raises(Overtaken) as caught:
        StoredLevels(scene.store).views(scene.base, "durable")
    assert isinstance(classify(caught.value), Unavailable)
    assert scene.times == 95
