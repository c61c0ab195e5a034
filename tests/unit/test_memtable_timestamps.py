"""Timestamps in filters have microseconds, as in Lance; those that would lose digits are rejected."""

import lance
import numpy as np
import pyarrow as pa
import pytest

from memwal.memtable import InvalidRows
from memwal.memtable.filter.translation import checked, translate
from tests.messages import raises
from tests.support.snapshots import snapshot

STAMPS = [0, 1, 999, 1_000, 1_001, 1_582_934_523_004_000_001, -1, None]
SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        ("t", pa.timestamp("ns")),
        ("u", pa.timestamp("us")),
        ("ms", pa.timestamp("ms")),
        ("z", pa.timestamp("ns", "UTC")),
        ("clock", pa.time64("ns")),
        ("s", pa.string()),
    ]
)
FINE, COARSE = "1970-01-01 00:00:00.000000001", "1970-01-01 00:00:00.000001"

SAME = f"""
t = timestamp '{COARSE}' | t >= timestamp '{COARSE}000' | t = cast('{COARSE}' as timestamp) | t < '{COARSE}'::timestamp
t = timestamp(9) '{FINE}' | t > timestamp(6) '{FINE}' | t = timestamp(3) '{FINE}' | t = cast('{FINE}' as timestamp(9))
t = cast('{FINE}' as timestamp(6)) | t in (timestamp '1970-01-01', timestamp '{COARSE}') | u > timestamp '{COARSE}'
t between timestamp '1970-01-01' and timestamp '{COARSE}' | ms = timestamp '{COARSE}' | z <= timestamp '{COARSE}'
u < timestamp '2300-01-01' | ms > timestamp '0001-01-01' | t = to_timestamp_nanos('{FINE}')
z > to_timestamp_nanos('{FINE}') | t::timestamp = timestamp '{COARSE}'
t >= arrow_cast('{FINE}', 'Timestamp(Nanosecond, None)') | t in (to_timestamp_nanos('{FINE}'), to_timestamp('{FINE}'))
cast(s as timestamp) = timestamp '1970-01-01' | cast(id as timestamp) = timestamp '{COARSE}'
cast(t as timestamp) > timestamp '1970-01-01' | date_trunc('second', t) = timestamp '1970-01-01' | t < now()
date_part('nanosecond', timestamp '{FINE}') = 1 | t = coalesce(t, timestamp '{FINE}')
cast(timestamp '{COARSE}' as bigint) = 1 | clock = arrow_cast('00:00:00.000000001', 'Time64(Nanosecond)')
t between timestamp '1970-01-01' and to_timestamp('{COARSE}') | t = TIMESTAMP "{COARSE}"
t = try_cast('{COARSE}' as timestamp)
"""

REFUSED = f"""
t = timestamp '{FINE}' | '{FINE}'::timestamp = t | t >= cast('{FINE}' as timestamp)
t = try_cast('{FINE}' as TimeStamp) | s = 'a' or t in (timestamp '{FINE}')
t = timestamp "{FINE}" | t = cast(('{FINE}') as timestamp) | u != timestamp '{FINE}'
t between timestamp '1970-01-01' and timestamp '{FINE}' | t in (timestamp '1970-01-01', to_timestamp_nanos('{FINE}'))
t between timestamp '1970-01-01' and to_timestamp('{FINE}') | t in (null, to_timestamp_micros(0), timestamp(9) '{FINE}')
t not between timestamp(3) '1970-01-01' and timestamp '{COARSE}' and t is null
t in (timestamp '{COARSE}', arrow_cast('{FINE}', 'Timestamp(Nanosecond, None)')) | t < timestamp /* - */ '{FINE}0'
"""


def filters(text: str) -> list[str]:
    return [filter.strip() for line in text.strip().splitlines() for filter in line.split(" | ")]


def rows() -> pa.Table:
    def stamps(unit: str, nanoseconds: int, zone: str | None = None) -> pa.Array:
        return pa.array([stamp and stamp // nanoseconds for stamp in STAMPS], pa.timestamp(unit, zone))

    clock = pa.array([stamp and abs(stamp) % 1_000_000 for stamp in STAMPS], pa.time64("ns"))
    columns = [stamps("ns", 1), stamps("us", 1_000), stamps("ms", 1_000_000), stamps("ns", 1, "UTC"), clock]
    return pa.table([pa.array(range(len(STAMPS))), *columns, pa.array([FINE] * len(STAMPS))], schema=SCHEMA)


@pytest.fixture(scope="module")
def dataset() -> lance.LanceDataset:
    return lance.write_dataset(rows(), "memory://")


@pytest.mark.parametrize("filter", filters(SAME))
def test_the_same_rows_as_lance(dataset: lance.LanceDataset, filter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = dataset.to_table(filter=filter)["id"].to_pylist()
    plain = snapshot(rows())
    assert np.flatnonzero(plain.where(filter, plain.live())).tolist() == wanted
    monkeypatch.setattr("memwal.memtable.filter.scalar_index.LOOKS", 0)
    monkeypatch.setattr("memwal.memtable.snapshot.WORTH", 1)
    monkeypatch.setattr("memwal.memtable.snapshot.SCANNED", 0)
    indexed = snapshot(rows(), "t", "u", "ms")
    assert np.flatnonzero(indexed.where(filter, indexed.live())).tolist() == wanted


@pytest.mark.parametrize("filter", filters(REFUSED))
def test_a_timestamp_that_would_be_cut_short_is_refused(filter: str) -> None:
    table = snapshot(rows())
    with raises(InvalidRows):
        table.where(filter, table.live())


@pytest.mark.parametrize("filter", [f"s = '{FINE}'", f"s = 'timestamp {FINE}'", f"s in ('{FINE}', 'a') and t < now()"])
def test_a_text_that_is_no_timestamp_is_not_refused(filter: str) -> None:
    assert checked(filter, SCHEMA.names)


def test_the_unit_is_written_out_but_in_functions() -> None:
    assert translate("u > timestamp '2020-01-01'", SCHEMA) == "\"u\" > timestamp(6) '2020-01-01'"
    assert (
        translate("coalesce(u, timestamp '2020-01-01') = u", SCHEMA) == 'coalesce("u", timestamp \'2020-01-01\') = "u"'
    )
    named = pa.schema([*SCHEMA, ("timestamp", pa.int64())])
    assert translate("timestamp = 1 and timestamp in (1, 2)", named) == '"timestamp" = 1 and "timestamp" in (1, 2)'
