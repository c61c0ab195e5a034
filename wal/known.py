"""What a claimer knows of a region from before the claim, so that the claim has less to read (`wal.fence`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from memwal.wal.records import Entry
from memwal.wal.region_manifest import RegionManifest


@dataclass(frozen=True)
class Released:
    """What an owner tells the claimer that it released the region to. It answers no read and acknowledges nothing any
    more, and had waited for the leases of those before it. (model: Log!Release, Log!HearRelease,
    Lease!HearRelease)"""

    manifest: RegionManifest
    """The newest that it knows, of its own epoch."""
    position: int
    """The newest of its log; 0 for none."""

    def to_json(self) -> dict[str, Any]:
        """For a message."""
        return {"manifest": self.manifest.encode().hex(), "position": self.position}

    @classmethod
    def of_json(cls, told: Mapping[str, Any]) -> Self:
        """The opposite of `to_json`. Raises: Corrupt; ValueError, TypeError, KeyError for what is no such message."""
        return cls(RegionManifest.decode(bytes.fromhex(told["manifest"])), int(told["position"]))


@dataclass(frozen=True)
class Known:
    """What a claimer knows."""

    committed: int = 0
    """The highest generation of the region that the base table held at some earlier moment."""
    released: Released | None = None
    """What the former owner told it; None where it did not."""
    entries: Sequence[Entry] = ()
    """Consecutive entries of the region, from some `replay_after` on."""
