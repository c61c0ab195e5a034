"""The errors a memtable raises.

Each message is one line that names what is wrong (column, row, numbers) and how to mend it.
"""


class InvalidRows(ValueError):
    """The request is wrong: rows, keys, a vector, a predicate or an index definition.

    Raised before anything changed, so the caller may correct the request and try again.

    Attributes.
        column: name of the column at fault, None where no single column is.
        row: row number in the caller's rows, counted from 0; None where no single row is.
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
    """An apply() broke off half-way, for example for want of memory; the memtable takes no more rows.

    Its snapshots stay as they were: none holds the rows of that apply(). The rows are in the WAL, so a new claim of the
    region replays them.
    """

    def __init__(self, generation: int) -> None:
        super().__init__(
            f"memtable of generation {generation} failed in an earlier put: reopen the region to replay it"
        )
        self.generation = generation
