"""Filters that a planner's parser reads again and again: refused before it sees them."""

from __future__ import annotations

import pytest

from memwal.memtable.filter.predicate import problem
from memwal.memtable.filter.rereads import readings

COLUMNS = ["id", "x", "s", "b", "t"]
FORMS = {
    **{f"{name}(": (f"{name}(", ")") for name in ("floor", "ceil", "convert", "position", "overlay", "array")},
    **{name: (f"{name}(", " as int)") for name in ("cast", "try_cast", "safe_cast", "CAST /* so */ ")},
    "substring": ("substring(", " from 1)"),
    "in brackets": ("(1 + floor((", ")))"),
    "not": ("not (", ")"),
    "not a sign": ("not -(", ")"),
    "not beside": ("not (b) = (", ")"),
    "not between": ("not (b) between 1 and (", ")"),
    "not without brackets": ("not (b) = ", ""),
    "interval": ("interval (", ")"),
    "interval of interval": ("interval ", ""),
    "then": ("case when b then ", " end"),
    "case beside": ("case (b) = (", ") when 1 then 2 end"),
    "in": ("x in ((", "))"),
    "field": ("t.a[", "]"),
    "names of ends": ("case when b then end + ", " end"),
}


@pytest.mark.parametrize(("opening", "ending"), FORMS.values(), ids=FORMS)
def test_forms_that_are_read_again_nest_no_deeper_than_a_parser_reads_at_once(opening: str, ending: str) -> None:
    told = " of CAST, CASE, NOT (...) and the like, which a planner reads for too long: nest fewer"
    for n in (22, 49, 90):
        for predicate in (opening * n + "x x", opening * n + "x" + ending * n + " = 1"):
            assert problem(predicate, COLUMNS).endswith(told)
    for n in range(1, 5):
        assert problem(opening * n + "x" + ending * n + " = 1", COLUMNS) == ""


def test_the_longer_the_words_inside_the_fewer_forms() -> None:
    def allowed(forms: int, words: int) -> bool:
        return not problem("cast(" * forms + "x" + " + 1" * words + " as int)" * forms + " = 1", COLUMNS)

    assert [max(n for n in range(20) if allowed(n, words)) for words in (0, 10, 100, 390)] == [16, 15, 12, 10]


@pytest.mark.parametrize(
    "predicate",
    [
        "(" * 40 + "x = 1" + ")" * 40,
        "abs(" * 40 + "x" + ")" * 40 + " = 1",
        "replace(" * 30 + "s" + ", 'a', 'b')" * 30 + " = 's'",
        " and ".join(f"not (x = {n} or x is null)" for n in range(100)),
        " or ".join(f"x not in ({n}) and x not between {n} and (3)" for n in range(40)),
        " + ".join(f"case when x = {n} then cast(s as int) else floor(x) end" for n in range(50)) + " = 1",
        "case " + " ".join(f"when x not in ({n}) then {n}" for n in range(60)) + " end = 1",
        "".join(f"case when x = {n} then {n} else " for n in range(30)) + "0" + " end" * 30 + " = 1",
        "not (cast(x as int) in (" + ", ".join(map(str, range(5_000))) + "))",
        "t > now() - interval '1 day' and " * 30 + "b",
        "s in (" + ", ".join(["'not (case (cast(floor('"] * 30) + ")",
        "coalesce(" + ", ".join(["cast(x as int), position('a' in s)"] * 30) + ") = 1",
    ],
)
def test_filters_as_people_and_programs_write_them_are_read(predicate: str) -> None:
    assert problem(predicate, COLUMNS) == ""


def test_a_comment_inside_a_comment_hides_nothing() -> None:
    assert "a comment inside a comment" in problem("/* /* */ ' */ " + "cast(" * 40 + "x", COLUMNS)


def test_long_texts_are_measured_at_once() -> None:
    assert readings(["("] * 100_000) == (0, 0)
