"""What must hold when all is over: everything that was written is there once and newest, and nothing is left behind."""

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
"""Names of directories of Spark and, with a dot, of Rust's libraries: a process that is killed cannot remove them. That
there are not ever more of them is a bar (`bars.FILES`)."""


def finish(scene: Scene) -> Iterator[str]:
    """End everything in order; what is wrong, a line each."""
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
    """The version of each key, by what was produced and what the writers' journals say."""
    expected = dict(scene.stream.state)
    for number, name in enumerate(scene.writers):
        expected |= Plan(number, scene.seed).state(last(scene.journal(name), "acked") or 0)
    return expected


def told(path: Path) -> tuple[State, int, list[str]]:
    """The rows that the feed's journal comes to, how many changes it has, and what is wrong with them: an insert of a
    row that is there, an update or delete of one that is not, a version that is not newer than the one before.
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
    """The feed tells all, as soon as it gets there."""
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
    """End a process in order: it must end by itself, with exit code 0, and leave no process behind."""
    kept = scene.kept()[name]
    code = kept.close()
    if code:
        yield f"{name} ended with exit code {code}; see {kept.log}"
    if kept.left:
        yield f"{name} left processes behind: {kept.left}"


def _on_storage(scene: Scene, expected: State) -> Iterator[str]:
    """The base table has every row, each column as it was written; verify and a collection find nothing."""
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
    """Nothing is left in the directory for temporary files but what killed processes could not remove."""
    names = sorted(each.name for each in scene.temporary.iterdir())
    if ours := [name for name in names if not name.startswith(_ALLOWED_LEFT)]:
        yield f"temporary files are left: {ours[:5]}"
