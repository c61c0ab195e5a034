"""Object keys: the only module that builds and parses the keys of a region.

    _mem_wal/{region uuid}/manifest/{rev(version)}.binpb      region manifest, one object per version
    _mem_wal/{region uuid}/manifest/version_hint.json         {"version":N,"edit":"…"}; may be old or missing
    _mem_wal/{region uuid}/wal/{rev(position)}.lance|.arrow   WAL entry
    _mem_wal/{region uuid}/applied/{rev(position)}-{32 hex}.json  snapshot of the applied map (memwal)
    _mem_wal/{region uuid}/{8 hex}_gen_{generation}/…         SST, a Lance dataset
    _mem_wal/{region uuid}/owner.json                         the owner and its endpoint; advisory
    _mem_wal/{region uuid}/fences.json                        positions of the log's fences; advisory (memwal)
    _mem_wal/{region uuid}/pruned.json                        manifest versions below {"floor":N} were pruned (memwal)
    _mem_wal/probe/{8 hex}                                    start-up probe; deleted immediately (memwal)
    _mem_wal/staged/{32 hex}.arrow                            rows of a Spark task until its batch is sent (memwal)
    _mem_wal/loads/{load id}.json                             token of a load that bypasses the log; advisory (memwal)
    _mem_wal/loading/{load id}_{generation}_{32 hex}.json     an attempt at that load (memwal)
    _mem_wal/paused/{what}.json                               an operator paused {what} for this table (memwal)
    _mem_wal/paused/{what}_{n}.json                           the same, for the n-th time after the first (memwal)
    _mem_wal/paused/{what}_{n}_ended.json                     pause n has ended, from 0 on (memwal)
    _mem_wal/synced.json                                      {"version":N}: this version of the base table was
                                                              synced to a local disk (memwal)
    _mem_wal/unsynced.json                                    {"files":{…}}: files of the base table whose sync to a
                                                              local disk failed (memwal)

Keys marked "memwal" are not in Lance's specification. `rev(n)` is the 64-digit binary representation of n, reversed, so
that consecutive numbers spread over an object store's key ranges. Source: "MemTable & WAL Specification", Lance
documentation. Versions, positions and generations start at 1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Literal, NamedTuple
from uuid import UUID, uuid5

if TYPE_CHECKING:
    from memwal.wal.store.port import ObjectStore

ROOT = "_mem_wal/"
PROBE_PREFIX = ROOT + "probe/"
STAGED_PREFIX = ROOT + "staged/"
LOADING_PREFIX = ROOT + "loading/"
"""Prefix of the notes of attempts at loads (`flush.commits.load_notes`)."""
PAUSED_PREFIX = ROOT + "paused/"
SYNCED_KEY = ROOT + "synced.json"
"""Key of the number of the newest version of the base table that was synced to a local disk."""
UNSYNCED_KEY = ROOT + "unsynced.json"
"""Key of the names of files of the base table whose sync to a local disk failed."""

BUCKETS_MAX = 4096
"""Maximum number of regions of a table."""

Kind = Literal["log", "manifest", "sst", "commit", "note", "staged", "base", "other"]
"""Category of a key, for counts of requests: WAL entries and snapshots of the applied map; region manifests; SSTs;
plans of commits; notes beside the log; rows of Spark tasks; the base table; probes and listings of regions.
"""
_KINDS: dict[str, Kind] = {
    "wal": "log",
    "applied": "log",
    "manifest": "manifest",
    "commits": "commit",
    "owner.json": "note",
    "fences.json": "note",
    "pruned.json": "note",
}
_FOLDERS: dict[str, Kind] = {
    "staged": "staged",
    "paused": "note",
    "loads": "note",
    "loading": "note",
    "synced.json": "note",
    "unsynced.json": "note",
}

# LanceDB's name space for region ids, the bytes "LSMWRITE_SHARD01".
_REGION_NAMESPACE = UUID("4c534d57-5249-5445-5f53-484152443031")
UNSHARDED_REGION = uuid5(_REGION_NAMESPACE, "unsharded")
"""Id of the only region of a table whose rows are not sharded, by LanceDB's rule."""
_MAX_NUMBER = 2**64 - 1

