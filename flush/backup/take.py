"""`memwal backup`: copy a table at one moment to another place, beside running writers.

 1. Begin. In an empty destination, create the marker `backup-unfinished.json`. *Crash from here to 8: the destination
    is an unfinished backup, which no restore accepts.* To resume, the destination must hold an unfinished backup of
    this table: remove the tag named by the marker, and only then replace the marker. *A marker exists at any time.*
 2. Remove tags of backups that began more than `TAGS_KEPT` ago: their processes were killed.
 3. Capture a moment (`flush.backup.moment`), and tag its base version. *Crash from here to 9: the tag stays, and with
    it one version of the base and the SSTs beside it, until step 1 or 2 of a later backup. Its name shows when the
    backup began: `memwal-backup-{UTC time}-{8 hex}`.*
 4. List its objects (`flush.backup.contents`), ordered by how soon they may vanish, and copy them under the same keys.
    *If one is missing, it was collected: remove the tag and restart at 3, at most `MOMENTS` times. Copied objects that
    also belong to the new moment are not copied again, because objects never change. If the same object is missing in
    two consecutive moments, the table is damaged (Corrupt): no collection takes what a new moment needs.*
 5. Delete objects in the destination that do not belong to this moment.
 6. Copy the manifest of the base last; the region manifests were copied after the logs and SSTs. Now the copy is a
    table.
 7. Sync a local destination.
 8. Create `backup.json` with the key, size and checksum of every object. *Crash after it: the backup is finished, and
    `--resume` does step 9.*
 9. Remove the tag, then the marker, which names it.

Invariants. (1) A backup with `backup.json` has every object that it names, whole. (2) Nothing in the table changes
except tags: no region is claimed, no writer waits. (3) Objects in the destination that do not belong to a table stay.

Two backups into one destination, because one was resumed while it was still running: the marker names the newer one.
The older one checks the marker and stops before steps 3, 5 and 8, and before it replaces a region manifest. At most one
`backup.json` is created. If the older one passes step 8 while the newer one is in step 5, a restore finds the missing
objects and rejects the backup.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import lance

from memwal.flush.backup.contents import Piece, Vanished, is_ours, pieces_of, turn
from memwal.flush.backup.copying import Copier, CopyRun
from memwal.flush.backup.moment import Moment, RegionMoment, capture
from memwal.flush.backup.record import BACKING_UP, RECORD, Copied, CopiedRegion, Record, read_note, read_record
from memwal.flush.base.fsync import sync_tree
from memwal.flush.base.table import BaseTable
from memwal.flush.base.version_files import tags_of
from memwal.flush.errors import BackupOvertaken, InvalidBackup
from memwal.wal import Corrupt, ObjectStore
from memwal.wal.panics import panics_as_errors

if TYPE_CHECKING:
    from collections.abc import Iterator

MOMENTS = 10
"""Moments that one backup captures before it fails."""
TAGS_KEPT = 7 * 86_400.0
"""Seconds. Longer than any backup takes."""
_TAG = re.compile(r"memwal-backup-(?P<time>[0-9]{8}T[0-9]{6}Z)-[0-9a-f]{8}")
_QUERY = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
"""Names of producers that may be streaming queries of Spark, whose ids are UUIDs."""
_TIME = "%Y%m%dT%H%M%SZ"
_TRIES = 3
"""Attempts to create or delete a tag."""


@dataclass
class BackupRun(CopyRun):
    """One backup of the table at the root of `source` to the root of `dest`.

    Thread safety. One thread; any number of writers, committers and collectors beside it.
    """

    base: BaseTable = field(kw_only=True)


@panics_as_errors
def back_up(run: BackupRun, *, resume: bool = False) -> Record:
    """Copy the table and return the record of the copy; see the module docstring.

    `resume`: continue the unfinished backup in the destination. Use it after any error but InvalidBackup. Raises
    InvalidBackup, before anything is written; BackupOvertaken; Corrupt if the table is damaged; OutcomeUnknown,
    StoreUnavailable, StoreRefused, OSError of either storage.
    """

    began = run.clock.now()
    unique = run.ids.entry_id()
    tag = f"memwal-backup-{datetime.fromtimestamp(began, UTC):{_TIME}}-{unique[:8]}"
    note = {"id": unique, "table": run.base.table_id, "began": began, "tag": tag}
    if (finished := _begin(run, note, resume=resume)) is not None:
        return finished
    missing = ""
    for _ in range(MOMENTS):
        _expect_ours(run, unique)
        moment = capture(run.base, run.source, run.options)
        captured = run.clock.now()
        try:
            with _tagged(moment.base, tag):
                record = _finish(run, moment, unique, began, captured)
        except Vanished as error:
            if str(error) == missing:
                raise Corrupt(
                    f"{run.base.uri}: {missing} is missing, and no collection deleted it: the table is damaged; "
                    "`memwal verify` says more"
                ) from error
            missing = str(error)
        else:
            run.dest.delete(BACKING_UP)
            return record
    raise BackupOvertaken(
        f"{run.base.uri}: collections overtook {MOMENTS} attempts, the last one deleted {missing}; raise "
        "gc.wal_age_min, or run it again"
    )


def _finish(run: BackupRun, moment: Moment, unique: str, began: float, captured: float) -> Record:
    """Run steps 4 to 8. Return the record of the backup."""
    objects = _copy(run, moment, unique)
    record = Record(
        id=unique,
        memwal=version("memwal"),
        uri=run.base.uri,
        table=run.base.table_id,
        version=moment.base.version,
        began=began,
        captured=captured,
        finished=run.clock.now(),
        regions={str(each.region): _described(moment, each) for each in moment.regions},
        queries={name: number for name, number in moment.frontier.items() if _QUERY.fullmatch(name)},
        objects=tuple(objects),
    )
    _expect_ours(run, unique)
    if not run.create(RECORD, record.encode()):
        raise InvalidBackup(f"{run.dest.url('')}: another backup was finished here meanwhile; it stays")
    return record


def _begin(run: BackupRun, note: Mapping[str, Any], *, resume: bool) -> Record | None:
    """Run steps 1 and 2.

    If a backup was killed in step 9, complete that step and return its record; else return None.
    """
    where, unfinished = run.dest.url(""), read_note(run.dest, BACKING_UP)
    if f"{where}/".startswith(f"{run.source.url('')}/"):
        raise InvalidBackup(f"{where}: it is in the table that is backed up; give a place outside of it")
    if run.dest.exists(RECORD):
        if resume and unfinished and (record := read_record(run.dest)).id == unfinished.get("id"):
            if record.table != run.base.table_id:
                raise InvalidBackup(f"{where}: it holds a backup of another table; give an empty place")
            _untag_noted(run, unfinished)
            run.dest.delete(BACKING_UP)
            return record
        raise InvalidBackup(f"{where}: it already holds a backup; give an empty place")
    if unfinished is None and run.dest.list_some("", 1):
        raise InvalidBackup(f"{where}: it is not empty; give an empty place")
    if unfinished is not None and unfinished.get("table") not in (None, run.base.table_id):
        raise InvalidBackup(f"{where}: an unfinished backup of another table is there; give an empty place")
    if unfinished is not None and not resume:
        raise InvalidBackup(
            f"{where}: an unfinished backup is there; if no process works on it, go on with --resume, else give "
            "another place"
        )
    if unfinished is not None:
        _untag_noted(run, unfinished)
    if not run.mark(BACKING_UP, note, replace=unfinished is not None):
        raise InvalidBackup(f"{where}: another backup has begun here just now; give another place")
    _remove_tags(run.base.dataset, run.clock.now() - TAGS_KEPT)
    return None


def _remove_tags(dataset: lance.LanceDataset, before: float) -> None:
    for name in tags_of(dataset):
        if (parsed := _TAG.fullmatch(name)) is not None:
            made = datetime.strptime(parsed["time"], _TIME).replace(tzinfo=UTC)
            if made.timestamp() < before:
                _untag(dataset, name)


def _untag_noted(run: BackupRun, note: Mapping[str, Any]) -> None:
    """Remove the tag of a killed backup, which its marker names."""
    if _TAG.fullmatch(str(note.get("tag"))):
        _untag(run.base.dataset, note["tag"])


@contextmanager
def _tagged(base: BaseTable, tag: str) -> Iterator[None]:
    """Keep a version of the base, and the SSTs needed beside it, while the context lasts."""
    try:
        for attempt in range(1, _TRIES + 1):
            try:
                base.dataset.tags.create(tag, base.version)
                break
            except (OSError, ValueError) as error:
                if (made := tags_of(base.dataset).get(tag)) and int(made["version"]) == base.version:
                    break  # the answer to an earlier attempt was lost
                if not base.is_kept():
                    raise Vanished(f"version {base.version}") from error
                if attempt == _TRIES:
                    raise OSError(
                        f"{base.uri}: cannot tag version {base.version}, which may be deleted: {error}"
                    ) from error
        yield
    finally:
        _untag(base.dataset, tag)


def _untag(dataset: lance.LanceDataset, tag: str) -> None:
    for _ in range(_TRIES):
        with suppress(OSError, ValueError):  # it is gone; if storage fails, a later backup removes it
            dataset.tags.delete(tag)
            return


def _expect_ours(run: BackupRun, unique: str) -> None:
    """Raise InvalidBackup if another backup took over the destination, or was finished there."""
    if (read_note(run.dest, BACKING_UP) or {}).get("id") != unique or run.dest.exists(RECORD):
        raise InvalidBackup(f"{run.dest.url('')}: another backup works here or has ended here; this one stops")


def _copy(run: BackupRun, moment: Moment, unique: str) -> list[Copied]:
    """Run steps 4 to 7. Return the copied objects."""
    pieces = pieces_of(moment, run.source)
    present = {info.key: info.size for info in run.dest.describe("")}
    copier = Copier(run, before_replacing=lambda: _expect_ours(run, unique))
    last = [piece for piece in pieces if turn(piece.key) == 2]
    copied = copier.copy([piece for piece in pieces if turn(piece.key) < 2], present)
    _expect_ours(run, unique)
    _remove_others(run.dest, pieces)
    run.on_progress = None
    copied += copier.copy(last, present)
    sync_tree(run.dest.url(""))
    return copied


def _remove_others(dest: ObjectStore, pieces: list[Piece]) -> None:
    """Run step 5. Also deletes an older manifest of the base: with it the copy would be another table."""
    wanted = {piece.key for piece in pieces}
    for key in dest.list(""):
        if key not in wanted and is_ours(key):
            dest.delete(key)


def _described(moment: Moment, each: RegionMoment) -> CopiedRegion:
    manifest, committed = each.manifest, moment.base.committed.get(each.region, 0)
    return CopiedRegion(
        epoch=manifest.writer_epoch,
        manifest=manifest.version,
        replay_after=manifest.replay_after,
        position=each.tip,
        generation=manifest.current_generation,
        committed=committed,
        ssts=sum(sst.generation > committed for sst in manifest.ssts),
    )
