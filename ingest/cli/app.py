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
from typing import Annotated, NoReturn

import typer

from memwal.ingest.cli.command import (
    AsJson,
    Call,
    CommandConsole,
    Commands,
    Config,
    DryRun,
    Format,
    exit_code,
    one_table,
    table_option,
)
from memwal.ingest.cli.groups import config_app, dlq_app, index_app, regions_app
from memwal.ingest.own_process import own_process, without_pandas
from memwal.ingest.service.ops.logs import silence_grpc

Vertical = Annotated[bool, typer.Option("--vertical", "-x", help="print each row as a block, a line for each column")]
OfCommits = Annotated[bool, typer.Option("--commits", help="the table's automatic commits instead of its ingestion")]
PlaceOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUE",
        help="storage option of the backup's place, repeatable; secrets as env:NAME or file:PATH; default: the table's",
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="go on with what a killed process left there")]

app = Commands(
    name="memwal",
    help="Streaming ingestion into Lance tables: durable, queryable at once, exactly once.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
)
app.add_typer(config_app, name="config")
app.add_typer(dlq_app, name="dlq")
app.add_typer(index_app, name="index")
app.add_typer(regions_app, name="regions")


@app.callback(invoke_without_command=True)
def versions(
    version: Annotated[
        bool, typer.Option("--version", help="print the versions of memwal, its protocol and its main dependencies")
    ] = False,
) -> None:
    if version:
        from importlib.metadata import PackageNotFoundError
        from importlib.metadata import version as installed

        from memwal.ingest.protocol import OURS

        others = f"protocol {OURS}" + "".join(f", {name} {installed(name)}" for name in ("pylance", "pyarrow"))
        with suppress(PackageNotFoundError):  # an extra
            others += f", pyspark {installed('pyspark')}"
        CommandConsole().say(f"memwal {installed('memwal')} ({others}, Python {sys.version.split()[0]})")
        raise typer.Exit


@app.command()
def run(
    config: Config,
    once: Annotated[bool, typer.Option(help="process the data that is available now, commit, then exit")] = False,
) -> int:
    """Run the pipeline from the source to the base table; runs all pipelines of a file that has several."""
    from memwal.ingest.settings.load import load_every

    screen = CommandConsole()
    pipelines = {name: one_table(each, name, routed=True) for name, each in load_every(config, os.environ).items()}
    if "local" in {settings.source.engine for settings in pipelines.values()}:
        from memwal.ingest.cli.follow import run_local

        return run_local(pipelines, once=once, console=screen)
    from memwal.ingest.spark.pipeline.run import run as run_pipelines

    return run_pipelines(pipelines, once=once, console=screen, notes=screen.notes)


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
    """Serve the table, or all tables of a configuration: own their regions, and answer over Arrow Flight until
    stopped."""
    from memwal.ingest.service.daemon.process import limit_arenas

    limit_arenas()
    from memwal.ingest.settings.load import load_tables

    chosen = {} if on_spark is None else {"MEMWAL__DAEMON__ON_SPARK": str(on_spark)}
    settings, screen = load_tables(config, os.environ | chosen), CommandConsole()
    if table_option() or settings.daemon.on_spark or not settings.is_fleet:
        settings = one_table(settings, config)
    served = settings.table.uri or settings.fleet.prefix or f"{len(settings.names)} tables"

    def say(*endpoints: str) -> None:
        screen.say(f"serving {served} at {', '.join(endpoints)}")

    if settings.daemon.on_spark:
        from memwal.ingest.spark.fleet.driver import serve_on_spark

        code = serve_on_spark(settings, os.environ, lambda endpoints: say(*endpoints), take_over=take_over)
    else:
        from memwal.ingest.service.daemon.serve import serve as serve_table

        code = serve_table(
            settings,
            os.environ,
            lifeline=None,
            ready=say,
            on_replay=screen.on_replay,
            http_ready=lambda url: screen.say(f"page, metrics, health and status at {url}"),
            take_over=take_over,
        )
    if not code:
        screen.note("stopped; every acknowledged row is kept, and the next daemon continues from here")
    return code


