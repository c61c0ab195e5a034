"""The text of a CSV file on its way to Arrow's reader, refused where its quotes do not match.

Arrow guesses there, and tells nothing: a quote that never closes takes the lines behind it into its value, and `"x"y`
becomes `xy`. By RFC 4180 a value that begins with a quote ends with one, in front of a separator, a line end or the end
of the file, and quotes inside of it are doubled. A quote inside of a value that begins without one (`5" pipe`) is taken
as it is, as by Arrow.
"""

from __future__ import annotations

import codecs
import re

import pyarrow as pa

from memwal.ingest.errors import Invalid

_VALUE = rb'"[^"]*+(?:""[^"]*+)*+'
"""A quoted value, up to where only a closing quote can follow."""
_MATCHED = re.compile(rb'(?:[^"]*+(?:(?<=[,\r\n])' + _VALUE + rb'"(?=[,\r\n])|(?<![,\r\n])"))*+[^"]*+')
"""From the end of a value on: text whose quotes match. Possessive, so each byte is looked at once."""
_BEGUN = re.compile(_VALUE + rb'"?\Z')
"""A quoted value of which the end may be still to come."""
_SHOWN = 40
"""Bytes of a value in a message."""


class MatchedQuotes:
    """A stream of CSV for `pyarrow.PythonFile`, whose reads fail at a quote that does not match.

    `name`: of the file, for messages; `longest`: bytes of a quoted value that are looked at for its end.
    """

    def __init__(self, stream: pa.NativeFile, name: str, longest: int) -> None:
        self._stream, self._name, self._longest = stream, name, longest
        self._rest = b""
        """What was read and is not known to match, behind one byte that is."""
        self._lines = 0
        """Lines that end in front of `_rest`."""
        self.closed = False

    def read(self, size: int) -> bytes:
        """Return the next `size` bytes, fewer at the end. Raises: OSError; Invalid naming the line of a wrong quote."""
        data = b""
        while len(data) < size and (more := self._stream.read(size - len(data))):
            data += more
        before, fresh = self._rest, data
        if not before:  # A file begins like a line behind another.
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
    """Return up to where the quotes of `text` match; at least 1, as the first byte does."""
    found = _MATCHED.match(text) if b'"' in text else None
    return found.end() if found else len(text)
