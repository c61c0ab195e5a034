"""Quotes in the CSV files of a load: texts that Python's reader rejects are rejected, wherever a read ends."""

from __future__ import annotations

import csv
import io
import random
from collections.abc import Sequence

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from memwal.ingest.engine.loads.formats import MatchedQuotes
from memwal.ingest.errors import Invalid
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
