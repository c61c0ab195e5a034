"""How often a planner's parser reads the words of a predicate: some forms are read twice, and nest.

sqlparser, which Lance and DataFusion have, reads `cast(x as int)` as a form of its own, and where that fails, as the
call of a function called cast. So what is inside is read twice, and 2^k times in k such forms, whenever a mistake is
inside, or more than the 50 levels that sqlparser allows: `cast(` 30 times needs hours, which nothing interrupts. These
are read twice, found by measuring each form of the parser nested 6 to 12 times around a mistake:

- `cast(`, `floor(`, `substring(` and the like, up to the end of their bracket; `position(` is read four times.
- a bracket behind `.name`; and two brackets behind IN, FROM and the like. k of them there are read k times.
- NOT before a bracket, a sign or an operator, and INTERVAL before anything but a text: up to the end of the operand,
  which ends at a comma, AND, OR or a clause of the bracket around it.
- CASE up to its ELSE or END: in THEN, a failed CASE is read again as more of the one around it. In ELSE it is not, so
  chains of ELSE CASE may be long.

Words of up to FREE such forms always pass; of further ones, the readings are added up. A reading of a word takes 1.2
microseconds, so that a parser loses about a second before it says what is wrong. A predicate without a mistake is read
once; but which one that is, only the parser could say.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from memwal.memtable.filter.tokens import tokenize

MOST = 1 << 20
"""Readings of words. 100 words inside 13 forms, or 1,000 words inside 10, are as many."""
FREE = 3
"""Forms in one another that are always allowed: with a text of the greatest length, too."""
_CALLS = """
    cast try_cast safe_cast convert try_convert floor ceil substring substr overlay array
    current_date current_time current_timestamp localtime localtimestamp
"""
_FORMS = {**dict.fromkeys(_CALLS.split(), 1), "position": 2}
"""Calls that are read again, and how often their readings double."""
_NAMED = re.compile(r"(?i)[(\[]|\b(?:not|case|interval)\b")
"""What every form has in its text."""
_OPENING = {"(": ")", "[": "]", "{": "}"}
_BEFORE_VALUES = "case when then else and or not in is like ilike between from as"
_NO_VALUE = frozenset(_BEFORE_VALUES.split())
"""Words that no value ends with: END, ELSE and FROM behind them are names."""
_INFIX = """
    is like ilike between in similar regexp rlike glob match collate at overlaps and or xor div mod member
"""
_OPERATORS = frozenset(_INFIX.split())
_CLAUSES = """
    else from where group having order limit on join union
"""
_AFTER_VALUES = frozenset(("end", *_CLAUSES.split()))
"""Words that are names where no value is before them."""
_ENDS = frozenset((",", "and", "or", "when", "then", "select", "as", *_CLAUSES.split()))
"""What ends an operand."""
_LISTS = frozenset(("in", "from", "join", "lateral", "any", "all", "some", ","))
"""What stands before brackets that may hold a query, a table or a value."""


@dataclass(slots=True)
class _Open:
    """An open bracket or CASE, or the whole predicate.

    `around`: how often the readings double outside of it. `own`: in all of it. `operand`: in the operand of NOT or
    INTERVAL that is read now. `betweens`: BETWEEN whose AND is still to come. `run`: brackets behind IN or FROM, up to
    this one.
    """

    closing: str = ""
    around: int = 0
    own: int = 0
    operand: int = 0
    betweens: int = 0
    run: int = 0

    @property
    def forms(self) -> int:
        return self.around + self.own + self.operand

    def bracket(self, opening: str, before: str, is_field: bool) -> _Open:
        """Return a bracket in this one. `is_field`: of `.name`, which stands before it."""
        run = self.run + 1 if before == opening and self.run else int(before in _LISTS)
        doubled = run > 1 and (run - 1) & (run - 2) == 0  # at 2, 3, 5, 9: so that 2^own is at least `run`
        return _Open(_OPENING[opening], self.forms, _FORMS.get(before, 0) + is_field + doubled, run=run)

    def take(self, word: str, after: str) -> None:
        if word == "between":
            self.betweens += 1
        elif word == "and" and self.betweens:
            self.betweens -= 1
        elif word in _ENDS:
            self.operand = self.betweens = 0
            self.own = 0 if word == "else" and self.closing == "end" else self.own
        elif word == "not":
            self.operand += after in _OPERATORS or not (after[:1].isalnum() or after[:1] in "_'\"`")
        elif word == "interval":
            self.operand += after[:1] != "'"


def readings(words: Sequence[str]) -> tuple[int, int]:
    """Return how many readings of words in more than FREE forms are possible, and the most forms in one another.

    `words`: tokens without gaps, in lower case.
    """
    opened, found, deepest = [_Open()], 0, 0
    for earlier, before, word, after in zip(["", "", *words], ["", *words], words, [*words[1:], ""], strict=False):
        is_name = before == "." or (word in _AFTER_VALUES and not _is_value(before))
        if word in _OPENING:
            opened.append(opened[-1].bracket(word, before, earlier == "."))
        elif word == "case" and not is_name:
            opened.append(_Open("end", opened[-1].forms, 1))
        elif word == opened[-1].closing and not is_name:
            opened.pop()
        elif not is_name:
            opened[-1].take(word, after)
        forms = opened[-1].forms
        deepest = max(deepest, forms)
        found += 1 << forms if forms > FREE else 0
        if found > MOST:
            break
    return found, deepest


def _is_value(word: str) -> bool:
    """Whether a value may end with a word."""
    return word not in _NO_VALUE and (word[-1:].isalnum() or word[-1:] in ("_", ")", "]", "}", "'", '"', "`"))


def problem_of(words: Sequence[str]) -> str:
    """Return why words are refused for what a parser may read again, "" if they are not. `words`: as in `readings`."""
    found, deepest = readings(words)
    if found <= MOST:
        return ""
    return f"it nests {deepest} of CAST, CASE, NOT (...) and the like, which a planner reads for too long: nest fewer"


def may_nest(text: str) -> bool:
    """Whether a text has enough of such forms to be refused for them."""
    return len(_NAMED.findall(text)) * max(_FORMS.values()) > FREE


def problem(predicate: str, columns: Sequence[str]) -> str:
    """Return why a predicate is refused for what a parser may read again, "" if it is not. `columns`: of the table."""
    if not may_nest(predicate):
        return ""
    tokens = tokenize(predicate, columns)
    if any(token.kind == "gap" and token.text.count("/*") > 1 for token in tokens):
        return "it has a comment inside a comment; leave it out"
    return problem_of([token.lower for token in tokens if token.kind != "gap"])
