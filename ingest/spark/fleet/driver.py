"""Daemons on the executors of a Spark cluster: the driver's side of a barrier job with `daemon.on_spark` tasks.

1. The driver checks that the cluster has room for all tasks at once (`fleet.slots`).
2. It starts the job. The tasks start daemons and report their endpoints (`fleet.task`,
   `fleet.channel`).
3. To end, it closes the connections: the daemons drain in parallel, the tasks end, and so does the job.

An executor that dies ends the job, because a barrier stage cannot lose a task. The driver then closes the remaining
connections and runs the job again, at other ports and possibly on other hosts. *Daemons of the former job may still
be draining: a region belongs to the claim with the higher epoch.* Clients find the daemons by the owner notes on
storage (`table.owner_notes`). The pauses before repeated restarts double.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from memwal import wal
from memwal.ingest.engine.table.create import find_or_create
from memwal.ingest.engine.table.live_owners import as_daemon
from memwal.ingest.engine.table.open import refuse_served
from memwal.ingest.errors import Internal, MemWalError, Unavailable, from_wire
from memwal.ingest.service.daemon.child import Restarts
from memwal.ingest.service.daemon.workers import PAUSE_FIRST, PAUSE_MOST
from memwal.ingest.service.open import asking
from memwal.ingest.service.ops.logs import configure_logs
from memwal.ingest.settings.load import Settings
from memwal.ingest.settings.sections import with_absolute_paths
from memwal.ingest.spark.errors import of_spark
from memwal.ingest.spark.fleet.channel import DriverChannel
from memwal.ingest.spark.fleet.slots import check_configuration, patience_of, slots_now, wait_for_slots
from memwal.ingest.spark.fleet.task import DaemonTask, Told
from memwal.ingest.spark.session import check_java, check_master, configuration, start_context
from memwal.ingest.threads import stop_event

if TYPE_CHECKING:
    from pyspark import SparkContext

_LOG = logging.getLogger("memwal.on_spark")
LOOK_EVERY = 0.1
TRIES = 3
"""Consecutive jobs that Spark may end before their daemons serve. After these it is an error."""
ENDS_WITHIN = 15.0
"""Seconds for a job to end, in addition to `daemon.drain_timeout`."""
_CAUSE = re.compile(r"(?:ExecutorLostFailure|SparkException: |Exception: |Error: )[^\n]*")


class SparkDaemons:
    """The daemons of one table on the executors of a Spark cluster.

    Thread safety. Any thread. Errors. `failure` is the error that ended them permanently.
    """

    def __init__(
        self,
        spark: SparkContext,
        settings: Settings,
        told: Callable[[Sequence[str]], None],
        clock: wal.Clock,
        ids: wal.Ids,
        *,
        beside: int = 0,
    ) -> None:
        """Start the daemons.

        `told`: called by a thread of this object with the endpoints whenever all daemons serve. `beside`: number of
        other tasks that need room. Raises: Invalid if the cluster cannot run them.
        """
        self._spark, self._settings, self._told = spark, settings, told
        self._clock, self._beside, self._count = clock, beside, settings.daemon.on_spark
        conf = dict(spark.getConf().getAll())
        check_configuration(conf, self._count, beside=beside)
        host = conf.get("spark.driver.host", "127.0.0.1")
        self._secret = ids.token()
        self._channel = DriverChannel(host, conf.get("spark.driver.bindAddress", host), self._secret)
        self._group = f"memwal daemons {self._channel.address[1]}"
        self._attempts = self._unserved = 0
        self._stopping = threading.Event()
        self.endpoints: tuple[str, ...] = ()
        """Endpoints of all daemons, from the last time when all served; empty before."""
        self.code = 0
        self.failure: MemWalError | None = None
        self._thread = threading.Thread(target=self._run, name="daemons on Spark", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Whether the daemons ended permanently."""
        return not self._thread.is_alive()

    def stop(self) -> None:
        """Drain the daemons and wait for their end."""
        self._stopping.set()
        self._channel.forget()
        self._thread.join(self._settings.daemon.drain_timeout + ENDS_WITHIN)
        if self._thread.is_alive():
            _LOG.warning("the daemons on Spark do not end, killing their job")
            with suppress(Exception):
                self._spark.cancelJobGroup(self._group)
            self._thread.join(ENDS_WITHIN)
        self._channel.close()

    # ---- the job's thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        restarts = Restarts(self._clock, PAUSE_FIRST, PAUSE_MOST)
        try:
            while not self._stopping.is_set():
                restarts.started()
                self._look_at(self._attempt())
                self._stopping.wait(restarts.left)
        except Exception as error:  # noqa: BLE001 - the edge of this thread
            self.failure = of_job(error, self._spark)

    def _attempt(self) -> MemWalError | None:
        """Run one job to its end; return the error that ended it. Raises: Invalid if the cluster has no room."""
        self._wait_for_room()
        self._attempts += 1
        self._unserved += 1
        self._channel.expect(self._attempts, self._count, self._serving)
        if self._stopping.is_set():
            self._channel.forget()
            return None
        task = DaemonTask(with_absolute_paths(self._settings), self._channel.address, self._secret, self._attempts)
        self._spark.setJobGroup(self._group, f"daemons of {self._settings.table.uri}", interruptOnCancel=True)
        try:
            rows = self._spark.parallelize(range(self._count), self._count)
            answers: list[Told] = rows.barrier().mapPartitions(task).collect()
        except Exception as error:  # noqa: BLE001 - `_look_at` handles it
            self._channel.forget()
            return of_job(error, self._spark)
        self.code = max(abs(int(answer.get("code", 1))) for answer in answers)
        return next((from_wire(answer) for answer in answers if "kind" in answer), None)

    def _wait_for_room(self) -> None:
        """Wait for free slots.

        Once the daemons have served, wait for `sink.stream_timeout`, as sinks wait for daemons: a restarted master
        has forgotten this application and never gives it executors again. Raises: Invalid, Unavailable if there was
        no room.
        """
        within = self._settings.sink.stream_timeout if self.endpoints else patience_of(self._spark)
        if self.endpoints and (slots := slots_now(self._spark)) < self._count + self._beside:
            _LOG.warning("waiting for room for %d daemons, the cluster has %d slots", self._count, slots)
        try:
            wait_for_slots(self._spark, self._count, self._beside, self._clock, self._stopping, within)
        except MemWalError as error:
            if not self.endpoints:
                raise
            raise Unavailable(
                f"the daemons on Spark ended, and there was no room to start them again for {within:.0f} s "
                f"(sink.stream_timeout); start this again, acknowledged rows are in the log; {error}"
            ) from None

    def _serving(self, endpoints: list[str]) -> None:
        self.endpoints, self._unserved = tuple(endpoints), 0
        fields = {"event": "serving", "table": self._settings.table.uri, "endpoints": endpoints}
        _LOG.info("serving %s at %s", self._settings.table.uri, ", ".join(endpoints), extra=fields)
        self._told(endpoints)

    def _look_at(self, error: MemWalError | None) -> None:
        """Raise `error` if the next job would fail with it too.

        Daemons that have served once are always restarted: their settings are valid, and a daemon of the former job
        may still hold a port.
        """
        if self._stopping.is_set():
            return
        hopeless = error is not None and (not error.details.get("spark") or self._unserved >= TRIES)
        if error is not None and ((hopeless and not self.endpoints) or _is_over(self._spark)):
            raise error
        _LOG.warning(
            "the daemons on Spark ended and are started again: %s", error or "a task lost its connection to the driver"
        )


