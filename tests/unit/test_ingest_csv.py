"""CSV by RFC 4180: quotes in the files of a load, and the records of Spark's sources."""

from __future__ import annotations

import csv
import io
import random
import re
from collections.abc import Sequence

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from memwal.ingest.engine.loads.formats import MatchedQuotes
from memwal.ingest.errors import Invalid
from memwal.ingest.spark.source.texts import is_checked, options_of, record_pattern
from tests.messages import raises

LONGEST = 100


def read(text: bytes, sizes: Sequence[int] = (7,), longest: int = LONGEST) -> bytes:
    """Return everything that the stream returns, in reads whose sizes repeat `sizes`."""
    stream = MatchedQuotes(pa.BufferReader(text), "a.csv", longest)
    got = []
    while data := stream.read(sizes[len(got) % len(sizes)]):
        got.append(data)
    return b"".join(got)


def is_refused_by_python(text: str) -> bool:
    try:
        list(csv.reader(io.StringIO(text, newline=""), strict=True))
    except csv.Error:
        return True
    return False


@given(
    st.lists(st.sampled_from(['"', '""', ",", "\n", "\r\n", "\r", "a", " "]), max_size=30).map("".join),
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
)
@example('"a"', [1])
@example('a"\n""","', [3])
@example('"\r\n""b"""\r\n5" pipe', [1])
def test_what_python_refuses_is_refused_however_it_is_read(text: str, sizes: list[int]) -> None:
    if is_refused_by_python(text):
        with pytest.raises(Invalid):
            read(text.encode(), sizes)
    else:
        assert read(text.encode(), sizes) == text.encode()


@pytest.mark.parametrize(
    "text",
    [
        'id,name\n1,"open\n2,b\n',
        'id,name\n1,"a\nb"\n2,"open\n3,"c"\n',
        'id,name\n\n1,"two" \n',
        '"id,name\n1,a\n',
        '\ufeff"id"x\n1\n',
    ],
)
def test_a_wrong_quote_is_told_by_its_line(text: str) -> None:
    for size in (3, 7, 1000):
        with raises(Invalid):
            read(text.encode(), [size])
    with raises(Invalid):
        read(text.encode(), [1000])


def test_a_byte_order_mark_is_no_part_of_the_first_value() -> None:
    text = '\ufeff"id"\n"1"\n'.encode()
    assert read(text, [1000]) == read(text, [3]) == text


def test_a_value_that_goes_on_and_on_is_refused_before_the_end_of_the_file() -> None:
    stream = MatchedQuotes(pa.BufferReader(b'1,"' + b"a" * 1000), "a.csv", LONGEST)
    for _ in range(10):
        stream.read(10)
    with raises(Invalid):
        stream.read(10)
    assert read(b'1,"' + b"a" * (LONGEST - 2) + b'"\n', [10])


def test_of_many_lines_the_right_one_is_told() -> None:
    seeded = random.Random(1)
    lines = ["id,name"]
    while len(lines) < 5000:
        lines.append(seeded.choice([f'{len(lines)},"na ""me"""', f"{len(lines)},plain", f'"{len(lines)}",5" pipe']))
    lines.append('5001,"a"b')
    with raises(Invalid):
        read("\n".join(lines).encode(), [4096])


RECORDS: dict[str, tuple[dict[str, str], str, bool]] = {
    "plain": ({}, "1,two", True),
    "empty": ({}, ",", True),
    "quoted": ({}, '"1","two"', True),
    "quotes in quotes": ({}, '1,"a ""quoted"" word"', True),
    "nothing but quotes": ({}, '"",""""', True),
    "a comma and a line break in quotes": ({}, '1,"a,\r\nb"', True),
    "a backslash": ({}, '1,"C:\\"', True),
    "a quote inside": ({}, '1,5" pipe', True),
    "the end of a line": ({}, "1,two\r", True),
    "too few": ({}, "1", False),
    "too many": ({}, "1,2,3", False),
    "never closed": ({}, '1,"two', False),
    "never closed, over lines": ({}, '1,"two\n2,"three"', False),
    "text behind a quote": ({}, '1,"two"x', False),
    "a blank behind a quote": ({}, '1,"two" ', False),
    "a backslash before a quote": ({}, '1,"a\\"b"', False),
    "a line break without quotes": ({}, "1,two\n2", False),
    "a bare carriage return": ({}, "1,t\rwo", False),
    "a blank behind a quote, ignored": ({"ignoreTrailingWhiteSpace": "true"}, '1, "two" ', True),
    "another separator": ({"SEP": "\\t"}, '1\t"a\tb"', True),
    "two letters as separator": ({"delimiter": "||"}, '1||"a||b"', True),
    "one of the two letters": ({"sep": "||"}, "1||a|b", True),
    "a separator that is a special letter": ({"sep": "|"}, "1|2,3", True),
    "another quote": ({"quote": "'"}, "1,'it''s \"'", True),
    "no quotes": ({"quote": ""}, '1,"', True),
    "another end of lines": ({"lineSep": ";"}, "1,2;", True),
}


@pytest.mark.parametrize("case", RECORDS)
def test_a_record_of_two_values(case: str) -> None:
    options, text, right = RECORDS[case]
    assert (re.search(record_pattern(2, options), text) is not None) is right


def test_long_and_wide_records_are_matched() -> None:
    assert re.search(record_pattern(1, {}), '"' + 'x""\n' * 300_000 + '"')
    assert re.search(record_pattern(2_000, {}), ",".join(['"a""b"'] * 2_000))
    assert not re.search(record_pattern(2_000, {}), ",".join(['"a""b"'] * 1_999))


def test_rules_are_those_of_rfc_4180_where_options_say_nothing() -> None:
    assert options_of({"header": "true"}) == {"escape": '"', "multiLine": "true", "lineSep": "\n", "header": "true"}
    assert options_of({"quote": "'"})["escape"] == "'"
    assert options_of({"ESCAPE": "\\", "multiline": "FALSE"}) == {"ESCAPE": "\\", "multiline": "FALSE"}
    assert options_of({"linesep": "\r"}) == {"escape": '"', "multiLine": "true", "linesep": "\r"}
    assert "lineSep" not in options_of({"mode": "DROPMALFORMED"}), "Spark's own parser finds out how lines end"


@pytest.mark.parametrize("option", ["Mode", "unescapedQuoteHandling", "enforceSchema", "charToEscapeQuoteEscaping"])
def test_options_of_sparks_parser_leave_quotes_to_it(option: str) -> None:
    assert not is_checked({option: "x"})
    assert not is_checked({"escape": "\\"})
    assert is_checked({"sep": ";", "quote": "'", "escape": "'", "multiLine": "false"})
