"""`memwal dlq list|show|replay|purge`: the commands for dead letters, which are rejected rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath
from typing import Any

import pyarrow as pa

from memwal import wal
from memwal.ingest.cli.command import Call
from memwal.ingest.cli.open import open_for_reading, writable
from memwal.ingest.cli.print import FittedTable, Kind, cell, count, print_rows, write_json
from memwal.ingest.errors import Invalid
from memwal.ingest.service.client.target import opened
from memwal.ingest.settings.values import format_duration, parse_duration
from memwal.ingest.spark.dlq.replay import Replaying, with_ids
from memwal.ingest.spark.dlq.sources import by_source, ending_spark
from memwal.ingest.spark.dlq.table import SCHEMA, STAGES, DeadLetters, sql_text, sql_time
from memwal.ingest.spark.pipeline.checkpoint import noted
from memwal.ingest.spark.pipeline.checks import written_schema
from memwal.ingest.suggest import suggestion

_LISTED = ["id", "time", "stage", "column", "reason", "topic", "partition", "offset", "file", "block", "row"]
_ID_MIN = 4
_COUNTED: tuple[Kind, ...] = ("name", "number", "name", "words")
_PLACED: tuple[Kind, ...] = ("name", "name", "name", "words")
_WIDTH = 100
_HEX = 16


@dataclass
class Group:
    """Dead letters with the same stage, column and reason. Times are datetimes."""

    stage: str
    column: str | None
    reason: str
    letters: int
    first: Any
    newest: Any


def list_letters(call: Call, *, stage: str | None, limit: int, form: str) -> int:
    """Print counts by stage and reason, and the newest dead letters. Raises: Invalid for an unknown stage."""
    condition = _of_stage(stage)
    found = _find(call)
    groups, newest = ([], SCHEMA.empty_table().select(_LISTED)) if found is None else _summary(found, condition, limit)
    if form == "json":
        total = sum(each.letters for each in groups)
        said = {"table": call.settings.dead_letters, "letters": total, "groups": [vars(each) for each in groups]}
        write_json(said | {"newest": newest.to_pylist()}, ascii_only=False)
    elif form != "table":
        print_rows(newest.column_names, [newest], form, call.console)
    else:
        _print_tables(call, groups, newest)
    return 0


def show_letter(call: Call, *, id: str, in_hex: bool, as_json: bool) -> int:
    """Print everything about one dead letter. `id`: an id in the form of `list`, or its beginning. Raises: Invalid."""
    letters = _find(call)
    if len(id) < _ID_MIN:
        raise Invalid(f"{id!r}: give at least {_ID_MIN} characters of the id, as `memwal dlq list` prints it")
    found = [] if letters is None else letters.dataset.to_table(filter=f"starts_with(id, {sql_text(id)})").to_pylist()
    if len(found) != 1:
        what = f"begins {len(found)} ids; give more characters" if found else "no dead letter has this id"
        raise Invalid(f"{id}: {what} (in {call.settings.dead_letters})")
    for name in ("raw_key", "raw_value"):
        found[0][name] = _readable(found[0][name], in_hex=in_hex)
    for header in found[0].get("raw_headers") or ():
        header["value"] = _readable(header["value"], in_hex=in_hex)
    if as_json:
        write_json(found[0], ascii_only=False)
    else:
        for name, value in found[0].items():
            call.console.out(f"{name:<11} {value}", highlight=False)
    return 0


def replay(call: Call, *, ids: list[str], stage: str | None, limit: int | None, force: bool = False) -> int:
    """Put the dead letters that fit now into the table, and remove them. Raises: Invalid; errors of a put.

    `force`: include letters whose micro-batch may be unfinished by the state of the table and the checkpoint.
    """
    settings, condition = call.settings, _all_of(_of_stage(stage), with_ids(ids) if ids else None)
    if call.fleet is not None and call.fleet.route.table:
        raise Invalid("dead letters of [route] are not replayed; send their records again to the source")
    letters = _find(call)
    if letters is None:
        call.console.say(f"no dead letters: {settings.dead_letters} does not exist")
        return 0
    options = tuple((name, value.get_secret_value()) for name, value in settings.table.storage_options.items())
    target = opened(settings.table.uri, options)
    mapping = by_source(settings, written_schema(settings, target.base), target.base.key)
    with ending_spark(), writable(call, open_for_reading(call)) as table:
        missing = settings.sink.missing or None
        replaying = Replaying(letters, target, table, mapping, partial(noted, settings), missing=missing, force=force)
        outcome = replaying.replay(condition, limit)
    replayed, remain = count(outcome.replayed, "dead letter"), outcome.stay.total()
    call.console.say(f"replayed {replayed} into {settings.table.uri}; {remain:,} remain")
    for reason, number in outcome.stay.most_common():
        call.console.say(f"  {number:,}x {reason}")
    return 0


def purge(call: Call, *, older_than: str | None, stage: str | None, dry_run: bool) -> int:
    """Delete dead letters older than a given age. Raises: Invalid for an invalid duration or stage."""
    age, uri = call.settings.dlq.age_max, call.settings.dead_letters
    if older_than is not None:
        try:
            age = parse_duration(older_than)
        except ValueError as error:
            raise Invalid(f"--older-than {older_than!r} {error}") from None
    old = f"time <= {sql_time(wal.SystemClock().now() - age)}"
    condition = _all_of(old, _of_stage(stage)) or old
    letters = _find(call)
    gone = 0
    if letters is not None:
        gone = letters.dataset.count_rows(filter=condition) if dry_run else letters.delete(condition)
    what = "would be deleted" if dry_run else "deleted"
    said = f"{count(gone, 'dead letter')} older than {format_duration(age)} {what} from {uri}"
    call.console.say(said)
    return 0


# ---- inside --------------------------------------------------------------------------------------------------------


def _find(call: Call) -> DeadLetters | None:
    return DeadLetters.find(call.settings.dead_letters, call.storage_options, wal.SystemClock())


def _of_stage(stage: str | None) -> str | None:
    if stage is None:
        return None
    if stage not in STAGES:
        raise Invalid(f"--stage {stage!r} is unknown{suggestion(stage, STAGES)}")
    return f"stage = {sql_text(stage)}"


def _all_of(*conditions: str | None) -> str | None:
    return " AND ".join(each for each in conditions if each) or None


def _summary(letters: DeadLetters, condition: str | None, limit: int) -> tuple[list[Group], pa.Table]:
    """Return the groups, largest first, and the newest dead letters. Reads all columns except the raw bytes once."""
    groups: dict[tuple[Any, ...], Group] = {}
    newest = SCHEMA.empty_table().select(_LISTED)
    for batch in letters.dataset.to_batches(columns=_LISTED, filter=condition):
        part = pa.Table.from_batches([batch])
        counted = part.group_by(["stage", "column", "reason"]).aggregate(
            [("time", "count"), ("time", "min"), ("time", "max")]
        )
        for row in counted.to_pylist():
            name, first, last = (row["stage"], row["column"], row["reason"]), row["time_min"], row["time_max"]
            group = groups.setdefault(name, Group(*name, 0, first, last))
            group.letters += row["time_count"]
            group.first, group.newest = min(group.first, first), max(group.newest, last)
        newest = pa.concat_tables([newest, part.select(_LISTED)]).sort_by([("time", "descending"), ("id", "ascending")])
        newest = newest.slice(0, limit)
    return sorted(groups.values(), key=lambda each: -each.letters), newest


def _print_tables(call: Call, groups: list[Group], newest: pa.Table) -> None:
    uri, total = call.settings.dead_letters, sum(each.letters for each in groups)
    if not total:
        call.console.say(f"no dead letters in {uri}")
        return
    counted = [[each.stage, each.letters, _time(each.newest), each.reason] for each in groups]
    listed = [[row["id"], _time(row["time"]), row["stage"], _place(row)] for row in newest.to_pylist()]
    for names, kinds, rows in (
        (("stage", "dead letters", "newest", "reason"), _COUNTED, counted),
        (("id", "time", "stage", "place"), _PLACED, listed),
    ):
        cells = [[cell(value, _WIDTH) for value in row] for row in rows]
        call.console.print(FittedTable(names, kinds, cells, "--format json prints them"))
    call.console.say(f"{count(total, 'dead letter')} in {uri}; the newest {len(listed):,} are shown")


def _place(row: Mapping[str, Any]) -> str:
    if row["topic"] is not None:
        return f"{row['topic']} partition {row['partition']} offset {row['offset']}"
    file = PurePosixPath(row["file"]).name if row["file"] else "no file"
    return f"{file} row {row['row']}" + (f" from byte {row['block']}" if row["block"] and row["file"] else "")


def _time(time: Any) -> str:
    return str(time.strftime("%Y-%m-%d %H:%M:%S"))


def _readable(raw: bytes | None, *, in_hex: bool) -> str | None:
    if raw is None:
        return None
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        in_hex = True
    else:
        in_hex = in_hex or not all(each.isprintable() or each.isspace() for each in text)
    return raw.hex(" ", _HEX) if in_hex else text
