"""The store contract: one suite for every store, and tests of the special features of each store."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from abc import ABC, abstractmethod
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from memwal.wal import LocalStore, ObjectStore, PutOutcome, StoreRefused, StoreUnavailable, WalError, open_store, probe
from memwal.wal.layout import bucket_region, entry_key, sst_key, sst_name
from tests.messages import raises
from tests.support.clock import SeededIds
from tests.support.memory_store import MemoryStore
from tests.support.together import together

KEY = "_mem_wal/r/wal/0001.lance"


class StoreContract(ABC):
    """Tests that every store must pass. A subclass creates an empty store."""

    @pytest.fixture
    @abstractmethod
    def store(self, tmp_path: Path) -> ObjectStore:
        """Return an empty store."""

    def test_the_first_put_wins_and_keeps_its_bytes(self, store: ObjectStore) -> None:
        assert store.put_if_absent(KEY, b"one") is PutOutcome.CREATED
        assert store.put_if_absent(KEY, b"two") is PutOutcome.ALREADY_EXISTS
        assert store.get(KEY) == b"one"

    def test_a_missing_key(self, store: ObjectStore) -> None:
        assert store.get(KEY) is None
        assert not store.exists(KEY)
        assert store.list("") == []
        assert store.children("_mem_wal/") == []
        store.delete(KEY)

    @pytest.mark.parametrize("data", [b"", b"\0", b"x" * 3_000_000])
    def test_bytes_come_back_as_they_went(self, store: ObjectStore, data: bytes) -> None:
        store.put_if_absent(KEY, data)
        assert store.exists(KEY)
        assert store.get(KEY) == data

    def test_put_overwrites(self, store: ObjectStore) -> None:
        store.put("a/hint", b"1")
        store.put("a/hint", b"2")
        assert store.get("a/hint") == b"2"

    def test_a_deleted_key_can_be_created_again(self, store: ObjectStore) -> None:
        store.put_if_absent(KEY, b"one")
        store.delete(KEY)
        assert not store.exists(KEY)
        assert store.put_if_absent(KEY, b"two") is PutOutcome.CREATED

    def test_list_and_children(self, store: ObjectStore) -> None:
        for key in ("a/b/1", "a/b/2", "a/c/d/3", "ab/4", "a/5"):
            store.put_if_absent(key, b"")
        assert sorted(store.list("a/")) == ["a/5", "a/b/1", "a/b/2", "a/c/d/3"]
        assert sorted(store.list("a/b/")) == ["a/b/1", "a/b/2"]
        assert sorted(store.list("a")) == ["a/5", "a/b/1", "a/b/2", "a/c/d/3", "ab/4"]
        assert store.children("a/") == ["b", "c"]

    def test_list_some_gives_no_more_than_asked_for(self, store: ObjectStore) -> None:
        keys = {f"a/{number}" for number in range(5)}
        for key in (*keys, "b/1"):
            store.put_if_absent(key, b"")
        for most in (1, 3, 5, 9):
            found = store.list_some("a/", most)
            assert len(found) == len(set(found)) == min(most, 5)
            assert set(found) <= keys
        assert store.list_some("c/", 3) == []

    def test_describe_gives_size_and_age(self, store: ObjectStore) -> None:
        store.put_if_absent("a/1", b"four")
        store.put_if_absent("b/2", b"")
        (found,) = store.describe("a/")
        assert (found.key, found.size) == ("a/1", 4)
        assert found.modified >= 0

    def test_removing_leftovers_keeps_every_object(self, store: ObjectStore) -> None:
        for key in ("a/b/c/1", "a/b/c/2", "a/d/3", "ab/4"):
            store.put_if_absent(key, b"kept")
        for key in ("a/b/c/1", "a/d/3"):
            store.delete(key)
        assert store.leftovers("a/") == []
        for prefix in ("a/", "a/b/", "never/"):
            store.remove_leftovers(prefix)
        assert sorted(store.list("")) == ["a/b/c/2", "ab/4"]
        assert store.get("a/b/c/2") == b"kept"
        store.delete("a/b/c/2")
        store.remove_leftovers("a/")
        assert store.children("") == ["ab"]
        assert store.put_if_absent("ab/5", b"") is PutOutcome.CREATED

    def test_racing_creates_have_one_winner(self, store: ObjectStore) -> None:
        for number in range(20):
            outcomes = together(
                *[partial(store.put_if_absent, f"race/{number}", str(racer).encode()) for racer in range(8)]
            )
            assert sorted(outcome.value for outcome in outcomes) == ["already exists"] * 7 + ["created"]

    def test_probe_passes_and_leaves_nothing(self, store: ObjectStore) -> None:
        probe(store, SeededIds())
        assert store.list("") == []


class TestLocalStore(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> ObjectStore:
        return LocalStore(tmp_path / "table.lance")


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> ObjectStore:
        return MemoryStore()


def test_files_of_killed_puts_are_leftovers(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    sst = "_mem_wal/r/00c0ffee_gen_4"
    for key in (f"{sst}/data/x.lance", f"{sst}1/data/y.lance"):
        store.put_if_absent(key, b"rows")
    for folder in (f"{sst}/data", f"{sst}1"):
        (tmp_path / folder / ".memwal-put-1-0").write_bytes(b"half")
    (found,) = store.leftovers(f"{sst}/")
    assert (found.key, found.size) == (f"{sst}/data/.memwal-put-1-0", 4)
    assert len(store.leftovers("_mem_wal/")) == 2
    store.delete(f"{sst}/data/x.lance")
    store.remove_leftovers(f"{sst}/")
    assert not (tmp_path / sst).exists()
    assert files_below(tmp_path / f"{sst}1") == [".memwal-put-1-0", "data/y.lance"]


def test_only_calls_of_s3_go_over_a_network(tmp_path: Path) -> None:
    options = {"aws_access_key_id": "me", "aws_secret_access_key": "mine", "aws_region": "eu-central-1"}
    assert open_store("s3://bucket/t.lance", options).remote
    assert not open_store(str(tmp_path)).remote
    assert not open_store(f"file://{tmp_path}").remote


def test_the_probe_ends_where_a_thread_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    real, started = threading.Thread.start, iter(range(1))

    def start(thread: threading.Thread) -> None:
        if next(started, None) is None:
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    with raises(RuntimeError):
        probe(MemoryStore(), SeededIds())


# ---- local files -----------------------------------------------------------------------------------------------------


def files_below(root: Path) -> list[str]:
    return sorted(str(each.relative_to(root)) for each in root.rglob("*") if each.is_file())


def failing(monkeypatch: pytest.MonkeyPatch, name: str, code: int, *, directories: bool | None = None) -> None:
    """Make os.`name` fail; fsync: only on directories, only on files, or on both."""
    real = getattr(os, name)

    def fail(*args: Any, **kwargs: Any) -> Any:
        if directories is None or directories == Path(f"/proc/self/fd/{args[0]}").is_dir():
            raise OSError(code, os.strerror(code))
        return real(*args, **kwargs)

    monkeypatch.setattr(os, name, fail)


def test_nothing_is_left_beside_the_objects(store: LocalStore, tmp_path: Path) -> None:
    store.put_if_absent("a/1", b"y")
    store.put("a/hint", b"z")
    assert files_below(tmp_path) == ["a/1", "a/hint"]


def test_a_temporary_file_of_a_killed_process_is_no_object(store: LocalStore, tmp_path: Path) -> None:
    (tmp_path / "a" / f".memwal-put-{os.getpid()}-1").write_bytes(b"half")
    assert store.put_if_absent("a/2", b"y") is PutOutcome.CREATED
    assert sorted(store.list("")) == ["a/1", "a/2"]


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    """Return a store with one object, in the directory that later puts use."""
    store = LocalStore(tmp_path)
    store.put_if_absent("a/1", b"x")
    return store


@pytest.mark.parametrize(
    ("call", "code", "error"),
    [
        ("write", errno.ENOSPC, StoreUnavailable),
        ("fsync", errno.ENOSPC, StoreUnavailable),
        ("stat", errno.ESTALE, StoreUnavailable),
        ("stat", errno.ETIMEDOUT, StoreUnavailable),
        ("link", errno.EROFS, StoreRefused),
        ("link", errno.EACCES, StoreRefused),
        ("link", errno.EPERM, StoreRefused),
    ],
    ids=["full at write", "full at fsync", "stale", "timeout", "read-only", "access", "permission"],
)
def test_an_error_before_the_link_writes_nothing_and_names_the_path(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int, error: type[WalError]
) -> None:
    with monkeypatch.context() as patch:
        failing(patch, call, code, directories=False if call == "fsync" else None)
        with raises(error):
            store.put_if_absent("a/2", b"y")
    assert files_below(tmp_path) == ["a/1"]
    assert store.put_if_absent("a/2", b"y") is PutOutcome.CREATED


def test_a_path_through_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = LocalStore(tmp_path / "file")
    for call in (lambda: store.put_if_absent("a/1", b""), lambda: store.put("a/1", b"")):
        with raises(StoreRefused):
            call()


def test_after_a_failed_directory_sync_nothing_is_called_durable(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        failing(patch, "fsync", errno.EIO, directories=True)
        assert store.put_if_absent("a/2", b"y") is PutOutcome.OUTCOME_UNKNOWN
    assert store.put_if_absent("a/2", b"y") is PutOutcome.OUTCOME_UNKNOWN
    assert store.put_if_absent("a/3", b"z") is PutOutcome.OUTCOME_UNKNOWN
    for number in range(100):  # more directories than are kept open
        assert store.put_if_absent(f"b{number}/1", b"") is PutOutcome.CREATED
    assert store.put_if_absent("a/4", b"z") is PutOutcome.OUTCOME_UNKNOWN


def test_an_existing_name_is_synced_before_it_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    LocalStore(tmp_path).put_if_absent("a/1", b"x")
    store = LocalStore(tmp_path)
    store.put_if_absent("a/2", b"x")
    synced: list[str] = []
    real = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda fd: (synced.append(str(Path(f"/proc/self/fd/{fd}").readlink())), real(fd))[1]
    )
    assert store.put_if_absent("a/1", b"x") is PutOutcome.ALREADY_EXISTS
    assert synced[-1] == f"{tmp_path}/a"


def test_a_directory_removed_under_a_writer_is_not_made_again(store: LocalStore, tmp_path: Path) -> None:
    store.delete("a/1")
    (tmp_path / "a").rmdir()
    for _ in range(2):
        with raises(StoreRefused):
            store.put_if_absent("a/1", b"y")
    assert not (tmp_path / "a").exists()
    assert LocalStore(tmp_path).put_if_absent("a/1", b"y") is PutOutcome.CREATED


def test_a_directory_removed_is_not_made_again_when_its_descriptor_was_let_go(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "t")
    for number in range(100):
        store.put_if_absent(f"d{number}/1", b"")
    shutil.rmtree(tmp_path / "t")
    for key in ("d0/2", "d99/2", "new/1"):
        with pytest.raises(StoreRefused):
            store.put_if_absent(key, b"x")
        with pytest.raises(StoreRefused):
            store.put(key, b"x")
    assert not (tmp_path / "t").exists()
    (tmp_path / "t" / "d0").mkdir(parents=True)
    for key in ("d0/2", "new/1"):
        with raises(StoreRefused):
            store.put_if_absent(key, b"x")


def test_a_directory_moved_away_takes_no_acknowledged_object_with_it(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "t")
    store.put_if_absent("a/1", b"x")
    shutil.copytree(tmp_path / "t", tmp_path / "copy")
    (tmp_path / "t").rename(tmp_path / "moved")
    (tmp_path / "copy").rename(tmp_path / "t")
    with raises(StoreRefused):
        store.put_if_absent("a/2", b"y")
    assert store.get("a/2") is None


def fails_after(monkeypatch: pytest.MonkeyPatch, name: str, code: int) -> None:
    """Make the first call of os.`name` at or after the next link fail; the link itself is made."""
    linked, real_link, real = False, os.link, getattr(os, name)

    def link(*args: Any, **kwargs: Any) -> None:
        nonlocal linked
        real_link(*args, **kwargs)
        linked = True
        if name == "link":
            raise OSError(code, os.strerror(code))

    def fail(*args: Any, **kwargs: Any) -> Any:
        if linked:
            raise OSError(code, os.strerror(code))
        return real(*args, **kwargs)

    monkeypatch.setattr(os, name, fail)
    monkeypatch.setattr(os, "link", link)


@pytest.mark.parametrize("call", ["link", "stat", "fsync"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EACCES, errno.ETIMEDOUT, errno.ENOENT, errno.EPERM])
def test_an_error_after_the_link_leaves_the_outcome_unknown(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    with monkeypatch.context() as patch:
        fails_after(patch, call, code)
        assert store.put_if_absent("a/2", b"y") is PutOutcome.OUTCOME_UNKNOWN
    assert files_below(tmp_path) == ["a/1", "a/2"]
    again = PutOutcome.OUTCOME_UNKNOWN if call == "fsync" else PutOutcome.ALREADY_EXISTS
    assert store.put_if_absent("a/2", b"y") is again


def test_a_put_into_a_directory_moved_away_is_refused_and_leaves_nothing_in_it(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "t")
    store.put_if_absent("a/1", b"x")
    (tmp_path / "t").rename(tmp_path / "moved")
    with raises(StoreRefused):
        store.put_if_absent("a/2", b"y")
    (tmp_path / "moved").rename(tmp_path / "t")
    assert files_below(tmp_path / "t") == ["a/1"]
    assert store.put_if_absent("a/2", b"z") is PutOutcome.CREATED


def test_a_directory_moved_away_during_the_link_leaves_the_outcome_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(tmp_path / "t")
    store.put_if_absent("a/1", b"x")
    real = os.link

    def link(*args: Any, **kwargs: Any) -> None:
        (tmp_path / "t").rename(tmp_path / "moved")
        real(*args, **kwargs)

    monkeypatch.setattr(os, "link", link)
    assert store.put_if_absent("a/2", b"y") is PutOutcome.OUTCOME_UNKNOWN


def test_a_hint_whose_rename_fails_after_its_effect_leaves_no_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, real = LocalStore(tmp_path), os.replace

    def replace(*args: Any, **kwargs: Any) -> None:
        real(*args, **kwargs)
        raise OSError(errno.EIO, "late")

    monkeypatch.setattr(os, "replace", replace)
    with raises(StoreUnavailable):
        store.put("a/hint", b"1")
    assert files_below(tmp_path) == ["a/hint"]
    assert store.get("a/hint") == b"1"


def test_descriptors_are_bounded(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    for number in range(200):
        store.put_if_absent(f"d{number}/1", b"")
    held = [os.path.realpath(each) for each in Path("/proc/self/fd").iterdir()]
    assert sum(each.startswith(str(tmp_path)) for each in held) <= 64


def test_a_flush_leaves_nothing_behind_in_the_store(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    region = bucket_region(0)
    for generation in range(1, 200):
        sst = sst_name(f"{generation:08x}", generation)
        store.put_if_absent(sst_key(region, sst, "bloom_filter.bin"), b"")
        store.put_if_absent(sst_key(region, f"{sst}/_pk_index", "page"), b"")
    store.put_if_absent(entry_key(region, 1, "lance"), b"")
    assert len(store._used) == 1


def test_url_is_the_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert LocalStore("t").url("a/b") == f"{tmp_path}/t/a/b"
    assert LocalStore("t").url("") == f"{tmp_path}/t"


# ---- opening and probing ---------------------------------------------------------------------------------------------


def test_open_store_by_uri(tmp_path: Path) -> None:
    assert open_store(str(tmp_path), {"a": "b"}).storage_options == {"a": "b"}
    assert open_store(f"file://{tmp_path}/with%20space").url("x") == f"{tmp_path}/with space/x"
    assert not (tmp_path / "with space").exists()


@pytest.mark.parametrize("uri", ["gs://b/t", "az://b/t", "s3a://b/t", "memory://t"])
def test_open_store_refuses_other_schemes(uri: str) -> None:
    with raises(StoreRefused):
        open_store(uri)


def test_open_store_refuses_a_file_and_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for uri in (str(tmp_path / "file"), ""):
        with raises(StoreRefused):
            open_store(uri)


class Careless(MemoryStore):
    """A store that ignores the condition of `put_if_absent`."""

    def put_if_absent(self, key: str, data: bytes) -> PutOutcome:
        self.put(key, data)
        return PutOutcome.CREATED


def test_probe_refuses_a_store_that_ignores_the_condition() -> None:
    store = Careless()
    with pytest.raises(StoreRefused):  # the text names the thread that wrote last
        probe(store, SeededIds())
    assert store.list("") == []
