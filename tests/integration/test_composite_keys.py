"""A key of several columns whose first column is equal in all rows: the rows are spread over the regions."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from typing import Any

import pyarrow as pa

import memwal
from memwal import wal
from memwal.flush import BaseTable, resize
from memwal.flush.verification.runner import verify_table
from memwal.wal import SystemClock, SystemIds
from tests.backups import backed_up, restored
from tests.ways import entered

SCHEMA = pa.schema(
    [
        pa.field("year", pa.int32(), nullable=False),
        pa.field("carrier", pa.string(), nullable=False),
        pa.field("flight", pa.int64(), nullable=False),
        pa.field("delay", pa.int32()),
    ]
)
KEY = ("year", "carrier", "flight")
REGIONS = 3
QUIET = {"commit": {"interval": "0s"}}


def flights(numbers: range, delay: int = 0) -> pa.Table:
    columns = [[2013] * len(numbers), [f"C{n % 5}" for n in numbers], list(numbers), [delay] * len(numbers)]
    return pa.table([pa.array(each, field.type) for each, field in zip(columns, SCHEMA, strict=True)], schema=SCHEMA)


def keys(numbers: range) -> list[tuple[Any, ...]]:
    return [tuple(row[name] for name in KEY) for row in flights(numbers).to_pylist()]


def opened(uri: str, **more: Any) -> Any:
    return memwal.open(uri, settings=QUIET, **more)


def delays(table: Any, **more: Any) -> dict[int, int]:
    rows = table.scan(["flight", "delay"], **more).read_all()
    return dict(zip(rows["flight"].to_pylist(), rows["delay"].to_pylist(), strict=True))


def test_rows_spread_and_are_found_changed_deleted_and_resized(uri: str) -> None:
    with opened(uri, schema=SCHEMA, key=KEY, regions=REGIONS) as table:
        table.put(flights(range(600)))
        assert min(region["memtable_rows"] for region in table.status()["regions"]) > 120
        table.flush()
        table.commit()
        table.put(flights(range(100, 200), delay=5))
        table.delete(keys(range(50)))
        expected = {n: 5 if 100 <= n < 200 else 0 for n in range(50, 600)}
        assert delays(table) == expected
        assert table.get(keys(range(40, 60)))["flight"].to_pylist() == list(range(50, 60))
        assert delays(table.only(list(table.base.regions[:2]))).items() <= expected.items()
        table.flush()
        table.commit()
        assert delays(table, level="committed") == expected
    store = wal.open_store(uri)
    for buckets in (5, 2):
        resize(uri, {}, store, buckets, clock=SystemClock(), ids=SystemIds(), at_once=1)
        with opened(uri) as table:
            table.put(flights(range(50, 60), delay=buckets))
            expected |= dict.fromkeys(range(50, 60), buckets)
            assert delays(table) == expected
            table.flush()
            table.commit()
        assert verify_table(store, uri, deep=True).findings == ()
    assert BaseTable.open(uri).hashed == KEY
    backed_up(uri, f"{uri}.backup")
    restored(f"{uri}.backup", f"{uri}.restored")
    with opened(f"{uri}.restored") as again:
        assert again.base.hashed == KEY
        again.put(flights(range(50, 60), delay=9))
        assert delays(again) == expected | dict.fromkeys(range(50, 60), 9)


def test_a_table_of_an_older_version_keeps_its_routing(uri: str) -> None:
    base = BaseTable.create(uri, SCHEMA, KEY, REGIONS, [])
    base.dataset.update_schema_metadata({"memwal:routed_by": None, "memwal:storage": None})
    with opened(uri) as table:
        table.put(flights(range(100)))
        assert sorted(region["memtable_rows"] for region in table.status()["regions"]) == [0, 0, 100]
    with opened(uri) as table:
        table.put(flights(range(50), delay=1))
        table.flush()
        table.commit()
        assert delays(table, level="committed") == {n: int(n < 50) for n in range(100)}
    assert BaseTable.open(uri).hashed == KEY[:1]
    assert verify_table(wal.open_store(uri), uri, deep=True).findings == ()


def test_clients_and_processes_route_as_the_table_does(uri: str, ends: ExitStack) -> None:
    with opened(uri, schema=SCHEMA, key=KEY, regions=REGIONS) as table:
        client = entered("flight", table, ends)
        client.put(flights(range(300)))
        client.delete(keys(range(10)))
        assert client.get(keys(range(5, 15)))["flight"].to_pylist() == list(range(10, 15))
        assert delays(table) == dict.fromkeys(range(10, 300), 0)
        buckets = table.base.route(flights(range(300)))
        ends.close()
    program = (
        "import sys; from memwal.flush import BaseTable; from tests.integration.test_composite_keys import flights\n"
        "print(BaseTable.open(sys.argv[1]).route(flights(range(300))).tolist())"
    )
    ran = subprocess.run([sys.executable, "-c", program, uri], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == str(buckets.tolist())
