"""The data of a daemon's page, read from the daemon's memory; its queries go to the table itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from uuid import UUID

from memwal.ingest.engine.api.reads import Reads
from memwal.ingest.engine.table.embedded import Table
from memwal.ingest.engine.table.stored import space_status
from memwal.ingest.errors import Unavailable
from memwal.ingest.service.daemon import query_box
from memwal.ingest.service.daemon.balancer import Balancer
from memwal.ingest.service.daemon.pages import DaemonPages
from memwal.ingest.service.daemon.peers import Place
from memwal.ingest.service.ops import skew
from memwal.ingest.service.ops.history import Sample, counts_of
from memwal.ingest.service.ops.live import levels
from memwal.ingest.service.ops.pages import Page
from memwal.ingest.service.ops.sentence import Situation, health
from memwal.ingest.service.ops.storage import StorageRates
from memwal.ingest.service.rpc.credentials import Access
from memwal.wal import Clock

_GONE = ("silent", "ended")


class DaemonSource:
    """See `ops.live.Source`.

    Thread safety. Any thread.
    """

    def __init__(
        self, pages: DaemonPages, place: Place, uri: str, access: Access, clock: Clock, storage: StorageRates
    ) -> None:
        """Show the daemon at `place`. `uri`: of the table, shown until it is open. `access`: credentials for the
        other daemons."""
        self._pages, self._place, self._uri, self._access, self._clock = pages, place, uri, access, clock
        self._storage = storage

    def sample(self) -> Sample:
        """Return the counters of all regions that this daemon ever served, and the lag of those that it serves now."""
        self._storage.sample()
        table = self._pages.table
        if table is None:
            return Sample()
        meters = table.regions.context.meters.regions().values()
        behind = worst([writer.behind() for writer in table.regions.writers])
        return Sample(
            sum(meter.rows_put for meter in meters),
            sum(meter.rows_deleted for meter in meters),
            **{level: seconds for level, seconds in behind.items() if seconds is not None},
            acks=counts_of(meter.ack_seconds for meter in meters),
            appends=counts_of(meter.append_seconds for meter in meters),
        )

    def show(self, figures: Mapping[str, Any]) -> dict[str, Any]:
        """Return table, health, levels, daemons, regions and commits."""
        table, share = self._pages.table, self._pages.share
        if table is None:
            reasons = self._pages.health.reasons()
            return {
                "table": self._uri,
                "health": health(Situation(reasons)),
                "levels": [],
                "regions": [],
                "daemons": [],
            }
        held = [writer.status() for writer in table.regions.writers]
        behind = worst([status["behind"] for status in held])
        peers = [] if share is None else share.peers()
        situation = self._situation(table, held, behind, peers, figures)
        interval, limits = table.upkeep.commit_interval, table.regions.context.limits
        flushed = min((interval, "commit.interval"), (limits.age_max, "memtable.age_max"))
        bounds = {
            "latest": (table.regions.context.wal_options.retry_budget, "wal.retry_budget"),
            "flushed": flushed if interval else (limits.age_max, "memtable.age_max"),
            "committed": (interval, "commit.interval"),
        }
        regions = [_own(status, self._place.endpoint, limits.size_max) for status in held]
        known, order = {UUID(region["id"]): region for region in regions}, table.regions.order
        return {
            "table": table.base.uri,
            "base_version": table.upkeep.caught_up,
            "rows": table.upkeep.rows,
            "storage": space_status(table.upkeep.space),
            "health": health(situation),
            "levels": levels(behind, figures["most"], bounds),
            "waiting_puts": situation.waiting_puts,
            "regions": [known.get(each) or _elsewhere(table, share, each, at) for at, each in enumerate(order)],
            "daemons": self._daemons(table, peers, regions),
            "commits": list(table.regions.context.meters.commits.recent)[::-1],
            "commits_here": table.upkeep.leading,
            "requests": self._storage.show(),
            "paused": table.pauses.last,
        }

    def queryable(self) -> dict[str, Any] | None:
        """Return the columns that a query may name; None before the table is open."""
        table = self._pages.table
        return None if table is None else query_box.describe(table.schema, table.key, table.regions.context.indexes)

    def ask(self, request: Mapping[str, Any]) -> Page:
        """Return the rows of one query over all regions. If this daemon has only some of them, it asks the others
        too."""
        with self._reads() as table:
            return Page.of(query_box.answer(table, request, self._clock))

    # ---- inside --------------------------------------------------------------------------------------------------

    @contextmanager
    def _reads(self) -> Iterator[Reads]:
        table = self._pages.table
        if table is None:
            raise Unavailable("the regions are being claimed; ask again in a moment")
        if table.regions.whole:
            yield table
            return
        from memwal.ingest.service.client.remote import RemoteTable

        with RemoteTable(self._place.endpoints, id=table.id, **self._access.options()) as remote:
            yield remote

    def _situation(
        self,
        table: Table,
        held: Sequence[Mapping[str, Any]],
        behind: Mapping[str, float | None],
        peers: Sequence[Mapping[str, Any]],
        figures: Mapping[str, Any],
    ) -> Situation:
        share, meters = self._pages.share, table.regions.context.meters.regions().values()
        return Situation(
            self._pages.known_reasons(table, held),
            regions=len(table.regions.order),
            alone=share is None,
            behind=behind,
            most=figures["most"],
            interval=table.upkeep.commit_interval,
            leads=table.upkeep.leading,
            acks=figures["acks"],
            rates=figures["rates"],
            waiting_puts=sum(meter.waiting_puts for meter in meters),
            skewed=skew.measured(held),
            puts_rejected=table.base.puts_rejected or "",
            gone=[peer["endpoint"] for peer in peers if peer["state"] in _GONE],
            paused=table.pauses.last,
        )

    def _daemons(
        self, table: Table, peers: Sequence[Mapping[str, Any]], regions: Sequence[Mapping[str, Any]]
    ) -> list[dict[str, Any]]:
        draining = table.regions.draining or self._place.ends()
        waiting = max((region["ssts"] for region in regions), default=0)
        here = {"endpoint": self._place.endpoint, "here": True, "state": "draining" if draining else "serving"}
        return [here | {"answered": 0.0, "waiting": waiting}, *({"here": False, **peer} for peer in peers)]


def worst(behind: Sequence[Mapping[str, float]]) -> dict[str, float | None]:
    """Return by level the oldest age of several regions; None without a region."""
    names = ("latest", "flushed", "committed")
    return {name: max((float(each[name]) for each in behind), default=None) for name in names}


def _own(status: Mapping[str, Any], owner: str, size_max: int) -> dict[str, Any]:
    """Return the entry of a region that this daemon serves, from its `status`."""
    names = ("id", "bucket", "epoch", "state", "memtable_rows", "memtable_bytes")
    return {name: status[name] for name in names} | {
        "owner": owner,
        "memtable_limit": size_max,
        "ssts": len(status["ssts"]),
        "behind": status["behind"]["committed"],
        "error": status["failure"] or status["flush_error"],
    }


def _elsewhere(table: Table, share: Balancer | None, region: UUID, bucket: int) -> dict[str, Any]:
    """Return the entry of a region that this daemon does not serve: the owner and epoch, if known."""
    owner = None if share is None else share.served_elsewhere(region)
    told: dict[str, Any] = {"id": str(region), "bucket": bucket}
    if region in table.regions.coming:
        return told | {"state": "claiming", "owner": None, "epoch": None}
    if owner is None:
        return told | {"state": "no owner", "owner": None, "epoch": None}
    return told | {"state": "serving" if owner[1] else "claiming", "owner": owner[0], "epoch": owner[1] or None}
