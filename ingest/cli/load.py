"""`memwal load`: load files into the base table past the log, in one version and exactly once by a token.

1. Find the files, and the token: the given one, or a hash of their contents. If the token has landed, the command
   ends. Create the table if it does not exist.
2. Check every row as a put would (`loads.checked`). Nothing is written before all rows are valid.
3. Note an attempt (`flush.commits.load_notes`): from now on automatic commits and deletes with a filter wait.
4. Flush and commit previously acknowledged rows, through the daemons that own the regions; if none answers, by
   claiming the regions that hold rows. Rows that the log held at the start of this step must be in the base, or the
   load ends.
5. Load (`flush.commits.load`), which reads the files once more. If another process ended the attempt, return to 3.

*After a crash at any point, the same command loads the missing rows, and none twice.*
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any, Self

from rich.filesize import decimal

from memwal import flush, wal
from memwal.flush.commits.load_notes import RENEW_EVERY, load_id
from memwal.ingest.cli.command import Call, CommandConsole
from memwal.ingest.cli.open import open_base, open_for_reading, writable
from memwal.ingest.cli.print import count, print_result
from memwal.ingest.engine.loads.checked import CheckedRows, check_files, check_rules
from memwal.ingest.engine.loads.files import find_files, token_of
from memwal.ingest.engine.loads.log_rows import holds_rows, tip
from memwal.ingest.errors import Invalid, Unavailable
from memwal.ingest.service.client.remote import RemoteTable
from memwal.ingest.threads import Periodic

TOKEN_MAX = 200
_SETTLE_ATTEMPTS = 5
_TOLD_EVERY = 100_000
"""Rows between two lines of progress, if standard error is not a terminal."""


def load(
    call: Call,
    files: Sequence[str],
    *,
    token: str | None,
    format: str | None,
    missing: str | None,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Load files; print what was done, and return the exit code. Progress is printed to standard error.

    Raises: Invalid for wrong files, rows, rules or a wrong token, and if the table does not exist and the configuration
    does not describe it; Unavailable; flush and wal errors.
    """
    clock = wal.SystemClock()
    began, progress = clock.monotonic(), _Progress(CommandConsole(stderr=True, quiet=call.console.is_quiet))
    if token is not None and (not token.strip() or len(token) > TOKEN_MAX or not token.isprintable()):
        raise Invalid(f"--token {token[:40]!r}: write 1 to {TOKEN_MAX} printable characters, such as books-2026-11-25")
    if missing is not None and missing != "null":
        raise Invalid(
            f"--missing {missing[:40]}: write null; a load replaces whole rows, so it cannot keep stored values: put "
            'the rows instead, for example by `memwal run --once` with sink.missing = "keep"'
        )
    found = find_files(files, format, call.storage_options)
    base, store = open_base(call, None if dry_run else found[0])
    check_rules(base)
    with progress:
        if token is None:
            progress.tell("reading the files for a token")
        token = token or token_of(found)
        # The attempt that landed may have been killed before its end.
        if (landed := flush.loaded_in(store, base, token)) != 0 and (
            dry_run or flush.finish_load(base.uri, base.storage_options, store, token, **_limits(call, clock))
        ):
            return _already(call, token, landed, as_json=as_json)
        checked = check_files(base, found, progress.rows, missing)  # type: ignore[arg-type]  # checked above
        progress.tell(f"checked {count(checked.read, 'row')} of {count(len(found), 'file')}")
        if dry_run:
            counts = {"rows_read": checked.read, "rows": checked.rows.number, "rows_duplicate": checked.duplicates}
            more = f", {_duplicates(checked)}" if checked.duplicates else ""
            said = f"would load {count(checked.rows.number, 'row')} into {call.uri}{more} (token {token})"
            return print_result(call.console, {"token": token, "dry_run": True, **counts}, said, as_json=as_json)
        report = _landed(call, base, store, checked.rows, token, clock, progress.tell)
    if report.already:
        return _already(call, token, report.loaded_in, as_json=as_json)
    seconds = clock.monotonic() - began
    told = {"token": token, "rows_read": checked.read, "rows_duplicate": checked.duplicates, "seconds": seconds}
    said = _line(call.uri, report, checked, token, seconds)
    return print_result(call.console, asdict(report) | told, said, as_json=as_json)


def _landed(
    call: Call,
    base: flush.BaseTable,
    store: wal.ObjectStore,
    rows: flush.RowsToLoad,
    token: str,
    clock: wal.Clock,
    tell: Callable[[str], None],
) -> flush.LoadReport:
    """Run steps 3 to 5."""
    for left in reversed(range(call.settings.commit.retries + 1)):
        with _attempt(base, store, token, clock) as attempt:
            tell("committing what was put before")
            _settle(call, base, store, clock)
            try:
                where = (base.uri, base.storage_options, store)
                return flush.load(*where, rows, token, attempt, **_limits(call, clock), on_step=tell)
            except flush.LoadEnded:
                if not left:
                    raise
        tell("another process went on without the load, which begins again")
    raise AssertionError("the last attempt returns or raises")


