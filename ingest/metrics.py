"""Prometheus metrics of a daemon: read from `Table.status()` when scraped, so that the put path counts nothing."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ingest.table import Table

_GAUGES = {
    "epoch": "writer epoch of the region",
    "wal_position": "newest WAL entry of the region",
    "replay_after": "newest WAL entry whose rows are in a published SST",
    "generation": "generation of the active memtable",
    "memtable_rows": "rows in the memtables of the region",
    "memtable_bytes": "bytes of the memtables of the region, indexes counted",
    "unindexed_rows": "rows in the memtables of the region that searches look at one by one, not indexed yet",
}


class TableCollector(Collector):
    """One scrape, one `status()`."""

    def __init__(self, table: Table) -> None:
        self._table = table

    def collect(self) -> Iterator[Metric]:
        """The gauges, with the region id as a label."""
        status = self._table.status()
        for name in ("base_version", "rows"):
            yield GaugeMetricFamily(f"memwal_{name}", f"{name} of the base table", value=status[name])
        for name, meaning in _GAUGES.items():
            gauge = GaugeMetricFamily(f"memwal_{name}", meaning, labels=["region"])
            for region in status["regions"]:
                gauge.add_metric([region["id"]], region[name])
            yield gauge
        pending = GaugeMetricFamily("memwal_pending_ssts", "SSTs published, not committed", labels=["region"])
        for region in status["regions"]:
            pending.add_metric([region["id"]], sum(not sst["committed"] for sst in region["ssts"]))
        yield pending


def serve_metrics(table: Table, port: int) -> int | None:
    """Serve /metrics on loopback; returns the port, None when `port` is -1. Raises: OSError when it is taken."""
    if port < 0:
        return None
    registry = CollectorRegistry()
    registry.register(TableCollector(table))
    server, _ = start_http_server(port, addr="127.0.0.1", registry=registry)
    return int(server.server_port)
