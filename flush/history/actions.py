"""List what each version of the base table changed, as actions: `memwal log`.

The functions compare two neighbouring states of the table (`flush.base.state`) and return actions. They are pure,
except those that read the states. Rows are counted from the manifests' fragments, so no row is read:

    added     rows of fragments that the version before did not have
    removed   rows newly deleted in fragments that stayed, and all live rows of fragments that are gone

The transaction identifies an append, a delete and a compaction. Any other change of rows is a merge: every row that it
replaces is removed and added, so `min(added, removed)` rows were updated, and the rest was inserted or deleted. This is
exact for memwal's commits, whose passes either delete or upsert.

A commit that deletes rows and upserts others is two versions (flush.commits.committer, steps 5 and 6). The first
carries no progress; it is recognised by the second, which was planned on it. A commit into a table without a key is a
version that inserts rows and records the committed generations in its metadata, and one that only raises Lance's marker
to them ("mark"). A load (flush.commits.load) is one version that inserts and replaces rows, and has a separate marker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from uuid import UUID

from memwal.flush.base.manifest import COMMITTED, MEM_WAL_INDEX
from memwal.flush.base.state import TableState, read_state, versions
from memwal.flush.base.swap import BARRIER
from memwal.flush.base.ttl import EXPIRED
from memwal.flush.commits.load_notes import ended_id, is_ended, is_load
from memwal.wal import Corrupt, ObjectStore
from memwal.wal.parallel_map import each

_READERS = 8
_LANCES_OWN = "__lance_"
_OPERATIONS_OF_ROWS = ("append", "delete", "overwrite", "rewrite")


@dataclass(frozen=True)
class Action:
    """One change that a version made. `details` are numbers and texts, serialisable as JSON."""

    kind: str
    """create, append, insert, update, delete, expire, overwrite, restore, commit, mark, compact, reserve, index built,
    index extended, index dropped, column added, column dropped, column changed, columns rewritten, ingestion, settings,
    barrier, other.
    """
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Change:
    """One version and its actions; None if the version before it is not kept, so that they are unknown."""

    state: TableState
    actions: tuple[Action, ...] | None
    part_of: int | None = None
    """For a deletes pass: the version that completes its commit."""


@dataclass(frozen=True)
class History:
    """The newest versions of a table, newest first.

    `older`: number of kept versions before them. `gone`: versions that were cleaned up during the read.
    """

    changes: tuple[Change, ...]
    older: int
    gone: tuple[int, ...] = ()


def read_history(store: ObjectStore, limit: int | None = None) -> History:
    """Return the newest `limit` versions (None: all) of the table at the root of `store`, newest first.

    Reads about three small objects per version. Versions that are cleaned up in the meantime are listed in `gone`.
    Raises Corrupt if an existing version cannot be read; StoreUnavailable, StoreRefused.
    """
    kept = versions(store)
    wanted = kept if limit is None else kept[-limit:]
    # One more, to compare the oldest with.
    numbers = kept[max(0, len(kept) - len(wanted) - 1) :]
    states = each(partial(_state, store), numbers, _READERS)
    by_version = {number: state for number, state in zip(numbers, states, strict=True) if state is not None}
    changes, following = [], None
    for number in reversed(wanted):
        if (state := by_version.get(number)) is not None:
            changes.append(change(by_version.get(number - 1), state, following))
            following = state
    gone = tuple(number for number in wanted if number not in by_version)
    return History(tuple(changes), len(kept) - len(wanted), gone)


def change(before: TableState | None, after: TableState, following: TableState | None = None) -> Change:
    """Return what version `after` changed in `before`, the version below it. `following`: the version above, or None.

    Pure. `before`: None for the first version, or if it is not kept.
    """
    if before is None and after.version > 1:
        return Change(after, None)
    if before is None:
        columns = [name for name, _ in after.columns.values()]
        return Change(after, (Action("create", {"columns": columns, "rows": after.rows}),))
    actions = tuple(action for step in _STEPS for action in step(before, after))
    if not actions and after.transaction is not None and after.transaction.message == BARRIER:
        actions = (Action("barrier"),)
    elif not actions:  # an empty pass, reserved fragment numbers
        operation = _operation(after)
        actions = (Action("reserve" if operation == "reserve_fragments" else "other", {"operation": operation}),)
    completed = following is not None and _is_deletes_pass(actions, after, following)
    return Change(after, actions, following.version if completed and following is not None else None)


def _state(store: ObjectStore, version: int) -> TableState | None:
    """Read a version; None if it was cleaned up in the meantime."""
    try:
        return read_state(store, version)
    except Corrupt:
        if version in versions(store):
            raise
        return None


def _is_deletes_pass(actions: Sequence[Action], state: TableState, following: TableState) -> bool:
    planned_on = following.transaction is not None and following.transaction.read_version == state.version
    # Its rows may have been deleted before: then it changed nothing.
    deletes_only = [action.kind for action in actions] in (["delete"], ["other"])
    progressed = (id for id in following.committed if following.committed[id] != state.committed.get(id))
    return deletes_only and planned_on and any(not is_load(id) for id in progressed)


def _operation(state: TableState) -> str:
    return state.transaction.operation if state.transaction is not None else "unknown"


def _rows(before: TableState, after: TableState) -> Iterator[Action]:
    new = [fragment for id, fragment in after.fragments.items() if id not in before.fragments]
    gone = [fragment for id, fragment in before.fragments.items() if id not in after.fragments]
    stayed = [(before.fragments[id], fragment) for id, fragment in after.fragments.items() if id in before.fragments]
    added = sum(fragment.live for fragment in new)
    removed = sum(fragment.live for fragment in gone) + sum(max(0, new.deleted - old.deleted) for old, new in stayed)
    operation = _operation(after)
    if operation == "restore" and after.transaction is not None:
        yield Action("restore", {"version": after.transaction.restored, "rows": after.rows})
    elif operation == "overwrite":
        yield Action("overwrite", {"rows": after.rows})
    elif operation == "rewrite":
        numbers = {
            "fragments_before": len(gone),
            "fragments_after": len(new),
            "rows": added,
            "deleted_rows_dropped": sum(fragment.deleted for fragment in gone),
            "bytes_before": before.bytes,
            "bytes_after": after.bytes,
        }
        yield Action("compact", numbers)
    elif operation == "append":
        yield Action("append", {"rows": added})
    elif operation == "delete" and after.transaction is not None and after.transaction.message == EXPIRED:
        yield Action("expire", {"rows": removed})
    else:
        yield from _merge(added, removed)
        # Columns rewritten into new files of old fragments, without added columns; `_columns` reports those.
        touched = [new for old, new in stayed if set(new.files) - set(old.files)]
        if touched and before.columns == after.columns:
            rows = sum(fragment.live for fragment in touched)
            yield Action("columns rewritten", {"fragments": len(touched), "rows": rows})


def _merge(added: int, removed: int) -> Iterator[Action]:
    updated = min(added, removed)
    for kind, rows in (("insert", added - updated), ("update", updated), ("delete", removed - updated)):
        if rows:
            yield Action(kind, {"rows": rows})


def _progress(before: TableState, after: TableState) -> Iterator[Action]:
    for region in sorted(after.committed, key=str):
        first, last = before.committed.get(region, 0) + 1, after.committed[region]
        if last >= first and is_load(region):
            if not is_ended(region):
                ended = after.committed.get(ended_id(region)) == last
                yield Action("load ended" if ended else "load", {"load": str(region)})
        elif last >= first:
            yield Action("commit", {"region": str(region), "first": first, "last": last})
        elif before.marked.get(region, 0) < after.marked.get(region, 0):
            yield Action("mark", {"region": str(region), "last": after.marked[region]})


def _indexes(before: TableState, after: TableState) -> Iterator[Action]:
    shown = _shown(after.indexes)
    for name, segments in shown.items():
        if name not in before.indexes:
            yield Action("index built", {"index": name})
        # Not reported: a segment that was removed because it no longer covered rows, and an index that a compaction
        # rewrites because it moves rows.
        elif segments - before.indexes[name] and _operation(after) not in _OPERATIONS_OF_ROWS:
            yield Action("index extended", {"index": name, "segments": len(segments)})
    for name in _shown(before.indexes):
        if name not in shown:
            yield Action("index dropped", {"index": name})


def _shown(indexes: Mapping[str, frozenset[UUID]]) -> dict[str, frozenset[UUID]]:
    return {name: segments for name, segments in sorted(indexes.items()) if not name.startswith(_LANCES_OWN)}


def _columns(before: TableState, after: TableState) -> Iterator[Action]:
    for id, (name, kind) in after.columns.items():
        old_name, old_kind = before.columns.get(id, ("", ""))
        if id not in before.columns:
            yield Action("column added", {"column": name, "type": kind})
        elif (old_name, old_kind) != (name, kind):
            yield Action("column changed", {"column": name, "type": kind, "was": f"{old_name} {old_kind}"})
    for id, (name, kind) in before.columns.items():
        if id not in after.columns:
            yield Action("column dropped", {"column": name, "type": kind})


def _settings(before: TableState, after: TableState) -> Iterator[Action]:
    old, new = before.settings, after.settings
    # `_progress` reports what is committed.
    changed = sorted(key for key in {*old, *new} - {COMMITTED} if old.get(key) != new.get(key))
    if changed:
        yield Action("settings", {"keys": changed})


def _mem_wal(before: TableState, after: TableState) -> Iterator[Action]:
    if MEM_WAL_INDEX in after.indexes and MEM_WAL_INDEX not in before.indexes:
        yield Action("ingestion", {"state": "set up"})
    if MEM_WAL_INDEX in before.indexes and MEM_WAL_INDEX not in after.indexes:
        yield Action("ingestion", {"state": "removed"})


_STEPS: tuple[Callable[[TableState, TableState], Iterator[Action]], ...] = (
    _rows,
    _progress,
    _columns,
    _indexes,
    _mem_wal,
    _settings,
)
