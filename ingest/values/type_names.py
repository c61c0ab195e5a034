"""Parse names of column types in the configuration: `installed_kb = "int64"`, `embedding = "vector[384]"`.

Each name is exactly one Arrow type. Vectors are `fixed_size_list<float32>[width]`, as Lance stores them.
"""

from __future__ import annotations

import re

import pyarrow as pa

from memwal.ingest.suggest import suggestion

SIMPLE = (
    *("string", "large_string", "binary", "large_binary", "bool", "int8", "int16", "int32", "int64"),
    *("uint8", "uint16", "uint32", "uint64", "float32", "float64", "date32"),
)
"""Types that have the same name in Arrow."""
ELEMENTS = ("float32", "float16")
EXAMPLES = (*SIMPLE, "timestamp[us]", "timestamp[us, UTC]", "vector[384]", "vector[384, float16]")
_ELSEWHERE = {
    **dict.fromkeys(("integer", "int", "INTEGER"), "write int32 or int64"),
    **dict.fromkeys(("bigint", "long", "BIGINT"), "write int64"),
    **dict.fromkeys(("smallint", "short"), "write int16"),
    **dict.fromkeys(("text", "varchar", "char", "str", "utf8", "TEXT", "VARCHAR", "json", "uuid"), "write string"),
    **dict.fromkeys(("float", "real", "number", "decimal"), "write float32 or float64"),
    **dict.fromkeys(("double", "DOUBLE"), "write float64"),
    "boolean": "write bool",
    "date": "write date32",
    **dict.fromkeys(("timestamp", "datetime", "time"), "write timestamp[us] or timestamp[us, UTC]"),
    **dict.fromkeys(("vector", "embedding", "list", "array"), "write vector[384], with the width of your vectors"),
    **dict.fromkeys(("bytes", "blob", "bytea"), "write binary"),
}
"""Names of types in SQL and other programs."""

_VECTOR = re.compile(r"vector\[\s*([0-9]+)\s*(?:,\s*(\w+)\s*)?\]")
_TIMESTAMP = re.compile(r"timestamp\[\s*(s|ms|us|ns)\s*(?:,\s*([\w/+:-]+)\s*)?\]")


def parse_type(name: str) -> pa.DataType:
    """Return the Arrow type of a configured name. Raises: ValueError that suggests the nearest known type."""
    if name in SIMPLE:
        return pa.type_for_alias(name)
    if match := _TIMESTAMP.fullmatch(name):
        return pa.timestamp(match[1], tz=match[2])
    if match := _VECTOR.fullmatch(name):
        return _vector(int(match[1]), match[2] or "float32")
    raise ValueError(f"is not a column type{suggestion(name, EXAMPLES, elsewhere=_ELSEWHERE)}")


def _vector(width: int, element: str) -> pa.DataType:
    if width < 1:
        raise ValueError("has width 0; write the width of your vectors, such as vector[384]")
    if element not in ELEMENTS:
        raise ValueError(f"has elements of type {element!r}; a vector has {' or '.join(ELEMENTS)}")
    return pa.list_(pa.type_for_alias(element), width)