@app.command()
def init(config: Config) -> int:
    """Create the table, or check that an existing table fits the configuration; print what was done."""
    from memwal.ingest.cli.maintain import init as init_table
    from memwal.ingest.cli.tables import on_tables

    return on_tables(config, init_table)


@app.command()
def status(
    config: Config,
    as_json: AsJson = False,
    watch: Annotated[bool, typer.Option(help="refresh every second until interrupted")] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="maximum number of regions in the table")] = None,
) -> int:
    """Show regions, writer epochs, owners, WAL positions, SSTs, and rows that are not in the base table yet."""
    from memwal.ingest.cli.status import show
    from memwal.ingest.cli.tables import on_tables

    if watch:
        return show(Call.of(config), as_json=as_json, watch=True, limit=limit)
    return on_tables(config, lambda call: show(call, as_json=as_json, watch=False, limit=limit), as_json=as_json)


@app.command()
def tables(config: Config, format: Format = "table") -> int:
    """List the tables of a configuration: rows, rows not committed yet, regions, state, owners, location."""
    from memwal.ingest.cli.tables import show_tables

    return show_tables(config, format)


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
            help='COLUMN=words or COLUMN^BOOST,COLUMN=words; +required -excluded "a phrase" prefix* fuzzy~ fuzzy~2; '
            "together with --near: a hybrid search"
        ),
    ] = None,
    columns: Annotated[str | None, typer.Option(help="columns to print, separated by commas")] = None,
    limit: Annotated[int, typer.Option(min=1, help="maximum number of rows")] = 10,
    offset: Annotated[int, typer.Option(min=0, help="rows to leave out before the first")] = 0,
    order_by: Annotated[str | None, typer.Option(help="columns to order rows by, such as 'price desc, id'")] = None,
    metric: Annotated[str | None, typer.Option(help="with --near: l2, cosine or dot; default: the index's")] = None,
    nprobes: Annotated[
        int | None, typer.Option(min=1, help="with --near: partitions of the base table's index to search")
    ] = None,
    refine_factor: Annotated[
        int | None, typer.Option(min=1, help="with --near: compare so many times --limit rows of the index exactly")
    ] = None,
    distance_range: Annotated[
        str | None, typer.Option(metavar="LOWEST,BELOW", help="with --near: distances to print; either may be empty")
    ] = None,
    level: Annotated[str, typer.Option(help="read level: committed, flushed, durable or latest")] = "latest",
    format: Format = "table",
    vertical: Vertical = False,
    explain: Annotated[
        bool,
        typer.Option("--explain", help="print which levels and indexes were used; with json and csv to standard error"),
    ] = False,
) -> int:
    """Look up rows by key, filter, vector, text, or vector and text together."""
    from memwal.ingest.cli.rows import Query
    from memwal.ingest.cli.rows import query as print_rows_of

    how = {"metric": metric, "nprobes": nprobes, "refine_factor": refine_factor, "distance_range": distance_range}
    asked = Query(tuple(key or ()), filter, near, match, names_in(columns), limit, level, order_by, offset, how)
    return print_rows_of(Call.of(config), asked, format, vertical=vertical, explain=explain)


@app.command()
def sql(
    config: Config,
    query: Annotated[
        str | None,
        typer.Argument(
            metavar="[QUERY]",
            help='such as "select section, count(*) from table group by 1"; - reads it from standard input; '
            "without it: a shell with history and completion",
            show_default=False,
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="maximum number of rows to print; default: all")] = None,
    level: Annotated[str, typer.Option(help="read level: committed, flushed, durable or latest")] = "latest",
    format: Format = "table",
    vertical: Vertical = False,
) -> int:
    """Print rows of a SELECT over the table, which is called table in it; without a query, read queries in a shell."""
    from memwal.ingest.cli.rows import select

    return select(Call.of(config), query, level, format, limit=limit, vertical=vertical)


