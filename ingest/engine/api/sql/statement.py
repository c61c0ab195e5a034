"""Check the text of a query before DataFusion parses it, and quote the name `table`, a keyword of SQL.

Rejected are statements other than queries, functions and types that `memtable.filter.allowed` does not list, too many
operators or nested brackets, and samples.

DataFusion's planning time for a chain of operators grows with the square of its length (5,000 additions: minutes that
nothing interrupts), and it returns all rows for TABLESAMPLE. A query is read as brackets and lists:

- The depth of an expression is that of its chain and of the deepest bracket in it; of a list or of several clauses,
  that of the deepest. Nested queries add up, and so do joins: the optimizer moves the expressions of one into those of
  another. Among the parts of a UNION the deepest counts, and 1 for each further part.
- A call is a name before a bracket, where SQL has no other use for one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from memwal.ingest.errors import Invalid
from memwal.memtable.filter import allowed

SELF = "table"
_TOKEN = re.compile(
    r"""[eE]'(?:[^'\\]|\\.|'')*' | '(?:[^']|'')*' | "(?:[^"]|"")*" | `[^`]*` | --[^\n]* | /\*.*?\*/
      | \$(\w*)\$.*?\$\1\$ | \w+ | \s+ | <= | >= | <> | != | == | :: | \|\| | << | >> | .""",
    re.VERBOSE | re.DOTALL,
)
_GAP = re.compile(r"\s|--|/\*")
_FIRST = frozenset(("select", "with", "values", "from", "(", "describe", "desc"))
_BEFORE_TABLE = frozenset(("from", "join", "describe", "desc", ",", "("))
_CLOSING = {"(": ")", "[": "]", "{": "}", "case": "end"}
_ONLY_HERE = """
    approx_distinct approx_median approx_percentile_cont approx_percentile_cont_with_weight array_agg avg bit_and bit_or
    bit_xor bool_and bool_or corr count covar covar_pop covar_samp cume_dist dense_rank first_value grouping lag
    last_value lead max mean median min nth_value ntile percent_rank percentile_cont quantile_cont rank regr_avgx
    regr_avgy regr_count regr_intercept regr_r2 regr_slope regr_sxx regr_sxy regr_syy row_number stddev stddev_pop
    stddev_samp string_agg sum var var_pop var_population var_samp var_sample
    cast try_cast extract random rand uuid unnest struct named_struct row
    map map_entries map_extract map_keys map_values
"""
_REPEATING = ("array_repeat", "list_repeat", "array_resize", "list_resize")
SIZED = {**allowed.SIZED, **dict.fromkeys(_REPEATING, (1, 1_000))}
TABLES = frozenset(("range", "generate_series"))
"""Functions that make the rows of a table, batch by batch: allowed only in place of a table."""
FUNCTIONS = allowed.FUNCTIONS | frozenset(_ONLY_HERE.split()) | SIZED.keys()
_CHAINS = frozenset(("and", "or", *"+-*/%|&^#@~", "||", "<<", ">>"))
_COMPARING = "is like ilike between in similar at collate not :: [ : < > = <= >= <> != =="
_HEAVY = frozenset(_COMPARING.split())
_STARTING = "select from where group having order on when then else qualify window limit offset"
_CLAUSES = frozenset(_STARTING.split())
_SETS = frozenset(("union", "except", "intersect"))
_SAMPLES = frozenset(("tablesample", "sample"))
_TYPE_WORDS = frozenset(("unsigned", "precision", "with", "without", "time", "zone"))
_WORDS = """
    select distinct all by where and or not on having when then else case in like ilike between is from join as limit
    offset using with recursive values lateral exists any some union except intersect over window qualify group order
    fetch end asc desc inner left right full cross natural into for filter within partition rollup cube sets
    materialized interval array escape to similar
