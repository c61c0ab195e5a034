"""List the objects of the copy of a moment. Their keys below the root are the same as in the table.

    of each region
        WAL entries   from the first one that a claim may read, to the moment's position: those above `replay_after`,
                      the newest one with the applied map and all above it, the newest of all
        one fence     the first entry of the epoch of the first of these; it shows `verify` the claim of that epoch
        a snapshot    of the applied map, if the newest map names one
        SSTs          above the base's committed generation, whole directories
        plans         of commits that the base has not finished: a half commit is repeated with the same range
        decisions     on versions of the routing, up to that of the base
        a manifest    the one of the moment, without SSTs that the base has committed
    of the base       one version: data, deletion, index and transaction files, last its manifest

Left out: pauses, notes of owners, fences and loads, older manifests, staged rows, probes, tags, other versions; and the
hint that names the newest manifest, the only object of a region that changes: the first claim rewrites it.

The tag of the base version protects what a copy needs: it keeps the version's files, and the SSTs that are not in it
(`flush.garbage.ssts`, rule 4). WAL entries are protected only by `gc.wal_age_min`. An object that is missing
nevertheless was flushed, committed and collected: `Vanished`, capture another moment.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from memwal.flush.backup.moment import Moment, RegionMoment
from memwal.flush.base.manifest import manifest_file, manifest_version
from memwal.flush.base.state import read_state
from memwal.flush.base.table import BaseTable
from memwal.flush.errors import InvalidBackup
from memwal.flush.resizing.routing import parse_routing_key, routing_prefix
from memwal.wal import Corrupt, ObjectStore, RegionManifest
from memwal.wal.entry_reader import EntryReader
from memwal.wal.layout import manifest_key, snapshot_key, sst_key

_DATA, _DELETIONS, _INDICES = "data/", "_deletions/", "_indices/"


class Vanished(Exception):
    """An object of the moment was deleted: capture another moment. The text is its key. Never leaves this package."""


@dataclass(frozen=True)
class Piece:
    """One object of a copy."""

    key: str
    size: int
    """Bytes."""
    data: bytes | None = None
    """Its bytes, if it is not read from the table."""

    @staticmethod
    def of(key: str, data: bytes) -> Piece:
        """Return a piece with known bytes."""
        return Piece(key, len(data), data)


def turn(key: str) -> int:
    """Return the phase when an object is written. Pure.

    0: first. 1: region manifests, without which no region can be claimed. 2: the manifest of the base, without which
    the table does not exist.
    """
    if manifest_version(key) is not None:
        return 2
    region, slash, name = key.partition("/manifest/")
    return int(bool(slash) and bool(name) and region.startswith("_mem_wal/"))


def pieces_of(moment: Moment, store: ObjectStore) -> list[Piece]:
    """Return the objects of `moment` in copying order: what may vanish soonest comes first.

    Raises Vanished; InvalidBackup for a shallow clone; Corrupt, StoreUnavailable, StoreRefused.
    """
    logs = [piece for region in moment.regions for piece in _of_log(moment.base, region, store)]
    others = [piece for region in moment.regions for piece in _of_region(moment.base, region, store)]
    manifests = []
    for region in moment.regions:
        manifest = _uncommitted(moment.base, region.manifest)
        key = manifest_key(region.region, manifest.version)
        if (data := store.get(key)) is None:
            raise Vanished(key)
        # Unchanged bytes if nothing is left out: they may be Lance's, whose encoding differs.
        manifests.append(Piece.of(key, data if manifest == region.manifest else manifest.encode()))
    # Only decisions that the base has switched to. A resize may decide on the next version after the moment. In a copy
    # whose regions were not sealed for it, that decision would be carried out without the steps before it.
    decided = ((info, parse_routing_key(info.key)) for info in store.describe(routing_prefix()))
    decisions = [
        Piece(info.key, info.size)
        for info, version in decided
        if version is not None and version <= moment.base.routing_version
    ]
    return [*logs, *others, *decisions, *manifests, *_of_base(moment.base, store)]


def _of_log(base: BaseTable, region: RegionMoment, store: ObjectStore) -> Iterator[Piece]:
    if not region.tip:
        return
    reader = EntryReader(store, region.region, base.codec, log_id=region.manifest.log_id)
    entries = reader.listed()
    newest, header = reader.newest_map(region.tip)
    if header is None and newest > region.manifest.replay_after:
        raise Vanished(reader.key(newest))
    first = min(region.manifest.replay_after + 1, region.tip if header is None else newest)
    for position in (*_fence(reader, entries, first), *range(first, region.tip + 1)):
        if position not in entries:
            raise Vanished(reader.key(position))
        yield Piece(entries[position].key, entries[position].size)
    if header is not None and header.snapshot:
        key = snapshot_key(region.region, header.snapshot)
        if (data := store.get(key)) is None:
            raise Vanished(key)
        yield Piece.of(key, data)


def _fence(reader: EntryReader, entries: Iterable[int], first: int) -> Sequence[int]:
    """Return the position of the first entry of the epoch of the entry at `first`, unless that is `first` itself."""
    header = reader.header(first)
    if header is None:
        raise Vanished(reader.key(first))
    if header.writer_epoch == 1:
        return ()  # no claim fenced another
    below = [position for position in entries if position < first]

    def epoch(position: int) -> int:
        if (older := reader.header(position)) is None:
            raise Vanished(reader.key(position))
        return older.writer_epoch

    return below[bisect_left(below, header.writer_epoch, key=epoch) :][:1]


def _of_region(base: BaseTable, region: RegionMoment, store: ObjectStore) -> Iterator[Piece]:
    for sst in _uncommitted(base, region.manifest).ssts:
        place = f"{sst_key(region.region, sst.path)}/"
        infos = store.describe(place)
        if not infos:
            raise Vanished(place)
        yield from (Piece(info.key, info.size) for info in infos)
    yield from (Piece.of(plan.key, plan.data) for plan in region.plans)


def _uncommitted(base: BaseTable, manifest: RegionManifest) -> RegionManifest:
    """Return `manifest` without SSTs that the base has committed: a collection may be deleting their directories."""
    committed = base.committed.get(manifest.region_id, 0)
    return replace(manifest, ssts=tuple(sst for sst in manifest.ssts if sst.generation > committed))


def _of_base(base: BaseTable, store: ObjectStore) -> list[Piece]:
    try:
        state = read_state(store, base.version)
        key, manifest = manifest_file(store, "", base.version)
    except Corrupt as error:
        raise Vanished(f"version {base.version} of the base table ({error})") from error
    if state.is_shallow:
        raise InvalidBackup(
            f"{base.uri}: it is a shallow clone, whose files are in another table; make a table of its own of it "
            "(LanceDataset.deep_clone), or back up that one"
        )
    wanted = {key for fragment in state.fragments.values() for key in fragment.files}
    deletions = {fragment.deletion_file for fragment in state.fragments.values() if fragment.deletion_file}
    data = {info.key: info for info in store.describe(_DATA)} if wanted else {}
    files = {info.key: info for info in store.describe(_DELETIONS)} if deletions else {}
    if missing := sorted((wanted - data.keys()) | (deletions - files.keys())):
        raise Vanished(missing[0])
    # Large values of a file may be in a directory of the same name beside it.
    beside = {key.removesuffix(".lance") for key in wanted}
    kept = [info for info in data.values() if info.key in wanted or info.key.rpartition("/")[0] in beside]
    kept += [files[key] for key in sorted(deletions)]
    segments = {str(segment) for segments in state.indexes.values() for segment in segments}
    kept += [info for info in store.describe(_INDICES) if info.key.removeprefix(_INDICES).partition("/")[0] in segments]
    pieces = [Piece(info.key, info.size) for info in kept]
    if state.transaction_key and (transaction := store.get(state.transaction_key)) is not None:
        pieces.append(Piece.of(state.transaction_key, transaction))
    return [*pieces, Piece.of(key, manifest)]


def is_ours(key: str) -> bool:
    """Return whether an object with this key can belong to a copy. Pure."""
    return key.startswith((_DATA, _DELETIONS, _INDICES, "_transactions/", "_versions/", "_mem_wal/"))
