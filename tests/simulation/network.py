"""Arrow Flight between the processes of the simulation: every call takes time and may fail.

    before it arrives   the connection is refused (no process listens) | reset | the network is cut
    at the daemon       killed | stopped | no fault
    on the way back     the answer is lost, by a reset or a cut; the call runs on after its caller got the error
    after the call      the daemon is killed, before its answer leaves or right after it
    late                the call arrives seconds after its caller got the error that the connection was reset

Clients, peers and the service are real, with their requests, errors and messages in bytes; only gRPC is simulated.
A call is an actor of the daemon's process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from types import FunctionType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pyarrow.flight as flight

import memwal.ingest.service.daemon.peers
import memwal.ingest.service.daemon.serve
import memwal.ingest.service.daemon.service
import memwal.ingest.service.rpc.connection
from memwal.ingest.service.daemon.limits import Calls, Limits
from memwal.ingest.service.daemon.peers import Place
from memwal.ingest.service.daemon.service import FlightService
from memwal.ingest.service.daemon.tables import Tables
from memwal.ingest.service.ops.events import RecentEvents
from memwal.ingest.service.rpc.guard import AccessLog, Guard
from memwal.ingest.service.rpc.wire import unpack
from memwal.wal import SystemClock
from tests.simulation.coverage import Coverage
from tests.simulation.scheduler import Host, Killed, Scheduler
from tests.simulation.threads import Future

FAULTS = ("reset before", "reset after", "late", "slow")
DEATHS = ("kill after", "kill, answered")
"""The daemon has executed the call and is killed: before its answer leaves, or after."""
_LATENCIES = (0.0, 0.0005, 0.001, 0.005, 0.02)
_CALLS_WORSE = 5
"""Fault rate of clients' calls relative to peers' `look` calls, which are far more frequent."""
_PATIENCE = 30.0
"""Seconds until a cut network causes an error, for calls without their own limit."""


class Reset(flight.FlightUnavailableError):  # type: ignore[misc]
    """The connection was lost."""


@dataclass(eq=False)
class Network:
    """The listening processes, and the faults between them. One thread."""

    scheduler: Scheduler
    coverage: Coverage
    rate: float = 0.0
    """Share of the calls that have a fault."""
    listening: dict[str, Service] = field(default_factory=dict)
    hosts: list[Host] = field(default_factory=list)
    """The hosts of all daemons that have listened, also of ended ones."""
    cuts: list[tuple[float, str, str]] = field(default_factory=list)
    """Pairs of processes that cannot reach each other, and until when; "" stands for every process."""
    _open: list[tuple[Host, Future, str]] = field(default_factory=list)
    """Calls that a daemon has not finished."""

    def __post_init__(self) -> None:
        self.scheduler.killed.append(self._died)

    def clear(self) -> None:
        """End all faults from now on."""
        self.rate = 0.0
        self.cuts.clear()

    def call(self, endpoint: str, name: str, work: Callable[[Service], Any], timeout: float | None) -> Any:
        """Let the daemon at `endpoint` do `work`, and return its answer. Raises: Flight's errors."""
        actor, random = self.scheduler.current, self.scheduler.random
        assert actor is not None
        rate = self.rate * (1 if name == "look" else _CALLS_WORSE)
        faults = FAULTS if name in ("look", "schema") else (*FAULTS, *FAULTS, *DEATHS)
        me, fault = actor.host.name, random.choice(faults) if random.random() < rate else ""
        until = self.scheduler.elapsed + (_PATIENCE if timeout is None else timeout)
        self.coverage.strike(f"call: {name}", fault)
        with self.coverage.doing(f"call: {name}"):
            self._travel(fault)
            self._unless_cut(name, me, endpoint, until)
            service = self.listening.get(endpoint)
            if service is None or fault == "reset before":
                self.scheduler.note(f"{name} to {endpoint[7:-2]} -> {fault or 'refused'}")
                raise Reset("failed to connect to all addresses; connection refused")
            answer = self._begun(service, name, work, fault)
            if fault == "late":
                self.scheduler.note(f"{name} to {endpoint[7:-2]} -> {fault}")
                raise Reset("connection reset")
            try:
                found = answer.result(max(0.0, until - self.scheduler.elapsed))
            except flight.FlightServerError:
                self.scheduler.note(f"{name} to {endpoint[7:-2]} -> an error")
                raise
            except TimeoutError:
                self.scheduler.note(f"{name} to {endpoint[7:-2]} -> no answer in time")
                raise flight.FlightTimedOutError("deadline exceeded") from None
            self._unless_cut(name, me, endpoint, until)
            self._travel(fault)
            if fault == "reset after":
                self.scheduler.note(f"{name} to {endpoint[7:-2]} -> {fault}")
                raise Reset("connection reset")
            if name != "look":
                self.scheduler.note(f"{name} to {endpoint[7:-2]} -> answered")
            return found

    @property
    def idle(self) -> bool:
        """Whether no daemon works for a client any more, including clients that stopped waiting."""
        return not self.open_calls

    @property
    def open_calls(self) -> list[str]:
        """The names of the calls that daemons have not finished, without `look`."""
        return [name for _, _, name in self._open if name != "look"]

    def _begun(self, service: Service, name: str, work: Callable[[Service], Any], fault: str) -> Future:
        answer, host = Future(), service.host

        def serve() -> None:
            if fault == "late":
                self.scheduler.pause(self.scheduler.random.choice((0.1, 1.0, 8.0)))
            try:
                found = work(service)
            except Killed:
                raise
            except BaseException as error:  # noqa: BLE001 - raised at the caller
                self._settle(answer, None, error)
                return
            if fault == "kill after":
                self._kill(host)
            self._settle(answer, found, None)
            if fault == "kill, answered":
                self._kill(host)

        self._open.append((host, answer, name))
        self.scheduler.spawn(f"{host.name}/{name}", serve, host, background=True)
        return answer

    def _kill(self, host: Host) -> None:
        self.scheduler.note("is killed")
        self.scheduler.kill(host)
        raise Killed

    def _settle(self, answer: Future, found: Any, error: BaseException | None) -> None:
        self._open = [each for each in self._open if each[1] is not answer]
        if answer.done():
            return
        if error is None:
            answer.set_result(found)
        else:
            answer.set_exception(error)

    def _died(self, host: Host) -> None:
        self.listening = {at: each for at, each in self.listening.items() if each.host is not host}
        for _, answer, _ in [each for each in self._open if each[0] is host]:
            self._settle(answer, None, Reset("connection reset"))

    def _travel(self, fault: str) -> None:
        self.scheduler.pause(self.scheduler.random.choice(_LATENCIES) * (50 if fault == "slow" else 1))

    def _unless_cut(self, name: str, me: str, endpoint: str, until: float) -> None:
        """Raises: the error that a cut network causes after a while."""
        now, there = self.scheduler.elapsed, endpoint.rpartition("/")[2].partition(":")[0]
        self.cuts = [cut for cut in self.cuts if cut[0] > now]
        if any({a, b} <= {me, there, ""} and a != b for _, a, b in self.cuts):
            self.scheduler.note(f"{name} to {endpoint[7:-2]} -> cut")
            self.coverage.strike(f"call: {name}", "partition")
            self.scheduler.pause(max(0.0, until - now))
            raise flight.FlightTimedOutError("deadline exceeded")


