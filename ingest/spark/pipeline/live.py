"""What the page of a run shows: the driver's counters, and the regions as last reported by their owners."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from memwal.ingest.errors import Unavailable
from memwal.ingest.service.daemon import query_box
from memwal.ingest.service.daemon.live import worst
from memwal.ingest.service.ops import skew
from memwal.ingest.service.ops.health import of_commits, of_regions
from memwal.ingest.service.ops.history import Sample, counts_of
from memwal.ingest.service.ops.live import levels
from memwal.ingest.service.ops.pages import Page
from memwal.ingest.service.ops.sentence import Situation, health
from memwal.ingest.settings.load import Settings
from memwal.ingest.spark.pipeline.pages import RunPages
from memwal.wal import Clock


class RunSource:
    """See `ops.live.Source`.

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
        """Return the names that a query may use; None until the table has an owner."""
        base = self._pages.base
        if base is None or self._pages.reader is None:
            return None
        return query_box.describe(base.schema, base.key, base.indexes)

    def ask(self, request: Mapping[str, Any]) -> Page:
        """Return the rows of one query, which the owners of the regions answer."""
        reader = self._pages.reader
        if reader is None:
            raise Unavailable("the daemon is being started; ask again in a moment")
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
