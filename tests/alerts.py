"""Compute which alerts fire, with Prometheus' own rule engine, on scrapes of real processes.

    scrapes = Scrapes(lambda: page.body.decode())
    scrapes.take(10)
    …  # the fault
    scrapes.take(10, between=put)
    scrapes.expect({"MemwalFlushFailing"}, since=0)

The scrapes are real; only the time between them is stretched to `EVERY`, so that a test does not wait for minutes.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.conftest import ROOT
from tests.promtool import promtool

RULES = ROOT / "configs" / "deploy" / "prometheus" / "memwal.rules.yml"
EVERY = 30
"""Seconds between two scrapes in the rule engine's time, and between two evaluations of the rules."""
_LABELS = {"job": "memwal", "instance": "test:9464"}


class Scrapes:
    """The scrapes of one process, in order."""

    def __init__(self, metrics: Callable[[], str]) -> None:
        """`metrics`: fetches the text of /metrics."""
        self._metrics = metrics
        self._taken: list[dict[str, float]] = []

    def __len__(self) -> int:
        return len(self._taken)

    def take(self, number: int, between: Callable[[], object] = lambda: None) -> None:
        """Take `number` scrapes; `between` is called before each."""
        for _ in range(number):
            between()
            families = text_string_to_metric_families(self._metrics())
            samples = [sample for family in families for sample in family.samples if sample.name.startswith("memwal_")]
            assert samples
            self._taken.append({_series(each.name, each.labels): each.value for each in samples})

    def newest(self, name: str, **labels: str) -> float:
        """Return the value of a series in the newest scrape."""
        return self._taken[-1][_series(name, labels)]

    def expect(self, alerts: Collection[str], since: int = 0) -> None:
        """Assert that exactly these alerts fired at any time, by the scrapes from number `since` on."""
        assert self.unlike(alerts, since) == ""

    def unlike(self, alerts: Collection[str], since: int = 0) -> str:
        """Return promtool's output if other alerts fired; "" if exactly these fired."""
        taken = self._taken[since:]
        names = sorted({name for scrape in taken for name in scrape})
        last = (len(taken) - 1) * EVERY
        fired = f'group by (alertname) (last_over_time(ALERTS{{alertstate="firing"}}[{last + EVERY}s]))'
        expected = [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in sorted(alerts)]
        tests = {
            "rule_files": [str(RULES)],
            "evaluation_interval": f"{EVERY}s",
            "tests": [
                {
                    "interval": f"{EVERY}s",
                    "input_series": [
                        {"series": name, "values": " ".join(_value(scrape.get(name)) for scrape in taken)}
                        for name in names
                    ],
                    "promql_expr_test": [{"expr": fired, "eval_time": f"{last}s", "exp_samples": expected}],
                }
            ],
        }
        with tempfile.TemporaryDirectory() as directory:
            file = Path(directory) / "test.yml"
            file.write_text(json.dumps(tests), encoding="utf-8")  # JSON is YAML
            ran = promtool("test", "rules", file)
        return ran.stdout + ran.stderr if ran.returncode else ""


def _series(name: str, labels: dict[str, str]) -> str:
    inside = ",".join(f'{label}="{value}"' for label, value in sorted((labels | _LABELS).items()))
    return f"{name}{{{inside}}}"


def _value(value: float | None) -> str:
    return "_" if value is None else "NaN" if value != value else f"{value:.9f}".rstrip("0").rstrip(".")
