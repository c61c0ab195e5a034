"""Validate callers' Arrow data before any other use: text that is not UTF-8, offsets outside their buffers.

Arrow checks neither by itself. A cast of an invalid array reads memory outside its buffers, and an invalid value would
be durable before the first reader fails on it. Therefore nothing reads values before validation: the daemon validates
data from the wire (`rpc.wire`), a client the data that it sends, and a region the rows of a whole group of puts.
(Arrow validates without the GIL: one validation per put costs a quarter of the throughput of 32 callers.)
"""

from __future__ import annotations

from bisect import bisect_left

import pyarrow as pa

from memwal.ingest.errors import Invalid


def check_encoding(rows: pa.Table | pa.RecordBatch) -> None:
    """Raise Invalid with the first column and row whose value is not valid. 10 MB of text take about 1 ms."""
    try:
        rows.validate(full=True)
    except pa.ArrowInvalid as error:
        whole = pa.Table.from_batches([rows]) if isinstance(rows, pa.RecordBatch) else rows
        for name, column in zip(whole.column_names, whole.columns, strict=True):
            if reason := _fault(column):
                row = bisect_left(range(len(column)), True, key=lambda row: bool(_fault(column.slice(0, row + 1))))
                text = f"column '{name:.200}': row {row}: {reason:.300}; correct the value, text must be UTF-8"
                raise Invalid(text) from None
        raise Invalid(f"rows are not valid Arrow data: {str(error).splitlines()[0]:.300}; correct them") from None


def _fault(column: pa.ChunkedArray) -> str:
    """Return Arrow's reason why a column is invalid, without the place; "" if it is valid."""
    try:
        column.validate(full=True)
    except pa.ArrowInvalid as error:
        return str(error).splitlines()[0].rpartition("Invalid: ")[2].partition(" at string index")[0]
    return ""
