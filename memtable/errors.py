"""The errors that a memtable raises.

Each message is one line that states the problem (column, row, numbers) and the remedy.
"""


class InvalidRows(ValueError):
    """The request is wrong: rows, keys, a vector, a predicate or an index definition.

    Raised before anything changed, so the caller may correct the request and retry.

    Attributes.
        column: name of the column at fault, None if it is not a single column.
        row: row number in the caller's rows, counted from 0; None if it is not a single row.
    """

    def __init__(self, message: str, *, column: str | None = None, row: int | None = None) -> None:
        super().__init__(message)
        self.column = column
        self.row = row


class MemTableFrozen(RuntimeError):
    """apply() was called on a frozen memtable: an error of the caller, never of the data."""

    def __init__(self, generation: int) -> None:
        super().__init__(f"memtable of generation {generation} is frozen: put into the active memtable instead")
        self.generation = generation


class MemTableFailed(RuntimeError):
    """An earlier apply() failed half-way, for example out of memory; the memtable accepts no more rows.

    Its snapshots are unchanged: none holds the rows of that apply(). The rows are in the WAL, so a new claim of the
    region replays them.
    """

    def __init__(self, generation: int) -> None:
        super().__init__(
            f"memtable of generation {generation} failed in an earlier put: reopen the region to replay it"
        )
        self.generation = generation
