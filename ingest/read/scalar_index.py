"""Filters for which Lance's scalar indexes are not asked, because the answer would lack rows.

Found with pylance 14.0.2: Lance asks the index of a boolean column for `b = true` where the filter says `b IS TRUE`,
and takes the opposite of that for its opposite: `NOT (b IS TRUE)`, `(b IS TRUE) = false` and the like lose the rows
where b is null. Such filters read the column instead.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

from memwal.memtable.filter.tokens import tokenize

_MAY = re.compile(r"\bis\b.*\b(?:true|false)\b", re.IGNORECASE | re.DOTALL)


def filtered(filter: str | None) -> dict[str, Any]:
    """Return the options of Lance's scanner for a scan by `filter`."""
    return {"filter": filter} if _is_answered(filter) else {"filter": filter, "use_scalar_index": False}


def _is_answered(filter: str | None) -> bool:
    if filter is None or not _MAY.search(filter):
        return True
    words = [token.lower for token in tokenize(filter, ()) if token.kind != "gap" and token.lower != "not"]
    return not {("is", "true"), ("is", "false")}.intersection(pairwise(words))
