"""Define the public methods of a table. `Table` and `AsyncTable` show them, the tables behind those implement them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from memwal.flush import CommitReport
from memwal.ingest.engine.api.arguments import keys_or_filter
from memwal.ingest.engine.api.missing import Missing
from memwal.ingest.engine.api.reads import Reads
from memwal.ingest.engine.api.tokens import Receipt, TokenLike
from memwal.ingest.errors import Invalid, translate_errors


class Operations(Reads):
    """Reads, writes and steps. A table without an owner implements the reads only and rejects the rest.

    Thread safety. Every method from any thread.
    Durability. `put` and `delete` return once every row is on storage (`durable=True`) or visible (`durable=False`).
    Errors. Every method raises only `ingest.errors` kinds.
    """

    @translate_errors
    def put(
        self,
        rows: Any,
        *,
        missing: Missing | None = None,
        durable: bool = True,
        token: TokenLike = None,
        timeout: float | None = None,
    ) -> Receipt:
        """Insert or replace rows by key, or as `table.upsert` specifies; append them if the table has no key.

        - `rows`: Arrow table, batch or reader, pandas or polars frame, or list of dicts; any number of regions.
        - `missing`: how to treat columns of the table that the rows lack. "null" sets them to null. "keep" keeps stored
          values, which costs a lookup of the keys; all rows must have the same columns. Without it the put is rejected,
          except that `upsert = "merge"` keeps. The columns are null in new rows, and in all rows of a table without a
          key or with `upsert = "insert"`. Columns that another program added after this table was opened are kept until
          a put names them.
        - `token`: a name and an increasing number. Each region applies a token once, however often it is sent, and the
          receipt has the number of repeated rows per region. Other rows under a used token count as its repeat. A
          decreasing number is Invalid if the regions show that it cannot be a retry. Use few names: every region stores
          the last 100,000 names, and rejects older ones.
        - `timeout`: seconds after which the call is abandoned; rows that no region has begun to write by then are not
          written.

        Raises: Invalid (nothing was written), Unavailable, UnknownOutcome, FencedError.
        """
        raise self._refusal("put")

    @translate_errors
    def delete(
        self,
        keys: Any = None,
        *,
        filter: str | None = None,
        durable: bool = True,
        token: TokenLike = None,
        timeout: float | None = None,
    ) -> Receipt:
        """Delete rows by key, or all rows that pass `filter` (SQL).

        - `keys`: as for `get`; put a single string key in a list. Keys without a row raise no error. The receipt's
          `rows` is the number of rows that the keys had when the call began, and 0 if all regions had applied the
          token. Some deletes skip the lookup and count their keys: deletes of more than 1,000 keys at one owner, into a
          base table of more than a million rows without a B-tree on the key, or while storage does not answer.
          `regions` counts keys.
        - `filter`: deletes rows whose newest version passes at `latest` when the call begins; a row that changes during
          the call and no longer passes stays. The receipt's `rows` is the number of rows deleted. `skipped` counts rows
          that passed at first and stayed, or that an attempt without an answer (a daemon was lost) may have deleted. If
          the call fails after some rows were deleted, it raises UnknownOutcome; a retry deletes the rows that pass
          then. With a `token` every region records it at the end, and a retry deletes nothing where it is recorded. The
          call waits while a load past the log is in progress.

        Raises: as `put`; Invalid if the table has no key.
        """
        keys_or_filter(keys, filter)
        raise self._refusal("delete")

    @translate_errors
    def update(
        self,
        where: str | None = None,
        values: Mapping[str, Any] | None = None,
        *,
        values_sql: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> Receipt:
        """Set columns of all rows that pass `where` (SQL; None: all rows); other columns keep their values.

        - `values`: new values by column.
        - `values_sql`: SQL over the row before the update, by column, such as `{"price": "price * 2"}`. It is computed
          from the newest row, in the region's write order, so that concurrent updates of a row add up.

        Updates rows whose newest version passes at `latest` when the call begins; a row that changes during the call
        and no longer passes stays. The receipt's `rows` is the number of rows updated. The rows are durable when the
        call returns. It waits while a load past the log is in progress. If it fails after some rows were updated, it
        raises UnknownOutcome; it is not repeated by itself.
        Raises: as `put`; Invalid for a column of the key, and if the table has no key.
        """
        raise self._refusal("update")

    @translate_errors
    def create_index(self, /, column: str, kind: str, **parameters: Any) -> str:
        """Index `column` and return the index's name; afterwards rows of every level are searched with the index.

        `kind`: "ivf_pq" (vectors), "fts" (text) or "btree". `parameters`: as in `open(indexes=…)`. Puts and reads
        continue during the call. An index that another program built is adopted; the same index again changes nothing.
        Raises: Invalid for an index that the column cannot have; Unavailable.
        """
        raise self._refusal("create_index")

    @translate_errors
    def drop_index(self, name: str) -> None:
        """Drop the index `name`, also in the base table. Raises: Invalid if it does not exist; Unavailable."""
        raise self._refusal("drop_index")

    @translate_errors
    def list_indexes(self) -> list[dict[str, Any]]:
        """Return the indexes: name, column, kind, parameters, whether the base table has built it, the base rows that
        it covers and those that wait, bytes.
        """
        raise self._refusal("list_indexes")

    @translate_errors
    def list_versions(self) -> list[dict[str, Any]]:
        """Return the versions of the base table that are kept, oldest first: "version", and "timestamp" in UTC."""
        raise self._refusal("list_versions")

    @translate_errors
    def list_tags(self) -> dict[str, int]:
        """Return the tags: name -> version. A version with a tag is kept."""
        raise self._refusal("list_tags")

    @translate_errors
    def create_tag(self, name: str, version: int, *, replace: bool = False) -> None:
        """Give a version of the base table a name. `replace`: move an existing tag.

        Raises: Invalid if the version does not exist, and unless `replace`, if the tag exists; Unavailable.
        """
        raise self._refusal("create_tag")

    @translate_errors
    def drop_tag(self, name: str) -> None:
        """Drop a tag; its version is then kept as long as any other. Raises: Invalid if it does not exist."""
        raise self._refusal("drop_tag")

    @translate_errors
    def flush(self) -> None:
        """Freeze every memtable and publish it as an SST; return when all are published."""
        raise self._refusal("flush")

    @translate_errors
    def commit(self) -> CommitReport:
        """Commit all published SSTs into the base table.

        Raises: the error that keeps a region from being committed, after all other regions are.
        """
        raise self._refusal("commit")

    @translate_errors
    def status(self) -> dict[str, Any]:
        """Return the state of the table as a dict.

        The keys are `table`, `base_version`, `routing`, `regions`, and:

        - `rows`: of the base table, with expired rows that are not deleted yet.
        - `ttl`: None, or `{"column", "seconds"}` (no column if it was dropped).
        - `unsupported_columns`: the columns that memwal cannot hold, with the reason; while there are any, puts are
          rejected.
        - `commits`: the newest of this process, oldest first, as `CommitMeter.recent`.
        - `commit_failures`: of this process's last commit (`TableUpkeep.failures`).
        - `refused_puts`: of this process, by the setting that limits puts, as `Meters.refusals`.
        - `paused`: the operations that an operator has paused, as `table.pauses.Paused`.
        - `storage`: None, or the bytes on storage by kind, their factor over those of the newest version, and the time
          of the measurement: at most once an hour, in a garbage collection of the process that commits.
        - `versions`: of memwal, protocol and storage, by owner.
        """
        raise self._refusal("status")

    @translate_errors
    def close(self) -> None:
        """Stop; durable rows stay in the WAL for the next open of the table.

        An interrupted call can be repeated.
        Raises: the error that kept non-durable rows from the WAL in the end.
        """
        raise self._refusal("close")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _refusal(self, method: str) -> Invalid:
        return Invalid(
            f"{method}: the table at {self._location} is open for reading only; connect() to the daemon that serves "
            "it, or open() it without read_only"
        )
