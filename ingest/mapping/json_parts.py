"""What Python's parser of JSON would lose: the digits of a number, and that a name occurs twice in an object."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Self


class Written(float):
    """A JSON number with a fraction or an exponent: the nearest float, and its digits as they are written."""

    __slots__ = ("digits",)

    def __new__(cls, digits: str) -> Self:
        made = super().__new__(cls, digits)
        made.digits = digits
        return made

    digits: str


class Repeated(dict[str, Any]):
    """A JSON object in which some names occur more than once: `names`. Only who reads one of them is refused."""

    def __init__(self, pairs: Sequence[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        counts = Counter(name for name, _ in pairs)
        self.names = {name for name, count in counts.items() if count > 1}


def one_of(fields: dict[str, Any], name: str) -> Any:
    """Return the field `name` of a JSON object, None if it has none. Raises: ValueError if it has more than one."""
    if isinstance(fields, Repeated) and name in fields.names:
        raise ValueError(f"ambiguous JSON: {name!r} occurs twice")
    return fields.get(name)


def expect_names_once(value: Any) -> None:
    """Raise ValueError if a name occurs twice in an object of JSON, at any depth."""
    if isinstance(value, Repeated):
        one_of(value, min(value.names))
    for below in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        expect_names_once(below)
