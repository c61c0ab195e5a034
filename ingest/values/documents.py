"""Decode record values into objects one by one, in Python, with a reason for each value that cannot be read.

Always used for Avro, and for JSON if the fast way (`json_columns`) rejected a batch. Debezium's envelope is removed
here: an object with before, after and op, with or without the wrapper of schema and payload.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import pyarrow as pa

from memwal.ingest.values.json_parts import Repeated, Written, one_of
from memwal.ingest.values.values import holds

UPSERTS, DELETE = ("c", "r", "u"), "d"
_MISSING_OP = (
    'not a Debezium envelope: it has no op beside before and after; correct the topic, or set envelope = "none"'
)
_MEANS = {"t": "truncate, which memwal cannot apply", "m": "a log message, not a row"}


@dataclass(frozen=True, slots=True)
class Document:
    """One decoded record: the object of its fields, whether it deletes its key, or why it cannot be read."""

    fields: dict[str, Any] | None = None
    envelope: dict[str, Any] | None = None
    delete: bool = False
    problem: str | None = None


def documents(
    values: Sequence[bytes | None], decode: Callable[[bytes], Any], envelope: str, noun: str = "the value"
) -> list[Document]:
    """Return one document per value; an empty one for a null value. `decode` raises ValueError with a reason."""

    def document(value: bytes | None) -> Document:
        if value is None:
            return Document()
        try:
            decoded = decode(value)
            if not isinstance(decoded, dict):
                raise ValueError(f"{noun} is {_kind(decoded)}, not an object")
            return Document(decoded) if envelope == "none" else opened(decoded)
        except ValueError as error:
            return Document(problem=f"parse: {error}")

    return [document(value) for value in values]


def opened(envelope: dict[str, Any]) -> Document:
    """Return the row inside a Debezium envelope. Raises: ValueError."""
    inner = one_of(envelope, "payload")
    whole = inner if isinstance(inner, dict) else envelope
    op = one_of(whole, "op")
    if op is None:
        raise ValueError(_MISSING_OP)
    if op not in (*UPSERTS, DELETE):
        raise ValueError(
            f"op {op!r} is {_MEANS.get(str(op), 'not one of Debezium')}; keep such records out of the topic"
        )
    name = "before" if op == DELETE else "after"
    row = one_of(whole, name)
    if not isinstance(row, dict):
        raise ValueError(f"op {op!r} without {name!r}; configure Debezium to write it")
    return Document(row, whole, op == DELETE)


def json_decoder(kinds: Iterable[pa.DataType], *, any_text: bool = False) -> Callable[[bytes], Any]:
    """Return `of_json` for values that become columns of `kinds`.

    If `kinds` contain decimals, or with `any_text` (a text column that accepts every value), numbers with a fraction
    are `Written`, which takes longer.
    """
    digits = any_text or any(holds(kind, pa.types.is_decimal) for kind in kinds)
    return partial(of_json, number=Written) if digits else of_json


def of_json(value: bytes, number: Callable[[str], float] | None = None) -> Any:
    """Parse strict JSON: UTF-8, no NaN; an object with duplicate names is `Repeated`.

    `number`: converts numbers with a fraction; None converts them to floats. Raises: ValueError with a reason.
    """
    hooks: dict[str, Any] = {"parse_float": number, "parse_constant": no_number, "object_pairs_hook": object_of}
    try:
        try:
            return json.loads(value.decode(), **hooks)
        except json.JSONDecodeError:
            raise
        except ValueError:
            return json.loads(value.decode(), parse_int=_whole, **hooks)
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg.removesuffix(' at')} at character {error.pos}") from None
    except RecursionError:
        raise ValueError("JSON nested too deep") from None


def field(document: Document, path: Sequence[str], *, of_envelope: bool = False) -> Any:
    """Return the value at `path`; None if it is missing.

    Returns (does not raise) a ValueError if the path crosses a value that is not an object, or if one of its names
    occurs twice.
    """
    value: Any = document.envelope if of_envelope else document.fields
    for depth, name in enumerate(path):
        if value is None:
            return None
        if not isinstance(value, dict):
            return ValueError(f"{'.'.join(path[:depth])} is {_kind(value)}, not an object")
        try:
            value = one_of(value, name)
        except ValueError as error:
            return error
    return value


def _kind(value: Any) -> str:
    names = {"dict": "an object", "list": "a list", "str": "text", "bool": "true or false", "NoneType": "null"}
    return names.get(type(value).__name__, "a number")


def object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object with the fields `pairs`; `Repeated` if a name occurs twice."""
    fields = dict(pairs)
    return fields if len(fields) == len(pairs) else Repeated(pairs)


def _whole(digits: str) -> int | float:
    """Return a whole number; infinity, which no column accepts, if it has more digits than Python converts."""
    return int(digits) if len(digits) < sys.int_info.default_max_str_digits else math.inf


def no_number(text: str) -> NoReturn:
    """Raise ValueError: `text` is NaN or an infinity, which JSON lacks."""
    raise ValueError(f"not JSON: {text} is not a JSON number")
