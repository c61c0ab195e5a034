"""The column types that a table can hold: those that WAL entries, SSTs and the base table all return unchanged.

The list names the allowed types. Everything else is rejected before a row is acknowledged, at any depth: Lance accepts
more types than it returns unchanged, or can read at all. Measured with pylance 14.0.2:

    null                          Lance has no value to write; a list of them was unreadable after a flush
    map, decimal32, interval      Lance cannot write them in every file format
    view, dictionary, JSON        are returned as another type or another value
    a child that is not null      a null parent cannot be read, and a delete is a row of nulls
    binary of width 0             is written and cannot be read
    extension type in another     pyarrow cannot create an empty array of it
    list of fixed size            holds numbers, dates, times, bool, fixed-size binary, or lists of fixed size of these
    struct that begins with a list  cannot be read if two pages of a file differ in having null structs

Lance's projections parse dots and backticks in names.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from memwal.memtable.errors import InvalidRows

TOMBSTONE = "_tombstone"
_FIXED_WIDTH = (
    pa.types.is_boolean,
    pa.types.is_integer,
    pa.types.is_floating,
    pa.types.is_decimal128,
    pa.types.is_decimal256,
    pa.types.is_date,
    pa.types.is_time,
    pa.types.is_timestamp,
    pa.types.is_duration,
)
_VARIABLE_WIDTH = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
_EXTENSIONS = ("arrow.uuid", "arrow.bool8")
_LANCES_LETTERS = (".", "`", "\x00")
LANCES_ROW_COLUMNS = ("_rowid", "_rowaddr", "_rowoffset", "_row_created_at_version", "_row_last_updated_at_version")
"""Names that Lance adds to rows by itself. It cannot scan a table with a column of this name."""
_LANCES_OWN = ("*", *LANCES_ROW_COLUMNS)
_REMEDY = "choose a number, text, binary, date, time, list or struct type"


def check_types(schema: pa.Schema) -> None:
    """Raise InvalidRows naming the first column whose name or type cannot be held."""
    for field in schema:
        if (reason := unsupported(field)) is not None:
            raise InvalidRows(reason, column=field.name)


def unsupported(field: pa.Field) -> str | None:
    """Return in one line, with the remedy, why a table cannot hold the column `field`; None if it can."""
    if field.name == TOMBSTONE:
        return f"column {TOMBSTONE!r} is reserved: rename it"
    if not field.name or field.name in _LANCES_OWN or any(letter in field.name for letter in _LANCES_LETTERS):
        return (
            f"column {field.name!r} has a name that Lance reads as something else: name it without dots, backticks "
            f"and NUL, and none of {', '.join(_LANCES_OWN)}"
        )
    return next(_problems(field.type, field.name), None)


def _problems(kind: pa.DataType, path: str, *, nested: bool = False) -> Iterator[str]:
    """Yield the properties that a column must not have, at any depth. `path`: of the value, such as 'doc.item'."""
    if isinstance(kind, pa.BaseExtensionType):
        allowed = kind.extension_name in _EXTENSIONS and not nested
    elif pa.types.is_fixed_size_list(kind):
        allowed = kind.list_size > 0 and _is_fixed_width(kind.value_type)
    else:
        allowed = _is_fixed_width(kind) or any(is_kind(kind) for is_kind in (*_VARIABLE_WIDTH, _is_list, _is_struct))
    if not allowed:
        yield f"column {path!r} has the type {kind}, which is not kept as it is: {_REMEDY}"
        return
    if _begins_with_list(kind):
        yield (
            f"column {path!r} is a struct whose first field is a list, which Lance cannot always read back: put "
            "another field first"
        )
    for child in _children(kind):
        inner = f"{path}.{child.name}"
        if not child.nullable:
            yield f"column {inner!r} is declared not null inside {path!r}: make it nullable"
        yield from _problems(child.type, inner, nested=True)


def _is_fixed_width(kind: pa.DataType) -> bool:
    if isinstance(kind, pa.BaseExtensionType):
        return False  # Lance writes no list of fixed size with an extension type
    if pa.types.is_fixed_size_binary(kind):
        return bool(kind.byte_width > 0)
    if pa.types.is_fixed_size_list(kind):
        return bool(kind.list_size > 0) and _is_fixed_width(kind.value_type)
    return any(is_kind(kind) for is_kind in _FIXED_WIDTH)


def _is_list(kind: pa.DataType) -> bool:
    """Return whether a type is a list of variable length."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _is_struct(kind: pa.DataType) -> bool:
    return bool(pa.types.is_struct(kind) and kind.num_fields)


def _begins_with_list(kind: pa.DataType) -> bool:
    return _is_struct(kind) and _is_list(kind.field(0).type)


def _children(kind: pa.DataType) -> Iterator[pa.Field]:
    if _is_list(kind) or pa.types.is_fixed_size_list(kind):
        yield kind.value_field
    elif _is_struct(kind):
        yield from (kind.field(at) for at in range(kind.num_fields))