@app.command()
def tail(
    config: Config,
    since: Annotated[
        str, typer.Option(help="earliest, latest, the JSON of a position (tail prints one at its end), or @FILE")
    ] = "earliest",
    images: Annotated[str, typer.Option(help="after, or both to print rows before their change too")] = "after",
    columns: Annotated[str | None, typer.Option(help="columns to print beside the key, separated by commas")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="maximum number of changes; default: all")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="wait for further changes until interrupted")] = False,
    format: Format = "table",
    vertical: Vertical = False,
) -> int:
    """Print inserts, updates and deletes in order; json prints one object per line."""
    from memwal.ingest.cli.tail import tail as print_changes

    return print_changes(
        Call.of(config),
        since=since,
        images=images,
        columns=names_in(columns),
        limit=limit,
        follow=follow,
        form=format,
        vertical=vertical,
    )


@app.command()
def delete(
    config: Config,
    key: Annotated[
        list[str] | None, typer.Option(help="key to delete, repeatable; separate the columns of a key by commas")
    ] = None,
    filter: Annotated[str | None, typer.Option(help='delete every row that passes, such as "seen < 17"')] = None,
    dry_run: DryRun = False,
) -> int:
    """Delete rows by key or by filter: through the daemons that own the regions; if none answers, claim the regions."""
    from memwal.ingest.cli.rows import delete as delete_rows

    return delete_rows(Call.of(config), tuple(key or ()), filter, dry_run=dry_run)


@app.command()
def flush(config: Config) -> int:
    """Flush memtables to SSTs: through the daemon that owns the regions; if none answers, claim the regions briefly."""
    from memwal.ingest.cli.maintain import flush as flush_table
    from memwal.ingest.cli.tables import on_tables

    return on_tables(config, flush_table)


@app.command()
def commit(config: Config, as_json: AsJson = False) -> int:
    """Commit flushed rows to the base table, then maintain it; safe while writers run."""
    from memwal.ingest.cli.maintain import commit as commit_table
    from memwal.ingest.cli.tables import on_tables

    return on_tables(config, lambda call: commit_table(call, as_json=as_json), as_json=as_json)


