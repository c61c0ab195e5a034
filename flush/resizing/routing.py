"""Decide the routing version of a table once for all processes, switch the table to it, and open its regions.

    {table}/_mem_wal/{bucket-0}/routing/{rev(version)}.json
        {"routing": 2, "buckets": 8, "applied": {"loader": 17}, "by": "1f3a90cc…", "retired": "base64"}
        retired: as in wal.applied; absent if no name is retired

The object is created once, by a conditional create, when all regions of the previous version and of this one are sealed
and drained (`flush.resizing.steps`). This version then follows, with this number of buckets, and all of its regions
begin with this applied map. Any process, or several concurrently, may do the remaining steps:

 1. **Switch**: create one version of the base table. In lance format it sets `memwal:routing` and `memwal:regions` in
    the schema metadata; in arrow format it sets the sharding spec in the details of Lance's MemWAL index, whose id is
    the routing version, so that Lance's own writers and readers route by it too. Nothing else changes. The progress
    need not: every published generation is committed, and no region publishes one before it is opened. (Loads have
    separate progress, which is restored: `with_its_loads`.) The switch is refused if a region takes writes
    by an older version: the decision then came with a copy of the table that lacks the seals.
 2. **Sync** the switch, whichever process made it: a power cut that took it back would leave regions that take writes
    by a routing that the table does not have.
 3. **Open** every region of the new version: see `wal.fence`, `opening`. Other regions stay sealed.

The switch is a compare-and-swap: Lance rejects it if the same metadata, or the index, was replaced since the version
read. The objects are never deleted: they are few and small, and a suspended resizer aims at the same slot.

Loads that landed just before the switch. In arrow format the switch replaces Lance's MemWAL index, which holds the
markers. No commit can come in between, because every region is sealed. But a load belongs to no region, and Lance
detects no conflict with it: it rebases the new index, planned on a version without the load. Until a region is opened
nothing else is committed, so a repeated load would write the same rows again; after that it would undo newer ones. The
process that opens the regions therefore restores the markers first. *Crash before this: the regions are sealed, and the
next process does it.*
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from threading import Lock
from typing import Any
from uuid import UUID

import lance
from google.protobuf import descriptor_pb2
from lance.bitmap import Bitmap
from lance.dataset import Index

from memwal import wal
from memwal.flush.base.fsync import sync_table
from memwal.flush.base.manifest import MEM_WAL_INDEX, highest, mem_wal_details
from memwal.flush.base.setup import REGIONS, ROUTING
from memwal.flush.base.sharding import bucket_regions
from memwal.flush.base.state import read_state
from memwal.flush.base.swap import ConflictRetries
from memwal.flush.base.table import BaseTable
from memwal.flush.commits.append_pass import mark
from memwal.flush.commits.load_notes import loads_in
from memwal.wal.applied import AppliedMap, Snapshot, decoded_hashes, encoded_hashes
from memwal.wal.layout import parse_rev, region_prefix, rev
from memwal.wal.panics import panics_as_errors
from memwal.wal.parallel_map import AT_ONCE, each
from memwal.wal.region_manifest import MessageFields, message_classes
from memwal.wal.slot import put_until_known

_Field = descriptor_pb2.FieldDescriptorProto
_FIELDS: MessageFields = {
    "Entry": ((1, "key", _Field.TYPE_STRING), (2, "value", _Field.TYPE_STRING)),
    "ShardingField": ((6, "parameters", "Entry[]"),),
    "ShardingSpec": ((1, "spec_id", _Field.TYPE_UINT32), (2, "fields", "ShardingField[]")),
    "MemWalIndexDetails": ((2, "num_shards", _Field.TYPE_UINT32), (7, "sharding_specs", "ShardingSpec[]")),
}
_OPENINGS = 10
"""Attempts to claim one region; another process that finishes the resize may overtake each attempt."""
_RETRIES = 10


@dataclass(frozen=True)
class Decision:
    """The decision on one version of the routing."""

    routing: int
    buckets: int
    applied: Mapping[str, int]
    by: str


def routing_prefix() -> str:
    """Return the prefix of the keys of all decisions; ends in "/"."""
    return f"{region_prefix(wal.bucket_region(0))}routing/"


def routing_key(version: int) -> str:
    """Return the key of the decision on a version of the routing."""
    return f"{routing_prefix()}{rev(version)}.json"


def parse_routing_key(key: str) -> int | None:
    """Return the version decided by the object at `key`; None for any other key."""
    name = key.removeprefix(routing_prefix())
    try:
        return parse_rev(name.removesuffix(".json")) if name.endswith(".json") else None
    except ValueError:
        return None


def decided(store: wal.ObjectStore, version: int) -> Decision | None:
    """Return the decision on `version`; None if it is undecided. Raises Corrupt, StoreUnavailable, StoreRefused."""
    data = store.get(routing_key(version))
    return None if data is None else _parsed(routing_key(version), data)


def decide(store: wal.ObjectStore, proposed: Decision, *, clock: wal.Clock, options: wal.WalOptions) -> Decision:
    """Return the decision on the version: `proposed`, or an earlier one of another process.

    Requires: every region of the previous version and of `proposed` is sealed and drained.
    Raises Corrupt; OutcomeUnknown, StoreUnavailable, StoreRefused (harmless: resize again).
    """
    key = routing_key(proposed.routing)
    described = {**vars(proposed), "applied": dict(proposed.applied)}
    if len(retired := AppliedMap.of(proposed.applied).snapshot.retired):
        described["retired"] = encoded_hashes(retired)
    existing = put_until_known(store, key, json.dumps(described).encode(), clock=clock, options=options)
    return proposed if existing is None else _parsed(key, existing)


def finish(
    base: BaseTable,
    store: wal.ObjectStore,
    *,
    clock: wal.Clock,
    ids: wal.Ids,
    options: wal.WalOptions,
    at_once: int = AT_ONCE,
    ended: dict[UUID, wal.Released] | None = None,
) -> BaseTable:
    """Switch to decided versions and open their regions. Return the newest base version, or `base` itself.

    `at_once`: regions opened in parallel. `ended`: notes of the claims that have sealed regions, which save requests;
    gets those of the claims that open them.
    Raises CommitConflict; Corrupt, also for a decision whose regions were never sealed; OutcomeUnknown,
    StoreUnavailable, StoreRefused, OSError of storage. After any of them, finish again.
    """
    while (following := decided(store, base.routing_version + 1)) is not None:
        regions = {*base.regions, *bucket_regions(following.buckets)}
        manifests = (wal.ManifestStore(store, region).latest() for region in regions)
        if found := never_sealed(base, following, (each for each in manifests if each is not None)):
            # After the switch no process could claim these regions.
            raise wal.Corrupt(
                f"{base.uri}: {routing_key(following.routing)} decides on routing version {following.routing}, but "
                f"{wal.named(found[0].region_id)} takes writes by version {found[0].spec_id}: it came with a backup "
                "that was made beside a resize; delete this object"
            )
        base = _switched(base, store, following, clock, ids)
    done = decided(store, base.routing_version)
    if done is not None:
        base = with_its_loads(base, store)
        on_disk, ended = cache(partial(sync_table, base.dataset)), {} if ended is None else ended
        opened = partial(_open, base, store, done, Lock(), on_disk, ended, clock=clock, ids=ids, options=options)
        for _ in each(opened, base.regions, at_once):
            continue
    return base


def never_sealed(base: BaseTable, to: Decision, manifests: Iterable[wal.RegionManifest]) -> list[wal.RegionManifest]:
    """Return the manifests of regions that take writes by a version before `to`. Pure.

    A non-empty result means that `to` was not decided on this table in its present state: once `to` is decided, each of
    its regions is sealed, or was opened by `to` or a later version.
    """
    regions = {*base.regions, *bucket_regions(to.buckets)}
    older = (each for each in manifests if each.region_id in regions and each.spec_id < to.routing)
    return [each for each in older if each.status is not wal.RegionStatus.SEALED]


def _parsed(key: str, data: bytes) -> Decision:
    try:
        stored = json.loads(data)
        applied = {str(name): int(number) for name, number in stored["applied"].items()}
        begun = AppliedMap(applied, Snapshot(retired=decoded_hashes(stored.get("retired", ""))))
        return Decision(int(stored["routing"]), int(stored["buckets"]), begun, str(stored["by"]))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise wal.Corrupt(f"{key}: {data[:80]!r} is not a routing decision; restore it from a backup") from error


# ---- 1: switch -----------------------------------------------------------------------------------------------------


def _switched(base: BaseTable, store: wal.ObjectStore, to: Decision, clock: wal.Clock, ids: wal.Ids) -> BaseTable:
    conflict_retries, base = ConflictRetries(base.uri, clock, _RETRIES, "run it again"), base.latest()
    while base.routing_version < to.routing:
        if base.wal_format == "arrow":
            operation = _of_spec(base, store, to, ids)
        else:
            updates: dict[str, str | None] = {ROUTING.decode(): str(to.routing), REGIONS.decode(): str(to.buckets)}
            schema_updates = lance.LanceOperation.UpdateMap(updates=updates, replace=False)
            operation = lance.LanceOperation.UpdateConfig(schema_metadata_updates=schema_updates)
        transaction = lance.Transaction(read_version=base.version, operation=operation)
        try:
            lance.LanceDataset.commit(
                base.dataset, transaction, storage_options=dict(base.storage_options), max_retries=0
            )
        except (OSError, RuntimeError, ValueError) as error:
            conflict_retries.wait_if_newer(base.dataset, error)
        base = BaseTable.open(base.uri, base.storage_options, caches=base.caches)
    return base


def _of_spec(base: BaseTable, store: wal.ObjectStore, to: Decision, ids: wal.Ids) -> Any:
    """Return the operation that replaces the MemWAL index by one with the new sharding spec and another id."""
    kind, stored = mem_wal_details(store, base.version)
    details = _DETAILS.FromString(stored)
    details.num_shards = to.buckets
    (spec,) = details.sharding_specs
    spec.spec_id = to.routing
    for parameter in spec.fields[0].parameters:
        if parameter.key == "num_buckets":
            parameter.value = str(to.buckets)
    (old,) = (index for index in base.dataset.describe_indices() if index.name == MEM_WAL_INDEX)
    new = _segment(base, str(ids.uuid()), (kind, details.SerializeToString()))
    return lance.LanceOperation.CreateIndex([new], [_segment(base, str(old.segments[0].uuid))])


def _segment(base: BaseTable, uuid: str, details: tuple[str, bytes] | None = None) -> Index:
    """Return the MemWAL index, which covers no column and no fragment."""
    return Index(uuid, MEM_WAL_INDEX, [], base.version, Bitmap(), 0, index_details=details)


# ---- 2 and 3: open -------------------------------------------------------------------------------------------------


def _open(
    base: BaseTable,
    store: wal.ObjectStore,
    to: Decision,
    syncing: Lock,
    on_disk: Callable[[], None],
    ended: dict[UUID, wal.Released],
    region: UUID,
    *,
    clock: wal.Clock,
    ids: wal.Ids,
    options: wal.WalOptions,
) -> None:
    """Open one region, unless it is already open; another process may be opening it concurrently.

    `on_disk`: syncs the switch, which may come from another process that did not sync it; called with `syncing`.
    """
    manifests = wal.ManifestStore(store, region, clock=clock, options=options)
    for _ in range(_OPENINGS):
        current = manifests.latest()
        if current is None or current.spec_id >= to.routing or current.status is not wal.RegionStatus.SEALED:
            return  # None: `verify` reports it, and an older routing cannot claim it
        with syncing:
            on_disk()
        try:
            claimed = wal.claim(
                store,
                region,
                spec_id=to.routing,
                codec=base.codec,
                ids=ids,
                clock=clock,
                known=wal.Known(base.committed.get(region, 0), ended.get(region)),
                opening=to.applied,
                options=options,
            )
            ended[region] = wal.Released(claimed.manifest, claimed.next_position - 1)
        except (wal.Fenced, wal.Resized):
            continue


(_DETAILS,) = message_classes("memwal.lance_routing", _FIELDS, ("MemWalIndexDetails",))


_LOOK_BACK = 64
"""Versions. Few are made while all regions are sealed."""


def with_its_loads(base: BaseTable, store: wal.ObjectStore) -> BaseTable:
    """Return the newest view with the markers of loads that a switch has replaced; `base` if none is missing.

    Raises OSError, RuntimeError of Lance; Corrupt, StoreUnavailable, StoreRefused.
    """
    if base.wal_format != "arrow":
        return base
    known = _known(store, base.version)
    while missing := {id: of for id, of in known.items() if base.committed.get(id, 0) < of}:
        try:
            with panics_as_errors:
                mark(base.dataset, missing)
        except (OSError, RuntimeError):
            if base.dataset.latest_version == base.dataset.version:
                raise
        base = BaseTable.open(base.uri, base.storage_options, caches=base.caches)
    return base


def _known(store: wal.ObjectStore, newest: int) -> dict[UUID, int]:
    """Return the generations of loads in the versions up to `newest`, back to a restore.

    A restore removes loads on purpose.
    """
    known: dict[UUID, int] = {}
    for version in range(newest, max(0, newest - _LOOK_BACK), -1):
        try:
            state = read_state(store, version)
        except wal.Corrupt:  # cleaned up
            break
        known = highest(known, {id: state.committed[id] for id in loads_in(state.committed)})
        if state.transaction is not None and state.transaction.operation == "restore":
            break
    return known
