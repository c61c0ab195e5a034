"""What is refused of a query before DataFusion parses it: functions and types that `memtable.filter.allowed` does not
list, too many operators or brackets in one another, samples.

DataFusion plans a chain of operators in a time that grows with the square of its length (5,000 additions: minutes that
nothing interrupts), and returns all rows where TABLESAMPLE asks for some. A query is read as brackets and lists:

- The depth of an expression is that of its chain and of the deepest bracket in it; of a list or of several clauses,
  that of the deepest. Queries in a query add up, and so do joins: the optimizer puts the expressions of one into
  those of another. Of the parts of a UNION the deepest counts, and 1 for each further part.
- A call is a name before a bracket, where SQL has no other use for one.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from memwal.ingest.api.sql.statement import words_of
from memwal.ingest.errors import Invalid
from memwal.memtable.filter import allowed

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
SIZED = {
    **allowed.SIZED,
    **dict.fromkeys(("array_repeat", "list_repeat", "array_resize", "list_resize"), (1, 1_000)),
}
TABLES = frozenset(("range", "generate_series"))
"""Functions that make the rows of a table, one batch after the other: only where a table stands."""
FUNCTIONS = allowed.FUNCTIONS | frozenset(_ONLY_HERE.split()) | SIZED.keys()
_CHAINS = frozenset(("and", "or", *"+-*/%|&^#@~", "||", "<<", ">>"))
_COMPARING = "is like ilike between in similar at collate not :: [ : < > = <= >= <> != =="
_HEAVY = frozenset(_COMPARING.split())
_STARTING = "select from where group having order on when then else qualify window limit offset"
_CLAUSES = frozenset(_STARTING.split())
_SETS = frozenset(("union", "except", "intersect"))
_SAMPLES = frozenset(("tablesample", "sample"))
_WORDS = """
    select distinct all by where and or not on having when then else case in like ilike between is from join as limit
    offset using with recursive values lateral exists any some union except intersect over window qualify group order
    fetch end asc desc inner left right full cross natural into for filter within partition rollup cube sets
    materialized interval array escape to similar
