"""What a claimer knows about a region before the claim, so that the claim reads less (`wal.fence`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from memwal.wal.records import Entry
from memwal.wal.region_manifest import RegionManifest


@dataclass(frozen=True)
class Released:
    """What an owner sends to the claimer that it released the region to.

    The owner answers no reads and acknowledges nothing any more, and had waited for the leases of earlier owners.
    (model: Log!Release, Log!HearRelease, Lease!HearRelease)
    """

    manifest: RegionManifest
    """The newest manifest that the owner knows, of its own epoch."""
    position: int
    """The newest position of its log; 0 for none."""

    def to_json(self) -> dict[str, Any]:
        """Return the content of a message."""
        return {"manifest": self.manifest.encode().hex(), "position": self.position}

    @classmethod
    def of_json(cls, told: Mapping[str, Any]) -> Self:
        """Decode the content of a message; the inverse of `to_json`.

        Raises: Corrupt; ValueError, TypeError or KeyError if `told` is not such content.
        """
        return cls(RegionManifest.decode(bytes.fromhex(told["manifest"])), int(told["position"]))


@dataclass(frozen=True)
class Known:
    """What a claimer knows."""

    committed: int = 0
    """The highest generation of the region that the base table held at some earlier time."""
    released: Released | None = None
    """The former owner's message; None without one."""
    entries: Sequence[Entry] = ()
    """Consecutive entries of the region, beginning after some `replay_after`."""
