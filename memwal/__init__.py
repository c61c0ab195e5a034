"""memwal: streaming ingestion into Lance tables.

import memwal
table = memwal.open("packages.lance", schema=schema, key="package", indexes={"embedding": "ivf_pq"})
table.put(rows)                       # durable and queryable when it returns
table.search("embedding", vector)

In a checkout the subpackages are links to folders of the top level: `memwal.ingest` is `ingest/`, `memwal.wal` is
`wal/`, and so on.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

# Lance logs "Index __lance_mem_wal has no fields" as an error whenever it plans over a table with MemWAL; it is none.
# Its logger reads this variable once, when Lance is imported, which the modules below do.
os.environ.setdefault("LANCE_LOG", "error,lance::index=off")

from memwal.ingest.errors import Corrupted, FencedError, Internal, Invalid, MemWalError, Unavailable, UnknownOutcome

if TYPE_CHECKING:
    from memwal.ingest.engine.api.explanation import Explanation
    from memwal.ingest.engine.api.fusion import lancedb_reranker
    from memwal.ingest.engine.api.tokens import Token
    from memwal.ingest.service.client.async_table import connect_async
    from memwal.ingest.service.client.connect import connect
    from memwal.ingest.service.client.tables import tables
    from memwal.ingest.service.open import open_embedded as open
    from memwal.ingest.spark.connector.register import register_spark
    from memwal.ingest.spark.sink.foreach_batch import MemWalSink

__all__ = [
    "Corrupted",
    "Explanation",
    "FencedError",
    "Internal",
    "Invalid",
    "MemWalError",
    "MemWalSink",
    "Token",
    "Unavailable",
    "UnknownOutcome",
    "connect",
    "connect_async",
    "lancedb_reranker",
    "open",
    "register_spark",
    "tables",
]

_LAZY = {
    "open": ("memwal.ingest.service.open", "open_embedded"),
    "connect": ("memwal.ingest.service.client.connect", "connect"),
    "tables": ("memwal.ingest.service.client.tables", "tables"),
    "connect_async": ("memwal.ingest.service.client.async_table", "connect_async"),
    "MemWalSink": ("memwal.ingest.spark.sink.foreach_batch", "MemWalSink"),
    "lancedb_reranker": ("memwal.ingest.engine.api.fusion", "lancedb_reranker"),
    "register_spark": ("memwal.ingest.spark.connector.register", "register_spark"),
    "Explanation": ("memwal.ingest.engine.api.explanation", "Explanation"),
    "Token": ("memwal.ingest.engine.api.tokens", "Token"),
}

_ELSEWHERE = {
    **dict.fromkeys(("create_table", "create", "Table", "table"), 'call memwal.open(uri, data=rows, key="id")'),
    **dict.fromkeys(("read", "read_table", "load", "scan", "dataset"), "call memwal.open(uri, read_only=True)"),
    **dict.fromkeys(("sql", "query", "search"), "open a table, and call this method of the table"),
    **dict.fromkeys(("Client", "client"), 'call memwal.connect("grpc://host:port")'),
}
"""Names that people try, and what to use."""


def __getattr__(name: str) -> Any:
    """Load the heavy parts (Lance, faiss, Spark) when they are first asked for: errors and settings need none."""
    if name == "__version__":
        from importlib.metadata import version

        return version("memwal")
    if name not in _LAZY:
        from memwal.ingest.suggest import suggestion

        hint = suggestion(name, __all__, elsewhere=_ELSEWHERE) if name.isidentifier() and name[0] != "_" else ""
        raise AttributeError(f"module 'memwal' has no attribute {name!r}{hint}", name=name)
    from importlib import import_module

    module, attribute = _LAZY[name]
    return getattr(import_module(module), attribute)
