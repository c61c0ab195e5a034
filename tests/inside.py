"""Give tests access to the engine of a public table: `memwal.open(…)` delegates missing attributes to it.

Programs have no such access: `tests/house/test_public_names.py` lists what they see.
"""

from __future__ import annotations

from typing import Any

from memwal.ingest.engine.table.public import Table

of_programs = Table.__getattr__
"""What a program gets for an attribute that a table lacks."""


def _behind(self: Table, name: str) -> Any:
    if name == "_engine":  # a table that was not created
        raise AttributeError(name)
    return getattr(self._engine, name)


def _put_behind(self: Table, name: str, value: Any) -> None:
    if name == "_engine":
        object.__setattr__(self, name, value)
    else:
        setattr(self._engine, name, value)


def _take_from_behind(self: Table, name: str) -> None:
    delattr(self._engine, name)


def look_inside() -> None:
    """Enable the access in this process."""
    Table.__getattr__ = _behind  # type: ignore[method-assign]
    Table.__setattr__ = _put_behind  # type: ignore[method-assign, assignment]
    Table.__delattr__ = _take_from_behind  # type: ignore[method-assign, assignment]


look_inside()
