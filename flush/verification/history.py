"""Check the base table's retained versions for deleted rows that are live again.

Lance checks a write against the versions since the one that its handle has open, but only those that still exist. A
handle from before another program's clean-up of versions writes as if their deletes had not happened: its deletion
vectors replace newer ones, its compaction rewrites deleted rows. Lance rejects no version, and the rows are back.
(memwal's own clean-up creates a barrier against this, see `flush.commits.maintenance`.)

Two neighbouring versions that both exist show it:

    a row of a fragment is live that was deleted before     deletion vectors only grow
    a compaction (rewrite) adds more rows than it takes away

Among the newest thousand versions, deletion vectors are compared if they differ between neighbouring versions. A
`restore` or an overwrite brings rows back on purpose.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from memwal.flush.base.state import TableState, read_state, versions
from memwal.flush.verification.finding import Finding, View
from memwal.wal import Corrupt

_NEWEST = 1000
_ON_PURPOSE = ("restore", "overwrite")
_REMEDY = (
    "another program cleaned up versions, and one wrote from a handle that is older: have it open the table again "
    "before it writes, clean up less often, and delete these rows or restore the version before"
)


def check_returned(view: View) -> Iterator[Finding]:
    """Check for live rows that the previous version had deleted. Reads the manifest of every kept version."""
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
    """Return how many rows that were deleted in `before` are live in `state`, the next version."""
    operation = state.transaction.operation if state.transaction is not None else ""
    if operation in _ON_PURPOSE:
        return 0
    kept = state.fragments.keys() & before.fragments.keys()
    changed = [
        number
        for number in sorted(kept)
        if before.fragments[number].deleted
        and before.fragments[number].deletion_file != state.fragments[number].deletion_file
    ]
    then, now = _live(view, before, changed), _live(view, state, changed)
    revived = 0 if then is None or now is None else len(np.setdiff1d(now, then))
    if operation == "rewrite":
        added = sum(fragment.live for number, fragment in state.fragments.items() if number not in kept)
        gone = sum(fragment.live for number, fragment in before.fragments.items() if number not in kept)
        revived += max(added - gone, 0)
    return revived


def _live(view: View, state: TableState, fragments: Sequence[int]) -> npt.NDArray[np.uint64] | None:
    """Return the addresses of the live rows in `fragments`; None if the version was cleaned up in the meantime."""
    if not fragments:
        return np.zeros(0, np.uint64)
    try:
        dataset = view.base.dataset.checkout_version(state.version)
        wanted = [one for number in fragments if (one := dataset.get_fragment(number)) is not None]
        rows = dataset.scanner(columns=[], with_row_address=True, fragments=wanted).to_table()
    except (OSError, ValueError):
        return None
    addresses: npt.NDArray[np.uint64] = rows["_rowaddr"].to_numpy()
    return addresses
