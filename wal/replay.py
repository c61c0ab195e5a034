"""Read a region's log back.

The cursor `replay_after` alone decides which entries count: those after it, up to the tip. They are returned in the
order of visibility. Two rules keep that equal to what was acknowledged:

 * Positions are consecutive. A missing position below the tip is a hole, which is corruption and not the end of the
   log. But if the newest manifest says that its rows are in an SST, the entry may have been collected, and the reader
   was overtaken.
 * Epochs never decrease.

Order of visibility (`BatchAssembler`). Rows of a batch of several entries become visible together, when the closing
entry is durable: its parts are returned directly before that entry, even if other entries lie between. A batch that is
not closed was never acknowledged and is dropped. An entry of a newer epoch ends all open batches, because the writer
that could have closed them is fenced.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import NoReturn
from uuid import UUID

from memwal.wal.applied import AppliedMap, read_snapshot
from memwal.wal.clock import Clock, SystemClock
from memwal.wal.codec.port import EntryCodec
from memwal.wal.entry_reader import EntryReader
from memwal.wal.errors import Corrupt, Overtaken
from memwal.wal.layout import entry_key, parse_entry_key, snapshot_key, wal_prefix
from memwal.wal.manifest import EpochGuard, ManifestStore, RegionManifest
from memwal.wal.probing import exists_beyond, newest_from
from memwal.wal.records import Entry
from memwal.wal.retries import WalOptions, with_retried_reads
from memwal.wal.store.port import ObjectStore

_BatchKey = tuple[str, int, str]


class BatchAssembler:
    """Takes a log's entries in the order of their positions, and returns them in the order of visibility.

    Thread safety. One thread.
    Invariants. (1) Sentinels are not returned. (2) Epochs never decrease. (3) Only parts of open batches are held back.
    """

    def __init__(self) -> None:
        self._epoch = 0
        self._open: dict[_BatchKey, list[Entry]] = {}

    def add(self, entry: Entry) -> list[Entry]:
        """Return the entries whose rows become visible with `entry`, in order.

        Raises Corrupt if its epoch is below an earlier entry's: a fenced writer cannot append.
        """
        epoch = entry.header.writer_epoch
        if epoch < self._epoch:
            raise Corrupt(f"writer epoch {epoch} at position {entry.position} follows epoch {self._epoch}")
        if epoch > self._epoch:
            self._epoch = epoch
            self._open.clear()
        return [] if entry.header.sentinel else self._closed_by(entry)

    def _closed_by(self, entry: Entry) -> list[Entry]:
        part = entry.header.part
        if part is None:
            return [entry]
        batch = (part.producer, part.sequence, part.attempt)
        if part.closes:
            parts = self._open.pop(batch, [])
            # The batch is applied now: other attempts at it were abandoned, and none can close it again.
            self._open = {each: held for each, held in self._open.items() if each[:2] != batch[:2]}
            return [*parts, entry]
        self._open.setdefault(batch, []).append(entry)
        return []


Progress = Callable[[int, int], None]
"""Called with the number of entries read so far, and the total."""

_PAGE = 1000
"""Keys per page of an S3 listing."""


@dataclass(frozen=True)
class Listed:
    """The result of listing a log's first objects."""

    tip: int
    """Highest position among them, 0 for none."""
    whole: bool
    """Whether they are the whole log. Then only entries that a listing may not show yet lie behind the tip."""


def find_tip(store: ObjectStore, region_id: UUID, suffix: str, last_seen: int, readers: int = 1) -> int:
    """Return the highest existing position, 0 in an empty log.

    `last_seen`: a position known to have existed, 0 for none; if entries were collected, `replay_after` or a higher
    one. (model: Tail!ListTip, Tail!ProbeTip)

    Raises: Corrupt if the region holds entries of another format or has a hole; StoreUnavailable; StoreRefused.
    """
    listed = list_tip(store, region_id, suffix)
    return tip_from(store, region_id, suffix, max(last_seen, listed.tip), listed, readers)


def list_tip(store: ObjectStore, region_id: UUID, suffix: str) -> Listed:
    """List one page of the log. Raises Corrupt if it shows entries of another format.

    Fences are kept forever, one for each claim, so a full listing grows with the age of a region. A log of less than a
    page is listed whole.
    """
    keys, tip = store.list_some(wal_prefix(region_id), _PAGE), 0
    for key in keys:
        if (parsed := parse_entry_key(key)) is None:
            continue
        if parsed.suffix != suffix:
            raise Corrupt(
                f"{key}: a WAL entry in .{parsed.suffix} format in a region whose entries are .{suffix}; "
                f'set [wal] format = "{parsed.suffix}", or, if another program writes to this region, '
                "stop that program and flush its rows with it"
            )
        tip = max(tip, parsed.position)
    return Listed(tip, len(keys) < _PAGE)