@app.command()
def load(
    config: Config,
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILES...",
            help="Parquet, CSV, NDJSON, Arrow files, Lance tables; globs; local or s3://",
            show_default=False,
        ),
    ],
    token: Annotated[
        str | None,
        typer.Option(help="name of this load, which lands once; default: a hash of the contents of the files"),
    ] = None,
    format: Annotated[
        str | None, typer.Option(help="format of the files: parquet, csv, ndjson or arrow; default: by their endings")
    ] = None,
    missing: Annotated[
        str | None,
        typer.Option(help="null: columns that the files lack become null; default: such files are refused"),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="check every row, but load nothing")] = False,
    follow: Annotated[
        bool,
        typer.Option("--follow", help="FILES is a directory: put each file that is or appears there, until Ctrl-C"),
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Load files into the base table past the log, in one version and exactly once; safe while writers run."""
    if follow:
        from memwal.ingest.cli.follow import load_followed

        refused = {"--token": token, "--dry-run": dry_run, "--json": as_json}
        return load_followed(
            Call.of(config), files, format, missing, [name for name, given in refused.items() if given]
        )
    from memwal.ingest.cli.load import load as load_files

    asked = {"token": token, "format": format, "missing": missing}
    return load_files(Call.of(config), files, **asked, dry_run=dry_run, as_json=as_json)


@app.command()
def pause(
    config: Config,
    commits: OfCommits = False,
    reason: Annotated[str, typer.Option(help="text that status, page and health show", show_default=False)] = "",
) -> int:
    """Pause ingestion: `run` begins no micro-batch until `resume`, also after a restart. Or automatic commits."""
    from memwal.ingest.cli.maintain import pause as pause_table

    return pause_table(Call.of(config), "commits" if commits else "ingestion", reason)


@app.command()
def resume(config: Config, commits: OfCommits = False) -> int:
    """Resume what `pause` has paused."""
    from memwal.ingest.cli.maintain import resume as resume_table

    return resume_table(Call.of(config), "commits" if commits else "ingestion")


@app.command()
def gc(config: Config, dry_run: DryRun = False, as_json: AsJson = False) -> int:
    """Delete WAL entries, SSTs and orphan files that are no longer needed; safe while writers run."""
    from memwal.ingest.cli.maintain import collect
    from memwal.ingest.cli.tables import on_tables

    return on_tables(config, lambda call: collect(call, dry_run=dry_run, as_json=as_json), as_json=as_json)


@app.command()
def backup(
    config: Config,
    dest: Annotated[
        str, typer.Argument(metavar="DEST", help="empty directory or s3:// URL for the copy", show_default=False)
    ],
    option: PlaceOption = None,
    resume: Resume = False,
    as_json: AsJson = False,
) -> int:
    """Copy the table as of now, with every acknowledged row and token; several tables: to DEST/NAME. Safe while
    writers run."""
    from memwal.ingest.cli.backup import backup as back_up
    from memwal.ingest.cli.tables import on_tables

    def copy(call: Call) -> int:
        place = dest if table_option() or not call.settings.name else f"{dest.rstrip('/')}/{call.settings.name}"
        return back_up(call, place, option or [], resume=resume, as_json=as_json)

    return on_tables(config, copy, as_json=as_json)


@app.command()
def restore(
    config: Config,
    backup: Annotated[
        str,
        typer.Argument(metavar="BACKUP", help="DEST of a `memwal backup`; checked as it is read", show_default=False),
    ],
    option: PlaceOption = None,
    resume: Resume = False,
    as_json: AsJson = False,
) -> int:
    """Make the table of CONFIG, which must not exist, of a backup, and verify it."""
    from memwal.ingest.cli.backup import restore as restore_table

    return restore_table(Call.of(config), backup, option or [], resume=resume, as_json=as_json)


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
        return show_log(Call.of(config), limit=limit, as_json=as_json)
    return show_diff(Call.of(config), between=diff, keys=keys, as_json=as_json)


@app.command()
def verify(
    config: Config,
    deep: Annotated[bool, typer.Option(help="read every row too")] = False,
    as_json: AsJson = False,
) -> int:
    """Check every invariant on storage; print problems with remedies; exit 1 if any. Safe while writers run."""
    from memwal.ingest.cli.backup import verify as verify_table
    from memwal.ingest.cli.tables import on_tables

    return on_tables(config, lambda call: verify_table(call, deep=deep, as_json=as_json), as_json=as_json)


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
    from memwal.ingest.cli.describe import describe

    options = Call.of(config).storage_options if config is not None else None
    CommandConsole().print(describe(path, options))
    return 0


@app.command()
def doctor(config: Config, as_json: AsJson = False) -> int:
    """Check this machine and the configuration, from libraries and Java to storage and memory; tell how to mend it."""
    from memwal.ingest.cli.doctor import show
    from memwal.ingest.settings.load import load_every

    pipelines = {name: one_table(each, name, routed=True) for name, each in load_every(config, os.environ).items()}
    return show(pipelines, os.environ, as_json=as_json)


def names_in(text: str | None) -> list[str] | None:
    """Split names at commas."""
    return None if text is None else [name.strip() for name in text.split(",")]


def command() -> NoReturn:
    """Run the `memwal` command: `main` in a process of its own."""
    own_process(main)


def main() -> NoReturn:
    """Run the command in the process's arguments. Raises: SystemExit with its exit code."""
    silence_grpc()
    if sys.argv[1:2] != ["run"]:  # always needs it, for PySpark
        without_pandas()
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # an escaped character is better than half a result
    sys.exit(exit_code(lambda: app(prog_name="memwal", standalone_mode=False)))


if __name__ == "__main__":
    command()
