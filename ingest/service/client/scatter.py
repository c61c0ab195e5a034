"""Split the rows of one call by bucket, and merge the answers of several daemons. Pure functions.

Each daemon owns its own regions, so the rows of several answers are disjoint.

No daemon may write its part before all parts are valid. A single daemon checks all rows (`table.writes`). Each
of several daemons sees only its own part, so the client checks all rows, without storage, before it sends any.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from memwal.flush import WriteRules
from memwal.flush.base.sharding import Routing
from memwal.ingest.engine.api.missing import keeps
from memwal.ingest.engine.api.ordering import first_rows
from memwal.ingest.engine.api.reads import ReadKind
from memwal.ingest.engine.api.results import RowStream, gathered
from memwal.ingest.engine.api.rows import RowChecker, first_of_each_key
from memwal.ingest.engine.table.pauses import merged as merged_pauses
from memwal.ingest.errors import BUSY, Unavailable
from memwal.ingest.protocol import known
from memwal.memtable import TOMBSTONE, IndexSpec, MemTable, row_schema

_ROW, _AT = "_memwal_row", "_memwal_at"


def merged(
    kind: ReadKind, answers: Sequence[Any], request: dict[str, Any], key: Sequence[str], *, whole: bool = False
) -> pa.Table | RowStream:
    """Merge the answers of several owners to one read.

    `key`: the key columns; `with_key` adds them to the request. `whole`: read streams to their end, beyond a limit
    too, because the explanations follow the last rows. Raises: Unavailable if columns changed in between.
    """
    parts = _alike(answers)
    if kind.streams and (order := request.get("order_by")):
        rows = pa.concat_tables([part.read_all() for part in parts])
        return gathered(rows.take(first_rows(rows, order, request["limit"])))
    if kind.streams:
        return one_after_another(parts, request["limit"], whole=whole)
    assert kind.merge is not None
    rows = kind.merge(parts, request, key)
    columns = request.get("columns")
    return rows if columns is None else rows.drop_columns([name for name in key if name not in columns])


def with_key(kind: ReadKind, request: dict[str, Any], key: Sequence[str]) -> dict[str, Any]:
    """Return a request for scored rows with the key among its columns, as `merged` needs; other requests unchanged."""
    columns = request.get("columns")
    if columns is None or kind.merge is None:
        return request
    return {**request, "columns": [*dict.fromkeys([*columns, *key])]}


def one_after_another(answers: Sequence[RowStream], limit: int | None, *, whole: bool) -> RowStream:
    """Return the rows of all streams, at most `limit`.

    All owners captured their snapshots before. A stream that waits for its turn holds as many rows in transit as gRPC
    buffers.
    """

    def cancel() -> None:
        for answer in answers:
            answer.close()

    def batches(left: int | None) -> Iterator[pa.RecordBatch]:
        try:
            for batch in chain.from_iterable(answers):
                part = batch if left is None else batch.slice(0, left)
                left = None if left is None else left - part.num_rows
                if part.num_rows:
                    yield part
                if left == 0 and not whole:
                    return
        finally:
            cancel()

    return RowStream(answers[0].schema, batches(limit), cancel)


def _alike(answers: Sequence[Any]) -> Sequence[Any]:
    if any(answer.schema != answers[0].schema for answer in answers):
        raise Unavailable("somebody changed the table's columns while it was read; read again", {"reason": BUSY})
    return answers


def merged_status(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge the statuses of several daemons: the higher epoch of a region, the newest base table."""
    newest = max(found, key=lambda status: int(status["base_version"]))
    regions: dict[str, Any] = {}
    for region in (region for status in found for region in status["regions"]):
        known = regions.get(region["id"])
        if known is None or known["epoch"] < region["epoch"]:
            regions[region["id"]] = region
    merged = newest | {"regions": sorted(regions.values(), key=lambda region: int(region["bucket"]))}
    failures = [failure for status in found for failure in status.get("commit_failures", ())]
    if failures:
        merged["commit_failures"] = [each for at, each in enumerate(failures) if each not in failures[:at]]
    refused = Counter[str]()
    for status in found:
        refused.update(status.get("refused_puts", {}))
    merged |= {"refused_puts": dict(refused)} if refused else {}
    for name, newest_first in (("commits", False), ("events", True)):
        together = [each for status in found for each in status.get(name, ())]
        if together:
            merged[name] = sorted(together, key=lambda each: float(each["time"]), reverse=newest_first)
    if measured := [status["storage"] for status in found if status.get("storage")]:
        merged["storage"] = max(measured, key=lambda storage: float(storage["time"]))
    pauses = [status["paused"] for status in found if "paused" in status]
    versions = {owner: told for status in found for owner, told in status.get("versions", {}).items()}
    merged |= {"versions": versions} if versions else {}
    return merged | ({"paused": merged_pauses(pauses)} if pauses else {})


