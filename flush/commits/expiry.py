"""Delete rows of the base table that expired a while ago; change when rows expire.

Reads filter out expired rows themselves (`flush.base.ttl`), so a collection changes no answer. It frees the space and
limits the rows that reads must filter. It runs in the committing process, after or between commits, never during one of
its own:

1. For each fragment not yet examined (identified by its files), read the oldest time of its rows. A fragment never gets
   older rows, so the value is kept as a lower bound; most collections read nothing.
2. For fragments whose oldest row expired more than GRACE seconds ago, write the deletion vectors of all such rows. The
   remaining rows are younger, so the next collection reads the oldest time again.
3. If the ttl is unchanged, create one version with these vectors, planned on the version read in step 1 and never
   retried inside Lance. Its message identifies it (`memwal log`).

A change of the ttl can land between the check and the version of step 3 without a conflict, because Lance tracks the
ttl and rows separately. Whoever changes the ttl therefore creates an empty version after it, which conflicts with every
deletion planned before, and only then returns. From then on, rows that do not expire by the new ttl are kept.

Crash points. Before step 3 nothing has happened; deletion vectors without a version are orphans. Step 3 is one Lance
version, which exists or does not. Every run depends only on the state of the table.

Another writer. Lance rejects step 3 if a later version changed one of the fragments; nothing was deleted, and the step
runs again after the interval. It succeeds if others only added rows, which are in other fragments. A commit planned
before step 3 that updates or deletes a row deleted by step 3 is rejected by Lance and restarts; a commit that updates
other rows of these fragments succeeds, with both deletions.

Why no older row of a key appears: the base is the lowest level and has one row per key. Levels above it only hold newer
rows of a key, and these take precedence whether or not they have expired.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import lance
import pyarrow as pa
import pyarrow.compute as pc
from lance.fragment import FragmentMetadata

from memwal.flush.base.setup import ttl_settings
from memwal.flush.base.shape import column_ids
from memwal.flush.base.swap import append_if_unchanged, retried
from memwal.flush.base.table import BaseTable
from memwal.flush.base.ttl import EXPIRED, Expiry, Ttl, check_ttl, integers
from memwal.wal import Clock

GRACE = 60.0
"""Seconds that an expired row is kept. Clocks of two processes may differ by this much without one deleting a row that
the other still shows.
"""
_SHARE = 100
_INTERVAL_MIN, _INTERVAL_MAX = 10.0, 3600.0
_ROWS_AT_ONCE = 20_000_000
"""Approximate number of rows whose times one collection reads. Commits wait for it, so the rest is left to the next
one.
"""

_Seen = tuple[int, tuple[str, ...]]


@dataclass
class ExpiredRows:
    """Collects the expired rows of one table, and remembers the oldest time in each fragment.

    Thread safety. One thread at a time.
    """

    _oldest: dict[_Seen, int | None] = field(default_factory=dict)
    _column: str = ""
    _complete: bool = True
    """Whether the last collection has examined every fragment."""

    def interval(self, ttl: Ttl) -> float:
        """Return the seconds until the next collection.

        This is a hundredth of the ttl, at least 10 s and at most an hour; 10 s if the last collection left fragments
        out.
        """
        return min(max(ttl.seconds / _SHARE, _INTERVAL_MIN), _INTERVAL_MAX) if self._complete else _INTERVAL_MIN

    def collect(
        self,
        dataset: lance.LanceDataset,
        expiry: Expiry,
        storage_options: Mapping[str, str],
        still: Callable[[], bool] = lambda: True,
    ) -> int:
        """Delete the expired rows of `dataset`; return their number. Moves `dataset` to the new version.

        `expiry`: rows that have expired at now - GRACE. `still`: called just before the deletion; False means that the
        ttl has changed, and nothing is deleted.
        Raises OSError (CommitConflictError is one) if another writer changed a fragment; errors of Lance.
        """
        updated, gone, rows = list[FragmentMetadata](), list[int](), 0
        for fragment, oldest in list(self._looked_at(dataset, expiry.column)):
            if oldest is None or oldest >= expiry.least:
                continue
            self._oldest.pop(_seen(fragment))  # the rest is younger: the next collection reads it again
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
        """Run step 1: yield each examined fragment with its oldest time; None if all its times are null."""
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
    """Return the identity of a fragment's rows: its files, which never change.

    After later deletions, the former oldest time remains valid as a lower bound.
    """
    data = fragment.metadata
    return fragment.fragment_id, (*(file.path for file in data.files), *map(repr, data.overlays))


def _oldest(dataset: lance.LanceDataset, fragment: lance.LanceFragment, column: str) -> int | None:
    """Return the lowest value of the time column in a fragment; None if all are null."""
    batches = dataset.scanner(columns=[column], fragments=[fragment]).to_batches()
    oldest = (pc.min(integers(pa.chunked_array([batch.column(0)]))).as_py() for batch in batches)
    return min((value for value in oldest if value is not None), default=None)


def set_ttl(base: BaseTable, ttl: Ttl | None, clock: Clock) -> BaseTable:
    """Change when rows of the table of `base` (any version) expire; None: never. Return the newest version.

    After it returns, no row is deleted by the previous ttl. If it fails, or its process is killed, call it again.
    Raises InvalidRows for a column or a time that does not fit; CommitConflict; errors of storage.
    """
    before = base.latest()
    if before.ttl == ttl:
        return before

    def change(newest: BaseTable, dataset: lance.LanceDataset) -> None:
        if ttl is not None:
            check_ttl(newest.schema, ttl)
        dataset.update_config(dict(ttl_settings(ttl, column_ids(dataset))))

    retried(base, clock, change)
    if before.ttl is not None:
        retried(base, clock, lambda newest, dataset: append_if_unchanged(dataset, (), {}, newest.storage_options))
    return base.latest()
