"""Read one version of the base table, each read as one Lance scan.

Measured on 4,000 packages (with 384-d vectors) and 336,776 flights, pylance 14.0.2, local disk, 2 cores:

* get: a filter `key IN (…)` costs 1.4 ms for one key and about 20 µs for each further one, with or without a B-tree on
  the key at this size; reading the key columns of the whole table costs 10 ms per 200,000 rows, and a take by offset 1
  ms + 20 µs per row. Few keys are therefore read by a filter, many (more than one per `ROWS_PER_KEY` rows) by a key
  scan.
* a composite key as `(a = 1 AND b = 2) OR …` takes 133 ms for 100 keys; `a IN (…) AND b IN (…)`, which may pass extra
  rows, plus an exact match of the key columns takes 52 ms.
* search with an index of 24 sub-vectors, 20 probes: 96.4 % of the ten nearest in 3.5 ms with `refine_factor` 5, 99.2 %
  in 4.4 ms with 10, 99.8 % in 4.4 ms with 20, 99.9 % in 5.7 ms with 40.
* search of 1,000,000 rows of 128 d with 16 sub-vectors: recall depends on the number of re-ranked candidates, whatever
  k. 200 candidates hold 99.1 to 99.6 % of the nearest 10, depending on the training, and 97.1 % of the nearest 50; 400
  hold at least 99.8 %, 99.7 %, and 99.4 % of the nearest 100. Each candidate costs 10 µs.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

import lance
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from lance.dataset import ColumnOrdering

from memwal.flush import BaseTable
from memwal.flush.base.ttl import Expiry
from memwal.ingest.caller import expect_room, hold
from memwal.ingest.engine.api.fusion import DISTANCE
from memwal.ingest.engine.api.ordering import Order, Places
from memwal.ingest.engine.read.base_match import BaseMatch
from memwal.ingest.engine.read.lance_scans import ROW_ID, awaited, filtered, gathered, taken
from memwal.ingest.engine.read.request import LARGE, VectorQuery, at_most
from memwal.memtable.converted_size import null_bytes
from memwal.memtable.errors import InvalidRows
from memwal.memtable.filter.expression import shown
from memwal.memtable.filter.predicate import evaluate, referenced
from memwal.memtable.filter.translation import translate
from memwal.memtable.text.columns import ColumnsQuery
from memwal.wal.errors import first_line

OF_A_CANDIDATE = 16
"""Bytes of a row's number and its score."""
ROWS_PER_KEY = 100
KEYS_PER_FILTER = 1000
INT64_MIN = -(2**63)
PROBES = 20
RERANKED, RERANKED_PER_ROW = 350, 4
"""Candidates re-ranked by exact distances: a constant number, plus a number for each wanted row."""
SMALL_ROWS = 1 << 16
"""Up to this number of rows, twice as many candidates are re-ranked, because the index may have been trained on few
rows (`flush.commits.maintenance`). For 9,400 clustered rows and an index trained on 6,900 of them, 200 candidates
hold 97.7 % of the nearest 10, 400 hold 99.1 %.
"""
LOWEST = float(np.finfo(np.float32).min)
"""The lowest distance that a search may return.

Lance sorts -inf, the dot distance of a vector with inf or huge numbers, before all others and then takes the first k,
so Lance itself must apply the bound. A search of 200,000 rows shows no cost. Lance leaves out NaN by itself, and +inf
sorts last (pylance 14.0.2: float16, float32, float64; l2, cosine, dot).
"""
AHEAD: dict[str, Any] = {"io_buffer_size": 32 << 20, "batch_readahead": 4, "fragment_readahead": 2}
"""Limits of Lance's read-ahead. With Lance's defaults the first batch of a table of 540 MB took 284 MB, with these 86
MB; reading the whole table took 0.4 s instead of 0.3 s (pylance 14.0.2, 2 cores).
"""
_OF_A_FILTER = "Error applying filter expression to batch"
"""Lance's error text for a filter that fails on a row."""


