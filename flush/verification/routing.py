"""Check the decision of a resize that the base table has not switched to yet.

A version of the routing is decided when every region of the previous version and of this one is sealed, and only
opening a region by this version ends its seal (`flush.resizing.steps`, invariants 1 and 2). A region of an older
version that takes writes was therefore never sealed for the decision. After the switch, `check_list` finds these
regions.
"""

from __future__ import annotations

from collections.abc import Iterator

from memwal.flush.resizing.routing import decided, never_sealed, parse_routing_key, routing_key, routing_prefix
from memwal.flush.verification.finding import Finding, View
from memwal.wal import Corrupt


def check_routing(view: View) -> Iterator[Finding]:
    """Check the newest decision on the routing, if it is not carried out yet."""
    versions = (parse_routing_key(key) for key in view.store.list(routing_prefix()))
    newest = max((version for version in versions if version is not None), default=0)
    if newest <= view.base.routing_version:
        return
    where = routing_key(newest)
    try:
        decision = decided(view.store, newest)
    except Corrupt as error:
        what = str(error).removeprefix(f"{where}: ").partition(";")[0]
        yield Finding("routing", where, what, "restore it from a backup")
        return
    older = [] if decision is None else never_sealed(view.base, decision, view.manifests.values())
    if older:
        what = (
            f"routing version {newest} is decided, but {len(older)} regions take writes by an older one, such as "
            f"{older[0].region_id} by version {older[0].spec_id}"
        )
        unused = all(each.spec_id < newest for each in view.manifests.values())
        yield Finding("routing", where, what, "delete this object" if unused else "restore the table from a backup")
