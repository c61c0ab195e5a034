"""The end of an error message about an unknown name: the nearest known name, or all known names."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def suggestion(name: str, known: Iterable[str], form: str = "{!r}") -> str:
    """Return `"; did you mean 'x'?"`, or `"; known are 'a', 'b'"` if no known name is close.

    `form`: format of a known name, such as "[{}]" for sections.
    """
    names = list(known)
    close = get_close_matches(name, names, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {form.format(close[0])}?"
    return f"; known are {', '.join(map(form.format, names))}"
