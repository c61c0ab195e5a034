"""What is refused of a query before DataFusion plans it: operators nested too deep, forms that its parser reads many
times (`filter.rereads`), values of any size, samples.

DataFusion plans a chain of operators in a time that grows with the square of its length (5,000 additions: minutes that
nothing interrupts), allocates what `repeat` and `lpad` are told to make, without regard to the memory of the query, and
returns all rows where TABLESAMPLE asks for some.

The depth is bounded from above, by tokens. An expression is measured as a filter is (`filter.depth`), with the deepest
bracket in it added; expressions beside one another, in a list or in other clauses, count as the deepest of them. So
lists of any length are allowed. Queries in a query add up, and so do joins: the optimizer puts the expressions of one
into those of another. Of the parts of a UNION the deepest counts, and 1 for each further part.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pyarrow as pa

from memwal.ingest.api.sql.statement import words_of
from memwal.ingest.errors import Invalid
from memwal.memtable.filter import depth, growth, rereads
from memwal.memtable.filter.tokens import NOTHING, Token

LONGEST_VALUE = 250_000
"""Characters of texts and elements of lists that functions may be told to make for one row. A batch of DataFusion has
8,192 rows; with 250,000 bytes each it just fits in the 2 GiB of a column of texts, beyond which DataFusion panics.
"""
_OPENING = {"(": ")", "[": "]", "{": "}", "case": "end"}
_FLAT = 2
"""Words of an expression that chains nothing. Of a long VALUES, all are."""
_CLAUSES = frozenset(("select", "from", "where", "group", "having", "order", "on", "when", "then", "else"))
_SETS = frozenset(("union", "except", "intersect"))
_SAMPLES = frozenset(("tablesample", "sample"))
_BEFORE_NAMES = """
    select distinct all by where and or not on having when then else case in like ilike between is from join as limit
    offset using with recursive values lateral exists any some union except intersect over window qualify
"""
_AFTER_NAMES = """
    from where group having order limit offset on union except intersect window qualify fetch as end when then else and
    or in is not like ilike between asc desc join inner left right full cross natural using into for
