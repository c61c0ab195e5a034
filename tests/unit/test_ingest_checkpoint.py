"""A checkpoint serves one run at a time: a second run is refused, and a killed run does not block the next one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from memwal import Invalid
from memwal.flush.base.setup import Restored
from memwal.ingest.settings.configuration import Settings
from memwal.ingest.settings.load import load
from memwal.ingest.spark.pipeline.checkpoint import (
    MARKER,
    locked,
    mark_checkpoint,
    noted,
    refuse_old_checkpoint,
    refuse_set_back,
)
from tests.messages import raises


@dataclass
class Marked:
    """A table with only the attributes that a mark in a checkpoint needs."""

    table_id: str


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return load({"table": {"uri": str(tmp_path / "t")}, "sink": {"checkpoint": str(tmp_path / "c")}}, {})


def noting(at: Path, **numbers: Sequence[int]) -> None:
    """Write the offsets and commits of a checkpoint, as Spark does."""
    for name, each in numbers.items():
        (at / name).mkdir(parents=True, exist_ok=True)
        for number in each:
            (at / name / str(number)).touch()


def test_a_second_run_is_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    one, other = str(tmp_path / "one"), f"file://{tmp_path}/other"
    with locked([one, "s3a://bucket/checkpoint"]):
        for again in (one, f"file://{one}"):
            with raises(Invalid):
                locked([other, again]).__enter__()
        with locked([other, "s3a://bucket/checkpoint"]):
            pass
    with locked([one]):
        pass


def test_a_run_that_was_killed_holds_nothing(tmp_path: Path) -> None:
    holds = "import sys; from memwal.ingest.spark.pipeline.checkpoint import locked; run = locked([sys.argv[1]])"
    run = subprocess.Popen(
        [sys.executable, "-c", f"{holds}; run.__enter__(); print(flush=True); input()", str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with run:
        assert run.stdout is not None
        run.stdout.readline()
        with raises(Invalid):
            locked([str(tmp_path)]).__enter__()
        run.kill()
    with locked([str(tmp_path)]):
        pass


def test_a_run_that_is_killed_while_it_marks_the_checkpoint_leaves_a_whole_marker(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = Marked("first")
    mark_checkpoint(settings, base)  # type: ignore[arg-type]
    opened = Path.open

    def killed(path: Path, *args: Any, **how: Any) -> None:
        opened(path, *args, **how).close()
        raise KeyboardInterrupt

    with monkeypatch.context() as killing:
        killing.setattr(Path, "open", killed)
        with pytest.raises(KeyboardInterrupt):
            mark_checkpoint(settings, Marked("second"))  # type: ignore[arg-type]
    assert (tmp_path / "c" / MARKER).read_text() == "first\n"


def test_a_checkpoint_notes_what_was_begun_and_done(settings: Settings, tmp_path: Path) -> None:
    assert noted(settings) is None
    noting(tmp_path / "c", offsets=[], commits=[])
    (tmp_path / "c" / "metadata").write_text('{"id":"q"}')
    assert noted(settings) == ("q", -1, -1)
    done = -1
    for number in (8, 9, 10):
        (tmp_path / "c" / "offsets" / str(number)).touch()
        (tmp_path / "c" / "offsets" / f".{number}.crc").touch()
        assert noted(settings) == ("q", number, done)
        (tmp_path / "c" / "commits" / str(number)).touch()
        done = number
        assert noted(settings) == ("q", number, done)
    assert noted(load({"table": {"uri": "s3://b/t"}, "sink": {"checkpoint": "s3a://b/c"}}, {})) is None


@pytest.mark.parametrize(
    ("offsets", "newest", "refused"),
    [
        ([], None, False),
        ([], 0, True),
        ([0], 0, False),
        ([0], 1, True),
        ([8, 9], 9, False),
        ([8, 9], 10, True),
        ([8, 9], 12, True),
    ],
)
def test_a_checkpoint_without_the_offsets_of_what_regions_have_is_refused(
    offsets: list[int], newest: int | None, refused: bool, settings: Settings, tmp_path: Path
) -> None:
    refuse_set_back(settings, lambda _: pytest.fail("there is no query to ask for"))
    noting(tmp_path / "c", offsets=offsets)
    if offsets:
        with raises(Invalid):
            refuse_set_back(settings, lambda _: None)
    (tmp_path / "c" / "metadata").write_text('{"id":"q"}')
    with raises(Invalid) if refused else nullcontext():
        refuse_set_back(settings, {"q": newest}.get)


@dataclass
class Table:
    """A base table with only the attributes that the check reads."""

    table_id: str
    restored: Restored | None
    uri: str = ""
    storage_options: Mapping[str, str] = field(default_factory=dict)


@pytest.mark.parametrize(
    ("offsets", "commits", "queries", "refused"),
    [
        ([7, 8], [7], {"q": 8}, False),
        ([7, 8], [7, 8], {"q": 8}, True),
        ([7, 8, 9], [7, 8], {"q": 8}, True),
        ([8, 9], [7, 8, 9], {"q": 8}, True),
        ([9, 10], [9, 10], {"q": 8}, True),
        ([0], [], {}, False),
        ([0], [0], {}, True),
        ([0], [0], {"other": 5}, True),
    ],
)
def test_a_checkpoint_newer_than_the_backup_of_a_restored_table_is_refused(
    offsets: list[int], commits: list[int], queries: dict[str, int], refused: bool, settings: Settings, tmp_path: Path
) -> None:
    noting(tmp_path / "c", offsets=offsets, commits=commits)
    (tmp_path / "c" / "metadata").write_text('{"id":"q"}')
    now = (tmp_path / "c" / "metadata").stat().st_mtime

    def check(table: Table) -> None:
        refuse_old_checkpoint(settings, table)  # type: ignore[arg-type]

    where = str(tmp_path / "t")
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "restored.json").write_text(json.dumps({"queries": queries}))
    restored = Table("new", Restored("old", now), where)
    (tmp_path / "c" / MARKER).write_text("old\n")
    with raises(Invalid) if refused else nullcontext():
        check(restored)
    # Noted as done well before the backup began, so it is whole in the backup.
    if commits and commits[-1] == queries.get("q"):
        check(Table("new", Restored("old", now + 3600), where))
    for other in (Table("new", None), Table("new", Restored("older", now), where)):
        with raises(Invalid):
            check(other)
    (tmp_path / "c" / MARKER).write_text("new\n")
    check(restored)  # a run of the restored table has marked the checkpoint