@contextmanager
def _attempt(
    base: flush.BaseTable, store: wal.ObjectStore, token: str, clock: wal.Clock
) -> Iterator[flush.LoadAttempt]:
    """Note an attempt, renew its note during the block, and withdraw it.

    After an error the note stays, because storage may still execute pending requests. Other processes end the attempt
    before they continue.
    """
    newest = flush.BaseTable.open(base.uri, base.storage_options)
    attempt = flush.begin_load(store, newest, load_id(token), clock, wal.SystemIds())
    renewing = Periodic("load", lambda: attempt.renew(store, clock), RENEW_EVERY)
    renewing.start()
    try:
        yield attempt
    finally:
        renewing.stop()
    with suppress(wal.WalError):  # the note has no further effect
        attempt.withdraw(store)


def _limits(call: Call, clock: wal.Clock) -> dict[str, Any]:
    return {"clock": clock, "retries": call.settings.commit.retries, "options": call.settings.wal.options()}


# ---- before --------------------------------------------------------------------------------------------------------


def _settle(call: Call, base: flush.BaseTable, store: wal.ObjectStore, clock: wal.Clock) -> None:
    """Run step 4. Raises: Unavailable if rows that the log held at the start stay there."""
    tips = {region: tip(base, store, region) for region in wal.regions(store)}
    options = call.settings.wal.options()
    for _ in range(_SETTLE_ATTEMPTS):
        _flush(call)
        # Before the commit: SSTs that another process publishes during it are flushed, but not committed.
        left = [region for region, upto in tips.items() if holds_rows(base, store, region, upto, options)]
        flush.commit(base.uri, base.storage_options, store, clock=clock, **call.commit_limits)
        if not left:
            return
        clock.sleep(0.5)
    raise Unavailable(
        f"{base.uri}: {count(len(left), 'region')} still held rows in the log after {_SETTLE_ATTEMPTS} flushes; "
        "nothing was loaded: see `memwal status`, and load again"
    )


def _flush(call: Call) -> None:
    """Publish the memtables, and rows of logs that no process owns."""
    found = open_for_reading(call)
    if isinstance(found, RemoteTable) or any(region["memtable_rows"] for region in found.status()["regions"]):
        with writable(call, found) as table:
            table.flush()


# ---- printing ------------------------------------------------------------------------------------------------------


class _Progress:
    """Prints the current step to standard error: one changing line on a terminal, otherwise several lines."""

    def __init__(self, console: CommandConsole) -> None:
        self._console = console
        self._status = console.status("looking at the files") if console.is_terminal else None
        self._told = 0

    def __enter__(self) -> Self:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def tell(self, what: str) -> None:
        """Show the next step."""
        self._told = 0
        if self._status is not None:
            self._status.update(what)
        else:
            self._console.say(what)

    def rows(self, read: int, file: str) -> None:
        """Show the number of rows read so far, and the current file."""
        what = f"{count(read, 'row')} read, of {file}"
        if self._status is not None:
            self._status.update(what)
        elif read - self._told >= _TOLD_EVERY:
            self._told = read
            self._console.say(what)


def _already(call: Call, token: str, version: int | None, *, as_json: bool) -> int:
    where = "an older version" if version is None else f"version {version}"
    said = (
        f"already loaded in {where} of {call.uri} (token {token}); nothing was done. To load the files again, give "
        "another --token"
    )
    return print_result(call.console, {"token": token, "already": True, "loaded_in": version}, said, as_json=as_json)


def _line(uri: str, report: flush.LoadReport, checked: CheckedRows, token: str, seconds: float) -> str:
    rows = [
        f"{count(report.rows_inserted, 'row')} inserted" if report.rows_inserted or not report.rows_replaced else "",
        f"{count(report.rows_replaced, 'row')} replaced" if report.rows_replaced else "",
        _duplicates(checked) if checked.duplicates else "",
        f"{count(report.rows_repaired, 'row')} repaired" if report.rows_repaired else "",
    ]
    return (
        f"loaded {', '.join(filter(None, rows))} as version {report.loaded_in} of {uri}: "
        f"{decimal(report.bytes_written)} written to {count(report.files_written, 'file')} in {seconds:.2f} s "
        f"(token {token})"
    )


def _duplicates(checked: CheckedRows) -> str:
    return f"{count(checked.duplicates, 'row')} left out, whose keys other rows of the files have"
