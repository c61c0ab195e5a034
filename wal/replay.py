"""Reading a region's log back.

Which entries count is decided by the cursor `replay_after` alone. Two rules keep the result equal to what the
writer had made visible:

 * Rows of a batch in several entries became visible together, when the entry that closes it was durable: they
   are returned just before that entry. A batch that is not closed was never acknowledged and is dropped; an
   entry of a newer epoch ends all open batches, because the writer that could have closed them is fenced.
 * Positions are consecutive. A missing one below the tip is a hole, which is corruption, not the end of the
   log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING
from uuid import UUID

from wal.codec import EntryCodec
from wal.errors import Corrupt
from wal.layout import entry_key, parse_entry_key, wal_prefix
from wal.records import Entry, EntryHeader
from wal.store import ObjectStore

if TYPE_CHECKING:
    from wal.fence import EpochGuard

_BatchKey = tuple[str, int, str]


def find_tip(store: ObjectStore, region_id: UUID, suffix: str, last_seen: int) -> int:
    """Highest existing position, 0 where there is no entry. `last_seen` is a position known to exist, 0 for
    none.

    Lists, then probes forward from the highest position listed, since a listing may lag behind. Probing alone
    would take a hole for the end of the log.
    Raises Corrupt where the region holds entries of another format, StoreUnavailable, StoreRefused.
    """
    tip = last_seen
    for key in store.list(wal_prefix(region_id)):
        if (parsed := parse_entry_key(key)) is None:
            continue
        if parsed.suffix != suffix:
            raise Corrupt(
                f"{key}: a WAL entry in .{parsed.suffix} format in a region whose entries are .{suffix}; another "
                "program writes to this region: stop it, and flush its rows with that program"
            )
        tip = max(tip, parsed.position)
    while store.exists(entry_key(region_id, tip + 1, suffix)):
        tip += 1
    return tip


def read_header(store: ObjectStore, region_id: UUID, codec: EntryCodec, position: int) -> EntryHeader:
    """Header of one entry. Raises Corrupt, naming the key, where it is missing or no whole entry."""
    key = entry_key(region_id, position, codec.suffix)
    try:
        return codec.header(_bytes(store, key, position))
    except Corrupt as error:
        raise _named(key, error) from error


def replay(
    store: ObjectStore,
    region_id: UUID,
    codec: EntryCodec,
    after: int,
    tip: int,
    *,
    guard: EpochGuard | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[Entry]:
    """Entries of closed batches at positions `after`+1 .. `tip`, without sentinels, as they became visible.

    Positions ascend except that the parts of a batch stand directly before their closing entry.
    Raises Corrupt (a hole, a damaged entry, an epoch below an earlier one's), naming the key; Fenced where
    `guard` is given and an entry has a higher epoch than the guard's.
    """
    return list(_closed(_read(store, region_id, codec, after, tip, guard, on_progress)))


def read_tail(store: ObjectStore, region_id: UUID, codec: EntryCodec, after: int) -> tuple[list[Entry], dict[str, int]]:
    """Entries after position `after` as `replay` gives them, and the newest applied map. Writes and fences
    nothing.

    Safe beside a writer: what is appended meanwhile may or may not be in the result.
    """
    tip = find_tip(store, region_id, codec.suffix, after)
    if not tip:
        return [], {}
    entries = replay(store, region_id, codec, after, tip)
    return entries, dict(read_header(store, region_id, codec, tip).applied)


def _read(
    store: ObjectStore,
    region_id: UUID,
    codec: EntryCodec,
    after: int,
    tip: int,
    guard: EpochGuard | None,
    on_progress: Callable[[int, int], None] | None,
) -> Iterator[Entry]:
    epoch = 0
    for position in range(after + 1, tip + 1):
        key = entry_key(region_id, position, codec.suffix)
        try:
            entry = codec.decode(position, _bytes(store, key, position))
        except Corrupt as error:
            raise _named(key, error) from error
        found = entry.header.writer_epoch
        if guard is not None and found > guard.epoch:
            guard.fenced_by(found)
        if found < epoch:
            raise Corrupt(f"{key}: writer epoch {found} at position {position} follows epoch {epoch}")
        epoch = found
        if on_progress is not None:
            on_progress(position - after, tip - after)
        yield entry


def _closed(entries: Iterator[Entry]) -> Iterator[Entry]:
    epoch = 0
    unclosed: dict[_BatchKey, list[Entry]] = {}
    for entry in entries:
        if entry.header.writer_epoch != epoch:
            epoch = entry.header.writer_epoch
            unclosed.clear()
        if entry.header.sentinel:
            continue
        part = entry.header.part
        if part is None:
            yield entry
            continue
        batch = (part.producer, part.sequence, part.attempt)
        if part.closes:
            yield from unclosed.pop(batch, ())
            yield entry
        else:
            unclosed.setdefault(batch, []).append(entry)


def _bytes(store: ObjectStore, key: str, position: int) -> bytes:
    data = store.get(key)
    if data is None:
        raise Corrupt(
            f"position {position} is missing, though a later entry or the manifest says that it existed: rows are lost"
        )
    return data


def _named(key: str, error: Corrupt) -> Corrupt:
    return Corrupt(f"{key}: {error}")
