"""Read files as tables of some thousand rows each; parse texts of CSV and NDJSON as strictly as values of Kafka.

Parquet, Arrow and Lance have types: their columns are passed on unchanged, and the check of a put decides whether they
fit (`memtable.conversion`). CSV has only texts, and an empty unquoted value is null. NDJSON is one object per line.
`values.values` converts both: it never guesses, truncates or rounds.

Arrow's reader of CSV guesses and reports no error: an unclosed quote takes the following lines into its value, and
`"x"y` becomes `xy`. `MatchedQuotes` therefore rejects unmatched quotes. By RFC 4180 a value that begins with a quote
ends with one, followed by a separator, a line end or the end of the file, and quotes inside it are doubled. A quote
inside a value that begins without one (`5" pipe`) is kept, as in Arrow.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet

from memwal.ingest.engine.loads.files import Format, InputFile
from memwal.ingest.errors import Invalid
from memwal.ingest.suggest import suggestion
from memwal.ingest.values import json_columns
from memwal.ingest.values.documents import documents, field, json_decoder
from memwal.ingest.values.values import Problems, cast_texts, column, from_text, is_text, rounds
from memwal.wal.errors import first_line

_VALUE = rb'"[^"]*+(?:""[^"]*+)*+'
"""A quoted value, up to the point where only a closing quote can follow."""
_MATCHED = re.compile(rb'(?:[^"]*+(?:(?<=[,\r\n])' + _VALUE + rb'"(?=[,\r\n])|(?<![,\r\n])"))*+[^"]*+')
"""From the end of a value: text whose quotes match. Possessive, so each byte is examined once."""
_BEGUN = re.compile(_VALUE + rb'"?\Z')
"""A quoted value whose end may not have been read yet."""
_SHOWN = 40
"""Bytes of a value in a message."""


class MatchedQuotes:
    """A stream of CSV for `pyarrow.PythonFile`, whose reads fail at an unmatched quote.

    `name`: of the file, for messages. `longest`: maximum bytes of a quoted value searched for its end.
    """

    def __init__(self, stream: pa.NativeFile, name: str, longest: int) -> None:
        self._stream, self._name, self._longest = stream, name, longest
        self._rest = b""
        """Bytes that were read and are not known to match, after one byte that is."""
        self._lines = 0
        """Number of lines that end before `_rest`."""
        self.closed = False

    def read(self, size: int) -> bytes:
        """Return the next `size` bytes, fewer at the end. Raises: OSError; Invalid with the line of a wrong quote."""
        data = b""
        while len(data) < size and (more := self._stream.read(size - len(data))):
            data += more
        before, fresh = self._rest, data
        if not before:  # The start of a file is treated as the start of a line.
            before, fresh = b"\n", data.removeprefix(codecs.BOM_UTF8)
        at_end = len(data) < size
        self._check(before + fresh + (b"\n" if at_end else b""), at_end)
        return data

    def close(self) -> None:
        """Close the stream."""
        self.closed = True
        self._stream.close()

    def _check(self, text: bytes, at_end: bool) -> None:
        found = _MATCHED.match(text) if b'"' in text else None
        end = found.end() if found else len(text)  # at least 1, because the first byte matches
        if end < len(text) and (at_end or len(text) - end > self._longest or not _BEGUN.match(text, end)):
            line = self._lines + text.count(b"\n", 0, end)
            value = text[end : end + _SHOWN].decode(errors="replace").rstrip("\r\n")
            raise Invalid(
                f"{self._name}: line {line:,}: the quotes of {value!r} do not match; a value that begins with a "
                "quote ends with one, and has each quote inside of it twice"
            )
        self._lines += text.count(b"\n", 0, end - 1)
        self._rest = text[end - 1 :]


ROWS = 8192
"""Maximum rows of a table."""
TYPED = ("parquet", "arrow", "lance")
"""The formats that name the types of their columns."""
_BLOCK = 4 << 20
"""Bytes of text read at once."""


def tables(file: InputFile, schema: pa.Schema, *, closed: bool = True) -> Iterator[pa.Table]:
    """Yield the rows of `file` in order, the same at every call. `schema`: of the target table.

    `closed`: pass on or reject columns that the table lacks, else leave them out.
    Raises: Invalid with file, row (from 1) and column.
    """
    read = 0
    try:
        for rows in _READERS[file.format](file, schema, closed):
            _expect_once(file, rows.column_names)
            kept = rows if closed else rows.select([name for name in rows.column_names if name in schema.names])
            for part in (kept.slice(at, ROWS) for at in range(0, rows.num_rows, ROWS)):
                yield part
                read += part.num_rows
    except (OSError, ValueError, pa.ArrowException) as error:
        raise Invalid(f"{file.name}: cannot be read after {read:,} rows: {first_line(error)}") from error


def columns_of(file: InputFile) -> pa.Schema | None:
    """Return the columns of a file whose format has types, all nullable; None for a text or a file without rows.

    Raises: Invalid if it cannot be read.
    """
    first = next(tables(file, pa.schema([])), None) if file.format in TYPED else None
    return None if first is None else pa.schema([pa.field(field.name, field.type) for field in first.schema])


def _parquet(file: InputFile, *_: Any) -> Iterator[pa.Table]:
    with file.opened() as opened:
        for batch in pyarrow.parquet.ParquetFile(opened).iter_batches(ROWS):
            yield pa.Table.from_batches([batch])


def _arrow(file: InputFile, *_: Any) -> Iterator[pa.Table]:
    with file.opened() as opened:
        try:
            reader = pa.ipc.open_file(opened)
        except pa.ArrowInvalid:
            opened.seek(0)
            for batch in pa.ipc.open_stream(opened):
                yield pa.Table.from_batches([batch])
            return
        for number in range(reader.num_record_batches):
            yield pa.Table.from_batches([reader.get_batch(number)])


def _lance(file: InputFile, *_: Any) -> Iterator[pa.Table]:
    for batch in file.dataset().scanner(batch_size=ROWS, scan_in_order=True).to_batches():
        yield pa.Table.from_batches([batch])


# ---- texts ---------------------------------------------------------------------------------------------------------


def _csv(file: InputFile, schema: pa.Schema, closed: bool) -> Iterator[pa.Table]:
    texts = pyarrow.csv.ConvertOptions(
        column_types={},
        null_values=[""],
        strings_can_be_null=True,
        quoted_strings_can_be_null=False,
        auto_dict_encode=False,
    )
    reading = pyarrow.csv.ReadOptions(block_size=_BLOCK, use_threads=False)
    parsing = pyarrow.csv.ParseOptions(newlines_in_values=True)
    with _checked_csv(file) as opened:
        # The names first: every column is read as text, and Arrow takes types by name only.
        first = pyarrow.csv.open_csv(opened, read_options=reading, parse_options=parsing, convert_options=texts)
        names = first.schema.names
    texts.column_types = dict.fromkeys(names, pa.string())
    _expect_once(file, names)
    if closed:
        _check_names(file, names, schema)
    names, read = [name for name in names if name in schema.names], 0
    with _checked_csv(file) as opened:
        reader = pyarrow.csv.open_csv(opened, read_options=reading, parse_options=parsing, convert_options=texts)
        for batch in reader:
            found = {name: _of_texts(batch.column(name), schema.field(name).type) for name in names}
            yield _checked(file, read, found)
            read += batch.num_rows


def _checked_csv(file: InputFile) -> pa.PythonFile:
    # Arrow itself rejects a value that does not end in the block after the one where it begins.
    return pa.PythonFile(MatchedQuotes(file.streamed(), file.name, longest=2 * _BLOCK), mode="r")


def _of_texts(texts: pa.Array, kind: pa.DataType) -> tuple[pa.Array, Problems]:
    """Return texts as a column, and the problems by row."""
    if is_text(kind):
        return texts, {}
    try:
        if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
            return cast_texts(texts, kind), {}
        if (
            kind in (pa.float32(), pa.float64())
            and pc.all(pc.is_finite(numbers := texts.cast(kind))).as_py() is not False
            and not rounds(texts, numbers)
        ):
            return numbers, {}
    except pa.ArrowInvalid:
        pass
    return column(texts.to_pylist(), kind, "", lambda text, *how: None if text is None else from_text(text, *how))


def _ndjson(file: InputFile, schema: pa.Schema, closed: bool) -> Iterator[pa.Table]:
    read = 0
    fields: list[json_columns.Read] = [((each.name,), each.type, "") for each in schema]
    with file.streamed() as opened:
        for lines in _lines(opened):
            values = pa.array(lines, pa.binary())
            plain = json_columns.plain(values, fields, closed=closed)
            if plain is not None:
                yield pa.table(plain, names=schema.names)
            else:
                yield _checked(file, read, _of_objects(file, read, lines, schema, closed))
            read += len(lines)


def _lines(opened: pa.NativeFile) -> Iterator[list[bytes]]:
    """Yield the lines that are not blank, some thousand at once."""
    rest = b""
    while data := opened.read(_BLOCK):
        *lines, rest = (rest + data).split(b"\n")
        whole = [line for line in lines if line.strip()]
        yield from (whole[at : at + ROWS] for at in range(0, len(whole), ROWS))
    if rest.strip():
        yield [rest]


def _of_objects(
    file: InputFile, read: int, lines: list[bytes], schema: pa.Schema, closed: bool
) -> Mapping[str, tuple[pa.Array, Problems]]:
    """Return the columns of JSON objects, with the reason for each value that does not fit."""
    rows = documents(lines, json_decoder(schema.types), "none", "the line")
    for number, row in enumerate(rows):
        if row.problem is not None:
            reason = row.problem.removeprefix("parse: ")
            raise Invalid(f"{file.name}: row {read + number + 1:,}: {reason}; write one JSON object per line")
        if closed:
            _check_names(file, list(row.fields or ()), schema, f"row {read + number + 1:,}: ")
    return {each.name: column([field(row, (each.name,)) for row in rows], each.type, "") for each in schema}


def _checked(file: InputFile, read: int, found: Mapping[str, tuple[pa.Array, Problems]]) -> pa.Table:
    """Return the columns as a table. Raises: Invalid for the first row with a problem; `read`: rows before these."""
    problems = [(row, name, why) for name, (_, by_row) in found.items() for row, why in by_row.items()]
    if problems:
        row, name, why = min(problems)
        raise Invalid(f"{file.name}: row {read + row + 1:,}, column {name!r}: {why}")
    return pa.table({name: values for name, (values, _) in found.items()})


def _expect_once(file: InputFile, names: list[str]) -> None:
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise Invalid(f"{file.name}: column {twice!r} is in the file twice; leave it in once")


def _check_names(file: InputFile, names: list[str], schema: pa.Schema, where: str = "") -> None:
    for name in names:
        if name not in schema.names:
            raise Invalid(f"{file.name}: {where}column {name!r} is not in the table{suggestion(name, schema.names)}")


_READERS: Mapping[Format, Callable[[InputFile, pa.Schema, bool], Iterator[Any]]] = {
    "parquet": _parquet,
    "csv": _csv,
    "ndjson": _ndjson,
    "arrow": _arrow,
    "lance": _lance,
}