class BaseReads:
    """Read one version of the base table by key, by filter, by vector and by text.

    Thread safety. Any thread. Invariants. Every answer is from the version in `base` and contains no expired row.
    """

    def __init__(self, base: BaseTable, expiry: Expiry | None = None) -> None:
        """`expiry`: identifies the expired rows; None: rows do not expire."""
        self._base, self._expiry = base, expiry
        self._dataset: lance.LanceDataset = base.dataset
        self._key = list(base.key)

    def get(self, keys: pa.Table, columns: Sequence[str]) -> tuple[pa.Table, Places]:
        """Return the rows of `keys` (distinct, at least one) with `columns`, and the position of each row's key."""
        if self._many(keys.num_rows):
            return self._get_by_scan(keys, columns)
        chunks = [keys.slice(at, KEYS_PER_FILTER) for at in range(0, keys.num_rows, KEYS_PER_FILTER)]
        parts = [self._get_by_filter(chunk, columns) for chunk in chunks]
        positions = [at + n * KEYS_PER_FILTER for n, (_, at) in enumerate(parts)]
        return pa.concat_tables([rows for rows, _ in parts]), np.concatenate(positions)

    def held(self, keys: pa.Table, filter: str | None) -> int:
        """Return how many rows that pass `filter` have a key among `keys` (distinct)."""
        if not keys.num_rows:
            return 0
        if self._many(keys.num_rows):
            # Not counted: whether keys are looked up or read completely depends on what is not committed yet.
            present = gathered(self._dataset.scanner(columns=self._key, **self._filtered(filter)), counted=False)
            return len(match_keys(present, keys)[0])
        total, filter = 0, self._live(filter)
        for at in range(0, keys.num_rows, KEYS_PER_FILTER):
            chunk = keys.slice(at, KEYS_PER_FILTER)
            both = among(chunk) if filter is None else f"({among(chunk)}) AND ({filter}\n)"
            present = gathered(self._dataset.scanner(columns=self._key, **filtered(both)))
            total += len(match_keys(present, chunk)[0])
        return total

    def count(self, filter: str | None) -> int:
        """Return the number of rows that pass `filter`."""
        if (live := self._live(filter)) is None:
            return self.rows
        return self._counted(live)

    def batches(self, columns: Sequence[str], filter: str | None, limit: int | None) -> Iterator[pa.Table]:
        """Yield at most `limit` rows that pass `filter`, read as they are consumed."""
        scanner = self._dataset.scanner(columns=list(columns), limit=limit, **self._filtered(filter), **AHEAD)
        for batch in awaited(scanner):
            yield pa.Table.from_batches([batch])

    def ordered(self, order: Order, limit: int, filter: str | None, columns: Sequence[str]) -> pa.Table:
        """Return the first `limit` rows in `order` that pass `filter`, with `columns` and `_rowid`."""
        by: list[ColumnOrdering | str] = [ColumnOrdering(name, ascending=ascending) for name, ascending in order]
        # Lance fetches no other columns after a sort
        wanted = list(dict.fromkeys([*columns, *(name for name, _ in order)]))
        live, limit = self._filtered(filter), self._expected(limit, wanted)
        scanner = self._dataset.scanner(columns=wanted, **live, order_by=by, limit=limit, with_row_id=True)
        return gathered(scanner).select([*columns, ROW_ID])

    def rows_by_id(self, ids: pa.ChunkedArray, columns: Sequence[str]) -> pa.Table:
        """Return `columns` of the rows with these `_rowid`s, in their order."""
        return taken(self._dataset, ids.to_pylist(), columns)

    def search(self, query: VectorQuery, k: int, filter: str | None, columns: Sequence[str]) -> pa.Table:
        """Return the `k` rows nearest to `query` that pass `filter`, with `columns` and exact `_distance`, ascending.

        Returns fewer than `k` only if fewer rows pass: an exact scan follows when the index finds too few. Vectors that
        no index accepts (with NaN or inf) are not found and displace no other row.
        """
        k = self._expected(k, columns)
        rows = self._nearest(query, k, filter, columns, use_index=not query.exact)
        finite = int(np.count_nonzero(np.isfinite(rows.column(DISTANCE).to_numpy())))
        too_few = not query.exact and finite < min(k, self.rows)
        # Rows that the index does not cover are compared without a bound: -inf may have displaced other rows.
        if too_few and (finite < rows.num_rows or self._is_built(query.column)):
            rows = self._nearest(query, k, filter, columns, use_index=False)
        return picked_rows(rows, query.within(rows.column(DISTANCE).to_numpy()))

    def match(self, query: ColumnsQuery, k: int, filter: str | None, columns: Sequence[str]) -> pa.Table:
        """Return the `k` rows that match `query` best and pass `filter`, with `columns` and BM25 `_score`, descending.

        Rows that the index does not cover yet are searched too.
        """
        k = self._expected(k, columns)
        return BaseMatch(self._dataset, self._base.indexes, query, k, self._live(filter), columns).best()

    def check(self, filter: str) -> None:
        """Plan a scan with `filter`, in Lance and in DataFusion.

        Lance stops parsing at the first unknown token and accepts the part before it; DataFusion, which memtables use,
        parses to the end.
        Raises: ValueError or OSError from Lance if the filter does not parse or fit the schema; InvalidRows from
        DataFusion.
        """
        schema = self._base.schema
        self._dataset.scanner(columns=self._key or schema.names[:1], filter=filter).explain_plan()
        evaluate(filter, translate(filter, schema), schema.empty_table(), np.arange(0), 0)

    def raise_filter_error(self, filter: str) -> None:
        """Raise InvalidRows if `filter` fails on a row.

        The error is the one that a memtable row would give, or Lance's error if the filter fails only there: Lance
        evaluates the parts of a filter in another order.
        """
        schema = self._base.schema
        sql, names = translate(filter, schema), referenced(filter, schema) or schema.names[:1]
        with suppress(OSError, RuntimeError, pa.ArrowInvalid):
            for batch in self._dataset.scanner(columns=names).to_batches():
                evaluate(filter, sql, pa.Table.from_batches([batch]), np.arange(len(batch)), len(batch))
            try:
                self._counted(filter)
            except (OSError, pa.ArrowInvalid) as error:
                if _OF_A_FILTER in str(error):
                    reason = first_line(error).split(_OF_A_FILTER)[-1].split(", /")[0].strip(": ")
                    raise InvalidRows(f"filter {shown(filter)} is not valid: {reason}; correct it") from None
                raise

    # ---- inside --------------------------------------------------------------------------------------------------

    def _live(self, filter: str | None) -> str | None:
        """Return a filter for the rows that pass `filter` and have not expired."""
        return filter if self._expiry is None else self._expiry.of_live(filter)

    def _filtered(self, filter: str | None) -> dict[str, Any]:
        """Return the scan options for the rows that pass `filter` and have not expired."""
        return filtered(self._live(filter))

    def _counted(self, filter: str) -> int:
        scanner = self._dataset.scanner(columns=[], with_row_id=True, **filtered(filter))
        try:
            return int(scanner.count_rows())
        except pa.ArrowInvalid:
            raise
        except ValueError as error:  # scans report it as ArrowInvalid
            raise pa.ArrowInvalid(str(error)) from error

    @cached_property
    def rows(self) -> int:
        """The number of rows of the version, in all buckets, including expired rows."""
        return int(self._dataset.count_rows())

    def _expected(self, wanted: int, columns: Sequence[str]) -> int:
        """Return how many rows to request from Lance. Raises: Invalid if they exceed the caller's memory limit."""
        wanted = at_most(wanted, lambda: self.rows)
        row = OF_A_CANDIDATE
        if wanted > LARGE:
            schema = self._dataset.schema
            row += sum(null_bytes(schema.field(name).type) for name in columns if name in schema.names)
        expect_room(wanted * row)
        return wanted

    def _refine(self, query: VectorQuery, k: int) -> int:
        """Return how many candidates Lance re-ranks for each of the `k` rows, at most all rows of the table.

        Raises: Invalid if their vectors exceed the caller's memory limit.
        """
        if query.refine is None:
            wanted = RERANKED + RERANKED_PER_ROW * k
            refine = math.ceil((2 * wanted if self.rows <= SMALL_ROWS else wanted) / k)
        else:
            refine = max(1, math.ceil(at_most(query.refine * k, lambda: self.rows) / k))
        expect_room(k * refine * (OF_A_CANDIDATE + null_bytes(self._dataset.schema.field(query.column).type)))
        return refine

    def _is_built(self, column: str) -> bool:
        """Return whether the index of `column` is built; a vector index is built once the table has enough rows."""
        built = {index.name for index in self._dataset.describe_indices()}
        return any(spec.column == column and spec.name in built for spec in self._base.indexes)

    def _many(self, keys: int) -> bool:
        return keys * ROWS_PER_KEY > self.rows

    def _get_by_filter(self, keys: pa.Table, columns: Sequence[str]) -> tuple[pa.Table, Places]:
        wanted = list(dict.fromkeys([*columns, *self._key]))
        passed = gathered(self._dataset.scanner(columns=wanted, filter=self._live(among(keys))))
        rows, positions = match_keys(passed.select(self._key), keys)
        exact = passed if len(rows) == passed.num_rows else passed.take(pa.array(rows))
        return exact.select(list(columns)), positions

    def _get_by_scan(self, keys: pa.Table, columns: Sequence[str]) -> tuple[pa.Table, Places]:
        timed = [] if self._expiry is None else [self._expiry.column]
        scanner = self._dataset.scanner(columns=list(dict.fromkeys([*self._key, *timed])))
        present = gathered(scanner, counted=False)
        rows, positions = match_keys(present.select(self._key), keys)
        if self._expiry is not None:  # not by a filter, because rows are taken by their offsets in the whole table
            live = ~self._expiry.mask(present.column(self._expiry.column).take(pa.array(rows)))
            rows, positions = rows[live], positions[live]
        taken = self._dataset.take(rows.tolist(), columns=list(columns))
        hold(taken.nbytes)
        return taken, positions

    def _nearest(
        self, query: VectorQuery, k: int, filter: str | None, columns: Sequence[str], *, use_index: bool
    ) -> pa.Table:
        nearest: dict[str, Any] = {"column": query.column, "q": query.vector, "k": k, "metric": query.metric}
        nearest["use_index"] = use_index
        if use_index:
            nearest |= {"minimum_nprobes": query.probes or PROBES, "refine_factor": self._refine(query, k)}
            if query.probes is not None:
                nearest["maximum_nprobes"] = query.probes
        else:
            nearest["distance_range"] = (LOWEST if query.low is None else max(LOWEST, query.low), query.high)
        scanner = self._dataset.scanner(
            columns=[*columns, DISTANCE],
            nearest=nearest,
            **self._filtered(filter),
            prefilter=True,
            disable_scoring_autoprojection=True,
        )
        return gathered(scanner)


