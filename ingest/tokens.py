"""Names under which a write is applied exactly once.

A region remembers, per producer, the highest sequence it has applied; every WAL entry carries that map. A Spark
query is a producer (its query id) whose sequence is the batch_id; a direct caller picks its own name and counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import index

from ingest.errors import Invalid
from wal.applied import PREFIX

_FORMS = "a token is 'name:number', (name, number) or ingest.Token; numbers of one name must go up"


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
