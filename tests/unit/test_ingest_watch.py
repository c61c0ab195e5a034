"""The explanation of one read: times, attempts, and the parts of several daemons."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from memwal.ingest.engine.api.explanation import ExplainedLevel, ExplainedPart, ExplainedSearch, Explanation, Watch
from memwal.ingest.engine.api.results import gathered
from tests.support.clock import FakeClock


def part(ms: float, returned: int) -> ExplainedPart:
    search = ExplainedSearch("rows", "every row", returned=returned, found=returned, ms=ms / 2)
    return ExplainedPart("t.lance", 7, ("a" * 32,), (ExplainedLevel("base", 10, searches=(search,)),), ms=ms)


def sent(ms: float, returned: int) -> dict[str, Any]:
    return Explanation("scan", "latest", returned, ms, (part(ms, returned),)).as_dict()


def test_the_callers_time_between_batches_is_not_the_reads() -> None:
    told, clock = list[Explanation](), FakeClock()
    watch = Watch("scan", "latest", told.append, clock)
    clock.advance(1.0)
    watch.add(lambda ms: part(ms, 4))
    rows = watch.ended(gathered(pa.table({"a": pa.chunked_array([[1, 2], [3, 4]])})))
    for _ in rows:
        clock.advance(60.0)
    assert [(each.rows, each.ms, each.parts[0].ms, each.network_ms) for each in told] == [(4, 1_000.0, 1_000.0, 0.0)]


def test_parts_of_daemons_are_those_of_the_last_attempt() -> None:
    told, clock = list[Explanation](), FakeClock()
    watch = Watch("search", "latest", told.append, clock)
    watch.again()
    late = watch.heard("grpc://a")
    watch.again()
    first, second, _ = watch.heard("grpc://a"), watch.heard("grpc://b"), watch.heard("grpc://silent")
    late(sent(9_000.0, 9))
    second(sent(300.0, 3))
    first(sent(100.0, 2))
    clock.advance(0.5)
    watch.ended(pa.table({"a": [1, 2, 3]}))
    (one,) = told
    assert [(each.endpoint, each.ms) for each in one.parts] == [("grpc://a", 100.0), ("grpc://b", 300.0)]
    assert (one.attempts, one.rows, one.found, one.network_ms) == (2, 3, 5, 200.0)
    assert str(one).splitlines()[0] == (
        "search at latest: 3 rows in 500.0 ms; 2 more were found and left out (offset, fusion or merging); "
        "2 attempts; 200.0 ms of it beyond the slowest daemon's own"
    )
