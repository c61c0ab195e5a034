"""The public surface: names and parameters are fixed. A change needs a reason, and a change in this file."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import tomllib
from collections.abc import Mapping
from typing import Any

import pytest
import typer.main

import memwal
from memwal.ingest.cli.app import app
from memwal.ingest.engine.table.public import Table
from memwal.ingest.service.client.async_table import AsyncTable

HOW = ["metric", "nprobes", "refine_factor", "distance_range"]
READS = {
    "get": ["keys", "columns", "level", "explain"],
    "scan": ["columns", "filter", "limit", "order_by", "offset", "level", "explain"],
    "count": ["filter", "level", "explain"],
    "facets": ["column", "filter", "level", "explain"],
    "search": ["column", "vector", "k", "filter", "columns", *HOW, "offset", "level", "explain"],
    "match": ["column", "text", "k", "filter", "columns", "offset", "level", "explain"],
    "sql": ["query", "tables", "parameters", "level"],
    "hybrid": [
        *("vector", "text", "k", "filter", "columns", "vector_column", "text_column", "weights", "candidates"),
        *("rerank", *HOW, "offset", "level", "explain"),
    ],
    "candidates": [
        *("vector", "text", "n", "filter", "columns", "vector_column", "text_column"),
        *(*HOW, "level", "explain"),
    ],
    "changes": ["since", "until", "images", "columns", "follow"],
    "changes_position": ["at"],
}
WRITES = {
    "put": ["rows", "missing", "durable", "token", "timeout"],
    "delete": ["keys", "filter", "durable", "token", "timeout"],
    "update": ["where", "values", "values_sql", "timeout"],
}
STEPS: dict[str, list[str]] = {
    "create_index": ["column", "kind", "parameters"],
    "drop_index": ["name"],
    "list_indexes": [],
    "list_versions": [],
    "list_tags": [],
    "create_tag": ["name", "version", "replace"],
    "drop_tag": ["name"],
    "flush": [],
    "commit": [],
    "close": [],
    "status": [],
}
FORMS = {
    "add": ["data", "mode"],
    "head": ["n"],
    "to_arrow": [],
    "to_pandas": [],
    "to_polars": [],
    "count_rows": ["filter"],
    "create_fts_index": ["field_names", "parameters"],
    "create_scalar_index": ["column", "index_type"],
    "list_indices": [],
    "optimize": [],
}
"""Names of LanceDB."""
OF_THE_OBJECT = {"schema", "key", "checkout", "checkout_latest"}
COMMANDS = {
    "run": {"config", "once"},
    "serve": {"config", "on-spark", "take-over"},
    "init": {"config"},
    "load": {"config", "files", "token", "format", "missing", "dry-run", "follow", "json"},
    "status": {"config", "json", "limit", "watch"},
    "tables": {"config", "format"},
    "query": {
        *("config", "key", "filter", "near", "match", "columns", "limit", "offset", "order-by", "level", "format"),
        *("metric", "nprobes", "refine-factor", "distance-range", "vertical", "explain"),
    },
    "sql": {"config", "query", "limit", "level", "format", "vertical"},
    "tail": {"config", "since", "images", "columns", "limit", "follow", "format", "vertical"},
    "delete": {"config", "key", "filter", "dry-run"},
    "flush": {"config"},
    "commit": {"config", "json"},
    "pause": {"config", "commits", "reason"},
    "resume": {"config", "commits"},
    "gc": {"config", "dry-run", "json"},
    "backup": {"config", "dest", "option", "resume", "json"},
    "restore": {"config", "backup", "option", "resume", "json"},
    "log": {"config", "limit", "diff", "keys", "json"},
    "verify": {"config", "deep", "json"},
    "inspect": {"path", "config"},
    "doctor": {"config", "json"},
    "dlq list": {"config", "stage", "limit", "format"},
    "dlq show": {"config", "id", "hex", "json"},
    "dlq replay": {"config", "id", "stage", "limit", "force"},
    "dlq purge": {"config", "older-than", "stage", "dry-run"},
    "index list": {"config", "json"},
    "index add": {"config", "column", "kind", "set"},
    "index drop": {"config", "name"},
    "regions resize": {"config", "to", "json"},
    "config new": {"config", "from"},
    "config check": {"config"},
    "config show": {"config"},
}


def parameters(function: Any) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


def commands() -> dict[str, set[str]]:
    """Return every command with its arguments and options as a user types them."""
    found: dict[str, set[str]] = {}

    def walk(group: Any, prefix: str) -> None:
        for name, command in group.commands.items():
            if hasattr(command, "commands"):
                walk(command, f"{prefix}{name} ")
            else:
                spellings = (max(each.opts, key=len).lstrip("-").lower() for each in command.params)
                found[f"{prefix}{name}"] = set(spellings) - {"help"}

    walk(typer.main.get_command(app), "")
    return found


def test_open_and_connect() -> None:
    assert parameters(memwal.open) == [
        "uri",
        "schema",
        "data",
        "key",
        "regions",
        "indexes",
        "storage_options",
        "settings",
        "read_only",
        "take_over",
    ]
    connecting = [
        "location",
        "table",
        "create",
        "token",
        "tls_ca",
        "fallback",
        "storage_options",
        "in_flight_max",
        "tls_cert",
        "tls_key",
        "sql_memory_max",
    ]
    assert parameters(memwal.connect) == connecting


def public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


def test_a_table_shows_the_public_names_and_nothing_else() -> None:
    of_one_caller = {"merge_insert", "tags", "version", "restore"}
    assert public(Table) == {*READS, *WRITES, *STEPS, *FORMS, *OF_THE_OBJECT, *of_one_caller}
    assert public(AsyncTable) == public(Table) - of_one_caller
    assert all(inspect.getdoc(getattr(Table, name)) for name in public(Table))
    assert Table.__slots__ == ("_engine",)


def test_the_asynchronous_table_has_every_method_with_its_parameters() -> None:
    """A new method needs a line in ingest/service/client/async_table.py; a new parameter needs none."""
    for name in public(AsyncTable) - OF_THE_OBJECT:
        ours, theirs = getattr(AsyncTable, name), getattr(Table, name)
        assert inspect.iscoroutinefunction(ours) or name in ("scan", "sql", "changes"), name
        assert inspect.signature(ours).parameters == inspect.signature(theirs).parameters, name
        if name not in ("close", "search"):  # close: the connections, not the table; search: no query to build
            assert inspect.getdoc(ours) == inspect.getdoc(theirs), name
            assert inspect.signature(ours) == inspect.signature(theirs), name
    ours, theirs = inspect.signature(memwal.connect_async), inspect.signature(memwal.connect)
    assert ours.parameters == theirs.parameters


@pytest.mark.parametrize(
    "name",
    [
        "memwal.ingest.engine.table.public.Table",
        "memwal.ingest.engine.table.embedded.Table",
        "memwal.ingest.service.client.remote.RemoteTable",
        "memwal.ingest.engine.table.stored.StoredTable",
    ],
)
def test_all_tables_have_the_same_methods(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    table = getattr(importlib.import_module(module), attribute)
    for method, expected in {**READS, **WRITES, **STEPS, **FORMS}.items():
        assert parameters(getattr(table, method)) == expected, method
        defaults = [each.default for each in inspect.signature(getattr(table, method)).parameters.values()]
        assert defaults == [each.default for each in inspect.signature(getattr(Table, method)).parameters.values()]
    assert inspect.signature(table.put).parameters["durable"].default is True
    assert inspect.signature(table.search).parameters["k"].default == 10
    assert inspect.signature(table.scan).parameters["level"].default == "latest"
    assert hasattr(table, "__enter__")
    assert hasattr(table, "__exit__")


def test_the_sink_takes_a_configuration_and_is_called_with_a_batch() -> None:
    assert parameters(memwal.MemWalSink)[0] in ("config", "settings")
    assert len(parameters(memwal.MemWalSink.__call__)) == 2


def test_the_source_of_spark_is_registered_in_a_session() -> None:
    assert parameters(memwal.register_spark) == ["spark"]


def test_the_kinds_of_error_and_the_token_are_public() -> None:
    for name in (
        "MemWalError",
        "Invalid",
        "Unavailable",
        "UnknownOutcome",
        "FencedError",
        "Corrupted",
        "Internal",
        "Token",
        "Explanation",
    ):
        assert name in memwal.__all__


def test_commands() -> None:
    common = {name: {"quiet", "table"} if "config" in given else {"quiet"} for name, given in COMMANDS.items()}
    assert commands() == {name: given | common[name] for name, given in COMMANDS.items()}


def test_distribution_and_command(texts: Mapping[str, str]) -> None:
    project = tomllib.loads(texts["pyproject.toml"])
    assert project["project"]["name"] == "memwal"
    assert project["project"]["scripts"] == {"memwal": "memwal.ingest.cli.app:command"}


def test_every_command_is_in_the_readme(texts: Mapping[str, str]) -> None:
    missing = [name for name in commands() if f"`memwal {name}" not in texts["ingest/cli/README.md"]]
    assert missing == []
    arguments = {"config", "path", "column", "kind", "name", "query", "files", "dest", "backup"}
    options = {option for found in commands().values() for option in found - arguments}
    assert [option for option in options if f"--{option}" not in texts["ingest/cli/README.md"]] == []


@pytest.mark.parametrize("package", ["memwal.ingest", "memwal.memtable", "memwal.wal", "memwal.flush"])
def test_no_module_takes_the_place_of_a_public_name(package: str) -> None:
    """Importing a module sets it as an attribute of its package."""
    found = importlib.import_module(package)
    for module in pkgutil.iter_modules(found.__path__):
        importlib.import_module(f"{package}.{module.name}")
    assert [name for name in getattr(found, "__all__", ()) if inspect.ismodule(getattr(found, name))] == []
