"""`python -m bench.fleet` measures every figure, and each acknowledged row is in its table."""

from __future__ import annotations

import pytest

from bench.fleet import main


def test_a_small_fleet_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--tables", "8", "--active", "4", "--seconds", "1"]) == 0
    told = capsys.readouterr().out
    for figure in ("start", "rest", "known", "first put to an idle table", "active", "kill", "isolation"):
        assert f"\n{figure}" in told, told
    assert "\n5 tables have every acknowledged row once\n" in told
