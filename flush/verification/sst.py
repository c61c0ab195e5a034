"""Check published SSTs: the directory is complete, and with `deep` its parts agree.

    check_list    the region is the table's; every generation above the committed one is listed, up to the current one
    check_parts   data, bloom filter, key sidecar and indexes exist, with the recorded sizes and row counts
    check_rows    every row is read: each key once, never null, in its own region; the sidecar is the keys sorted, with
                  the offset of each; the bloom filter passes every key; min and max of each sidecar page are right

An SST of a table without a key has neither filter nor sidecar, and only the region of its rows is checked. `check_rows`
requires an SST whose parts are complete. SSTs of Lance's own writer also hold superseded rows, behind a deletion
vector; their sidecar and bloom filter include those.
"""

from __future__ import annotations

from collections.abc import Iterator
from uuid import UUID

import lance
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from memwal.flush.base.existing_indexes import has_files
from memwal.flush.base.shape import column_ids
from memwal.flush.commits.plan import restored_generations
from memwal.flush.history.diff import repeated
from memwal.flush.sst.bloom import BLOOM_NAME, contains
from memwal.flush.sst.key_encoding import one_array, sort_form
from memwal.flush.sst.key_sidecar import PAGE_ROWS, SIDECAR_DIR
from memwal.flush.verification.finding import Finding, Unreadable, View, missing_text, reading, spans
from memwal.memtable.arrays import Mask
from memwal.wal import RegionStatus, SsTable
from memwal.wal.codec.columns import field_ids, sources
from memwal.wal.layout import manifest_prefix, sst_key

_RESTORE = "restore the directory from a backup"
_DATA, _LOOKUP = f"{SIDECAR_DIR}/page_data.lance", f"{SIDECAR_DIR}/page_lookup.lance"
_ROW_ID = "_rowid"


def check_list(view: View, region: UUID) -> Iterator[Finding]:
    """Check which SSTs a region lists."""
    manifest, done = view.manifests[region], view.base.committed.get(region, 0)
    current = manifest.current_generation
    where = manifest_prefix(region)
    if region not in view.base.regions and manifest.status is not RegionStatus.SEALED:
        what = f"none of the table's {view.base.buckets} regions has this id, so no key belongs here"
        yield Finding("region", where, what, "stop the program that claimed it, and move its directory away")
    elif manifest.status is not RegionStatus.SEALED and manifest.spec_id != view.base.routing_version:
        what = f"it is open for routing version {manifest.spec_id}, the table has version {view.base.routing_version}"
        yield Finding("routing", where, what, "run `memwal regions resize` with the number of regions that it had last")
    wanted = range(done + 1, current)
    missing = sorted(set(wanted) - {sst.generation for sst in manifest.ssts})
    if missing:
        restored = restored_generations(view.store, view.base.version).get(region, 0)
        missing = [generation for generation in missing if generation > restored]
    for first, last in spans(missing):
        gap = missing_text("generation", first, last)
        what = f"version {manifest.version}: {gap}, above the committed {done}: rows are lost"
        yield Finding("generations", where, what, "restore the manifest from a backup")
    if done >= current:
        what = f"generation {done} is committed, but the current one of version {manifest.version} is {current}"
        yield Finding("marker", where, what, "restore the region's manifests from a backup")


def check_parts(view: View, region: UUID, sst: SsTable) -> Iterator[Finding]:
    """Check the files of one SST against the sizes and counts recorded for them."""
    place = f"{sst_key(region, sst.path)}/"
    sizes = {info.key.removeprefix(place): info.size for info in view.store.describe(place)}
    if not sizes:
        yield Finding("sst", place, f"generation {sst.generation} is listed, its directory is gone", _RESTORE)
        return
    if view.base.key:
        bloom = sizes.get(BLOOM_NAME)
        if not bloom or bloom % 32:
            what = "it is missing" if bloom is None else f"it has {bloom} bytes, no multiple of 32"
            yield Finding("bloom", place + BLOOM_NAME, what, _RESTORE)
    yield from _data_parts(view, region, sst, sizes)
    if view.base.key:
        yield from _sidecar_parts(view, place, sst, sizes)