"""
_KEYWORDS = frozenset(_WORDS.split())
_NAME = re.compile(r"""[^\W\d]\w*|".*"|`.*`""", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Statement:
    """A query as DataFusion receives it. `inserted`: places of its characters that the caller did not type."""

    text: str
    inserted: tuple[int, ...]

    @classmethod
    def of(cls, query: str) -> Statement:
        """Quote `table` where it names a table.

        Raises: Invalid for an empty query, one that is too long, and other statements than queries.
        """
        if len(query) > allowed.LONGEST:
            _refuse(f"the query has {len(query)} characters, at most {allowed.LONGEST} are allowed")
        words = _words_of(query)
        if not words:
            _refuse("the query is empty; write one such as select count(*) from table")
        if words[0].lower() not in _FIRST:
            _refuse(f"{words[0]:.60} is refused: a query begins with SELECT; put and delete change a table")
        text, inserted, place = "", list[int](), 0
        for match in _TOKEN.finditer(query):
            token = match.group()
            if not _GAP.match(token):
                before, after = words[place - 1].lower() if place else "", "".join(words[place + 1 : place + 2])
                place += 1
                if token.lower() == SELF and (after == "." or (before in _BEFORE_TABLE and after != "(")):
                    inserted += [len(text), len(text) + len(SELF) + 1]
                    token = f'"{SELF}"'
            text += token
        return cls(text, tuple(inserted))

    def typed(self, line: int, column: int) -> int:
        """Return the column in the query as typed."""
        start = sum(len(each) + 1 for each in self.text.split("\n")[: line - 1])
        return column - sum(start <= place < start + column - 1 for place in self.inserted)


def _words_of(query: str) -> list[str]:
    """Return the tokens of a query without gaps. Raises: Invalid for a comment inside a comment."""
    tokens = [match.group() for match in _TOKEN.finditer(query)]
    if any(token.startswith("/*") and "/*" in token[2:] for token in tokens):
        raise Invalid("sql: the query has a comment inside a comment; leave it out")
    return [token for token in tokens if not _GAP.match(token)]


def expect_bounded(query: str, parameters: Mapping[str, Any]) -> None:
    """Raise Invalid for a query that nests too deep, samples rows, or uses a function or type that is not allowed."""
    depth = _Reader(_words_of(query), parameters).bracket("", 0)[0]
    if depth > allowed.DEPTH:
        raise Invalid(
            f"sql: the query nests {depth} operators, joins or queries, at most {allowed.DEPTH} are allowed: use "
            "IN (...) or split the query"
        )


class _Reader:
    """Read the words of a query from left to right, bracket by bracket."""

    def __init__(self, words: Sequence[str], parameters: Mapping[str, Any]) -> None:
        self._typed, self._parameters = ["", "", *words, "", "", ""], parameters
        self._words = ["", *("." if before == "." else word.lower() for before, word in pairwise(self._typed))]
        self._at = 2

    def bracket(self, closing: str, nesting: int, *, is_cast: bool = False) -> tuple[int, bool, list[int]]:
        """Read up to `closing`, the end of a bracket or of the query.

        Returns its depth, whether it is a query, and the places of its commas and ends.
        """
        chains = heavy = joined = inner = deepest = below = part = parts = prefixes = 0
        first, is_query, clause, ends = self._at, False, "", [self._at - 1]
        while self._words[self._at] not in ("", closing):
            word, self._at = self._words[self._at], self._at + 1
            compares = word == "from" and self._words[self._at - 2] == "distinct"
            if word in _SETS or (word in _CLAUSES and not compares) or word in (",", "join"):
                deepest = max(deepest, inner + chains + allowed.HEAVY * max(0, heavy - joined - 1))
                chains = heavy = joined = inner = prefixes = 0
                first, is_query = self._at, is_query or word == "select" or word in _SETS
                below += word == "join" or (word == "," and clause == "from")
                clause = word if word in _CLAUSES and word != "on" else clause
                ends += [self._at - 1] if word == "," else []
            if word in _SETS:
                part, parts, deepest, below = max(part, deepest + below), parts + 1, 0, 0
            chains += word in _CHAINS and self._at - 1 > first
            heavy, joined = heavy + (word in _HEAVY), joined + (word in ("and", "or"))
            prefixes = 0 if word in ("and", "or") else prefixes + (word in ("not", "interval"))
            if nesting + prefixes > allowed.NESTING:
                raise Invalid(f"sql: the query nests more than {allowed.NESTING} brackets, CASE or NOT; nest fewer")
            if word == "::" or (word == "as" and is_cast):
                _refuse(allowed.type_problem(self._type()))
            elif word in _SAMPLES:
                self._expect_no_sample(word)
            elif word in _CLOSING:
                name = self._called(clause) if word == "(" else ""
                casts = name in ("cast", "try_cast")
                depth, query, inside = self.bracket(_CLOSING[word], nesting + prefixes + 1, is_cast=casts)
                self._at += self._words[self._at] != ""  # the end of the query ends every bracket
                self._check_call(name, [self._typed[start + 1 : end] for start, end in pairwise(inside)])
                inner, below = (inner, below + depth + 1) if query else (max(inner, depth), below)
        deepest = max(deepest, inner + chains + allowed.HEAVY * max(0, heavy - joined - 1))
        return max(part, deepest + below) + parts, is_query, [*ends, self._at]

    def _called(self, clause: str) -> str:
        """Return the name of the function whose bracket was opened last, "" for other brackets."""
        before, name = self._words[self._at - 3 : self._at - 1]
        if not _is_name(name) or before in (")", "as", "::") or _is_name(before):
            return ""  # or the columns of an alias, or the digits of a type
        is_table = before in ("from", "join", "lateral") or (before == "," and clause == "from")
        name = name.strip('"`')
        return "" if is_table and name in TABLES else name

    def _check_call(self, name: str, arguments: Sequence[Sequence[str]]) -> None:
        if not name or (self._words[self._at] == "as" and self._words[self._at + 1] in ("(", "materialized", "not")):
            return  # no call, or WITH name (columns) AS
        if name in TABLES:
            _refuse(f"the function '{name}' is allowed only as a table: from {name}(1, n)")
        _refuse(allowed.function_problem(name, FUNCTIONS))
        if name in allowed.CASTS:
            _refuse(allowed.type_problem("".join(arguments[-1])[1:-1], arrow=True))
        if name in SIZED:
            if any(word.lower() in SIZED for argument in arguments for word in argument):
                _refuse(f"{name} makes a longer value of longer ones; use it once")
            _refuse(allowed.size_problem(name, [self._number(argument) for argument in arguments], SIZED))

    def _number(self, argument: Sequence[str]) -> str:
        """Return an argument of one word, or the value of a parameter, as text; "" for others."""
        if len(argument) == 2 and argument[0] == "$":
            return str(self._parameters.get(argument[1], ""))
        return argument[0] if len(argument) == 1 else ""

    def _type(self) -> str:
        """Return the words of the type that comes next."""
        at = self._at + 1
        while self._words[at] in _TYPE_WORDS:
            at += 1
        written = " ".join(self._words[self._at : at])
        if self._words[at] in ("(", "["):
            end = next(end for end in range(at, len(self._words)) if self._words[end] in (")", "]", ""))
            written += "".join(self._words[at : end + 1])
        return written

    def _expect_no_sample(self, word: str) -> None:
        """Reject a word that samples the table before it. In other places it is a name."""
        before, _, after, further = self._words[self._at - 2 : self._at + 2]
        columns = after == "(" and before == ")" and word == "sample"  # maybe: (select 1) sample(v)
        size = further if columns else after
        samples = size == "$" or size[:1].isdigit() or (not columns and (size == "(" or _is_name(size)))
        if samples and (before == ")" or _is_name(before)):
            raise Invalid(
                f"sql: {word.upper()} is refused: DataFusion would return all rows; write order by random() limit 100 "
                "for 100 rows, or where random() < 0.1 for about a tenth of them"
            )


def _is_name(word: str) -> bool:
    return _NAME.fullmatch(word) is not None and word not in _KEYWORDS


def _refuse(reason: str) -> None:
    if reason:
        raise Invalid(f"sql: {reason}")