_REGION = r"(?P<region>[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})"
_ENTRY = re.compile(rf"_mem_wal/{_REGION}/wal/(?P<rev>[01]{{64}})\.(?P<suffix>[a-z0-9]+)")
_MANIFEST = re.compile(rf"_mem_wal/{_REGION}/manifest/(?P<rev>[01]{{64}})\.binpb")
_SNAPSHOT = re.compile(rf"_mem_wal/{_REGION}/applied/(?P<rev>[01]{{64}})-(?P<id>[0-9a-f]{{32}})\.json")
_RESUMED = re.compile(r"_mem_wal/paused/(?P<what>[a-z]+)_(?P<number>0|[1-9][0-9]*)_ended\.json")
_SST_NAME = re.compile(r"(?P<token>[0-9a-f]{8})_gen_(?P<generation>[1-9][0-9]*)")
_IN_SST = re.compile(rf"_mem_wal/{_REGION}/[0-9a-f]{{8}}_gen_[1-9][0-9]*(/.*)?")


class EntryKey(NamedTuple):
    """The parts of a WAL entry's key."""

    region: UUID
    position: int
    suffix: str


class ManifestKey(NamedTuple):
    """The parts of a region manifest's key."""

    region: UUID
    version: int


class SstName(NamedTuple):
    """The parts of an SST directory's name."""

    token: str
    generation: int


def rev(number: int) -> str:
    """Return the 64 binary digits of `number`, least significant first. Raises ValueError outside 0 .. 2**64-1."""
    if not 0 <= number <= _MAX_NUMBER:
        raise ValueError(f"{number} is outside 0 .. 2**64-1")
    return f"{number:064b}"[::-1]


def parse_rev(text: str) -> int:
    """Return the number whose `rev` is `text`. Raises ValueError if `text` is not 64 binary digits."""
    if len(text) != 64 or not set(text) <= {"0", "1"}:
        raise ValueError(f"{text!r} is not 64 binary digits")
    return int(text[::-1], 2)


def bucket_region(bucket: int) -> UUID:
    """Return the region id of a bucket (from 0), by LanceDB's rule, so that one key never lands in two regions."""
    return uuid5(_REGION_NAMESPACE, f"bucket-{bucket}")


@cache
def _names() -> Mapping[str, str]:
    return {str(bucket_region(bucket)): str(bucket) for bucket in range(BUCKETS_MAX)}


def named(region: UUID | str) -> str:
    """Return the name of a region in messages: "region 3", by its bucket, or by its id if it is of no bucket."""
    return f"region {_names().get(str(region), region)}"


def kind_of(key: str) -> Kind:
    """Return the category of a key or prefix, which may have anything before it.

    Uses no regular expression, because every request calls it.
    """
    _, root, below = key.rpartition(ROOT)
    if not root:
        return "base"
    region, _, rest = below.partition("/")
    name = rest.partition("/")[0]
    if kind := _KINDS.get(name):
        return kind
    if region in _FOLDERS:
        return _FOLDERS[region]
    return "sst" if "-" in region and (not name or "_gen_" in name) else "other"


def region_prefix(region: UUID) -> str:
    """Return the prefix of everything that a region owns; ends in "/"."""
    return f"{ROOT}{region}/"


def wal_prefix(region: UUID) -> str:
    """Return the prefix of a region's WAL entries; ends in "/"."""
    return f"{ROOT}{region}/wal/"


def manifest_prefix(region: UUID) -> str:
    """Return the prefix of a region's manifests; ends in "/"."""
    return f"{ROOT}{region}/manifest/"


def manifest_key(region: UUID, version: int) -> str:
    """Return the key of a manifest version, from 1."""
    return f"{ROOT}{region}/manifest/{rev(_numbered(version, 'version'))}.binpb"


def version_hint_key(region: UUID) -> str:
    """Return the key of the hint that names the newest manifest version."""
    return f"{ROOT}{region}/manifest/version_hint.json"


def owner_key(region: UUID) -> str:
    """Return the key of the note with the endpoint of the region's owner; advisory."""
    return f"{ROOT}{region}/owner.json"


def fences_key(region: UUID) -> str:
    """Return the key of the stored list of the log's fences; it may be lost."""
    return f"{ROOT}{region}/fences.json"


def pruned_key(region: UUID) -> str:
    """Return the key of the lowest manifest version that was not pruned; for checks only, it may be lost."""
    return f"{ROOT}{region}/pruned.json"


