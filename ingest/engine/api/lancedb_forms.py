"""The names that users of LanceDB and pandas type, as short forms of the table's operations.

`flush/beside_lancedb.md` lists what is equal in LanceDB, and what differs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any, NamedTuple, overload

import pyarrow as pa

from memwal.flush import CommitReport
from memwal.ingest.engine.api.arguments import listed, shown
from memwal.ingest.engine.api.explanation import Explain
from memwal.ingest.engine.api.operations import Operations
from memwal.ingest.engine.api.query import Query
from memwal.ingest.engine.api.tokens import Receipt
from memwal.ingest.errors import Invalid, translate_errors

_LANCEDBS = ("query", "query_type", "vector_column_name", "fts_columns")
ELSEWHERE = {
    **dict.fromkeys(("insert", "upsert", "append", "write", "save", "produce", "send"), "call put(rows)"),
    **dict.fromkeys(
        ("query", "select", "where", "filter", "groupby", "join"), "call search(), scan(columns, filter) or sql(query)"
    ),
    **dict.fromkeys(("find", "fetch", "loc", "take", "lookup"), "call get(keys), or scan(filter=…)"),
    **dict.fromkeys(("rows", "read", "iterrows", "itertuples", "collect", "values"), "call scan(), or to_pandas()"),
    **dict.fromkeys(("show", "tail", "iloc", "sample", "limit"), "call head(n), or scan(order_by=…, limit=n)"),
    **dict.fromkeys(
        ("subscribe", "watch", "consume", "poll", "stream", "readStream", "cdf"),
        'call changes(since="earliest", follow=True)',
    ),
    "history": 'call list_versions(), or changes(since="earliest")',
    **dict.fromkeys(("columns", "dtypes", "shape", "describe", "info"), "use schema and count()"),
    **dict.fromkeys(("name", "uri", "path"), 'status()["table"] has the location'),
    **dict.fromkeys(("remove", "truncate", "clear"), 'call delete(keys), or delete(filter="true") for all rows'),
    "drop": 'delete(filter="true") deletes all rows; to drop the table, close it and delete its directory',
    **dict.fromkeys(("add_index", "index"), 'call create_index(column, kind), such as create_index("title", "fts")'),
    **dict.fromkeys(("compact_files", "compact"), "call optimize()"),
    **dict.fromkeys(("cleanup_old_versions", "vacuum"), "the settings [gc] say how long versions are kept"),
    **dict.fromkeys(
        ("add_columns", "alter_columns", "drop_columns"),
        "change columns with lance.dataset(uri) or LanceDB; open tables follow",
    ),
    "to_lance": "lance.dataset(uri) opens the base table",
    "len": "call count(), or len(table)",
}
"""Names of other libraries, and what to use here."""
_KINDS = {"ivf_pq": "IvfPq", "fts": "FTS", "btree": "BTree"}


class Index(NamedTuple):
    """An index, as `lancedb.Table.list_indices` describes it."""

    name: str
    index_type: str
    columns: list[str]


class LanceDBForms(Operations):
    """A table with LanceDB's names besides memwal's.

    Thread safety. Every method from any thread. Errors. Only `ingest.errors` kinds.
    """

    @translate_errors
    def add(self, data: Any, mode: str = "append") -> Receipt:
        """Put rows: `put(data)`. In a table with a key, a row replaces the row of its key; LanceDB would keep both.

        Raises: as `put`; Invalid for another `mode` than "append".
        """
        if mode != "append":
            raise Invalid(f'mode = {shown(mode)}: only "append"; to replace all rows, delete(filter="true") first')
        return self.put(data)

    @translate_errors
    def merge_insert(self, on: str | Sequence[str]) -> MergeInsert:
        """Return a builder of an upsert: `merge_insert("id").when_matched_update_all().when_not_matched_insert_all()`.

        `execute(rows)` of it puts the rows. Raises: Invalid if `on` is not the key.
        """
        if tuple(listed(on, "on") or ()) != tuple(self.key):
            key = ", ".join(map(repr, self.key)) or "none"
            raise Invalid(f"merge_insert: on = {shown(on)}, but rows are identified by the table's key ({key})")
        return MergeInsert(self)

    @overload
    def search(
        self,
        column: str | None,
        vector: Any,
        k: int = 10,
        filter: str | None = None,
        columns: Sequence[str] | None = None,
        *,
        metric: str | None = None,
        nprobes: int | None = None,
        refine_factor: int | None = None,
        distance_range: tuple[float | None, float | None] | None = None,
        offset: int = 0,
        level: str = "latest",
        explain: Explain | None = None,
    ) -> pa.Table: ...

    @overload
    def search(
        self,
        query: Any = None,
        vector_column_name: str | None = None,
        query_type: str = "auto",
        *,
        fts_columns: str | Sequence[str] | Mapping[str, float] | None = None,
    ) -> Query: ...

    @translate_errors
    def search(self, *given: Any, **named: Any) -> pa.Table | Query:
        """Search vectors: `search(column, vector, k, filter, columns, …)`; or begin a query, `search(query)`.

        A query is built step by step: `search(vector).where("price < 20").limit(5).to_pandas()`. `query` is a vector, a
        text for the columns with an fts index, or None for rows that pass `where`. For vector and text together:
        `search(query_type="hybrid").vector(vector).text("web server")`.
        """
        if _is_lancedbs(given, named):
            return _query(self, *given, **named)
        found: pa.Table = super().search(*given, **named)
        return found

    @translate_errors
    def head(self, n: int = 5) -> pa.Table:
        """Return `n` rows: `scan(limit=n)`."""
        return self.scan(limit=n).read_all()

    @translate_errors
    def to_arrow(self) -> pa.Table:
        """Return all rows as an Arrow table: `scan().read_all()`."""
        return self.scan().read_all()

    @translate_errors
    def to_pandas(self) -> Any:
        """Return all rows as a pandas frame: `scan().to_pandas()`."""
        return self.scan().to_pandas()

    @translate_errors
    def to_polars(self) -> Any:
        """Return all rows as a Polars frame: `scan().to_polars()`."""
        return self.scan().to_polars()

    @translate_errors
    def count_rows(self, filter: str | None = None) -> int:
        """Return the number of rows that pass `filter`: `count(filter)`."""
        return self.count(filter)

    @translate_errors
    def create_fts_index(self, /, field_names: str, **parameters: Any) -> str:
        """Index a column of texts: `create_index(field_names, "fts", …)`."""
        return self.create_index(field_names, "fts", **parameters)

    @translate_errors
    def create_scalar_index(self, column: str, index_type: str = "BTREE") -> str:
        """Index a column for filters: `create_index(column, "btree")`. Raises: Invalid for another type."""
        if str(index_type).upper() != "BTREE":
            raise Invalid(f"index_type = {shown(index_type)}: an index for filters is a BTREE")
        return self.create_index(column, "btree")

    @translate_errors
    def list_indices(self) -> list[Index]:
        """Return the indexes with LanceDB's names; `list_indexes` has more."""
        return [Index(each["name"], _KINDS[each["kind"]], [each["column"]]) for each in self.list_indexes()]

    @translate_errors
    def optimize(self) -> CommitReport:
        """Move all rows into the base table, compact it and extend its indexes: `flush()` and `commit()`."""
        self.flush()
        return self.commit()


