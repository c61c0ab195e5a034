"""The groups of commands: `memwal config`, `dlq`, `index` and `regions`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from memwal.ingest.cli.command import (
    AsJson,
    Call,
    CommandConsole,
    Commands,
    Config,
    DryRun,
    Format,
    configuration,
    lines_of,
    one_table,
    table_option,
)
from memwal.ingest.errors import Invalid

Stage = Annotated[str | None, typer.Option(help="only dead letters of this stage: parse, map, fit, route or refused")]

config_app = Commands(help="Write, check or print a configuration.", no_args_is_help=True)
dlq_app = Commands(
    help="List, show, replay or delete dead letters: rows of the source that could not be used.", no_args_is_help=True
)
index_app = Commands(help="List, add or drop indexes of a table, while it is written too.", no_args_is_help=True)
regions_app = Commands(help="Change the number of regions of a table.", no_args_is_help=True)


@regions_app.command()
def resize(
    config: Config,
    to: Annotated[int, typer.Option(help="new number of regions, from 1 to 4096", show_default=False)],
    as_json: AsJson = False,
) -> int:
    """Change the number of regions; writes pause meanwhile. Also finishes an interrupted resize."""
    from memwal.ingest.cli.maintain import resize as resize_table

    return resize_table(Call.of(config), to=to, as_json=as_json)


@index_app.command("list")
def index_list(config: Config, as_json: AsJson = False) -> int:
    """Show the indexes, and how many rows of the base table each covers."""
    from memwal.ingest.cli.index import show

    return show(Call.of(config), as_json=as_json)


@index_app.command("add")
def index_add(
    config: Config,
    column: Annotated[str, typer.Argument(metavar="COLUMN", help="column to index", show_default=False)],
    kind: Annotated[str, typer.Argument(metavar="KIND", help="ivf_pq, fts or btree", show_default=False)],
    set: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="parameter of the index, such as metric=cosine; repeatable"),
    ] = None,
) -> int:
    """Index a column, or take over the index that another program built on it."""
    from memwal.ingest.cli.index import add

    return add(Call.of(config), column, kind, set or [])


@index_app.command("drop")
def index_drop(
    config: Config,
    name: Annotated[str, typer.Argument(metavar="NAME", help="name of the index", show_default=False)],
) -> int:
    """Drop an index, of the base table too."""
    from memwal.ingest.cli.index import drop

    return drop(Call.of(config), name)


@config_app.command()
def check(config: Config) -> int:
    """Check a configuration, with all its pipelines and tables, as `run` does; print every problem."""
    from memwal.ingest.service.ops.skew import by_key
    from memwal.ingest.settings.fleet import checked_tables
    from memwal.ingest.settings.load import load_every
    from memwal.ingest.spark.pipeline.checks import find_problems

    lines, notices, pipelines = [], list[str](), load_every(config, os.environ)
    for name, settings in pipelines.items():
        chosen = [one_table(settings, name, routed=True)] if table_option() or settings.route.table else None
        for table in chosen or checked_tables(settings, os.environ):
            base, problems = find_problems(table, os.environ, starts=False)
            notices += [f"{name}: warning: {text}"] if (text := by_key(table, base)) else []
            lines += [f"{name}: {line}" for problem in problems for line in lines_of(problem)]
    if lines:
        raise Invalid.of(dict.fromkeys(lines))
    for line in [*notices, *(f"{name}: ok" for name in pipelines)]:
        CommandConsole().say(line)
    return 0


@config_app.command()
def new(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="TOML file to write", show_default=False)],
    source: Annotated[
        list[str],
        typer.Option(
            "--from",
            help="file, glob, Lance table or kafka://HOST:PORT/TOPIC whose columns are taken, repeatable",
            show_default=False,
        ),
    ],
) -> int:
    """Write a configuration with the columns, a key and indexes that fit a file, table or topic; with --table, add the
    section [tables.NAME] to it."""
    from memwal.ingest.cli.new_config import new_config

    return new_config(config, source, CommandConsole(), table_option())


@config_app.command()
def show(config: Config) -> int:
    """Print the configuration with all defaults, secrets hidden."""
    from memwal.ingest.settings.reference import render_settings

    sys.stdout.write(render_settings(Call.of(config).settings if table_option() else configuration(config)))
    return 0


@dlq_app.command("list")
def dlq_list(
    config: Config,
    stage: Stage = None,
    limit: Annotated[int, typer.Option(min=1, help="maximum number of dead letters to list, newest first")] = 10,
    format: Format = "table",
) -> int:
    """Count dead letters by stage and reason, and list the newest."""
    from memwal.ingest.cli.dlq import list_letters

    return list_letters(Call.of(config, routed=True), stage=stage, limit=limit, form=format)


@dlq_app.command("show")
def dlq_show(
    config: Config,
    id: Annotated[
        str, typer.Argument(metavar="ID", help="id of a dead letter, or the beginning of the id", show_default=False)
    ],
    hex: Annotated[
        bool, typer.Option("--hex", help="print raw bytes as hexadecimal digits, even if they are text")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Show everything about one dead letter, with its raw bytes."""
    from memwal.ingest.cli.dlq import show_letter

    return show_letter(Call.of(config, routed=True), id=id, in_hex=hex, as_json=as_json)


@dlq_app.command("replay")
def dlq_replay(
    config: Config,
    id: Annotated[list[str] | None, typer.Option(help="replay only the dead letter with this id; repeatable")] = None,
    stage: Stage = None,
    limit: Annotated[int | None, typer.Option(min=1, help="maximum number of dead letters, oldest first")] = None,
    force: Annotated[
        bool, typer.Option("--force", help="also those of another query whose last micro-batch may not be finished")
    ] = False,
) -> int:
    """Put the dead letters that fit now into the table, each exactly once, and remove them."""
    from memwal.ingest.cli.dlq import replay

    return replay(Call.of(config), ids=id or [], stage=stage, limit=limit, force=force)


@dlq_app.command("purge")
def dlq_purge(
    config: Config,
    older_than: Annotated[str | None, typer.Option(help='minimum age, such as "7d"; default: dlq.age_max')] = None,
    stage: Stage = None,
    dry_run: DryRun = False,
) -> int:
    """Delete old dead letters."""
    from memwal.ingest.cli.dlq import purge

    return purge(Call.of(config, routed=True), older_than=older_than, stage=stage, dry_run=dry_run)
