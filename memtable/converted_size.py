"""The bytes that a caller's rows take as columns of a table, counted before anything is converted.

Arrow has types whose values take no bytes, or share them: nulls, dictionaries, runs, views, lists and structs of these.
A column of the table has none of them, so a message of 200 bytes may become gigabytes. All functions are pure; they
read offsets and indices, so arrays must have passed `validate(full=True)`.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from memwal.memtable.batch_store import BATCH_OVERHEAD
from memwal.memtable.conversion import is_list

_VIEWS = (pa.types.is_string_view, pa.types.is_binary_view)
_LIST_VIEWS = (pa.types.is_list_view, pa.types.is_large_list_view)
_LARGE = (pa.types.is_large_string, pa.types.is_large_binary, pa.types.is_large_list)


class ConvertedSize:
    """Counts the bytes of batches of one schema as columns of another.

    Thread safety. Immutable; any thread.
    """

    def __init__(self, own: pa.Schema, table: pa.Schema, *, whole: bool) -> None:
        """`own`: the schema of the batches; `table`: the columns that they become, by name. `whole`: rows get the
        columns of `table` that the batches lack, with nulls.
        """
        kinds = {field.name: field.type for field in table}
        self._kinds = [kinds.get(field.name, field.type) for field in own]
        pairs = zip(own.types, self._kinds, strict=True)
        self._as_is = all(given == kind and not expands(given) for given, kind in pairs)
        lacks = set(kinds).difference(own.names) if whole else ()
        self._lacking = sum(null_bytes(kinds[name]) for name in lacks)

    def of(self, batch: pa.RecordBatch) -> int:
        """Return an upper bound of the bytes of a batch, including the fixed cost of an array for each column."""
        size = int(batch.num_columns * BATCH_OVERHEAD + batch.num_rows * self._lacking)
        if self._as_is:
            return size + max(int(batch.nbytes), int(batch.num_rows))
        columns = zip(batch.columns, self._kinds, strict=True)
        return size + sum(converted_bytes(column, kind) for column, kind in columns)


@cache
def expands(kind: pa.DataType) -> bool:
    """Return whether values of a type may take more bytes in a column of a table than in this type."""
    if isinstance(kind, pa.BaseExtensionType):
        return expands(kind.storage_type)
    if pa.types.is_fixed_size_binary(kind):
        return bool(kind.byte_width == 0)
    if pa.types.is_struct(kind):
        return not kind.num_fields or any(expands(field.type) for field in kind)
    if pa.types.is_map(kind):
        return expands(kind.key_type) or expands(kind.item_type)
    if is_list(kind):
        return bool(pa.types.is_fixed_size_list(kind) and not kind.list_size) or expands(kind.value_type)
    return not _is_flat(kind)


@cache
def null_bytes(kind: pa.DataType) -> int:
    """Return the bytes that a null of a type takes in an array; at least 1."""
    if isinstance(kind, pa.BaseExtensionType):
        return null_bytes(kind.storage_type)
    if pa.types.is_fixed_size_list(kind):
        return max(1, int(kind.list_size) * null_bytes(kind.value_type))
    if pa.types.is_struct(kind):
        return 1 + sum(null_bytes(field.type) for field in kind)
    if any(is_large(kind) for is_large in _LARGE):
        return 8
    try:
        return max(1, (int(kind.bit_width) + 7) // 8)
    except ValueError:  # of variable width: an offset
        return 4


def converted_bytes(values: pa.Array, kind: pa.DataType) -> int:
    """Return the bytes of `values` as a column of the type `kind`, an upper bound. Nulls count at least 8."""
    own, rows = values.type, len(values)
    if isinstance(own, pa.BaseExtensionType):
        return converted_bytes(values.storage, own.storage_type if own == kind else kind)
    least = rows * max(null_bytes(kind), 8 if pa.types.is_null(own) else 1)
    if pa.types.is_null(own) or not rows:
        return least
    if pa.types.is_dictionary(own):
        return least + _referenced(values, kind)
    if pa.types.is_run_end_encoded(own):
        return least + rows * converted_bytes(values.values, kind)
    if any(is_view(own) for is_view in _VIEWS):
        return least + _viewed(values)
    if any(is_view(own) for is_view in _LIST_VIEWS):
        return least + _total(pc.list_value_length(values)) * converted_bytes(values.values, own.value_type)
    if pa.types.is_struct(own):
        fields = [(values.field(at), own.field(at)) for at in range(own.num_fields)]
        return least + sum(converted_bytes(each, _field_type(kind, field)) for each, field in fields)
    if pa.types.is_map(own):
        pairs = ((values.keys, own.key_type), (values.items, own.item_type))
        return least + rows * 4 + sum(converted_bytes(each, own_kind) for each, own_kind in pairs)
    if is_list(own):
        element = kind.value_type if is_list(kind) else own.value_type
        return least + rows * 4 + converted_bytes(_elements(values), element)
    return max(least, int(values.nbytes)) if own == kind else least + int(values.nbytes)


def _is_flat(kind: pa.DataType) -> bool:
    types = pa.types
    flat = (types.is_boolean, types.is_integer, types.is_floating, types.is_decimal, types.is_temporal)
    texts = (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)
    return any(is_kind(kind) for is_kind in (*flat, *texts))


def _total(lengths: pa.Array) -> int:
    return int(pc.sum(lengths.cast(pa.int64())).as_py() or 0)


def _viewed(values: pa.Array) -> int:
    """Return the bytes of all texts of an array of views.

    Arrow has no function for their lengths: int32, the first of four in each view
    (https://arrow.apache.org/docs/format/Columnar.html#variable-size-binary-view-layout).
    """
    views = np.frombuffer(values.buffers()[1], np.int32).reshape(-1, 4)[values.offset : values.offset + len(values), 0]
    return int(views[values.is_valid().to_numpy(zero_copy_only=False)].sum(dtype=np.int64))


def _referenced(values: pa.DictionaryArray, kind: pa.DataType) -> int:
    """Return the bytes of the values that the indices of a dictionary refer to, each as often as it is referenced."""
    among, own = values.dictionary, values.type.value_type
    is_text = pa.types.is_string(own) or pa.types.is_large_string(own)
    if is_text or pa.types.is_binary(own) or pa.types.is_large_binary(own):
        return _total(pc.binary_length(among).take(values.indices))
    if _is_flat(own) or pa.types.is_null(own):
        return len(values) * max(null_bytes(own), null_bytes(kind))
    return len(values) * converted_bytes(among, kind)


def _elements(values: pa.Array) -> pa.Array:
    """Return the elements of all lists."""
    if pa.types.is_fixed_size_list(values.type):
        width = values.type.list_size
        return values.values.slice(values.offset * width, len(values) * width)
    first, last = values.offsets[0].as_py(), values.offsets[-1].as_py()
    return values.values.slice(first, last - first)


def _field_type(kind: pa.DataType, own: pa.Field) -> pa.DataType:
    """Return the type that a field of a struct becomes."""
    at = kind.get_field_index(own.name) if pa.types.is_struct(kind) else -1
    return own.type if at < 0 else kind.field(at).type
