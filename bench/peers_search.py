"""Vector search while rows are written, beside Milvus Lite and Qdrant's local mode: latency and recall.

All three are libraries in this process, as in a program without a server. One thread puts rows at a fixed rate, another
searches, and both share the interpreter with the library's own work. Rows, queries and the measure of recall are those
of `bench.search_under_writes`. A round begins with a copy of a store that holds the first rows. The rest arrives in
puts of `PUT` rows at `rate` rows per second, or more slowly if a put takes longer than its share. Searches begin at
most `offered` times per second, one at a time, until the last row is stored; late searches are not repeated. A search
must see every row that was acknowledged before it began.

memwal: level `latest`, an IVF-PQ index, the small memtable and frequent commits of `bench.search_under_writes`, so that
flushes and commits run concurrently. Milvus Lite: HNSW, strong consistency, a memtable of the same bytes. Qdrant's
local mode has no index and compares every row; it cannot search during a write, so searches and writes take turns.

Durability when a put returns, by sources and system-call traces: memwal's rows are synced. Milvus Lite syncs its log
when it closes it, not after each write. Qdrant's local mode keeps points in SQLite, which syncs for each point.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

import memwal
from bench import peers_fetch
from bench.benchmark import Benchmark, Contender, Parameter, Sample, Side, Values, Watch
from bench.digest import rows_digest
from bench.mixtures import Vectors, column, mixed, queries
from bench.runbooks import SCHEMA, K
from bench.search_under_writes import Searched, recall
from bench.source_data import VECTOR_WIDTH

PUT = 50
_LOADED_AT_ONCE = 1_000
_LONGEST = 300.0
_MEMTABLE_ROWS = 750
_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "memtable": {"rows_max": _MEMTABLE_ROWS},
    "commit": {"interval": "5s"},
}
_MEMTABLE_BYTES = _MEMTABLE_ROWS * (VECTOR_WIDTH * 4 + 8)


class Store(Protocol):
    """An open table of ids and vectors.

    Thread safety. `put` and `search` each from one thread of its own.
    """

    def put(self, first: int, vectors: Vectors) -> None:
        """Put rows with consecutive ids, beginning with `first`."""

    def search(self, query: Vectors) -> list[int]:
        """Return the ids of the K nearest rows."""

    def rows(self, count: int) -> pa.Table:
        """Return all `count` rows."""

    def close(self) -> None:
        """Close the store without losing rows."""


class Memwal:
    """An embedded table of memwal."""

    def __init__(self, at: Path) -> None:
        self._table = memwal.open(
            at / "table.lance", schema=SCHEMA, key="id", indexes={"embedding": "ivf_pq"}, settings=_SETTINGS
        )

    def put(self, first: int, vectors: Vectors) -> None:
        """Put durably."""
        ids = pa.array(np.arange(first, first + len(vectors)))
        self._table.put(pa.table([ids, column(vectors)], schema=SCHEMA))

    def search(self, query: Vectors) -> list[int]:
        """Search at level `latest`."""
        found: list[int] = self._table.search("embedding", query, k=K, columns=["id"])["id"].to_pylist()
        return found

    def rows(self, count: int) -> pa.Table:  # noqa: ARG002 - a scan has no limit
        """Scan all rows."""
        return self._table.scan().read_all()

    def close(self) -> None:
        """Flush, commit and close; rounds begin with a committed store."""
        self._table.flush()
        self._table.commit()
        self._table.close()


class MilvusLite:
    """A collection with HNSW, through `MilvusClient` and the server that it starts in this process."""

    def __init__(self, at: Path) -> None:
        # Milvus Lite reads the variable at its import only.
        os.environ.setdefault("MILVUS_LITE_MEMTABLE_MEMORY_LIMIT_BYTES", str(_MEMTABLE_BYTES))
        peers_fetch.importable()
        pymilvus = import_module("pymilvus")
        self._path = str(at / "milvus.db")
        self._client = pymilvus.MilvusClient(self._path)
        if not self._client.has_collection("rows"):
            schema = self._client.create_schema(auto_id=False)
            schema.add_field("id", pymilvus.DataType.INT64, is_primary=True)
            schema.add_field("embedding", pymilvus.DataType.FLOAT_VECTOR, dim=VECTOR_WIDTH)
            index = self._client.prepare_index_params()
            index.add_index("embedding", index_type="HNSW", metric_type="L2", params={})
            self._client.create_collection("rows", schema=schema, index_params=index, consistency_level="Strong")
        self._client.load_collection("rows")

    def put(self, first: int, vectors: Vectors) -> None:
        """Upsert rows."""
        self._client.upsert("rows", [{"id": first + n, "embedding": each} for n, each in enumerate(vectors)])

    def search(self, query: Vectors) -> list[int]:
        """Search, returning ids only."""
        (hits,) = self._client.search("rows", data=[query], limit=K, anns_field="embedding", output_fields=["id"])
        return [hit["id"] for hit in hits]

    def rows(self, count: int) -> pa.Table:
        """Query by ranges of ids, because the size of an answer is limited."""
        found: list[dict[str, Any]] = []
        for first in range(0, count, _LOADED_AT_ONCE):
            part = f"id >= {first} and id < {first + _LOADED_AT_ONCE}"
            found += self._client.query("rows", filter=part, output_fields=["id", "embedding"], limit=_LOADED_AT_ONCE)
        return _table([each["id"] for each in found], [each["embedding"] for each in found])

    def close(self) -> None:
        """Close the client and its server."""
        self._client.flush("rows")
        self._client.close()
        import_module("milvus_lite.server_manager").server_manager_instance.release_server(self._path)


class QdrantLocal:
    """A collection in Qdrant's local mode.

    A lock separates searches and upserts: a search during an upsert fails, because rows are counted and masked at
    different times (`ValueError: operands could not be broadcast together`), and once crashed the process.
    """

    def __init__(self, at: Path) -> None:
        peers_fetch.importable()
        self._lock = threading.Lock()
        qdrant = import_module("qdrant_client")
        self._models = qdrant.models
        self._client = qdrant.QdrantClient(path=str(at / "qdrant"))
        if not self._client.collection_exists("rows"):
            vectors = self._models.VectorParams(size=VECTOR_WIDTH, distance=self._models.Distance.EUCLID)
            self._client.create_collection("rows", vectors_config=vectors)

    def put(self, first: int, vectors: Vectors) -> None:
        """Upsert rows."""
        points = self._models.Batch(ids=list(range(first, first + len(vectors))), vectors=vectors.tolist())
        with self._lock:
            self._client.upsert("rows", points=points)

    def search(self, query: Vectors) -> list[int]:
        """Search, returning ids only."""
        with self._lock:
            found = self._client.query_points("rows", query=query, limit=K, with_payload=False)
        return [each.id for each in found.points]

    def rows(self, count: int) -> pa.Table:
        """Return all rows by one scroll."""
        found, _ = self._client.scroll("rows", limit=count, with_vectors=True, with_payload=False)
        return _table([each.id for each in found], [each.vector for each in found])

    def close(self) -> None:
        """Release the files."""
        self._client.close()


def _table(ids: Sequence[int], vectors: Sequence[Sequence[float]]) -> pa.Table:
    return pa.table([pa.array(ids), column(np.asarray(vectors, np.float32))], schema=SCHEMA)


class Acked:
    """Put the rows from `done` on at a fixed rate, in a thread.

    Thread safety. `done` from any thread; everything else from one thread.
    """

    def __init__(self, store: Store, vectors: Vectors, done: int, rate: int) -> None:
        self.done, self.seconds = done, 0.0
        self._store, self._vectors, self._rate = store, vectors, rate
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        began, first = time.monotonic(), self.done
        try:
            while self.done < len(self._vectors):
                time.sleep(max(0.0, began + (self.done - first) / self._rate - time.monotonic()))
                some = self._vectors[self.done : self.done + PUT]
                self._store.put(self.done, some)
                self.done += len(some)
        except BaseException as error:  # noqa: BLE001 - raised by the thread that waits
            self._error = error
        self.seconds = time.monotonic() - began

    @property
    def running(self) -> bool:
        """Return whether rows remain to be put."""
        return self._thread.is_alive()

    def wait(self) -> None:
        """Return when the thread has ended. Raises: the error of a put."""
        self._thread.join()
        if self._error is not None:
            raise self._error


class UnderWrites(Contender):
    """Search one store while rows are written."""

    def __init__(
        self, name: str, side: Side, store: Callable[[Path], Store], values: Values, settings: Mapping[str, Any]
    ) -> None:
        super().__init__(name, side, settings)
        self._store, self._values = store, values

    def prepare(self, at: Path) -> None:
        """Fill the store with the first rows."""
        self._at = at
        self._vectors, self._asked = mixed(self._values["rows"], 0), queries(1_000)
        store = self._store(at)
        for first in range(0, self._values["loaded"], _LOADED_AT_ONCE):
            store.put(first, self._vectors[first : min(first + _LOADED_AT_ONCE, self._values["loaded"])])
        store.close()

    def round(self, at: Path, watch: Watch) -> Sample:
        """Search until the last row is stored."""
        shutil.copytree(self._at, at, dirs_exist_ok=True)
        store = self._store(at)
        try:
            store.search(self._asked[0])
            writer = Acked(store, self._vectors, self._values["loaded"], self._values["rate"])
            with watch.timed():
                searches = self._searches(store, writer)
            writer.wait()
            found = rows_digest(store.rows(len(self._vectors)), ["id"])
        finally:
            store.close()
        measures = {
            "recall": recall(self._vectors, self._asked, searches),
            "p99_ms": float(np.quantile([each.ended - each.began for each in searches], 0.99)) * 1e3,
            "rows_per_second": (len(self._vectors) - self._values["loaded"]) / writer.seconds,
        }
        latencies = np.asarray([each.ended - each.began for each in searches])
        return Sample(latencies, watch.seconds, len(searches), found, measures)

    def _searches(self, store: Store, writer: Acked) -> list[Searched]:
        found: list[Searched] = []
        due, deadline = time.monotonic(), time.monotonic() + _LONGEST
        while writer.running or not found:
            time.sleep(max(0.0, due - time.monotonic()))
            query, acked, began = len(found) % len(self._asked), writer.done, time.monotonic()
            if began > deadline:
                raise TimeoutError(f"{self.name}: the rows are not in after {_LONGEST:g} s")
            ids = store.search(self._asked[query])
            found.append(Searched(query, due, began, time.monotonic(), acked, tuple(ids)))
            due = began + 1 / self._values["offered"]
        return found


def _contenders(values: Values) -> list[Contender]:
    ours = {**_SETTINGS, "synced": True} | {"index": "ivf_pq", "level": "latest"}
    milvus = {"index": "HNSW", "memtable_bytes": _MEMTABLE_BYTES, "synced": "when its log is closed"}
    return [
        UnderWrites("memwal, latest", "memwal", Memwal, values, ours),
        UnderWrites("Milvus Lite, HNSW", "peer", MilvusLite, values, milvus),
        UnderWrites("Qdrant, local mode", "peer", QdrantLocal, values, {"index": None, "synced": "each row"}),
    ]


BENCHMARKS = (
    Benchmark(
        "search",
        "Vector search, k = 10, while 500 rows a second come in",
        "p50_ms",
        {
            "rows": Parameter(160, 8_000, "rows in the end, 384-d"),
            "loaded": Parameter(110, 5_000, "of them there before"),
            "rate": Parameter(500, 500, "rows a second"),
            "offered": Parameter(20, 20, "searches a second at the most"),
        },
        _contenders,
    ),
)
