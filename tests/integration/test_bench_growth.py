"""The benchmark of growth runs, and its figures do not grow."""

from __future__ import annotations

import pytest

from bench.growth import main


def test_it_runs_and_requests_do_not_grow_with_claims(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--claims", "70", "400"]) == 0
    head, _, few, many = (line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines())
    before, after = (dict(zip(head, row, strict=True)) for row in (few, many))
    requests = {name: int(after[name].partition(" ")[0].replace(",", "")) for name in head}
    assert (before["manifests kept"], after["manifests kept"]) == ("64", "64")
    assert requests["hint right"] == 3
    assert max(requests[name] for name in ("hint lost", "hint set back", "tail", "claim", "collect, later")) < 30