def _data_parts(view: View, region: UUID, sst: SsTable, sizes: dict[str, int]) -> Iterator[Finding]:
    place = f"{sst_key(region, sst.path)}/"
    try:
        with reading():
            dataset = _dataset(view, region, sst)
            fragments, indexes = dataset.get_fragments(), dataset.describe_indices()
            files = [file for fragment in fragments for file in fragment.data_files()]
            rows = sum(fragment.physical_rows for fragment in fragments)
    except Unreadable as error:
        yield Finding("sst", f"{place}_versions", f"Lance cannot open it: {error}", _RESTORE)
        return
    for file in files:
        size, recorded = sizes.get(f"data/{file.path}"), file.file_size_bytes
        if size is None or (recorded and size != recorded):
            what = "it is missing" if size is None else f"it has {size:,} bytes, {recorded:,} are recorded"
            yield Finding("data", f"{place}data/{file.path}", what, _RESTORE)
    for index in indexes:
        for segment in index.segments:
            parts = [size for name, size in sizes.items() if name.startswith(f"_indices/{segment.uuid}/")]
            if not has_files(segment):
                continue
            if not parts or (segment.size_bytes and sum(parts) != segment.size_bytes):
                what = f"it has {sum(parts):,} bytes, {segment.size_bytes:,} are recorded" if parts else "it is missing"
                what += f"; index {index.name} needs it"
                yield Finding("sst index", f"{place}_indices/{segment.uuid}", what, _RESTORE)
    if sst.physical_rows not in (None, rows) or len(fragments) != 1:
        wanted = rows if sst.physical_rows is None else sst.physical_rows
        what = f"it has {rows:,} rows in {len(fragments)} fragments, the manifest says {wanted:,} in one"
        yield Finding("data", place, what, _RESTORE)