def match_keys(present: pa.Table, keys: pa.Table) -> tuple[Places, Places]:
    """Return pairs (row of `present`, row of `keys`) with equal keys, ascending by the first; `keys` is distinct.

    Both tables have exactly the key columns. One column uses a hash of `keys`, several use Arrow's hash join.
    """
    if keys.num_columns == 1:
        wanted = keys.column(0).combine_chunks()
        at = pc.index_in(present.column(keys.column_names[0]).cast(wanted.type), wanted)
        rows = np.flatnonzero(at.is_valid().to_numpy())
        return rows, at.drop_null().to_numpy().astype(np.int64)
    names = [str(column) for column in range(keys.num_columns)]  # the table's own names could clash with `row` and `at`
    left = present.select(keys.column_names).rename_columns(names)
    right = keys.rename_columns(names).cast(left.schema).append_column("at", pa.array(np.arange(keys.num_rows)))
    left = left.append_column("row", pa.array(np.arange(present.num_rows)))
    pairs = left.join(right, keys=names, join_type="inner").select(["row", "at"]).sort_by("row")
    return pairs.column("row").to_numpy(), pairs.column("at").to_numpy()


def picked_rows(rows: pa.Table, mask: npt.NDArray[np.bool_]) -> pa.Table:
    """Return the rows of `mask`; selecting all rows, the usual case, costs nothing."""
    return rows if mask.all() else rows.filter(pa.array(mask))


