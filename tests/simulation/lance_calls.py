"""Make pylance's own storage calls points at which other actors run and faults strike, as `storage` does for the port.

pylance accesses the storage itself, so its calls are wrapped where the packages call them. An error strikes before or
after the effect of a call; Lance is responsible for keeping one call consistent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn
from unittest.mock import patch

import lance
import pyarrow as pa
from lance.dataset import MergeInsertBuilder

import memwal.flush.commits.append_pass
import memwal.flush.commits.changes
import memwal.flush.commits.committer
import memwal.flush.sst.files
import memwal.ingest.engine.read.stored
from memwal.wal import ArrowCodec, EntryCodec, LanceCodec, SystemClock, SystemIds, WalOptions
from tests.simulation.coverage import step_of
from tests.simulation.fates import strikes
from tests.simulation.scheduler import Killed, Scheduler, SimulatedClock
from tests.simulation.storage import Weather

_FAULTS = ("error before", "error before", "error after", "error after", "kill before", "kill after")
_READ_FAULTS = ("error before",)
_PAUSES = (0.0, 0.001, 0.05, 0.3, 1.5)


FAULTS, READ_FAULTS = _FAULTS, _READ_FAULTS
Points = Sequence[tuple[Any, str, tuple[str, ...]]]
"""Calls to wrap: the object, the name of its attribute, and the possible faults."""


@contextmanager
def simulated_machine(scheduler: Scheduler, weather: Weather, more: Points = ()) -> Iterator[None]:
    """Let other actors run before and after each call of pylance inside the context.

    Inside it the machine's clock is the simulated one, also for default arguments, and its source of identifiers raises
    an error. `more`: further calls to wrap.
    """

    def wrapped(name: str, call: Callable[..., Any], faults: tuple[str, ...]) -> Callable[..., Any]:
        def around(*args: Any, **kwargs: Any) -> Any:
            if scheduler.current is None:
                return call(*args, **kwargs)
            return _around(scheduler, weather, name, lambda: call(*args, **kwargs), faults)

        return around

    clock = SimulatedClock(scheduler)
    with ExitStack() as patches:
        for name in ("now", "monotonic", "sleep"):
            patches.enter_context(patch.object(SystemClock, name, staticmethod(getattr(clock, name))))
        for name in ("entry_id", "token", "uuid"):
            patches.enter_context(patch.object(SystemIds, name, _no_chance))
        for codec in (LanceCodec, ArrowCodec):
            for name in ("decode", "header"):
                patches.enter_context(patch.object(codec, name, _remembering(getattr(codec, name))))
        # Several readers would be threads, whose order is not determined by the seed.
        one_reader = WalOptions(put_timeout=2.0, retry_budget=4.0, readers=1)
        patches.enter_context(patch.object(memwal.ingest.engine.read.stored, "_READ_OPTIONS", one_reader))
        patches.enter_context(patch.object(memwal.flush.commits.changes, "_READERS", 1))
        patches.enter_context(patch.object(memwal.flush.commits.append_pass.AppendedRows, "_reader", _read_before))
        for owner, attribute, faults in (
            (lance, "dataset", _READ_FAULTS),
            (lance, "write_dataset", _FAULTS),
            (memwal.flush.commits.append_pass, "write_fragments", _FAULTS),
            (lance.LanceDataset, "commit", _FAULTS),
            (MergeInsertBuilder, "execute", _FAULTS),
            (MergeInsertBuilder, "execute_uncommitted", _READ_FAULTS),
            (memwal.flush.sst.files, "write_key_sidecar", _FAULTS),
            (memwal.flush.sst.files, "sync_tree", ("error before",)),
            (memwal.flush.commits.committer, "sync_table", ("error before",)),
            *more,
        ):
            replacement = wrapped(f"lance {attribute}", getattr(owner, attribute), faults)
            patches.enter_context(patch.object(owner, attribute, replacement))
        yield


def _read_before(rows: memwal.flush.commits.append_pass.AppendedRows) -> pa.RecordBatchReader:
    """Read all rows first, in the actor's own thread: Lance would pull them from its own thread, where no actor may
    pause."""
    return pa.Table.from_batches(list(rows._batches()), rows._base.schema).to_reader()


def _no_chance(_: SystemIds) -> NoReturn:
    raise AssertionError("the machine was asked for chance; hand the simulation's ids down to here")


def _remembering(read: Callable[..., Any]) -> Callable[..., Any]:
    """Decode each object once in a run, for all replays and readers: this saves half the time."""
    known: dict[tuple[Any, ...], Any] = {}

    def remembered(codec: EntryCodec, *asked: Any) -> Any:
        if asked not in known:
            known[asked] = read(codec, *asked)
        return known[asked]

    return remembered


def _around(scheduler: Scheduler, weather: Weather, name: str, call: Callable[[], Any], faults: tuple[str, ...]) -> Any:
    rate = weather.rate * (weather.lance_writes_worse if faults is _FAULTS else 1.0)
    fault, step = scheduler.random.choice(faults) if scheduler.random.random() < rate else "", step_of(name)
    actor = scheduler.current
    assert actor is not None
    fault = strikes(actor.host, scheduler.coverage) or fault
    scheduler.coverage.strike(step, fault)
    with scheduler.coverage.doing(step):
        scheduler.pause(scheduler.random.choice(_PAUSES) * weather.pace)
        _strike(scheduler, fault, "before", name)
        try:
            answer = call()
        except (OSError, ValueError, RuntimeError) as error:
            scheduler.note(f"{name} -> {type(error).__name__}")
            raise
        scheduler.note(f"{name} -> done")
        scheduler.pause(scheduler.random.choice(_PAUSES) * weather.pace)
    _strike(scheduler, fault, "after", name)
    return answer


def _strike(scheduler: Scheduler, fault: str, when: str, name: str) -> None:
    if not fault.endswith(when):
        return
    scheduler.note(f"{name} [{fault}]")
    if fault.startswith("kill"):
        actor = scheduler.current
        assert actor is not None
        scheduler.kill(actor.host)
        raise Killed
    raise OSError(f"{name}: the simulated storage failed")
