"""`table.search(vector).where("price < 20").limit(5).to_pandas()`: a read that is built step by step.

The names are those of LanceDB's builder. Each query is one `search`, `match`, `hybrid` or `scan` of the table. A step
changes the query and returns it; nothing is read before the rows are requested, and each request reads again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Self

import pyarrow as pa

from memwal.ingest.engine.api.arguments import shown, text
from memwal.ingest.engine.api.fusion import DISTANCE, SCORE, lancedb_reranker
from memwal.ingest.engine.api.results import gathered, python_rows
from memwal.ingest.errors import Invalid
from memwal.ingest.suggest import no_attribute, suggestion

if TYPE_CHECKING:
    from memwal.ingest.engine.api.explanation import Explanation
    from memwal.ingest.engine.api.operations import Operations

_KINDS = ("auto", "vector", "fts", "hybrid")
_K = 10
"""Rows of a search without `limit`."""
_PLAIN = str.maketrans('+-"*~', "     ")
"""LanceDB reads a query as words; `match` reads these characters as operators."""
_ELSEWHERE = {
    "with_row_id": "rows are identified by their key",
    "fast_search": "rows that an index does not cover are always searched",
    "bypass_vector_index": "give another metric, or use table.sql",
    "minimum_nprobes": "use nprobes(n)",
    "maximum_nprobes": "use nprobes(n)",
    "ef": "it belongs to HNSW, and indexes are ivf_pq",
    "use_lsm": "rows that are not committed are always included; level('committed') leaves them out",
    **dict.fromkeys(("to_pydantic", "execute", "collect", "fetch", "all"), "use to_list(), to_arrow() or to_pandas()"),
    **dict.fromkeys(("top", "k", "take", "head"), "use limit(n)"),
    **dict.fromkeys(("filter", "prefilter"), "use where(filter)"),
    **dict.fromkeys(("sort", "sort_by", "orderBy"), "use order_by(order)"),
}


class Query:
    """A query under construction.

    Thread safety. One thread. Errors. Only `ingest.errors` kinds; AttributeError for a step that does not exist.
    """

    def __init__(
        self, table: Operations, query: Any = None, kind: str = "auto", column: str | None = None, texts: Any = None
    ) -> None:
        """`query`: a vector, a text, or None; `kind`: "auto", "vector", "fts" or "hybrid".

        `column`: of the vectors. `texts`: columns with an fts index; None for all of them.
        """
        if kind not in _KINDS:
            raise Invalid(f"query_type = {kind!r:.60} is unknown{suggestion(str(kind), _KINDS)}")
        self._table, self._kind, self._vector_column, self._text_columns = table, kind, column, texts
        self._vector = self._text = None
        self._ranking: dict[str, Any] = {}
        self._columns: list[str] | None = None
        self._filter: str | None = None
        self._limit: int | None = None
        self._offset = 0
        self._order: Any = None
        self._level = "latest"
        self._phrase = False
        self._reranker: Any = None
        if isinstance(query, str):
            if kind == "vector":
                raise Invalid("memwal does not compute embeddings: compute the vector, and call search(vector)")
            self._text = query
        elif query is not None:
            if kind == "fts":
                raise Invalid(f"query = {shown(query)}: a search of kind 'fts' needs a text")
            self._vector = query

    # ---- steps -------------------------------------------------------------------------------------------------------

    def vector(self, vector: Any) -> Self:
        """Rank by the distance from `vector`, for a hybrid search."""
        self._vector = vector
        return self

    def text(self, query: str) -> Self:
        """Rank by the match of `query`, for a hybrid search."""
        self._text = text("text", query, "web server")
        return self

    def where(self, where: str, prefilter: bool = True) -> Self:
        """Read only rows that pass `where` (SQL) and the filters given before. Rows are filtered, then ranked."""
        if not prefilter:
            raise Invalid("prefilter = False: rows are filtered before they are ranked; filter the result instead")
        self._filter = where if self._filter is None else f"({self._filter}) AND ({where})"
        return self

    def select(self, columns: Any) -> Self:
        """Return only these columns, and those of the ranking."""
        if isinstance(columns, Mapping):
            raise Invalid("select() takes names of columns; for expressions use table.sql")
        self._columns = columns
        return self

    def limit(self, limit: int | None) -> Self:
        """Return at most `limit` rows. Without it a search returns 10; without a query all rows are returned."""
        self._limit = limit
        return self

    def offset(self, offset: int) -> Self:
        """Leave out the first `offset` rows."""
        self._offset = offset
        return self

    def order_by(self, order: Any) -> Self:
        """Sort rows of a query without a vector or a text, as `order_by` of `scan`."""
        self._order = order
        return self

    def metric(self, metric: str) -> Self:
        """Measure distances by "l2", "cosine" or "dot"."""
        self._ranking["metric"] = metric
        return self

    distance_type = metric

    def nprobes(self, nprobes: int) -> Self:
        """Search this number of partitions of the vector index."""
        self._ranking["nprobes"] = nprobes
        return self

    def refine_factor(self, refine_factor: int) -> Self:
        """Compare this number times `limit` rows of the vector index exactly."""
        self._ranking["refine_factor"] = refine_factor
        return self

    def distance_range(self, lower_bound: float | None = None, upper_bound: float | None = None) -> Self:
        """Return only rows with a distance of at least `lower_bound` and below `upper_bound`."""
        self._ranking["distance_range"] = (lower_bound, upper_bound)
        return self

    def phrase_query(self, phrase_query: bool = True) -> Self:
        """Match the words of the text next to each other, in this order."""
        self._phrase = phrase_query
        return self

    def rerank(self, reranker: Any) -> Self:
        """Rank the candidates of a hybrid search by a reranker of LanceDB, or as `rerank` of `hybrid`."""
        self._reranker = reranker
        return self

    def level(self, level: str) -> Self:
        """Read at another level than `latest`."""
        self._level = level
        return self

    # ---- rows --------------------------------------------------------------------------------------------------------

    def to_arrow(self) -> pa.Table:
        """Return the rows as an Arrow table."""
        return self._read(None)

    def to_pandas(self) -> Any:
        """Return the rows as a pandas frame."""
        return gathered(self.to_arrow()).to_pandas()

    def to_polars(self) -> Any:
        """Return the rows as a Polars frame."""
        return gathered(self.to_arrow()).to_polars()

    def to_list(self) -> list[dict[str, Any]]:
        """Return the rows as dicts."""
        return python_rows(self.to_arrow())

    def to_batches(self, batch_size: int | None = None) -> Iterator[pa.RecordBatch]:
        """Yield the rows as record batches of at most `batch_size` rows."""
        yield from self.to_arrow().to_batches(batch_size)

    def analyze_plan(self) -> str:
        """Read, and return how: levels, files and indexes, rows and milliseconds (`memwal.Explanation`)."""
        explained: list[Explanation] = []
        self._read(explained.append)
        return str(explained[0])

    explain_plan = analyze_plan

    def __repr__(self) -> str:
        asked = [name for name, given in (("vector", self._vector), ("text", self._text)) if given is not None]
        return f"<memwal.Query of {' and '.join(asked) or 'all rows'}; to_pandas(), to_arrow() or to_list() read it>"

    def __getattr__(self, name: str) -> Any:
        raise no_attribute("a query", type(self), name, _ELSEWHERE)

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _read(self, explain: Callable[[Explanation], None] | None) -> pa.Table:
        shared: dict[str, Any] = {"filter": self._filter, "columns": self._columns, "offset": self._offset}
        shared |= {"level": self._level, "explain": explain}
        if self._vector is None and self._text is None:
            if self._kind != "auto":
                raise Invalid("the query has neither a vector nor a text; add .vector(…) or .text(…)")
            return self._table.scan(limit=self._limit, order_by=self._order, **shared).read_all()
        if self._order is not None:
            raise Invalid("order_by: a search has its own order; sort its result instead")
        shared["k"] = _K if self._limit is None else self._limit
        if self._text is None:
            return self._table.search(self._vector_column, self._vector, **self._ranking, **shared)
        if self._vector is None:
            if self._kind == "hybrid":
                raise Invalid("a hybrid search needs a vector, and memwal does not compute embeddings; add .vector(…)")
            return self._table.match(self._text_columns, self._words(), **shared)
        return self._hybrid(shared)

    def _hybrid(self, shared: Mapping[str, Any]) -> pa.Table:
        reranker = self._reranker
        if reranker is not None and hasattr(reranker, "rerank_hybrid"):
            reranker = lancedb_reranker(reranker, self._text or "")
        found = self._table.hybrid(
            self._vector,
            self._words(),
            vector_column=self._vector_column,
            text_column=self._text_columns,
            candidates=shared["k"] + self._offset,  # as LanceDB
            rerank=reranker,
            **self._ranking,
            **shared,
        )
        return found.drop_columns([DISTANCE, SCORE])

    def _words(self) -> str:
        words = (self._text or "").translate(_PLAIN)
        return f'"{words}"' if self._phrase else words
