"""Check a region's manifests, log and commit plans, without decoding rows.

Checked conditions:

 * Manifests: none is missing from the first kept version to the newest, each can be read (its checksum holds), and each
   follows the previous one by the numbered rules of `wal.invariants`. Without `deep` the newest thousand are read.
 * Entries above `replay_after`: none is missing below the tip, and the tip is not below the position that the manifest
   has seen, because the newest entry, which has the applied map, is never collected.
 * Every existing entry, without `deep` those above `replay_after` and a thousand below it: its checksum holds; epochs
   do not decrease and none is above the manifest's; the first entry of an epoch from 2 on is the sentinel of its claim.
   Sentinels are never collected.
 * Commit plans: each can be read; no two ranges overlap; the committed generation is the end of a range, never inside
   one, which would be half a commit.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from uuid import UUID

from memwal.flush.commits.plan import agreed, parse_plan_key, plan_key, plan_prefix
from memwal.flush.verification.finding import Finding, View, missing_text, spans
from memwal.wal import Corrupt, EntryHeader, InvariantViolation, ManifestStore, RegionManifest, check_succession
from memwal.wal.entry_reader import EntryReader
from memwal.wal.layout import entry_key, manifest_key, manifest_prefix, parse_entry_key, parse_manifest_key
from memwal.wal.layout import wal_prefix as wal_keys
from memwal.wal.manifest_garbage import pruned_below
from memwal.wal.parallel_map import each

_READERS = 8
_NEWEST = 1000
"""Manifest versions, and entries below `replay_after`, that are read without `deep`: older ones never change, and each
costs a request.
"""
_RESTORE = "restore it from a backup"


def check_chain(view: View, region: UUID) -> Iterator[Finding]:
    """Check the manifest versions of a region."""
    keys = map(parse_manifest_key, view.store.list(manifest_prefix(region)))
    listed = sorted(key.version for key in keys if key is not None)
    # An interrupted collection leaves some pruned versions, and a writer that was suspended may put one there.
    floor = pruned_below(view.store, region)
    listed = [version for version in listed if version >= floor] or listed
    if not listed:
        if any(view.store.list(wal_keys(region))):
            yield Finding("manifest", manifest_prefix(region), "it has WAL entries but no manifest", _RESTORE)
        return
    missing = sorted(set(range(listed[0], listed[-1])) - set(listed))
    for first, last in spans(missing):
        yield Finding("manifest", manifest_key(region, first), missing_text("version", first, last), _RESTORE)
    manifests = ManifestStore(view.store, region)
    newest = listed if view.deep else listed[-_NEWEST:]
    read = each(partial(_readable, manifests), newest, _READERS)
    before: RegionManifest | None = None
    for version, manifest in zip(newest, read, strict=True):
        if isinstance(manifest, Corrupt):
            what = str(manifest).partition(".binpb: ")[2].partition(";")[0] or str(manifest)
            yield Finding("manifest", manifest_key(region, version), what, _RESTORE)
            before = None
            continue
        # Without the version before, nothing is compared: it was collected, or is missing or damaged (a finding).
        if manifest is not None and version == (1 if before is None else before.version + 1):
            try:
                check_succession(before, manifest)
            except InvariantViolation as error:
                what = f"does not follow version {version - 1}: {str(error).partition(': ')[2]}"
                yield Finding("succession", manifest_key(region, version), what, _RESTORE)
        before = manifest


def _readable(manifests: ManifestStore, version: int) -> RegionManifest | Corrupt | None:
    try:
        return manifests.read(version)
    except Corrupt as error:
        return error


# ---- entries -------------------------------------------------------------------------------------------------------


def check_log(view: View, region: UUID) -> Iterator[Finding]:
    """Check the WAL of a region."""
    suffix, positions = view.base.codec.suffix, []
    for key in sorted(view.store.list(wal_keys(region))):
        parsed = parse_entry_key(key)
        if parsed is not None and parsed.suffix == suffix:
            positions.append(parsed.position)
        elif parsed is not None:
            remedy = f"stop the program that writes .{parsed.suffix} entries and flush its rows with it"
            yield Finding("entry", key, f"an entry of another format than the table's, .{suffix}", remedy)
    positions.sort()
    settled = [position for position in positions if position <= view.manifests[region].replay_after]
    unread = set() if view.deep else set(settled[:-_NEWEST])
    headers, damaged = _headers(view, region, [position for position in positions if position not in unread])
    others = {at for at, header in headers.items() if _is_of_another(header, view.manifests[region])}
    yield from _holes(view, region, [position for position in positions if position not in others])
    for position, error in damaged.items():
        what = str(error).partition(f".{suffix}: ")[2].partition(";")[0] or str(error)
        yield Finding("entry", entry_key(region, position, suffix), what, _RESTORE)
    yield from _epochs(view, region, headers, unread | damaged.keys())


def _holes(view: View, region: UUID, positions: Sequence[int]) -> Iterator[Finding]:
    manifest, suffix = view.manifests[region], view.base.codec.suffix
    tip = max(positions, default=0)
    missing = set(range(manifest.replay_after + 1, tip)) - set(positions)
    for first, last in spans(sorted(missing)):
        what = f"{missing_text('position', first, last)}, below the tip {tip}: their rows are lost to every replay"
        yield Finding("hole", entry_key(region, first, suffix), what, "restore what is missing from a backup")
    if tip < manifest.last_seen:
        what = f"the log ends at position {tip}, the manifest has seen position {manifest.last_seen}"
        where = entry_key(region, tip + 1, suffix)
        yield Finding("hole", where, what, "restore what is missing from a backup")


def _headers(view: View, region: UUID, positions: Sequence[int]) -> tuple[dict[int, EntryHeader], dict[int, Corrupt]]:
    """Return the header of each position, or its error; neither for entries that were collected in the meantime."""
    reader = EntryReader(view.store, region, view.base.codec)

    def readable(position: int) -> EntryHeader | Corrupt | None:
        try:
            return reader.header_of_any(position)
        except Corrupt as error:
            return error

    read = dict(zip(positions, each(readable, positions, _READERS), strict=True))
    headers = {position: result for position, result in read.items() if isinstance(result, EntryHeader)}
    return headers, {position: result for position, result in read.items() if isinstance(result, Corrupt)}


def _epochs(view: View, region: UUID, headers: Mapping[int, EntryHeader], unknown: Container[int]) -> Iterator[Finding]:
    manifest, suffix, previous = view.manifests[region], view.base.codec.suffix, 0
    for position, header in headers.items():
        where, epoch = entry_key(region, position, suffix), header.writer_epoch
        # The entry before it exists, or was collected; a missing or damaged entry has a separate finding.
        is_first = position - 1 in headers or (position - 1 <= manifest.replay_after and position - 1 not in unknown)
        if _is_of_another(header, manifest):
            what = "an entry of another log: a writer of a table that was deleted and made anew here wrote it"
            yield Finding("log", where, what, "end every writer of the table, and delete this object")
            continue
        if epoch < previous:
            what = f"writer epoch {epoch} follows epoch {previous}: a fenced writer's entry"
            yield Finding("epoch", where, what, "stop every writer of the region, and restore the entry from a backup")
        elif epoch > manifest.writer_epoch:
            what = f"writer epoch {epoch}, but the region was only claimed up to epoch {manifest.writer_epoch}"
            yield Finding("epoch", where, what, "restore the region's manifests from a backup")
        elif epoch > max(1, previous) and not header.sentinel and is_first:
            what = f"the first entry of writer epoch {epoch} is no sentinel: an older writer was not fenced"
            yield Finding("sentinel", where, what, "look for rows that an older writer was acknowledged for")
        previous = max(previous, epoch)


def _is_of_another(header: EntryHeader, manifest: RegionManifest) -> bool:
    """Return whether an entry belongs to a table that was deleted and recreated (`wal.errors.AnotherLog`)."""
    return manifest.log_id != "" and header.log_id not in ("", manifest.log_id)


# ---- commit plans --------------------------------------------------------------------------------------------------


def check_plans(view: View, region: UUID) -> Iterator[Finding]:
    """Check the ranges that committers agreed on."""
    ranges = []
    for key in view.store.list(plan_prefix(region)):
        parsed, data = parse_plan_key(key), view.store.get(key)
        if parsed is None or data is None:
            continue
        try:
            ranges.append((parsed[1], agreed(key, parsed[1], data)[0]))
        except Corrupt:
            yield Finding("plan", key, f"{data[:60]!r} is no commit plan from generation {parsed[1]}", _RESTORE)
    ranges.sort()
    for (first, last), (following, _) in pairwise(ranges):
        if following <= last:
            what = f"begins within the plan of generations {first} to {last}: two commits may have overlapped"
            yield Finding("plan", plan_key(region, following), what, "compare the base table with its SSTs")
    done = view.base.committed.get(region, 0)
    for first, last in ranges:
        if first <= done < last:
            what = f"generations {first} to {last} are committed together, but {done} is recorded: half a commit"
            yield Finding("plan", plan_key(region, first), what, "restore the base table from a backup")
