"""What Python's parser of JSON would lose: the digits of a number, and that a name occurs twice in an object."""

from __future__ import annotations

import base64
import datetime
import json
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
    pending = [value]  # no recursion, as in `_as_json`
    while pending:
        part = pending.pop()
        if isinstance(part, Repeated):
            one_of(part, min(part.names))
        if isinstance(part, dict | list):
            pending.extend(reversed(part.values() if isinstance(part, dict) else part))


def as_json(value: Any) -> str:
    """Return a value as JSON text; numbers keep the digits that they were written with.

    Bytes are base64, times ISO 8601. Raises: ValueError for a number that is not finite, and a name that occurs twice.
    """
    if isinstance(value, bytes | datetime.date):
        return _plain(value)
    expect_names_once(value)
    try:
        text = _as_json(value, ensure_ascii=False)
    except ValueError:
        raise ValueError("it has a number that is not finite, which JSON cannot hold") from None
    halves = any("\ud800" <= letter <= "\udfff" for letter in text)
    return _as_json(value, ensure_ascii=True) if halves else text


def _as_json(value: Any, *, ensure_ascii: bool) -> str:
    """Write a value without recursion: the parser takes deeper values than calls of Python functions can nest."""
    encode = json.JSONEncoder(default=_plain, ensure_ascii=ensure_ascii, allow_nan=False).encode

    def written(part: Any) -> Any:
        """Return a scalar as JSON, an object or a list as it is."""
        if isinstance(part, dict | list):
            return part
        return part.digits if isinstance(part, Written) else encode(part)

    def opened(part: dict[str, Any] | list[Any]) -> list[Any]:
        """Return an object or a list as the parts of its JSON, with the objects and lists inside of it as they are."""
        if isinstance(part, list):
            return ["[", *[each for below in part for each in (",", written(below))][1:], "]"]
        fields = [each for name, below in part.items() for each in (",", encode(name), ":", written(below))]
        return ["{", *fields[1:], "}"]

    text: list[str] = []
    pending = [written(value)]
    while pending:
        part = pending.pop()
        if isinstance(part, str):
            text.append(part)
        else:
            pending.extend(reversed(opened(part)))
    return "".join(text)


def _plain(value: object) -> str:
    """Return Avro values that JSON lacks as text: bytes as base64, times as ISO 8601."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value.isoformat() if isinstance(value, datetime.date | datetime.time) else str(value)
