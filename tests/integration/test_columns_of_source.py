"""A table whose columns are not configured gets those of the source, if it names types: Parquet files, Avro values."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import lance
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.conftest import Cli
from tests.schema_registry import SchemaRegistry

ROWS = pa.table(
    {
        "id": pa.array([1, 2], pa.int32()),
        "title": ["Harbor lights", None],
        "made": pa.array([0, 1], pa.timestamp("ms")),
        "vector": pa.array([[1.0, 0.0], [0.0, 1.0]], pa.list_(pa.float32(), 2)),
    }
)
COMMANDS = {
    "run": ("run", "--once"),
    "run without Spark": ("run", "--once"),
    "load": ("load",),
    "init": ("init",),
}


@pytest.fixture
def configured(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a configuration without columns, whose source is the directory `new`."""

    def write(engine: str = "spark", **table: object) -> Path:
        settings = {"uri": str(tmp_path / "books.lance"), "key": ["id"]} | table
        lines = [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
        source = [f"path = {json.dumps(str(tmp_path / 'new'))}", f'engine = "{engine}"']
        config = tmp_path / "books.toml"
        config.write_text("\n".join(["[table]", *lines, "[source]", *source]) + "\n")
        return config

    (tmp_path / "new").mkdir()
    return write


@pytest.mark.parametrize("command", COMMANDS)
def test_the_columns_of_parquet_files(command: str, cli: Cli, configured: Callable[..., Path], tmp_path: Path) -> None:
    pq.write_table(ROWS, tmp_path / "new/1.parquet")
    config = configured("local" if command == "run without Spark" else "spark")
    name, *options = COMMANDS[command]
    files = [tmp_path / "new/1.parquet"] if name == "load" else []
    ran = cli(name, config, *files, *options, cwd=tmp_path)
    assert ran.code == 0, ran.err
    schema = lance.dataset(tmp_path / "books.lance").schema
    for field in ROWS.schema:
        assert schema.field(field.name).type == field.type
        assert schema.field(field.name).nullable == (field.name != "id")
    if command == "run without Spark":  # the columns of an existing table are not read from files again
        files_put = tmp_path / "new/1.parquet"
        files_put.write_bytes(b"damaged")
        assert cli(name, config, *options, cwd=tmp_path).code == 0
    if name != "init":
        found = lance.dataset(tmp_path / "books.lance").to_table(columns=ROWS.column_names).sort_by("id")
        assert found.to_pylist() == ROWS.to_pylist()


ORDER = {
    "type": "record",
    "name": "Order",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "note", "type": ["null", "string"]},
        {"name": "made", "type": {"type": "long", "logicalType": "timestamp-micros"}},
    ],
}


def of_topic(config: Path, schema: str) -> None:
    """Write a configuration of a topic of Avro values; `schema`: the setting that names their schema."""
    source = f'format = "kafka"\nbrokers = "127.0.0.1:1"\ntopics = ["orders"]\nvalue_format = "avro"\n{schema}\n'
    config.write_text(f'[table]\nuri = "{config.parent}/orders.lance"\nkey = ["id"]\n[source]\n{source}')


@pytest.mark.parametrize("place", ["registry", "configuration"])
def test_the_columns_of_avro_values(place: str, cli: Cli, tmp_path: Path) -> None:
    config = tmp_path / "orders.toml"
    with SchemaRegistry.started() as registry:
        registry.register(ORDER)
        in_registry = place == "registry"
        of_topic(config, f"registry = '{registry.url}'" if in_registry else f"avro_schema = '{json.dumps(ORDER)}'")
        ran = cli("init", config)
    assert ran.code == 0, ran.err
    schema = lance.dataset(tmp_path / "orders.lance").schema
    kinds = {"id": pa.int64(), "note": pa.string(), "made": pa.timestamp("us", "UTC")}
    assert {name: schema.field(name).type for name in kinds} == kinds
    assert cli("init", config).code == 0, "an existing table needs no registry"


def test_a_topic_without_a_schema(cli: Cli, tmp_path: Path) -> None:
    config = tmp_path / "orders.toml"
    with SchemaRegistry.started() as registry:
        of_topic(config, f"registry = '{registry.url}'")
        ran = cli("init", config)
    assert (ran.code, "give its columns" in ran.err) == (2, True)


def test_configured_columns_count(cli: Cli, configured: Callable[..., Path], tmp_path: Path) -> None:
    pq.write_table(ROWS, tmp_path / "new/1.parquet")
    config = configured(columns={})
    config.write_text(config.read_text().replace("columns = {}", 'columns = { id = "int64", title = "string" }'))
    assert cli("init", config).code == 0
    assert lance.dataset(tmp_path / "books.lance").schema.names[:2] == ["id", "title"]
    assert lance.dataset(tmp_path / "books.lance").schema.field("id").type == pa.int64()


@pytest.mark.parametrize("files", ["no file", "text"])
def test_columns_that_nothing_names(files: str, cli: Cli, configured: Callable[..., Path], tmp_path: Path) -> None:
    config = configured()
    if files == "text":
        (tmp_path / "new/1.csv").write_text("id\n1\n")
    ran = cli("load", config, tmp_path / "new/1.csv") if files == "text" else cli("run", config, "--once")
    assert ran.code == 2
    assert "give its columns" in ran.err or "write its columns" in ran.err
    assert not (tmp_path / "books.lance").exists()
