"""`memwal log`: the versions of the base table as lists of actions, and the difference between two versions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.text import Text

from memwal import flush, wal
from memwal.flush.base.state import versions
from memwal.flush.commits.load_notes import noted_token
from memwal.flush.history.actions import Action, Change, History, read_history
from memwal.flush.history.diff import VersionDiff, diff_versions
from memwal.ingest.cli.command import Call
from memwal.ingest.cli.print import FittedTable, Kind, count, plain_table, print_result, ranges, span
from memwal.ingest.errors import Invalid
from memwal.wal.retries import with_retried_reads

_STYLES: Mapping[str, str] = {
    "insert": "green",
    "append": "green",
    "update": "yellow",
    "columns rewritten": "yellow",
    "delete": "red",
    "expire": "red",
    "overwrite": "bold red",
    "restore": "bold red",
    "commit": "cyan",
    "load": "cyan",
    "load ended": "cyan",
    "compact": "magenta",
    "create": "bold",
}
_LOADS = ("load", "load ended")
_PLAIN = "dim"
_OF_ROWS = ("append", "insert", "update", "delete", "expire")
_OF_INDEXES: Mapping[str, str] = {"index built": "build", "index extended": "extend", "index dropped": "drop"}


def show_log(call: Call, *, limit: int, as_json: bool) -> int:
    """Print the newest `limit` versions, newest first. Reads no row, claims nothing.

    Raises: NotALanceTable, NotInitialised; wal errors, Corrupt among them.
    """
    base, store = _opened(call)
    history = read_history(store, limit)
    names = {str(region): wal.named(region) for region in base.regions} | _tokens(store, history)
    changes = [_change_json(each, names) for each in history.changes]
    told = {"versions": changes, "older": history.older, "cleaned_up_meanwhile": list(history.gone)}
    return print_result(call.console, told, render(base.uri, history, names, limit), as_json=as_json)


def show_diff(call: Call, *, between: tuple[int, int], keys: int, as_json: bool) -> int:
    """Print the difference between two versions by key, with at most `keys` keys of each kind. Reads rows.

    Raises: Invalid if a version does not exist; NotALanceTable, NotInitialised; wal errors.
    """
    base, store = _opened(call)
    if not base.key:
        raise Invalid(
            f"--diff compares rows by key, and {base.uri} has no key; without --diff the command prints row counts"
        )
    kept = versions(store)
    for version in between:
        if version not in kept:
            raise Invalid(f"version {version} of {base.uri} does not exist; existing versions: {ranges(kept)}")
    found = diff_versions(store, *between, base.key)
    tables = {"added": found.added, "removed": found.removed, "changed": found.changed}
    told = {
        "before": found.before,
        "after": found.after,
        **{name: rows.num_rows for name, rows in tables.items()},
        "same": found.same,
        "changed_columns": dict(found.columns),
        "columns_added": list(found.columns_added),
        "columns_dropped": list(found.columns_dropped),
        "keys": {name: rows.slice(0, keys).to_pylist() for name, rows in tables.items()} if keys else None,
    }
    return print_result(call.console, told, render_diff(base.uri, found, keys), as_json=as_json)


def _tokens(store: wal.ObjectStore, history: History) -> dict[str, str]:
    """Return the tokens of the loads in `history` by load id; a load whose note was deleted has none."""
    actions = (action for change in history.changes for action in change.actions or ())
    loads = {action.details["load"] for action in actions if action.kind in _LOADS}
    return {load: token for load in loads if (token := noted_token(store, UUID(load))) is not None}


def _opened(call: Call) -> tuple[flush.BaseTable, wal.ObjectStore]:
    uri, options = call.uri, call.storage_options
    store = with_retried_reads(wal.open_store(uri, options), wal.SystemClock(), wal.WalOptions())
    return flush.BaseTable.open(uri, options), store


# ---- versions ------------------------------------------------------------------------------------------------------


def render(uri: str, history: History, regions: Mapping[str, str], limit: int) -> RenderableType:
    """Return a history for people. `regions`: names of regions by id."""
    names = ("version", "when (UTC)", "rows", "frags", "size", "what")
    kinds: tuple[Kind, ...] = ("number", "name", "number", "number", "number", "words")
    lines, newer = list[list[Text]](), 0
    for change in history.changes:
        state = change.state
        size = decimal(state.bytes) if state.bytes else "-"
        when = _when(state.seconds)
        same_year = when.year == _when(history.changes[0].state.seconds).year  # the headline shows the year
        shown = when.strftime("%m-%d %H:%M:%S" if same_year else "%Y-%m-%d")
        rows, fragments = f"{state.rows:,}", f"{len(state.fragments):,}"
        if newer - state.version > 1:
            cleaned = Text(f"cleaned up: {ranges(range(state.version + 1, newer))}", style=_PLAIN)
            lines.append([Text("…"), *[Text("")] * 4, cleaned])
        figures = (Text(rows), Text(fragments), Text(size))
        lines.append([Text(str(state.version)), Text(shown, style="dim"), *figures, _what(change, regions)])
        newer = state.version
    headline = "no version could be read"
    if history.changes:
        state = history.changes[0].state
        counts = f"{count(state.rows, 'row')} in {count(len(state.fragments), 'fragment')}"
        headline = f"version {state.version} of {_when(state.seconds):%Y-%m-%d}, {counts}"
    table = FittedTable(names, kinds, lines, "--json prints them")
    notes: list[RenderableType] = [Text(f"{uri}: {headline}", overflow="fold"), table]
    if history.gone:
        notes.append(Text(f"cleaned up while being read: versions {ranges(history.gone)}", style="dim"))
    if history.older:
        more = limit + history.older
        notes.append(Text(f"{history.older:,} older versions; --limit {more} shows them", style="dim"))
    return Group(*notes)


def _what(change: Change, regions: Mapping[str, str]) -> Text:
    if change.actions is None:
        operation = "" if change.state.transaction is None else f" (Lance: {change.state.transaction.operation})"
        return Text(f"unknown: the previous version was cleaned up{operation}", style=_PLAIN)
    parts = [*_rows_touched(change.actions), *_commits(change.actions, regions), *_indexes(change.actions)]
    parts += [_loaded(each, regions) for each in change.actions if each.kind in _LOADS]
    parts += [
        Text(_PHRASES[each.kind](each.details), style=_STYLES.get(each.kind, _PLAIN))
        for each in change.actions
        if each.kind in _PHRASES
    ]
    if any(each.kind == "mark" for each in change.actions):
        parts.append(Text("Lance's progress marker updated", style=_PLAIN))
    if change.part_of is not None:
        parts.append(Text(f"first half of the commit in version {change.part_of}", style=_PLAIN))
    ours = any(each.kind == "expire" for each in change.actions)
    if change.state.transaction is not None and change.state.transaction.message and not ours:
        parts.append(Text(repr(change.state.transaction.message), style="italic"))
    return Text("; ").join(parts)


def _rows_touched(actions: Iterable[Action]) -> list[Text]:
    """Return a phrase such as: insert 40, update 3 rows."""
    touched = [each for each in actions if each.kind in _OF_ROWS]
    if not touched:
        return []
    phrases = [Text(f"{each.kind} {each.details['rows']:,}", style=_STYLES[each.kind]) for each in touched]
    plural = "" if touched[-1].details["rows"] == 1 else "s"
    return [Text(", ").join(phrases).append(f" row{plural}", style=_STYLES[touched[-1].kind])]


def _indexes(actions: Iterable[Action]) -> list[Text]:
    """Return phrases such as: extend indexes body_idx, price_idx."""
    by_verb: dict[str, list[str]] = {}
    for each in actions:
        if each.kind in _OF_INDEXES:
            by_verb.setdefault(_OF_INDEXES[each.kind], []).append(each.details["index"])
    return [
        Text(f"{verb} {'index' if len(names) == 1 else 'indexes'} {', '.join(names)}", style=_PLAIN)
        for verb, names in by_verb.items()
    ]


def _commits(actions: Iterable[Action], regions: Mapping[str, str]) -> list[Text]:
    """Return a phrase such as: commit generations 4–6 of region 0. Regions with the same generations are grouped."""
    by_range: dict[tuple[int, int], list[str]] = {}
    for each in actions:
        if each.kind == "commit":
            region = each.details["region"]
            name = regions.get(region, region)
            by_range.setdefault((each.details["first"], each.details["last"]), []).append(name)
    parts = [f"{span(first, last)} of {_together(names)}" for (first, last), names in by_range.items()]
    several = len(parts) > 1 or any(first < last for first, last in by_range)
    return [Text(f"commit generation{'s' * several} {' and '.join(parts)}", style=_STYLES["commit"])] if parts else []


def _loaded(action: Action, tokens: Mapping[str, str]) -> Text:
    """Return a phrase such as: load 'books-2026'."""
    load = action.details["load"]
    name = repr(tokens[load]) if load in tokens else load
    said = f"load {name}" if action.kind == "load" else f"load {name} ended without its rows"
    return Text(said, style=_STYLES[action.kind])


def _together(names: Sequence[str]) -> str:
    """Shorten region 0, region 1 and region 2 to regions 0–2."""
    numbers = sorted(int(name.removeprefix("region ")) for name in names if name.startswith("region "))
    if len(numbers) < 2 or len(numbers) < len(names):
        return ", ".join(sorted(names))
    return f"regions {ranges(numbers)}"


def _compacted(details: Mapping[str, Any]) -> str:
    dropped = details["deleted_rows_dropped"]
    saved = details["bytes_before"] - details["bytes_after"]
    parts = [f"compact {count(details['fragments_before'], 'fragment')} into {details['fragments_after']:,}"]
    if dropped:
        parts.append(f"{count(dropped, 'deleted row')} dropped")
    if saved > 0:
        parts.append(f"{decimal(saved)} freed")
    return ", ".join(parts)


_PHRASES: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "overwrite": lambda details: f"overwrite everything with {count(details['rows'], 'row')}",
    "restore": lambda details: f"restore version {details['version']}",
    "create": lambda details: f"create the table: {', '.join(details['columns'])}",
    "compact": _compacted,
    "reserve": lambda _: "reserve fragment numbers for a compaction",
    "column added": lambda details: f"add column {details['column']} {details['type']}",
    "column dropped": lambda details: f"drop column {details['column']}",
    "column changed": lambda details: f"change column {details['was']} to {details['column']} {details['type']}",
    "columns rewritten": lambda details: f"rewrite columns of {count(details['rows'], 'row')}",
    "ingestion": lambda details: f"ingestion {details['state']}",
    "settings": lambda details: f"set {', '.join(details['keys'])}",
    "barrier": lambda _: "older versions are deleted; writes that were planned on them conflict",
    "other": lambda details: f"nothing changed (Lance: {details['operation']})",
}


def _change_json(change: Change, regions: Mapping[str, str]) -> dict[str, Any]:
    state = change.state
    actions = None if change.actions is None else [_action_json(each, regions) for each in change.actions]
    return {
        "version": state.version,
        "time": _when(state.seconds).isoformat(),
        "rows": state.rows,
        "fragments": len(state.fragments),
        "bytes": state.bytes,
        "operation": None if state.transaction is None else state.transaction.operation,
        "actions": actions,
        "part_of": change.part_of,
    }


def _action_json(action: Action, regions: Mapping[str, str]) -> dict[str, Any]:
    named = {"name": regions.get(action.details["region"])} if action.kind in ("commit", "mark") else {}
    if action.kind in _LOADS:
        named = {"token": regions.get(action.details["load"])}
    return {"action": action.kind, **action.details, **named}


# ---- the difference between two versions ---------------------------------------------------------------------------


def render_diff(uri: str, found: VersionDiff, keys: int) -> RenderableType:
    """Return a difference for people, with at most `keys` keys of each kind."""
    table = plain_table()
    table.add_column("rows", no_wrap=True)
    table.add_column("count", justify="right", no_wrap=True)
    table.add_column("keys" if keys else "", ratio=1)
    for name, style, rows in (
        ("added", "green", found.added),
        ("removed", "red", found.removed),
        ("changed", "yellow", found.changed),
    ):
        some = [_key(each) for each in rows.slice(0, keys).to_pylist()] + ["…"] * bool(keys and rows.num_rows > keys)
        table.add_row(Text(name, style=style), f"{rows.num_rows:,}", Text(", ".join(some), overflow="fold"))
    table.add_row("same", f"{found.same:,}", "")
    lines: list[RenderableType] = [Text(f"{uri}: version {found.before} to {found.after}", overflow="fold"), table]
    if found.columns:
        by_column = ", ".join(f"{name} ({rows:,})" for name, rows in found.columns.items())
        lines.append(f"changed columns: {by_column}")
    for what, names in (("added", found.columns_added), ("dropped", found.columns_dropped)):
        if names:
            lines.append(f"columns {what}: {', '.join(names)}")
    return Group(*lines)


def _key(row: Mapping[str, Any]) -> str:
    values = [str(value) for value in row.values()]
    return values[0] if len(values) == 1 else f"({', '.join(values)})"


# ---- words ---------------------------------------------------------------------------------------------------------


def _when(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