class _Context:
    """A `ServerCallContext` whose caller stays connected."""

    def is_cancelled(self) -> bool:
        """Return False."""
        return False

    def get_middleware(self, _: str) -> None:
        """Return no middleware."""

    def peer(self) -> str:
        """Return a fixed peer."""
        return "simulated"


class Service:
    """`FlightService` without gRPC: it has all methods of it."""

    operations = FlightService.operations

    def __init__(
        self,
        tables: Tables,
        location: str,
        place: Place | None = None,
        guard: Guard | None = None,
        limits: Limits | None = None,
        events: RecentEvents | None = None,
    ) -> None:
        assert place is not None
        assert guard is not None
        assert limits is not None
        del location
        self._guard, self._limits, self._place, self._events = guard, limits, place, events
        self.calls = Calls(limits.daemon.calls_max)
        self._log = AccessLog(SystemClock())
        self.tables, self.port = tables, 0
        network = _NETWORKS[-1]
        actor = network.scheduler.current
        assert actor is not None
        self.host = actor.host
        network.hosts.append(self.host)
        network.listening[place.endpoint] = self

    def shutdown(self) -> None:
        """Accept no further calls."""
        network = _NETWORKS[-1]
        network.listening = {at: each for at, each in network.listening.items() if each is not self}


for _name, _value in vars(FlightService).items():
    if isinstance(_value, FunctionType) and _name not in vars(Service):
        setattr(Service, _name, _value)


