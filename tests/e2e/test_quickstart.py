"""`memwal run configs/quickstart.toml --once` on the real packages: the run, and the table and files after it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lance
import numpy as np
import psutil
import pytest

CONFIG = Path(__file__).resolve().parent.parent.parent / "configs" / "quickstart.toml"


@dataclass(frozen=True)
class Quickstart:
    """The finished run: its configuration, environment, output and table."""

    config: Path
    env: dict[str, str]
    ran: Any
    uri: str


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory, cli: Callable[..., Any]) -> Quickstart:
    """Run the shipped quickstart once, with its paths in a separate directory, and its files in quick succession."""
    directory = tmp_path_factory.mktemp("quickstart")
    config = directory / CONFIG.name
    shutil.copy(CONFIG, config)
    env = {
        "MEMWAL__TABLE__URI": str(directory / "packages.lance"),
        "MEMWAL__SOURCE__FEED": str(CONFIG.parent / "quickstart"),
        "MEMWAL__SOURCE__FEED_EVERY": "200ms",
        "MEMWAL__SOURCE__PATH": str(directory / "landing"),
    }
    ran = cli("run", config, "--once", cwd=directory, env=env, process=True)
    return Quickstart(config, env, ran, env["MEMWAL__TABLE__URI"])


def test_the_run_ends_well_and_leaves_no_process(quickstart: Quickstart) -> None:
    assert (quickstart.ran.code, quickstart.ran.err) == (0, "")
    left = [
        process.info["cmdline"]
        for process in psutil.process_iter(["cmdline"])
        if any(str(quickstart.config.parent) in part for part in process.info["cmdline"] or [])
    ]
    assert left == []


def test_the_base_table_holds_every_package_at_its_newest_version(quickstart: Quickstart, packages: Any) -> None:
    rows = lance.dataset(quickstart.uri).to_table().to_pylist()
    assert len(rows) == 4000
    found = {row["package"]: row for row in rows}
    assert len(found) == 4000, "a package is there twice"
    assert found == packages.newest
    assert len(packages.changed) == 581
    indexed = {name for index in lance.dataset(quickstart.uri).describe_indices() for name in index.field_names}
    assert {"embedding", "description", "installed_kb"} <= indexed


def test_the_report_says_what_happened(quickstart: Quickstart) -> None:
    said = quickstart.ran.out
    for wanted in (
        r"rows in\s+4,900 ",
        r"rows per second\s+[\d,]+",
        r"put ack\s+p50 [\d.,]+ m?s, p99 [\d.,]+ m?s",
        r"batch to queryable\s+.*[\d.,]+ m?s",
        r"table\s+version \d+, 4,000 rows in 2 regions; 0 SSTs",
    ):
        assert re.search(wanted, said), wanted
    for way in ("by key", "by filter", "by vector", "by text"):
        assert re.search(rf"{way}.*[\d.,]+ m?s", said), way


def test_status_shows_nothing_pending(quickstart: Quickstart, cli: Callable[..., Any]) -> None:
    ran = cli("status", quickstart.config, "--json", env=quickstart.env)
    assert (ran.code, ran.err) == (0, "")
    status = json.loads(ran.out)
    assert status["rows"] == 4000
    assert len(status["regions"]) == 2
    for region in status["regions"]:
        assert region["memtable_rows"] == 0
        assert region["replay_after"] == region["wal_position"]
        assert [sst for sst in region["ssts"] if not sst["committed"]] == []
    shown = cli("status", quickstart.config, env=quickstart.env)
    assert "nothing pending" in shown.out


def test_the_packages_are_found_every_way(quickstart: Quickstart, cli: Callable[..., Any], packages: Any) -> None:
    def query(*arguments: str) -> list[dict[str, Any]]:
        ran = cli("query", quickstart.config, *arguments, "--format", "json", env=quickstart.env)
        assert ran.code == 0, ran.err
        rows: list[dict[str, Any]] = json.loads(ran.out)
        return rows

    name = min(packages.changed)
    (row,) = query("--key", name, "--columns", "package,version,installed_kb")
    assert row == {column: packages.newest[name][column] for column in ("package", "version", "installed_kb")}
    small = query("--filter", "installed_kb < 20 AND section = 'perl'", "--limit", "4000", "--columns", "package")
    assert {row["package"] for row in small} == {
        name for name, row in packages.newest.items() if row["installed_kb"] < 20 and row["section"] == "perl"
    }
    names = list(packages.newest)
    vectors = np.array([packages.newest[each]["embedding"] for each in names], np.float32)
    distances = ((vectors - np.float32(packages.newest[name]["embedding"])) ** 2).sum(axis=1)
    exact = {names[at] for at in np.argsort(distances, kind="stable")[:10]}
    near = query("--near", f"embedding=key:{name}", "--columns", "package")
    assert near[0]["_distance"] == pytest.approx(0, abs=1e-5)
    assert len(exact & {row["package"] for row in near}) >= 9
    matched = query("--match", "description=firewall", "--limit", "4000", "--columns", "package,description")
    assert {row["package"] for row in matched} >= {
        name for name, row in packages.newest.items() if "firewall" in re.findall(r"\w+", row["description"].lower())
    }
    assert all("firewall" in row["description"].lower() for row in matched)
