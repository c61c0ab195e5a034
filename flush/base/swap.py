"""A compare-and-swap on a Lance table: rows are appended, and metadata changed, only where nobody came in between.

Two transactions of the kind Append never conflict, so two writers of the same rows would double them. One of the kind
that Lance calls Merge, which lists every fragment of the version read and the new ones, passes only where nobody
appended, deleted, updated, compacted, restored, or changed the schema or its metadata since that version. What it puts
into the schema's metadata is in the version with the rows, or in none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import lance
from lance.fragment import FragmentMetadata

_NEW = 0
"""Id of a fragment to which Lance gives one when it is committed."""


def unborn(written: Sequence[FragmentMetadata]) -> list[FragmentMetadata]:
    """What `write_fragments` wrote, as a transaction takes it that lists other fragments too."""
    return [FragmentMetadata.from_json(json.dumps({**each.to_json(), "id": _NEW})) for each in written]


def swapped(
    dataset: lance.LanceDataset,
    fragments: Sequence[FragmentMetadata],
    metadata: Mapping[str, bytes],
    storage_options: Mapping[str, str],
) -> lance.LanceDataset:
    """The version above that of `dataset`, with `fragments` appended (none is fine) and `metadata` set in the schema.

    Raises OSError (CommitConflictError is one) where another version is there already; nothing was changed then.
    """
    operation = lance.LanceOperation.Merge(
        [*(each.metadata for each in dataset.get_fragments()), *fragments], _with_metadata(dataset, metadata)
    )
    transaction = lance.Transaction(read_version=dataset.version, operation=operation)
    return lance.LanceDataset.commit(dataset, transaction, storage_options=dict(storage_options), max_retries=0)


def _with_metadata(dataset: lance.LanceDataset, metadata: Mapping[str, bytes]) -> Any:
    """The dataset's schema, field ids and all, with `metadata` over its own.

    A schema made of an Arrow one would be numbered anew, and be refused where columns were dropped; Lance's own is
    taken apart by its way of being pickled, which keeps everything: the metadata as JSON, then a message per field.
    """
    taken_apart: Any = dataset.lance_schema.__reduce__()
    make, (present, *fields) = taken_apart
    more = {name: list(value) for name, value in metadata.items()}
    return make(json.dumps({**json.loads(present), **more}), *fields)
