"""Parse names of column types in the configuration: `installed_kb = "int64"`, `embedding = "vector[384]"`.

Each name is exactly one Arrow type. Vectors are `fixed_size_list<float32>[width]`, as Lance stores them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import pyarrow as pa

from memwal.ingest.suggest import suggestion

SIMPLE: Mapping[str, Callable[[], pa.DataType]] = {
    "string": pa.string,
    "large_string": pa.large_string,
    "binary": pa.binary,
    "large_binary": pa.large_binary,
    "bool": pa.bool_,
    "int8": pa.int8,
    "int16": pa.int16,
    "int32": pa.int32,
    "int64": pa.int64,
    "uint8": pa.uint8,
    "uint16": pa.uint16,
    "uint32": pa.uint32,
    "uint64": pa.uint64,
    "float32": pa.float32,
    "float64": pa.float64,
    "date32": pa.date32,
}
ELEMENTS: Mapping[str, Callable[[], pa.DataType]] = {"float32": pa.float32, "float16": pa.float16}
EXAMPLES = (*SIMPLE, "timestamp[us]", "timestamp[us, UTC]", "vector[384]", "vector[384, float16]")

_VECTOR = re.compile(r"vector\[\s*([0-9]+)\s*(?:,\s*(\w+)\s*)?\]")
_TIMESTAMP = re.compile(r"timestamp\[\s*(s|ms|us|ns)\s*(?:,\s*([\w/+:-]+)\s*)?\]")


def parse_type(name: str) -> pa.DataType:
    """Return the Arrow type of a configured name. Raises: ValueError that suggests the nearest known type."""
    if name in SIMPLE:
        return SIMPLE[name]()
    if match := _TIMESTAMP.fullmatch(name):
        return pa.timestamp(match[1], tz=match[2])
    if match := _VECTOR.fullmatch(name):
        return _vector(int(match[1]), match[2] or "float32")
    raise ValueError(f"is not a column type{suggestion(name, EXAMPLES)}")


def _vector(width: int, element: str) -> pa.DataType:
    if width < 1:
        raise ValueError("has width 0; write the width of your vectors, such as vector[384]")
    if element not in ELEMENTS:
        raise ValueError(f"has elements of type {element!r}; a vector has {' or '.join(ELEMENTS)}")
    return pa.list_(ELEMENTS[element](), width)
