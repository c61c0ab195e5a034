"""The benchmark of two revisions runs; this tree and its newest commit find the same rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.revisions import main


def test_this_tree_beside_its_newest_commit(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["HEAD", "put_durable", "--smoke", "--rounds", "2", "--workdir", str(tmp_path)]) == 0
    shown = capfd.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in shown] == [
        "put_durable, memwal, default",
        "put_durable, memwal, arrow format",
    ]


def test_a_revision_that_is_not_there_is_told_in_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["no-such-revision", "--workdir", str(tmp_path)]) == 2
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 1
    assert "no-such-revision" in said[0]
