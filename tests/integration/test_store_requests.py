"""Metrics of requests to storage, compared with the requests that a proxy in front of a real S3 server has seen."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import memwal
from memwal.ingest.service.ops.metrics import Scrape
from memwal.ingest.service.ops.storage import LANCE, KindRequests, StorageCollector
from memwal.ingest.settings.sections import CostSettings
from tests import fault_proxy as faults
from tests.conftest import SCHEMA, OpenSmall
from tests.fault_proxy import FaultProxy, Request

KINDS = {
    "log": r"_mem_wal/[0-9a-f-]{36}/(wal|applied)/",
    "manifest": r"_mem_wal/[0-9a-f-]{36}/manifest/",
    "sst": r"_mem_wal/[0-9a-f-]{36}/([0-9a-f]{8}_gen_|$)",
    "commit": r"_mem_wal/[0-9a-f-]{36}/commits/",
    "note": r"_mem_wal/([0-9a-f-]{36}|paused)/\w+\.json",
    "other": r"_mem_wal/(probe/|$)",
    "base": r"table\.lance/(?!_mem_wal/)",
}
PRICES = {"PUT": 0.005, "POST": 0.005, "LIST": 0.005, "COPY": 0.005, "GET": 0.0004, "HEAD": 0.0004, "DELETE": 0.0}
"""Dollars per 1,000 requests, from the price list."""
Counted = Counter[tuple[str, str]]


@pytest.fixture
def metrics() -> Callable[[], tuple[Counted, Counter[str]]]:
    """Return a function that scrapes requests by kind and operation, and dollars by kind, of this process since its
    start.
    """
    scrape = Scrape()
    scrape.add(StorageCollector(CostSettings()))

    def scraped() -> tuple[Counted, Counter[str]]:
        requests: Counted = Counter()
        dollars: Counter[str] = Counter()
        for family in text_string_to_metric_families(scrape.text().decode()):
            for sample in family.samples:
                if sample.name == "memwal_store_requests_total":
                    requests[sample.labels["kind"], sample.labels["operation"]] = int(sample.value)
                elif sample.name == "memwal_store_cost_dollars_total":
                    dollars[sample.labels["kind"]] = sample.value  # type: ignore[assignment]
        return requests, dollars

    return scraped


def kind_of(request: Request) -> str:
    (found,) = [kind for kind, pattern in KINDS.items() if re.search(pattern, request.key)]
    return found


def dollars(requests: Sequence[Request]) -> float:
    return sum(PRICES[each.method] for each in requests) / 1000


@pytest.mark.usefixtures("retries_at_once")
def test_the_metric_has_the_requests_that_arrive_and_their_cost(
    s3_table_through_proxy: Any, fault_proxy: FaultProxy, metrics: Callable[..., Any], made: Any
) -> None:
    """The counts include the client's own retries and the parts of large objects, since the storage
    charges for both.
    """
    uri, options = s3_table_through_proxy
    before, spent = metrics()
    fault_proxy.forget()
    fault_proxy.inject(faults.answers(503, "SlowDown"), method="GET", key="_mem_wal/", times=2)
    fault_proxy.inject(faults.lands_then_resets(), method="PUT", key="/wal/", skip=3)
    settings = {"commit": {"interval": "0s"}, "gc": {"interval": "0s"}}
    with memwal.open(uri, schema=SCHEMA, key="id", regions=2, storage_options=options, settings=settings) as table:
        for start in range(0, 200, 20):
            table.put(made.rows(range(start, start + 20)))
            table.get([start])
            if start % 100 == 80:
                table.put([row | {"body": random.randbytes(300_000).hex()} for row in made.rows(range(20))])
                table.flush()
                table.commit()
    after, paid = metrics()
    arrived = fault_proxy.requests
    ours = [each for each in arrived if each.agent.startswith("memwal")]
    seen = Counter((kind_of(each), each.method.lower()) for each in ours)
    counted = after - before
    assert sum(1 for each in arrived if each.fault) == 3
    assert any(each.method == "POST" for each in arrived), "an upload in parts"
    assert {key: number for key, number in counted.items() if key[0] != LANCE} == seen
    assert {kind for kind, _ in seen} >= {"log", "manifest", "sst", "commit", "note", "other"}
    told = {kind: paid[kind] - spent[kind] for kind in paid}
    lance = told.pop(LANCE)
    assert sum(told.values()) == pytest.approx(dollars(ours))
    assert sum(told.values()) + lance == pytest.approx(dollars(arrived), rel=0.05)


def test_local_files_are_counted_and_cost_nothing(
    open_small: OpenSmall, metrics: Callable[..., Any], made: Any
) -> None:
    before, spent = metrics()
    table = open_small(regions=1, gc={"interval": "0s"})
    opened, _ = metrics()
    for number in range(5):
        table.put(made.rows([number]))
    after, paid = metrics()
    assert (after - opened)["log", "put"] == 5
    assert (opened - before)["manifest", "put"] > 0
    assert paid == spent


def test_the_cost_never_falls_by_a_rounding() -> None:
    """Prometheus treats any decrease of a counter as a restart, and adds the whole value again."""
    numbers, costs = {"put": 7, "list": 31, "get": 1_234_567, "head": 3}, set()
    for order in permutations(numbers):
        kind = KindRequests(CostSettings())
        for operation in order:
            kind.add(operation, numbers[operation], remote=True)
            kind.add(operation, 1_000, remote=False)
        costs.add(kind.dollars)
    (cost,) = costs
    assert cost == pytest.approx((38 * 0.005 + 1_234_570 * 0.0004) / 1_000)


FORKS = """
import os, sys
from memwal.wal import REQUESTS, open_store
open_store(sys.argv[1]).put("a", b"1")
print(REQUESTS.counts().total(), flush=True)
if not os.fork():
    print(REQUESTS.counts().total(), flush=True)
    os._exit(0)
os.wait()
"""


def test_a_forked_process_counts_its_own_requests(tmp_path: Path) -> None:
    ran = subprocess.run([sys.executable, "-c", FORKS, str(tmp_path)], capture_output=True, text=True, timeout=90)
    assert ran.stdout.split() == ["1", "0"], ran.stderr