"""
_KEYWORDS = frozenset(_WORDS.split())
_NAME = re.compile(r"""[^\W\d]\w*|".*"|`.*`""", re.DOTALL)


def expect_bounded(query: str, parameters: Mapping[str, Any]) -> None:
    """Raises: Invalid for a query that nests too deep, wants a sample, or calls or casts to what is not allowed."""
    if len(query) > allowed.LONGEST:
        raise Invalid(f"sql: the query has {len(query)} characters, at most {allowed.LONGEST} are allowed")
    query_depth = _Reader(words_of(query), parameters).bracket("", 0)[0]
    if query_depth > allowed.DEPTH:
        raise Invalid(
            f"sql: the query nests {query_depth} operators, joins or queries, at most {allowed.DEPTH} are allowed: use "
            "IN (...) or split the query"
        )


class _Reader:
    """Reads the words of a query from left to right, bracket by bracket."""

    def __init__(self, words: Sequence[str], parameters: Mapping[str, Any]) -> None:
        self._typed, self._parameters = [*words, "", ""], parameters
        self._words = [
            "." if before == "." else word.lower() for before, word in zip(["", *words], [*words, ""], strict=True)
        ]
        self._words.append("")
        self._at = 0

    def bracket(self, closing: str, nesting: int, *, is_cast: bool = False) -> tuple[int, bool]:
        """Read up to `closing`, the end of a bracket or of the query; return its depth, and whether it is a query."""
        chains = heavy = joined = inner = deepest = below = part = parts = prefixes = 0
        first, is_query, clause = self._at, False, ""
        while self._words[self._at] not in ("", closing):
            word, self._at = self._words[self._at], self._at + 1
            compares = word == "from" and self._words[self._at - 2] == "distinct"
            if word in _SETS or (word in _CLAUSES and not compares) or word in (",", "join"):
                deepest = max(deepest, inner + chains + allowed.HEAVY * max(0, heavy - joined - 1))
                chains = heavy = joined = inner = prefixes = 0
                first, is_query = self._at, is_query or word == "select" or word in _SETS
                below += word == "join" or (word == "," and clause == "from")
                clause = word if word in _CLAUSES and word != "on" else clause
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
                name, begin = self._called(clause) if word == "(" else "", self._at
                depth, query = self.bracket(
                    _CLOSING[word], nesting + prefixes + 1, is_cast=name in ("cast", "try_cast")
                )
                self._at += 1
                self._check_call(name, self._typed[begin : self._at - 1])
                inner, below = (inner, below + depth + 1) if query else (max(inner, depth), below)
        deepest = max(deepest, inner + chains + allowed.HEAVY * max(0, heavy - joined - 1))
        return max(part, deepest + below) + parts, is_query

    def _called(self, clause: str) -> str:
        """Return the name of the function whose bracket was opened last, "" for other brackets."""
        *_, before, name = ["", "", *self._words[max(0, self._at - 3) : self._at - 1]]
        is_name = _NAME.fullmatch(name) and name not in _KEYWORDS
        if not is_name or before in (")", "as", "::") or (_NAME.fullmatch(before) and before not in _KEYWORDS):
            return ""  # or the columns of an alias, or the digits of a type
        is_table = before in ("from", "join", "lateral") or (before == "," and clause == "from")
        name = name.strip('"`')
        return "" if is_table and name in TABLES else name

    def _check_call(self, name: str, words: Sequence[str]) -> None:
        if not name or (self._words[self._at] == "as" and self._words[self._at + 1] in ("(", "materialized", "not")):
            return  # no call, or WITH name (columns) AS
        if name in TABLES:
            _refuse(f"the function '{name}' is allowed only as a table: from {name}(1, n)")
        _refuse(allowed.function_problem(name, FUNCTIONS))
        if name in allowed.CASTS:
            kind = words[-1] if words[-1:] and words[-2:-1] == [","] else ""
            _refuse(allowed.type_problem(kind[1:-1], arrow=True))
        if name in SIZED:
            if any(word.lower() in SIZED for word in words):
                _refuse(f"{name} makes a longer value of longer ones; use it once")
            _refuse(allowed.size_problem(name, self._numbers(words), SIZED))

    def _numbers(self, words: Sequence[str]) -> list[str]:
        """Return the arguments of a call that are whole numbers, written out or parameters; "" for others."""
        found, depth, begin = list[str](), 0, 0
        for at, word in enumerate([*words, ","]):
            depth += (word in _CLOSING) - (word in (")", "]", "}"))
            if word == "," and not depth:
                argument = words[begin:at]
                value = self._parameters.get(argument[1]) if len(argument) == 2 and argument[0] == "$" else None
                found.append(argument[0] if len(argument) == 1 else _whole(value))
                begin = at + 1
        return found

    def _type(self) -> str:
        """Return the words of the type that comes next."""
        at = self._at + 1
        while self._words[at] in ("unsigned", "precision", "with", "without", "time", "zone"):
            at += 1
        written = " ".join(self._words[self._at : at])
        if self._words[at] in ("(", "["):
            end = next((end for end in range(at, len(self._words)) if self._words[end] in (")", "]", "")), at)
            written += "".join(self._words[at : end + 1])
        return written

    def _expect_no_sample(self, word: str) -> None:
        """Refuse a word that samples the table before it. In other places it is the name of something."""
        before = self._words[self._at - 2] if self._at > 1 else ""
        after, further = self._words[self._at], self._words[min(self._at + 1, len(self._words) - 1)]
        if before in _KEYWORDS or not (before == ")" or _NAME.fullmatch(before)):
            return
        named = bool(_NAME.match(after)) and after not in _KEYWORDS
        if after == "(" and before == ")" and word == "sample":  # maybe with columns: (select 1) sample(v)
            samples = further[:1].isdigit() or further == "$"
        else:
            samples = after in ("(", "$") or after[:1].isdigit() or named
        if samples:
            raise Invalid(
                f"sql: {word.upper()} is refused: DataFusion would return all rows; write order by random() limit 100 "
                "for 100 rows, or where random() < 0.1 for about a tenth of them"
            )


def _whole(value: object) -> str:
    """Return a value of Python, numpy or Arrow as the digits of an integer, "" if it is none."""
    try:
        return str(operator.index(value.as_py() if isinstance(value, pa.Scalar) else value))  # type: ignore[arg-type]
    except TypeError:
        return ""


def _refuse(reason: str) -> None:
    if reason:
        raise Invalid(f"sql: {reason}")
