"""The value of a record as an object: one by one, in Python, and with a reason where it is none.

Avro always comes this way; JSON when the fast way (`mapping_json`) refused a batch. Debezium's envelope is taken off
here: an object of before, after and op, with or without the wrapper of schema and payload.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

UPSERTS, DELETE = ("c", "r", "u"), "d"
_MISSING_OP = 'there is no op beside before and after: no Debezium envelope; correct the topic, or envelope = "none"'
_MEANS = {"t": "truncate, which a table cannot follow", "m": "a message of the log, no row"}


@dataclass(frozen=True, slots=True)
class Document:
    """What one record says: the object of its fields, whether it deletes them, or why it cannot be read."""

    fields: dict[str, Any] | None = None
    envelope: dict[str, Any] | None = None
    delete: bool = False
    problem: str | None = None


def documents(
    values: Sequence[bytes | None], decode: Callable[[bytes], Any], envelope: str, noun: str = "the value"
) -> list[Document]:
    """One document for each value; a null one is empty. `decode` raises ValueError with a reason."""
    return [Document() if value is None else _document(value, decode, envelope, noun) for value in values]


def _document(value: bytes, decode: Callable[[bytes], Any], envelope: str, noun: str) -> Document:
    try:
        found = decode(value)
        if not isinstance(found, dict):
            raise ValueError(f"{noun} is {_kind(found)}, no object")
        return Document(found) if envelope == "none" else opened(found)
    except ValueError as error:
        return Document(problem=f"parse: {error}")


def opened(found: dict[str, Any]) -> Document:
    """The row inside a Debezium envelope. Raises: ValueError."""
    inner = found.get("payload")
    whole = inner if isinstance(inner, dict) else found
    op = whole.get("op")
    if op is None:
        raise ValueError(_MISSING_OP)
    if op not in (*UPSERTS, DELETE):
        raise ValueError(f"op {op!r} is {_MEANS.get(str(op), 'none of Debezium')}; leave such records out of the topic")
    name = "before" if op == DELETE else "after"
    row = whole.get(name)
    if not isinstance(row, dict):
        raise ValueError(f"op {op!r} without {name!r}; let Debezium write it")
    return Document(row, whole, op == DELETE)


def of_json(value: bytes) -> Any:
    """Strict JSON: UTF-8, no NaN, no name twice. Raises: ValueError with a reason."""
    try:
        return json.loads(value.decode(), parse_constant=_no_number, object_pairs_hook=_object)
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"no JSON: {error.msg.removesuffix(' at')} at character {error.pos}") from None
    except RecursionError:
        raise ValueError("no JSON that can be read: too deep") from None


def field(document: Document, path: Sequence[str], *, of_envelope: bool = False) -> Any:
    """The value at `path`; None where there is none, a ValueError as the value where something else is in the way."""
    found: Any = document.envelope if of_envelope else document.fields
    for depth, name in enumerate(path):
        if found is None:
            return None
        if not isinstance(found, dict):
            return ValueError(f"{'.'.join(path[:depth])} is {_kind(found)}, no object")
        found = found.get(name)
    return found


def _kind(value: Any) -> str:
    names = {"dict": "an object", "list": "a list", "str": "text", "bool": "true or false", "NoneType": "null"}
    return names.get(type(value).__name__, "a number")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"no JSON to rely on: {twice!r} is there twice")
    return found


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"no JSON: {text} is no number of it")
