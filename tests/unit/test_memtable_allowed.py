"""Filters that are rejected before a planner reads them, with the text in each message; and accepted filters."""

from __future__ import annotations

import pytest

from memwal.memtable import InvalidRows
from memwal.memtable.filter import allowed
from memwal.memtable.filter.expression import Node, parse
from tests.messages import raises

COLUMNS = ["id", "v", "tags", "at", "x", "b", "t"]
TEN = "x" * 10_001
HUGE = "FixedSizeList(2147483647, Int64)"
REFUSED = {
    # A type of any size.
    f"arrow_cast(make_array(id), '{HUGE}') is null": HUGE,
    f"arrow_try_cast(make_array(id), '{HUGE}') is null": HUGE,
    "arrow_cast(v, 'FixedSizeBinary(2147483647)') is null": "FixedSizeBinary",
    "arrow_cast(tags, 'List(Int64)') is null": "List",
    f"arrow_cast(v, '{'List(' * 5_000}') is null": "List",
    "arrow_cast(v, v) = 1": "the type",
    "cast(v as int[2147483647]) is null": "[",
    "tags::int[2147483647] is null": "int[",
    "trim() = v": ")",
    "cast(v as decimal(99999999999, 2)) = 1": "decimal(99999999999,2)",
    "v::blob = x'00'": "blob",
    # Values of any length.
    "repeat('x', 1000000000) = v": "repeat",
    "REPEAT ('x', 1_000_000_000) = v": "1_000_000_000",
    "v = repeat('x', 1e9)": "repeat",
    "repeat(v, id) = 'x'": "repeat",
    "repeat('x', 10 * 1000) = v": "repeat",
    "repeat/**/('x', 101) = v": "repeat",
    "`repeat`('x', 101) = v": "(",
    "\"repeat\"('x', 101) = v": "(",
    "lpad(v, 2147483647) = 'x'": "lpad",
    "length(rpad(v, 1000000)) > 3": "rpad",
    "repeat(repeat(v, 11), 10) = 'x'": "repeat",
    " or ".join(["repeat(v, 60) = 'x'"] * 9): "repeat",
    "array_length(array_repeat(v, 1000)) = 1": "array_repeat",
    "list_resize(tags, 100000) is null": "list_resize",
    "array_has(range(1, 1000000000), id)": "range",
    "array_has(generate_series(1, 1000000000, 1), id)": "generate_series",
    f"replace(v, 'a', '{TEN}') = 'x'": "a text of more than 1000",
    "replace(replace(v, 'a', 'aaaaa'), 'a', 'aaaaa') = 'x'": "replace",
    "regexp_replace(regexp_replace(v, '.', '$0$0'), '.', '$0$0', 'g') = 'x'": "regexp_replace",
    "encode(encode(v, 'hex'), 'hex') = 'x'": "encode",
    f"concat({', '.join(['v'] * 101)}) = 'x'": "concat",
    f"array_length([{', '.join(['1'] * 101)}]) > 5": "a list",
    f"v || '{TEN}' = 'x'": "a text of more than 1000",
    f"v LIKE '{TEN}'": "a text of more than 1000",
    "concat(v || v, v) = 'x'": "concat",
    # Filters that a planner reads for hours, or that end the process.
    "(" * 17 + "id = 1" + ")" * 17: "17",
    "cast(" * 49 + "id" + " as int)" * 49 + " = 1": "nests",
    "ceil(" * 30: "nests",
    "not " * 17 + "b": "nests",
    "id = " + "- " * 17 + "1": "nests",
    "x in ((" * 25: "nests",
    "id = 1" + " + 1" * 401: "chains more than 400",
    "id is null" + " is null" * 201: "chains more than 400",
    "id" + "::bigint" * 201 + " = 1": "chains more than 400",
    # Filters that make Lance's planner panic, or that it does not support.
    "id = ?": "?",
    "id = $1": "$",
    "v = $$text$$": "$",
    "v = :name": ":",
    "v = N'a'": "N'a'",
    "v = b'a'": "b'a'",
    "case when b then 1 end = 1": "case",
    "id in (select id)": "select",
    "exists (select 1)": "exists",
    "id = 1; drop table t": ";",
    "v ~ 'a'": "~",
    "id & 1 = 1": "&",
    "v similar to 'a'": "similar",
    "v like 'a' escape 'b'": "'b'",
    "b is unknown": "unknown",
    "id = 0x10": "0x10",
    "v = 'a": "'",
    "/* /* */ ' */ id = 1 /* ' */": "a comment inside a comment",
    # A text in place of a column.
    "\"v\" = 'a'": "`v`",
    "upper(\"V\") = 'a'": "`V`",
    '"w" not in (1)': "`w`",
    # Functions that are not in the list, with the nearest one that is.
    "starts_wit(v, 'a')": "starts_with",
    "regexp_matches(v, 'a')": "regexp_match",
    "random() < 0.5": "random",
    "sum(id) > 1": "sum",
    "map_keys(t) is null": "map_keys",
    "pg_sleep(5)": "pg_sleep",
}
ALLOWED = [
    "lpad(v, 10, '0') = '0000000042'",
    "replace(replace(replace(v, '-', ''), ' ', ''), '.', '') = '123'",
    "replace(v, '', 'x') = 'a'",
    "regexp_replace(regexp_replace(v, '[^0-9]', ''), '^0', '') = '123'",
    "regexp_replace(v, '([a-z]+)', '$1-', 'g') = 'a-'",
    "concat_ws('-', v, upper(v), lpad(v, 8, '0')) = 'a-a-a'",
    "array_to_string(tags, ', ') = 'a, b'",
    "id in (1000000, 2000000) and v = 'repeat(x, 1000000000)'",
    f"not (v = '{'x' * 100_000}' or v <> '{'y' * 100_000}')",
    "v in (" + ", ".join(f"'{n:040}'" for n in range(1000)) + ")",
    "(" * 16 + "id = 1" + ")" * 16,
    " and ".join(f"not (x = {n} or x is null)" for n in range(100)),
    " or ".join(f"x not in ({n}) and x not between {n} and (3)" for n in range(40)),
    "array_has_any(tags, ['a', 'b']) and array_has_all(tags, make_array('a'))",
    "t.a.b[1] > 0 and t['a'] is not null and `v` ilike 'a%'",
    "at > timestamp '2024-01-01 00:00:00' and at < cast('2025-01-01' as timestamp(9)) -- a comment",
    "x > decimal(8,3) '1.000' or x in (numeric(10, 2) '1.50')",
    "x::decimal(10, 2) <= -1.5e3 and v = x'00ff' or not b",
    "coalesce(at, now() - interval '1 day') > date_trunc('day', now())",
    "arrow_cast(x, 'Timestamp(Microsecond, Some(\"UTC\"))') = current_timestamp",
]