# What editors and `help` show; the parameters of the other form are those of `_query`.
vars(LanceDBForms.search)["__signature__"] = signature(Operations.search)


class MergeInsert:
    """An upsert, with the names of LanceDB's builder. Thread safety. One thread."""

    def __init__(self, table: LanceDBForms) -> None:
        self._table, self._updates, self._inserts = table, False, False

    def when_matched_update_all(self, where: str | None = None) -> MergeInsert:
        """Replace rows whose key is stored. Raises: Invalid for a condition."""
        if where is not None:
            raise Invalid("when_matched_update_all(where=…): a put replaces all rows of its keys; leave `where` out")
        self._updates = True
        return self

    def when_not_matched_insert_all(self) -> MergeInsert:
        """Insert rows whose key is not stored."""
        self._inserts = True
        return self

    def when_not_matched_by_source_delete(self, condition: str | None = None) -> MergeInsert:
        """Raises: Invalid. A put does not know which keys it lacks."""
        del condition
        raise Invalid("when_not_matched_by_source_delete: put the rows, then delete(filter=…) the others")

    def execute(self, new_data: Any) -> Receipt:
        """Put the rows. Raises: as `put`; Invalid unless rows are both updated and inserted."""
        if not (self._updates and self._inserts):
            lacks = "when_not_matched_insert_all" if self._updates else "when_matched_update_all"
            raise Invalid(
                f'merge_insert: add {lacks}(), because a put does both; a table with upsert = "insert" never replaces'
            )
        return self._table.put(new_data)


def _is_lancedbs(given: Sequence[Any], named: Mapping[str, Any]) -> bool:
    """Return whether these are the arguments of LanceDB's `search`; memwal's has a column and a vector."""
    if not set(named) <= set(_LANCEDBS):
        return False
    if len(given) > 2 and not isinstance(given[2], str):  # the number of rows; LanceDB's third is the kind
        return False
    return len(given) < 2 or isinstance(given[1], str) or not isinstance(given[0], str | None)


def _query(
    table: Operations,
    query: Any = None,
    vector_column_name: str | None = None,
    query_type: str = "auto",
    *,
    fts_columns: Any = None,
) -> Query:
    return Query(table, query, query_type, vector_column_name, fts_columns)
