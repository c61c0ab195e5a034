"""Check that everything on storage satisfies the protocols: `memwal verify`. Reads only; safe while writers run.

 1. Take a view: the newest manifest of every region, then the newest version of the base.
 2. Every check reads its objects and yields findings. `deep` checks read all rows of objects without a finding.
 3. A finding may be a change in progress: an entry written while the log was listed, or an SST that was committed and
    collected. Before it is reported, the check is therefore repeated on a fresh view, and only findings of both runs
    count. Repeat until nothing was published, committed or claimed between two views, or five times. No object that a
    view of an unchanged table needs is collected, and an entry missed by one listing is in the next one.

A crash of this program leaves nothing behind. It repairs nothing: each finding has a remedy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from uuid import UUID

from memwal.flush.verification import base
from memwal.flush.verification.finding import Check, Finding, View, take_view
from memwal.flush.verification.log import check_chain, check_log, check_plans
from memwal.flush.verification.rows import check_fingerprint, check_tail
from memwal.flush.verification.sst import check_list, check_parts, check_rows
from memwal.wal import ObjectStore, SsTable, named

_TRIES = 5

Progress = Callable[[str, int, int], None]
"""Called with the name of the next check, the number of checks done, and their total."""


@dataclass(frozen=True)
class Verified:
    """The result of a verification."""

    version: int
    """Base-table version."""
    regions: int
    ssts: int
    checks: int
    deep: bool
    findings: tuple[Finding, ...]


def verify_table(
    store: ObjectStore,
    uri: str,
    *,
    deep: bool = False,
    on_progress: Progress | None = None,
) -> Verified:
    """Check the table at `uri`, the root of `store`; with `deep` read every row, one SST or one log at a time.

    With `deep`, memory holds the key columns of the base table.
    Thread safety. Any thread; writes nothing.
    Raises what BaseTable.open raises; StoreUnavailable, StoreRefused, OSError of storage.
    """
    view = take_view(store, uri, deep=deep)
    runner = _Runner(partial(take_view, store, uri, deep=deep), view)
    shallow = list(_shallow(view))
    findings: list[Finding] = []

    def run(checks: Sequence[tuple[str, Check]], begin: int) -> None:
        for done, (what, check) in enumerate(checks, begin):
            if on_progress is not None:
                on_progress(what, done, begin + len(checks))
            findings.extend(runner.confirmed(check))

    run(shallow, 0)
    broken = tuple(finding.where for finding in findings)
    following = list(_deep(view, broken)) if deep else []
    run(following, len(shallow))
    ssts = sum(len(manifest.ssts) for manifest in view.manifests.values())
    count = len(shallow) + len(following)
    return Verified(view.base.version, len(view.regions), ssts, count, deep, tuple(findings))


def _shallow(view: View) -> Iterator[tuple[str, Check]]:
    """Yield name and function of the checks of every verification."""
    yield "base table", base.check_files
    yield "columns", base.check_fit
    yield "indexes", base.check_indexes
    yield "progress", base.check_marker
    yield "routing", base.check_routing
    for region in view.regions:
        yield f"manifests of {named(region)}", partial(check_chain, region=region)
        yield f"commit plans of {named(region)}", partial(check_plans, region=region)
        yield f"log of {named(region)}", _of_region(region, check_log)
        yield f"SSTs of {named(region)}", _of_region(region, check_list)
        yield f"SSTs of {named(region)}", _of_region(region, _of_ssts(check_parts))


def _deep(view: View, broken: tuple[str, ...]) -> Iterator[tuple[str, Check]]:
    """Yield the checks that read rows, without places in `broken`: they would be reported again."""
    if not any(where.startswith("_indices/") for where in broken):
        yield "files of the indexes", base.check_index_rows
    yield "history of the base table", base.check_returned
    if not any(where.startswith(("data/", "_deletions/")) for where in broken):
        yield "rows of the base table", base.check_base_rows
    for region, manifest in view.manifests.items():
        log = f"_mem_wal/{region}/wal/"
        if not any(where.startswith(log) for where in broken):
            yield f"rows in the log of {named(region)}", _of_region(region, check_tail)
        for sst in manifest.ssts:
            place = f"_mem_wal/{region}/{sst.path}/"
            if not any(where.startswith(place) for where in broken):
                yield f"SST {sst.path}", _of_region(region, _of_ssts(check_rows, sst.path))
                yield f"SST {sst.path} and its log", _of_region(region, _of_ssts(check_fingerprint, sst.path))


_RegionCheck = Callable[[View, UUID], Iterator[Finding]]
_SstCheck = Callable[[View, UUID, SsTable], Iterator[Finding]]


def _of_region(region: UUID, check: _RegionCheck) -> Check:
    """Return `check` for one region; it does nothing if the region's manifest cannot be read."""

    def run(view: View) -> Iterator[Finding]:
        if region in view.manifests:
            yield from check(view, region)

    return run


def _of_ssts(check: _SstCheck, path: str | None = None) -> _RegionCheck:
    """Return `check` for the SSTs that a region lists now, or only for the one at `path`."""

    def run(view: View, region: UUID) -> Iterator[Finding]:
        for sst in view.manifests[region].ssts:
            if path in (None, sst.path):
                yield from check(view, region, sst)

    return run


class _Runner:
    """Runs checks, and distinguishes damage from changes in progress; see step 3 of the module docstring.

    Thread safety. One thread.
    """

    def __init__(self, take: Callable[[], View], view: View) -> None:
        self._take, self._view = take, view

    def confirmed(self, check: Check) -> list[Finding]:
        """Return the findings that every run of `check` has."""
        view = self._view
        findings = list(check(view))
        for _ in range(_TRIES):
            if not findings:
                return []
            before = view
            view = self._view = self._take()  # later checks begin with it too
            again = {(finding.check, finding.where): finding for finding in check(view)}
            findings = [again[same] for one in findings if (same := (one.check, one.where)) in again]
            if view.versions == before.versions:
                break
        return findings