@pytest.mark.parametrize(("filter", "named"), REFUSED.items(), ids=[filter[:50] for filter in REFUSED])
def test_what_is_not_in_the_list_is_refused_by_name(filter: str, named: str) -> None:
    with pytest.raises(InvalidRows) as refused:
        parse(filter, COLUMNS)
    said = str(refused.value).partition(f"filter {filter[:200]!r}"[:-1])[2]
    assert named in said or named == "17"
    assert len(said) < 400
    assert "\n" not in said


@pytest.mark.parametrize("filter", ALLOWED, ids=lambda filter: filter[:50])
def test_filters_as_people_write_them_are_allowed(filter: str) -> None:
    assert isinstance(parse(filter, COLUMNS), Node)


def test_a_filter_that_is_too_long_is_refused_before_it_is_read() -> None:
    with raises(InvalidRows):
        parse(" " * (allowed.LONGEST + 1), COLUMNS)


def test_every_function_of_the_list_is_one_of_datafusion() -> None:
    from datafusion import SessionConfig, SessionContext

    context = SessionContext(SessionConfig().with_information_schema(True))
    known = context.sql("select distinct routine_name as name from information_schema.routines").to_pydict()["name"]
    assert allowed.FUNCTIONS - set(known) <= {name.replace("array_", "list_") for name in known} | {"arrow_try_cast"}
