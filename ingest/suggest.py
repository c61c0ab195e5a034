"""Errors about an unknown name: they end with the nearest known name, or with all known names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def suggestion(name: str, known: Iterable[str], form: str = "{!r}") -> str:
    """Return `"; did you mean 'x'?"`, or `"; known are 'a', 'b'"` if no known name is close.

    `form`: format of a known name, such as "[{}]" for sections.
    """
    from difflib import get_close_matches  # slow to import, and only needed for mistakes

    names = list(known)
    close = get_close_matches(name, names, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {form.format(close[0])}?"
    return f"; known are {', '.join(map(form.format, names))}"


def no_attribute(what: str, kind: type, name: str, elsewhere: Mapping[str, str]) -> AttributeError:
    """Return the error for an attribute that `kind` lacks.

    `what`: an instance of it, such as "a table". `elsewhere`: for names that people know from other libraries, what to
    use instead.
    """
    from difflib import get_close_matches

    if name in elsewhere:
        return AttributeError(f"{what} has no {name!r}; {elsewhere[name]}")
    known = [] if name.startswith("_") else [each for each in dir(kind) if not each.startswith("_")]
    close = get_close_matches(name, known, n=1, cutoff=0.5)
    return AttributeError(f"{what} has no {name!r}" + (f"; did you mean {close[0]!r}?" if close else ""), name=name)
