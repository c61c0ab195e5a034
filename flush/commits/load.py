"""Load: write rows that are already in files into the base table, past the log, in one version and exactly once.

    invariant: the rows of a load, and the record that it has landed, are in one version of the base, or in none.

A load is a separate region (flush.commits.load_notes): its id is derived from the token, and each attempt is a
generation. Its marker is therefore a compare-and-swap, as for the range of a commit: of any number of loads with one
token, concurrent or sequential, one lands.

The caller has checked the rows, has begun an attempt (flush.commits.load_notes), and has then flushed and committed
every row that was acknowledged earlier (model: Load!Begin, Load!Settle). Then:

 1. **Note** the token beside the table, so that `memwal log` can name it. *Crash here: a note of a load that never
    landed; the next attempt writes the same note.*
 2. **Read** the newest base version. If it has the marker, the load has landed: continue at step 6. If its columns
    differ from those that the rows were checked for, or if another process ended the attempt, the load ends.
    (model: Load!Read, Append!ReadToken)
 3. **Check** whether other programs added rows since the last commit and, if they did, whether a key has two rows
    (flush.commits.foreign_writes). If a row can be repaired, delete it and restart at step 2; any other such key ends
    the load. *Crash here: at most, a row was repaired.*
 4. **Write** the rows with the marker as a stream: with a key by one merge (flush.commits.merge_passes), without a key
    by one append (flush.commits.append_pass). On a conflict with another writer, restart at step 2. *Crash before the
    version exists: files without a version, see flush.garbage.orphans. Crash after it: loaded; the next attempt with
    the token goes from step 2 to 6.* (model: Load!Merge, Append!AppendLoad)
 5. If Lance rebased step 4 onto versions that step 3 had not read, and does not detect that both inserted one key, run
    the check of step 3 once more and delete the row of the earlier version. *Crash before this step: the next commit of
    rows, or the next attempt, does it; it looks back to the load until a commit of the same region has seen the load.*
 6. **Finish** as a commit does: Lance's marker of a table without a key, index catch-up, sync, prune.

Order of the load and a row of the same key. (model: Load!ReadManifests, Load!OpenBase, Load!Write)

 - Acknowledged before the load: the row is committed first, and the loaded row replaces it.
 - Put during the load: concurrent writes. If the put is committed when the load lands, the loaded row replaces it.
   Otherwise it hides the loaded row, and the next commit replaces the loaded row. A commit that read the base before
   the load landed conflicts if both write one row or insert one key.
 - Put after the load returned: the put replaces the loaded row. Its commit reads the base with the loaded rows, because
   it reads the region manifests before the base.
 - Deleted during the load: the delete may be ordered before the load although readers have seen it. A commit without
   upserts that read the base before the load landed does not find the loaded row.

A restore of the base to a version before the load removes the marker with the rows, so the token can be used again. The
repetition of a landed load only finishes it (`finish_load`): it has no rows, so it must never land itself. Each load
leaves a permanent record of about 40 bytes in the base.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from uuid import UUID

import pyarrow as pa

from memwal.flush.base.fsync import sync_table
from memwal.flush.base.open import LanceCaches
from memwal.flush.base.state import read_state, versions
from memwal.flush.base.swap import ConflictRetries
from memwal.flush.base.table import BaseTable
from memwal.flush.commits import foreign_writes
from memwal.flush.commits.append_pass import AppendedRows
from memwal.flush.commits.committer import finished
from memwal.flush.commits.load_notes import LoadAttempt, has_landed, load_id, next_attempt, note_token
from memwal.flush.commits.merge_passes import upsert_pass
from memwal.flush.commits.report import CommitRun
from memwal.flush.errors import CommitConflict, CountMismatch, LoadEnded
from memwal.wal import Clock, Corrupt, Ids, ObjectStore, WalOptions
from memwal.wal.panics import panics_as_errors

Step = Callable[[str], None]
"""Called with a short description of the next step."""
_CONFLICTS = (OSError, RuntimeError, ValueError, Corrupt)
"""Errors that an attempt may raise if another writer created a version in between."""


@dataclass(frozen=True)
class RowsToLoad:
    """Checked rows in base schema, each key once, that can be read several times."""

    schema: pa.Schema
    """The base schema that the rows were checked against."""
    number: int
    keys: pa.Table | None
    """The key columns of all rows; None if the table has no key."""
    batches: Callable[[], Iterator[pa.RecordBatch]]
    """Returns the same rows at each call. An exception ends the load, and nothing is written."""


@dataclass(frozen=True)
class LoadReport:
    """The result of one load. All numbers are 0 if an earlier attempt had landed."""

    id: UUID
    loaded_in: int | None
    """The base-table version with its rows; None if it was cleaned up and only later versions exist."""
    version: int
    """Base-table version afterwards, index catch-up included."""
    already: bool
    """Whether an earlier attempt had landed, so that nothing was done."""
    rows_inserted: int
    rows_replaced: int
    rows_repaired: int
    """Rows deleted because another program, or a concurrent commit, wrote the same key."""
    files_written: int
    bytes_written: int
    versions: int
    """Base-table versions created, index catch-up included."""
    seconds: float


def loaded_in(store: ObjectStore, base: BaseTable, token: str) -> int | None:
    """Return the version that added the rows of `token`.

    Returns 0 if they are not in `base`; None if that version was cleaned up. Reads a few manifests.
    Raises Corrupt, StoreUnavailable, StoreRefused.
    """
    id = load_id(token)
    if not has_landed(base.committed, id):
        return 0

    def holds(version: int) -> bool:
        try:
            return has_landed(read_state(store, version).committed, id)
        except Corrupt:  # cleaned up meanwhile
            return False

    kept = [version for version in versions(store) if version <= base.version]
    # After a restore: any version with the load; its predecessor decides.
    first = bisect_left(kept[:-1], True, key=holds)
    known = first > 0 and kept[first - 1] == kept[first] - 1
    return kept[first] if known else None


@panics_as_errors
def load(
    uri: str,
    storage_options: Mapping[str, str] | None,
    store: ObjectStore,
    rows: RowsToLoad,
    token: str,
    attempt: LoadAttempt,
    *,
    clock: Clock,
    ids: Ids | None = None,
    retries: int = 10,
    caches: LanceCaches | None = None,
    options: WalOptions | None = None,
    on_step: Step = lambda _: None,
) -> LoadReport:
    """Load `rows` into the table at `uri`, the root of `store`, unless a load with `token` has landed there.

    Steps: see the module docstring. The caller begins the attempt, commits what was acknowledged before, renews the
    note during the call, and withdraws it after the load has landed. `retries`: maximum number of consecutive
    conflicts; each costs another pass over `rows` in a table with a key. Memory holds a few batches, and the keys of
    the base while Lance merges.
    Thread safety. Any number of threads and processes; one token lands once.
    Durability. The base is synced to disk when it returns.
    Raises CommitConflict; LoadEnded, after which another attempt may be begun; CountMismatch; DoubledKey (a key has two
    rows in the base; nothing was written); what `rows.batches` raises; errors of BaseTable.open; StoreUnavailable,
    StoreRefused, OSError of storage. After any of them, load again with the same token.
    """
    began, id = clock.monotonic(), load_id(token)
    conflict_retries, caches = ConflictRetries(uri, clock, retries), caches or LanceCaches()
    storage = dict(storage_options or {})
    run = _Run(uri, storage, store, clock, ids, conflict_retries, caches, options, id=id)
    run.rows, run.attempt, run.on_step = rows, attempt, on_step
    note_token(store, id, token)
    base = run.finished()
    totals = run.totals
    return LoadReport(
        id,
        run.landed or loaded_in(store, base, token),
        base.version,
        run.landed is None,
        totals.inserted,
        totals.updated,
        totals.repaired,
        totals.files,
        totals.bytes,
        totals.versions,
        clock.monotonic() - began,
    )


@panics_as_errors
def finish_load(
    uri: str,
    storage_options: Mapping[str, str] | None,
    store: ObjectStore,
    token: str,
    *,
    clock: Clock,
    retries: int = 10,
    options: WalOptions | None = None,
) -> bool:
    """Complete a landed load with `token` whose process may have been killed. Return whether a load has landed.

    A restore of the base may have removed it since the caller checked.
    Parameters, thread safety, durability and errors: as for `load`.
    """
    conflict_retries, storage = ConflictRetries(uri, clock, retries), dict(storage_options or {})
    run = _Run(uri, storage, store, clock, None, conflict_retries, LanceCaches(), options, id=load_id(token))
    try:
        run.finished()
    except _NotLanded:
        return False
    return True


class _NotLanded(Exception):
    """No load with the token has landed, and the run has no rows."""


@dataclass(kw_only=True)
class _Run(CommitRun):
    """Steps 2 to 6 of one load.

    Thread safety. One thread only.
    """

    id: UUID
    rows: RowsToLoad | None = None
    """If None, a load that has not landed raises _NotLanded and nothing is written."""
    attempt: LoadAttempt | None = None
    on_step: Step = lambda _: None
    landed: int | None = None
    """The version with the rows, once this run has written it."""
    unchecked: bool = False
    """Whether Lance rebased the rows onto versions that step 3 has not read."""
    appended: AppendedRows | None = None
    """Without a key: the rows written last. After a conflict they are appended again, not rewritten."""
    failure: BaseException | None = None
    """The exception raised while reading the rows: Lance passes on only its text."""

    def finished(self) -> BaseTable:
        """Run all steps; return the resulting base table."""
        while (base := self._next()) is None:
            continue
        self.on_step("indexes")
        base = finished(self, base)
        sync_table(base.dataset)
        return base

    def _next(self) -> BaseTable | None:
        """Make one attempt. Return the base table once the rows are in it and checked, else None."""
        base = self.opened()
        landed = has_landed(base.committed, self.id)
        if landed and not self.unchecked and self.landed is not None:
            return base
        given = None if landed else self._given(base)
        try:
            with panics_as_errors:
                if self._repaired(base, has_landed=landed):
                    return None
                if given is None:
                    self.unchecked = False
                    return base
                self._write(base, *given)
        except (CountMismatch, CommitConflict):
            raise
        except _CONFLICTS as error:
            if self.failure is not None:
                raise self.failure from error
            self.conflict_retries.wait_if_newer(base.dataset, error)
        else:
            self.conflict_retries.reset()
        return None

    def _given(self, base: BaseTable) -> tuple[RowsToLoad, dict[UUID, int]]:
        """Return the rows and their marker. Raises _NotLanded; LoadEnded."""
        if self.rows is None or self.attempt is None:
            raise _NotLanded
        if self.attempt.generation != next_attempt(base.committed, self.id):
            raise LoadEnded(f"{self.uri}: the load was not heard of, and deletes went on without it; load again")
        return self.rows, {self.id: self.attempt.generation}

    def _repaired(self, base: BaseTable, *, has_landed: bool) -> bool:
        """Run step 3 (and 5 after 4); return whether a row was deleted. Raises DoubledKey if nothing is written yet."""
        if not base.key:
            return False
        foreign = foreign_writes.look_back(self.store, base)
        if not foreign.possible:
            return False
        keys = foreign_writes.added_keys(base, foreign)  # includes the keys of a landed load
        if self.rows is not None and self.rows.keys is not None:
            keys = pa.concat_tables([self.rows.keys, keys.cast(self.rows.keys.schema)])
        older, _, errors = foreign_writes.duplicates(base, foreign_writes.rows_with_keys(base, keys), foreign)
        for error in () if has_landed else errors.values():
            raise error
        if older:
            self.totals.repaired += foreign_writes.delete_rows(base.dataset, older)
            self.totals.versions += 1
        return bool(older)

    def _write(self, base: BaseTable, rows: RowsToLoad, marker: Mapping[UUID, int]) -> None:
        """Run step 4. Raises CommitConflict if the columns of the base have changed."""
        if base.schema != rows.schema:
            raise CommitConflict(f"{base.uri}: its columns changed while the rows were checked; load again")
        self.on_step("merging" if base.key else "appending")
        if base.key:
            read = base.version
            reader = pa.RecordBatchReader.from_batches(base.schema, self._batches(rows))
            written = upsert_pass(base.dataset, reader, base.key, marker, rows.number)
            self.landed = base.dataset.version
            self.unchecked = self.landed != read + 1 and not foreign_writes.lance_detects_duplicates(
                base.schema, base.key
            )
        else:
            if self.appended is None or not self.appended.fits(base):
                self.appended = AppendedRows(base, marker, lambda: self._batches(rows))
                self.appended.write()
            written = self.appended.append(base)
            self.landed = base.version + 1
        self.totals.wrote(written)

    def _batches(self, rows: RowsToLoad) -> Iterator[pa.RecordBatch]:
        try:
            yield from rows.batches()
        except GeneratorExit:  # Lance itself failed and reads no further
            raise
        except BaseException as error:
            self.failure = error
            raise
