"""How deep a predicate nests: planners recurse over a chain of operators, and their stacks are finite.

Lance's and DataFusion's planners end the process on a long chain, such as 1,000 additions, or 400 times `is true`. So a
predicate is measured before either of them sees it. Its depth is bounded from above, by tokens:

- AND, OR and arithmetic count 1 each: a chain of n of them is n deep.
- Comparisons, IS, LIKE, BETWEEN, IN, casts, brackets and the like are one for each part of an AND or OR, which is as
  deep as the chain already. What is beyond that chains too, and counts 2: their frames are larger.

Values of an IN list count nothing: 20,000 of them are planned in half a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from memwal.memtable.filter.tokens import Token, tokenize

MOST = 400
"""The greatest depth. The planner's time grows with the square of it as well: 1,000 additions take 17 s."""
SURELY_FLAT = 250
"""Characters of a predicate that cannot be too deep."""
LONGEST = 1 << 22
"""Characters of the longest predicate."""
_CHAINS = frozenset(("and", "or", "+", "-", "*", "/", "%", "|", "&", "^", "~", "#", "@", "!", "xor", "div", "mod"))
_WORDS = """
    is like ilike between in similar distinct regexp rlike glob match collate at overlaps isnull notnull escape
    [ : < > = <= >= <> != ==
"""
_PARTS = frozenset(_WORDS.split())


def depth(solid: Sequence[Token]) -> int:
    """Return an upper bound of how deep a predicate nests. `solid`: its tokens without gaps."""
    words = [token.lower for token in solid if token.kind != "column"]
    signs = sum(word in "-+" and before in "(," for before, word in pairwise(words))  # of values, not between them
    chains = sum(word in _CHAINS for word in words) - signs
    joined = 1 + sum(word in ("and", "or") for word in words)
    parts, nots = sum(word in _PARTS for word in words), words.count("not")
    return chains + 2 * max(0, parts - joined) + 2 * max(0, nots - joined)


def problem(predicate: str, columns: Sequence[str]) -> str:
    """Return why a predicate is refused for its depth, "" if it is not. `columns`: of the table."""
    if len(predicate) <= SURELY_FLAT:
        return ""
    if len(predicate) > LONGEST:
        return f"it has {len(predicate)} characters, at most {LONGEST} are allowed: use get for keys, or split it"
    found = depth([token for token in tokenize(predicate, columns) if token.kind != "gap"])
    if found <= MOST:
        return ""
    return f"it chains {found} operators, at most {MOST} are allowed: use IN (...) or split the filter"
