"""CSV records by RFC 4180: which texts are records of a given number of values, and which options leave this check to
Spark's parser."""

from __future__ import annotations

import re

import pytest

from memwal.ingest.spark.source.texts import is_checked, options_of, record_pattern

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
