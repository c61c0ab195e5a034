"""The data of a daemon's page, read from the daemon's memory; its queries go to the table itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from uuid import UUID

from memwal.ingest.engine.api.reads import Reads
from memwal.ingest.engine.table.embedded import Table
from memwal.ingest.engine.table.stored import space_status
from memwal.ingest.service.daemon import query_box
from memwal.ingest.service.daemon.pages import DaemonPages
from memwal.ingest.service.daemon.peers import Place
from memwal.ingest.service.daemon.placement import TableRegion
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
    """What the page of a table shows. See `ops.live.Source`.

    Thread safety. Any thread.
    """

    def __init__(
        self,
        pages: DaemonPages,
        place: Place,
        uri: str,
        access: Access,
        clock: Clock,
        storage: StorageRates | None,
        name: str = "",
    ) -> None:
        """Show a table of the daemon at `place`. `uri`: of the table, shown until it is open. `access`: credentials for
        the other daemons. `storage`: None for a table of a fleet, which is `name`."""
        self._pages, self._place, self._uri, self._access, self._clock = pages, place, uri, access, clock
        self._storage, self._name = storage, name

    def sample(self) -> Sample:
        """Return the counters of all regions that this daemon ever served, and the lag of those that it serves now."""
        if self._storage is not None:
            self._storage.sample()
        table = self._pages.table(self._name)
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
        table, share = self._pages.table(self._name), self._pages.share
        if table is None:
            return {
                "table": self._uri,
                "name": self._name,
                "health": health(self._closed()),
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
            "name": self._name,
            "base_version": table.upkeep.caught_up,
            "rows": table.upkeep.rows,
            "storage": space_status(table.upkeep.space),
            "health": health(situation),
            "levels": levels(behind, figures["most"], bounds),
            "waiting_puts": situation.waiting_puts,
            "regions": [known.get(each) or self._elsewhere(table, each, at) for at, each in enumerate(order)],
            "daemons": daemons(
                self._place,
                peers,
                draining=table.regions.draining or self._place.ends(),
                waiting=max((region["ssts"] for region in regions), default=0),
            ),
            "commits": list(table.regions.context.meters.commits.recent)[::-1],
            "commits_here": table.upkeep.leading,
            "paused": table.pauses.last,
            **({} if self._storage is None else {"requests": self._storage.show()}),
        }

    def queryable(self) -> dict[str, Any] | None:
        """Return the columns that a query may name; None before the table is open."""
        table = self._pages.table(self._name)
        return None if table is None else query_box.describe(table.schema, table.key, table.regions.context.indexes)

    def ask(self, request: Mapping[str, Any]) -> Page:
        """Return the rows of one query over all regions. If this daemon has only some of them, it asks the others
        too."""
        with self._reads() as table:
            return Page.of(query_box.answer(table, request, self._clock))

    # ---- inside --------------------------------------------------------------------------------------------------

    @contextmanager
    def _reads(self) -> Iterator[Reads]:
        with self._pages.using(self._name or None) as table:
            if table.regions.whole:
                yield table
                return
            from memwal.ingest.service.client.remote import RemoteTable

            with RemoteTable(
                self._place.endpoints, id=table.id, name=self._name or None, **self._access.options()
            ) as remote:
                yield remote

    def _closed(self) -> Situation:
        """Return the situation of a table that is not open here."""
        reasons, share = self._pages.health.reasons(), self._pages.share
        if not self._name:
            return Situation(reasons)
        if (error := self._pages.known(self._name)["error"]) is not None:
            return Situation([*reasons, {"reason": "cannot_be_opened", "text": error}])
        owners = share.elsewhere().get(self._name, {}) if share is not None else {}
        text = "No daemon has a region of this table. The next put or read opens it."
        return Situation(reasons, idle=f"Its regions are at {', '.join(owners)}." if owners else text)

    def _elsewhere(self, table: Table, region: UUID, bucket: int) -> dict[str, Any]:
        """Return the entry of a region that this daemon does not serve: the owner and epoch, if known."""
        share = self._pages.share
        owner = None if share is None else share.served_elsewhere(TableRegion(self._name, region))
        told: dict[str, Any] = {"id": str(region), "bucket": bucket, "owner": None, "epoch": None}
        if region in table.regions.coming:
            return told | {"state": "claiming"}
        if owner is None:
            return told | {"state": "idle" if table.regions.claim is not None else "no owner"}
        return told | {"state": "serving" if owner[1] else "claiming", "owner": owner[0], "epoch": owner[1] or None}

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


def daemons(place: Place, peers: Sequence[Mapping[str, Any]], *, draining: bool, waiting: int) -> list[dict[str, Any]]:
    """Return the entry of this daemon and those of its peers. `waiting`: see `Balancer.peers`."""
    here = {"endpoint": place.endpoint, "here": True, "state": "draining" if draining else "serving"}
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
