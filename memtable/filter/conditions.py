"""Conditions on single columns: a superset of the rows that a predicate selects, or exactly these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from memwal.memtable.filter.scalar_index import Asked


@dataclass(frozen=True, eq=False)
class Condition:
    """The values that one column must have. `exact`: no others may pass, and all of these do."""

    column: str
    asked: Asked
    exact: bool = False


@dataclass(frozen=True, eq=False)
class AllOf:
    """Conditions that must all hold. `exact`: nothing else must."""

    parts: tuple[Narrowing, ...]
    exact: bool = False


@dataclass(frozen=True, eq=False)
class AnyOf:
    """Conditions, one of which must hold."""

    parts: tuple[Narrowing, ...]


Narrowing: TypeAlias = Condition | AllOf | AnyOf


def columns_of(narrowing: Narrowing) -> list[str]:
    """The columns of all conditions, each once."""
    if isinstance(narrowing, Condition):
        return [narrowing.column]
    return list(dict.fromkeys(column for part in narrowing.parts for column in columns_of(part)))


def is_exact(narrowing: Narrowing) -> bool:
    """Whether the predicate selects exactly the rows for which the conditions hold."""
    own = True if isinstance(narrowing, AnyOf) else narrowing.exact
    return own and (isinstance(narrowing, Condition) or all(map(is_exact, narrowing.parts)))
