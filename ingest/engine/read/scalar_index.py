"""Identify filters that lose rows with Lance's scalar indexes; such filters read the column instead.

Found with pylance 14.0.2:

- For `b IS TRUE` Lance queries the index of a boolean column for `b = true`, and takes the complement for the opposite:
  `NOT (b IS TRUE)`, `(b IS TRUE) = false` and similar filters lose the rows where b is null.
- Lance narrows `s LIKE 'a\\B%'` to the texts that begin with `a\\B`. A backslash before an ordinary letter stands for
  the letter, so the pattern matches the texts that begin with `aB`.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

from memwal.memtable.filter.expression import tokenize

_MAY = re.compile(r"\bis\b.*\b(?:true|false)\b|\\", re.IGNORECASE | re.DOTALL)


def filtered(filter: str | None) -> dict[str, Any]:
    """Return the options of Lance's scanner for a scan by `filter`."""
    return {"filter": filter} if _is_answered(filter) else {"filter": filter, "use_scalar_index": False}


def _is_answered(filter: str | None) -> bool:
    if filter is None or not _MAY.search(filter):
        return True
    words = [token.lower for token in tokenize(filter) if token.lower != "not"]
    escapes = "like" in words and any("\\" in word for word in words)
    return not escapes and not {("is", "true"), ("is", "false")}.intersection(pairwise(words))
