"""The version of the calls between processes of memwal: which versions talk to each other, and how one grows.

A version is MAJOR.MINOR. A process talks to those of its own major version whose minor version is its own, one below or
one above, so that the daemons of a table can be replaced one after another. The version is stated

- in the answers to "schema" and "regions", with which every connection of a client, and every look of a peer, begins;
- in every other request, as `protocol`, to a daemon that has stated its own.

Who is out of range is refused in one line that says which side to upgrade. The two actions above are never refused, so
that both sides can say so; their fields `protocol`, `table`, `id`, `endpoint`, `endpoints`, `regions`, `claiming` and
`draining` never change their meaning. A process that states none is one from before there were versions: 1.0.

How a version grows. A new minor version may add fields to requests and answers, and calls. What a process does not
know of an answer, or of a request, it leaves out. A field that a daemon must not leave out, as it would give another
answer, is named in the request's `needs`: a daemon that does not know it refuses the call. A call that a daemon does
not know is refused too. Everything else is a new major version: a field that goes, changes its meaning, or must be
there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib.metadata import version
from typing import Any, NoReturn, TypeVar

from memwal.ingest.errors import PROTOCOL, Invalid

T = TypeVar("T")
_VERSION = re.compile(r"([0-9]{1,6})\.([0-9]{1,6})")


@dataclass(frozen=True, slots=True, order=True)
class Version:
    """A version of the protocol."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"

    def talks_to(self, other: Version) -> bool:
        """Whether processes of both versions can call each other."""
        return self.major == other.major and abs(self.minor - other.minor) <= 1


UNSTATED = Version(1, 0)
"""The version of processes that state none."""
OURS = Version(1, 1)
"""The version of this process. 1.1: versions are stated, and a daemon tells what is paused."""


def stated(told: object) -> Version:
    """Return the version in a message; `told`: None if it states none. Raises: Invalid if it is none."""
    if told is None:
        return UNSTATED
    found = _VERSION.fullmatch(told) if isinstance(told, str) else None
    if found is None:
        text = f"protocol = {told!r:.40}: not a version of memwal's protocol, such as {OURS}"
        raise Invalid(text, {"reason": PROTOCOL})
    return Version(int(found[1]), int(found[2]))


@cache
def build() -> Mapping[str, str]:
    """Return the versions of this process: `memwal`, `protocol`, and `storage`, the newest that it reads and writes."""
    from memwal.flush.base.setup import STORAGE  # which loads Lance

    return {"memwal": version("memwal"), "protocol": str(OURS), "storage": str(STORAGE)}


def refusal_of_daemon(answer: Mapping[str, Any], endpoint: str) -> Invalid | None:
    """Return why this process does not call the daemon that gave `answer`; None if it does. The details have the table
    that it serves, since ports are reused. A version that cannot be read is one that we do not talk to.
    """
    refusal: Invalid | None
    try:
        refusal = _refusal(stated(answer.get("protocol")), f"the daemon at {endpoint}", "this process")
    except Invalid as error:
        refusal = Invalid(f"the daemon at {endpoint} answers {error.message}", error.details)
    if refusal is not None:
        refusal.details.update(table=answer.get("table"), id=answer.get("id"))
    return refusal


def expect_caller(told: object) -> None:
    """Raises: Invalid if a call that states `told` is out of this daemon's range."""
    refusal = _refusal(stated(told), "the caller", "this daemon")
    if refusal is not None:
        raise refusal


def expect_known(what: str, told: object) -> NoReturn:
    """Raise Invalid for `what`, which a call that states `told` asks for and this daemon does not know."""
    caller = stated(told)
    newer = f": it speaks protocol {OURS} and the caller {caller}; upgrade the daemon first" if caller > OURS else ""
    raise Invalid(f"the daemon does not know {what}{newer}", {"reason": PROTOCOL} if newer else None)


def known(kind: type[T], told: Mapping[str, Any]) -> T:
    """Return a dataclass of the fields in `told` that it has; others are of a newer version."""
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in told.items() if name in names})


def _refusal(theirs: Version, them: str, us: str) -> Invalid | None:
    if OURS.talks_to(theirs):
        return None
    behind = them if theirs < OURS else us
    text = f"{them} speaks protocol {theirs}, and {us} {OURS}, which talks to {_range(OURS)}: upgrade {behind} first"
    return Invalid(text, {"reason": PROTOCOL, "ours": str(OURS), "theirs": str(theirs)})


def _range(version: Version) -> str:
    lowest = max(0, version.minor - 1)
    return f"{version.major}.{lowest} to {version.major}.{version.minor + 1}"
