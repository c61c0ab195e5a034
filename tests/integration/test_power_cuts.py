"""Power cuts: which losses the model allows, and that no cut of a short run loses acknowledged rows."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.conftest import extent
from tests.messages import raises
from tests.power_cuts.again import first_cuts, recorded_again
from tests.power_cuts.check import Lost, check
from tests.power_cuts.cuts import Cut, State, gone_back, sample, state_of
from tests.power_cuts.many import cut_many, keep, recorded, scratch
from tests.power_cuts.model import DIRECTORY, FILE, ROOT, Change, Operation, Recording, Tree
from tests.power_cuts.planted import PLANTED
from tests.power_cuts.record import DISK, NotRecorded, record
from tests.power_cuts.searches import unlike_searches
from tests.power_cuts.workloads import open_table, row, vector

SEED = 1
CUTS, CUTS_OF_A_FAULT = extent(20, 400), 40


# ---- the model -------------------------------------------------------------------------------------------------------


class Script:
    """A recording written by hand: each call returns before the next one begins."""

    def __init__(self) -> None:
        self.recording = Recording()
        self.line = 0

    def _add(self, kind: str, inode: int, **what: object) -> None:
        self.line += 2
        self.recording.add(Operation(kind, self.line, self.line + 1, inode, **what))  # type: ignore[arg-type]

    def make(self, name: str, parent: int = ROOT, kind: str = FILE) -> int:
        inode = self.recording.new(kind)
        self._add("names", parent, changes=(Change(parent, name, inode),))
        return inode

    def write(self, inode: int, data: bytes, offset: int = 0) -> None:
        self._add("data", inode, data=data, offset=offset)

    def rename(self, old: str, new: str, inode: int) -> None:
        self._add("names", ROOT, changes=(Change(ROOT, old, None), Change(ROOT, new, inode)))

    def sync(self, inode: int) -> None:
        self._add("sync", inode)

    def left(self, profile: str) -> list[Tree]:
        """Return every tree that some hundred cuts at the end leave, without repeats."""
        found: list[Tree] = []
        for loss in ("nothing", "all", "one", "other", "torn", "some"):
            for seed in range(60):
                tree = state_of(self.recording, Cut(self.line + 1, profile, loss, seed)).tree
                if tree not in found:
                    found.append(tree)
        return found


@pytest.mark.parametrize(("profile", "name_may_be_lost"), [("posix", True), ("ext4", False)])
def test_a_sync_of_a_file_covers_its_bytes_and_on_ext4_its_name(profile: str, name_may_be_lost: bool) -> None:
    script = Script()
    file = script.make("a")
    script.write(file, b"x" * 9000)
    script.sync(file)
    left = script.left(profile)
    assert {"a": b"x" * 9000} in left
    assert ({} in left) == name_may_be_lost
    assert len(left) == 1 + name_may_be_lost


@pytest.mark.parametrize("profile", ["posix", "ext4"])
def test_a_sync_of_a_directory_covers_names_in_it_and_no_bytes(profile: str) -> None:
    script = Script()
    file = script.make("a")
    script.write(file, b"x" * 9000)
    script.sync(ROOT)
    left = script.left(profile)
    assert all("a" in tree for tree in left)
    assert {"a": b""} in left
    assert {"a": b"x" * 8192} in left or {"a": b"x" * 4096} in left


def test_a_directory_whose_name_was_not_synced_takes_what_is_in_it_along() -> None:
    script = Script()
    folder = script.make("d", kind=DIRECTORY)
    script.write(script.make("a", folder), b"x")
    script.sync(folder)
    assert {} in script.left("posix")


@pytest.mark.parametrize("profile", ["posix", "ext4"])
def test_a_rename_is_made_whole_or_not_at_all(profile: str) -> None:
    script = Script()
    for name, data in (("old", b"1"), ("new", b"2")):
        file = script.make(name)
        script.write(file, data)
        script.sync(file)
    script.sync(ROOT)
    script.rename("new", "old", file)
    left = script.left(profile)
    assert {"old": b"1", "new": b"2"} in left
    assert {"old": b"2"} in left
    assert len(left) == 2


def test_blocks_of_a_file_that_was_not_synced_may_read_as_zeros_on_posix_only() -> None:
    script = Script()
    file = script.make("a")
    script.sync(ROOT)
    script.write(file, b"x" * 1024)
    script.write(file, b"y" * 512, 1024)
    assert {"a": bytes(1024) + b"y" * 512} in script.left("posix")
    assert not any(b"\0" in (tree["a"] or b"") for tree in script.left("ext4"))


# ---- the recorder ----------------------------------------------------------------------------------------------------


@pytest.fixture
def place() -> Iterator[Path]:
    with scratch() as path:
        yield path


def python(code: str, place: Path) -> list[str]:
    return [sys.executable, "-c", f"import mmap, os\nos.chdir({str(place / DISK)!r})\n{code}"]


def test_what_a_program_does_to_its_files_is_recorded_with_its_bytes(place: Path) -> None:
    code = """
