"""The Lance table of dead letters: each row of a source that no region received, once.

One task writes the dead letters of a micro-batch, before Spark notes the micro-batch as done. Steps:

1. **Write** the dead letters into data files, streamed. No version refers to them. *Crash here: Lance's clean-up of old
   versions removes the files; the replay of the micro-batch writes them again.*
2. **Append** them with a compare-and-swap (`flush.base.swap`). The same version notes for the query, in the schema's
   metadata, the newest batch_id and a digest of the ids of its dead letters. A concurrent second append for the same
   micro-batch (a task that Spark runs twice) fails, reads again and finds the note. *Crash here: both or none.*
3. Spark notes the micro-batch as done; if regions failed, it replays it. *Crash before: the micro-batch is replayed;
   its dead letters have the noted digest, and nothing is written.*

If a replay has other dead letters than the first attempt (a column was added in between; a region refused rows), those
whose ids are missing are appended. Only then is the table read, two columns of it. A micro-batch of a query begins only
after the previous one is done, so notes of older ones are unnecessary.

An id is a hash of the query and of the row's place in its source, so a row has the same id in every replay.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import chain
from typing import Any, TypeVar

import lance
import pyarrow as pa
from lance.fragment import write_fragments

from memwal import wal
from memwal.flush import append_if_unchanged, as_new_fragments
from memwal.flush.base.open import open_dataset
from memwal.flush.commits.maintenance import CompactionLimits, compact
from memwal.ingest.errors import Invalid, Unavailable
from memwal.ingest.spark.source.columns import HEADERS_TYPE
from memwal.wal.errors import first_line
from memwal.wal.panics import panics_as_errors

T = TypeVar("T")

SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("time", pa.timestamp("us", "UTC"), nullable=False),
        pa.field("stage", pa.string(), nullable=False),
        pa.field("column", pa.string()),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("topic", pa.string()),
        pa.field("partition", pa.int32()),
        pa.field("offset", pa.int64()),
        pa.field("file", pa.string()),
        pa.field("block", pa.int64()),
        pa.field("row", pa.int64()),
        pa.field("landed", pa.timestamp("us", "UTC")),
        pa.field("query_id", pa.string(), nullable=False),
        pa.field("batch_id", pa.int64(), nullable=False),
        pa.field("raw_key", pa.binary()),
        pa.field("raw_value", pa.binary()),
        pa.field("raw_headers", HEADERS_TYPE),
    ]
)
"""Columns of the table of dead letters.

