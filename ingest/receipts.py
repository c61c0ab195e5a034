"""What the callers of a write get back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class RegionCounts:
    """What one region did with its rows of a write: `applied` by this call; `repeated`, because it had applied the
    token before and left them alone; `skipped`, as in a `Receipt`."""

    applied: int
    repeated: int
    skipped: int


@dataclass(frozen=True, slots=True)
class Receipt:
    """What a put or delete answers: rows taken, and whether any region applied rows in this call (False: all had
    applied the token before; True also where an attempt of this call had no answer, and the next one finds it applied).
    `positions`: WAL position per region id, 0 where the rows are not durable yet. `skipped`: rows that are not stored,
    because their keys were there already and stored rows stay as they are (upsert = "insert"), or are newer (version).
    `regions`: counts per region id; rows that on_duplicate = "first" leaves out are in none."""

    rows: int
    applied: bool
    positions: Mapping[str, int]
    skipped: int = 0
    regions: Mapping[str, RegionCounts] = field(default_factory=dict)

    @property
    def repeated(self) -> int:
        """Rows that this call did not apply, because their regions had applied the token before."""
        return sum(counts.repeated for counts in self.regions.values())


@dataclass(frozen=True, slots=True)
class StreamReceipt:
    """A region's answer to one stream: `applied` is False when its token was applied before; `ack_seconds` is the time
    from the closing message to the answer; `skipped` and `repeated` as in a `Receipt`,
    `newest` as in an `Ack`."""

    region: str
    rows: int
    applied: bool
    position: int
    ack_seconds: float
    skipped: int = 0
    newest: int | None = None
    repeated: int = 0


class Applied(NamedTuple):
    """Sequences of one producer that regions have applied: the highest of which each has all its rows, and the highest
    of which any has some; None where one, or every one, has applied none."""

    everywhere: int | None
    newest: int | None

    @classmethod
    def together(cls, parts: Iterable[Applied]) -> Applied:
        """Of all regions, from that of parts of them."""
        parts = list(parts)
        some = [part.newest for part in parts if part.newest is not None]
        every = [part.everywhere for part in parts if part.everywhere is not None]
        return cls(min(every) if every and len(every) == len(parts) else None, max(some, default=None))
