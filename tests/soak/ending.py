"""Checks at the end of a run: every written row exists once in its newest version, and nothing is left behind."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import lance

from memwal import wal
from tests.chaos import difference
from tests.clean import assert_collected
from tests.conftest import Made
from tests.soak.journal import last, lines
from tests.soak.scene import PATIENCE, Scene
from tests.soak.stream import Plan, State, mismatch

_ALLOWED_LEFT = ("blockmgr-", "spark-", "hsperfdata_", ".tmp")
"""Prefixes of directories of Spark and, with a dot, of Rust's libraries: a killed process cannot remove them. A bar
checks that their number does not grow (`bars.FILES`)."""


def finish(scene: Scene) -> Iterator[str]:
    """End every process in order; yield the problems, a line each."""
    scene.stream.stop()
    scene.look()
    for name in (*scene.writers, "reader"):
        yield from _ended(scene, name)
    try:
        scene.finish()
    except AssertionError as error:
        yield str(error)
    assert scene.place.proxy is not None
    scene.place.proxy.heal()
    expected = expected_rows(scene)
    yield from _told(scene, expected)
    yield from _ended(scene, "feed")
    for name in ("daemon 0", "daemon 1"):
        yield from _ended(scene, name)
    yield from _on_storage(scene, expected)
    yield from _left(scene)


def expected_rows(scene: Scene) -> State:
    """Return the expected version of each key, from the produced records and the writers' journals."""
    expected = dict(scene.stream.state)
    for number, name in enumerate(scene.writers):
        expected |= Plan(number, scene.seed).state(last(scene.journal(name), "acked") or 0)
    return expected


def told(path: Path) -> tuple[State, int, list[str]]:
    """Replay the feed's journal: return its rows, its number of changes, and the problems.

    Problems: an insert of an existing row, an update or delete of a missing one, a version that is not newer than the
    one before.
    """
    state: State = {}
    newest: State = {}
    number, wrong = 0, list[str]()
    for line in lines(path):
        for kind, id, version in line.get("changes", ()):
            number += 1
            if (kind == "insert") == (id in state):
                wrong.append(f"feed: {kind} of key {id}, version {version}, after {state.get(id)}")
            if kind == "delete":
                state.pop(id, None)
                continue
            if version <= newest.get(id, 0):
                wrong.append(f"feed: key {id}: version {version} after {newest[id]}")
            state[id] = newest[id] = version
    return state, number, wrong


def _told(scene: Scene, expected: State) -> Iterator[str]:
    """Wait until the feed has delivered every change; yield the problems."""
    until = time.monotonic() + PATIENCE
    state, _, wrong = told(scene.journal("feed"))
    while state != expected and time.monotonic() < until:
        scene.look()
        time.sleep(2.0)
        state, _, wrong = told(scene.journal("feed"))
    yield from wrong[:5]
    if said := mismatch(state, expected):
        yield f"feed: {said}"


def _ended(scene: Scene, name: str) -> Iterator[str]:
    """End a process by SIGTERM: it must end with exit code 0, and leave no process behind."""
    kept = scene.kept()[name]
    code = kept.close()
    if code:
        yield f"{name} ended with exit code {code}; see {kept.log}"
    if kept.left:
        yield f"{name} left processes behind: {kept.left}"


def _on_storage(scene: Scene, expected: State) -> Iterator[str]:
    """Check the base table: every row with every column as written; `verify` and a collection find nothing."""
    made, place = Made(), scene.place
    found = lance.dataset(place.uri, storage_options=dict(place.options)).to_table().to_pylist()
    rows = [made.row(id, version) for id, version in expected.items()]
    if sorted(found, key=lambda row: row["id"]) != sorted(rows, key=lambda row: row["id"]):
        yield f"the base table: {difference(found, rows)}"
    verified = scene.command("verify", str(scene.config), "--deep")
    if verified.returncode:
        yield f"verify: {(verified.stdout + verified.stderr).strip()[:1000]}"
    try:
        assert_collected(wal.open_store(place.uri, dict(place.options)), place.uri)
    except AssertionError as error:
        yield f"a collection at the end: {error}"


def _left(scene: Scene) -> Iterator[str]:
    """Check that only killed processes left files in the directory for temporary files."""
    names = sorted(each.name for each in scene.temporary.iterdir())
    if ours := [name for name in names if not name.startswith(_ALLOWED_LEFT)]:
        yield f"temporary files are left: {ours[:5]}"
