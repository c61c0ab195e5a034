"""Deaths at a chosen place: some lives end at a call within a part of the protocols that runs rarely.

Random faults kill a process where it makes most of its calls. A fate names a part, and how many calls within it the
process survives. Functions further up the stack count too, so that a resize is killed while its seal claims a region.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

from tests.simulation.coverage import Coverage, parts_here
from tests.simulation.scheduler import Fate, Host

OF_DAEMONS = (
    "claim", "sentinel", "replay", "settle", "read ahead", "hand over", "owner's note", "append", "ownership proof",
    "lease proof", "owner's look", "write SST", "publish", "commit", "plan", "foreign writes", "deletes pass",
    "upserts pass", "append pass", "index catch-up", "compact", "prune", "collect entries", "collect SSTs",
    "collect manifests", "collect plans", "collect orphans", "look for a resize", "pause", "open", "switch",
)  # fmt: skip
_OF_COMMITTERS = ("commit", "plan", "foreign writes", "deletes pass", "upserts pass", "append pass", "prune", "open")
OF_VISITORS: Mapping[str, tuple[str, ...]] = {
    "committer": _OF_COMMITTERS,
    "collector": ("collect entries", "collect SSTs", "collect manifests"),
    "loader": ("load",),
    "follower": ("change feed", "open"),
    "operator": ("pause",),
    "resizer": ("seal", "drain", "decide", "switch", "claim", "sentinel", "write SST", "publish", *_OF_COMMITTERS),
    "upkeep": ("compact", "merge index segments", "clean up versions"),
    "expirer": ("expire",),
}
"""For each kind of visitor, the parts that it runs with calls of its own."""
_SURVIVED = (0, 0, 1, 1, 2, 3, 5, 8, 13)
_WHEN = ("kill before", "kill after")


def drawn(chance: random.Random, parts: tuple[str, ...], share: float) -> Fate | None:
    """Draw the fate of a life; `share` of the lives have one, the others None."""
    if not parts or chance.random() >= share:
        return None
    return Fate(chance.choice(parts), chance.choice(_SURVIVED), chance.choice(_WHEN))


def strikes(host: Host, coverage: Coverage) -> str:
    """Return the fault that kills the process at its present call; "" if it survives."""
    fate = host.fate
    if fate is None or fate.part not in (parts := parts_here()):
        return ""
    if fate.survives:
        fate.survives -= 1
        return ""
    host.fate = None
    if parts[0] != fate.part:
        coverage.cells[f"{fate.part}: within other parts", fate.when] += 1
    return fate.when
