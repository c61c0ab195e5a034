"""`backup.json`: the contents of a backup. It is written last, so a backup without it is not finished.

    backup.json              {"format": 1, "id": "32 hex", "memwal": "0.1.0", "uri", "table", "version", "began",
                              "captured", "finished", "regions": {region: {…}}, "queries": {query: batch_id},
                              "objects": [{"key", "size", "sha256"}, …]}
    backup-unfinished.json   {"id", "table", "began", "tag"} while a backup is written
    restore-unfinished.json  {"id", "run", "began"} while a restore is written: ids of the backup and of the run
    restored.json            in a restored table: backup.json without the objects

Times are Unix seconds by the clock of the process that made the backup. Every write acknowledged before `began` is in
the backup; none that began after `captured` is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from memwal.flush.backup.contents import is_ours
from memwal.flush.base.table import BaseTable
from memwal.flush.errors import InvalidBackup
from memwal.wal import Corrupt, ObjectStore, open_store

RECORD = "backup.json"
BACKING_UP = "backup-unfinished.json"
RESTORED = "restored.json"
_FORMAT = 1


@dataclass(frozen=True)
class Copied:
    """One object of a backup."""

    key: str
    size: int
    """Bytes."""
    sha256: str


@dataclass(frozen=True)
class CopiedRegion:
    """One region in a backup."""

    epoch: int
    manifest: int
    """Version of its manifest."""
    replay_after: int
    position: int
    """Position of its last WAL entry."""
    generation: int
    """The generation of its next SST."""
    committed: int
    """The highest generation whose rows are in the base table."""
    ssts: int


@dataclass(frozen=True)
class Record:
    """The contents of a `backup.json`. See the module docstring.

    Thread safety. Immutable.
    """

    id: str
    memwal: str
    """Version of memwal that made it."""
    uri: str
    """Location of the table."""
    table: str
    """Id of the table."""
    version: int
    """Version of the base table."""
    began: float
    captured: float
    finished: float
    regions: Mapping[str, CopiedRegion]
    queries: Mapping[str, int]
    """Per streaming query of Spark, the number of its last micro-batch. Regions that lack it had none of its rows, or
    get them when it is replayed. Includes other producers whose names are UUIDs.
    """
    objects: tuple[Copied, ...]

    @property
    def size(self) -> int:
        """Bytes of all objects."""
        return sum(copied.size for copied in self.objects)

    def encode(self) -> bytes:
        """Return the bytes of `backup.json`."""
        return json.dumps({"format": _FORMAT, **asdict(self)}, indent=1).encode()

    def without_objects(self) -> bytes:
        """Return the bytes of `restored.json`."""
        said = {name: value for name, value in asdict(self).items() if name != "objects"}
        return json.dumps({"format": _FORMAT, **said}, indent=1).encode()


def queries_of_backup(base: BaseTable) -> Mapping[str, int]:
    """Return `Record.queries` of the backup that the table `base` was restored from; {} if its note was lost.

    Raises StoreUnavailable, StoreRefused.
    """
    note = read_note(open_store(base.uri, base.storage_options), RESTORED) or {}
    queries: Mapping[str, int] = note.get("queries", {})
    return queries


def read_record(store: ObjectStore) -> Record:
    """Return the record of the backup at the root of `store`.

    Raises InvalidBackup if it holds no finished backup; Corrupt; StoreUnavailable, StoreRefused.
    """
    where, data = store.url(""), store.get(RECORD)
    if data is None and store.exists(BACKING_UP):
        raise InvalidBackup(
            f"{where}: the backup is not finished, {RECORD} is missing; run `memwal backup` with --resume, or restore "
            "another backup"
        )
    if data is None:
        raise InvalidBackup(f"{where}: no backup is there, {RECORD} is missing; give the DEST of a `memwal backup`")
    try:
        said = json.loads(data)
        if said.pop("format") != _FORMAT:
            raise InvalidBackup(f"{where}: a newer memwal made the backup; restore it with that version")
        regions = {name: CopiedRegion(**region) for name, region in said.pop("regions").items()}
        objects = tuple(Copied(**copied) for copied in said.pop("objects"))
        if strange := [copied.key for copied in objects if not is_ours(copied.key) or ".." in copied.key.split("/")]:
            raise ValueError(f"{strange[0]!r} is no object of a table")
        return Record(regions=regions, objects=objects, **said)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise Corrupt(f"{store.url(RECORD)}: it is damaged ({error}); restore another backup") from error


def read_note(store: ObjectStore, key: str) -> Mapping[str, Any] | None:
    """Return the content of an unfinished-marker; {} if it cannot be parsed, None if it is missing."""
    data = store.get(key)
    if data is None:
        return None
    try:
        note = json.loads(data)
    except ValueError:
        return {}
    return note if isinstance(note, dict) else {}
