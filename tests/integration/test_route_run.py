"""`memwal run` with [route]: rows of one source go to many tables, also while daemons are killed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import lance
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import memwal
from tests.conftest import Cli, Start, toml
from tests.integration.test_fleet import FleetProcesses
from tests.kafka_server import KafkaServer, Record

MANY, RECORDS = 40, 12_000
COLUMNS = {"id": "int64", "tenant": "string", "v": "int64"}
SCHEMA = pa.schema([("id", pa.int64()), ("tenant", pa.string()), ("v", pa.int64())])

CONFIG = """
[fleet]
prefix = "{at}/tables"
[table]
key = ["id"]
columns = {{ id = "int64", tenant = "string", v = "int64" }}
[regions]
count = 1
[source]
format = "parquet"
path = "{at}/in"
[dlq]
mode = "table"
max_bad_percent = 100
[route]
table = "{by}"
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Write a configuration without endpoints, and two files for it."""
    (tmp_path / "tables").mkdir()
    (tmp_path / "in").mkdir()
    for number in range(2):
        ids = range(number * 50, number * 50 + 50)
        rows = [[*ids, 1000 + number], [*(f"t{id % 5}" for id in ids), None], [*ids, 0]]
        pq.write_table(pa.table(rows, schema=SCHEMA), tmp_path / "in" / f"{number}.parquet")
    path = tmp_path / "route.toml"
    path.write_text(CONFIG.format(at=tmp_path, by="concat('of_', tenant)"))
    return path


def test_a_run_creates_the_tables_and_commits_them(config: Path, tmp_path: Path, cli: Cli) -> None:
    ran = cli("run", config, "--once", env={"MEMWAL__SINK__HTTP_PORT": "0"})
    assert (ran.code, ran.error_lines) == (0, [])
    found = {at.stem: lance.dataset(at).to_table() for at in (tmp_path / "tables").iterdir()}
    ids = {name: sorted(rows["id"].to_pylist()) for name, rows in found.items()}
    assert ids == {f"of_t{tenant}": list(range(tenant, 100, 5)) for tenant in range(5)}
    assert "100 in 2 micro-batches" in ran.out
    listed = json.loads(cli("dlq", "list", config, "--format", "json").out)
    assert [(each["stage"], each["letters"]) for each in listed["groups"]] == [("route", 2)]
    again = cli("run", config, "--once")
    assert (again.code, again.out.count("0: the source holds nothing new")) == (0, 1)
    assert cli("config", "check", config).code == 0


def test_two_pipelines_write_into_one_fleet(config: Path, tmp_path: Path, cli: Cli) -> None:
    text = config.read_text().replace("[route]", "[pipelines.first.route]")
    second = f'[pipelines.second.route]\ntable = "tenant"\n[pipelines.second.sink]\ncheckpoint = "{tmp_path}/second"\n'
    config.write_text(text + second)
    ran = cli("run", config, "--once")
    assert (ran.code, ran.error_lines) == (0, [])
    counts = {at.stem: lance.dataset(at).count_rows() for at in (tmp_path / "tables").iterdir()}
    assert counts == {f"{prefix}t{tenant}": 20 for prefix in ("", "of_") for tenant in range(5)}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("concat('of_', tenant)", "nope(tenant)"),
        ("concat('of_', tenant)", "nobody"),
        ("[fleet]\nprefix", "[sink]\ncheckpoint"),
        ('key = ["id"]', 'key = ["nobody"]'),
        ("/tables", "/nowhere"),
        ('"int64" }', '"int65" }'),
    ],
)
def test_bad_input_of_a_run(config: Path, cli: Cli, tmp_path: Path, old: str, new: str) -> None:
    text = config.read_text().replace(old, new)
    config.write_text(
        text.replace('[dlq]\nmode = "table"\nmax_bad_percent = 100\n', "") if "[dlq]\nuri" in new else text
    )
    ran = cli("run", config, "--once")
    assert (ran.code, len(ran.error_lines)) == (2, 1), ran.error_lines
    assert not list((tmp_path / "tables").iterdir())


def test_a_topic_of_many_tenants_reaches_each_table_once_while_daemons_are_killed(
    kafka: KafkaServer, kafka_connector: dict[str, str], start: Start, tmp_path: Path
) -> None:
    """The tables keep duplicates, so that a row that is applied twice is seen."""
    table = {"append_only": True, "columns": COLUMNS}
    fleet = FleetProcesses(start, tmp_path, table=table, regions={"count": 2})
    kafka.create_topic(tmp_path.name, partitions=4)
    records = [{"id": id, "tenant": f"t{id % MANY}", "v": id} for id in range(RECORDS)]
    kafka.produce(tmp_path.name, [Record(json.dumps(each).encode()) for each in records])
    source = {"format": "kafka", "brokers": kafka.brokers, "topics": [tmp_path.name], "spark": kafka_connector}
    sections = {
        "table": table,
        "fleet": {"prefix": str(fleet.prefix)},
        "daemon": {"endpoints": fleet.endpoints},
        "source": {**source, "max_offsets_per_trigger": RECORDS // 12},
        "route": {"table": "concat('of_', tenant)"},
    }
    config = tmp_path / "kafka.toml"
    config.write_text(toml(sections))
    running = start([sys.executable, "-m", "memwal.ingest.cli.app", "run", str(config), "--once"])
    for number, killed in enumerate(fleet.endpoints):
        running.line_with(f"micro-batch {3 + 4 * number}:")
        fleet.running[killed].process.kill()
        fleet.running[killed].wait()
        fleet.begin(killed)
    assert running.wait() == 0, running.log[-5:]
    for tenant in range(MANY):
        with fleet.connect(f"of_t{tenant}") as table:
            found = table.scan(["id"]).read_all()["id"].to_pylist()
        assert sorted(found) == list(range(tenant, RECORDS, MANY))
    assert len(memwal.tables(fleet.endpoints)) == MANY
