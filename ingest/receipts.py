"""What the callers of a write get back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Receipt:
    """What a put or delete answers: rows taken, and whether any region applied them now (False: the token was applied
    before). `positions`: WAL position per region id, 0 where the rows are not durable yet. `skipped`: rows that are not
    stored, because their keys were there already and stored rows stay as they are (upsert = "insert"), or are newer
    (version)."""

    rows: int
    applied: bool
    positions: Mapping[str, int]
    skipped: int = 0


@dataclass(frozen=True, slots=True)
class StreamReceipt:
    """A region's answer to one stream: `applied` is False when its token was applied before; `ack_seconds` is the time
    from the closing message to the answer; `skipped` as in a `Receipt`, `newest` as in an
    `Ack`."""

    region: str
    rows: int
    applied: bool
    position: int
    ack_seconds: float
    skipped: int = 0
    newest: int | None = None


class Applied(NamedTuple):
    """Sequences of one producer that regions have applied: the highest that each of them has, and that any has; None
    where one, or every one, has applied none."""

    everywhere: int | None
    newest: int | None

    @classmethod
    def of_regions(cls, sequences: Iterable[int | None]) -> Applied:
        """Of what each region has applied."""
        return cls.together(cls(each, each) for each in sequences)

    @classmethod
    def together(cls, parts: Iterable[Applied]) -> Applied:
        """Of all regions, from that of parts of them."""
        parts = list(parts)
        some = [part.newest for part in parts if part.newest is not None]
        every = [part.everywhere for part in parts if part.everywhere is not None]
        return cls(min(every) if every and len(every) == len(parts) else None, max(some, default=None))
