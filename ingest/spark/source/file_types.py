"""Which types of Parquet and ORC files can be read into which column types."""

from __future__ import annotations

import pyarrow as pa


def readable(found: pa.DataType, wanted: pa.DataType) -> bool:
    """Return whether Spark reads a Parquet column of type `found` into a column of type `wanted` without loss."""
    types = pa.types
    if types.is_dictionary(found):
        found = found.value_type
    if types.is_integer(wanted):
        # Spark has no unsigned types: it reads them as the next wider signed type, which the sink narrows again.
        return bool(types.is_integer(found)) and _signed_bits(found) <= _signed_bits(wanted)
    if types.is_floating(wanted):  # the sink rounds float64 to a narrower column (`widened`)
        return bool(types.is_floating(found)) and found.bit_width > 16
    if types.is_timestamp(wanted):
        return bool(types.is_timestamp(found)) and found.unit != "ns" and (found.tz is None) == (wanted.tz is None)
    if _is_list(wanted):
        return _is_list(found) and _as_wide(found, wanted) and readable(found.value_type, wanted.value_type)
    if types.is_struct(wanted):
        return bool(types.is_struct(found)) and all(
            readable(found.field(each.name).type, each.type) for each in wanted if found.get_field_index(each.name) >= 0
        )
    if types.is_decimal(wanted):
        return bool(found == wanted)
    families = (
        (types.is_string, types.is_large_string, types.is_string_view),
        (types.is_binary, types.is_large_binary, types.is_binary_view, types.is_fixed_size_binary),
        (types.is_boolean,),
        (types.is_date32,),
    )
    return any(any(of(wanted) for of in family) and any(of(found) for of in family) for family in families)


def widened(kind: pa.DataType) -> pa.DataType:
    """Return `kind` with float64 in place of narrower floats.

    Spark reads narrower floats as float64, but never float64 as narrower floats. The sink rounds the values, and
    rejects those that would become infinite.
    """
    if pa.types.is_floating(kind):
        return pa.float64()
    if _is_list(kind):
        return pa.list_(widened(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(widened(field.type)) for field in kind])
    return kind


def _signed_bits(kind: pa.DataType) -> int:
    unsigned = bool(pa.types.is_unsigned_integer(kind))
    return int(kind.bit_width) * (2 if unsigned else 1)


def _as_wide(found: pa.DataType, wanted: pa.DataType) -> bool:
    """Return whether lists of type `found` can have the length of `wanted`.

    True if one of them has no fixed length: then only the values show whether they fit.
    """
    both = pa.types.is_fixed_size_list(found) and pa.types.is_fixed_size_list(wanted)
    return not both or bool(found.list_size == wanted.list_size)


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))
