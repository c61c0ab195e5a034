"""The benchmarks beside peers run at their smoke values, and every side holds the same rows; Spark's take too long
here.

`make peers` downloads the peers' packages once per machine, before the tests.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import peers_fetch
from bench.peers import HERE_ALONE, main
from bench.result import RunResult


@pytest.mark.long
def test_all_that_needs_no_spark_runs_and_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "result.json"
    names = [each.name for each in HERE_ALONE if each.name != "row_puts"]  # the contenders of `puts`
    where = ["--workdir", str(tmp_path / "work"), "--out", str(kept)]
    assert main([*names, "--smoke", "--rounds", "1", *where]) == 0
    result = RunResult.read(kept)
    assert [each.name for each in result.benchmarks] == names
    for benchmark in result.benchmarks:
        ours, *others = [each for each in benchmark.contenders if each.side != "floor"]
        assert ours.side == "memwal"
        assert {each.side for each in others} == {"peer"}
        alike = [each for each in (ours, *others) if each.question == ours.question]
        assert len({each.rounds[0].digest for each in alike}) == 1
        assert len(benchmark.ratios()) == len(others)
    search = result.benchmarks[-1]
    assert all(each.measures()["recall"] >= 0.95 for each in search.contenders)
    assert "SlateDB, default" in capsys.readouterr().out
    assert list((tmp_path / "work").iterdir()) == []


def test_what_cannot_be_had_ends_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lock = tmp_path / "peers.lock"
    lock.write_text("./not-there.whl\n", encoding="utf-8")
    monkeypatch.setattr(peers_fetch, "LOCK", lock)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert main(["puts", "--workdir", str(tmp_path)]) == 2
    *_, last = capsys.readouterr().err.splitlines()
    assert last.startswith("bench: pip cannot install the packages of a peer")
    assert not list((tmp_path / "cache").rglob("found"))


def test_a_name_that_is_unknown_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["delta_10", "--workdir", str(tmp_path)]) == 2
    assert "delta_1000" in capsys.readouterr().err
