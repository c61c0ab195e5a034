"""A base table that was put back to an older version, after SSTs that this one does not hold were pruned.

Lance's `restore` makes an old version the newest. Its rows are those of then, and so is what it says of committed
generations: SSTs above that are read and committed again as long as they are listed. Those that were pruned are not. A
commit of what follows would leave them out for ever, without a word, so it is refused until the table is put forward to
a version that has them. Reads, puts and flushes go on.
"""

from __future__ import annotations

from uuid import UUID

from flush.base_table import BaseTable
from flush.commit_plan import Gap
from flush.table_manifest import compacted_generations, manifest_version
from wal import Corrupt, ObjectStore


def explained(gap: Gap, store: ObjectStore, base: BaseTable) -> Corrupt:
    """The error to raise for `gap`: with the version to restore where one has what is missing, else `gap` itself."""
    found = _newest_with(store, gap.region, gap.listed - 1)
    if found is None:
        return gap
    done = base.committed.get(gap.region, 0)
    return Corrupt(
        f"{base.uri}: the base table was put back to an older version, which lacks the generations {done + 1} to "
        f"{gap.listed - 1} of region {gap.region}; restore version {found} of the base table, which has them: nothing "
        "is committed before"
    )


def _newest_with(store: ObjectStore, region: UUID, generation: int) -> int | None:
    """The newest version that holds everything of `region` up to `generation`; None where no version does."""
    versions = (manifest_version(each) for each in store.list("_versions/"))
    for version in sorted((each for each in versions if each is not None), reverse=True):
        try:
            committed = compacted_generations(store, version)
        except Corrupt:  # cleaned up in this moment
            continue
        if committed.get(region, 0) >= generation:
            return version
    return None
