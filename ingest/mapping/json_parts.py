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
    if isinstance(value, Repeated):
        one_of(value, min(value.names))
    for below in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        expect_names_once(below)


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
    if isinstance(value, Written):
        return value.digits
    if isinstance(value, dict):
        pairs = ((_as_json(name, ensure_ascii=ensure_ascii), each) for name, each in value.items())
        return "{" + ",".join(f"{name}:{_as_json(each, ensure_ascii=ensure_ascii)}" for name, each in pairs) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_as_json(each, ensure_ascii=ensure_ascii) for each in value) + "]"
    return json.dumps(value, default=_plain, ensure_ascii=ensure_ascii, allow_nan=False)


def _plain(value: object) -> str:
    """Return Avro values that JSON lacks as text: bytes as base64, times as ISO 8601."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value.isoformat() if isinstance(value, datetime.date | datetime.time) else str(value)
