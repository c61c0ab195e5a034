"""The checkpoint of a stream: where it may be, which table it belongs to, and one run at a time.

A checkpoint names its table, and a run locks a checkpoint on a local disk (reasons: README, *Decisions*).
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from memwal.flush import BaseTable
from memwal.flush.backup.record import queries_of_backup
from memwal.flush.base.setup import Restored
from memwal.ingest.errors import Invalid
from memwal.ingest.settings.load import Settings
from memwal.ingest.settings.sections import is_remote, local_path, location
from memwal.ingest.spark.checkpoint_files import LocalFiles, numbers
from memwal.ingest.spark.sink.receipts import older

MARKER = "memwal-table"
"""File in a checkpoint with the id of its table; Spark ignores unknown files."""
_CLOCKS = 60.0
"""Maximum difference, in seconds, between the clocks of the machines of a pipeline and of a backup."""
FILES = "files"
"""Directory in a checkpoint of `source.engine = "local"`; see `cli.follow`."""
LOCK = "memwal-lock"
"""File in a checkpoint that a run locks. The lock ends with the process, also after a crash; the file stays."""


def check_checkpoint(settings: Settings) -> None:
    """Raise Invalid if no checkpoint is set and the table is on object storage, which has no default checkpoint."""
    if not settings.sink.checkpoint and is_remote(settings.place):
        raise Invalid(
            "sink.checkpoint is not set, and there is no default for a table on object storage; "
            "write a local directory, or a Hadoop URL such as s3a:// if your Spark has that file system"
        )


def refuse_old_checkpoint(settings: Settings, base: BaseTable | None) -> None:
    """Raise Invalid if the checkpoint belongs to another table, or is newer than the backup of a restored table.

    `base`: None if the table does not exist yet.
    """
    if is_remote(settings.checkpoint):
        return
    files = LocalFiles(local_path(settings.checkpoint))
    if files.names(FILES):
        raise Invalid(
            f'sink.checkpoint: {settings.checkpoint} was written with source.engine = "local"; set that engine, or '
            "another checkpoint, which reads the source from its start"
        )
    if not files.names("offsets"):
        return
    marker = files.read(MARKER)
    of = None if marker is None else marker.strip()
    if base is not None and of == _identity(settings, base):
        return
    restored = None if base is None else base.restored
    if base is None or restored is None or of != restored.table:
        raise Invalid(
            f"sink.checkpoint: {settings.checkpoint} belongs to another table, not to the one at {settings.place}; "
            "delete the checkpoint to read the source from its beginning, or restore its table"
        )
    _refuse_newer(settings, restored, queries_of_backup(base))


def refuse_other_checkpoint(settings: Settings, base: BaseTable) -> None:
    """Raise Invalid if the checkpoint of `source.engine = "local"` belongs to another table, or to Spark."""
    files, place = LocalFiles(local_path(settings.checkpoint)), f"sink.checkpoint: {settings.checkpoint}"
    if files.names("offsets"):
        raise Invalid(f"{place} was written by Spark; set another one, which reads the files from the first")
    if (marker := files.read(MARKER)) is not None and marker.strip() != base.table_id:
        raise Invalid(f"{place} belongs to another table, not to the one at {base.uri}; set another one")


def _refuse_newer(settings: Settings, restored: Restored, queries: Mapping[str, int]) -> None:
    """Raise Invalid if the backup lacks micro-batches that the checkpoint counts as done: Spark would skip them.

    The last micro-batch in the backup may be in some regions only, unless it was noted as done well before the backup
    began. If it is not noted as done, Spark replays it, and regions that have it skip it. Checkpoints that `run` has
    marked with the restored table's own id are not checked.
    """
    found = noted(settings)
    if found is None:
        return
    query, _, done = found
    kept, checkpoint = queries.get(query, -1), local_path(settings.checkpoint)
    if done < 0 or done < kept:
        return
    commit = checkpoint / "commits" / str(done)
    # The clocks of the machines may differ.
    if done == kept and commit.exists() and commit.stat().st_mtime < restored.began - _CLOCKS:
        return
    fresh = "set sink.checkpoint to a new one, which reads the source from its start"
    if kept in numbers(LocalFiles(checkpoint), "offsets"):
        fresh = f"remove numbers above {kept} from its offsets, above {kept - 1} from its commits; or {fresh}"
    raise Invalid(
        f"sink.checkpoint: {settings.checkpoint} is newer than the backup that {settings.place} was restored from: "
        f"it notes micro-batch {done} as done, the backup has {f'up to {kept}' if kept >= 0 else 'none of them'}, so "
        f"rows may be left out; {fresh}"
    )


def mark_checkpoint(settings: Settings, base: BaseTable) -> None:
    """Write the id of the table into the checkpoint, before Spark writes its first offset."""
    if not is_remote(settings.checkpoint):
        # In one step: an empty marker beside offsets would belong to no table.
        LocalFiles(local_path(settings.checkpoint)).write(MARKER, f"{_identity(settings, base)}\n")


def _identity(settings: Settings, base: BaseTable) -> str:
    """Return what a checkpoint belongs to: the id of the table, or the location of many tables."""
    return location(settings.place) if settings.route.table else base.table_id


def refuse_set_back(settings: Settings, applied: Callable[[str], int | None]) -> None:
    """Raise Invalid if a region has applied a micro-batch whose offsets the checkpoint lacks: it was set back.

    Spark writes the offsets of a micro-batch before its rows are sent. With a checkpoint that was set back, it would
    reuse the number of such a micro-batch for the next rows, and the regions would skip these rows as already applied.
    Offsets without a query id are refused too: a begun micro-batch would be sent again under another id, and be applied
    twice. Checkpoints that only Spark can read are not checked.

    `applied`: returns the highest number that a region has applied of a query id.
    """
    found = noted(settings)
    if found is None:
        if not is_remote(settings.checkpoint) and numbers(LocalFiles(local_path(settings.checkpoint)), "offsets"):
            raise Invalid(
                f"sink.checkpoint: {settings.checkpoint} has offsets, but no file metadata with the id of its query; "
                "restore it, or set sink.checkpoint to a new one, which reads the source from its start"
            )
        return
    query, begun, _ = found
    newest = applied(query)
    if newest is not None and newest > begun:
        raise older(begun + 1, newest)


def noted(settings: Settings) -> tuple[str, int, int] | None:
    """Return the query id and the last micro-batches that the checkpoint notes as begun and as done.

    -1 stands for no micro-batch. None if the checkpoint has no query yet, or if only Spark can read it.
    """
    if is_remote(settings.checkpoint):
        return None
    files = LocalFiles(local_path(settings.checkpoint))
    metadata = files.read("metadata")
    if metadata is None:
        return None
    begun, done = (max(numbers(files, name), default=-1) for name in ("offsets", "commits"))
    return str(json.loads(metadata)["id"]), begun, done


@contextmanager
def locked(checkpoints: Sequence[str]) -> Iterator[None]:
    """Lock the local checkpoints among `checkpoints`. Raises: Invalid if another run on this host uses one."""
    with ExitStack() as locks:
        for checkpoint in checkpoints:
            if is_remote(checkpoint):
                continue
            directory = local_path(checkpoint)
            directory.mkdir(parents=True, exist_ok=True)
            try:
                fcntl.flock(locks.enter_context((directory / LOCK).open("ab")), fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Invalid(
                    f"sink.checkpoint: another run uses {checkpoint}; stop it, or set another checkpoint for this one"
                ) from None
        yield
