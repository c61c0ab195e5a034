"""The benchmark of a take-over runs at its smoke values, and finds every row that was acked."""

from __future__ import annotations

import pytest

from bench.take_over import main


@pytest.mark.long
def test_kills_ends_and_starts_daemons_and_misses_no_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--smoke", "--freeze", "0.5"]) == 0
    shown = capsys.readouterr().out
    assert " rows acked, 0 of them missing" in shown
    for name in ("kill", "hand-over", "give-back", "start", "freeze"):
        assert f"\n{name} " in shown