def tip_from(
    store: ObjectStore,
    region_id: UUID,
    suffix: str,
    start: int,
    listed: Listed,
    readers: int = 1,
    guard: EpochGuard | None = None,
) -> int:
    """Return the newest position, searched from `start`.

    `start` exists or is `replay_after`; above it no position is missing. If the listing did not show the whole log,
    this also probes positions behind the tip, since a hole would look like the end of the log.
    Raises: Corrupt if there is a hole; Overtaken, or Fenced by `guard`, if entries were collected meanwhile.
    """
    tip = probe_tip(store, region_id, suffix, start)
    while not listed.whole:
        beyond = exists_beyond(lambda position: store.exists(entry_key(region_id, position, suffix)), tip, readers)
        if beyond is None:
            break
        after, tip = tip, probe_tip(store, region_id, suffix, tip)
        if after == tip:
            _expect_not_passed(ManifestStore(store, region_id).latest(), region_id, tip + 1, guard)
            raise Corrupt(
                f"{entry_key(region_id, tip + 1, suffix)}: position {tip + 1} is missing, though position {beyond} "
                "exists; nothing was skipped: restore this object from a backup"
            )
    return tip


def probe_tip(store: ObjectStore, region_id: UUID, suffix: str, tip: int) -> int:
    """Return the last position before the first missing one after `tip`, with few probes; see `wal.probing`."""
    return newest_from(lambda position: store.exists(entry_key(region_id, position, suffix)), tip)


def newest_applied(reader: EntryReader, tip: int, after: int, guard: EpochGuard | None = None) -> AppliedMap:
    """Return the applied map of the newest entry, at `tip` or before, that carries one; empty if none does.

    Entries of another program carry none. At or below position `after`, a missing entry may have been collected and
    ends the search. If the snapshot that the entry names was collected, a newer entry names another snapshot, and the
    result is that entry's map.
    Raises: as `replay`.
    """
    while True:
        newest = reader.header(tip) if guard is not None and tip else None
        if guard is not None and newest is not None and newest.writer_epoch > guard.epoch:
            guard.fenced_by(newest.writer_epoch)
        position, header = reader.newest_map(tip)
        if header is None and position > after:
            _raise_missing(reader, position, guard)
        if header is None or header.applied is None:
            return AppliedMap()
        if not header.snapshot:
            return AppliedMap(header.applied)
        snapshot = read_snapshot(reader.store, reader.region_id, header.snapshot)
        if snapshot is not None:
            return AppliedMap(header.applied, snapshot)
        newer = find_tip(reader.store, reader.region_id, reader.suffix, tip)
        if newer == tip:
            raise Corrupt(
                f"{snapshot_key(reader.region_id, header.snapshot)}: missing, though {reader.key(position)} names it; "
                "restore this object from a backup"
            )
        tip = newer


def replay(
    store: ObjectStore,
    region_id: UUID,
    codec: EntryCodec,
    after: int,
    tip: int,
    *,
    guard: EpochGuard | None = None,
    on_progress: Progress | None = None,
    readers: int = 1,
    known: Mapping[int, Entry] | None = None,
    log_id: str = "",
) -> list[Entry]:
    """Return the entries of closed batches at positions `after`+1 .. `tip`, without sentinels, in the order of
    visibility.

    Positions ascend, except that the parts of a batch are directly before their closing entry. `readers` entries are
    read and decoded concurrently; 1 does everything in this thread. `known`: entries by position that need not be read.
    `log_id`: as for `EntryReader`; the guard's, if one is given.
    Raises: Corrupt (a hole, a damaged entry, an epoch below an earlier one), naming the key; Overtaken if a missing
    entry's rows are in an SST; Fenced if `guard` is given and an entry, or the manifest, has a higher epoch than the
    guard's; StoreUnavailable; StoreRefused. An error is raised before any entry behind it is used.
    """
    log_id = log_id if guard is None else guard.log_id
    reader = EntryReader(store, region_id, codec, readers, known, log_id)
    return list(visible(reader, after, tip, guard, on_progress))


