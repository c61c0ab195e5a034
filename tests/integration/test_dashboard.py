"""The shipped dashboard, alerts and their page: PromQL that Prometheus accepts, with metrics that memwal declares."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from memwal.ingest.service.ops.metrics import BUILD, COMMITTED, COUNTED, FLEET, HELD, LIMITED, PAUSED, REFUSED, TABLE
from memwal.ingest.service.ops.storage import BUDGET, REQUESTED
from memwal.ingest.spark.pipeline.metrics import RAN, RAN_BY_REGION
from tests.alerts import RULES
from tests.conftest import ROOT
from tests.promtool import promtool

DASHBOARD = ROOT / "configs" / "deploy" / "grafana" / "memwal.json"
PAGE = ROOT / "configs" / "deploy" / "monitoring.md"
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
VARIABLES = {"$__rate_interval": "5m", "$job": ".*", "$instance": ".*"}
"""The values that Grafana substitutes."""


@pytest.fixture(scope="module")
def dashboard() -> Any:
    """Return the parsed dashboard."""
    return json.loads(DASHBOARD.read_text(encoding="utf-8"))


def declared() -> set[str]:
    """Return the names of all series."""
    of_daemons = (*COUNTED, *HELD, *COMMITTED, *LIMITED, *TABLE, *FLEET, *REFUSED)
    every = (*of_daemons, *BUILD, *PAUSED, *REQUESTED, *BUDGET, *RAN, *RAN_BY_REGION)
    return {f"{each.name}{suffix}" for each in every for suffix in SUFFIXES[each.kind]}


def expressions(dashboard: Any) -> Iterator[str]:
    """Yield the PromQL of every panel."""
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            expression = target["expr"]
            for variable, text in VARIABLES.items():
                expression = expression.replace(variable, text)
            yield expression


def named(text: str) -> set[str]:
    """Return the metrics that a text names."""
    return set(re.findall(r"\bmemwal_[a-z_]+", text))


def test_prometheus_takes_every_expression(dashboard: Any, tmp_path: Path) -> None:
    rules = [{"record": f"panel:{number}", "expr": each} for number, each in enumerate(expressions(dashboard))]
    assert len(rules) > 60
    assert not any("$" in rule["expr"] for rule in rules)
    file = tmp_path / "panels.yml"
    file.write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}), encoding="utf-8")
    ran = promtool("check", "rules", "--lint=all", "--lint-fatal", file)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert f"{len(rules)} rules found" in ran.stdout


def test_prometheus_takes_the_configuration_beside_the_rules() -> None:
    ran = promtool("check", "config", "--syntax-only", RULES.with_name("prometheus.yml"))
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.parametrize("file", [DASHBOARD, RULES, PAGE], ids=lambda file: file.name)
def test_every_metric_is_declared(file: Path) -> None:
    """A text may name a histogram without a suffix."""
    names = named(file.read_text(encoding="utf-8"))
    assert names
    assert names - declared() - {name.removesuffix("_bucket") for name in declared()} == set()


def test_the_dashboard_shows_what_a_platform_team_asks_for(dashboard: Any) -> None:
    shown = named("\n".join(expressions(dashboard)))
    # Metrics that need no panel, since another metric shows more.
    left = {name for name in declared() - shown if not name.endswith(("_sum", "_count"))}
    assert left <= {"memwal_base_version", "memwal_run_batch_id", "memwal_run_last_batch_timestamp_seconds", *BYTES}


BYTES = {"memwal_flush_bytes_total", "memwal_run_trigger_seconds"}


def test_every_panel_has_a_place_of_its_own_and_takes_its_data_from_the_variable(dashboard: Any) -> None:
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
        if panel["type"] != "row":
            assert panel["description"]
            assert {target["datasource"]["uid"] for target in panel["targets"]} == {"${datasource}"}
    assert [pair for pair in combinations(panels, 2) if _overlap(*(each["gridPos"] for each in pair))] == []
    assert [each["name"] for each in dashboard["templating"]["list"]] == ["datasource", "job", "instance"]
    assert dashboard["schemaVersion"] >= 39


def _overlap(one: dict[str, int], other: dict[str, int]) -> bool:
    beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
    above = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
    return not beside and not above


def test_the_page_explains_every_alert() -> None:
    alerts = re.findall(r"- alert: (\w+)", RULES.read_text(encoding="utf-8"))
    told = re.findall(r"^\| `(\w+)`", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert told == alerts
    assert len(alerts) == 15
