"""Names under which a write is applied exactly once.

A region remembers, per producer, the highest sequence it has applied; every WAL entry carries that map. A Spark
query is a producer (its query id) whose sequence is the batch_id; a direct caller picks its own name and counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import index

from flush.carried import PREFIX
from ingest.errors import Invalid

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


TokenLike = Token | str | tuple[str, int] | None
"""What the public API takes as a token; None: the write is not identified."""
