"""The data of the page of a fleet: the sums over its tables, and the list of them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from memwal.ingest.engine.region.counters import Meters
from memwal.ingest.engine.table.embedded import Table
from memwal.ingest.errors import Invalid
from memwal.ingest.service.daemon.fleet_metrics import Growth, Vector
from memwal.ingest.service.daemon.live import DaemonSource, daemons, worst
from memwal.ingest.service.daemon.pages import DaemonPages
from memwal.ingest.service.daemon.peers import Place
from memwal.ingest.service.ops.history import RATE_OVER, Sample, counts_of
from memwal.ingest.service.ops.live import SAMPLE_EVERY, levels
from memwal.ingest.service.ops.pages import Page
from memwal.ingest.service.ops.sentence import Situation, health
from memwal.ingest.service.ops.storage import StorageRates
from memwal.ingest.service.rpc.credentials import Access
from memwal.wal import Clock

LIMIT, LIMIT_MAX = 50, 500
"""Tables in one answer."""
SORTS = ("put", "unflushed", "lag", "regions", "rows", "state", "name")
_STATES = ("broken", "serving", "elsewhere", "idle")


class FleetSource:
    """See `ops.live.Source` and `ops.live.Parts`.

    Thread safety. Any thread; `sample` one at a time.
    """

    def __init__(self, pages: DaemonPages, place: Place, access: Access, clock: Clock, storage: StorageRates) -> None:
        """Show the daemon at `place`. `access`: credentials for the other daemons."""
        self._pages, self._place, self._access, self._clock, self._storage = pages, place, access, clock, storage
        self._growth, self._total = Growth(_counters), _counters(Meters())
        self._puts: deque[Mapping[str, float]] = deque(maxlen=RATE_OVER)
        """Of the last samples, the rows put since the sample before, by table."""

    def sample(self) -> Sample:
        """Return the counters of all tables that this daemon ever served, and the lag of the one that lags most."""
        self._storage.sample()
        self._pages.look()
        open_ = self._open()
        grown = dict(self._growth.ended({name: table.regions.context.meters for name, table in open_.items()}))
        for name, table in open_.items():
            grown[name] = grown.get(name, 0.0) + self._growth.since(name, table.regions.context.meters)
        self._total = sum(grown.values(), self._total)
        self._puts.append({name: each[0] for name, each in grown.items() if each[0]})
        behind = worst([writer.behind() for table in open_.values() for writer in table.regions.writers])
        put, deleted, *counts = self._total.tolist()
        half = len(counts) // 2
        return Sample(
            put,
            deleted,
            **{level: seconds for level, seconds in behind.items() if seconds is not None},
            acks=counts[:half],
            appends=counts[half:],
        )

    def show(self, figures: Mapping[str, Any]) -> dict[str, Any]:
        """Return health, levels, daemons, and the numbers of tables by state."""
        rows, share = self._rows(), self._pages.share
        open_ = self._open().values()
        behind = worst([writer.behind() for table in open_ for writer in table.regions.writers])
        peers = [] if share is None else share.peers()
        states = [row["state"] for row in rows]
        regions = sum(len(table.regions.writers) for table in open_)
        waiting = sum(each.waiting_puts for table in open_ for each in table.regions.context.meters.regions().values())
        interval = max((table.upkeep.commit_interval for table in open_), default=0.0)
        situation = Situation(
            self._pages.health.reasons(),
            alone=not peers,
            behind=behind,
            most=figures["most"],
            interval=interval,
            acks=figures["acks"],
            rates=figures["rates"],
            waiting_puts=waiting,
            gone=[peer["endpoint"] for peer in peers if peer["state"] in ("silent", "ended")],
            broken=[f"table {row['name']}: {row['error']}" for row in rows if row["state"] == "broken"],
        )
        here = daemons(self._place, peers, draining=self._place.ends(), waiting=0)
        elsewhere = {} if share is None else share.elsewhere()
        for each in here:
            at_peer = sum(of.get(each["endpoint"], 0) for of in elsewhere.values())
            each["regions"] = regions if each["here"] else at_peer
        return {
            "table": self._place.address,
            "fleet": {"tables": len(rows)} | {state: states.count(state) for state in _STATES},
            "health": health(situation),
            "levels": levels(
                behind,
                figures["most"],
                {"latest": (0, ""), "flushed": (0, ""), "committed": (interval, "commit.interval")},
            ),
            "waiting_puts": waiting,
            "regions": [],
            "daemons": here,
            "commits": [],
            "requests": self._storage.show(),
        }

    def queryable(self) -> None:
        """Return None: a query is of one table."""

    def ask(self, request: Mapping[str, Any]) -> Page:
        """Raises: Invalid, because a query is of one table."""
        del request
        raise Invalid("this daemon serves several tables, name one with ?table=")

    def source(self, name: str) -> DaemonSource:
        """See `Parts.source`."""
        uri = self._pages.known(name)["address"]
        return DaemonSource(self._pages, self._place, uri, self._access, self._clock, None, name)

    def listed(self, asked: Mapping[str, str], covers: Callable[[str], bool]) -> dict[str, Any]:
        """See `Parts.listed`. Parameters: `search`, `sort`, `up`, `offset`, `limit`."""
        search, sort = asked.get("search", "").strip().casefold(), asked.get("sort", SORTS[0])
        if sort not in SORTS:
            raise Invalid(f"sort = {sort!r:.60}: write one of {', '.join(SORTS)}")
        try:
            offset, limit = int(asked.get("offset", 0)), min(int(asked.get("limit", LIMIT)), LIMIT_MAX)
        except ValueError:
            raise Invalid("offset and limit are whole numbers") from None
        rows = [row for row in self._rows() if covers(row["name"])]
        found = [row for row in rows if search in row["name"].casefold()]
        up = asked.get("up", str(int(sort in ("state", "name")))) == "1"
        # sorts are stable: equal rows stay in the order of their names
        found.sort(key=lambda row: _rank(row, sort), reverse=not up)
        begin = min(max(0, offset), len(found))
        return {
            "total": len(rows),
            "found": len(found),
            "offset": begin,
            "tables": found[begin : begin + max(0, limit)],
        }

    # ---- inside --------------------------------------------------------------------------------------------------

    def _open(self) -> Mapping[str, Table]:
        return {} if self._pages.tables is None else self._pages.tables.open()

    def _rows(self) -> list[dict[str, Any]]:
        """Return the entry of each table, by name."""
        if self._pages.tables is None:
            return []
        share, open_, puts = self._pages.share, self._open(), list(self._puts)
        elsewhere = {} if share is None else share.elsewhere()
        rates = Counter[str]()
        for rows in puts:
            rates.update({name: number / (SAMPLE_EVERY * len(puts)) for name, number in rows.items()})
        return [
            _row(each, open_.get(each["name"]), elsewhere.get(each["name"], {}), rates[each["name"]])
            for each in self._pages.tables.listed(fresh=False)
        ]


def _row(known: Mapping[str, Any], table: Table | None, elsewhere: Mapping[str, int], put: float) -> dict[str, Any]:
    """Return the entry of a table in the list. `put`: rows per second."""
    writers = [] if table is None else table.regions.writers
    state = "elsewhere" if elsewhere and not writers and known["state"] != "broken" else known["state"]
    status = [writer.status() for writer in writers]
    return {
        "name": known["name"],
        "state": state,
        "put": put,
        "unflushed": sum(each["memtable_bytes"] for each in status if each["memtable_rows"]),
        "lag": worst([each["behind"] for each in status])["committed"],
        "regions": len(writers),
        "elsewhere": sum(elsewhere.values()),
        "rows": known["rows"],
        "error": known["error"],
    }


def _rank(row: Mapping[str, Any], sort: str) -> Any:
    if sort == "state":
        return _STATES.index(row["state"])
    return row[sort] if sort == "name" else row[sort] or 0


def _counters(meters: Meters) -> Vector:
    """Return rows put and deleted, and the counts of the times of acks and appends."""
    regions = meters.regions().values()
    rows = [sum(each.rows_put for each in regions), sum(each.rows_deleted for each in regions)]
    acks, appends = (counts_of(getattr(each, name) for each in regions) for name in ("ack_seconds", "append_seconds"))
    return np.asarray([*rows, *acks, *appends], np.float64)
