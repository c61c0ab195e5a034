"""Metrics of requests to storage by memwal and by Lance, and of their cost.

memwal's adapters count each request where it is sent (`wal.store.requests`). Lance counts its own, reported as the
kind "lance", as operations: a listing of many pages or a deletion of many objects counts once, and attempts that its
client repeats internally are not counted again.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from lance.lance import register_lance_metrics_recorder, snapshot_lance_metrics
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from memwal.ingest.service.ops.metrics import counter, families, gauge
from memwal.ingest.settings.sections import CostSettings
from memwal.wal import REQUESTS, Clock

LANCE = "lance"
_OF_LANCE = "lance_object_store_requests_total"
_OPERATIONS = {
    "create_multipart": "put",
    "put_part": "put",
    "complete_multipart": "put",
    "abort_multipart": "delete",
    "copy": "put",
    "rename": "put",
}
"""Lance's operations that are charged as another one."""
_MINUTE = 61
"""Number of samples that span a minute."""
_LOCAL, _MEMORY = "file", "memory"
"""Prefix of Lance's names of local files; and its name of buffers in memory, used to encode WAL entries."""


@dataclass(slots=True)
class KindRequests:
    """The requests of one kind since the start of the process."""

    cost: CostSettings
    requests: Counter[str] = field(default_factory=Counter)
    """By operation, to object stores and to local files."""
    charged: Counter[str] = field(default_factory=Counter)
    """Only the requests to object stores."""

    def add(self, operation: str, number: int, *, remote: bool) -> None:
        """Count `number` requests."""
        self.requests[operation] += number
        if remote:
            self.charged[operation] += number

    @property
    def dollars(self) -> float:
        """Cost of the requests. Summed in a fixed order: a rounding that decreased it would look like a restart."""
        cost = self.cost  # for 1,000 requests
        prices = {"put": cost.put_price, "list": cost.put_price, "delete": cost.delete_price}
        return sum(number * prices.get(name, cost.get_price) for name, number in sorted(self.charged.items())) / 1000


REQUESTED = (
    counter(
        "memwal_store_requests",
        "requests of this process to storage. kind: log, manifest, sst, commit, note, staged, base or other, for "
        "which memwal asked itself; lance: what Lance asked for. operation: get, put, list, delete or head",
        lambda kind: sorted(kind.requests.items()),
        by="operation",
    ),
    counter(
        "memwal_store_cost_dollars", "what these requests cost by the prices in [cost]; 0 on local files", "dollars"
    ),
)
"""Metrics of a `KindRequests`."""

BUDGET = (
    gauge(
        "memwal_store_cost_budget_dollars",
        "most that the requests of this process may cost per hour (`cost.hourly_budget`); 0 = no limit",
        "hourly_budget",
    ),
)
"""Metrics of `CostSettings`."""


@dataclass(frozen=True, slots=True)
class _Sample:
    """Requests and dollars by kind at one time, in monotonic seconds."""

    time: float
    requests: Mapping[str, int]
    dollars: Mapping[str, float]


class StorageCollector(Collector):
    """The requests of this process to storage.

    Thread safety. Any thread.
    """

    def __init__(self, cost: CostSettings) -> None:
        """Let Lance count from now on. If another recorder of its metrics exists in this process, it keeps them, and
        the kind "lance" is missing."""
        self._cost = cost
        self._lance = register_lance_metrics_recorder()

    def collect(self) -> Iterator[Metric]:
        """Yield the current metrics."""
        yield from families(REQUESTED, self.requests(), "kind")
        yield from families(BUDGET, {"": self._cost})

    def requests(self) -> Mapping[str, KindRequests]:
        """Return the requests by kind."""
        found: defaultdict[str, KindRequests] = defaultdict(lambda: KindRequests(self._cost))
        for (remote, kind, operation), number in REQUESTS.counts().items():
            found[kind].add(operation, number, remote=remote)
        for point in snapshot_lance_metrics() if self._lance else ():
            place = point.attributes.get("base", "")
            if point.name == _OF_LANCE and place != _MEMORY:
                asked, remote = point.attributes["operation"], not place.startswith(_LOCAL)
                found[LANCE].add(_OPERATIONS.get(asked, asked), int(point.value or 0), remote=remote)
        return dict(sorted(found.items()))


class StorageRates:
    """Requests per second and dollars per hour over the last minute, for the page at /.

    Thread safety. Any thread.
    Requires: `sample` is called once a second.
    """

    def __init__(self, storage: StorageCollector, cost: CostSettings, clock: Clock) -> None:
        self._storage, self._cost, self._clock = storage, cost, clock
        self._samples: deque[_Sample] = deque(maxlen=_MINUTE)

    def sample(self) -> None:
        """Store the current counts."""
        found = self._storage.requests()
        requests = {kind: sum(each.requests.values()) for kind, each in found.items()}
        dollars = {kind: each.dollars for kind, each in found.items()}
        self._samples.append(_Sample(self._clock.monotonic(), requests, dollars))

    def show(self) -> dict[str, Any]:
        """Return the part `requests` of the page's message. Requires: a sample."""
        samples = list(self._samples)
        first, last = samples[0], samples[-1]
        seconds, cost = last.time - first.time or 1.0, self._cost
        per_hour = {
            kind: 3600 * (dollars - first.dollars.get(kind, 0.0)) / seconds for kind, dollars in last.dollars.items()
        }
        return {
            "currency": "USD",
            "prices": f"{cost.put_price:g} for 1,000 puts or listings, {cost.get_price:g} for 1,000 other reads",
            "cost_per_hour": sum(per_hour.values()),
            "kinds": [
                {
                    "kind": kind,
                    "per_second": (total - first.requests.get(kind, 0)) / seconds,
                    "total": total,
                    "cost_per_hour": per_hour[kind],
                }
                for kind, total in last.requests.items()
            ],
        }
