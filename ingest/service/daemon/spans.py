"""The spans of a daemon: one for each call that writes, reads or changes the table, within its client's trace."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import pyarrow as pa

from memwal.ingest import tracing
from memwal.ingest.engine.api.reads import READS

ACTIONS = frozenset(
    {
        *(name for name, kind in READS.items() if kind.counts),
        *("flush", "commit", "create_index", "drop_index", "release", "record"),
    }
)
"""Actions with a span. The others are checks by peers, several a second."""


def span_of_write(request: Mapping[str, Any], rows: pa.Table) -> AbstractContextManager[Any]:
    """Return the span of a put or delete. For a stream from Spark it has the region and the batch_id."""
    if not tracing.on:
        return tracing.OFF
    name = "delete" if request["op"] == "delete" or request.get("delete") else "put"
    told: dict[str, Any] = {"rows": rows.num_rows, "bytes": rows.nbytes}
    if request["op"] == "put":
        told |= {"region": request["region"], "batch_id": request["sequence"]}
    return tracing.span(f"memwal.daemon.{name}", "SERVER", **told)


def span_of_read(name: str) -> AbstractContextManager[Any]:
    """Return the span of a read. For a streaming read it ends where the rows begin."""
    return tracing.span(f"memwal.daemon.{name}", "SERVER") if tracing.on else tracing.OFF


def span_of_action(name: str) -> AbstractContextManager[Any]:
    """Return the span of an action; none for actions without one."""
    return tracing.span(f"memwal.daemon.{name}", "SERVER") if tracing.on and name in ACTIONS else tracing.OFF


def told_rows(span: Any, answer: Any) -> None:
    """Add the rows and bytes of an answer that is not streamed."""
    if span is not None and isinstance(answer, pa.Table):
        tracing.note(span, rows=answer.num_rows, bytes=answer.nbytes)