def in_asked_order(found: Sequence[pa.Table], asked: pa.Table) -> pa.Table:
    """Return the rows that several owners found for the keys `asked`, in the order of each key's first occurrence.

    `found`: at least one table, each with all key columns. Raises: errors of `merged`.
    """
    rows = pa.concat_tables(_alike(found))
    if len(found) == 1 or not rows.num_rows:
        return rows
    key = asked.column_names
    numbered = asked.append_column(_ROW, pa.array(np.arange(asked.num_rows)))
    first = numbered.group_by(key).aggregate([(_ROW, "min")])
    at = pa.array(np.arange(rows.num_rows))
    # Join keys only, because Arrow cannot join rows with list columns such as vectors. Copy them, because buffers
    # from the network are unaligned and Arrow would print a warning on the user's terminal.
    keys = rows.select(key).take(at).cast(asked.schema).append_column(_AT, at)
    joined = keys.join(first, key, join_type="inner")
    order = pc.sort_indices(joined.column(f"{_ROW}_min"))
    return rows.take(joined.column(_AT).take(order))


class Splitter:
    """Checks and routes rows of one table. Thread safety. Any thread; immutable."""

    def __init__(self, schema: pa.Schema, key: Sequence[str], described: Mapping[str, Any]) -> None:
        """Prepare from a daemon's description of the table (`daemon.service`, operation "schema")."""
        self.routing: int = described["routing_version"]
        """Version of the routing to these buckets."""
        self.regions: tuple[str, ...] = tuple(described["ids"])
        """The region of bucket n, at index n."""
        self._key = tuple(key)
        self._keeps, self._on_duplicate = keeps(key, described["upsert"]), described["on_duplicate"]
        indexes = [known(IndexSpec, each) for each in described["indexes"]]
        rules = WriteRules(described["upsert"], described["on_duplicate"], described["version"])
        memtable = MemTable(row_schema(schema, key), key, indexes, generation=0)
        self._checker = RowChecker(memtable, described["required"], rules)
        self._bucket = Routing.parse(described["routing"]).hash(schema)

    def checked(self, rows: pa.Table) -> pa.Table:
        """Return the rows of a put in the table's columns, with equal keys resolved by the table's rule.

        Columns that the rows lack are left out, unless the table can only set them to null.
        Raises: InvalidRows or Invalid, naming column and row.
        """
        whole, given = self._checker.check(rows), set(rows.column_names)
        left_out = [name for name in whole.column_names if self._keeps and name not in given]
        conformed = whole.drop_columns([*{TOMBSTONE, *left_out}])
        if self._on_duplicate == "last":
            return conformed
        once = first_of_each_key(conformed, self._key, refuse=self._on_duplicate == "fail")
        return conformed if once.all() else conformed.filter(pa.array(once))

    def checked_keys(self, keys: pa.Table, *, and_values: bool = False) -> pa.Table:
        """Check the keys of a delete, or (`and_values`) those beside the values of an update, and return all columns.

        Raises: InvalidRows or Invalid.
        """
        self._checker.check_keys(keys.select(self._key) if and_values else keys)
        return keys

    def buckets(self, rows: pa.Table) -> npt.NDArray[np.int32]:
        """Return the bucket of every row of `rows`, which are whole rows or keys."""
        return self._bucket(rows)
