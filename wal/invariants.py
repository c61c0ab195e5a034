"""What may change between two versions of a region manifest.

Numbered pure functions `(current, proposed)`. `ManifestStore.create`, the only writer of manifests, runs them before it
writes. A violation is a defect of the caller; nothing is written.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from memwal.wal.errors import Corrupt
from memwal.wal.region_manifest import RegionManifest, RegionStatus


class InvariantViolation(Corrupt):
    """A proposed manifest that the protocol does not allow; it was not written."""


Check = Callable[[RegionManifest, RegionManifest], str | None]


def _1_version_is_next(current: RegionManifest, proposed: RegionManifest) -> str | None:
    return _unless(
        proposed.version == current.version + 1,
        f"version {proposed.version} does not follow {current.version}",
    )


def _2_epoch_rises_by_one_at_most(current: RegionManifest, proposed: RegionManifest) -> str | None:
    ours, theirs = proposed.writer_epoch, current.writer_epoch
    return _unless(theirs <= ours <= theirs + 1, f"writer epoch {ours} after {theirs}")


def _3_replay_after_never_falls(current: RegionManifest, proposed: RegionManifest) -> str | None:
    return _never_falls("replay_after", current.replay_after, proposed.replay_after)


def _4_last_seen_never_falls(current: RegionManifest, proposed: RegionManifest) -> str | None:
    return _never_falls("last_seen", current.last_seen, proposed.last_seen)


def _5_generation_never_falls(current: RegionManifest, proposed: RegionManifest) -> str | None:
    return _never_falls("current_generation", current.current_generation, proposed.current_generation)


def _6_generations_are_contiguous(_: RegionManifest, proposed: RegionManifest) -> str | None:
    generations = [sst.generation for sst in proposed.ssts]
    steps = all(after == before + 1 for before, after in pairwise(generations))
    below = not generations or (generations[0] >= 1 and generations[-1] < proposed.current_generation)
    return _unless(
        steps and below,
        f"SST generations {generations} are not consecutive numbers from 1 up, below the "
        f"current generation {proposed.current_generation}",
    )


def _7_identity_is_constant(current: RegionManifest, proposed: RegionManifest) -> str | None:
    """The spec id (routing version) rises only when a sealed region is opened. Lance drops the log id."""
    before, after = (current.region_id, current.spec_id), (proposed.region_id, proposed.spec_id)
    same = proposed.region_id == current.region_id and proposed.log_id in ("", current.log_id)
    constant = same and (before == after or _opened(current, proposed))
    return _unless(constant, f"region, log or spec id changed from {before} to {after}")


def _8_sealed_stays_sealed_in_its_routing(current: RegionManifest, proposed: RegionManifest) -> str | None:
    risen = proposed.spec_id > current.spec_id
    return _unless(risen or not _opened(current, proposed), "a sealed region was opened again by the same routing")


def _9_one_sst_appended_at_most(current: RegionManifest, proposed: RegionManifest) -> str | None:
    """The appended SST has the current generation, which then rises by one."""
    new = [sst.generation for sst in proposed.ssts if sst.generation >= current.current_generation]
    expected = [current.current_generation] if new else []
    follows = proposed.current_generation == current.current_generation + 1
    return _unless(
        new == expected and (follows or not new),
        f"SST generations {new} appended with current generation {proposed.current_generation}; "
        f"only generation {current.current_generation} can be appended, and the current generation rises by one",
    )


def _10_ssts_leave_from_the_front(current: RegionManifest, proposed: RegionManifest) -> str | None:
    """Kept SSTs are unchanged, and are the newest ones of the current version."""
    kept = tuple(sst for sst in proposed.ssts if sst.generation < current.current_generation)
    newest = current.ssts[len(current.ssts) - len(kept) :] if kept else ()
    return _unless(
        kept == newest,
        f"kept SSTs {[sst.path for sst in kept]} are not the newest of {[sst.path for sst in current.ssts]}, unchanged",
    )


def _11_a_claim_keeps_the_lease(current: RegionManifest, proposed: RegionManifest) -> str | None:
    """The claiming writer has not waited yet for the reads that the older writer may answer."""
    claimed = proposed.writer_epoch > current.writer_epoch
    return _unless(
        not claimed or proposed.read_lease >= current.read_lease,
        f"a claim lowered the read lease from {current.read_lease} to {proposed.read_lease} ms",
    )


CHECKS: tuple[Check, ...] = (
    _1_version_is_next,
    _2_epoch_rises_by_one_at_most,
    _3_replay_after_never_falls,
    _4_last_seen_never_falls,
    _5_generation_never_falls,
    _6_generations_are_contiguous,
    _7_identity_is_constant,
    _8_sealed_stays_sealed_in_its_routing,
    _9_one_sst_appended_at_most,
    _10_ssts_leave_from_the_front,
    _11_a_claim_keeps_the_lease,
)


def check_succession(current: RegionManifest | None, proposed: RegionManifest) -> None:
    """Raise InvariantViolation, naming every broken rule, unless `proposed` may follow `current`.

    `current` None: `proposed` is the first version.
    """
    if current is None:
        broken = [_first_version(proposed)]
    else:
        checked = ((number, check(current, proposed)) for number, check in enumerate(CHECKS, 1))
        broken = [said and f"({number}) {said}" for number, said in checked]
    if said := "; ".join(filter(None, broken)):
        raise InvariantViolation(f"region {proposed.region_id}, manifest version {proposed.version}: {said}")


def _first_version(proposed: RegionManifest) -> str | None:
    """Check a region's first version.

    Generations begin above those that the base table holds: at 1, or higher if the table came without its regions. The
    region is sealed if a resize creates it, for a routing that is not valid yet.
    """
    fresh = RegionManifest(
        version=1,
        writer_epoch=1,
        region_id=proposed.region_id,
        spec_id=proposed.spec_id,
        current_generation=max(1, proposed.current_generation),
        status=proposed.status,
        read_lease=proposed.read_lease,
    )
    return _unless(
        proposed == fresh, "the first version must be version 1, epoch 1, a generation from 1 on, without SSTs"
    )


def _opened(current: RegionManifest, proposed: RegionManifest) -> bool:
    return current.status is RegionStatus.SEALED and proposed.status is not RegionStatus.SEALED


def _never_falls(name: str, before: int, after: int) -> str | None:
    return _unless(before <= after, f"{name} fell from {before} to {after}")


def _unless(holds: bool, said: str) -> str | None:
    return None if holds else said
