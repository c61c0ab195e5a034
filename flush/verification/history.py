"""A check of the base table's retained versions: rows that were deleted, and live again.

Lance holds a write against the versions since the one that its handle has open, and against those only that are still
there. A handle from before a clean-up of versions writes as if what they deleted was not: its deletion vectors replace
newer ones, its compaction writes rows anew that were deleted. No version is refused, and the rows are back.

What shows it, between two versions that follow each other and are both there:

    a row of a fragment is live that was deleted before     deletion vectors only grow
    a compaction (rewrite) adds more rows than it takes away

Deletion vectors are compared where a version has another one than the version before, among the newest thousand. A
`restore` or an overwrite takes back what it is meant to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from memwal.flush.base.state import TableState, read_state, versions
from memwal.flush.verification.finding import Finding, View
from memwal.wal import Corrupt

_NEWEST = 1000
_MEANT = ("restore", "overwrite")
_REMEDY = (
    "a program wrote from a handle older than all versions kept: have it open the table again before it writes, raise "
    "gc.versions_age_min, and delete these rows or restore the version before"
)


def check_returned(view: View) -> Iterator[Finding]:
    """Rows that a version has and the one before had deleted. Reads the manifest of every version that is kept."""
    before: TableState | None = None
    for version in versions(view.store)[-_NEWEST:]:
        try:
            state = read_state(view.store, version)
        except Corrupt:  # cleaned up meanwhile
            continue
        if before is not None and before.version + 1 == version and (returned := _returned(view, before, state)):
            what = f"{returned:,} rows that version {before.version} had deleted are live again"
            yield Finding("returned rows", f"version {version} of the base table", what, _REMEDY)
        before = state


def _returned(view: View, before: TableState, state: TableState) -> int:
    """How many rows that were deleted in `before` are live in `state`, the next version."""
    operation = state.transaction.operation if state.transaction is not None else ""
    if operation in _MEANT:
        return 0
    kept = state.fragments.keys() & before.fragments.keys()
    changed = [
        each
        for each in sorted(kept)
        if before.fragments[each].deleted
        and before.fragments[each].deletion_file != state.fragments[each].deletion_file
    ]
    then, now = _live(view, before, changed), _live(view, state, changed)
    revived = 0 if then is None or now is None else len(np.setdiff1d(now, then))
    if operation == "rewrite":
        added = sum(each.live for number, each in state.fragments.items() if number not in kept)
        gone = sum(each.live for number, each in before.fragments.items() if number not in kept)
        revived += max(added - gone, 0)
    return revived


def _live(view: View, state: TableState, fragments: Sequence[int]) -> npt.NDArray[np.uint64] | None:
    """Addresses of the live rows of some fragments of a version; None where the version was cleaned up meanwhile."""
    if not fragments:
        return np.zeros(0, np.uint64)
    try:
        dataset = view.base.dataset.checkout_version(state.version)
        wanted = [each for number in fragments if (each := dataset.get_fragment(number)) is not None]
        rows = dataset.scanner(columns=[], with_row_address=True, fragments=wanted).to_table()
    except (OSError, ValueError):
        return None
    addresses: npt.NDArray[np.uint64] = rows["_rowaddr"].to_numpy()
    return addresses
