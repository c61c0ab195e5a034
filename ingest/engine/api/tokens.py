"""Define tokens, which make a write exactly once, and the receipts that writes return.

A region remembers, per producer, the highest sequence it has applied; every WAL entry carries that map. A Spark query
is a producer (its query id) whose sequence is the batch_id; a direct caller chooses a name and counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from operator import index
from typing import Any, NamedTuple

from memwal.ingest.engine.api.arguments import brief, elements
from memwal.ingest.errors import Invalid
from memwal.wal import named
from memwal.wal.applied import PREFIX, SEQUENCE_MAX

_FORMS = "a token is 'name:number', (name, number) or memwal.Token; numbers of one name must go up"


@dataclass(frozen=True, slots=True)
class Token:
    """Identity of one write: its `producer`, a name, and a `sequence`, from 0 to 2**63 - 1, that increases with each
    write of the name.
    """

    producer: str
    sequence: int

    def __post_init__(self) -> None:
        """Raise Invalid for wrong types or values: regions compare sequences and write both into every WAL entry."""
        if type(self.producer) is not str or type(self.sequence) is not int or not self.producer or self.sequence < 0:
            raise Invalid(f"token {brief(self.producer)}:{brief(self.sequence)}: {_FORMS}")
        if self.sequence > SEQUENCE_MAX:
            number = brief(self.sequence)
            raise Invalid(
                f"token {brief(self.producer)}:{number}: the number is above {SEQUENCE_MAX}; choose another name, "
                "and count from 0"
            )
        if self.producer.startswith(PREFIX):
            name = brief(self.producer)
            raise Invalid(f"token {name}: names that begin with {PREFIX!r} are reserved for memwal; choose another")
        try:
            self.producer.encode()
        except UnicodeEncodeError as error:
            raise Invalid(
                f"token {brief(self.producer)}: the name cannot be written as UTF-8 (character {error.start + 1} is a "
                "lone surrogate); choose another"
            ) from None

    @staticmethod
    def parse(value: Token | str | tuple[str, int] | None) -> Token | None:
        """Parse a token in any form that the public API accepts. Raises: Invalid for any other value."""
        if value is None or isinstance(value, Token):
            return value
        return Token(*_split(value))

    def __str__(self) -> str:
        """Return the form that `parse` accepts."""
        return f"{self.producer}:{self.sequence}"


def _split(value: str | tuple[str, int]) -> tuple[str, int]:
    try:
        if isinstance(value, str):
            producer, digits = value.rsplit(":", 1)
            return producer, int(digits)
        parts: Any = elements("token", value) or ()
        producer, sequence = parts
        # Never int(): with times as numbers it would truncate two puts within one second to the same number, and the
        # second put would count as a repeat. NumPy's integers pass.
        return producer, sequence if isinstance(sequence, bool) else index(sequence)
    except (ValueError, TypeError):
        raise Invalid(f"token {brief(value)}: {_FORMS}") from None


def check_rises(token: Token, applied: Mapping[str, int | None]) -> None:
    """Reject a write whose sequence decreased: some regions would skip it as a repeat, others would apply it.

    `applied`: per region that gets rows, the highest sequence of the producer that it has applied.
    A write with a lower sequence cannot be a retry: a producer uses a higher number only after all regions of a write
    have answered. If one region has applied a number above `token`, all regions of a retry have applied at least
    `token`.
    Raises: Invalid; nothing was written.
    """
    above = {region: number for region, number in applied.items() if number is not None and number > token.sequence}
    below = [region for region, number in applied.items() if number is None or number < token.sequence]
    if not above or not below:
        return
    newest, region = max((number, region) for region, number in above.items())
    raise Invalid(
        f"token {token.producer:.60}:{token.sequence} goes down: {named(region)} has applied "
        f"{token.producer:.60}:{newest}, "
        f"{named(below[0])} nothing from {token.sequence} on, so this is not a retry; take a number above {newest}"
    )


class HighestTokens:
    """The highest sequence that a client has written with, per producer; a higher one cannot be a decrease.

    Thread safety. Any thread.
    """

    def __init__(self) -> None:
        self._highest: dict[str, int] = {}

    def rises(self, token: Token | None) -> bool:
        """Return whether `token` is higher than all earlier `taken` tokens of its name; False for the first one."""
        return token is not None and token.sequence > self._highest.get(token.producer, token.sequence)

    def taken(self, token: Token | None) -> None:
        """Record `token`, whose write was acknowledged."""
        if token is None:
            return
        if len(self._highest) >= _NAMES:
            self._highest.clear()  # the client asks the regions again at the next write of each name
        self._highest[token.producer] = max(token.sequence, self._highest.get(token.producer, -1))


_NAMES = 1_000
"""Maximum names that a client remembers."""


TokenLike = Token | str | tuple[str, int] | None
"""Forms of a token in the public API; None: the write has no token."""


@dataclass(frozen=True, slots=True)
class RegionCounts:
    """Counts of one region's rows of a write.

    `applied`: by this call. `repeated`: not applied, because the region had applied the token before. `skipped`: as in
    a `Receipt`.
    """

    applied: int
    repeated: int
    skipped: int


_counts = lru_cache(maxsize=256)(RegionCounts)  # every put needs one, and most are equal


@dataclass(frozen=True, slots=True)
class Receipt:
    """The result of a put or delete.

    - `rows`: rows accepted; for a delete, rows that existed (`Operations.delete` documents when this is unknown).
    - `applied`: whether any region applied rows in this call; False: all had applied the token before. True also if an
      attempt of this call got no answer and the next attempt found it applied.
    - `positions`: WAL position per region id, 0 if the rows are not durable yet.
    - `skipped`: rows not stored, because the stored row of their key stays (upsert = "insert") or is newer (version).
    - `regions`: counts per region id; they exclude rows that on_duplicate = "first" leaves out.
    """

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
class Ack:
    """A region's answer to a write of `rows` rows.

    `applied`: whether this call applied them (False: the token was applied before). `position`: the WAL position that
    made them durable (0: not durable yet). `skipped`: rows left out, because upsert = "insert" keeps the stored row of
    their key, or the stored row has a higher version. `newest`: if the token was applied before, the highest applied
    sequence of its producer. `repeated`: rows that this call did not apply, because the token was applied before.
    """

    rows: int
    applied: bool
    position: int
    skipped: int = 0
    newest: int | None = None
    repeated: int = 0

    @property
    def counts(self) -> RegionCounts:
        """The numbers of rows applied, repeated and skipped."""
        return _counts(self.rows - self.repeated - self.skipped, self.repeated, self.skipped)


@dataclass(frozen=True, slots=True)
class StreamReceipt(Ack):
    """A region's answer to one stream. `ack_seconds`: time from the closing message to the answer."""

    region: str = ""
    ack_seconds: float = 0.0


class Applied(NamedTuple):
    """Sequences of one producer that regions have applied.

    `everywhere`: the highest that every region has applied; None if a region has applied none. `newest`: the highest
    that any region has applied; None if no region has applied any.
    """

    everywhere: int | None
    newest: int | None

    @classmethod
    def together(cls, parts: Iterable[Applied]) -> Applied:
        """Combine the values of several sets of regions into that of all of them."""
        parts = list(parts)
        some = [part.newest for part in parts if part.newest is not None]
        every = [part.everywhere for part in parts if part.everywhere is not None]
        return cls(min(every) if every and len(every) == len(parts) else None, max(some, default=None))
