"""Names under which a write is applied exactly once.

A region remembers, per producer, the highest sequence it has applied; every WAL entry carries that map. A Spark
query is a producer (its query id) whose sequence is the batch_id; a direct caller picks its own name and counts.

What the callers of a write get back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import index
from typing import NamedTuple

from memwal.ingest.errors import Invalid
from memwal.wal.applied import PREFIX

_FORMS = "a token is 'name:number', (name, number) or memwal.Token; numbers of one name must go up"


@dataclass(frozen=True, slots=True)
class Token:
    """Identity of one write: `producer` names who writes, `sequence` (>= 0) goes up with every write of that name."""

    producer: str
    sequence: int

    def __post_init__(self) -> None:
        """Raises: Invalid; a region compares sequences and writes both into every WAL entry."""
        if type(self.producer) is not str or type(self.sequence) is not int or not self.producer or self.sequence < 0:
            raise Invalid(f"token {self.producer!r}:{self.sequence!r}: {_FORMS}")
        if self.producer.startswith(PREFIX):
            raise Invalid(f"token {self.producer!r}: names that begin with {PREFIX!r} are memwal's own; take another")

    @staticmethod
    def parse(value: Token | str | tuple[str, int] | None) -> Token | None:
        """Read a token in any form that the public API takes.

        Raises: Invalid when the value is none of them.
        """
        if value is None or isinstance(value, Token):
            return value
        return Token(*_split(value))


def _split(value: str | tuple[str, int]) -> tuple[str, int]:
    try:
        if isinstance(value, str):
            producer, digits = value.rsplit(":", 1)
            return producer, int(digits)
        producer, sequence = value
        # Never int(): cut to whole numbers, the times of two puts within a second are one number, and the second put is
        # taken for a repeat. NumPy's integers pass.
        return producer, sequence if isinstance(sequence, bool) else index(sequence)
    except (ValueError, TypeError):
        raise Invalid(f"token {value!r}: {_FORMS}") from None


def refuse_going_down(token: Token, applied: Mapping[str, int | None]) -> None:
    """Refuse a write under `token` of which some regions would take their rows for a repeat, and others would apply
    theirs, though it is no retry. `applied`: per region that gets rows, the highest sequence it has of the producer.

    Why it is none: a producer takes a higher number when all regions of a write have answered. So where one of them has
    applied more than `token`, all have applied as much as `token`.
    Raises: Invalid; nothing was written.
    """
    above = {region: each for region, each in applied.items() if each is not None and each > token.sequence}
    below = {region: each for region, each in applied.items() if each is None or each < token.sequence}
    if not above or not below:
        return
    newest, region = max((each, region) for region, each in above.items())
    raise Invalid(
        f"token {token.producer}:{token.sequence} goes down: region {region} has applied {token.producer}:{newest}, "
        f"region {next(iter(below))} nothing from {token.sequence} on, so this is no retry; take a number above "
        f"{newest}"
    )


class Rising:
    """The highest number of each name that a client has written with: a higher one does not go down.

    Thread safety. Any thread.
    """

    def __init__(self) -> None:
        self._highest: dict[str, int] = {}

    def rises(self, token: Token | None) -> bool:
        """Whether `token` is higher than those of its name that were `taken` before; False for the first one."""
        return token is not None and token.sequence > self._highest.get(token.producer, token.sequence)

    def taken(self, token: Token | None) -> None:
        """A write under `token` was acknowledged."""
        if token is None:
            return
        if len(self._highest) >= _NAMES:
            self._highest.clear()  # the next of each name is asked about once more
        self._highest[token.producer] = max(token.sequence, self._highest.get(token.producer, -1))


_NAMES = 1_000
"""Names that a client remembers at most."""


TokenLike = Token | str | tuple[str, int] | None
"""What the public API takes as a token; None: the write is not identified."""


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
