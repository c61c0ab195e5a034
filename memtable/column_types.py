"""The column types that a table can hold: those that WAL entries, SSTs and the base table all return unchanged.

Lance accepts more types at creation than it can read back beside MemWAL; they are refused there, before any row is
acknowledged. Measured with pylance 14.0.2: maps cannot be written; view types and dictionaries come back as another
type; JSON comes back as another value; a null in a struct or list with a field that is not null cannot be read, and a
tombstone is such a null; binary of width 0 is written and cannot be read; a list of fixed size holds values of a fixed
width only; its projections parse dots and backticks in names.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from memwal.memtable.errors import InvalidRows

_EXTENSIONS = ("arrow.uuid", "arrow.bool8")
_FLAT = (
    pa.types.is_null,
    pa.types.is_boolean,
    pa.types.is_integer,
    pa.types.is_floating,
    pa.types.is_decimal128,
    pa.types.is_decimal256,
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_binary,
    pa.types.is_large_binary,
    pa.types.is_fixed_size_binary,
    pa.types.is_date,
    pa.types.is_time,
    pa.types.is_timestamp,
    pa.types.is_duration,
)
_VARIABLE = (
    pa.types.is_null,
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_binary,
    pa.types.is_large_binary,
    pa.types.is_list,
    pa.types.is_large_list,
    pa.types.is_struct,
)
_LANCES_LETTERS = (".", "`", "\x00")
_LANCES_OWN = ("*", "_rowid", "_rowaddr", "_rowoffset", "_row_created_at_version", "_row_last_updated_at_version")
_REMEDY = "choose a number, text, binary, date, time, list or struct type"


def check_types(schema: pa.Schema) -> None:
    """Raise InvalidRows naming the first column whose name or type cannot be held."""
    for field in schema:
        if not field.name or field.name in _LANCES_OWN or any(each in field.name for each in _LANCES_LETTERS):
            raise InvalidRows(
                f"column {field.name!r} has a name that Lance reads as something else: name it without dots, backticks "
                f"and NUL, and none of {', '.join(_LANCES_OWN)}",
                column=field.name,
            )
        _check(field.type, field.name)


def _check(kind: pa.DataType, path: str) -> None:
    if isinstance(kind, pa.BaseExtensionType):
        if kind.extension_name not in _EXTENSIONS:
            raise InvalidRows(
                f"column {path!r} has the type {kind}, which is not kept as it is: {_REMEDY}", column=path
            )
        return
    children = list(_children(kind))
    if not (children or any(is_flat(kind) for is_flat in _FLAT)) or _cannot_be_read(kind):
        raise InvalidRows(f"column {path!r} has the type {kind}, which is not kept as it is: {_REMEDY}", column=path)
    for child in children:
        inner = f"{path}.{child.name}"
        if not child.nullable:
            raise InvalidRows(f"column {inner!r} is declared not null inside {path!r}: make it nullable", column=path)
        _check(child.type, inner)


def _cannot_be_read(kind: pa.DataType) -> bool:
    if pa.types.is_fixed_size_binary(kind):
        return bool(kind.byte_width == 0)
    if not pa.types.is_fixed_size_list(kind):
        return False
    return kind.list_size == 0 or any(is_variable(kind.value_type) for is_variable in _VARIABLE)


def _children(kind: pa.DataType) -> Iterator[pa.Field]:
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        yield kind.value_field
    elif pa.types.is_struct(kind):
        yield from (kind.field(at) for at in range(kind.num_fields))
