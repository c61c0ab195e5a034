"""Read the JSON values of a whole batch as columns with Arrow's reader: all of them, or none if any value is wrong.

The values are joined with line breaks to one text. No record can take its neighbour's place: each value must begin with
`{` and end with `}`. A value that is cut off inside an object is followed by `{` where JSON requires a comma; a value
that is cut off inside a string is followed by a line break, which JSON forbids there. If the reader then returns as
many objects as there are values, each value is one object.

Arrow rejects text that is not strict JSON (except NaN and Inf, which are searched for), duplicate names of fields that
are read, numbers in place of text, and integers out of range. `finished` rejects the rest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from memwal.ingest.values.documents import DELETE, UPSERTS, of_json
from memwal.ingest.values.values import FLOAT_MAX, NARROW, WHOLE, column, is_bytes, is_readable, is_text, transport_type

Path = tuple[str, ...]
Read = tuple[Path, pa.DataType, str]
"""A field to read: its path, its column's type, the unit of its numbers."""
_WRAPPER: Path = ("payload",)
_MINUS_ZERO = np.iinfo(np.int64).min  # the bits of -0.0
_PAYLOAD = re.compile(rb'"payload"\s*:\s*(?={)')


def plain(values: pa.Array, fields: Sequence[Read], *, closed: bool = False) -> list[pa.Array] | None:
    """Return the columns of `fields`, in order; None if any value does not fit. `values`: binary, no nulls.

    `closed`: return None too if a value has a field that is not in `fields`.
    """
    try:
        struct = _struct(values, fields, "error" if closed else "ignore")
        return None if struct is None else [finished(at(struct, path), *how) for path, *how in fields]
    except _REFUSED:
        return None


def wrapped(values: pa.Array, fields: Sequence[Read]) -> list[pa.Array] | None:
    """As `plain`, for keys. All keys except empty objects have the same wrapper and schema, or no key has a wrapper.

    A wrapper is an object with only a schema and a payload.
    """
    given = values.filter(pc.not_equal(values, b"{}"))
    head = _head(given[0].as_py()) if len(given) else None
    if head is not None:
        whole = pc.and_(pc.starts_with(given, head), pc.ends_with(given, b"}"))
        inside = pc.binary_slice(values, len(head), -1)
        return plain(pc.if_else(pc.equal(values, b"{}"), values, inside), fields) if pc.all(whole).as_py() else None
    try:
        struct = _struct(values, fields, objects=[_WRAPPER])
        if struct is None or at(struct, _WRAPPER).null_count < len(values):
            return None
        return [finished(at(struct, path), *how) for path, *how in fields]
    except _REFUSED:
        return None


def _head(value: bytes) -> bytes | None:
    """Return the bytes before the payload of a wrapped value; None if the value is not wrapped."""
    for found in _PAYLOAD.finditer(value):
        try:
            if list(of_json(value[: found.end()] + b"{}}")) == ["schema", "payload"]:
                return value[: found.end()]
        except ValueError:
            continue
    return None


def debezium(
    values: pa.Array, fields: Sequence[Read], around: Sequence[Read], empty: pa.Array
) -> tuple[list[pa.Array], pa.Array] | None:
    """Return columns of Debezium envelopes, and which rows delete: bool array.

    The columns: `fields` of the row inside each envelope, then `around` of the envelope itself. Returns None as `plain`
    does, and if an envelope is malformed. `empty`: rows that are not checked.
    """
    op = (("op",), pa.string(), "")
    sides = [*_below(("after",), fields), *_below(("before",), fields)]
    try:
        wanted = [op, *sides, *around]
        struct = _struct(values, [*wanted, *_below(_WRAPPER, wanted)])
        if struct is None:
            return None
        ops = _either(struct, *op)
        upsert = pc.is_in(ops, pa.array(UPSERTS))
        delete = pc.equal(ops, DELETE).fill_null(False)
        if not pc.all(pc.or_(empty, pc.or_(upsert, delete))).as_py() or not _sides_present(struct, upsert, delete):
            return None
        rows = [
            pc.if_else(delete, _either(struct, ("before", *path), *how), _either(struct, ("after", *path), *how))
            for path, *how in fields
        ]
        return [*rows, *(_either(struct, *field) for field in around)], delete
    except _REFUSED:
        return None