at = os.path.abspath
os.makedirs(at('d/e'))
with open('d/e/f', 'wb', buffering=0) as file:
    file.write(b'one'); file.seek(10); os.writev(file.fileno(), [b'two', b'3'])
    os.pwrite(file.fileno(), b'4', 5); os.ftruncate(file.fileno(), 12); os.fsync(file.fileno())
os.link(at('d/e/f'), at('d/g')); os.rename(at('d/g'), at('h')); os.unlink(at('d/e/f')); os.rmdir(at('d/e'))
"""
    recording = record(python(code, place), place)
    assert recording.whole() == {"d": None, "h": b"one\0\0004\0\0\0\0tw"}


def test_what_was_on_the_disk_before_is_durable(place: Path) -> None:
    code = """
with open('d/g', 'wb', buffering=0) as file:
    file.write(b'new'); os.fsync(file.fileno())
os.rename(os.path.abspath('d/g'), os.path.abspath('d/f'))
"""
    recording = record(python(code, place), place, tree={"d": None, "d/f": b"old"}, marks=[{"done": 1}])
    assert recording.whole() == {"d": None, "d/f": b"new"}
    left = [state_of(recording, Cut(line, "posix", "all")) for line in recording.cuts]
    assert all(state.tree == {"d": None, "d/f": b"old"} and state.marks == [{"done": 1}] for state in left)


def test_a_call_that_the_recorder_cannot_follow_is_refused(place: Path) -> None:
    code = """
with open('f', 'wb+') as file:
    file.truncate(10)
    mmap.mmap(file.fileno(), 10)[:3] = b'abc'
"""
    with raises(NotRecorded):
        record(python(code, place), place)


# ---- memwal ----------------------------------------------------------------------------------------------------------


def test_no_power_cut_of_a_short_run_or_of_its_recoveries_loses_what_was_acknowledged(place: Path) -> None:
    """The power fails up to three times."""
    recordings = {"small": recorded("small")}
    for name, recovery in (("small", "small.again1"), ("small.again1", "small.again1.again1")):
        (first,) = first_cuts(recordings[name], SEED, 1)
        with scratch() as other:
            recordings[recovery] = recorded_again(first, other)
    for name, recording in recordings.items():
        keep(recording, place / name)
    outcomes = dict(cut_many({name: place / name for name in recordings}, SEED, CUTS, workers=1))
    assert not [failed for outcome in outcomes.values() for failed in outcome.failures.items()]
    assert CUTS - len(recordings) < sum(outcome.cuts for outcome in outcomes.values()) <= CUTS
    assert any("torn" in remark for outcome in outcomes.values() for remark in outcome.remarks)


def test_zeros_are_excused_only_where_all_holds_without_the_version_that_was_not_synced() -> None:
    tree: Tree = {
        "a/t": None,
        "a/t/_mem_wal/synced.json": b'{"version": 1}',
        f"a/t/_versions/{2**64 - 2:020}.manifest": b"1",
        f"a/t/_versions/{2**64 - 3:020}.manifest": b"2",
        "a/t/_versions/latest_version_hint.json": b"{}",
        "b": b"",
    }
    state = State(Cut(1, "posix", "torn"), tree, [], (), ("a/t/data/1.lance",))
    assert gone_back(state).tree == {
        **{path: data for path, data in tree.items() if not path.endswith(("hint.json", f"{2**64 - 3:020}.manifest"))},
        f"a/t/_versions/{2**64 - 3:020}.manifest.torn": b"2",
    }
    assert gone_back(replace(state, zeroed=())).tree == tree


def test_a_search_that_finds_other_rows_than_a_scan_is_told(place: Path) -> None:
    values = {id: id // 3 for id in range(9)}
    with open_table(place / "t", indexed=True, vectors=True) as table:
        table.put([row(id, value, vectors=True) for id, value in values.items()])
        assert unlike_searches(table, list(values.items()), "latest") == ""
        assert "n = 0 counts 3 rows" in unlike_searches(table, [(0, 0)], "latest")
        table.put([{**row(1, 0, vectors=True), "v": "another"}])
        assert "word0 matches ids [0, 2]" in unlike_searches(table, list(values.items()), "latest")
        table.put([{**row(1, 0, vectors=True), "e": vector(77, 7)}])
        assert "nearest to (" in unlike_searches(table, list(values.items()), "latest")


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_found(fault: str, place: Path) -> None:
    for state in sample(recorded("small", fault), SEED, CUTS_OF_A_FAULT):
        if not state.zeroed:  # zeroed files may end this process
            try:
                check(state, place / "after")
            except Lost:
                return
    pytest.fail(f"{CUTS_OF_A_FAULT} cuts have not found the fault")