def read_tail(
    store: ObjectStore,
    region_id: UUID,
    codec: EntryCodec,
    after: int,
    *,
    upto: int | None = None,
    clock: Clock | None = None,
    options: WalOptions | None = None,
    with_map: bool = True,
    log_id: str = "",
) -> tuple[list[Entry], AppliedMap]:
    """Return the entries after position `after`, as `replay` does, and the newest applied map.

    Writes nothing, fences no writer, and is safe beside a writer. Reads are retried within `options.retry_budget`.

    `after`: the `replay_after` of a manifest read before. `upto`: the last position to read, from `tail_end`; two reads
    of the same positions return the same entries. None reads to the tip: entries appended meanwhile may or may not be
    in the result. `with_map`: False returns an empty map, for callers that need only the rows. `log_id`: as for
    `EntryReader`.
    Raises: as `replay`. After Overtaken, read the manifest again, then the tail after its `replay_after`.
    """
    options = options or WalOptions()
    store = with_retried_reads(store, clock or SystemClock(), options)
    reader = EntryReader(store, region_id, codec, log_id=log_id)
    tip = find_tip(store, region_id, codec.suffix, after, options.readers) if upto is None else upto
    entries = replay(store, region_id, codec, after, tip, readers=options.readers, log_id=log_id)
    applied = newest_applied(reader, tip, after) if with_map else AppliedMap()
    if upto is None:
        _expect_not_flushed(store, region_id, tip)
    return entries, applied


def tail_end(
    store: ObjectStore,
    region_id: UUID,
    suffix: str,
    after: int,
    *,
    options: WalOptions | None = None,
) -> int:
    """Return the position of the newest entry after position `after`, or `after` without one. Reads no entries.

    `after`: as for `read_tail`. Raises: as `find_tip`; Overtaken as `read_tail`.
    """
    options = options or WalOptions()
    store = with_retried_reads(store, SystemClock(), options)
    tip = find_tip(store, region_id, suffix, after, options.readers)
    _expect_not_flushed(store, region_id, tip)
    return tip


def _expect_not_flushed(store: ObjectStore, region_id: UUID, tip: int) -> None:
    """Raise Overtaken if the newest manifest has flushed entries behind `tip`.

    A listing is several sequential requests. Entries may be appended, flushed and collected between two of them; the
    tip that it shows then lies before rows that were acknowledged long ago.
    """
    newest = ManifestStore(store, region_id).latest()
    if newest is not None and newest.replay_after > tip:
        raise Overtaken(region_id, tip + 1, newest.replay_after, newest.current_generation)


def _raise_missing(reader: EntryReader, position: int, guard: EpochGuard | None = None) -> NoReturn:
    """Raise the error for the missing entry at `position`, below the tip, according to the newest manifest.

    Fenced if a newer claim owns the region, whose flushes may have let the entry be collected; Overtaken if its rows
    are in an SST; else Corrupt. (model: Tail!ExplainMissing)
    """
    newest = ManifestStore(reader.store, reader.region_id).latest()
    _expect_not_passed(newest, reader.region_id, position, guard)
    raise Corrupt(
        f"{reader.key(position)}: position {position} is missing, though a later entry or the manifest says that it "
        "existed; nothing was skipped: restore this object from a backup"
    )


def _expect_not_passed(newest: RegionManifest | None, region_id: UUID, position: int, guard: EpochGuard | None) -> None:
    """Raise Fenced or Overtaken if the entry at `position` may have been collected, by the newest manifest."""
    if newest is not None and guard is not None and newest.writer_epoch > guard.epoch:
        guard.fenced_by(newest.writer_epoch)
    if newest is not None and newest.replay_after >= position:
        raise Overtaken(region_id, position, newest.replay_after, newest.current_generation)


def visible(
    reader: EntryReader,
    after: int,
    tip: int,
    guard: EpochGuard | None = None,
    on_progress: Progress | None = None,
    assembler: BatchAssembler | None = None,
) -> Generator[Entry, None, None]:
    """Yield the entries of `replay` one by one. `assembler`: holds the open batches of the entries up to `after`."""
    assembler = assembler or BatchAssembler()
    with closing(reader.each(range(after + 1, tip + 1))) as entries:
        for position, entry in enumerate(entries, after + 1):
            if entry is None:
                reader.header(tip)  # raises if the tip belongs to another log: then this is not a hole of this log
                _raise_missing(reader, position, guard)
            if guard is not None and entry.header.writer_epoch > guard.epoch:
                guard.fenced_by(entry.header.writer_epoch)
            try:
                visible = assembler.add(entry)
            except Corrupt as error:
                raise Corrupt(f"{reader.key(position)}: {error}") from error
            if on_progress is not None:
                on_progress(position - after, tip - after)
            yield from visible