def among(keys: pa.Table) -> str:
    """Return a Lance filter that passes all rows of `keys`, and possibly more for several key columns."""
    return " AND ".join(
        f"`{name}` IN ({', '.join(map(_literal, pc.unique(column).to_pylist()))})"
        for name, column in zip(keys.column_names, keys.columns, strict=True)
    )


def _literal(value: Any) -> str:
    """Return a key value as SQL: text with doubled quotes, bytes in hex, typed dates, plain numbers and booleans."""
    if isinstance(value, str):
        return "'" + value.replace("'", "''") + "'"
    if isinstance(value, bytes):
        return f"X'{value.hex()}'"
    if isinstance(value, datetime.date):
        return f"date '{value.isoformat()}'"
    if value == INT64_MIN:
        return f"({value + 1} - 1)"  # SQL parses the digits without the sign, and the digits alone overflow int64
    return str(value)


MARGIN = 1.5
"""Factor for the rows of the first attempt, relative to an even spread over buckets."""


class BucketReads(BaseReads):
    """Read the rows of `buckets` in one version of the base table, for a daemon that does not own all regions.

    The base table is not sorted by region, so the bucket of each row is computed from its routing columns, and rows of
    other buckets are dropped. Answers stay exact: the limit or the best k are taken afterwards, from as many rows as
    needed.
    Thread safety and invariants: as `BaseReads`. Costs: `count` and `scan` read the routing columns of every row that
    passes the filter; `search` and `match` fetch more rows than wanted, by the ratio of all buckets to `buckets`.
    """

    def __init__(self, base: BaseTable, buckets: Collection[int], expiry: Expiry | None = None) -> None:
        super().__init__(base, expiry)
        self._buckets = np.array(sorted(buckets), dtype=np.int32)
        self._factor = MARGIN * base.buckets / max(1, len(self._buckets))

    def get(self, keys: pa.Table, columns: Sequence[str]) -> tuple[pa.Table, Places]:
        """As `BaseReads.get`; keys of other buckets are missing."""
        ours = np.flatnonzero(self._ours(keys))
        if not len(ours):
            schema = pa.schema([self._dataset.schema.field(name) for name in columns])
            return schema.empty_table(), ours
        rows, at = super().get(keys.take(pa.array(ours)), columns)
        return rows, ours[at]

    def count(self, filter: str | None) -> int:
        """Return the number of rows that pass `filter`."""
        return sum(rows.num_rows for rows in self.batches([], filter, None))

    def batches(self, columns: Sequence[str], filter: str | None, limit: int | None) -> Iterator[pa.Table]:
        """As `BaseReads.batches`; rows of other buckets do not count towards the limit."""
        left = limit
        for rows in super().batches(self._with_routing(columns), filter, None):
            # Without columns only the number of rows is used, so any column will do.
            kept = rows.select(columns or rows.column_names[:1]).filter(pa.array(self._ours(rows)))
            kept = kept if left is None else kept.slice(0, left)
            left = None if left is None else left - kept.num_rows
            if kept.num_rows:
                yield kept
            if left == 0:
                return

    def ordered(self, order: Order, limit: int, filter: str | None, columns: Sequence[str]) -> pa.Table:
        """As `BaseReads.ordered`."""
        ordered = super().ordered
        return self._best(limit, columns, lambda n, names: ordered(order, n, filter, names))

    def search(self, query: VectorQuery, k: int, filter: str | None, columns: Sequence[str]) -> pa.Table:
        """As `BaseReads.search`."""
        search = super().search
        return self._best(k, columns, lambda n, names: search(query, n, filter, names))

    def match(self, query: ColumnsQuery, k: int, filter: str | None, columns: Sequence[str]) -> pa.Table:
        """As `BaseReads.match`."""
        match = super().match
        return self._best(k, columns, lambda n, names: match(query, n, filter, names))

    # ---- inside --------------------------------------------------------------------------------------------------

    def _best(self, k: int, columns: Sequence[str], fetch: Callable[[int, list[str]], pa.Table]) -> pa.Table:
        """Return the first `k` rows in the wanted buckets. `fetch(n, names)`: the first `n` rows of all buckets."""
        wanted, names = int(k * self._factor) + 1, self._with_routing(columns)
        while True:
            found = fetch(wanted, names)
            ours = np.flatnonzero(self._ours(found))
            if len(ours) >= k or found.num_rows < wanted:
                last = found.column_names[-1]  # the score, or the row id
                return found.take(pa.array(ours[:k])).select([*columns, last])
            wanted *= 4

    def _ours(self, rows: pa.Table) -> npt.NDArray[np.bool_]:
        return np.isin(self._base.route(rows), self._buckets)

    def _with_routing(self, columns: Sequence[str]) -> list[str]:
        return list(dict.fromkeys([*columns, *self._base.hashed]))
