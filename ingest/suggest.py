"""Names that nobody knows, and the known one that is nearest."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def suggestion(name: str, known: Iterable[str]) -> str:
    """The end of a message about a name that is unknown: `"; did you mean 'x'?"`, or the names there are."""
    names = list(known)
    close = get_close_matches(name, names, n=1)
    return f"; did you mean '{close[0]}'?" if close else f"; there is {', '.join(names)}"


def nearest(name: str, known: Iterable[str], form: str = "{!r}") -> str:
    """`did you mean …?` for a name nobody knows, or the list of what is known."""
    names = list(known)
    close = get_close_matches(name, names, n=1, cutoff=0.5)
    if close:
        return f"did you mean {form.format(close[0])}?"
    return f"known are {', '.join(form.format(each) for each in names)}"
