"""The `memwal` command. Each command reads its arguments, calls one function and prints the result.

Errors are printed to standard error, one line per problem, without a traceback unless MEMWAL_TRACEBACK is set. The exit
code is 2 if the user can correct the problem, else 1.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from memwal.ingest.cli.failure import lines_of, report
from memwal.ingest.errors import Invalid
from memwal.ingest.ops.logs import silence_grpc

if TYPE_CHECKING:
    from memwal.ingest.settings.load import Settings

app = typer.Typer(
    name="memwal",
    help="Streaming ingestion into Lance tables: durable, queryable at once, exactly once.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
config_app = typer.Typer(help="Check or print a configuration.", no_args_is_help=True)
app.add_typer(config_app, name="config")

dlq_app = typer.Typer(
    help="List, show, replay or delete dead letters: rows of the source that could not be used.", no_args_is_help=True
)
app.add_typer(dlq_app, name="dlq")

regions_app = typer.Typer(help="Change the number of regions of a table.", no_args_is_help=True)
app.add_typer(regions_app, name="regions")


@app.callback(invoke_without_command=True)
def versions(
    version: Annotated[
        bool, typer.Option("--version", help="print the versions of memwal and its main dependencies")
    ] = False,
) -> None:
    if version:
        from importlib.metadata import PackageNotFoundError
        from importlib.metadata import version as installed

        others = ", ".join(f"{name} {installed(name)}" for name in ("pylance", "pyarrow"))
        with suppress(PackageNotFoundError):  # an extra
            others += f", pyspark {installed('pyspark')}"
        _console().out(f"memwal {installed('memwal')} ({others}, Python {sys.version.split()[0]})", highlight=False)
        raise typer.Exit


Config = Annotated[
    Path,
    typer.Argument(
        metavar="CONFIG",
        help="TOML file (examples: configs/); FILE:NAME selects one of several pipelines",
        show_default=False,
    ),
]
Format = Annotated[Literal["table", "json", "csv"], typer.Option(help="output format")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="print what would be deleted, but delete nothing")]
Stage = Annotated[str | None, typer.Option(help="only dead letters of this stage: parse, map, fit or refused")]


@app.command()
def run(
    config: Config,
    once: Annotated[bool, typer.Option(help="process the data that is available now, commit, then exit")] = False,
) -> int:
    """Run the pipeline from the source to the base table; runs all pipelines of a file that has several."""
    from memwal.ingest.pipeline.run import run as run_pipelines
    from memwal.ingest.settings.load import load_every

    return run_pipelines(load_every(config, os.environ), once=once, console=_console())


@app.command()
def serve(
    config: Config,
    on_spark: Annotated[
        int | None,
        typer.Option(min=1, help="number of daemons to run on Spark executors (see source.spark)", show_default=False),
    ] = None,
    take_over: Annotated[
        bool,
        typer.Option(
            "--take-over", help="fence the process that serves the table now; without it, a served table is refused"
        ),
    ] = False,
) -> int:
    """Serve the table: claim its regions and answer over Arrow Flight until stopped."""
    from memwal.ingest.daemon.without_pandas import leave_pandas_out

    leave_pandas_out()
    from memwal.ingest.settings.load import load

    chosen = {} if on_spark is None else {"MEMWAL__DAEMON__ON_SPARK": str(on_spark)}
    settings, console = load(config, os.environ | chosen), _console()

    def say(*endpoints: str) -> None:
        console.out(f"serving {settings.table.uri} at {', '.join(endpoints)}", highlight=False)

    if settings.daemon.on_spark:
        from memwal.ingest.fleet.driver import serve_on_spark

        code = serve_on_spark(settings, os.environ, lambda endpoints: say(*endpoints), take_over=take_over)
    else:
        from memwal.ingest.daemon.serve import serve as serve_table

        code = serve_table(
            settings,
            os.environ,
            lifeline=None,
            ready=say,
            http_ready=lambda url: console.out(f"metrics, health and status at {url}", highlight=False),
            take_over=take_over,
        )
    if not code:
        console.out("stopped; every acknowledged row is kept, and the next daemon continues from here", highlight=False)
    return code


@app.command()
def init(config: Config) -> int:
    """Create the table, or check that an existing table fits the configuration; print what was done."""
    from memwal.ingest.table.create import initialise

    settings = _load(config)
    base, done = initialise(settings, os.environ)
    indexes = ", ".join(f"{spec.column} ({spec.kind})" for spec in base.indexes) or "none"
    rules = "".join(f", {rule} {chosen}" for rule, chosen in base.rules.chosen().items())
    _console().out(
        f"{done} {base.uri}, version {base.version}: {len(base.schema.names)} columns, "
        f"key {', '.join(base.key) or 'none (append only)'}, {base.buckets} regions "
        f"(routing version {base.routing_version}), indexes: {indexes}{rules}",
        highlight=False,
    )
    return 0


@app.command()
def status(
    config: Config,
    as_json: AsJson = False,
    watch: Annotated[bool, typer.Option(help="refresh every second until interrupted")] = False,
) -> int:
    """Show regions, writer epochs, owners, WAL positions, SSTs, and rows that are not in the base table yet."""
    from memwal.ingest.cli.status import show

    return show(_load(config), os.environ, _console(), as_json=as_json, watch=watch)


@app.command()
def query(
    config: Config,
    key: Annotated[
        list[str] | None, typer.Option(help="key to look up, repeatable; separate the columns of a key by commas")
    ] = None,
    filter: Annotated[str | None, typer.Option(help="SQL predicate, such as \"section = 'net'\"")] = None,
    near: Annotated[
        str | None,
        typer.Option(help="COLUMN=[0.1,…] | COLUMN=@file.json | COLUMN=key:VALUE (the vector of that row)"),
    ] = None,
    match: Annotated[
        str | None,
        typer.Option(
            help='COLUMN=words; +required -excluded "a phrase" prefix*; together with --near: a hybrid search'
        ),
    ] = None,
    columns: Annotated[str | None, typer.Option(help="columns to print, separated by commas")] = None,
    limit: Annotated[int, typer.Option(min=1, help="maximum number of rows")] = 10,
    level: Annotated[str, typer.Option(help="read level: committed, flushed, durable or latest")] = "latest",
    format: Format = "table",
) -> int:
    """Look up rows by key, filter, vector, text, or vector and text together."""
    from memwal.ingest.cli.query import Query, answer

    asked = Query(tuple(key or ()), filter, near, match, _columns(columns), limit, level)
    return answer(_load(config), os.environ, asked, format, _console())


@app.command()
def flush(config: Config) -> int:
    """Flush memtables to SSTs: through the daemon that owns the regions; if none answers, claim the regions briefly."""
    from memwal.ingest.cli.steps import flush_table

    return flush_table(_load(config), os.environ, _console())


@app.command()
def commit(config: Config, as_json: AsJson = False) -> int:
    """Commit flushed rows to the base table, then maintain it; safe while writers run."""
    from memwal.ingest.cli.steps import commit as commit_table

    return commit_table(_load(config), os.environ, _console(), as_json=as_json)


@app.command()
def gc(
    config: Config,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> int:
    """Delete WAL entries, SSTs and orphan files that are no longer needed; safe while writers run."""
    from memwal.ingest.cli.collect import show

    return show(_load(config), os.environ, _console(), dry_run=dry_run, as_json=as_json)


@app.command()
def log(
    config: Config,
    limit: Annotated[int, typer.Option(min=1, help="maximum number of versions, newest first")] = 50,
    diff: Annotated[
        tuple[int, int] | None,
        typer.Option(metavar="A B", help="compare two versions by key; reads rows"),
    ] = None,
    keys: Annotated[
        int, typer.Option(min=0, help="with --diff: number of added, removed and changed keys to print, of each")
    ] = 0,
    as_json: AsJson = False,
) -> int:
    """Show what each version of the base table changed: rows, commits, indexes, compaction, columns."""
    from memwal.ingest.cli.log import show_diff, show_log

    if diff is None:
        return show_log(_load(config), os.environ, _console(), limit=limit, as_json=as_json)
    return show_diff(_load(config), os.environ, _console(), between=diff, keys=keys, as_json=as_json)


@app.command()
def verify(
    config: Config,
    deep: Annotated[bool, typer.Option(help="read every row too")] = False,
    as_json: AsJson = False,
) -> int:
    """Check every invariant on storage; print problems with remedies; exit 1 if any. Safe while writers run."""
    from memwal.ingest.cli.verify import show

    return show(_load(config), os.environ, _console(), deep=deep, as_json=as_json)


@app.command()
def inspect(
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH", help="a manifest, WAL entry, commit plan, SST, region or table", show_default=False
        ),
    ],
    config: Annotated[Path | None, typer.Option(help="TOML file with the storage options for a URL")] = None,
) -> int:
    """Print a stored object in readable form; reads only, safe while writers run."""
    from memwal.ingest.cli.dump.describe import describe

    options = _load(config).storage_options(os.environ) if config is not None else None
    _console().print(describe(path, options))
    return 0


@regions_app.command()
def resize(
    config: Config,
    to: Annotated[int, typer.Option(help="new number of regions, from 1 to 4096", show_default=False)],
    as_json: AsJson = False,
) -> int:
    """Change the number of regions; writes pause meanwhile. Also finishes an interrupted resize."""
    from memwal.ingest.cli.resize import resize as resize_table

    return resize_table(_load(config), os.environ, _console(), to=to, as_json=as_json)


@config_app.command()
def check(config: Config) -> int:
    """Check a configuration, with all its pipelines, as `run` does; print every problem."""
    from memwal.ingest.pipeline.checks import find_problems
    from memwal.ingest.settings.load import load_every

    lines, pipelines = [], load_every(config, os.environ)
    for name, settings in pipelines.items():
        _, problems = find_problems(settings, os.environ, starts=False)
        lines += [f"{name}: {line}" for problem in problems for line in lines_of(problem)]
    if lines:
        raise Invalid.of(dict.fromkeys(lines))
    for name in pipelines:
        _console().out(f"{name}: ok", highlight=False)
    return 0


@config_app.command()
def show(config: Config) -> int:
    """Print the configuration with all defaults, secrets hidden."""
    from memwal.ingest.settings.reference import render_settings

    sys.stdout.write(render_settings(_load(config)))
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

    return list_letters(_load(config), os.environ, _console(), stage=stage, limit=limit, form=format)


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

    return show_letter(_load(config), os.environ, _console(), id=id, in_hex=hex, as_json=as_json)


@dlq_app.command("replay")
def dlq_replay(
    config: Config,
    id: Annotated[list[str] | None, typer.Option(help="replay only the dead letter with this id; repeatable")] = None,
    stage: Stage = None,
    limit: Annotated[int | None, typer.Option(min=1, help="maximum number of dead letters, oldest first")] = None,
) -> int:
    """Put the dead letters that fit now into the table, each exactly once, and remove them."""
    from memwal.ingest.cli.dlq import replay

    return replay(_load(config), os.environ, _console(), ids=id or [], stage=stage, limit=limit)


@dlq_app.command("purge")
def dlq_purge(
    config: Config,
    older_than: Annotated[str | None, typer.Option(help='minimum age, such as "7d"; default: dlq.age_max')] = None,
    stage: Stage = None,
    dry_run: DryRun = False,
) -> int:
    """Delete old dead letters."""
    from memwal.ingest.cli.dlq import purge

    return purge(_load(config), os.environ, _console(), older_than=older_than, stage=stage, dry_run=dry_run)


def main() -> None:
    """Entry point of the `memwal` command."""
    silence_grpc()
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # half a result is worse than an escaped character
    try:
        code = app(standalone_mode=False)
    except typer.Exit as ended:
        code = ended.exit_code
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except BaseException as error:  # noqa: BLE001 - the edge of the program
        from memwal.wal.panics import as_exception  # not above: most commands begin sooner without the storage packages

        code = report(as_exception(error))
    sys.exit(code or 0)


def _console() -> Console:
    """Return a console on standard output, without emoji: a path may contain `FILE:a:`."""
    return Console(emoji=False)


def _load(config: Path) -> Settings:
    from memwal.ingest.settings.load import load

    return load(config, os.environ)


def _columns(text: str | None) -> list[str] | None:
    return None if text is None else [name.strip() for name in text.split(",")]


if __name__ == "__main__":
    main()
