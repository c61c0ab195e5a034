"""A checkpoint serves one run at a time: a second run is refused, and a killed run does not block the next one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from memwal import Invalid
from memwal.flush.base.setup import Restored
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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = load({"table": {"uri": str(tmp_path / "t")}, "sink": {"checkpoint": str(tmp_path / "c")}}, {})
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


def test_a_checkpoint_notes_what_was_begun_and_done(tmp_path: Path) -> None:
    settings = load({"table": {"uri": str(tmp_path / "t")}, "sink": {"checkpoint": str(tmp_path / "c")}}, {})
    assert noted(settings) is None
    for name in ("offsets", "commits"):
        (tmp_path / "c" / name).mkdir(parents=True)
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
    [([], None, None), ([], 0, 0), ([0], 0, None), ([0], 1, 1), ([8, 9], 9, None), ([8, 9], 10, 10), ([8, 9], 12, 10)],
)
def test_a_checkpoint_without_the_offsets_of_what_regions_have_is_refused(
    offsets: list[int], newest: int | None, refused: int | None, tmp_path: Path
) -> None:
    settings = load({"table": {"uri": str(tmp_path / "t")}, "sink": {"checkpoint": str(tmp_path / "c")}}, {})
    refuse_set_back(settings, lambda _: pytest.fail("there is no query to ask for"))
    (tmp_path / "c" / "offsets").mkdir(parents=True)
    for number in offsets:
        (tmp_path / "c" / "offsets" / str(number)).touch()
    if offsets:
        with raises(Invalid):
            refuse_set_back(settings, lambda _: None)
    (tmp_path / "c" / "metadata").write_text('{"id":"q"}')
    if refused is None:
        refuse_set_back(settings, {"q": newest}.get)
    else:
        with raises(Invalid):
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
        ([7, 8], [7], {"q": 8}, ""),
        ([7, 8], [7, 8], {"q": 8}, "micro-batch 8 as done, the backup has up to 8, .*above 8 from .*above 7 from"),
        ([7, 8, 9], [7, 8], {"q": 8}, "micro-batch 8 as done, the backup has up to 8"),
        ([8, 9], [7, 8, 9], {"q": 8}, "micro-batch 9 as done, the backup has up to 8, .*above 8 from .*above 7 from"),
        (
            [9, 10],
            [9, 10],
            {"q": 8},
            "the backup has up to 8, so rows may be left out; set sink.checkpoint to a new one",
        ),
        ([0], [], {}, ""),
        ([0], [0], {}, "micro-batch 0 as done, the backup has none of them, so .* left out; set sink.checkpoint to a"),
        ([0], [0], {"other": 5}, "the backup has none of them"),
    ],
)
def test_a_checkpoint_newer_than_the_backup_of_a_restored_table_is_refused(
    offsets: list[int], commits: list[int], queries: dict[str, int], refused: str, tmp_path: Path
) -> None:
    settings = load({"table": {"uri": str(tmp_path / "t")}, "sink": {"checkpoint": str(tmp_path / "c")}}, {})
    for name, numbers in (("offsets", offsets), ("commits", commits)):
        (tmp_path / "c" / name).mkdir(parents=True)
        for number in numbers:
            (tmp_path / "c" / name / str(number)).touch()
    (tmp_path / "c" / "metadata").write_text('{"id":"q"}')
    now = (tmp_path / "c" / "metadata").stat().st_mtime

    def check(table: Table) -> None:
        refuse_old_checkpoint(settings, table)  # type: ignore[arg-type]

    where = str(tmp_path / "t")
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "restored.json").write_text(json.dumps({"queries": queries}))
    restored = Table("new", Restored("old", now), where)
    (tmp_path / "c" / MARKER).write_text("old\n")
    if refused:
        with raises(Invalid):
            check(restored)
    else:
        check(restored)
    # Noted as done well before the backup began, so it is whole in the backup.
    if commits and commits[-1] == queries.get("q"):
        check(Table("new", Restored("old", now + 3600), where))
    for other in (Table("new", None), Table("new", Restored("older", now), where)):
        with raises(Invalid):
            check(other)
    (tmp_path / "c" / MARKER).write_text("new\n")
    check(restored)  # a run of the restored table has marked the checkpoint
