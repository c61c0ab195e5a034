"""A barrier task on an executor: start its daemons, keep them running, and drain them.

1. Every task finds ports on its executor's host, and sends its endpoints to all others (`allGather`). *A task that
   cannot sends its error instead, and all tasks end.*
2. It starts its daemons as child processes that know all endpoints (`daemon.workers`), and waits until they
   serve.
3. All tasks wait for each other (a second `allGather`). *A task whose daemons do not start sends its error, and all
   tasks drain.*
4. It reports to the driver that its daemons serve. It restarts a daemon that ends, at its port; others take over
   meanwhile.
5. When the connection to the driver ends, it drains its daemons and returns. *If Spark kills the task, or its
   executor dies, the daemons' standard input ends with the Python worker that held it, and they drain by themselves.*

The settings arrive with the task's code and reach the daemons through a pipe. They contain references to secrets,
which are resolved on the executor's host, never secrets. An error is returned, not raised, because Spark would
otherwise kill the other tasks at once.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from memwal.ingest.errors import Invalid, from_wire, to_wire
from memwal.ingest.service.daemon.workers import Supervisor, ports_of
from memwal.ingest.service.ops.logs import configure_logs, silence_grpc
from memwal.ingest.settings import endpoints as addresses
from memwal.ingest.settings.load import Settings
from memwal.ingest.spark.fleet.channel import TaskChannel
from memwal.ingest.spark.task import on_executor
from memwal.wal import SystemClock
from memwal.wal.panics import as_exception

Told = dict[str, Any]
_MEETINGS = 2
"""How often all tasks wait for each other. Spark hangs if one task waits more often than another."""


def host_of(address: str) -> str:
    """Return the host of a task's address, which Spark gives as host:port."""
    return address.rpartition(":")[0].strip("[]")


def offset_of(hosts: Sequence[str], task: int, workers: int) -> int:
    """Return the offset of the fixed ports of `task`: earlier tasks on its host use the lower ports."""
    return workers * list(hosts[:task]).count(hosts[task])


def daemons_of(settings: Settings, host: str, ports: Sequence[int], every: Sequence[str], above: int) -> list[Settings]:
    """Return the configuration of each daemon of a task on `host`. `above`: see `offset_of`."""
    daemon, scheme = settings.daemon, addresses.scheme_of(settings.daemon.tls_cert)
    http = daemon.http_port
    configured = []
    for number, port in enumerate(ports):
        own = {
            "host": bound(daemon.host, host),
            "port": port,
            "advertise": addresses.endpoint_of(host, port, scheme),
            "endpoints": list(every),
            "http_port": http + above + number if http > 0 else http,
            "workers": 1,
            "on_spark": 0,
        }
        configured.append(settings.model_copy(update={"daemon": daemon.model_copy(update=own)}))
    return configured


def bound(wanted: str, host: str) -> str:
    """Return the address where daemons on `host` listen: `daemon.host`, or `host` if that is a loopback address."""
    return host if addresses.is_loopback(wanted) else wanted


@dataclass(frozen=True)
class DaemonTask:
    """The function of the barrier job. It reads no rows and returns one answer, {"code"} or an error from `to_wire`."""

    settings: Settings
    driver: tuple[str, int]
    secret: str = field(repr=False)
    attempt: int

    def __call__(self, _rows: Iterable[Any]) -> Iterator[Told]:
        """Serve until the driver closes the connection."""
        from pyspark import BarrierTaskContext

        silence_grpc()
        configure_logs(self.settings.log.level, self.settings.log.format)
        # The daemons import memwal from the path of this process, which may be an archive that Spark brought.
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        yield _Serving(self, BarrierTaskContext.get()).run()


class _Serving:
    """One run of a task. Thread safety. One thread."""

    def __init__(self, task: DaemonTask, context: Any) -> None:
        self._task, self._context = task, context
        self._number = int(context.partitionId())
        self._hosts = [host_of(info.address) for info in context.getTaskInfos()]
        self._met = 0

    def run(self) -> Told:
        channel: TaskChannel | None = None
        try:
            channel = TaskChannel(self._task.driver, self._task.secret, self._task.attempt, self._number)
            answer = self._serve(channel)
        except BaseException as error:  # noqa: BLE001 - the edge of this process
            answer = to_wire(on_executor(as_exception(error)))
        finally:
            if channel is not None:
                channel.close()
        while self._met < _MEETINGS:  # the others wait for this task as often
            self._meet(answer)
        return answer

    def _serve(self, channel: TaskChannel) -> Told:
        daemon, host = self._task.settings.daemon, self._hosts[self._number]
        above = offset_of(self._hosts, self._number, daemon.workers)
        try:
            ports = ports_of(bound(daemon.host, host), daemon.port + above if daemon.port else 0, daemon.workers)
        except OSError as error:
            raise Invalid(f"daemon.host: an executor cannot listen on {host} ({error.strerror or error})") from None
        scheme = addresses.scheme_of(daemon.tls_cert)
        own = [addresses.endpoint_of(host, port, scheme) for port in ports]
        every = [endpoint for told in self._agreed({"endpoints": own}) for endpoint in told["endpoints"]]
        daemons = daemons_of(self._task.settings, host, ports, every, above)

        def ready(_: str) -> None:
            self._agreed({})
            channel.serves(own)

        return {"code": Supervisor(daemons, SystemClock()).run(channel.ended, ready)}

    def _agreed(self, said: Mapping[str, Any]) -> list[Told]:
        """Return what all tasks sent. Raises: MemWalError, the error of a task that cannot continue."""
        everybody = self._meet(said)
        for told in everybody:
            if "kind" in told:
                raise from_wire(told)
        return everybody

    def _meet(self, said: Mapping[str, Any]) -> list[Told]:
        self._met += 1
        return [json.loads(text) for text in self._context.allGather(json.dumps(said, default=str))]
