"""The functions, types and literal sizes that a filter or query may use. Everything else is refused by its name.

Planners and engines allocate what an expression requests without a limit, and abort the process if that fails. A
function is allowed if its result is bounded by its arguments. Functions whose result is longer than each argument
(`GROWING`) take few or small arguments, and are not nested in one another. Numbers that size a result (`SIZED`) must be
literals.

`memtable.filter.expression` parses filters by this list; `api.sql.statement` checks the calls of a query with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches

LONGEST = 1 << 22
"""Characters of the longest filter or query."""
NESTING = 16
"""Nesting depth of brackets and prefix operators. A planner's parser reads `cast(` and the like twice around an error,
so 2^16 times here: a fraction of a second. At 50 it would take centuries, and nothing interrupts it.
"""
DEPTH = 400
"""Operators that form one chain, such as 400 additions. Planners are quadratic in it, and recurse: 1,000 additions take
17 s, and some chains of that length abort the process.
"""
HEAVY = 2
"""What an operator behind its operand (IS, LIKE, `::type`) adds to the depth: its stack frames are larger."""
TEXT = 1_000
"""Characters of a literal that a function or operator computes with. In a comparison any length is allowed."""
ARGUMENTS = 100
"""Arguments of a call, and elements of a list in brackets."""
GROWING_CALLS = 8
"""Calls of growing functions in one filter."""

_FUNCTIONS = """
    abs acos acosh asin asinh atan atan2 atanh cbrt ceil cos cosh cot degrees exp factorial floor gcd greatest isnan
    iszero lcm least ln log log10 log2 nanvl pi pow power radians round signum sin sinh sqrt tan tanh trunc
    ascii bit_length btrim char_length character_length chr contains ends_with find_in_set initcap instr left length
    levenshtein lower ltrim octet_length reverse right rtrim split_part starts_with strpos substr substr_index substring
    substring_index to_hex translate trim upper
    regexp_count regexp_instr regexp_like regexp_match
    coalesce ifnull nullif nvl nvl2 arrow_typeof
    current_date current_time current_timestamp date_bin date_format date_part date_trunc datepart datetrunc
    from_unixtime make_date make_time now to_char to_date to_local_time to_time to_timestamp to_timestamp_micros
    to_timestamp_millis to_timestamp_nanos to_timestamp_seconds to_unixtime today
    decode digest md5 sha224 sha256 sha384 sha512
    cardinality empty flatten element_at cosine_distance dot_product inner_product arrays_overlap
    array_any_value array_compact array_contains array_dims array_distance array_distinct array_element array_empty
    array_except array_extract array_has array_has_all array_has_any array_indexof array_intersect array_length
    array_max array_min array_ndims array_normalize array_pop_back array_pop_front array_position array_positions
    array_remove array_remove_all array_remove_n array_reverse array_slice array_sort
"""
_GROWING = """
    concat concat_ws encode overlay replace regexp_replace string_to_array string_to_list make_array make_list
    array_append array_cat array_concat array_join array_prepend array_push_back array_push_front array_replace
    array_replace_all array_replace_n array_to_string array_union || repeat
"""
SIZED: Mapping[str, tuple[int, int]] = {"repeat": (1, 100), "lpad": (1, 1_000), "rpad": (1, 1_000)}
"""Functions with a number that sizes their result: its place among the arguments, and its maximum."""
CASTS = frozenset(("arrow_cast", "arrow_try_cast"))
FORMS = frozenset(("ceil", "floor", "overlay", "substr", "substring", "trim"))
"""Functions with their own grammar, which have at least one argument."""


def _with_lists(names: str) -> frozenset[str]:
    every = names.split()
    return frozenset([*every, *(name.replace("array_", "list_") for name in every if name.startswith("array_"))])


GROWING = _with_lists(_GROWING)
FUNCTIONS = _with_lists(_FUNCTIONS) | (GROWING - {"||"}) | SIZED.keys() | CASTS

_SQL_TYPE = re.compile(
    r"""(?:bool(?:ean)?|(?:tiny|small|big)?int(?:\ unsigned)?|integer(?:\ unsigned)?|float|real|double(?:\ precision)?
    |string|text|(?:var)?char(?:\(\d{1,5}\))?|binary|bytea|date
    |(?:time|timestamp|datetime)(?:\(\d\))?(?:\ with(?:out)?\ time\ zone)?
    |(?:decimal|numeric)(?:\(\d{1,2}(?:,\d{1,2})?\))?|interval)""",
    re.VERBOSE,
)
_UNIT = "(?:Second|Millisecond|Microsecond|Nanosecond)"
_ARROW_TYPE = re.compile(
    rf"""\s*(?:Boolean|U?Int(?:8|16|32|64)|Float(?:16|32|64)|(?:Large)?(?:Utf8|Binary)|(?:Utf8|Binary)View|Date(?:32|64)
    |(?:Time32|Time64|Duration)\(\s*{_UNIT}\s*\)|Interval\(\s*\w{{2,15}}\s*\)
    |Timestamp\(\s*{_UNIT}\s*(?:,\s*(?:None|(?:Some\(\s*)?"[\w/+:\-]{{1,40}}"\s*\)?)\s*)?\)
    |Decimal(?:32|64|128|256)\(\s*\d{{1,2}}\s*,\s*-?\d{{1,2}}\s*\))\s*""",
    re.VERBOSE,
)


def function_problem(name: str, names: Iterable[str] = FUNCTIONS) -> str:
    """Return why a function is refused, "" if it is among `names`."""
    names = list(names)
    if name in names:
        return ""
    near = get_close_matches(name, names, 1)
    return f"the function '{name:.60}' is not allowed{f'; did you mean {near[0]!r}?' if near else ''}"


def type_problem(written: str, *, arrow: bool = False) -> str:
    """Return why a type is refused, "" if it is allowed.

    `written`: an SQL type, in lower case with single spaces between words and none elsewhere; with `arrow`, a type of
    arrow_cast.
    """
    if (_ARROW_TYPE if arrow else _SQL_TYPE).fullmatch(written):
        return ""
    near = "'Int64', 'Utf8' or 'Timestamp(Microsecond, None)'" if arrow else "int, double, string or timestamp"
    return f"the type '{written:.60}' is not allowed; write a scalar type such as {near}"


def size_problem(name: str, numbers: Sequence[str], sized: Mapping[str, tuple[int, int]] = SIZED) -> str:
    """Return why a call is refused for the number that sizes its result, "" if it is allowed.

    `numbers`: the arguments that are number literals; "" for others.
    """
    place, most = sized.get(name, (0, 0))
    if len(numbers) <= place or not most or (numbers[place].isdecimal() and int(numbers[place]) <= most):
        return ""
    return f"{name} needs a number of at most {most}, written out, as argument {place + 1}"
