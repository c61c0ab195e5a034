"""Conditions that an index can answer: a superset of the rows that a predicate selects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from memwal.memtable.filter.scalar_index import Asked


@dataclass(frozen=True, eq=False)
class Condition:
    """The values that one column must have."""

    column: str
    asked: Asked


@dataclass(frozen=True, eq=False)
class AllOf:
    """Conditions that must all hold."""

    parts: tuple[Narrowing, ...]


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
