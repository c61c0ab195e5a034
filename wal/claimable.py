"""Decide which regions a claim refuses before it writes anything; pure functions of what the claim read."""

from __future__ import annotations

from uuid import UUID

from memwal.wal.errors import Corrupt, Resized, Sealed
from memwal.wal.layout import manifest_prefix, wal_prefix
from memwal.wal.region_manifest import RegionManifest, RegionStatus


def expect_claimable(
    region_id: UUID,
    current: RegionManifest | None,
    tip: int,
    *,
    spec_id: int,
    committed: int,
    seal: bool,
    opening: bool,
) -> None:
    """Return if a writer may claim the region whose newest manifest is `current` and whose log has entries up to `tip`.

    `spec_id`: the version of the claimer's routing; `committed`: a generation that the base table has; `seal`,
    `opening`: the two claims of a resize (`wal.fence`).
    Raises: Sealed; Resized; Corrupt.
    """
    if current is None:
        expect_no_entries(region_id, tip)
        if opening:
            raise Corrupt(f"{manifest_prefix(region_id)}: empty, though a resize sealed it; restore a backup")
        return
    _expect_routing(region_id, current, spec_id, seal=seal, opening=opening)
    if current.current_generation <= committed:
        raise Corrupt(
            f"region {region_id}: generation {committed} is committed, but manifest version {current.version} "
            f"publishes {current.current_generation} next: it is older than the base table; restore the whole table "
            "from one backup"
        )


def expect_no_entries(region_id: UUID, tip: int) -> None:
    """Raise Corrupt if the log has an entry: without a manifest, it would have been written without a claim."""
    if tip:
        raise Corrupt(
            f"region {region_id} has WAL entries up to position {tip} but had no manifest; restore "
            f"{manifest_prefix(region_id)} from a backup, or move {wal_prefix(region_id)} away to start empty"
        )


def _expect_routing(region_id: UUID, current: RegionManifest, spec_id: int, *, seal: bool, opening: bool) -> None:
    if current.spec_id > spec_id or (opening and current.spec_id == spec_id):
        # (model: Resize!Claim)
        raise Resized(region_id, spec_id, current.spec_id)
    if current.status is RegionStatus.SEALED:
        if not seal and not opening:
            raise Sealed(
                f"region {region_id} is sealed and takes no new writer: the table is being resized; open it again in a "
                "moment, or, where that was broken off, run `memwal regions resize`; its rows stay readable"
            )
    elif current.spec_id != spec_id:
        raise Corrupt(
            f"region {region_id}: manifest version {current.version} belongs to routing version {current.spec_id}, "
            f"expected {spec_id}; restore the whole table from one backup"
        )
