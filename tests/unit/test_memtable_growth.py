"""Filters whose functions make values of any size: refused before a planner computes them."""

from __future__ import annotations

import pytest

from memwal.memtable.filter import growth

COLUMNS = ["id", "v", "tags", "at"]
REFUSED = [
    "repeat('x', 1000000000) = v",
    "REPEAT ('x', 1_000_000_000) = v",
    "v = repeat('x', 1e9)",
    "repeat(v, id) = 'x'",
    "repeat('x', 10 * 1000) = v",
    "repeat/**/('x', 101) = v",
    "`repeat`('x', 101) = v",
    "\"repeat\"('x', 101) = v",
    "lpad(v, 2147483647) = 'x'",
    "length(rpad(v, 1000000)) > 3",
    "rpad(repeat(v, 20), 20) = 'x'",
    "repeat(repeat(v, 11), 10) = 'x'",
    "repeat(v, 60) = 'x' or repeat(v, 60) = 'y'",
    "array_length(array_repeat(v, 1000)) = 1",
    "list_resize(tags, 100000) is null",
    "array_resize([1, 2], 5000) is null",
    "array_has(range(1, 1000000000), id)",
    "array_has(generate_series(1, 1000000000, 1), id)",
    "array_has(range(now(), now()), at)",
    "replace(v, 'a', repeat('b', 101)) = 'x'",
    "replace(replace(replace(v, 'a', 'aaaaa'), 'a', 'aaaaa'), 'a', 'aaaaa') = 'x'",
    "replace(replace(v, 'a', v), 'a', v) = 'x'",
    "regexp_replace(regexp_replace(v, '.', '$0$0$0$0$0$0'), '.', '$0$0$0$0$0$0', 'g') = 'x'",
    "encode(encode(encode(encode(encode(encode(encode(v, 'hex'), 'hex'), 'hex'), 'hex'), 'hex'), 'hex'), 'hex') = 'x'",
    f"concat_ws('{'x' * 50}', v, v, v, v) = 'x'",
    "array_to_string(tags, repeat('x', 2000)) = 'x'",
    "repeat('x', 1000000000",
    f"length(concat({', '.join(['v'] * 4000)})) > 5",
    f"array_length(make_array({', '.join(['v'] * 101)})) > 5",
    f"array_to_string(tags, ',', '{'x' * 101}') = 'x'",
    f"array_to_string(array_repeat(v, 100), ',', '{'x' * 9990}') = 'x'",
    f"list_resize(tags, 100, '{'x' * 9990}') is null",
    f"repeat(v || '{'x' * 9990}', 100) = 'x'",
    "/* /* */ ' */ repeat('x', 1000000000) = v /* ' */",
    f"concat(v, '{'x' * 10_001}') = 'x'",
    f"v || '{'x' * 10_001}' = 'x'",
    f"case when id = 1 then '{'x' * 10_001}' else v end = 'x'",
]
ALLOWED = [
    "lpad(v, 10, '0') = '0000000042'",
    "replace(replace(replace(v, '-', ''), ' ', ''), '.', '') = '123'",
    "regexp_replace(v, '[^0-9]', '') = '123'",
    "regexp_replace(v, '([a-z]+)', '$1-', 'g') = 'a-'",
    "replace(v, 'a', v) = 'x'",
    "concat_ws('-', v, v, v) = 'a-a-a'",
    "array_to_string(tags, ', ') = 'a, b'",
    "encode(v, 'hex') = '61'",
    "repeat('ab', 3) = v",
    "repeat('ab', -1) = v",
    "id in (1000000, 2000000) and v = 'repeat(x, 1000000000)'",
    "v like '%repeat%' or range = 1000000000",
    f"v = '{'x' * 100_000}'",
    "v in (" + ", ".join(f"'{n:040}'" for n in range(1000)) + ")",
    f"not (v = '{'x' * 100_000}' or v <> '{'y' * 100_000}')",
]


@pytest.mark.parametrize("filter", REFUSED, ids=lambda filter: filter[:50])
def test_what_may_grow_without_a_limit_is_refused_and_says_what_to_do(filter: str) -> None:
    said = growth.problem(filter, COLUMNS)
    assert any(
        remedy in said
        for remedy in ("write their numbers out", "leave it out", "with such a text alone", "write a shorter text")
    ), said
    assert len(said) < 300
    assert "\n" not in said


@pytest.mark.parametrize("filter", ALLOWED, ids=lambda filter: filter[:50])
def test_filters_as_people_write_them_are_allowed(filter: str) -> None:
    assert growth.problem(filter, COLUMNS) == ""


def test_a_filter_of_many_brackets_is_measured_soon() -> None:
    assert growth.problem("(" * 20_000 + "repeat(v, 2)" + ")" * 20_000, COLUMNS) == ""
    assert growth.problem("repeat(" * 20_000 + "v" + ", 2)" * 20_000, COLUMNS)