def entry_key(region: UUID, position: int, suffix: str) -> str:
    """Return the key of a WAL entry. `position` counts from 1; `suffix` is the entry format's, "lance" or "arrow"."""
    return f"{ROOT}{region}/wal/{rev(_numbered(position, 'position'))}.{suffix}"


def snapshot_prefix(region: UUID) -> str:
    """Return the prefix of a region's snapshots of the applied map; ends in "/"."""
    return f"{ROOT}{region}/applied/"


def snapshot_key(region: UUID, name: str) -> str:
    """Return the key of the snapshot `name`: "{position}-{32 hex digits}". Raises ValueError for other names."""
    position, _, unique = name.partition("-")
    return f"{ROOT}{region}/applied/{rev(_numbered(int(position), 'position'))}-{unique}.json"


def parse_snapshot_key(key: str) -> str | None:
    """Return the name that entries use for the snapshot with this key; None for any other key."""
    found = _SNAPSHOT.fullmatch(key)
    return found and f"{parse_rev(found['rev'])}-{found['id']}"


def sst_name(token: str, generation: int) -> str:
    """Return the name of an SST directory, the `path` of the manifest's SsTable. `token` is 8 lower-case hex digits."""
    name = f"{token}_gen_{_numbered(generation, 'generation')}"
    if parse_sst_dir(name) is None:
        raise ValueError(f"{token!r} is not 8 lower-case hex digits")
    return name


def is_in_sst(folder: str) -> bool:
    """Return whether `folder`, without a slash at its end, is the directory of an SST or below one."""
    return _IN_SST.fullmatch(folder) is not None


def sst_key(region: UUID, path: str, name: str = "") -> str:
    """Return the key of `name` inside the SST directory `path` (an SsTable's path), or of the directory if `name` is
    empty.
    """
    return f"{ROOT}{region}/{path}/{name}" if name else f"{ROOT}{region}/{path}"


def load_key(id: UUID) -> str:
    """Return the key of the note with the token of a load; advisory."""
    return f"{ROOT}loads/{id}.json"


def loading_key(name: str) -> str:
    """Return the key of the note `name` of an attempt at a load."""
    return f"{LOADING_PREFIX}{name}.json"


def staged_key(unique: str) -> str:
    """Return the key of staged rows. `unique`: 32 hex digits, never used before."""
    return f"{STAGED_PREFIX}{unique}.arrow"


def paused_key(what: str, number: int = 0) -> str:
    """Return the key of the note that `what` of the table is paused. `number`: the number of earlier pauses of it."""
    return f"{PAUSED_PREFIX}{what}_{number}.json" if number else f"{PAUSED_PREFIX}{what}.json"


def resumed_key(what: str, number: int) -> str:
    """Return the key of the note that a pause has ended."""
    return f"{PAUSED_PREFIX}{what}_{number}_ended.json"


def parse_resumed_key(key: str) -> tuple[str, int] | None:
    """Return what was paused and the number of the pause; None for any other key."""
    found = _RESUMED.fullmatch(key)
    return found and (found["what"], int(found["number"]))


def parse_entry_key(key: str) -> EntryKey | None:
    """Return the parts of a WAL entry's key; None for any other key."""
    found = _ENTRY.fullmatch(key)
    return found and EntryKey(UUID(found["region"]), parse_rev(found["rev"]), found["suffix"])


def parse_manifest_key(key: str) -> ManifestKey | None:
    """Return the parts of a manifest's key; None for any other key (the version hint included)."""
    found = _MANIFEST.fullmatch(key)
    return found and ManifestKey(UUID(found["region"]), parse_rev(found["rev"]))


def parse_sst_dir(path: str) -> SstName | None:
    """Return the parts of an SST directory's name, from the name or a path that ends in it; None for any other name."""
    found = _SST_NAME.fullmatch(path.rstrip("/").rpartition("/")[2])
    return found and SstName(found["token"], int(found["generation"]))


def regions(store: ObjectStore) -> list[UUID]:
    """Return the ids of the regions with any object, ascending. Raises what the store's `children` raises."""
    return sorted(UUID(name) for name in store.children(ROOT) if re.fullmatch(_REGION, name))


def _numbered(number: int, what: str) -> int:
    if number < 1:
        raise ValueError(f"{what} {number} is not valid: numbering starts at 1")
    return number
