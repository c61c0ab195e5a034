"""Keep what Python's JSON parser loses: the digits of a number, and names that occur twice in an object."""

from __future__ import annotations

import base64
import datetime
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any, Self


class Written(float):
    """A JSON number with a fraction or an exponent: the nearest float, with the original digits."""

    __slots__ = ("digits",)

    def __new__(cls, digits: str) -> Self:
        made = super().__new__(cls, digits)
        made.digits = digits
        return made

    digits: str


class Repeated(dict[str, Any]):
    """A JSON object in which the names in `names` occur more than once. Only reading one of these names is an error."""

    def __init__(self, pairs: Sequence[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        counts = Counter(name for name, _ in pairs)
        self.names = {name for name, count in counts.items() if count > 1}


def one_of(fields: dict[str, Any], name: str) -> Any:
    """Return the field `name` of a JSON object; None if it is missing.

    Raises: ValueError if the name occurs more than once.
    """
    if isinstance(fields, Repeated) and name in fields.names:
        raise ValueError(f"ambiguous JSON: {name!r} occurs twice")
    return fields.get(name)


def expect_names_once(value: Any) -> None:
    """Raise ValueError if a name occurs twice in a JSON object at any depth."""
    pending = [value]  # no recursion, for the reason in `_as_json`
    while pending:
        part = pending.pop()
        if isinstance(part, Repeated):
            one_of(part, min(part.names))
        if isinstance(part, dict | list):
            pending.extend(reversed(part.values() if isinstance(part, dict) else part))


def as_json(value: Any) -> str:
    """Return a value as JSON text. Numbers keep their original digits.

    Bytes are base64, times ISO 8601. Raises: ValueError for a number that is not finite, and for a name that occurs
    twice.
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
    """Write a value without recursion: the parser accepts deeper values than Python's call stack."""
    encode = json.JSONEncoder(default=_plain, ensure_ascii=ensure_ascii, allow_nan=False).encode

    def written(part: Any) -> Any:
        """Return a scalar as JSON, an object or a list unchanged."""
        if isinstance(part, dict | list):
            return part
        return part.digits if isinstance(part, Written) else encode(part)

    def opened(part: dict[str, Any] | list[Any]) -> list[Any]:
        """Return an object or a list as the parts of its JSON; nested objects and lists are unchanged parts."""
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
