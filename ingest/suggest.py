"""Errors about an unknown name: they end with the nearest known name, or with all known names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

_NOWHERE: Mapping[str, str] = MappingProxyType({})


def suggestion(name: str, known: Iterable[str], form: str = "{!r}", elsewhere: Mapping[str, str] = _NOWHERE) -> str:
    """Return `"; did you mean 'x'?"`, or `"; known are 'a', 'b'"` if no known name is close.

    `form`: format of a known name, such as "[{}]" for sections. `elsewhere`: for names that people know from other
    programs, what to use instead.
    """
    names = list(known)
    return near(name, names, form, elsewhere) or f"; known are {', '.join(map(form.format, names))}"


def near(name: str, known: Iterable[str], form: str = "{!r}", elsewhere: Mapping[str, str] = _NOWHERE) -> str:
    """Return the first form of `suggestion`, or "" if no known name is close."""
    if name in elsewhere:
        return f"; {elsewhere[name]}"
    from difflib import get_close_matches  # slow to import, and only needed for mistakes

    close = get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {form.format(close[0])}?" if close else ""


def no_attribute(what: str, kind: type, name: str, elsewhere: Mapping[str, str]) -> AttributeError:
    """Return the error for an attribute that `kind` lacks.

    `what`: an instance of it, such as "a table". `elsewhere`: as for `suggestion`.
    """
    if name.startswith("_"):
        return AttributeError(f"{what} has no {name!r}", name=name)
    known = [each for each in dir(kind) if not each.startswith("_")]
    hint = near(name, known, elsewhere=elsewhere) or f"; dir({what.rpartition(' ')[2]}) lists its methods"
    return AttributeError(f"{what} has no {name!r}{hint}", name=name)
