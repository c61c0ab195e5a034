"""The rows of one call by bucket, checked first, without storage: what a client does whose rows go to several daemons.

No daemon may write its part before all parts are fine. One daemon checks what it is given (`ingest.table_writes`); of
several each sees its own part only, so the client checks the whole before it sends anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flush.base.sharding import Routing
from ingest.rows import check_encoding
from ingest.write_rules import first_of_each_key
from memtable import TOMBSTONE, IndexSpec, MemTable, row_schema, tombstones, with_tombstone


class Splitter:
    """Checks and routes rows of one table. Thread safety: any thread; immutable."""

    def __init__(self, schema: pa.Schema, key: Sequence[str], described: Mapping[str, Any]) -> None:
        """`described`: as a daemon describes the table (`ingest.flight_server`, action "schema")."""
        self.routing: int = described["routing_version"]
        """Version of the routing to these buckets."""
        self.regions: tuple[str, ...] = tuple(described["ids"])
        """That of bucket n at n."""
        self._key = tuple(key)
        self._merges, self._on_duplicate = described["upsert"] == "merge", described["on_duplicate"]
        self._rows = row_schema(schema, key)
        self._required = tuple(described["required"])
        self._checker = MemTable(self._rows, key, [IndexSpec(**each) for each in described["indexes"]], generation=0)
        self._bucket = Routing.parse(described["routing"]).hash(schema)

    def checked(self, rows: pa.Table) -> pa.Table:
        """The rows of a put in the table's columns, each key as often as the table takes it in one put.

        Raises: InvalidRows or Invalid, naming column and row.
        """
        check_encoding(rows)
        given, required = set(rows.column_names), self._required
        if self._merges:
            required = tuple(name for name in required if name in given)
        whole = with_tombstone(rows, self._rows, required)
        self._checker.check(whole)
        left_out = [name for name in whole.column_names if self._merges and name not in given]
        conformed = whole.drop_columns([*{TOMBSTONE, *left_out}])
        if self._on_duplicate == "last":
            return conformed
        once = first_of_each_key(conformed, self._key, refuse=self._on_duplicate == "fail")
        return conformed if once.all() else conformed.filter(pa.array(once))

    def checked_keys(self, keys: pa.Table) -> pa.Table:
        """The keys of a delete. Raises: InvalidRows or Invalid."""
        check_encoding(keys)
        self._checker.check(tombstones(keys, self._rows))
        return keys

    def buckets(self, rows: pa.Table) -> npt.NDArray[np.int32]:
        """Bucket of every row, of whole rows or of keys."""
        return self._bucket(rows)
