"""`memwal restore`: copy a backup to a place without a table, so that it becomes a separate table.

 1. Read `backup.json`, and list the backup: every object must exist with its size. *Nothing is written before step 2.*
 2. Begin. The destination must be empty or, to resume, hold an unfinished restore of this backup. Create or replace the
    marker `restore-unfinished.json`, which has an id of this run. *Crash from here to 5: the destination is not a
    table. It cannot be opened or claimed, and no table can be created there; `--resume` continues.* If another program
    has created a table there in the meantime: InvalidBackup. When resuming, a table that names this backup is that of
    step 5.
 3. Copy all objects but manifests, and compare each with its checksum. *One is damaged: Corrupt, naming it.* Then copy
    the region manifests, without which no region with a log can be claimed.
 4. Create `restored.json`, which records the origin of the table, and sync a local destination.
 5. Check again that no table exists. Create the manifest of the base, with a new table id and the reference to its
    backup (`Restored`). From here on the table exists, whole. *Crash here: the marker stays; `--resume` removes it, and
    changes nothing else.*
 6. Remove the marker, and verify the table (`flush.verification`).

Invariants. (1) Nothing is written where a table exists. (2) A table that can be opened has every object of the backup,
each with its original checksum. (3) No object is replaced: a restore that was resumed while it was still running
detects the other marker before 3 and before 5 and stops, without harm to the table of the newer one.

The new id distinguishes the table from the backed-up one, which may still be running: clients reject daemons of the
other table, and readers of changes reject positions of the other table, whose log continued. Owner notes are not in a
backup. A checkpoint of Spark is accepted by either id (`pipeline.checkpoint`), because exactly-once survives:
the applied maps are those of the backup's moment. The first claim of each region raises its epoch, as always.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError

from memwal.flush.backup.contents import Piece, Vanished, turn
from memwal.flush.backup.copying import Copier, CopyRun, sha256_of
from memwal.flush.backup.record import RESTORED, Record, read_note, read_record
from memwal.flush.base.create import RESTORING
from memwal.flush.base.fsync import sync_tree
from memwal.flush.base.open import open_dataset
from memwal.flush.base.setup import TABLE, Restored, metadata_of, restored_from
from memwal.flush.base.state import versions, with_config
from memwal.flush.errors import InvalidBackup
from memwal.flush.verification.runner import Verified, verify_table
from memwal.wal import Corrupt, ObjectStore
from memwal.wal.panics import panics_as_errors

_DAMAGED = "the backup is damaged; restore another backup"
_OTHER = "another program has created a table here meanwhile; stop it, and set table.uri to a new place"


@dataclass
class RestoreRun(CopyRun):
    """One restore of the backup at the root of `source` into the root of `dest`, which is the table at `uri`.

    Thread safety. One thread.
    """

    uri: str = field(kw_only=True)


@dataclass(frozen=True)
class RestoreReport:
    """The result of a restore."""

    record: Record
    verified: Verified


@panics_as_errors
def restore(run: RestoreRun, *, resume: bool = False) -> RestoreReport:
    """Restore a backup; see the module docstring. `resume`: continue an unfinished restore of it.

    Raises InvalidBackup, before anything is written; Corrupt if the backup is damaged; OutcomeUnknown,
    StoreUnavailable, StoreRefused, OSError of either storage: run it again with `resume`.
    """
    record = read_record(run.source)
    pieces = [Piece(copied.key, copied.size) for copied in record.objects]
    sizes = {info.key: info.size for info in run.source.describe("")}
    for piece in pieces:
        if piece.key not in sizes:
            raise Corrupt(f"{run.source.url(piece.key)}: it is missing; {_DAMAGED}")
        if (size := sizes[piece.key]) != piece.size:
            what = f"it has {size:,} bytes, {piece.size:,} are recorded"
            raise Corrupt(f"{run.source.url(piece.key)}: {what}; {_DAMAGED}")
    unique = run.ids.entry_id()
    if _begin(run, record, unique, resume=resume):
        _copy(run, record, pieces, unique)
    run.dest.delete(RESTORING)
    return RestoreReport(record, verify_table(run.dest, run.uri))


def _begin(run: RestoreRun, record: Record, unique: str, *, resume: bool) -> bool:
    """Run step 2. Return whether anything is left to copy."""
    unfinished = read_note(run.dest, RESTORING)
    if unfinished is None and run.dest.list_some("", 1):
        raise InvalidBackup(
            f"{run.uri}: it is not empty, and a restore writes over nothing; set table.uri to a new place"
        )
    if unfinished is not None and unfinished.get("id") not in (None, record.id):
        raise InvalidBackup(
            f"{run.uri}: an unfinished restore of another backup is there; set table.uri to a new place"
        )
    if unfinished is not None and not resume:
        raise InvalidBackup(
            f"{run.uri}: an unfinished restore is there; if no process works on it, go on with --resume, else set "
            "table.uri to a new place"
        )
    dataset = open_dataset(run.dest, run.uri) if unfinished is not None and versions(run.dest) else None
    if dataset is not None:
        origin = restored_from(metadata_of(dataset))
        if origin is None or origin.backup != record.id:
            raise InvalidBackup(f"{run.uri}: {_OTHER}")
        return False  # it exists: its writers may be running
    note = {"id": record.id, "run": unique, "began": run.clock.now()}
    if not run.mark(RESTORING, note, replace=unfinished is not None):
        raise InvalidBackup(f"{run.uri}: another restore has begun here just now; set table.uri to a new place")
    if unfinished is None and versions(run.dest):
        run.dest.delete(RESTORING)
        raise InvalidBackup(f"{run.uri}: {_OTHER}")
    return True


def _expect_ours(run: RestoreRun, unique: str) -> None:
    """Raise InvalidBackup if another restore took over the destination."""
    if (read_note(run.dest, RESTORING) or {}).get("run") != unique:
        raise InvalidBackup(f"{run.uri}: another restore works here or has ended here; this one stops")


def _copy(run: RestoreRun, record: Record, pieces: Sequence[Piece], unique: str) -> None:
    """Run steps 3 to 5."""
    present = {info.key: info.size for info in run.dest.describe("")}
    copier = Copier(run)
    check = _checked(run.source, record)
    last = next(piece for piece in pieces if turn(piece.key) == 2)
    try:
        for phase in (0, 1):
            _expect_ours(run, unique)
            copier.copy([piece for piece in pieces if turn(piece.key) == phase], present, check)
            run.on_progress = None
        data = run.source.get(last.key)
    except Vanished as error:
        raise Corrupt(f"{run.source.url(str(error))}: it was deleted just now; {_DAMAGED}") from error
    copier.copy([Piece.of(RESTORED, record.without_objects())], present)
    sync_tree(run.dest.url(""))
    manifest = _renamed(run, record, last, data)
    _expect_ours(run, unique)
    if versions(run.dest):
        raise InvalidBackup(f"{run.uri}: {_OTHER}")
    copier.copy([Piece.of(last.key, manifest)], {})
    sync_tree(run.dest.url("_versions"))


def _checked(source: ObjectStore, record: Record) -> Callable[[Piece, str], None]:
    wanted = {copied.key: copied.sha256 for copied in record.objects}

    def check(piece: Piece, sha256: str) -> None:
        if wanted[piece.key] != sha256:
            raise Corrupt(f"{source.url(piece.key)}: its checksum is another one than recorded; {_DAMAGED}")

    return check


def _renamed(run: RestoreRun, record: Record, last: Piece, data: bytes | None) -> bytes:
    """Return the base manifest of the restored table. Raises Corrupt if that of the backup is damaged."""
    where = run.source.url(last.key)
    if data is None:
        raise Corrupt(f"{where}: it was deleted just now; {_DAMAGED}")
    _checked(run.source, record)(last, sha256_of(data))
    remembered = Restored(record.table, record.began, record.id)
    try:
        return with_config(data, {TABLE.decode(): run.ids.entry_id(), **remembered.metadata()})
    except (ValueError, struct.error, DecodeError) as error:
        raise Corrupt(f"{where}: this memwal cannot read it ({error}); restore it with the one that made it") from error
