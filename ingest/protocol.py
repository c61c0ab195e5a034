"""The version of the calls between memwal processes: compatibility, and rules for changes.

A version is MAJOR.MINOR. Two processes can call each other if their major versions are equal and their minor versions
differ by at most one, so the daemons of a table can be upgraded one after another. The version is stated

- in the answers to "schema" and "regions", the first calls on every connection of a client and in every check of a
  peer;
- in every request, as `protocol`.

A call outside the range is rejected with one line that names the process to upgrade. "schema" and "regions" are never
rejected, so that both sides can report the mismatch; their fields `protocol`, `table`, `id`, `endpoint`, `endpoints`,
`regions`, `claiming` and `draining` never change their meaning. Their requests name them as `act`, because version 1
does; version 1 also sends them as a DoAction. A process that states no version has version 1.0.

A new minor version may add calls, and fields of requests and answers. A process ignores fields that it does not know.
If a daemon must not ignore a field because its answer would differ, the request names the field in `needs`, and a
daemon that does not know it rejects the call. A daemon also rejects calls that it does not know. Every other change
needs a new major version: removing a field, changing its meaning, or making it required.
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
        """Return whether processes of both versions can call each other."""
        return self.major == other.major and abs(self.minor - other.minor) <= 1


UNSTATED = Version(1, 0)
"""The version of processes that state none."""
OURS = Version(2, 0)
"""The version of this process. 1.1 added the stated version, and pauses in a daemon's answers; 2.0 has one kind of
call, DoExchange."""
ASK_WHO = ("schema", "regions")
"""Operations that identify the daemon's table: answered for every version, and their requests name no table."""


def stated(told: object) -> Version:
    """Return the version that a message states; `told` None means `UNSTATED`. Raises: Invalid for a malformed
    version."""
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
    from memwal.flush.base.setup import STORAGE  # loads Lance

    return {"memwal": version("memwal"), "protocol": str(OURS), "storage": str(STORAGE)}


def refusal_of_daemon(answer: Mapping[str, Any], endpoint: str) -> Invalid | None:
    """Return why this process cannot call the daemon that gave `answer`; None if it can.

    The details name the daemon's table, because ports are reused. A malformed version counts as incompatible.
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
    """Check the version of a caller. Raises: Invalid if `told` is out of this daemon's range."""
    refusal = _refusal(stated(told), "the caller", "this daemon")
    if refusal is not None:
        raise refusal


def expect_known(what: str, told: object) -> NoReturn:
    """Raise Invalid for `what`, requested by a call that states `told` and unknown to this daemon."""
    caller = stated(told)
    newer = f": it speaks protocol {OURS} and the caller {caller}; upgrade the daemon first" if caller > OURS else ""
    raise Invalid(f"the daemon does not know {what}{newer}", {"reason": PROTOCOL} if newer else None)


def known(kind: type[T], told: Mapping[str, Any]) -> T:
    """Return a dataclass from the fields in `told` that it has. Other fields come from a newer version."""
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in told.items() if name in names})


def _refusal(theirs: Version, them: str, us: str) -> Invalid | None:
    if OURS.talks_to(theirs):
        return None
    behind = them if theirs < OURS else us
    talks_to = f"{OURS.major}.{max(0, OURS.minor - 1)} to {OURS.major}.{OURS.minor + 1}"
    text = f"{them} speaks protocol {theirs}, and {us} {OURS}, which talks to {talks_to}: upgrade {behind} first"
    return Invalid(text, {"reason": PROTOCOL, "ours": str(OURS), "theirs": str(theirs)})