_REFUSED = (pa.ArrowInvalid, pa.ArrowNotImplementedError, UnicodeDecodeError)


def _below(path: Path, fields: Sequence[Read]) -> list[Read]:
    return [((*path, *each), kind, unit) for each, kind, unit in fields]


def _either(struct: pa.StructArray, path: Path, kind: pa.DataType, unit: str) -> pa.Array:
    """Return a field of the payload if the value has a payload, else a field of the value itself."""
    inside = at(struct, (*_WRAPPER, *path))
    values = pc.if_else(pc.is_valid(at(struct, _WRAPPER)), inside, at(struct, path))
    return finished(values, kind, unit)


def _sides_present(struct: pa.StructArray, upsert: pa.Array, delete: pa.Array) -> bool:
    """Return whether every upsert has `after` and every delete has `before`."""
    for side, wanted in (("after", upsert), ("before", delete)):
        present = pc.or_(pc.is_valid(at(struct, (side,))), pc.is_valid(at(struct, (*_WRAPPER, side))))
        if pc.any(pc.and_not(wanted, present)).as_py():
            return False
    return True


def _struct(
    values: pa.Array, fields: Sequence[Read], other_fields: str = "ignore", objects: Sequence[Path] = ()
) -> pa.StructArray | None:
    """Return `values` as a struct with `fields`; None if a value does not fit.

    `objects`: paths of objects that are read without their fields.
    """
    if not all(is_fast(kind) for _, kind, _ in fields):
        return None
    text = values.cast(pa.string())  # the reader does not check the encoding
    wanted = [(path, json_type(kind, unit)) for path, kind, unit in fields]
    schema = pa.schema(_fields([*wanted, *((path, pa.struct([])) for path in objects)]))
    struct = _parsed(text, schema, other_fields)
    if struct is not None and any(_rounds(at(struct, path), kind, text) for path, kind, _ in fields):
        return None
    return struct


def at(struct: pa.StructArray, path: Path) -> pa.Array:
    """Return the field at `path`; null below a null."""
    values: pa.Array = struct
    for name in path:
        values = pc.struct_field(values, name)
    return values


def _fields(wanted: Iterable[tuple[Sequence[str], pa.DataType]]) -> list[pa.Field]:
    """Return the fields of a struct that has a value of each type at its path.

    Raises: pa.ArrowInvalid for a path with two types, or one that continues below a value.
    """
    below: dict[str, dict[tuple[Path, pa.DataType], None]] = {}
    for (name, *rest), kind in wanted:
        below.setdefault(name, {})[tuple(rest), kind] = None
    fields = []
    for name, parts in below.items():
        (path, kind), *more = parts
        if more and not all(each for each, _ in parts):
            raise pa.ArrowInvalid(f"{name} is read in two ways")
        fields.append(pa.field(name, pa.struct(_fields(parts)) if path else kind))
    return fields


def _parsed(text: pa.Array, schema: pa.Schema, other_fields: str) -> pa.StructArray | None:
    import pyarrow.json as reader

    trimmed = pc.ascii_trim(text, " \t\r\n")
    whole = pc.and_(pc.starts_with(trimmed, "{"), pc.ends_with(trimmed, "}"))
    if not len(text):
        return pa.array([], pa.struct(list(schema)))
    if not pc.all(whole).as_py():
        return None
    offsets = pa.array(np.array([0, len(text)], np.int32))
    joined = pc.binary_join(pa.ListArray.from_arrays(offsets, trimmed), "\n")
    buffer = joined[0].as_buffer()
    given = buffer.to_pybytes()
    named = b"NaN" in given or b"Inf" in given  # maybe inside a string
    if named and pc.any(pc.match_substring_regex(text, r"[:\[,]\s*-?(NaN|Inf)")).as_py():
        return None
    table = reader.read_json(
        pa.BufferReader(buffer),
        read_options=reader.ReadOptions(use_threads=False, block_size=buffer.size + 1),
        parse_options=reader.ParseOptions(
            explicit_schema=schema, newlines_in_values=True, unexpected_field_behavior=other_fields
        ),
    )
    return table.to_struct_array().combine_chunks() if len(table) == len(text) else None


