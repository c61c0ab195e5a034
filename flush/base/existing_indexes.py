"""Adopt the names and parameters of indexes that a table has when it is adopted.

memwal searches uncommitted rows by its own indexes, with the parameters of the table's set-up. If these differed from
the existing index, the same row would be found before its commit and not after it, or at another distance.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import lance
import pyarrow as pa

from memwal.flush.base.shape import column_ids, field_id
from memwal.memtable import IndexSpec, InvalidRows, check_indexes
from memwal.memtable.index_spec import INDEX_KINDS

_FTS: Mapping[str, Any] = {
    "with_position": False,
    "base_tokenizer": "simple",
    "min_ngram_length": 3,
    "max_ngram_length": 3,
    "prefix_only": False,
    "language": "English",
    "max_token_length": 40,
    "lower_case": True,
    "stem": True,
    "remove_stop_words": True,
    "custom_stop_words": None,
    "ascii_folding": True,
}
"""Parameters that memwal's index has too, with their defaults."""
DEFAULTS: Mapping[str, Any] = {**_FTS, "metric": "l2"}
"""Values of parameters that an index does not name; Lance decides those missing here."""
_FTS_ONLY_LANCES: Mapping[str, Sequence[Any]] = {
    "lance_tokenizer": (None, "text"),
    "split_identifiers": (False,),
    "split_on_numerics": (False,),
    "preserve_original": (False,),
    "index_operators": (False,),
    "document_granularity": ("row",),
}
"""Parameters that only Lance's index has, with the values that make both indexes find the same rows."""


LANCES_OWN = "__lance"
"""Prefix of the names of Lance's internal indexes."""


def all_existing_indexes(uri: str, dataset: lance.LanceDataset, wanted: Sequence[IndexSpec]) -> tuple[IndexSpec, ...]:
    """Return `with_existing_indexes`, and the searchable existing indexes on other columns.

    If a column has two, the index of vectors or text is chosen.
    """
    specs = {spec.column: spec for spec in with_existing_indexes(uri, dataset, wanted)}
    found = (adoptable(uri, dataset, index)[0] for index in dataset.describe_indices())
    for spec in sorted((spec for spec in found if spec is not None), key=lambda spec: spec.kind == "btree"):
        specs.setdefault(spec.column, spec)
    return tuple(specs.values())


def with_existing_indexes(uri: str, dataset: lance.LanceDataset, wanted: Sequence[IndexSpec]) -> tuple[IndexSpec, ...]:
    """Return `wanted`, each spec with the name and parameters of the existing index of its kind on its column.

    Raises InvalidRows if a wanted parameter differs from the existing index, if memwal's index lacks a function of the
    existing one, or if an index of another kind has the name.
    """
    built = list(dataset.describe_indices())
    return tuple(_with_existing_index(uri, dataset, spec, built) for spec in wanted)


def adoptable(uri: str, dataset: lance.LanceDataset, index: Any) -> tuple[IndexSpec | None, str]:
    """Return the spec of an index that another program built, and "".

    If the index cannot serve searches, return None and the reason. `index`: from `describe_indices`.
    """
    names = {number: name for name, number in column_ids(dataset).items()}
    column, kind = names.get(index.fields[0]) if len(index.fields) == 1 else None, _kind(index)
    if column is None:
        return None, "it is on several columns, or on a field of a column"
    ours = next((known for known in INDEX_KINDS if known == kind), None)
    if ours is None:
        return None, f"memwal keeps no indexes of the kind {kind}"
    try:
        spec = _with_existing_index(uri, dataset, IndexSpec(column, ours), [index])
        check_indexes(pa.schema(list(dataset.schema)), [spec])
    except InvalidRows as error:
        return None, str(error).removeprefix(f"{uri}: ")
    return spec, ""


def is_behind(dataset: lance.LanceDataset, index: Any) -> bool:
    """Return whether a fragment of `dataset` is in no segment of `index` (from `describe_indices`).

    Avoids `index_stats`, which reads the index and warns.
    """
    covered = {fragment for segment in index.segments for fragment in segment.fragment_ids}
    return not covered.issuperset(fragment.fragment_id for fragment in dataset.get_fragments())


def own_segments(dataset: lance.LanceDataset) -> Iterator[tuple[Any, Any]]:
    """Yield each index and segment whose files are in this table.

    Lance's own indexes are in the manifest; those of a clone are in the table that it was cloned from.
    """
    for index in dataset.describe_indices():
        if not index.name.startswith(LANCES_OWN):
            yield from ((index, segment) for segment in index.segments if segment.base_id is None)


def has_files(segment: Any) -> bool:
    """Return whether a segment of an index (`IndexDescription.segments`) must have files.

    It has none if it covers no fragment, as in a vector index over nulls only, and Lance recorded no size.
    """
    return bool(segment.size_bytes) or bool(segment.fragment_ids)


def _with_existing_index(uri: str, dataset: lance.LanceDataset, spec: IndexSpec, built: Sequence[Any]) -> IndexSpec:
    if spec.column not in dataset.schema.names:
        return spec  # check_definition reports it
    number = field_id(dataset, spec.column)
    on_column = [index for index in built if list(index.fields) == [number]]
    of_kind = [index for index in on_column if _kind(index) == spec.kind]
    if not of_kind:
        for index in built:
            if index.name == spec.name and (spec.kind != "btree" or index not in on_column):
                raise InvalidRows(
                    f"{uri}: its index {index.name} is {index.index_type} on {', '.join(index.field_names)}, not "
                    f"{spec.kind} on {spec.column}; drop it, or leave {spec.column!r} out of the indexes",
                    column=spec.column,
                )
        return spec
    index = next((index for index in of_kind if index.name == spec.name), of_kind[0])
    existing = _parameters(uri, spec, index)
    for name, value in spec.parameters.items():
        if name in existing and existing[name] != value:
            raise InvalidRows(
                f"{uri}: its index {index.name} on {spec.column!r} has {name} = {existing[name]!r}, not {value!r}; "
                "correct the parameter, or drop the index first",
                column=spec.column,
            )
    defaults = _FTS if spec.kind == "fts" else {"metric": "l2"}
    others = {name: value for name, value in existing.items() if name not in defaults or defaults[name] != value}
    called = "" if index.name == replace(spec, called="").name else index.name
    return replace(spec, parameters={**others, **spec.parameters}, called=called)


def _kind(index: Any) -> str:
    """Return memwal's name for the kind of an index, or Lance's if memwal has none."""
    name = str(index.index_type)
    if name.upper().startswith("IVF"):
        return "ivf_pq"
    return {"Inverted": "fts", "BTree": "btree"}.get(name, name)


def _parameters(uri: str, spec: IndexSpec, index: Any) -> dict[str, Any]:
    """Return the parameters that the index was built with, by memwal's names."""
    details = index.details or {}
    if spec.kind == "ivf_pq":
        metric = str(details.get("metric_type", "l2")).lower()
        codes = (details.get("compression") or {}).get("num_sub_vectors")
        return {"metric": metric, **({} if codes is None else {"num_sub_vectors": int(codes)})}
    if spec.kind != "fts":
        return {}
    for name, same in _FTS_ONLY_LANCES.items():
        if details.get(name, same[0]) not in same:
            raise InvalidRows(
                f"{uri}: its index {index.name} on {spec.column!r} has {name} = {details[name]!r}, with which rows "
                "that are not committed cannot be searched; drop the index, or leave "
                f"{spec.column!r} out of the indexes",
                column=spec.column,
            )
    return {name: details[name] for name in _FTS if name in details}
