"""Bad rows: find them in a batch, carry them through Spark as dead letters, write them; rows as JSON, value by value.

A batch is checked as a whole. If the check fails, the batch is halved until the bad rows are isolated: b bad rows of n
cost about 2 b log2(n / b) checks; a batch without bad rows costs one.

`RouteTask` creates dead letters, and a single task writes them. A bad row keeps its place columns, is null in all
others, and has no region: its `_memwal_bucket` is `NO_REGION`, and the column `LETTER` has the reason and the bytes of
the row. Rows without a region sort before all others, so the task that receives them writes them before it sends
anything.

A row as JSON is the content of a dead letter, or a line that Spark may have misread.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import SecretStr

from memwal.ingest.engine.api.results import python_values
from memwal.ingest.errors import MemWalError
from memwal.ingest.secret_refs import resolve
from memwal.ingest.service.client.target import Target
from memwal.ingest.spark.dlq.table import SCHEMA, DeadLetters
from memwal.ingest.spark.source import columns as col
from memwal.ingest.spark.source.files import UNREADABLE
from memwal.ingest.values.documents import no_number, object_of
from memwal.ingest.values.json_parts import Written, expect_names_once
from memwal.ingest.values.values import ANY_TEXT, column, from_text, is_text, typed
from memwal.memtable import InvalidRows
from memwal.wal import SystemClock, SystemIds

T = TypeVar("T")
Mode = Literal["fail", "skip", "table"]
Place = tuple[str | int | None, ...]

_ALONE = " in row 0"
"""Row number in the message of a row that was checked alone; it is removed."""


@dataclass(frozen=True, slots=True)
class BadRow:
    """Why a row is a dead letter: the stage (parse, map, fit, refused), the column if one is the cause, the reason."""

    stage: str
    column: str | None
    reason: str


def problems_of(batch: pa.RecordBatch) -> dict[int, BadRow]:
    """Return the rows that the source or the mapping could not use, by their number in the batch."""
    if col.PROBLEM not in batch.schema.names:
        return {}
    said = batch[col.PROBLEM]
    if said.null_count == len(said):
        return {}
    rows = pc.indices_nonzero(pc.is_valid(said)).to_pylist()
    return {row: _problem(text) for row, text in zip(rows, said.take(pa.array(rows)).to_pylist(), strict=True)}


def _problem(text: str) -> BadRow:
    stage, colon, reason = text.partition(": ")
    return BadRow(stage, None, reason) if colon and stage in ("parse", "map") else BadRow("map", None, text)


def unfit_of(batch: pa.RecordBatch, check: Callable[[pa.RecordBatch], T]) -> tuple[dict[int, BadRow], T | None]:
    """Return the rows that `check` rejects, by their number in the batch; without such rows, the result of `check`.

    Raises: InvalidRows if `check` rejects zero rows of these columns too: the columns are the cause, not a row.
    """
    try:
        return {}, check(batch)
    except InvalidRows:
        check(batch.slice(0, 0))
    return dict(_halved(batch, 0, check)), None


def _halved(failed: pa.RecordBatch, first: int, check: Callable[[pa.RecordBatch], T]) -> Iterator[tuple[int, BadRow]]:
    """Yield the bad rows of `failed`, which has at least one. `first`: number of its first row."""
    middle = failed.num_rows // 2
    for start, part in ((0, failed.slice(0, middle)), (middle, failed.slice(middle))):
        try:
            check(part)
        except InvalidRows as error:
            if part.num_rows > 1:
                yield from _halved(part, first + start, check)
            else:
                yield first + start, BadRow("fit", error.column, str(error).replace(_ALONE, ""))


# ---- rows as JSON --------------------------------------------------------------------------------------------------


def as_json(row: Mapping[str, Any]) -> bytes:
    """Return a row of a source without raw bytes as JSON: times as ISO text, bytes as base64, without nulls."""
    given = {name: value for name, value in row.items() if value is not None}
    return json.dumps(given, default=_plain, ensure_ascii=False).encode(errors="surrogateescape")


def _plain(value: object) -> object:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, datetime | date):
        return value.isoformat()
    if isinstance(value, Decimal) and value == value.to_integral_value():
        return int(value)
    return str(value)


def readable_row(batch: pa.RecordBatch, row: int) -> dict[str, Any]:
    """Return the values of one row.

    Bytes of text that are not UTF-8 become surrogates, and `as_json` writes them as the original bytes. The dead letter
    is then not valid JSON, so that no replay puts a different text.
    """
    return {name: _value(batch[name].slice(row, 1)) for name in batch.schema.names}


def _value(alone: pa.Array) -> Any:
    try:
        return python_values(alone)[0]
    except UnicodeDecodeError:
        return alone.cast(pa.binary())[0].as_py().decode(errors="surrogateescape")


class BadRate:
    """The share of bad rows in the newest micro-batches that have `window` rows together; no share with fewer rows.

    Thread safety. One thread.

    A new process starts with no rows: a stream that was stopped because of its bad rows runs for `window` more rows
    before it is stopped again, unless one micro-batch alone has too many bad rows.
    """

    def __init__(self, max_percent: int, window: int) -> None:
        self._max_percent, self._window = max_percent, window
        self._batches: deque[tuple[int, int]] = deque()
        self._rows = self._bad = 0

    def with_more(self, rows: int, bad: int) -> str | None:
        """Count a micro-batch of `rows` rows, `bad` of them bad.

        Return a message if the share is now too high, else None.
        """
        self._batches.append((rows, bad))
        self._rows += rows
        self._bad += bad
        while self._rows - self._batches[0][0] >= self._window:
            old_rows, old_bad = self._batches.popleft()
            self._rows -= old_rows
            self._bad -= old_bad
        if self._rows < self._window or self._bad * 100 <= self._max_percent * self._rows:
            return None
        return f"{self._bad:,} of the last {self._rows:,} rows ({self._bad * 100 / self._rows:.1f} %) are bad"


def conformed_to(target: Target, batch: pa.RecordBatch) -> pa.Table:
    """Return the user's columns of a batch in the table's types.

    Raises: InvalidRows for rows that a region would refuse.
    """
    rows, deletes = col.rows_and_deletes(batch, target.base.key, target.base.rules.version)
    whole = target.checker.whole(rows, False if deletes is None else deletes)
    target.checker.checked(whole)
    return whole


# ---- JSON as rows ---------------------------------------------------------------------------------------------------


def fields_of(raw: bytes | None, *, strict: bool = False) -> dict[str, Any] | BadRow:
    """Return the fields of a JSON object, or why the bytes are not one. `strict`: NaN and infinities are errors."""
    hooks: dict[str, Any] = {"parse_constant": no_number} if strict else {}
    try:
        given = json.loads((raw or b"").decode(), parse_float=Written, object_pairs_hook=object_of, **hooks)
        expect_names_once(given)
    except UnicodeDecodeError as error:
        return BadRow("parse", None, f"byte {error.start} is not UTF-8")
    except json.JSONDecodeError as error:
        return BadRow("parse", None, f"not JSON: {error.msg.removesuffix(' at')} at character {error.pos}")
    except RecursionError:
        return BadRow("parse", None, "JSON nested too deep")
    except ValueError as error:
        return BadRow("parse", None, str(error))
    return given if isinstance(given, dict) else BadRow("parse", None, "not a JSON object")


def read_json(value: Any, kind: pa.DataType, _unit: str = "") -> Any:
    """Convert a value to type `kind`. Raises: ValueError.

    Like `bad_rows.as_json`, it allows NaN and infinite floats; like Spark, it accepts any value for a text column.
    """
    if isinstance(value, float) and pa.types.is_floating(kind) and not math.isfinite(value):
        return typed(value, kind) if isinstance(value, Written) else value  # 1e400 is not infinity
    return typed(value, kind, ANY_TEXT if is_text(kind) else "")


def read_text(value: Any, kind: pa.DataType, _unit: str = "") -> Any:
    """As `read_json`, for a file format in which all values are text."""
    return from_text(value, kind) if isinstance(value, str) else read_json(value, kind)


def failure(field: pa.Field, reason: str) -> BadRow:
    """Return the problem of a row with a value that does not fit its column."""
    return BadRow("parse", field.name, f"column {field.name!r} cannot become {field.type} ({reason})")


def columns_of(
    raw: Sequence[bytes | None], schema: pa.Schema, *, texts: bool = False, lines: bool = False
) -> tuple[dict[str, pa.Array], dict[int, BadRow]]:
    """Read JSON objects as strictly as Kafka records.

    Return the columns of `schema`, in the types that they have in Spark, and why rows are bad. Other fields are
    ignored. `texts`: numbers may be text, as in CSV. `lines`: `raw` are lines of JSON files.
    """
    documents = [fields_of(each, strict=lines) for each in raw]
    bad = {row: each for row, each in enumerate(documents) if isinstance(each, BadRow)}
    objects = [{} if isinstance(each, BadRow) else each for each in documents]
    columns = {}
    for field in schema:
        given = [each.get(field.name) for each in objects]
        columns[field.name], problems = column(given, field.type, "", read_text if texts else read_json)
        for row, reason in problems.items():
            bad.setdefault(row, failure(field, reason))
    return columns, bad


def read_again(batch: pa.RecordBatch, schema: pa.Schema) -> tuple[pa.RecordBatch, dict[int, BadRow]]:
    """Read again, exactly, the JSON lines that Spark could not read or may have misread.

    Return the batch with their values, and its bad rows with their reasons. `schema`: of the table.
    """
    bad = problems_of(batch)
    rows = [row for row, why in bad.items() if f"{why.stage}: {why.reason}" == UNREADABLE]
    if not rows or col.RAW_VALUE not in batch.schema.names:
        return batch, bad
    wanted = [name for name in col.of_table(batch.schema.names) if name in schema.names]
    raw = batch[col.RAW_VALUE].take(pa.array(rows)).to_pylist()
    columns, still = columns_of(raw, pa.schema(map(schema.field, wanted)), lines=True)
    for at, row in enumerate(rows):
        del bad[row]
        if at in still:
            bad[row] = still[at]
    places = np.full(batch.num_rows, -1)
    places[rows] = np.arange(len(rows))
    spread = pa.array(places, mask=places < 0)
    for name, values in columns.items():
        given = batch[name]  # not null if a directory name contains the value
        exact = values.cast(given.type).take(spread)
        at = batch.schema.get_field_index(name)
        batch = batch.set_column(at, batch.schema.field(at), pc.if_else(given.is_valid(), given, exact))
    return batch, dict(sorted(bad.items()))


# ---- dead letters ----------------------------------------------------------------------------------------------------


_ID_BYTES = 10
_SAID = 3
"""Number of most frequent reasons in a receipt."""


@dataclass(frozen=True, slots=True)
class Rules:
    """How bad rows are handled: settings for the tasks. Secrets stay references."""

    mode: Mode = "fail"
    uri: str = ""
    options: tuple[tuple[str, str], ...] = ()


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
    parts = {field.name: pc.struct_field(batch[col.LETTER], field.name).cast(field.type) for field in col.LETTER_TYPE}
    places = {"topic": col.TOPIC, "partition": col.PARTITION, "offset": col.OFFSET}
    places |= {"file": col.FILE, "block": col.BLOCK, "landed": col.LANDED}
    for field, name in places.items():
        kind = SCHEMA.field(field).type
        parts[field] = batch[name].cast(kind) if name in names else pa.nulls(count, kind)
    parts |= {
        "id": pa.array(ids, pa.string()),
        "time": pa.array([int(now * 1e6)] * count, pa.timestamp("us", "UTC")),
        "row": pa.nulls(count, pa.int64()) if col.TOPIC in names else pa.array(numbers, pa.int64()),
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


def given_before(letters: DeadLetters | None, query_id: str, batch_id: int) -> dict[Place, BadRow]:
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
