"""The HTTP pages of a pipeline's driver: metrics, health with reasons, status, and what the live page shows."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from memwal.flush import BaseTable
from memwal.ingest.engine.region.counters import COMMITS_KEPT
from memwal.ingest.engine.table.pauses import Paused, PauseWatch
from memwal.ingest.errors import Invalid, Unavailable
from memwal.ingest.protocol import build
from memwal.ingest.service.client.remote import RemoteTable
from memwal.ingest.service.client.tables import RemoteFleet
from memwal.ingest.service.daemon import query_box
from memwal.ingest.service.daemon.live import worst
from memwal.ingest.service.ops import skew
from memwal.ingest.service.ops.health import Health, Reason, of_commits, of_regions
from memwal.ingest.service.ops.history import Sample, counts_of
from memwal.ingest.service.ops.live import levels
from memwal.ingest.service.ops.metrics import Scrape
from memwal.ingest.service.ops.pages import Act, Page, Render, pages_of, pausing_acts
from memwal.ingest.service.ops.sentence import Situation, duration, health
from memwal.ingest.settings.load import Settings
from memwal.ingest.spark.pipeline.metrics import RunCollector, RunMeter
from memwal.ingest.spark.pipeline.pausing import Pausing
from memwal.ingest.spark.sink.receipts import BatchReceipt
from memwal.wal import Clock

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery


BAD_BATCHES = 20
"""Number of newest micro-batches with bad rows that are kept with their reasons."""


class RunPages:
    """The pages of a pipeline's driver, with the last status of its owners.

    Thread safety. Any thread.
    """

    def __init__(self, meter: RunMeter, table: str, clock: Clock) -> None:
        self.health = Health()
        self.health.hold("starting", "Spark and the daemon are being started")
        self.scrape, self.meter, self.name = Scrape(), meter, table
        self._clock = clock
        self.base: BaseTable | None = None
        """The table; None until it is known."""
        self.reader: RemoteTable | RemoteFleet | None = None
        """A client of the table's owners; None until they run."""
        self.owners: Mapping[str, Any] = {}
        """The newest status that the owners returned; empty before the first one."""
        self.bad_batches: deque[dict[str, Any]] = deque(maxlen=BAD_BATCHES)
        """The newest micro-batches with bad rows, oldest first: `{"time", "batch_id", "bad", "letters", "reasons"}`."""
        self.commits: Sequence[Mapping[str, Any]] = ()
        """The newest commits of the owners, oldest first; see `CommitMeter.recent`."""
        self.pausing: Pausing | None = None
        """The pauses of the table; None until the table is known."""
        self.scrape.add(RunCollector(meter, self._held))

    def serves(self, base: BaseTable, reader: RemoteTable | RemoteFleet) -> None:
        """Set the table, or the template of many, and a client of the owners."""
        self.base, self.reader = base, reader

    def paused(self) -> Paused:
        """Return what an operator has paused, as last read from storage."""
        return {} if self.pausing is None else self.pausing.watch.last

    def add(self, receipt: BatchReceipt) -> None:
        """Count a finished micro-batch."""
        self.meter.add(receipt)
        if receipt.bad:
            told = {"batch_id": receipt.batch_id, "bad": receipt.bad, "letters": receipt.letters}
            self.bad_batches.append({"time": self._clock.now(), **told, "reasons": receipt.reasons})

    def saw(self, status: Mapping[str, Any]) -> None:
        """Store a status that the owners returned."""
        answered, before = {region["id"] for region in status["regions"]}, self.owners
        same = before.get("routing") == status.get("routing")
        # Regions of the last status whose owner does not answer now.
        silent = (region for region in before.get("regions", ()) if same and region["id"] not in answered)
        regions = [*status["regions"], *({**region, "state": "silent"} for region in silent)]
        self.owners = {**status, "regions": sorted(regions, key=lambda region: int(region["bucket"]))}
        if status.get("commits"):  # a restarted daemon has no commits
            self.commits = status["commits"][-COMMITS_KEPT:]

    def look(self, query: StreamingQuery) -> None:
        """Store Spark's progress of the source. Does nothing if the JVM has ended, which `PipelineStream` reports."""
        from py4j.protocol import Py4JError

        with suppress(Py4JError, OSError):
            progress = query.lastProgress
            if progress is not None:
                self.meter.progressed(json.loads(progress.json))
            self.meter.looked(query.status if query.isActive else None)

    def status(self) -> dict[str, Any]:
        """Return what the pipeline has done so far. Times are in seconds; null if nothing was measured."""
        figures, meter = self.meter.figures(), self.meter
        return {
            "table": self.name,
            "batch_id": figures.batch_id,
            "micro_batches": figures.micro_batches,
            "rows": figures.rows,
            "rows_repeated": figures.repeated,
            "rows_per_second": figures.rows_per_second,
            "source_lag_rows": meter.rows_behind,
            "source_lag_seconds": meter.lag_seconds,
            "source_waiting_seconds": meter.waiting_seconds,
            "steps": meter.steps,
            "ack_p50": _number(figures.ack_p50),
            "ack_p99": _number(figures.ack_p99),
            "queryable_p50": _number(figures.queryable_p50),
            "queryable_max": _number(figures.queryable_max),
            "rows_bad": meter.bad,
            "dead_letters": meter.letters,
            "ingestion": "running" if self.pausing is None else self.pausing.state,
            "paused": self.paused(),
            "versions": dict(build()),
            "freshness_max": meter.freshness_max,
            "not_ready": self.reasons(),
        }

    def reasons(self) -> list[Reason]:
        """Return why the run is not ready; empty if it is ready.

        Rows that wait because of an operator's pause are not late.
        """
        meter = self.meter
        if not meter.is_late or "ingestion" in self.paused():
            return self.health.reasons()
        text = f"rows are searchable {duration(meter.lag_seconds)} after they land in the source"
        objective = f"source.freshness_max is {duration(meter.freshness_max)}"
        return [*self.health.reasons(), {"reason": "not_fresh", "text": f"{text}; {objective}"}]

    def pages(self) -> dict[str, Render]:
        """Return the pages by path."""
        return pages_of(self.scrape, self.reasons, self.status, self.paused)

    def acts(self) -> dict[str, Act]:
        """Return the actions by path. Flushes and commits are actions of the owners."""

        def flush(*_: Any) -> dict[str, Any]:
            regions = self.served().status()["regions"]
            self.served().flush()
            return {"rows": sum(region["memtable_rows"] for region in regions), "regions": len(regions)}

        pauses = pausing_acts(self._watch, lambda: None)
        return pauses | {"/flush": flush, "/commit": lambda *_: asdict(self.served().commit())}

    def _held(self) -> Paused:
        """Return the pauses that are in effect: a paused ingestion counts only once the query is stopped.

        Until then a micro-batch may be in progress, and may hang.
        """
        stands = self.pausing is not None and self.pausing.stands
        return {what: told for what, told in self.paused().items() if what != "ingestion" or stands}

    def served(self) -> RemoteTable | RemoteFleet:
        """Return the client of the table's owners. Raises: Unavailable until they run."""
        if self.reader is None:
            raise Unavailable("the daemon is being started; ask again in a moment")
        return self.reader

    def _watch(self) -> PauseWatch:
        if self.pausing is None:
            raise Unavailable("Spark and the daemon are being started; ask again in a moment")
        return self.pausing.watch


