"""What may change between two versions of a region manifest.

Numbered rules. `ManifestStore.create`, the only writer of manifests, checks them before it writes. A violation is a
defect of the caller; nothing is written.
"""

from __future__ import annotations

from itertools import pairwise

from memwal.wal.errors import Corrupt
from memwal.wal.layout import named
from memwal.wal.region_manifest import RegionManifest, RegionStatus


class InvariantViolation(Corrupt):
    """A proposed manifest that the protocol does not allow; it was not written."""


def _rules(current: RegionManifest, proposed: RegionManifest) -> list[tuple[bool, str]]:
    """Return whether each rule holds, and the text for one that does not. Pure."""
    generations = [sst.generation for sst in proposed.ssts]
    consecutive = all(after == before + 1 for before, after in pairwise(generations))
    published = not generations or (generations[0] >= 1 and generations[-1] < proposed.current_generation)
    before, after = (current.region_id, current.spec_id), (proposed.region_id, proposed.spec_id)
    same_log = proposed.region_id == current.region_id and proposed.log_id in ("", current.log_id)
    opened = current.status is RegionStatus.SEALED and proposed.status is not RegionStatus.SEALED
    new = [generation for generation in generations if generation >= current.current_generation]
    expected = [current.current_generation] if new else []
    follows = proposed.current_generation == current.current_generation + 1
    kept = tuple(sst for sst in proposed.ssts if sst.generation < current.current_generation)
    newest = current.ssts[len(current.ssts) - len(kept) :] if kept else ()
    paths, current_paths = ([sst.path for sst in ssts] for ssts in (kept, current.ssts))
    ours, theirs = proposed.writer_epoch, current.writer_epoch
    gap = (
        f"SST generations {generations} are not consecutive numbers from 1 up, below the "
        f"current generation {proposed.current_generation}"
    )
    appended = (
        f"SST generations {new} appended with current generation {proposed.current_generation}; "
        f"only generation {current.current_generation} can be appended, and the current generation rises by one"
    )
    return [
        # 1. The version is the next one.
        (proposed.version == current.version + 1, f"version {proposed.version} does not follow {current.version}"),
        # 2. The epoch rises by one at most.
        (theirs <= ours <= theirs + 1, f"writer epoch {ours} after {theirs}"),
        # 3, 4, 5. These never fall.
        _never_falls("replay_after", current.replay_after, proposed.replay_after),
        _never_falls("last_seen", current.last_seen, proposed.last_seen),
        _never_falls("current_generation", current.current_generation, proposed.current_generation),
        # 6. Generations of SSTs are contiguous.
        (consecutive and published, gap),
        # 7. The identity is constant. The spec id (routing version) rises only when a sealed region is opened. Lance
        # drops the log id.
        (
            same_log and (before == after or opened),
            f"region, log or spec id changed from {before} to {after}",
        ),
        # 8. A sealed region stays sealed in its routing.
        (
            proposed.spec_id > current.spec_id or not opened,
            "a sealed region was opened again by the same routing",
        ),
        # 9. One SST is appended at most. It has the current generation, which then rises by one.
        (new == expected and (follows or not new), appended),
        # 10. SSTs leave from the front: kept SSTs are unchanged, and are the newest ones of the current version.
        (kept == newest, f"kept SSTs {paths} are not the newest of {current_paths}, unchanged"),
        *_lease_rules(current, proposed),
    ]


def _lease_rules(current: RegionManifest, proposed: RegionManifest) -> list[tuple[bool, str]]:
    """Return the rules of read leases and of rest, as `_rules`."""
    ours, theirs = proposed.writer_epoch, current.writer_epoch
    return [
        # 11. A claim keeps the lease: the claiming writer has not waited yet for the reads that the older writer may
        # answer.
        (
            ours <= theirs or proposed.read_lease >= current.read_lease,
            f"a claim lowered the read lease from {current.read_lease} to {proposed.read_lease} ms",
        ),
        # 12. An epoch releases the region at rest after its claim, without a lease and without SSTs.
        (
            not proposed.at_rest or (ours == theirs and not proposed.read_lease and not proposed.ssts),
            f"epoch {ours} released the region in its claim, with SSTs or a read lease of {proposed.read_lease} ms",
        ),
        # 13. Only a claim ends the rest.
        (
            not (current.at_rest and ours == theirs) or proposed.at_rest,
            f"epoch {ours} ended the rest without a claim",
        ),
    ]


def _never_falls(name: str, before: int, after: int) -> tuple[bool, str]:
    return before <= after, f"{name} fell from {before} to {after}"


def check_succession(current: RegionManifest | None, proposed: RegionManifest) -> None:
    """Raise InvariantViolation, naming every broken rule, unless `proposed` may follow `current`.

    `current` None: `proposed` is the first version. Its generations begin above those that the base table holds: at 1,
    or higher if the table came without its regions. The region is sealed if a resize creates it, for a routing that is
    not valid yet.
    """
    if current is not None:
        checked = enumerate(_rules(current, proposed), 1)
        broken = [f"({number}) {said}" for number, (holds, said) in checked if not holds]
    else:
        fresh = RegionManifest(
            version=1,
            writer_epoch=1,
            region_id=proposed.region_id,
            spec_id=proposed.spec_id,
            current_generation=max(1, proposed.current_generation),
            status=proposed.status,
            read_lease=proposed.read_lease,
        )
        said = "the first version must be version 1, epoch 1, a generation from 1 on, without SSTs"
        broken = [] if proposed == fresh else [said]
    if broken:
        raise InvariantViolation(
            f"{named(proposed.region_id)}, manifest version {proposed.version}: {'; '.join(broken)}"
        )