class _Client:
    """A simulated `FlightClient`."""

    def __init__(self, endpoint: str, **_: Any) -> None:
        self._endpoint = endpoint

    def do_exchange(self, descriptor: Any, options: Any = None) -> tuple[_Writer, _Reader]:
        """Do the same as `FlightClient.do_exchange`; the caller makes the call when it reads the answer, and sends all
        rows then."""
        request, _ = unpack(descriptor.command)
        name = str(request.get("op", request.get("act")))
        name = {"regions": "look"}.get(name, "delete" if name == "write" and request["delete"] else name)
        sent = _Writer()

        def exchange(service: Service) -> _Writer:
            answer = _Writer()
            service.do_exchange(_Context(), descriptor, _Reader(lambda: sent), answer)
            return answer

        timeout = getattr(options, "timeout", None)
        return sent, _Reader(lambda: _NETWORKS[-1].call(self._endpoint, name, exchange, timeout))

    def close(self) -> None:
        """Do nothing: no connection is open."""


class _Writer:
    """A stream of rows and messages, on either side."""

    def __init__(self) -> None:
        self.schema, self.chunks = pa.schema([]), list[Any]()

    def begin(self, schema: pa.Schema) -> None:
        """Set the schema of the rows, as Flight's writers do."""
        self.schema = schema

    def write_table(self, rows: pa.Table) -> None:
        """Append the batches of a table, as Flight's writers do."""
        for batch in rows.to_batches():
            self.write_batch(batch)

    def write_batch(self, batch: pa.RecordBatch) -> None:
        """Append a batch, as Flight's writers do."""
        self.chunks.append(SimpleNamespace(data=batch, app_metadata=None))

    def write_metadata(self, metadata: bytes) -> None:
        """Append metadata, as Flight's writers do."""
        self.chunks.append(SimpleNamespace(data=None, app_metadata=pa.py_buffer(metadata)))

    def done_writing(self) -> None:
        """Do nothing; Flight's writers have it."""

    def close(self) -> None:
        """Do nothing; Flight's writers have it."""


class _Reader:
    """Reads what a `_Writer` of the other side has written."""

    def __init__(self, call: Callable[[], _Writer]) -> None:
        self._call = call

    @cached_property
    def _answer(self) -> _Writer:
        return self._call()

    @cached_property
    def _chunks(self) -> Iterator[Any]:
        return iter(self._answer.chunks)

    @property
    def schema(self) -> pa.Schema:
        """Schema of the rows."""
        return self._answer.schema

    def read_chunk(self) -> Any:
        """Return the next chunk, as Flight's readers do."""
        return next(self._chunks)

    def __iter__(self) -> Iterator[Any]:
        return self._chunks

    def cancel(self) -> None:
        """Do nothing: all rows have been received."""


class _Flight:
    """`pyarrow.flight` with the simulated network."""

    FlightClient = _Client
    FlightCallOptions = staticmethod(lambda timeout=None, **_: SimpleNamespace(timeout=timeout))

    def __getattr__(self, name: str) -> Any:
        return getattr(flight, name)


_NETWORKS: list[Network] = []


@contextmanager
def simulated_network(network: Network) -> Iterator[None]:
    """Route Flight's calls through `network` inside the context."""
    _NETWORKS.append(network)
    users: Mapping[Any, str] = {
        memwal.ingest.service.rpc.connection: "flight",
        memwal.ingest.service.daemon.peers: "flight",
        memwal.ingest.service.daemon.service: "flight",
    }
    try:
        with ExitStack() as patches:
            for module, name in users.items():
                patches.enter_context(patch.object(module, name, _Flight()))
            patches.enter_context(patch.object(memwal.ingest.service.daemon.serve, "FlightService", Service))
            yield
    finally:
        _NETWORKS.pop()


__all__ = ["FAULTS", "Network", "Service", "simulated_network"]