"""
_NO_TABLE = frozenset(_BEFORE_NAMES.split())
"""Words that end no table. What follows them is a name, even if it is called sample."""
_NO_SAMPLE = frozenset(_AFTER_NAMES.split())
"""Words that say how much is sampled in no query: a name such as sample is before them."""


def expect_bounded(query: str, parameters: Mapping[str, Any]) -> None:
    """Raises: Invalid for a query that nests too deep, makes values that are too long, or wants a sample."""
    words = words_of(query)
    if len(query) > depth.SURELY_FLAT and (found := depth_of(words)) > depth.MOST:
        raise Invalid(
            f"sql: the query nests {found} operators, joins or queries, at most {depth.MOST} are allowed: use IN (...) "
            "or split the query"
        )
    if rereads.may_nest(query) and (reason := rereads.problem_of([word.lower() for word in words])):
        raise Invalid(f"sql: the query {reason.removeprefix('it ')}")
    named = _NAMED.search(query)
    if named is None:
        return
    tokens = [_token(word) for word in words]
    made = growth.growth(_with_values(tokens, parameters), _GROWING)
    if made > LONGEST_VALUE:
        rows = "; from range(1, n) makes rows, any number of them" if named[1].lower() in _TABLES else ""
        raise Invalid(
            f"sql: functions such as {named[1].lower()} make {made:.0f} characters or elements for a row, at most "
            f"{LONGEST_VALUE} are allowed: write smaller numbers{rows}"
        )
    around = [NOTHING, *tokens, NOTHING, NOTHING]
    for before, token, after, further in zip(around, around[1:], around[2:], around[3:], strict=False):
        if token.lower in _SAMPLES and _is_sample(before, token, after, further):
            raise Invalid(
                f"sql: {token.text.upper()} is refused: DataFusion would return all rows; write order by random() "
                "limit 100 for 100 rows, or where random() < 0.1 for about a tenth of them"
            )


# ---- depth ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Bracket:
    """An open bracket or CASE, or the whole query.

    `own`: words of the current expression, of which `inner` is the deepest bracket. `deepest`: of the expressions
    before. `below`: of joins and of the queries inside. `parts`, `part`: number of a UNION's parts, and the deepest
    one.
    """

    closing: str = ""
    own: list[str] = field(default_factory=list)
    inner: int = 0
    deepest: int = 0
    below: int = 0
    parts: int = 0
    part: int = 0
    clause: str = ""
    is_query: bool = False

    def take(self, word: str) -> None:
        if word in _SETS:
            self._end_part()
            self.is_query = True
        elif word == "join" or (word == "," and self.clause == "from"):
            self._end_expression()
            self.below += 1
        elif word == ",":
            self._end_expression()
        elif word in _CLAUSES and not (word == "from" and self.own and self.own[-1] == "distinct"):
            self._end_expression()
            self.clause = word
            self.is_query = self.is_query or word == "select"
        else:
            self.own.append(word)

    def add(self, closed: _Bracket) -> None:
        """Take a bracket that ended in the current expression."""
        expression, below = closed.result()
        self.inner = max(self.inner, expression)
        self.below += below + closed.is_query

    def result(self) -> tuple[int, int]:
        """Return the depth of the expression that the bracket is, and that of the queries in it."""
        if not self.is_query:
            self._end_expression()
            return self.deepest, self.below
        self._end_part()
        return 0, self.part + self.parts - 1

    def _end_expression(self) -> None:
        chained = depth.depth([_token(word) for word in self.own]) if len(self.own) > _FLAT else 0
        self.deepest = max(self.deepest, self.inner + chained)
        self.own, self.inner = [], 0

    def _end_part(self) -> None:
        self._end_expression()
        self.part, self.parts = max(self.part, self.deepest + self.below), self.parts + 1
        self.deepest, self.below, self.clause = 0, 0, ""


def depth_of(words: Sequence[str]) -> int:
    """Return an upper bound of how deep a query nests. `words`: its tokens without gaps."""
    opened = [_Bracket()]
    for before, typed in pairwise(["", *words]):
        word = "." if before == "." else typed.lower()  # a column may be called end
        if word in _OPENING:
            opened[-1].take(word)
            opened.append(_Bracket(_OPENING[word]))
        elif word == opened[-1].closing:
            closed = opened.pop()
            opened[-1].add(closed)
            opened[-1].take(word)
        else:
            opened[-1].take(word)
    while len(opened) > 1:  # DataFusion refuses it
        closed = opened.pop()
        opened[-1].add(closed)
    return sum(opened[0].result())


# ---- values and samples --------------------------------------------------------------------------------------------


def _bare(argument: Sequence[Token]) -> Sequence[Token]:
    """Return an argument without brackets around it and `::type` behind it: `((3)::int)` is 3."""
    while True:
        if len(argument) > 3 and [token.text for token in argument[-3:-1]] == [":", ":"]:
            argument = argument[:-3]
        elif len(argument) > 1 and argument[0].text == "(" and argument[-1].text == ")":
            argument = argument[1:-1]
        else:
            return argument


def _padded(given: growth.Arguments) -> float:
    """A call makes as much as its second argument says; 1 if that is computed."""
    number = growth.number(_bare(given[1])) if len(given) > 1 else 1
    return number if math.isfinite(number) else 1


def _counted(given: growth.Arguments) -> float:
    """A call counts to a number, or from one to another in steps; 1 if one of them is computed."""
    bare = [_bare(each) for each in given]
    numbers = [growth.number(each) * (-1 if each and each[0].text == "-" else 1) for each in bare]
    if not all(map(math.isfinite, numbers)):
        return 1
    start, stop, step = (*((0.0, *numbers) if len(numbers) == 1 else numbers), 1, 1, 1)[:3]
    return float(abs(stop - start) / max(1, abs(step)))


def _repeated(given: growth.Arguments) -> float:
    text = given[0] if given else ()
    length = len(text[0].text) - 2 if len(text) == 1 and text[0].kind == "text" else 1
    return max(1, length) * _padded(given)


_GROWING: Mapping[str, Callable[[growth.Arguments], float]] = {
    "repeat": _repeated,
    **dict.fromkeys(("lpad", "rpad", "array_repeat", "list_repeat", "array_resize", "list_resize"), _padded),
    **dict.fromkeys(("range", "generate_series"), _counted),
}
_NAMED = re.compile(r"(?i)\b(" + "|".join([*_GROWING, *sorted(_SAMPLES)]) + r")\b")
_TABLES = frozenset(("range", "generate_series"))
_BEFORE_TABLES = frozenset(("from", "join", "lateral"))


def _with_values(solid: Sequence[Token], parameters: Mapping[str, Any]) -> list[Token]:
    """Return tokens with numbers in place of `$name`, and without names of functions that make rows of a table one by
    one.
    """
    written: list[Token] = []
    from_seen = [False]  # for each open bracket: in a FROM clause a comma is before a table
    for before, token in pairwise([NOTHING, *solid]):
        if token.text == "(":
            from_seen.append(False)
        elif token.text == ")" and len(from_seen) > 1:
            from_seen.pop()
        elif token.lower in _CLAUSES | _SETS:
            from_seen[-1] = token.lower == "from" or (from_seen[-1] and token.lower == "on")
        value = _whole(parameters.get(token.text)) if before.text == "$" else None
        if value is not None:
            written[-1:] = [Token("number", str(abs(value)))]
        elif token.lower in _TABLES and (before.lower in _BEFORE_TABLES or (before.text == "," and from_seen[-1])):
            written.append(Token("name", "table"))
        else:
            written.append(token)
    return written


def _whole(value: object) -> int | None:
    """Return a value of Python, numpy or Arrow as an integer, None if it is none."""
    try:
        return operator.index(value.as_py() if isinstance(value, pa.Scalar) else value)  # type: ignore[arg-type]
    except TypeError:
        return None


def _is_sample(before: Token, token: Token, after: Token, further: Token) -> bool:
    """Whether a word samples the table before it. In other places it is the name of something."""
    is_table = before.text == ")" or before.kind in ("name", "column", "double")
    if token.kind != "name" or not is_table or before.lower in _NO_TABLE:
        return False
    if after.text == "(" and before.text == ")" and token.lower == "sample":  # maybe with columns: (select 1) sample(v)
        return further.kind == "number" or further.text == "$"
    return (
        after.text in ("(", "$") or after.kind == "number" or (after.kind == "name" and after.lower not in _NO_SAMPLE)
    )


def _token(word: str) -> Token:
    if word[0] == "`":
        return Token("column", word, word[1:-1])
    if word[0] == '"':
        return Token("double", word)
    if len(word) > 1 and word[-1] in "'$":
        return Token("text", word)
    return Token("number" if word[0].isdigit() else "name" if word[0].isidentifier() else "other", word)
