"""Pass the text of a CSV file to Arrow's reader, and reject unmatched quotes.

Arrow's reader guesses and reports no error: an unclosed quote takes the following lines into its value, and `"x"y`
becomes `xy`. By RFC 4180 a value that begins with a quote ends with one, followed by a separator, a line end or the end
of the file, and quotes inside it are doubled. A quote inside a value that begins without one (`5" pipe`) is kept, as in
Arrow.
"""

from __future__ import annotations

import codecs
import re

import pyarrow as pa

from memwal.ingest.errors import Invalid

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
        end = _matched(text)
        if end < len(text) and (at_end or len(text) - end > self._longest or not _BEGUN.match(text, end)):
            line = self._lines + text.count(b"\n", 0, end)
            value = text[end : end + _SHOWN].decode(errors="replace").rstrip("\r\n")
            raise Invalid(
                f"{self._name}: line {line:,}: the quotes of {value!r} do not match; a value that begins with a "
                "quote ends with one, and has each quote inside of it twice"
            )
        self._lines += text.count(b"\n", 0, end - 1)
        self._rest = text[end - 1 :]


def _matched(text: bytes) -> int:
    """Return the end of the part of `text` whose quotes match; at least 1, because the first byte matches."""
    found = _MATCHED.match(text) if b'"' in text else None
    return found.end() if found else len(text)
