"""Deletes rows of the base table that expired a while ago; changes when rows expire.

Reads leave out expired rows by themselves (`flush.base.ttl`), so a collection changes no answer; it gives the space
back, and keeps the time column from being filtered for ever more rows. In steps, in the process that commits, after a
commit or between two, and never during one of its own:

1. For each fragment that was not looked at before, by its files, read the oldest time of its rows. A fragment never
   gets older rows, so that is kept as a lower bound; most collections read nothing.
2. In the fragments whose oldest row expired more than GRACE ago, write the deletion vectors of all such rows. What is
   left in them is younger, so their oldest time is read again by the next collection.
3. If the ttl is still the same, make one version of them, planned on the version that 1 read and never retried inside
   Lance. Its message names what it is (`memwal log`).

A change of the ttl is made between 3's question and its version without a conflict: Lance keeps the ttl and rows apart.
So whoever changes it makes a version without changes behind, which conflicts with every deletion that was planned
before, and only then returns: rows that do not expire by the new ttl are there from then on.

Crash points. Before 3 nothing has happened; deletion vectors that no version names are orphans. 3 is one version of
Lance's: it exists or not. Every run decides from the state of the table.

Another writer. Lance refuses 3 where a version since has changed one of the fragments: nothing was deleted, and it is
tried again after the interval. It passes where others only added rows, which are in other fragments. A commit that was
planned before 3 and updates or deletes a row that 3 deleted is refused by Lance, and begins again; one that updates
other rows of these fragments passes, with both deletions.

Why no older row of a key appears: the base is the lowest level and has one row per key. Levels above it hold newer rows
of a key only, and they count, whether they have expired or not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import lance
import pyarrow as pa
import pyarrow.compute as pc
from lance.fragment import FragmentMetadata

from memwal.flush.base.field_ids import column_ids
from memwal.flush.base.setup import ttl_settings
from memwal.flush.base.swap import append_if_unchanged
from memwal.flush.base.table import BaseTable
from memwal.flush.base.ttl import EXPIRED, Expiry, Ttl, check_ttl, integers
from memwal.flush.commits.conflict_retries import ConflictRetries
from memwal.wal import Clock
from memwal.wal.panics import panics_as_errors

GRACE = 60.0
"""Seconds for which an expired row stays. The clocks of two processes may differ by this much, and a row that one of
them still shows is deleted by none."""
_SHARE = 100
_INTERVAL_MIN, _INTERVAL_MAX = 10.0, 3600.0
_ROWS_AT_ONCE = 20_000_000
"""Rows whose times one collection reads, about; commits wait for it, so the rest is left to the next one."""
_RETRIES = 20

_Seen = tuple[int, tuple[str, ...]]


@dataclass
class ExpiredRows:
    """Collects the expired rows of one table, and remembers the oldest time in each fragment.

    Thread safety. One thread at a time.
    """

    _oldest: dict[_Seen, int | None] = field(default_factory=dict)
    _column: str = ""
    _complete: bool = True
    """Whether the last collection has looked at every fragment."""

    def interval(self, ttl: Ttl) -> float:
        """Return the seconds until the next collection: a hundredth of the ttl, at least 10 s, at most an hour; 10 s
        where the last one left fragments out.
        """
        return min(max(ttl.seconds / _SHARE, _INTERVAL_MIN), _INTERVAL_MAX) if self._complete else _INTERVAL_MIN

    def collect(
        self,
        dataset: lance.LanceDataset,
        expiry: Expiry,
        storage_options: Mapping[str, str],
        still: Callable[[], bool] = lambda: True,
    ) -> int:
        """Delete the rows of `dataset` that have expired; return their number. Moves `dataset` to the new version.

        `expiry`: what has expired at now - GRACE. `still`: asked just before the deletion; False: the ttl has changed,
        and nothing is deleted.
        Raises OSError (CommitConflictError is one) where another writer changed a fragment; errors of Lance.
        """
        updated, gone, rows = list[FragmentMetadata](), list[int](), 0
        for fragment, oldest in list(self._looked_at(dataset, expiry.column)):
            if oldest is None or oldest >= expiry.least:
                continue
            self._oldest.pop(_seen(fragment))  # what is left is younger: it is read again by the next collection
            before, after = fragment.metadata, fragment.delete(expiry.expired)
            if after is None:
                gone.append(fragment.fragment_id)
                rows += before.num_rows
            elif after.num_deletions > before.num_deletions:
                updated.append(after)
                rows += after.num_deletions - before.num_deletions
        if rows and not still():
            return 0
        if rows:
            operation = lance.LanceOperation.Delete(updated, gone, expiry.expired)
            properties = {"__lance_commit_message": EXPIRED}
            transaction = lance.Transaction(dataset.version, operation, transaction_properties=properties)
            options = dict(storage_options)
            lance.LanceDataset.commit(dataset, transaction, storage_options=options, max_retries=0)
            dataset.checkout_latest()  # type: ignore[no-untyped-call]
        return rows

    def _looked_at(self, dataset: lance.LanceDataset, column: str) -> Iterator[tuple[lance.LanceFragment, int | None]]:
        """Step 1: yield each fragment that was read by now, with its oldest time; None where it has none."""
        if column != self._column:
            self._oldest, self._column = {}, column
        fragments, left = dataset.get_fragments(), _ROWS_AT_ONCE
        present = {_seen(each) for each in fragments}
        self._oldest = {seen: oldest for seen, oldest in self._oldest.items() if seen in present}
        self._complete = False
        for fragment in fragments:
            seen = _seen(fragment)
            if seen not in self._oldest and left > 0:
                self._oldest[seen] = _oldest(dataset, fragment, column)
                left -= fragment.metadata.num_rows
            if seen in self._oldest:
                yield fragment, self._oldest[seen]
        self._complete = len(self._oldest) == len(present)


def _seen(fragment: lance.LanceFragment) -> _Seen:
    """Return what identifies the rows of a fragment: its files never change. Rows that are deleted later leave what was
    its oldest time as a lower bound.
    """
    data = fragment.metadata
    return fragment.fragment_id, (*(file.path for file in data.files), *map(repr, data.overlays))


def _oldest(dataset: lance.LanceDataset, fragment: lance.LanceFragment, column: str) -> int | None:
    """Return the least value of the time column in a fragment; None where all are null."""
    batches = dataset.scanner(columns=[column], fragments=[fragment]).to_batches()
    oldest = (pc.min(integers(pa.chunked_array([batch.column(0)]))).as_py() for batch in batches)
    return min((value for value in oldest if value is not None), default=None)


def set_ttl(base: BaseTable, ttl: Ttl | None, clock: Clock) -> BaseTable:
    """Change when rows of the table of `base`, any of its versions, expire; None: never. Return the newest version.

    Once it has returned no row is deleted by the ttl before. If it fails, or its process is killed, call it again.
    Raises InvalidRows for a column or a time that does not fit; CommitConflict; errors of storage.
    """
    retries, before = ConflictRetries(base.uri, clock, _RETRIES), base.latest()
    if before.ttl == ttl:
        return before

    def change(newest: BaseTable) -> None:
        if ttl is not None:
            check_ttl(newest.schema, ttl)
        settings = ttl_settings(ttl, column_ids(newest.dataset))
        newest.dataset.checkout_version(newest.version).update_config(dict(settings))

    changed = _changed(base, change, retries)
    if before.ttl is None:
        return changed
    return _changed(base, lambda newest: append_if_unchanged(newest.dataset, (), {}, newest.storage_options), retries)


def _changed(base: BaseTable, change: Callable[[BaseTable], object], retries: ConflictRetries) -> BaseTable:
    """Apply `change` to the newest version, again after each conflict; return the newest version then."""
    while True:
        newest = base.latest()
        try:
            with panics_as_errors:
                change(newest)
            return base.latest()
        except (OSError, RuntimeError, ValueError) as error:
            if newest.dataset.latest_version == newest.version:
                raise
            retries.wait(error)
