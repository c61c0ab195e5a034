"""Check whether a Spark cluster has room for a barrier job, before Spark tries for minutes.

A barrier stage starts all its tasks at once or none. Spark checks forty times, fifteen seconds apart, before it
reports a lack of room, and rejects barriers under dynamic allocation. This module judges a master of fixed size by
its name, before anything is started. For other masters it waits as long as Spark waits for executors to register.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from memwal.ingest.errors import Invalid, Unavailable
from memwal.ingest.spark.session import standing_of
from memwal.wal import Clock

if TYPE_CHECKING:
    from pyspark import SparkContext

LOOK_EVERY = 0.1
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
    """Return the seconds for which Spark waits for executors to register."""
    jvm: Any = spark._jsc.sc()  # noqa: SLF001
    return float(jvm.conf().getTimeAsSeconds(WAIT_SETTING, WAIT_DEFAULT))


def wait_for_slots(
    spark: SparkContext, daemons: int, beside: int, clock: Clock, stop: threading.Event, within: float
) -> None:
    """Return once the cluster has room, or `stop` is set. Raises: Invalid or Unavailable after `within` seconds."""
    ends = clock.monotonic() + within
    while (slots := slots_now(spark)) < daemons + beside and not stop.wait(LOOK_EVERY):
        if clock.monotonic() > ends:
            raise too_few(slots, str(spark.master), daemons, beside) if slots else no_executor(spark, within)


def wait_for_executors(spark: SparkContext, clock: Clock, stop: threading.Event) -> None:
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
