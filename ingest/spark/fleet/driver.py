"""Daemons on the executors of a Spark cluster: the driver's side of a barrier job with `daemon.on_spark` tasks.

1. The driver checks that the cluster has room for all tasks at once.
2. It starts the job. The tasks start daemons and report their endpoints (`fleet.task`,
   `fleet.channel`).
3. To end, it closes the connections: the daemons drain in parallel, the tasks end, and so does the job.

An executor that dies ends the job, because a barrier stage cannot lose a task. The driver then closes the remaining
connections and runs the job again, at other ports and possibly on other hosts. *Daemons of the former job may still
be draining: a region belongs to the claim with the higher epoch.* Clients find the daemons by the owner notes on
storage (`table.owner_notes`). The pauses before repeated restarts double.

**Room.** A barrier stage starts all its tasks at once or none. Spark checks forty times, fifteen seconds apart, before
it reports a lack of room, and rejects barriers under dynamic allocation. A master of fixed size is judged by its name,
before anything is started. For other masters the driver waits as long as Spark waits for executors to register.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from memwal import wal
from memwal.ingest.engine.table.create import find_or_create
from memwal.ingest.engine.table.live_owners import Claimant
from memwal.ingest.engine.table.open import refuse_served
from memwal.ingest.errors import Internal, Invalid, MemWalError, Unavailable, from_wire
from memwal.ingest.service.daemon.child import Restarts
from memwal.ingest.service.daemon.workers import PAUSE_FIRST, PAUSE_MOST
from memwal.ingest.service.open import asking
from memwal.ingest.service.ops.logs import configure_logs
from memwal.ingest.settings.configuration import with_absolute_paths
from memwal.ingest.settings.load import Settings
from memwal.ingest.spark.errors import of_spark
from memwal.ingest.spark.fleet.channel import DriverChannel
from memwal.ingest.spark.fleet.task import DaemonTask, Told
from memwal.ingest.spark.session import check_java, check_master, configuration, standing_of, start_context
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
    claimant = Claimant(take_over, daemon=True)
    refuse_served(settings, environ, claimant, asking(settings, environ), wal.SystemClock())
    stop = stop_event(None)
    with ThreadPoolExecutor(1, "spark-start") as starter:  # in the main thread Spark would take over the signals
        spark = starter.submit(start_context, conf).result()
    try:
        daemons = SparkDaemons(spark, settings, ready, wal.SystemClock(), wal.SystemIds())
        try:
            while not stop.wait(LOOK_EVERY) and not daemons.ended:
                pass
        finally:
            daemons.stop()
        if daemons.failure is not None:
            raise daemons.failure
        return daemons.code
    finally:
        with suppress(Exception):
            spark.stop()


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


# ---- room for tasks -------------------------------------------------------------------------------------------------


WAIT_SETTING, WAIT_DEFAULT = "spark.scheduler.maxRegisteredResourcesWaitingTime", "30s"
_LOCAL = re.compile(r"local(?:\[\s*([0-9]+|\*)\s*(?:,.*)?\])?")
_LOCAL_CLUSTER = re.compile(r"local-cluster\[\s*([0-9]+)\s*,\s*([0-9]+)\s*,\s*[0-9]+\s*\]")


def slots_of(conf: Mapping[str, str]) -> int | None:
    """Return the maximum of concurrent tasks by Spark's configuration; None if the cluster decides."""
    master, per_task = conf.get("spark.master", ""), _number(conf.get("spark.task.cpus"), 1)
    if local := _LOCAL.fullmatch(master):
        cores = (os.cpu_count() or 1) if local[1] == "*" else int(local[1] or 1)
        return cores // per_task
    if cluster := _LOCAL_CLUSTER.fullmatch(master):
        return int(cluster[1]) * (int(cluster[2]) // per_task)
    most = _number(conf.get("spark.cores.max"), 0)
    return most // per_task if most else None


def check_configuration(conf: Mapping[str, str], daemons: int, *, beside: int = 0) -> None:
    """Check that the cluster can run the daemons. `beside`: number of other tasks that need room. Raises: Invalid."""
    if conf.get("spark.dynamicAllocation.enabled", "").lower() == "true":
        raise Invalid(
            "source.spark: daemons on Spark's executors need executors that stay, and Spark refuses their job if "
            "spark.dynamicAllocation.enabled is true; set it to false, and set the number of executors"
        )
    most = slots_of(conf)
    if most is not None and most < daemons + beside:
        raise too_few(most, conf.get("spark.master", ""), daemons, beside)


def too_few(slots: int, master: str, daemons: int, beside: int) -> Invalid:
    """Return the error of a cluster with too few slots."""
    stream = f" and {beside} for the stream" if beside else ""
    return Invalid(
        f"daemon.on_spark: {daemons} daemons need {daemons} slots{stream} at the same time, and Spark at {master} has "
        f"{slots}; lower it, or give the cluster more cores (a slot is spark.task.cpus of them)"
    )


def slots_now(spark: SparkContext) -> int:
    """Return the number of tasks that the registered executors can run at once. Raises: Unavailable if Spark has
    ended."""
    jvm: Any = spark._jsc.sc()  # noqa: SLF001 - PySpark has no public way to it
    if jvm.isStopped():
        standing = standing_of({"spark.master": str(spark.master)})
        raise Unavailable(f"Spark ended; see the log of its master, and start this again{standing}")
    return int(jvm.maxNumConcurrentTasks(jvm.resourceProfileManager().defaultResourceProfile()))


def patience_of(spark: SparkContext) -> float:
    """Return how long Spark waits for executors to register, in seconds."""
    jvm: Any = spark._jsc.sc()  # noqa: SLF001
    return float(jvm.conf().getTimeAsSeconds(WAIT_SETTING, WAIT_DEFAULT))


def wait_for_slots(
    spark: SparkContext, daemons: int, beside: int, clock: wal.Clock, stop: threading.Event, within: float
) -> None:
    """Return once the cluster has room, or `stop` is set. Raises: Invalid or Unavailable after `within` seconds."""
    ends = clock.monotonic() + within
    while (slots := slots_now(spark)) < daemons + beside and not stop.wait(LOOK_EVERY):
        if clock.monotonic() > ends:
            raise too_few(slots, str(spark.master), daemons, beside) if slots else no_executor(spark, within)


def wait_for_executors(spark: SparkContext, clock: wal.Clock, stop: threading.Event) -> None:
    """Return once the cluster has provided an executor, or `stop` is set. Raises: Unavailable if it provides none."""
    if spark.getConf().get("spark.dynamicAllocation.enabled", "false") == "true":
        return  # they start with the first task
    wait_for_slots(spark, 1, 0, clock, stop, patience_of(spark))


def no_executor(spark: SparkContext, within: float) -> Unavailable:
    """Return the error of a cluster that provides no executor."""
    conf = dict(spark.getConf().getAll())
    cores, memory = conf.get("spark.executor.cores", "all"), conf.get("spark.executor.memory", "1g")
    return Unavailable(
        f"Spark at {spark.master} gave no executor within {within:.0f} s; see on its page whether a worker has room "
        f"for one of {cores} cores and {memory} beside other applications, and whether executors end because they "
        f"cannot reach this host at {conf.get('spark.driver.host')} (spark.driver.host in [source.spark])"
    )


def _number(text: str | None, otherwise: int) -> int:
    return int(text) if text and text.strip().isdecimal() and int(text) else otherwise
