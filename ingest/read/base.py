"""Reads of one version of the base table, each as one Lance scan.

Measured on 4,000 packages (with 384-d vectors) and 336,776 flights, pylance 14.0.2, local disk, 2 cores:

* get: a filter `key IN (…)` costs 1.4 ms for one key and about 20 µs for each further one, with or without a
  B-tree on the key at this size; reading the key columns of the whole table costs 10 ms per 200,000 rows, and
  a take by offset 1 ms + 20 µs per row. So few keys are read by a filter, many (more than one per `ROWS_PER_KEY`
  rows) by a key scan.
* a composite key as `(a = 1 AND b = 2) OR …` takes 133 ms for 100 keys; `a IN (…) AND b IN (…)`, which may pass too
  many rows, plus an exact match of the key columns 52 ms.
* search by an index of 24 sub-vectors, 20 probes: 96.4 % of the ten nearest in 3.5 ms with `refine_factor`
  5, 99.2 % in 4.4 ms with 10, 99.8 % in 4.4 ms with 20, 99.9 % in 5.7 ms with 40.
* the same of 1,000,000 rows of 128 d by 16 sub-vectors: how many candidates are re-ranked decides, whatever k. 200 of
  them hold 99.1 to 99.6 % of the nearest 10, as the index happened to be trained, and 97.1 % of 50; 400 hold 99.8 and
  more, 99.7, and 99.4 % of 100. Each costs 10 µs.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterator, Sequence
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
from memwal.ingest.api.ordering import Order
from memwal.ingest.caller import expect_room, hold
from memwal.ingest.read.base_match import BaseMatch
from memwal.ingest.read.gathered import ROW_ID, awaited, gathered, taken
from memwal.ingest.read.request import LARGE, VectorQuery, at_most
from memwal.ingest.read.scalar_index import filtered
from memwal.memtable.converted_size import null_bytes
from memwal.memtable.errors import InvalidRows
from memwal.memtable.filter.expression import shown
from memwal.memtable.filter.predicate import evaluate, referenced
from memwal.memtable.filter.translation import translate
from memwal.memtable.text.columns import ColumnsQuery
from memwal.wal.errors import first_line

DISTANCE = "_distance"
OF_A_CANDIDATE = 16
"""Bytes of a row's number and its score."""
ROWS_PER_KEY = 100
KEYS_PER_FILTER = 1000
INT64_MIN = -(2**63)
PROBES = 20
RERANKED, RERANKED_PER_ROW = 350, 4
"""Candidates that are re-ranked by exact distances: so many, and so many for each row that is wanted."""
SMALL_ROWS = 1 << 16
"""Up to so many rows the index may still be trained on few of them (`flush.commits.maintenance`): twice as many
candidates are re-ranked. 9,400 rows in clusters, trained when 6,900 were there, hold 97.7 % of the nearest 10 in 200
candidates, 99.1 % in 400."""
LOWEST = float(np.finfo(np.float32).min)
"""Of the distances that a search may return. Lance sorts -inf, the dot distance of a vector with inf or huge numbers,
before all others, and then takes the first k; so the bound has to be Lance's own. It costs nothing that a search of
200,000 rows shows. NaN Lance leaves out by itself, and +inf comes last (pylance 14.0.2: float16, float32, float64; l2,
cosine, dot)."""
AHEAD: dict[str, Any] = {"io_buffer_size": 32 << 20, "batch_readahead": 4, "fragment_readahead": 2}
"""What Lance reads ahead of a scan's consumer. By default it took 284 MB for the first batch of a table of 540 MB
(pylance 14.0.2, 2 cores), and with this 86 MB; reading all of it took 0.4 s instead of 0.3 s."""
_OF_A_FILTER = "Error applying filter expression to batch"
"""What Lance says where a filter fails on a row."""
Positions = npt.NDArray[np.int64]


