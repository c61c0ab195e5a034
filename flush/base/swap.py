"""Change a Lance table beside other writers: a compare-and-swap, and a limit of consecutive conflicts.

The swap appends rows and changes metadata only if no other version was created since. Two transactions of the kind
Append never conflict, so two writers of the same rows would double them. A transaction that Lance calls Merge lists
every fragment of the version read, and the new ones. It succeeds only if no other writer appended, deleted, updated,
compacted, restored, or changed the schema or its metadata since that version. The metadata that it sets is in the same
version as the rows, or in none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import lance
from lance.fragment import FragmentMetadata

from memwal.flush.base.table import BaseTable
from memwal.flush.errors import CommitConflict
from memwal.memtable import InvalidRows
from memwal.wal import Clock
from memwal.wal.panics import panics_as_errors
from memwal.wal.retries import Backoff

T = TypeVar("T")
_NEW = 0
"""Id of a new fragment; Lance replaces it with the next free id at the commit."""
BARRIER = "memwal: barrier"
"""Commit message of a version that changes nothing and conflicts with writes planned on older versions
(flush.commits.maintenance).
"""


def as_new_fragments(written: Sequence[FragmentMetadata]) -> list[FragmentMetadata]:
    """Return the fragments `written` by `write_fragments` with the id of new ones, as a Merge transaction requires."""
    return [FragmentMetadata.from_json(json.dumps({**fragment.to_json(), "id": _NEW})) for fragment in written]


def append_if_unchanged(
    dataset: lance.LanceDataset,
    fragments: Sequence[FragmentMetadata],
    metadata: Mapping[str, bytes],
    storage_options: Mapping[str, str],
    *,
    message: str = "",
) -> lance.LanceDataset:
    """Create the version above that of `dataset`, with `fragments` appended (may be empty) and schema `metadata` set.

    `message`: the commit message of the version, "" for none. Raises OSError (CommitConflictError is one) if that
    version already exists; nothing was changed then.
    """
    operation = lance.LanceOperation.Merge(
        [*(fragment.metadata for fragment in dataset.get_fragments()), *fragments], _with_metadata(dataset, metadata)
    )
    properties = {"__lance_commit_message": message} if message else {}
    transaction = lance.Transaction(dataset.version, operation, transaction_properties=properties)
    return lance.LanceDataset.commit(dataset, transaction, storage_options=dict(storage_options), max_retries=0)


def _with_metadata(dataset: lance.LanceDataset, metadata: Mapping[str, bytes]) -> Any:
    """Return the dataset's schema with its field ids, and `metadata` added to its own.

    A schema made from an Arrow schema would get new field ids, and be rejected if columns were dropped. Lance's schema
    object is therefore taken apart as pickle does, which keeps everything: metadata as JSON, a message per field.
    """
    taken_apart: Any = dataset.lance_schema.__reduce__()
    make, (present, *fields) = taken_apart
    more = {name: list(value) for name, value in metadata.items()}
    return make(json.dumps({**json.loads(present), **more}), *fields)


_RETRIES = 20
"""Consecutive conflicts of a change of the table. Commits come every few seconds."""
_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 2.0


class ConflictRetries:
    """Counts consecutive conflicts, waits longer after each, and raises after `retries`.

    Thread safety. One thread only.
    """

    def __init__(
        self, uri: str, clock: Clock, retries: int, remedy: str = "commit again, or raise commit.retries"
    ) -> None:
        """`remedy`: for the message of the error."""
        self._uri, self._clock, self._retries, self._remedy = uri, clock, retries, remedy
        self._backoff = Backoff(_FIRST_PAUSE, _LONGEST_PAUSE)
        self.conflicts = 0
        """Conflicts since the last successful round."""

    def reset(self) -> None:
        """Start a new count after a success."""
        self.conflicts = 0
        self._backoff.reset()

    def wait(self, cause: Exception) -> None:
        """Pause before the next attempt. Raises CommitConflict after more than `retries` consecutive conflicts."""
        self.conflicts += 1
        if self.conflicts > self._retries:
            raise CommitConflict(
                f"{self._uri}: {self.conflicts} attempts in a row conflicted with other writers; nothing is lost: "
                f"{self._remedy}"
            ) from cause
        self._clock.sleep(self._backoff.pause())

    def wait_if_newer(self, dataset: lance.LanceDataset, cause: Exception) -> None:
        """Do as `wait` if the table has a newer version than `dataset`, else raise `cause`.

        Only a newer version makes an error of Lance a conflict.
        """
        if dataset.latest_version == dataset.version:
            raise cause
        self.wait(cause)


def retried(base: BaseTable, clock: Clock, attempt: Callable[[BaseTable, lance.LanceDataset], T]) -> T:
    """Return the result of `attempt` for the newest version of the table of `base`; repeat it after each conflict.

    `attempt` gets a view of the newest version, and a dataset of it that may be written through.
    Raises InvalidRows, and the other errors of `attempt` if no newer version appeared; CommitConflict.
    """
    retries = ConflictRetries(base.uri, clock, _RETRIES, "run it again")
    while True:
        newest = base.latest()
        try:
            with panics_as_errors:
                return attempt(newest, newest.dataset.checkout_version(newest.version))
        except InvalidRows:
            raise
        except (OSError, RuntimeError, ValueError) as error:
            retries.wait_if_newer(newest.dataset, error)
