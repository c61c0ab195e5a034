"""Check the base table's newest version, and the decision of a resize that it has not switched to yet.

    check_files    every data and deletion file of the version exists, with the recorded size; so do the files of every
                   index, by their total size
    check_fit      no column type and no file format that cannot hold puts and deletes
    check_indexes  the B-tree and full-text indexes of the set-up exist, and each index is on its column
    check_marker   every committed generation is of an existing region, and was published, or is that of a load
    check_routing  no region takes writes by an older version of the routing than the one decided last
    check_returned   (deep) no deleted row is live again in a retained version
    check_index_rows (deep) every file of an index can be read
    check_base_rows  (deep) every column of every row can be read; as many rows as recorded; each key once and never
                   null, if the table has a key

A vector index may be missing: the first commit with enough rows builds it. For a segment without rows Lance may have
written no file (`has_files`).

A version of the routing is decided when every region of the previous version and of this one is sealed, and only
opening a region by this version ends its seal (`flush.resizing.steps`, invariants 1 and 2). A region of an older
version that takes writes was therefore never sealed for the decision. After the switch, `check_list` finds these
regions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from memwal.flush.base.adoptable import unfit_reason
from memwal.flush.base.existing_indexes import has_files, own_segments
from memwal.flush.base.state import TableState, read_state, versions
from memwal.flush.commits.load_notes import ended_id, is_ended, is_load
from memwal.flush.resizing.routing import decided, never_sealed, parse_routing_key, routing_key, routing_prefix
from memwal.flush.verification.finding import Finding, Unreadable, View, reading
from memwal.flush.verification.sst import check_keys
from memwal.wal import Corrupt, RegionStatus
from memwal.wal.layout import region_prefix

_RESTORE = "restore it from a backup, or the table with `LanceDataset.restore` of an older version"
_DATA, _DELETIONS, _INDEXES = "data/", "_deletions/", "_indices/"


def check_files(view: View) -> Iterator[Finding]:
    """Check the data and deletion files of the version, and the files of its indexes."""
    sizes = {info.key: info.size for prefix in (_DATA, _DELETIONS) for info in view.store.describe(prefix)}
    for fragment in view.state.fragments.values():
        wanted = dict(fragment.files)
        if fragment.deletion_file is not None:
            wanted[fragment.deletion_file] = 0
        for key, recorded in wanted.items():
            size = sizes.get(key)
            if size is None:
                yield Finding("base file", key, f"it is missing; {fragment.live:,} rows need it", _RESTORE)
            elif recorded and size != recorded:
                yield Finding("base file", key, f"it has {size:,} bytes, {recorded:,} are recorded", _RESTORE)
    yield from _index_files(view)


def _index_files(view: View) -> Iterator[Finding]:
    """Check the directory of every index segment by the total size of its files: Lance records only that."""
    sizes: Counter[str] = Counter()
    for info in view.store.describe(_INDEXES):
        sizes[info.key.removeprefix(_INDEXES).partition("/")[0]] += info.size
    for index, segment in own_segments(view.base.dataset):
        name, what = str(segment.uuid), ""
        if has_files(segment) and name not in sizes:
            what = f"it is missing; index {index.name} needs it"
        elif segment.size_bytes and name in sizes and sizes[name] != segment.size_bytes:
            what = f"its files have {sizes[name]:,} bytes, {segment.size_bytes:,} are recorded; index {index.name}"
        if what:
            yield Finding("base file", f"{_INDEXES}{name}", what, _rebuild(index))


def _rebuild(index: Any) -> str:
    return f"drop the index {index.name}, and commit: that rebuilds it"


def check_index_rows(view: View) -> Iterator[Finding]:
    """Read every file of every index from its first row to its last; the values of the rows are not checked."""
    for index, segment in own_segments(view.base.dataset):
        for info in view.store.describe(f"{_INDEXES}{segment.uuid}/"):
            try:
                with reading():
                    for _ in view.file(info.key).read_all().to_batches():
                        pass
            except Unreadable as error:
                what = f"Lance cannot read it: {error}; index {index.name} needs it"
                yield Finding("base file", info.key, what, _rebuild(index))


def check_fit(view: View) -> Iterator[Finding]:
    """Check for columns and formats that `memwal init` rejects; old or later changed tables may have them."""
    if (reason := unfit_reason(view.base.dataset)) is not None and not view.base.unsupported:
        what, _, remedy = reason.rpartition(": ")
        yield Finding("columns", "columns (base table)", what, remedy)
    for name, reason in view.base.unsupported.items():
        what, _, remedy = reason.rpartition(": ")
        drop = f"{remedy}, or drop it with LanceDataset.drop_columns([{name!r}]); puts are rejected until then"
        yield Finding("columns", f"column {name} (base table)", what, drop)


def check_indexes(view: View) -> Iterator[Finding]:
    """Check the indexes that the table was set up with."""
    built = {index.name: index for index in view.base.dataset.describe_indices()}
    for spec in view.base.indexes:
        index = built.get(spec.name)
        where = f"index {spec.name}"
        if index is None and spec.kind != "ivf_pq":
            yield Finding("index", where, f"it is missing on column {spec.column}", "commit: that builds it")
        elif index is not None and list(index.field_names) != [spec.column]:
            what = f"it is on {', '.join(index.field_names)}, not on {spec.column}"
            yield Finding("index", where, what, "drop it, and commit: that rebuilds it")


def check_marker(view: View) -> Iterator[Finding]:
    """Check that every committed generation belongs to an existing region or a load.

    check_list checks that it was published.
    """
    loads = {ended_id(id): done for id, done in view.base.committed.items() if is_load(id) and not is_ended(id)}
    for region, generation in view.base.committed.items():
        if is_load(region):
            if is_ended(region) and loads.get(region, 0) < generation:
                what = f"attempt {generation} at a load was ended, above all that are committed"
                yield Finding("marker", f"load {region}", what, "find the program that committed it")
            continue
        if region not in view.regions:
            what = f"its generation {generation} is committed, but the region has no object on storage"
            yield Finding("marker", region_prefix(region), what, "restore the region's manifests from a backup")
        # A resize leaves regions sealed that the table no longer uses.
        elif region not in view.base.regions and (
            region not in view.manifests or view.manifests[region].status is not RegionStatus.SEALED
        ):
            what = f"its generation {generation} is committed, but it is no region of the table"
            yield Finding("marker", region_prefix(region), what, "find the program that committed it")


def check_base_rows(view: View) -> Iterator[Finding]:
    """Read every row of the version, then the columns that memwal cannot hold, one by one."""
    total, keys, read = view.state.rows, [], 0
    where = f"{_DATA} (base table)"  # without the version: the check may be repeated on a newer one
    try:
        with reading():
            for batch in view.base.dataset.scanner(columns=view.base.schema.names).to_batches():
                batch.validate(full=True)
                if view.base.key:
                    keys.append(pa.Table.from_batches([batch]).select(list(view.base.key)))
                read += batch.num_rows
    except Unreadable as error:
        what = f"rows of version {view.base.version} cannot be read: {error}"
        yield Finding("base rows", where, what, _RESTORE)
        return
    if read != total:
        yield Finding(
            "base rows", where, f"version {view.base.version} holds {read:,} rows, {total:,} are recorded", _RESTORE
        )
    if keys:
        remedy = "remove the extra rows, and append through memwal only"
        yield from check_keys(where, pa.concat_tables(keys), remedy)
    for name in view.base.unsupported:
        try:
            with reading():
                for batch in view.base.dataset.scanner(columns=[name]).to_batches():
                    batch.validate(full=True)
        except Unreadable as error:
            drop = f"drop the column with LanceDataset.drop_columns([{name!r}])"
            yield Finding("base rows", f"{_DATA} (column {name})", f"Lance cannot read its values: {error}", drop)


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


_NEWEST = 1000
_ON_PURPOSE = ("restore", "overwrite")
_OPEN_AGAIN = (
    "another program cleaned up versions, and one wrote from a handle that is older: have it open the table again "
    "before it writes, clean up less often, and delete these rows or restore the version before"
)


def check_returned(view: View) -> Iterator[Finding]:
    """Check the retained versions for live rows that the previous version had deleted. Reads their manifests.

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
    before: TableState | None = None
    for version in versions(view.store)[-_NEWEST:]:
        try:
            state = read_state(view.store, version)
        except Corrupt:  # cleaned up meanwhile
            continue
        if before is not None and before.version + 1 == version and (returned := _returned(view, before, state)):
            what = f"{returned:,} rows that version {before.version} had deleted are live again"
            yield Finding("returned rows", f"version {version} of the base table", what, _OPEN_AGAIN)
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
