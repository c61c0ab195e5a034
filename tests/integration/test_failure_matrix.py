"""The failure matrix beyond the log's own calls: faults on the wire to a real S3 server; flush, commit, collection.

On the wire every request of a writer's life, and every request of Lance in the stages, gets one fault; then the storage
is opened again without the proxy and compared with the acknowledged writes. tests/unit/test_wal_faults.py covers the
log's calls of the store's port on every adapter.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from memwal.flush import FlushError
from memwal.wal import Corrupt, ObjectStore, WalError, open_store
from memwal.wal.layout import UNSYNCED_KEY
from tests.failure_matrix import CODES, CREATES, FAULTS, Call, FaultyStore, Killed, SystemCalls, copy_objects
from tests.fault_proxy import (
    Fault,
    FaultProxy,
    Request,
    answers,
    kills_after,
    kills_before,
    lands_later,
    lands_then_answers,
    lands_then_breaks_off,
    lands_then_hangs,
    lands_then_resets,
    listing_behind,
    resets,
    slow,
)
from tests.log_life import LogLife, log_of_two_entries
from tests.s3_fixtures import S3Table
from tests.s3_server import S3Server
from tests.support.clock import FakeClock
from tests.support.memory_store import MemoryStore
from tests.table_stages import STAGES, Owner, check, check_fenced

pytestmark = pytest.mark.usefixtures("retries_at_once")
ROOT = Path(__file__).resolve().parents[2]
CREATED = r"/(wal|manifest)/[01]{64}\."
"""Keys that conditional creates write."""

PUTS = {
    "409": answers(409, "ConditionalRequestConflict"),
    "lands then 500": lands_then_answers(500, "InternalError"),
    "lands then 503": lands_then_answers(503, "SlowDown"),
    "lands then reset": lands_then_resets(),
    "lands then breaks off": lands_then_breaks_off(),
    "lands then timeout": lands_then_hangs(),
    "reset before landing": resets(),
    "412 by our own retry": lands_then_answers(412, "PreconditionFailed"),
    "no answer, lands much later": lands_later(),
    "slow": slow(0.05),
    "permanent failure": answers(403, "AccessDenied"),
    "no conditional writes": answers(501, "NotImplemented"),
}
HARMLESS = (*tuple(PUTS)[:8], "slow")
"""Faults that a writer survives without an error if they occur once."""
READS = (
    answers(503, "SlowDown"),
    resets(),
    slow(0.05),
    answers(403, "AccessDenied"),
    lands_then_resets(),
    lands_then_breaks_off(),
)
LISTS = (listing_behind(), *READS)


PATIENT, IMPATIENT = 60.0, 0.5
"""Seconds to wait for an answer. A request that is slow because of the machine must not count as a second fault."""


def seconds_for_an_answer(fault: Fault | None) -> float:
    """Return a short time for a fault without an answer."""
    return IMPATIENT if fault is not None and fault.hangs else PATIENT


@pytest.fixture(scope="module")
def log_before() -> MemoryStore:
    """Return the initial log of every life."""
    store = MemoryStore()
    log_of_two_entries(store)
    return store


class Wire:
    """Lives over the S3 server, each in a separate directory, seen through the proxy."""

    def __init__(self, table: S3Table, server: S3Server, proxy: FaultProxy, before: MemoryStore) -> None:
        self.table, self.server, self.proxy, self.before = table, server, proxy, before
        self._numbers = itertools.count()

    def live(self, *, lasting: bool = False, **fault: Any) -> tuple[ObjectStore, LogLife]:
        """Run a life with at most one fault (see FaultProxy.inject); return the storage without the proxy, and the
        life.
        """
        uri = f"{self.table.uri}/{next(self._numbers)}"
        straight = open_store(uri, self.table.storage_options)
        copy_objects(self.before, straight)
        seconds = seconds_for_an_answer(fault.get("fault"))
        options = self.server.options_at(self.proxy.endpoint) | {"timeout": f"{2 * seconds:g}s"}
        self.proxy.forget()
        if fault:
            self.proxy.inject(times=None if lasting else 1, **fault)
        life = LogLife(open_store(uri, options, put_timeout=seconds)).live()
        self.proxy.heal()
        self.proxy.release()
        return straight, life


@pytest.fixture
def wire(s3_table: S3Table, s3_server: S3Server, fault_proxy: FaultProxy, log_before: MemoryStore) -> Wire:
    return Wire(s3_table, s3_server, fault_proxy, log_before)


# ---- the log, over the wire ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", PUTS)
def test_one_fault_on_the_wire_at_every_conditional_put(wire: Wire, fault: str) -> None:
    for number in range(8):  # two manifests and the sentinel of the claim, four entries and the edit
        straight, life = wire.live(fault=PUTS[fault], method="PUT", key=CREATED, skip=number)
        assert [each.fault for each in wire.proxy.requests if each.fault] == [PUTS[fault].name]
        if fault in HARMLESS:
            assert (life.ended, tuple(life.acked)) == (None, LogLife.WHOLE)
        life.check(straight)


@pytest.mark.parametrize("fault", ["409", "lands then 500", "reset before landing", "permanent failure"])
def test_a_fault_on_the_wire_that_stays(wire: Wire, fault: str) -> None:
    for number in (0, 1, 3, 5):
        straight, life = wire.live(fault=PUTS[fault], method="PUT", key=CREATED, skip=number, lasting=True)
        assert life.ended is not None
        life.check(straight)


@pytest.mark.parametrize("method", ["GET", "LIST"])
def test_one_fault_on_the_wire_at_every_read(wire: Wire, method: str) -> None:
    _, whole = wire.live()
    assert tuple(whole.acked) == LogLife.WHOLE
    kinds = LISTS if method == "LIST" else READS
    asked = wire.proxy.count(method)
    assert asked
    for number, fault in zip(range(asked), itertools.cycle(kinds)):
        straight, life = wire.live(fault=fault, method=method, skip=number)
        assert [each.fault for each in wire.proxy.requests if each.fault] == [fault.name]
        if fault.status != 403:
            assert (life.ended, tuple(life.acked)) == (None, LogLife.WHOLE), (number, fault.name)
        life.check(straight)
    if method == "LIST":
        straight, life = wire.live(fault=listing_behind(), method="LIST", lasting=True)
        assert tuple(life.acked) == LogLife.WHOLE
        life.check(straight)


CHILD = """
import sys
from tests.log_life import LogLife
from memwal.wal import SystemClock, open_store
options = dict(each.split("=", 1) for each in sys.argv[2:])
sys.stdin.readline()
LogLife(open_store(sys.argv[1], options), SystemClock(), on_ack=lambda acked: print(*acked, flush=True)).live()
"""


@pytest.mark.parametrize("number", [1, 5], ids=["the sentinel", "the entry that closes a batch"])
@pytest.mark.parametrize("kills", [kills_before, kills_after])
def test_a_process_killed_at_a_put(wire: Wire, kills: Callable[[Callable[[], None]], Fault], number: int) -> None:
    straight = open_store(wire.table.uri, wire.table.storage_options)
    copy_objects(wire.before, straight)
    options = [f"{name}={value}" for name, value in wire.server.options_at(wire.proxy.endpoint).items()]
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, wire.table.uri, *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as child:
        fault = kills(lambda: os.kill(child.pid, signal.SIGKILL))
        wire.proxy.inject(fault, method="PUT", key=CREATED, skip=number)
        said, _ = child.communicate("go\n", timeout=300)
    assert child.returncode == -signal.SIGKILL
    life = LogLife(straight)
    life.acked = [int(each) for each in (said.splitlines() or [""])[-1].split()]
    life.tried = [10, 11, 12, 13]
    assert life.acked == ([10] if number == 5 else [])
    life.check(straight)


# ---- flush, commit, collection ---------------------------------------------------------------------------------------


class Local:
    """Stages on local files, each in a separate directory."""

    def __init__(self, directory: Path, prepared: dict[str, Path]) -> None:
        self._directory, self._prepared = directory, prepared
        self._numbers = itertools.count()

    def copy(self, stage: str) -> str:
        """Return the URI of storage on which `stage` can begin."""
        target = self._directory / str(next(self._numbers))
        shutil.copytree(self._prepared[stage], target)
        return str(target)


@pytest.fixture
def local(tmp_path: Path, prepared: dict[str, Path]) -> Local:
    return Local(tmp_path, prepared)


def stage_calls(local: Local, stage: str) -> list[Call]:
    """Return the stage's calls of the store's port, without the claim, which the log's matrix covers."""
    uri = local.copy(stage)
    store = FaultyStore(open_store(uri, {}), FakeClock())
    owner = Owner(uri, {}, store)
    owner.claim()
    store.begin()
    owner.do(stage)
    return store.calls


