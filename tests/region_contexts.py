"""The context that opens one region of a small table, for tests that need a region without a table."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from memwal import wal
from memwal.flush import SstFormat
from memwal.ingest.engine.region.context import Limits, RegionContext
from memwal.memtable import row_schema
from tests.support.clock import FakeClock

LIMITS = Limits(
    entry_size_max=1 << 20,
    linger_max=0.1,
    size_max=1 << 30,
    rows_max=10,
    age_max=60.0,
    unflushed_max=1 << 30,
    retry_delay=0.1,
)
"""Only the limits of rows and of their lingering time can be reached."""


def region_context(store: wal.ObjectStore, base: pa.Schema, **more: Any) -> RegionContext:
    """Return the context of a region with the columns `base` and the key `id`; `more`: fields that replace the
    defaults."""
    schema = row_schema(base, ("id",))
    usual: dict[str, Any] = {
        "codec": wal.LanceCodec(schema),
        "clock": FakeClock(),
        "ids": wal.SystemIds(),
        "indexes": (),
        "limits": LIMITS,
        "sst_format": SstFormat(("id",), "2.1"),
        "wal_options": wal.WalOptions(0.5, 1.0),
    }
    return RegionContext(store=store, schema=schema, key=("id",), **usual | more)
