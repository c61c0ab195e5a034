"""Dead letters on their way through Spark: `RouteTask` creates them, and a single task writes them.

A bad row keeps its place columns, is null in all others, and has no region: its `_memwal_bucket` is `NO_REGION`, and
the column `LETTER` has the reason and the bytes of the row. Rows without a region sort before all others, so the task
that receives them writes them before it sends anything.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import SecretStr

from memwal.ingest.errors import MemWalError
from memwal.ingest.secret_refs import resolve
from memwal.ingest.spark.dlq.bad_rows import BadRow, as_json, readable_row
from memwal.ingest.spark.dlq.table import SCHEMA, DeadLetters
from memwal.ingest.spark.source import columns as col
from memwal.wal import SystemClock, SystemIds

Mode = Literal["fail", "skip", "table"]
Place = tuple[str | int | None, ...]

_ID_BYTES = 10
_SAID = 3
"""Number of most frequent reasons in a receipt."""


@dataclass(frozen=True, slots=True)
class Rules:
    """How bad rows are handled: settings for the tasks. Secrets stay references."""

    mode: Mode = "fail"
    uri: str = ""
    options: tuple[tuple[str, str], ...] = ()


FAIL = Rules()


def place_of(batch: pa.RecordBatch, row: int, number: int) -> Place:
    """Return the place of a row in its source. `number`: as counted by `route.RowNumbers`."""
    names = batch.schema.names
    if col.TOPIC in names and batch[col.TOPIC][row].is_valid:
        return tuple(batch[name][row].as_py() for name in (col.TOPIC, col.PARTITION, col.OFFSET))
    file = batch[col.FILE][row].as_py() if col.FILE in names else None
    return (file, batch[col.BLOCK][row].as_py() if col.BLOCK in names else None, number)


def rows_at(places: Mapping[Place, BadRow], batch: pa.RecordBatch, numbers: npt.NDArray[np.int64]) -> dict[int, BadRow]:
    """Return the rows of a batch that are at one of `places` (see `place_of`), by their number in the batch."""
    if not places:
        return {}

    def parts(*names: str) -> list[list[Any]]:
        nothing = [None] * batch.num_rows
        return [batch[name].to_pylist() if name in batch.schema.names else nothing for name in names]

    files = zip(*parts(col.FILE, col.BLOCK), numbers.tolist(), strict=True)
    records = zip(*parts(col.TOPIC, col.PARTITION, col.OFFSET), strict=True)
    told = enumerate(record if record[0] is not None else file for record, file in zip(records, files, strict=True))
    return {row: places[place] for row, place in told if place in places}


def letter_column(batch: pa.RecordBatch, bad: Mapping[int, BadRow], columns: list[str], *, raw: bool) -> pa.Array:
    """Return the column `LETTER` of a batch: null for good rows.

    `raw`: include the bytes of the record, or, if the source has none, the row's `columns` as JSON.
    """
    if not bad:
        return pa.nulls(batch.num_rows, col.LETTER_TYPE)
    letters: list[dict[str, object] | None] = [None] * batch.num_rows
    for row, why in bad.items():
        letter: dict[str, object] = {"stage": why.stage, "column": why.column, "reason": why.reason}
        if raw:
            letter["raw_key"] = _bytes(batch, col.RAW_KEY, row)
            if col.RAW_HEADERS in batch.schema.names:
                letter["raw_headers"] = batch[col.RAW_HEADERS][row].as_py() or []
            value = _bytes(batch, col.RAW_VALUE, row)
            given = value is not None or (col.TOPIC in batch.schema.names and batch[col.TOPIC][row].is_valid)
            letter["raw_value"] = value if given else as_json(readable_row(batch.select(columns), row))
        letters[row] = letter
    return pa.array(letters, col.LETTER_TYPE)


def _bytes(batch: pa.RecordBatch, name: str, row: int) -> bytes | None:
    return batch[name].cast(pa.binary())[row].as_py() if name in batch.schema.names else None


def as_letters(batch: pa.RecordBatch, query_id: str, batch_id: int, now: float, seen: Counter[bytes]) -> pa.RecordBatch:
    """Return rows without a region as rows of the table of dead letters.

    `seen`: how often each content of rows without a place occurred in this micro-batch; this function updates it.
    """
    names = batch.schema.names
    numbers = batch[col.ROW].to_pylist()
    contents = pc.struct_field(batch[col.LETTER], "raw_value").to_pylist()
    ids = [
        _id(query_id, batch_id, place_of(batch, row, number), contents[row] or b"", seen)
        for row, number in enumerate(numbers)
    ]
    count = batch.num_rows

    def kept(name: str, kind: pa.DataType) -> pa.Array:
        return batch[name].cast(kind) if name in names else pa.nulls(count, kind)

    parts = {field.name: pc.struct_field(batch[col.LETTER], field.name).cast(field.type) for field in col.LETTER_TYPE}
    parts |= {
        "id": pa.array(ids, pa.string()),
        "time": pa.array([int(now * 1e6)] * count, pa.timestamp("us", "UTC")),
        "topic": kept(col.TOPIC, pa.string()),
        "partition": kept(col.PARTITION, pa.int32()),
        "offset": kept(col.OFFSET, pa.int64()),
        "file": kept(col.FILE, pa.string()),
        "block": kept(col.BLOCK, pa.int64()),
        "row": pa.nulls(count, pa.int64()) if col.TOPIC in names else pa.array(numbers, pa.int64()),
        "landed": kept(col.LANDED, pa.timestamp("us", "UTC")),
        "query_id": pa.array([query_id] * count, pa.string()),
        "batch_id": pa.array([batch_id] * count, pa.int64()),
    }
    return pa.RecordBatch.from_arrays([parts[field.name] for field in SCHEMA], schema=SCHEMA)


def _id(query_id: str, batch_id: int, place: Place, content: bytes, seen: Counter[bytes]) -> str:
    """Return the id of a dead letter, which is the same in every replay.

    It is a hash of the place of the row, or, if its source has no places, of its content and the number of equal rows
    before it. It does not depend on the division of rows into tasks and batches.
    """
    if isinstance(place[0], str):
        told = json.dumps([query_id, *place]).encode()
    else:
        seen[content] += 1
        told = json.dumps([query_id, batch_id, seen[content]]).encode() + content
    return hashlib.blake2b(told, digest_size=_ID_BYTES).hexdigest()


class Refusals:
    """Records the places of the rows of a region's stream, in case the region refuses rows by number.

    Thread safety. One thread.

    The raw bytes are no longer available at that point: the driver runs the micro-batch again, and `RouteTask` makes
    the rows dead letters.
    """

    def __init__(self) -> None:
        self._sent: list[pa.RecordBatch] = []

    def sent(self, batch: pa.RecordBatch) -> None:
        """Record these rows as sent, after those recorded before."""
        names = (col.TOPIC, col.PARTITION, col.OFFSET, col.FILE, col.BLOCK, col.ROW)
        self._sent.append(batch.select([name for name in names if name in batch.schema.names]))

    def packed(self, error: MemWalError) -> str | None:
        """Return the rows that `error` names, packed for the driver; None if it names no rows."""
        details = error.details
        rows = details.get("rows") or ([details["row"]] if isinstance(details.get("row"), int) else [])
        if not rows or not self._sent:
            return None
        why = [details.get("column"), str(details.get("reason") or error.message)]
        sent = pa.Table.from_batches(self._sent).take(pa.array(rows)).combine_chunks().to_batches()[0]
        numbers = sent[col.ROW].to_pylist()
        return json.dumps([[place_of(sent, row, number), *why] for row, number in enumerate(numbers)])


def refused_in(packed: str) -> dict[Place, BadRow]:
    """Unpack `Refusals.packed`, by the place of each row."""
    return {tuple(place): BadRow("refused", column, reason) for place, column, reason in json.loads(packed)}


def given(letters: DeadLetters | None, query_id: str, batch_id: int) -> dict[Place, BadRow]:
    """Return the dead letters that an earlier attempt of a micro-batch has written, by the places of their rows.

    Rows of a source without places are omitted: they cannot be recognized.
    """
    if letters is None or (note := letters.note(query_id)) is None or note.batch_id != batch_id:
        return {}
    found: dict[Place, BadRow] = {}
    for row in letters.written(query_id, batch_id).to_pylist():
        why = BadRow(row["stage"], row["column"], row["reason"])
        if row["topic"] is not None:
            found[row["topic"], row["partition"], row["offset"]] = why
        elif row["file"] is not None:
            found[row["file"], row["block"], row["row"]] = why
    return found


def write_letters(rules: Rules, query_id: str, batch_id: int, bad: Iterable[pa.RecordBatch]) -> tuple[int, int, str]:
    """Write the bad rows of a micro-batch as the rules say: all rows without a region, or none.

    Return the number of bad rows, the number of newly written dead letters, and the most frequent reasons. Raises:
    errors of `DeadLetters`, and of iterating `bad`.
    """
    clock, rows, added = SystemClock(), 0, 0
    reasons, seen = Counter[str](), Counter[bytes]()

    def counted() -> Iterator[pa.RecordBatch]:
        nonlocal rows
        for batch in bad:
            rows += batch.num_rows
            reasons.update(f"{why['stage']}: {why['reason']}" for why in batch[col.LETTER].to_pylist())
            yield as_letters(batch, query_id, batch_id, clock.now(), seen)

    letters = counted()
    if rules.mode == "table":
        secrets = {name: SecretStr(value) for name, value in rules.options}
        table = DeadLetters.create(rules.uri, resolve(secrets, os.environ), clock, SystemIds())
        added = table.append(letters, query_id, batch_id)
    for _ in letters:
        continue  # count the rest: `append` does not read the dead letters of a micro-batch that is done
    return rows, added, "; ".join(f"{reason} ({count:,}x)" for reason, count in reasons.most_common(_SAID))