def chosen(calls: list[Call]) -> Iterator[tuple[str, Call]]:
    """Yield every fault at every conditional create; at the other calls the faults alternate."""
    creates = [call for call in calls if call.method in CREATES]
    others = [call for call in calls if call.method not in CREATES]
    yield from itertools.product([name for name, fault in FAULTS.items() if fault.calls & CREATES], creates)
    yield from zip(itertools.cycle(["permanent failure", "killed before", "unavailable"]), others, strict=False)


@pytest.mark.parametrize("stage", STAGES)
def test_one_fault_at_every_store_call_of_a_stage(local: Local, stage: str) -> None:
    """On S3 the tests on the wire cover all faults, see below."""
    for name, at in chosen(stage_calls(local, stage)):
        uri, clock = local.copy(stage), FakeClock()
        store = FaultyStore(open_store(uri, {}), clock)
        owner = Owner(uri, {}, store, clock=clock)
        owner.claim()
        store.begin()
        store.arm(FAULTS[name], at)
        with suppress(WalError, FlushError, Killed):
            owner.do(stage)
        assert store.hit, at
        store.heal()
        store.let_late_ones_land()
        check_fenced(uri, {}, owner)
        check(uri, {}, stage)


@pytest.mark.parametrize("stage", STAGES)
def test_an_error_after_the_effect_of_the_system_calls_of_a_stage(local: Local, stage: str) -> None:
    """Errors occur below the store's port for local files: at every put, and at every fsync of Lance's files."""

    def run(calls: SystemCalls) -> None:
        uri = local.copy(stage)
        owner = Owner(uri, {}, open_store(uri, {}), clock=FakeClock())
        owner.claim()
        with calls.installed(), suppress(WalError, FlushError, OSError):
            owner.do(stage)
        check_fenced(uri, {}, owner)
        check(on_a_sound_disk(uri), {}, stage)

    run(dry := SystemCalls())
    chosen = [number for number, name in enumerate(dry.calls) if name in ("link", "replace", "stat", "fsync")]
    for number, code in zip(chosen, itertools.cycle(CODES)):
        run(SystemCalls(number, code))