def _sidecar_parts(view: View, place: str, sst: SsTable, sizes: dict[str, int]) -> Iterator[Finding]:
    for name in (_DATA, _LOOKUP):
        if name not in sizes:
            yield Finding("sidecar", place + name, "it is missing: Lance's readers refuse the whole table", _RESTORE)
            continue
        try:
            with reading():
                rows = view.file(place + name).metadata().num_rows
        except Unreadable as error:
            yield Finding("sidecar", place + name, f"Lance cannot read it: {error}", _RESTORE)
            continue
        wanted = sst.physical_rows
        if wanted is not None and rows != (wanted if name == _DATA else -(-wanted // PAGE_ROWS)):
            yield Finding("sidecar", place + name, f"it has {rows:,} rows for {wanted:,} rows of the SST", _RESTORE)


# ---- deep ----------------------------------------------------------------------------------------------------------


def check_rows(view: View, region: UUID, sst: SsTable) -> Iterator[Finding]:
    """Check the parts of one SST row by row."""
    place = f"{sst_key(region, sst.path)}/"
    try:
        with reading():
            keys, mask = _physical_rows(view, region, sst)
    except Unreadable as error:
        yield Finding("data", f"{place}data", f"its rows cannot be read: {error}", _RESTORE)
        return
    live = keys.filter(pa.array(mask))
    if view.base.key:
        yield from check_keys(place, live, _RESTORE)
    yield from check_routes(view, region, place, live)
    if view.base.key:
        data = view.store.get(place + BLOOM_NAME)
        if data and len(data) % 32 == 0:  # check_parts reports others
            absent = np.flatnonzero(~contains(data, keys))
            if len(absent):
                example = _example(keys, int(absent[0]))
                what = f"it excludes {len(absent):,} of {keys.num_rows:,} keys, such as {example}"
                yield Finding("bloom", place + BLOOM_NAME, what, _RESTORE)
        yield from _sidecar_sorts(view, place, keys)


def check_keys(where: str, keys: pa.Table, remedy: str) -> Iterator[Finding]:
    """Check that each key occurs once and is never null. `keys`: only the key columns."""
    nulls = sum(column.null_count for column in keys.columns)
    if nulls:
        yield Finding("null key", where, f"{nulls:,} values of its key columns are null", remedy)
    again = repeated(keys)
    if len(again):
        what = f"{len(again):,} rows repeat a key, such as {_example(keys, int(again[0]))}"
        yield Finding("double key", where, what, remedy)


def check_routes(view: View, region: UUID, where: str, keys: pa.Table) -> Iterator[Finding]:
    """Check that every row belongs to this region. `keys`: the columns that route rows."""
    base = view.base
    if region not in base.regions:
        return  # check_list reports it
    if base.key and any(column.null_count for column in keys.columns):
        return  # check_keys reports it; a null has no region
    if not base.routing_is_stable:
        return  # a hashed column was dropped, so the region is unknown
    foreign = np.flatnonzero(view.base.route(keys) != list(view.base.regions).index(region))
    if len(foreign):
        example = _example(keys, int(foreign[0]))
        what = f"{len(foreign):,} of {keys.num_rows:,} rows belong to another region, such as {example}"
        remedy = "stop the program that wrote them; put those rows again, and delete these"
        yield Finding("route", where, what, remedy if base.key else "stop the program that wrote them")


def _sidecar_sorts(view: View, place: str, keys: pa.Table) -> Iterator[Finding]:
    try:
        with reading():
            data, lookup = (view.file(place + name).read_all().to_table() for name in (_DATA, _LOOKUP))
    except Unreadable as error:
        yield Finding("sidecar", place + SIDECAR_DIR, f"its rows cannot be read: {error}", _RESTORE)
        return
    values = sort_form(keys) if keys.num_columns > 1 else one_array(keys.column(0))
    order = pc.sort_indices(pa.table({"v": values}), [("v", "ascending")])  # stable, so equal keys keep their order
    if not _equal(data, "ids", order) or not _equal(data, "values", values.take(order)):
        what = "it is not the keys of the SST in ascending order, each with its row"
        yield Finding("sidecar", place + _DATA, what, _RESTORE)
        return
    first = np.arange(0, keys.num_rows, PAGE_ROWS)
    last = np.minimum(first + PAGE_ROWS, keys.num_rows) - 1
    wanted = {
        "min": values.take(order.take(pa.array(first))),
        "max": values.take(order.take(pa.array(last))),
        "page_idx": pa.array(np.arange(len(first))),
    }
    wrong = [name for name, column in wanted.items() if not _equal(lookup, name, column)]
    if wrong:
        yield Finding("sidecar", place + _LOOKUP, f"its {' and '.join(wrong)} do not match the pages", _RESTORE)


def _dataset(view: View, region: UUID, sst: SsTable) -> lance.LanceDataset:
    return lance.dataset(view.store.url(sst_key(region, sst.path)), storage_options=view.store.storage_options)


def _physical_rows(view: View, region: UUID, sst: SsTable) -> tuple[pa.Table, Mask]:
    """Return the keys of all physical rows (without a key: the hashed columns), and a mask of the live ones.

    Reads every column, so that a damaged page of any column fails here.
    """
    dataset, keys, live = _dataset(view, region, sst), [], []
    now = view.base.shape.rows
    in_sst = sources(now, field_ids(now), dataset.schema, column_ids(dataset))  # columns may have been renamed since
    names = [name for name in view.base.routed_by if name in in_sst]
    for batch in dataset.scanner(with_row_id=True, include_deleted_rows=True, scan_in_order=True).to_batches():
        batch.validate(full=True)
        rows = pa.Table.from_batches([batch])
        keys.append(rows.select([in_sst[name] for name in names]).rename_columns(names))
        live.append(rows.column(_ROW_ID).is_valid().to_numpy(zero_copy_only=False))
    empty = pa.schema([dataset.schema.field(in_sst[name]).with_name(name) for name in names]).empty_table()
    return pa.concat_tables(keys) if keys else empty, np.concatenate([np.zeros(0, dtype=bool), *live])


def _equal(table: pa.Table, name: str, wanted: pa.Array) -> bool:
    if name not in table.column_names or table.num_rows != len(wanted):
        return False
    return bool(one_array(table.column(name)).cast(wanted.type).equals(wanted))


def _example(keys: pa.Table, row: int) -> str:
    return ", ".join(
        f"{name} = {column[row].as_py()!r}" for name, column in zip(keys.column_names, keys.columns, strict=True)
    )
