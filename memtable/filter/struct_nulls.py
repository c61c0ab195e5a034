"""Set the fields of null structs to null, for DataFusion.

Arrow leaves the value of a field inside a null struct undefined, mostly 0 or an empty text. DataFusion's `st.a` shows
that value; Lance, and readers of the column, show null.
"""

from __future__ import annotations

import pyarrow as pa


def null_inside(rows: pa.Table) -> pa.Table:
    """Return `rows` with null fields in every null struct, at any depth."""
    for place, column in enumerate(rows.columns):
        if pa.types.is_nested(column.type):
            chunks = [with_null_fields(chunk) for chunk in column.chunks]
            rows = rows.set_column(place, rows.field(place), pa.chunked_array(chunks, column.type))
    return rows


def with_null_fields(array: pa.Array) -> pa.Array:
    """Return `array` with null fields in every null struct, at any depth."""
    kind = array.type
    if pa.types.is_struct(kind) and kind.num_fields:
        fields = [with_null_fields(field) for field in array.flatten()]  # null where the struct is
        return pa.StructArray.from_arrays(fields, fields=list(kind), mask=array.is_null())
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if not is_list or not pa.types.is_nested(kind.value_type):
        return array
    if array.offset:  # a mask is allowed only without an offset
        array = pa.concat_arrays([array.slice(0, 0), array])
    of = pa.LargeListArray if pa.types.is_large_list(kind) else pa.ListArray
    return of.from_arrays(array.offsets, with_null_fields(array.values), type=kind, mask=array.is_null())
