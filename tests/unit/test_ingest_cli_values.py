"""Rows as commands print them: every value can be read back from the output, and JSON output is valid JSON."""

from __future__ import annotations

import json
import math
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console

from memwal.ingest.cli.print import cell, print_rows, shown_values

FORMS = ("table", "json", "ndjson", "csv")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("values", "kind", "shown"),
    [
        ([76.1, None, 0.1], pa.float32(), [76.1, None, 0.1]),
        ([np.float16(0.1)], pa.float16(), [0.1]),
        ([76.1, 1e-9, 1e300], pa.float64(), [76.1, 1e-9, 1e300]),
        ([[76.1, None], None, []], pa.list_(pa.float32()), [[76.1, None], None, []]),
        ([[76.1, 0.1]], pa.list_(pa.float32(), 2), [[76.1, 0.1]]),
        ([{"x": 76.1, "n": 1}, None], pa.struct([("x", pa.float32()), ("n", pa.int64())]), [{"x": 76.1, "n": 1}, None]),
        ([{"n": 1}], pa.struct([("n", pa.int64())]), [{"n": 1}]),
        (["a", None], pa.dictionary(pa.int8(), pa.string()), ["a", None]),
    ],
)
def test_values_have_no_digits_that_nobody_wrote(form: str, values: list[Any], kind: pa.DataType, shown: Any) -> None:
    assert shown_values(pa.array(values, kind), form) == shown


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.binary(2)])
def test_binary_is_hexadecimal_for_programs(kind: pa.DataType) -> None:
    column = pa.array([b"\x00\xff", None], kind)
    assert shown_values(column, "table") == [b"\x00\xff", None]
    for form in ("json", "ndjson", "csv"):
        assert shown_values(column, form) == ["00ff", None]
    assert shown_values(pa.array([[b"\x00"]], pa.list_(kind if kind != pa.binary(2) else pa.binary())), "csv") == [
        ["00"]
    ]


@example(1e12)
@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_a_narrow_number_reads_back_as_itself(value: float) -> None:
    ((shown),) = shown_values(pa.array([value], pa.float32()), "json")
    assert np.float32(shown) == np.float32(value)
    assert digits(shown) <= digits(float(np.float32(value)))


def digits(value: float) -> int:
    """Return the number of significant digits of a number's text: 1e12 has one."""
    return len(Decimal(repr(value)).normalize().as_tuple().digits)


@pytest.mark.parametrize("form", ["json", "ndjson"])
def test_json_has_no_number_that_is_none(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    column = [math.nan, math.inf, -math.inf, 1.5]
    rows = pa.table({"wide": column, "narrow": pa.array(column, pa.float32()), "list": [[each] for each in column]})
    print_rows(rows.column_names, [rows.slice(0, 2), rows.slice(2)], form, Console())
    text = capsys.readouterr().out

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    lines = [text] if form == "json" else text.splitlines()
    read = [json.loads(line, parse_constant=refuse) for line in lines]
    found = read[0] if form == "json" else read
    assert [row["wide"] for row in found] == ["NaN", "Infinity", "-Infinity", 1.5]
    assert [row["list"] for row in found] == [["NaN"], ["Infinity"], ["-Infinity"], [1.5]]


@pytest.mark.parametrize(
    ("value", "shown"), [(1e-9, "1e-09"), (76.1, "76.1"), (0.1 + 0.2, "0.3"), (1234567.89, "1234567.89")]
)
def test_a_cell_shows_a_number_as_people_write_it(value: float, shown: str) -> None:
    assert cell(value).plain == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("red \x1b[31mtext\x07", r"red \x1b[31mtext\x07"),
        ("two\nlines\ttab", r"two\nlines\ttab"),
        ("Grüße, 世界 — ok", "Grüße, 世界 — ok"),
        ("\u202egnitirw", r"\u202egnitirw"),
        ({"a": "\x1b]52;c;eA==\x07"}, r"{'a': '\x1b]52;c;eA==\x07'}"),
    ],
)
def test_a_cell_sends_nothing_to_the_terminal_that_it_acts_on(value: Any, shown: str) -> None:
    assert cell(value, width=100).plain == shown
    assert all(each.isprintable() for each in cell([value]).plain)