class RunSource:
    """What the page of a run shows: the driver's counters, and the regions as last reported. See `ops.live.Source`.

    Thread safety. Any thread.
    """

    def __init__(self, pages: RunPages, settings: Settings, clock: Clock) -> None:
        self._pages, self._settings, self._clock = pages, settings, clock

    def sample(self) -> Sample:
        """Return the driver's counters, and the lag of the regions from the last status of their owners.

        `latest` is the freshness, see `RunMeter.lag_seconds`.
        """
        meter, behind = self._pages.meter, self._behind()
        return Sample(
            put_rows=meter.rows - meter.repeated,
            bad_rows=meter.bad,
            latest=_nan(meter.lag_seconds or None),
            flushed=_nan(behind["flushed"]),
            committed=_nan(behind["committed"]),
            lag_rows=_nan(meter.rows_behind),
            acks=counts_of([meter.ack_seconds]),
        )

    def show(self, figures: Mapping[str, Any]) -> dict[str, Any]:
        """Return table, health, levels, daemons, regions, lag, dead letters and commits."""
        pages, meter, commit = self._pages, self._pages.meter, self._settings.commit
        behind = self._behind() | {"latest": meter.lag_seconds or None}
        regions = self._regions()
        flushed = min((commit.interval, "commit.interval"), (self._settings.memtable.age_max, "memtable.age_max"))
        bounds = {
            "latest": (meter.freshness_max, "source.freshness_max"),
            "flushed": flushed if commit.interval else (self._settings.memtable.age_max, "memtable.age_max"),
            "committed": (commit.interval, "commit.interval"),
        }
        return {
            "table": pages.name,
            "base_version": pages.owners.get("base_version"),
            "rows": pages.owners.get("rows"),
            "storage": pages.owners.get("storage"),
            "health": health(self._situation(behind, figures)),
            "levels": levels(behind, figures["most"], bounds),
            "regions": [_region(region, self._settings.memtable.size_max) for region in regions],
            "daemons": _daemons(regions),
            "commits": list(pages.commits)[::-1],
            "daemon_events": pages.owners.get("events", ()),
            "run": self._run(),
            "paused": pages.paused(),
        }

    def queryable(self) -> dict[str, Any] | None:
        """Return the names that a query may use; None until the table has an owner, and of many tables."""
        base = self._pages.base
        if base is None or not isinstance(self._pages.reader, RemoteTable):
            return None
        return query_box.describe(base.schema, base.key, base.indexes)

    def ask(self, request: Mapping[str, Any]) -> Page:
        """Return the rows of one query, which the owners of the regions answer."""
        if isinstance(reader := self._pages.served(), RemoteFleet):
            raise Invalid("this run writes many tables; query one with `memwal query --table NAME`")
        return Page.of(query_box.answer(reader, request, self._clock))

    # ---- inside --------------------------------------------------------------------------------------------------

    def _regions(self) -> list[Mapping[str, Any]]:
        """Return the regions from the last status of their owners; all are silent while no daemon answers."""
        regions = list(self._pages.owners.get("regions", ()))
        if any(reason["reason"] == "no_daemon" for reason in self._pages.health.reasons()):
            return [{**region, "state": "silent"} for region in regions]
        return regions

    def _behind(self) -> dict[str, float | None]:
        return worst([region["behind"] for region in self._pages.owners.get("regions", ())])

    def _run(self) -> dict[str, Any]:
        pages, meter, dlq = self._pages, self._pages.meter, self._settings.dlq
        return {
            "rows": meter.rows,
            "repeated": meter.repeated,
            "micro_batches": meter.micro_batches,
            "batch_id": meter.batch_id,
            "finished": meter.finished_at or None,
            "lag_rows": meter.rows_behind,
            "lag_seconds": meter.lag_seconds or None,
            "bad": meter.bad,
            "letters": meter.letters,
            "bad_batches": list(pages.bad_batches)[::-1],
            "dlq": dlq.mode,
        }

    def _situation(self, behind: Mapping[str, float | None], figures: Mapping[str, Any]) -> Situation:
        pages, meter = self._pages, self._pages.meter
        regions = self._regions()
        lag = meter.rows_behind
        return Situation(
            [*pages.reasons(), *of_regions(regions), *of_commits(pages.owners.get("commit_failures", ()))],
            regions=len(regions),
            behind=behind,
            most=figures["most"],
            interval=self._settings.commit.interval,
            acks=figures["acks"],
            rates=figures["rates"],
            run=True,
            gone=sorted(_silent(regions)) if any(region["state"] != "silent" for region in regions) else (),
            paused=pages.paused(),
            skewed=skew.measured(regions),
            lag_rows=None if lag is None else float(lag),
            lag_before=figures["lag_before"],
            trigger=meter.trigger,
            freshness=meter.lag_seconds if figures["acks"]["count"] or meter.lag_seconds else None,
            freshness_max=meter.freshness_max,
        )


def _region(status: Mapping[str, Any], size_max: int) -> dict[str, Any]:
    names = ("id", "bucket", "epoch", "state", "memtable_rows", "memtable_bytes", "owner")
    return {name: status[name] for name in names} | {
        "memtable_limit": size_max,
        "ssts": sum(not sst["committed"] for sst in status["ssts"]),
        "behind": status["behind"]["committed"],
        "error": status["failure"] or status["flush_error"],
    }


def _silent(regions: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the owners that did not answer."""
    return {str(region["owner"]) for region in regions if region["state"] == "silent"}


def _daemons(regions: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the owners of the regions."""
    owners, silent = dict.fromkeys(str(region["owner"]) for region in regions), _silent(regions)
    states = {owner: "silent" if owner in silent else "serving" for owner in owners}
    return [{"endpoint": owner, "here": False, "state": state, "answered": None} for owner, state in states.items()]


def _nan(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _number(value: float) -> float | None:
    return None if value != value else value