def on_a_sound_disk(uri: str) -> str:
    """Return the table's URI, or that of a copy without the base file that the disk failed to sync, which nothing
    references.
    """
    if not (Path(uri) / UNSYNCED_KEY).exists():
        return uri
    shutil.copytree(uri, copy := f"{uri}-copy", ignore=shutil.ignore_patterns(Path(UNSYNCED_KEY).name))
    return copy


class Staged:
    """Stages on the S3 server, seen through the proxy.

    The result of a stage is checked on a copy in local files: a check makes 200 requests, which are not under test.
    """

    def __init__(
        self, table: S3Table, server: S3Server, proxy: FaultProxy, prepared: dict[str, Path], at: Path
    ) -> None:
        self.proxy = proxy
        self.ended: Exception | None = None
        """`ended`: the error of the last stage, or None."""
        self._table, self._server, self._prepared, self._at = table, server, prepared, at
        self._through = server.options_at(proxy.endpoint)
        self._numbers = itertools.count()

    def run(self, stage: str, **fault: Any) -> list[Request]:
        """Run one stage with at most one fault, from its copy to its check; return its requests to the server."""
        number = next(self._numbers)
        uri, left = f"{self._table.uri}/{number}", self._at / str(number)
        self._server.upload(self._prepared[stage], uri)
        seconds = seconds_for_an_answer(fault.get("fault"))
        options = self._through | {"timeout": f"{2 * seconds:g}s"}
        owner = Owner(uri, options, open_store(uri, options, put_timeout=seconds))
        owner.claim()
        self.proxy.forget()
        if fault:
            self.proxy.inject(**fault)
        self.ended = None
        try:
            owner.do(stage)
        except (WalError, FlushError, OSError, RuntimeError, ValueError) as error:  # Lance has no error classes
            self.ended = error
        asked = self.proxy.requests
        self.proxy.heal()
        self.proxy.release()
        check_fenced(uri, self._table.storage_options, owner)
        self._server.download(uri, left)
        check(str(left), {}, stage)
        return asked


@pytest.fixture
def staged(
    s3_table: S3Table, s3_server: S3Server, fault_proxy: FaultProxy, prepared: dict[str, Path], tmp_path: Path
) -> Staged:
    return Staged(s3_table, s3_server, fault_proxy, prepared, tmp_path)


@pytest.mark.parametrize("stage", STAGES)
def test_one_fault_on_the_wire_at_the_requests_of_a_stage(staged: Staged, stage: str) -> None:
    """The requests include those of Lance for its data files, manifests and transactions."""
    asked = Counter(each.method for each in staged.run(stage))
    assert staged.ended is None
    puts = itertools.cycle(fault for name, fault in PUTS.items() if name not in ("slow", "lands then 503"))
    for number, fault in zip(range(asked["PUT"]), puts, strict=False):
        met = staged.run(stage, fault=fault, method="PUT", skip=number)
        assert fault.name in {each.fault for each in met}
    for method, kinds in (("GET", READS), ("LIST", LISTS), ("DELETE", READS)):
        for number, fault in zip(range(0, asked[method], 4), itertools.cycle(kinds), strict=False):
            staged.run(stage, fault=fault, method=method, skip=number)


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize(
    "fault", [answers(403, "AccessDenied"), resets(), lands_then_breaks_off()], ids=lambda fault: fault.name
)
def test_an_sst_that_could_not_be_read_for_a_moment_is_not_called_damaged(
    staged: Staged, fault: Fault, times: int
) -> None:
    for key in (r"_gen_2/_versions", r"_gen_2/data"):
        met = staged.run("commit", fault=fault, method="GET", key=key, times=times)
        assert fault.name in {each.fault for each in met}
        assert not isinstance(staged.ended, Corrupt)


@pytest.mark.parametrize("number", [0, 1], ids=["deletes", "upserts and marker"])
@pytest.mark.parametrize("fault", ["lands then 500", "lands then reset", "lands then timeout", "412 by our own retry"])
def test_a_commit_whose_answer_is_lost_is_made_once(staged: Staged, fault: str, number: int) -> None:
    """Lance retries, finds its own version and reports a conflict; the commit must recognise this
    version as its own.
    """
    asked = staged.run("commit", fault=PUTS[fault], method="PUT", key="_versions/", skip=number)
    assert staged.ended is None
    assert PUTS[fault].name in {each.fault for each in asked}