`stage`: one of `STAGES`. `time`: when the dead letter was written. `landed`: the time of the record, or of its file.
`raw_headers`: of a Kafka record, in order; null in dead letters older than the column, and of files.
"""
_ADDED = ("raw_headers",)  # columns that older tables lack

STAGES = ("parse", "map", "fit", "route", "refused")
_NOTES, _REPLAY, _NAME = "memwal:letters", "memwal:replay", "memwal:letters-id"
_SWAPS = 50
_FRAGMENTS = 16
_COMPACTION = CompactionLimits(fragments_min=_FRAGMENTS)
_VERSIONS_KEPT, _VERSIONS_AGE = 10, timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Note:
    """The newest micro-batch of a query with dead letters. `digest`: of all their ids, in any order; 0 without ids."""

    batch_id: int
    digest: int


@dataclass(frozen=True, slots=True)
class Replay:
    """Dead letters that are being replayed under this number; `ids` is empty when the replay is done."""

    sequence: int
    ids: tuple[str, ...]


class DeadLetters:
    """The table of dead letters at one place.

    Thread safety. One thread; any number of processes at the same table.
    Durability. Changes are on storage when a method returns.
    Raises: Unavailable if other writers were faster in every attempt; OSError of Lance; wal errors of storage.
    """

    def __init__(self, uri: str, dataset: lance.LanceDataset, options: Mapping[str, str], clock: wal.Clock) -> None:
        """Use `find` or `create` instead."""
        self.uri, self.dataset = uri, dataset
        self._options, self._clock = dict(options), clock

    @staticmethod
    def find(uri: str, options: Mapping[str, str], clock: wal.Clock) -> DeadLetters | None:
        """Return the table at `uri`; None if it does not exist. Raises: Invalid if `uri` is a table of another kind."""
        store = wal.open_store(uri, options)
        dataset = open_dataset(store, uri)
        if dataset is None:
            return None
        needed, metadata = set(SCHEMA.names) - set(_ADDED), dataset.schema.metadata or {}
        if not needed <= set(dataset.schema.names) or _NAME.encode() not in metadata:
            raise Invalid(f"dlq.uri: {uri} is another table, not one of dead letters; choose another place")
        return DeadLetters(uri, dataset, store.storage_options, clock)

    @staticmethod
    def create(uri: str, options: Mapping[str, str], clock: wal.Clock, ids: wal.Ids) -> DeadLetters:
        """Return the table at `uri`; create it if it does not exist. Several processes may call this concurrently.

        Raises: as `find`.
        """
        found = DeadLetters.find(uri, options, clock)
        if found is None:
            schema = SCHEMA.with_metadata({_NAME: ids.entry_id()})
            known_to_lance = wal.open_store(uri, options).storage_options
            with suppress(OSError):  # another process was faster, or `find` raises the reason
                lance.write_dataset(schema.empty_table(), uri, schema=schema, storage_options=known_to_lance)
            found = DeadLetters.find(uri, options, clock)
        if found is None:
            raise Unavailable(f"{uri}: the table of dead letters could not be created; run the same command again")
        return found._widened()  # noqa: SLF001 - the same class

    # ---- write ---------------------------------------------------------------------------------------------------

    def append(self, letters: Iterable[pa.RecordBatch], query_id: str, batch_id: int) -> int:
        """Write the dead letters of a micro-batch (in `SCHEMA`) that do not exist yet; return their number.

        Raises: Unavailable if another attempt wrote other dead letters meanwhile: the replay adds the missing ones.
        """
        noted = self.note(query_id)
        if noted is not None and noted.batch_id > batch_id:
            return 0
        if noted is not None and noted.batch_id == batch_id:
            letters = self._missing(pa.Table.from_batches(letters, SCHEMA), noted, query_id)
        files, rows, written = self._write(letters)
        if not rows:
            return 0
        fragments = as_new_fragments(files)
        before = noted.digest if noted is not None and noted.batch_id == batch_id else 0
        done = Note(batch_id, before ^ written)

        def swap() -> int:
            if self.note(query_id) == noted:
                notes = {**self._notes(), query_id: [done.batch_id, f"{done.digest:x}"]}
                self._swap(fragments, {_NOTES: json.dumps(notes)})
                return rows
            if self.note(query_id) == done:
                return 0
            raise Unavailable(
                f"{self.uri}: another attempt wrote dead letters of micro-batch {batch_id}; Spark replays it"
            )

        added = self._until_alone(swap)
        # Each micro-batch with dead letters adds a fragment and a version. Merging and deleting them is optional.
        if len(self.dataset.get_fragments()) >= _FRAGMENTS:
            with suppress(OSError, RuntimeError, ValueError), panics_as_errors:
                removed, _ = compact(self.dataset, _COMPACTION)
                if removed:
                    self.dataset.cleanup_old_versions(_VERSIONS_AGE, retain_versions=_VERSIONS_KEPT)
        return added

    def delete(self, condition: str) -> int:
        """Delete the dead letters that match `condition` (SQL); return their number. Raises: see the class."""

        def act() -> int:
            self.refresh()
            before = self.dataset.count_rows()
            self.dataset.delete(condition)
            return before - self.dataset.count_rows()

        return self._until_alone(act)

    def reserve(self, ids: Sequence[str], after: Replay, applied: int = 0) -> Replay | None:
        """Note that these dead letters are replayed next. Return None if `after` is not the newest replay.

        `applied`: the highest number already used. This table may not know it after a restore to an older version.
        """
        replay = Replay(max(after.sequence, applied) + 1, tuple(ids)) if ids else Replay(after.sequence, ())
        said = json.dumps({"sequence": replay.sequence, "ids": replay.ids})

        def swap() -> Replay | None:
            if self.replay() != after:
                return None
            self._swap([], {_REPLAY: said})
            return replay

        return self._until_alone(swap)

    # ---- read ----------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The name of this table as a producer of writes.

        A table that is created anew at its place has another name.
        """
        return self._metadata(_NAME)

    def note(self, query_id: str) -> Note | None:
        """Return the note for a query in the last read version."""
        found = self._notes().get(query_id)
        return None if found is None else Note(int(found[0]), int(found[1], 16))

    def written(self, query_id: str, batch_id: int) -> pa.Table:
        """Return the dead letters of a micro-batch, without their raw bytes."""
        kept = [name for name in SCHEMA.names if not name.startswith("raw_")]
        return self.dataset.to_table(kept, filter=_of_micro_batch(query_id, batch_id))

    def replay(self) -> Replay:
        """Return the newest replay, with the ids that may be in progress."""
        said = json.loads(self._metadata(_REPLAY) or '{"sequence": 0, "ids": []}')
        return Replay(said["sequence"], tuple(said["ids"]))

    def refresh(self) -> None:
        """Read the newest version."""
        self.dataset.checkout_latest()  # type: ignore[no-untyped-call]

    # ---- inside --------------------------------------------------------------------------------------------------

    def _widened(self) -> DeadLetters:
        """Add the columns of `SCHEMA` that a table of an older version lacks; return the table. Raises: Unavailable."""

        def act() -> None:
            missing = [SCHEMA.field(name) for name in SCHEMA.names if name not in self.dataset.schema.names]
            if missing:
                self.dataset.add_columns(missing)
                self.refresh()

        self._until_alone(act)
        return self

    def _notes(self) -> dict[str, Any]:
        notes: dict[str, Any] = json.loads(self._metadata(_NOTES) or "{}")
        return notes

    def _metadata(self, name: str) -> str:
        return str((self.dataset.schema.metadata or {}).get(name.encode(), b"").decode())

    def _missing(self, letters: pa.Table, noted: Note, query_id: str) -> Iterator[pa.RecordBatch]:
        """Yield the dead letters of the micro-batch in `noted` that the table lacks."""
        if digest(letters["id"].to_pylist()) == noted.digest:
            return iter(())
        same = _of_micro_batch(query_id, noted.batch_id)
        there = set(self.dataset.to_table(["id"], filter=same)["id"].to_pylist())
        kept = [id not in there for id in letters["id"].to_pylist()]
        return iter(letters.filter(pa.array(kept, pa.bool_())).to_batches())

    def _swap(self, fragments: Sequence[Any], metadata: Mapping[str, str]) -> None:
        encoded = {name: value.encode() for name, value in metadata.items()}
        self.dataset = append_if_unchanged(self.dataset, fragments, encoded, self._options)

    def _until_alone(self, act: Callable[[], T]) -> T:
        """Run `act()`; repeat it on the newest version after each conflict with another writer."""
        for attempt in range(_SWAPS):
            if attempt:
                self._clock.sleep(0.01 * attempt)
                self.refresh()
            try:
                return act()
            except OSError as error:
                last = error
        said = first_line(last)
        raise Unavailable(f"{self.uri}: not written after {_SWAPS} attempts ({said}); run it again") from last

    def _write(self, letters: Iterable[pa.RecordBatch]) -> tuple[Sequence[Any], int, int]:
        """Write dead letters into data files, which no version refers to.

        Return the files, the number of dead letters, the digest of their ids. Raises: errors of iterating `letters`.
        """
        rows = found = 0
        failure: Exception | None = None
        rest = iter(letters)
        first = next(rest, None)
        if first is None:
            return [], 0, 0

        def counted() -> Iterator[pa.RecordBatch]:
            nonlocal rows, found, failure
            try:
                for batch in chain([first], rest):
                    rows += batch.num_rows
                    found ^= digest(batch["id"].to_pylist())
                    yield batch
            except Exception as error:
                failure = error
                raise

        reader = pa.RecordBatchReader.from_batches(SCHEMA, counted())
        try:
            with panics_as_errors:
                files = write_fragments(
                    reader, self.dataset, schema=SCHEMA, mode="append", storage_options=self._options
                )
        except Exception as error:
            raise failure or error from error  # Lance passes on only the text of an error of the reader
        return files, rows, found


def digest(ids: Iterable[str]) -> int:
    """Return one number for a set of ids, independent of their order: the XOR of the ids."""
    found = 0
    for id in ids:
        found ^= int(id, 16)
    return found


def _of_micro_batch(query_id: str, batch_id: int) -> str:
    return f"query_id = {sql_text(query_id)} AND batch_id = {batch_id}"


def sql_text(text: str) -> str:
    """Return a text as an SQL literal. Raises: Invalid for bytes of a command line that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Invalid(f"{text!r} is not UTF-8 text; `memwal dlq list` shows what there is") from None
    return "'" + text.replace("'", "''") + "'"


def sql_time(seconds: float) -> str:
    """Return a unix time as an SQL literal."""
    return f"timestamp '{datetime.fromtimestamp(seconds, UTC).isoformat()}'"