def serve_on_spark(
    settings: Settings,
    environ: Mapping[str, str],
    ready: Callable[[Sequence[str]], None],
    *,
    take_over: bool = False,
) -> int:
    """Run `memwal serve` with `daemon.on_spark`. Return the exit code after SIGTERM or SIGINT, once all daemons have
    drained.

    `ready`: called with the endpoints, again after every restart. `take_over`: see `daemon.serve`.
    Raises: Invalid for an unusable Spark or table; the error of a daemon that does not start; Unavailable if Spark
    ends, or if another process serves the table.
    """
    configure_logs(settings.log.level, settings.log.format)
    conf = session_of(settings)
    check_configuration(conf, settings.daemon.on_spark)
    check_java(environ)
    check_master(conf)
    find_or_create(settings, environ)
    refuse_served(settings, environ, as_daemon(take_over=take_over), asking(settings, environ), wal.SystemClock())
    stop = stop_event(None)
    with ThreadPoolExecutor(1, "spark-start") as starter:  # in the main thread Spark would take over the signals
        spark = starter.submit(start_context, conf).result()
    try:
        return _served(spark, settings, ready, stop)
    finally:
        with suppress(Exception):
            spark.stop()


def _served(
    spark: SparkContext, settings: Settings, ready: Callable[[Sequence[str]], None], stop: threading.Event
) -> int:
    daemons = SparkDaemons(spark, settings, ready, wal.SystemClock(), wal.SystemIds())
    try:
        while not stop.wait(LOOK_EVERY) and not daemons.ended:
            pass
    finally:
        daemons.stop()
    if daemons.failure is not None:
        raise daemons.failure
    return daemons.code


def session_of(settings: Settings) -> dict[str, str]:
    """Return Spark's configuration without the connectors of a source, which daemons do not read."""
    plain = settings.source.model_copy(update={"format": "parquet"})
    return configuration(settings.model_copy(update={"source": plain}), 1, once=False)


def of_job(error: BaseException, spark: Any = None) -> MemWalError:
    """Return the error that ended a barrier job, in one line. `details["spark"]` is set if Spark ended it, which may
    be temporary."""
    if isinstance(error, MemWalError):
        return error
    if spark is not None and _is_over(spark):
        return Unavailable(
            "Spark ended, and the daemons on its executors with it; start it again, acknowledged rows are in the log"
        )
    found = of_spark(error)
    if not isinstance(found, Internal):
        return found
    cause = _CAUSE.findall(str(error))
    return Unavailable(f"Spark: {cause[-1] if cause else found}", {"spark": True})


def _is_over(spark: SparkContext) -> bool:
    """Return whether Spark itself, or its JVM, has ended."""
    try:
        jvm: Any = spark._jsc.sc()  # noqa: SLF001
        return bool(jvm.isStopped())
    except Exception:  # noqa: BLE001 - no JVM answers
        return True