class BaseReads:
    """Reads one version of the base table by key, by filter, by vector and by text.

    Thread safety. Any thread. Invariants. Every answer is of the version in `base`; expired rows are in none.
    """

    def __init__(self, base: BaseTable, expiry: Expiry | None = None) -> None:
        """`expiry`: the rows that have expired; None: none has."""
        self._base, self._expiry = base, expiry
        self._dataset: lance.LanceDataset = base.dataset
        self._key = list(base.key)
        self._specs = {spec.column: spec for spec in base.indexes}

    def get(self, keys: pa.Table, columns: Sequence[str]) -> tuple[pa.Table, Positions]:
        """Return the rows with a key among `keys` (distinct, at least one), with `columns`, and each key's position."""
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
            # Not counted: whether keys are looked for or read whole depends on what is not committed yet.
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
        """Yield rows that pass `filter`, at most `limit`, read as they are consumed."""
        scanner = self._dataset.scanner(columns=list(columns), limit=limit, **self._filtered(filter), **AHEAD)
        for batch in awaited(scanner):
            yield pa.Table.from_batches([batch])

    def ordered(self, order: Order, limit: int, filter: str | None, columns: Sequence[str]) -> pa.Table:
        """Return the first `limit` rows in `order` that pass `filter`, with `columns` and `_rowid`."""
        by: list[ColumnOrdering | str] = [ColumnOrdering(name, ascending=ascending) for name, ascending in order]
        wanted = list(dict.fromkeys([*columns, *(name for name, _ in order)]))  # Lance fetches no others after a sort
        live, limit = self._filtered(filter), self._expected(limit, wanted)
        scanner = self._dataset.scanner(columns=wanted, **live, order_by=by, limit=limit, with_row_id=True)
        return gathered(scanner).select([*columns, ROW_ID])

    def rows_by_id(self, ids: pa.ChunkedArray, columns: Sequence[str]) -> pa.Table:
        """Return `columns` of the rows with these `_rowid`s, in their order."""
        return taken(self._dataset, ids.to_pylist(), columns)

    def search(self, query: VectorQuery, k: int, filter: str | None, columns: Sequence[str]) -> pa.Table:
        """Return the `k` rows nearest to `query` that pass `filter`, with `columns` and exact `_distance`, ascending.

        Fewer than `k` only if fewer rows pass: when the index finds too few, an exact scan follows. Vectors that no
        index could take (with NaN or inf) are not found, and take no other row's place.
        """
        k = self._expected(k, columns)
        rows = self._nearest(query, k, filter, columns, use_index=not query.exact)
        too_few = not query.exact and (finite := _finite(rows)) < min(k, self.rows)
        # Rows that the index does not cover are compared without a bound: -inf may have taken the places of others.
        if too_few and (finite < rows.num_rows or self._is_built(query.column)):
            rows = self._nearest(query, k, filter, columns, use_index=False)
        return picked_rows(rows, query.within(rows.column(DISTANCE).to_numpy()))

    def match(self, query: ColumnsQuery, k: int, filter: str | None, columns: Sequence[str]) -> pa.Table:
        """Return the `k` rows that match `query` best and pass `filter`, with `columns` and BM25 `_score`, descending.

        Rows that the index does not cover yet are searched too.
        """
        k = self._expected(k, columns)
        return BaseMatch(self._dataset, self._base.indexes).best(query, k, self._live(filter), columns)

    def check(self, filter: str) -> None:
        """Plan a scan with `filter`. Lance stops at what it does not understand and takes what it has read for the
        whole; DataFusion reads to the end, so it is asked as well, as for a memtable.

        Raises: ValueError or OSError of Lance if it does not parse or fit the schema; InvalidRows of DataFusion.
        """
        schema = self._base.schema
        self._dataset.scanner(columns=self._key or schema.names[:1], filter=filter).explain_plan()
        evaluate(filter, translate(filter, schema), schema.empty_table(), np.arange(0), 0)

    def raise_filter_error(self, filter: str) -> None:
        """Raise InvalidRows if `filter` fails on a row: with the error that a row of a memtable would give, or with
        Lance's where it alone fails, since it evaluates the parts of a filter in another order.
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
        """Return a filter that passes the rows that pass `filter` and have not expired."""
        return filter if self._expiry is None else self._expiry.of_live(filter)

    def _filtered(self, filter: str | None) -> dict[str, Any]:
        """Return the options of a scan of the rows that pass `filter` and have not expired."""
        return filtered(self._live(filter))

    def _counted(self, filter: str) -> int:
        scanner = self._dataset.scanner(columns=[], with_row_id=True, **filtered(filter))
        try:
            return int(scanner.count_rows())
        except pa.ArrowInvalid:
            raise
        except ValueError as error:  # which scans report so
            raise pa.ArrowInvalid(str(error)) from error

    @cached_property
    def rows(self) -> int:
        """The number of rows of the version, whatever their buckets, expired ones too."""
        return int(self._dataset.count_rows())

    def _expected(self, wanted: int, columns: Sequence[str]) -> int:
        """Return how many rows to ask Lance for. Raises: Invalid if they exceed what the caller may gather."""
        wanted = at_most(wanted, lambda: self.rows)
        row = OF_A_CANDIDATE
        if wanted > LARGE:
            schema = self._dataset.schema
            row += sum(null_bytes(schema.field(name).type) for name in columns if name in schema.names)
        expect_room(wanted * row)
        return wanted

    def _refine(self, query: VectorQuery, k: int) -> int:
        """Return how many candidates Lance re-ranks for each of the `k` rows, at most all rows of the table.

        Raises: Invalid if the caller may not gather their vectors.
        """
        if query.refine is None:
            wanted = RERANKED + RERANKED_PER_ROW * k
            refine = math.ceil((2 * wanted if self.rows <= SMALL_ROWS else wanted) / k)
        else:
            refine = max(1, math.ceil(at_most(query.refine * k, lambda: self.rows) / k))
        expect_room(k * refine * (OF_A_CANDIDATE + null_bytes(self._dataset.schema.field(query.column).type)))
        return refine

    def _is_built(self, column: str) -> bool:
        """Whether `column` has an index yet; a vector index is built once the table has enough rows."""
        return self._specs[column].name in {index.name for index in self._dataset.describe_indices()}

    def _many(self, keys: int) -> bool:
        return keys * ROWS_PER_KEY > self.rows

    def _get_by_filter(self, keys: pa.Table, columns: Sequence[str]) -> tuple[pa.Table, Positions]:
        wanted = list(dict.fromkeys([*columns, *self._key]))
        passed = gathered(self._dataset.scanner(columns=wanted, filter=self._live(among(keys))))
        rows, positions = match_keys(passed.select(self._key), keys)
        exact = passed if len(rows) == passed.num_rows else passed.take(pa.array(rows))
        return exact.select(list(columns)), positions

    def _get_by_scan(self, keys: pa.Table, columns: Sequence[str]) -> tuple[pa.Table, Positions]:
        timed = [] if self._expiry is None else [self._expiry.column]
        scanner = self._dataset.scanner(columns=list(dict.fromkeys([*self._key, *timed])))
        present = gathered(scanner, counted=False)
        rows, positions = match_keys(present.select(self._key), keys)
        if self._expiry is not None:  # not by a filter: rows are taken by their places among all
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


def match_keys(present: pa.Table, keys: pa.Table) -> tuple[Positions, Positions]:
    """Return pairs (row of `present`, row of `keys`) with equal keys, ascending by the first; `keys` is distinct.

    Both tables have exactly the key columns. One column: a hash of `keys`; several: Arrow's hash join.
    """
    if keys.num_columns == 1:
        wanted = keys.column(0).combine_chunks()
        at = pc.index_in(present.column(keys.column_names[0]).cast(wanted.type), wanted)
        rows = np.flatnonzero(at.is_valid().to_numpy())
        return rows, at.drop_null().to_numpy().astype(np.int64)
    names = [str(column) for column in range(keys.num_columns)]  # those of the table may be ours
    left = present.select(keys.column_names).rename_columns(names)
    right = keys.rename_columns(names).cast(left.schema).append_column("at", pa.array(np.arange(keys.num_rows)))
    left = left.append_column("row", pa.array(np.arange(present.num_rows)))
    pairs = left.join(right, keys=names, join_type="inner").select(["row", "at"]).sort_by("row")
    return pairs.column("row").to_numpy(), pairs.column("at").to_numpy()


def picked_rows(rows: pa.Table, mask: npt.NDArray[np.bool_]) -> pa.Table:
    """Return the rows of `mask`; all of them, the usual case, costs nothing."""
    return rows if mask.all() else rows.filter(pa.array(mask))


def _finite(rows: pa.Table) -> int:
    """The number of rows with a finite distance."""
    return int(np.count_nonzero(np.isfinite(rows.column(DISTANCE).to_numpy())))


def among(keys: pa.Table) -> str:
    """Return a Lance filter that passes every row with a key among `keys`; of several key columns maybe more rows."""
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
        return f"({value + 1} - 1)"  # SQL parses the digits without the sign, and they alone overflow int64
    return str(value)
