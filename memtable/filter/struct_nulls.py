"""Makes the fields of null structs null, for DataFusion.

Arrow leaves the value of a field inside a null struct undefined, mostly 0 or an empty text. DataFusion's `st.a` shows
that value; Lance, and readers of the column, show null.
"""

from __future__ import annotations

import pyarrow as pa


def null_inside(rows: pa.Table) -> pa.Table:
    """`rows` with null fields in every null struct, at any depth; columns without null structs unchanged."""
    for place, column in enumerate(rows.columns):
        if pa.types.is_nested(column.type) and any(map(_hides, column.chunks)):
            chunks = [with_null_fields(chunk) for chunk in column.chunks]
            rows = rows.set_column(place, rows.field(place), pa.chunked_array(chunks, column.type))
    return rows


def _hides(array: pa.Array) -> bool:
    """Whether a struct in `array` is null, and so may hide values of its fields."""
    kind = array.type
    if pa.types.is_struct(kind):
        if array.null_count and kind.num_fields:
            return True
        return any(_hides(array.field(place)) for place in range(kind.num_fields))
    return _is_list(kind) and _hides(array.values)


def with_null_fields(array: pa.Array) -> pa.Array:
    """Return `array` with null fields in every null struct, at any depth; as it is where there is none."""
    kind = array.type
    if not _hides(array):
        return array
    if pa.types.is_struct(kind):
        fields = [with_null_fields(field) for field in array.flatten()]  # null where the struct is
        return pa.StructArray.from_arrays(fields, fields=list(kind), mask=array.is_null())
    if array.offset:  # a mask is allowed only without an offset
        array = pa.concat_arrays([array.slice(0, 0), array])
    of = pa.LargeListArray if pa.types.is_large_list(kind) else pa.ListArray
    return of.from_arrays(array.offsets, with_null_fields(array.values), type=kind, mask=array.is_null())


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))
