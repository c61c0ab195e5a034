"""The fences found by earlier collections, stored so that a new process need not read every entry.

    _mem_wal/{region uuid}/fences.json
    {"fences": [[position, last position, epoch], …],     runs of fences, position and epoch rising by one
     "entry_id": "…",                                      of the last fence: proves that it is the same log
     "crc32": "8 hex digits"}                              of this object with these digits as "00000000"

The object is advisory: losing it costs only reads. A wrong one could cost a fence, so it is used only if its checksum
matches and its last fence is in the log with that entry id. Entries never change, so the entries below are then the
same too. Entries written by Lance have no entry id; each process reads a log whose fences are all Lance's again.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from uuid import UUID

from memwal.wal.errors import Corrupt, WalError
from memwal.wal.layout import fences_key
from memwal.wal.records import EntryHeader
from memwal.wal.store.port import ObjectStore

_NO_CHECKSUM = "0" * 8

Header = Callable[[int], EntryHeader | Corrupt | None]


class FenceIndex:
    """The stored fences of one region, as position -> writer epoch.

    Thread safety. One thread at a time; any number of processes, and the last one to save wins.
    """

    def __init__(self, store: ObjectStore, region_id: UUID, header: Header) -> None:
        self._store, self._key, self._header = store, fences_key(region_id), header
        self._saved: Mapping[int, int] = {}

    def load(self) -> Mapping[int, int]:
        """Return the fences stored for this log; {} if missing or of another log. Makes two requests.

        Raises: StoreUnavailable, StoreRefused.
        """
        self._saved = self._believed(self._store.get(self._key))
        return self._saved

    def save(self, fences: Mapping[int, int]) -> None:
        """Store `fences`, unless they are stored already or the last has no entry id. Storage errors are ignored."""
        if fences == self._saved or not fences:
            return
        last = self._header(max(fences))
        if not isinstance(last, EntryHeader) or not last.entry_id:
            return
        try:
            self._store.put(self._key, _encode(fences, last.entry_id))
        except WalError:
            return
        self._saved = dict(fences)

    def _believed(self, data: bytes | None) -> Mapping[int, int]:
        if data is None or (read := _decode(data)) is None:
            return {}
        fences, entry_id = read
        last = self._header(max(fences))
        same = isinstance(last, EntryHeader) and last.entry_id == entry_id and last.writer_epoch == fences[max(fences)]
        return fences if same else {}


def _encode(fences: Mapping[int, int], entry_id: str) -> bytes:
    runs: list[list[int]] = []
    for position, epoch in sorted(fences.items()):
        if runs and position == runs[-1][1] + 1 and epoch == runs[-1][2] + position - runs[-1][0]:
            runs[-1][1] = position
        else:
            runs.append([position, position, epoch])
    document = {"fences": runs, "entry_id": entry_id, "crc32": _NO_CHECKSUM}
    checksum = zlib.crc32(json.dumps(document).encode())
    return json.dumps(document | {"crc32": f"{checksum:08x}"}).encode()


def _decode(data: bytes) -> tuple[dict[int, int], str] | None:
    """Return the fences and the entry id of the last one; None if `data` is not a result of `_encode`."""
    try:
        document = json.loads(data)
        blank = json.dumps(document | {"crc32": _NO_CHECKSUM}).encode()
        if int(document["crc32"], 16) != zlib.crc32(blank) or not document["fences"]:
            return None
        runs, entry_id = document["fences"], document["entry_id"]
        return {at: epoch + at - first for first, last, epoch in runs for at in range(first, last + 1)}, entry_id
    except (ValueError, TypeError, KeyError):
        return None