def _rounds(values: pa.Array, kind: pa.DataType, text: pa.Array) -> bool:
    """Return whether floats of a column may be whole numbers in `text` that the reader rounded.

    Also true for -0, which as a whole number is 0 without a sign.
    """
    floats, number = _flat(values, kind)
    found = floats.drop_null()
    if not pa.types.is_floating(number) or not len(found):
        return False
    width, given = number.bit_width, found.to_numpy()
    doubtful = bool(np.any(given.view(np.int64) == _MINUS_ZERO))
    if largest(found) >= WHOLE[width]:
        large = given[np.abs(given) >= WHOLE[width]]
        with np.errstate(over="ignore"):
            narrow = large.astype(NARROW[width])
        doubtful |= bool(np.any((np.abs(large) >= WHOLE[64]) | ((narrow != large) & (np.trunc(large) == large))))
    if not doubtful:
        return False
    whole = rf"[:\[,]\s*(-0|-?\d{{{len(str(WHOLE[width]))},}})\s*[,\]}}]"
    return bool(pc.any(pc.match_substring_regex(text, whole)).as_py())


def _flat(values: pa.Array, kind: pa.DataType) -> tuple[pa.Array, pa.DataType]:
    """Return the elements of a list column and their type; any other column and its type unchanged."""
    return (values.flatten(), kind.value_type) if pa.types.is_list(values.type) else (values, kind)


# ---- columns as they are read --------------------------------------------------------------------------------------


def finished(values: pa.Array, kind: pa.DataType, unit: str) -> pa.Array:
    """Convert a column read as `json_type` to `transport_type(kind)`.

    Raises: pa.ArrowInvalid if any value does not fit.
    """
    if not is_readable(kind):
        return pa.nulls(len(values), transport_type(kind))
    if unit or is_bytes(kind) or pa.types.is_decimal(kind):
        converted, problems = column(values.to_pylist(), kind, unit)
        if problems:
            raise pa.ArrowInvalid(next(iter(problems.values())))
        return converted
    floats, number = _flat(values, kind)
    if pa.types.is_floating(number):
        if pc.all(pc.is_finite(floats)).as_py() is False:
            raise pa.ArrowInvalid("not finite")
        if largest(floats) > FLOAT_MAX[number.bit_width]:
            raise pa.ArrowInvalid("range")
    if pa.types.is_fixed_size_list(kind):
        widths = pc.list_value_length(values)
        if floats.null_count or pc.any(pc.not_equal(widths, kind.list_size)).as_py():
            raise pa.ArrowInvalid("width")
    return values.cast(transport_type(kind))


def largest(floats: pa.Array) -> float:
    """Return the largest absolute value of `floats`; 0 if there are no values."""
    found = pc.min_max(floats).as_py()
    return max(-(found["min"] or 0.0), found["max"] or 0.0)


def is_fast(kind: pa.DataType) -> bool:
    """Return whether Arrow's JSON reader and `finished` give a column of `kind` exactly the values that `typed` gives.

    False for structs, as the reader drops their unknown fields, and for lists of values that JSON represents as text.
    """
    if pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind):
        inner = kind.value_type
        simple = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, is_text)
        return any(of(inner) for of in simple)
    return not pa.types.is_nested(kind)


def json_type(kind: pa.DataType, unit: str) -> pa.DataType:
    """Return the type that Arrow's JSON reader uses to read a field for `finished`.

    Text where the reader would guess; null for columns that accept no values.
    """
    if not is_readable(kind):
        return pa.null()
    if unit:
        return pa.int64()
    if pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind):
        return pa.list_(json_type(kind.value_type, ""))
    if is_bytes(kind) or is_text(kind) or pa.types.is_temporal(kind) or pa.types.is_decimal(kind):
        return pa.string()
    return pa.float64() if pa.types.is_floating(kind) else kind  # rounded once, as Python's floats
