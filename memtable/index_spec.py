"""The indexes of a table: one IndexSpec per indexed column, the check that a schema supports it, and types of columns.

The kinds and their parameters are Lance's own (`LanceDataset.create_index`, `create_scalar_index`), so that one spec
describes the index of the base table and the one in memory.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import pyarrow as pa

from memwal.memtable.errors import InvalidRows

IndexKind = Literal["ivf_pq", "fts", "btree"]
INDEX_KINDS: tuple[IndexKind, ...] = get_args(IndexKind)
METRICS = ("l2", "cosine", "dot")
TRAIN_ROWS = 1024
NGRAM_LENGTHS: Mapping[str, int] = {"min_ngram_length": 3, "max_ngram_length": 3}
TOKENIZERS = ("simple", "whitespace", "raw", "ngram")
_PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "ivf_pq": ("metric", "num_partitions", "num_sub_vectors", "train_rows"),
    "fts": (
        "with_position",
        "base_tokenizer",
        "min_ngram_length",
        "max_ngram_length",
        "prefix_only",
        "language",
        "max_token_length",
        "lower_case",
        "stem",
        "remove_stop_words",
        "custom_stop_words",
        "ascii_folding",
    ),
    "btree": (),
}
_COUNTS = ("num_partitions", "num_sub_vectors", "train_rows", "max_token_length", *NGRAM_LENGTHS)
_WANTED: Mapping[str, str] = {
    "ivf_pq": "a fixed_size_list of float16, float32 or float64",
    "fts": "string or large_string",
    "btree": "a number, bool, string, binary, date or timestamp",
}
_KEY_TYPES = (
    *(pa.types.is_integer, pa.types.is_boolean, pa.types.is_string, pa.types.is_large_string),
    *(pa.types.is_binary, pa.types.is_large_binary),
)
_LANGUAGES = (
    *("Arabic", "Danish", "Dutch", "English", "Finnish", "French", "German", "Greek", "Hungarian", "Italian"),
    *("Norwegian", "Portuguese", "Romanian", "Russian", "Spanish", "Swedish", "Tamil", "Turkish"),
)
_CHOICES = {"metric": METRICS, "language": _LANGUAGES, "base_tokenizer": TOKENIZERS}


@dataclass(frozen=True)
class IndexSpec:
    """One index over one column.

    Invariants. Immutable; independent of a schema (see check_indexes for that).
    """

    column: str
    kind: IndexKind
    parameters: Mapping[str, Any] = field(default_factory=dict)
    called: str = ""
    """Name of the index if it is not the default below, because the column was renamed since."""

    @property
    def name(self) -> str:
        """Name of the index in the base table and in SSTs: Lance's own default."""
        return self.called or f"{self.column}_idx"


def vector_width(kind: pa.DataType) -> int | None:
    """Return the width of a vector type (fixed_size_list of float16/32/64), None for any other type."""
    if pa.types.is_fixed_size_list(kind) and pa.types.is_floating(kind.value_type):
        return int(kind.list_size)
    return None


def check_indexes(schema: pa.Schema, specs: Sequence[IndexSpec]) -> None:
    """Refuse index definitions that the schema does not support.

    Raises InvalidRows naming the column, the kind, the type found and the remedy. Thread safety: pure.
    """
    seen: set[str] = set()
    for spec in specs:
        if spec.kind not in _PARAMETERS:
            raise InvalidRows(
                f"index on column {spec.column!r}: unknown kind {spec.kind!r}; use one of {', '.join(_PARAMETERS)}",
                column=spec.column,
            )
        if spec.column not in schema.names:
            hint = nearest(spec.column, schema.names)
            said = f"index {spec.kind} on column {spec.column!r:.200}: no such column{hint}"
            raise InvalidRows(said, column=spec.column)
        if spec.column in seen:
            raise InvalidRows(
                f"column {spec.column!r} has two indexes: keep one, a column carries at most one index",
                column=spec.column,
            )
        seen.add(spec.column)
        _check_type(spec, schema.field(spec.column).type)
        _check_parameters(spec, schema.field(spec.column).type)


def nearest(name: str, names: Sequence[str]) -> str:
    """Return '; did you mean ...' with the nearest of `names`, or the list of all names."""
    close = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; the columns are {', '.join(names)}"


def _check_type(spec: IndexSpec, kind: pa.DataType) -> None:
    fits: Mapping[str, Callable[[pa.DataType], bool]] = {
        "ivf_pq": lambda t: vector_width(t) is not None,
        "fts": lambda t: pa.types.is_string(t) or pa.types.is_large_string(t),
        "btree": is_orderable,
    }
    if not fits[spec.kind](kind):
        raise InvalidRows(
            f"index {spec.kind} on column {spec.column!r}: its type is {kind}, it must be"
            f" {_WANTED[spec.kind]}; change the column or drop the index",
            column=spec.column,
        )


def is_key_type(kind: pa.DataType) -> bool:
    """Return whether a column of this type may be part of a key."""
    return any(is_kind(kind) for is_kind in _KEY_TYPES)


def is_orderable(kind: pa.DataType) -> bool:
    """Return whether a B-tree can order values of this type (not float16: Arrow does not sort it)."""
    types = pa.types
    more = (types.is_float32, types.is_float64, types.is_date, types.is_timestamp)
    return is_key_type(kind) or any(is_kind(kind) for is_kind in more)


def _check_parameters(spec: IndexSpec, kind: pa.DataType) -> None:
    known = _PARAMETERS[spec.kind]
    for name, value in spec.parameters.items():
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(known) or 'none'}"
            raise InvalidRows(
                f"index {spec.kind} on column {spec.column!r}: unknown parameter {name!r:.200}{hint}",
                column=spec.column,
            )
        problem = _value_problem(name, value, kind)
        if problem:
            given = " ".join(f"{value!r:.200}".split())  # an array has several lines
            raise InvalidRows(
                f"index {spec.kind} on column {spec.column!r}: {name} = {given}, {problem}",
                column=spec.column,
            )
    shortest, longest = (spec.parameters.get(name, default) for name, default in NGRAM_LENGTHS.items())
    if shortest > longest:
        raise InvalidRows(
            f"index {spec.kind} on column {spec.column!r}: min_ngram_length = {shortest} is more than"
            f" max_ngram_length = {longest}; raise max_ngram_length",
            column=spec.column,
        )


def _value_problem(name: str, value: Any, kind: pa.DataType) -> str | None:
    """Return the problem with one parameter's value; None if it is valid."""
    if (choices := _CHOICES.get(name)) is not None:
        return None if value in choices else f"it must be one of {', '.join(choices)}"
    if name == "custom_stop_words":
        words = isinstance(value, list | tuple) and all(isinstance(word, str) for word in value)
        return None if words or value is None else "it must be a list of words"
    if name in _COUNTS:
        if name == "max_token_length" and value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            return "it must be a whole number of at least 1"
        width = vector_width(kind)
        if name == "num_sub_vectors" and width is not None and width % value:
            return f"it must divide the vector width {width}"
        return None
    return None if isinstance(value, bool) else "it must be true or false"
