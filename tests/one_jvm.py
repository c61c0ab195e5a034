"""One JVM for all Sparks that start in the tests' process.

With a JVM of its own `memwal run --once` takes 10 s, in a warm one 3 s.

A Spark still ends with its session, and the next one starts with its own configuration, except for what belongs to the
JVM: its memory, its options and its class path, which has the Kafka connector. Its output is dropped. A test that needs
a separate JVM starts a process; that JVM has the options of `spark_classes` too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from memwal.ingest.spark import session
from tests import spark_classes
from tests.kafka_server import jars

_ROOT = Path(__file__).resolve().parent.parent


class _Jvm:
    """Starts the JVM at the first call."""

    def __init__(self) -> None:
        self._start, self._gateway = session.start_jvm, None

    def __call__(self, conf: Any, output: int) -> Any:
        """Replace `session.start_jvm`."""
        if self._gateway is None:
            from pyspark import SparkConf

            own = {"spark.jars": ",".join(str(path) for path in jars("connector") if path.exists())}
            # Spark's workers import `tests` from the directory where the JVM was started, for any first test.
            with Path(os.devnull).open("w") as nowhere, chdir(_ROOT):
                self._gateway = self._start(SparkConf(loadDefaults=False).setAll(list(own.items())), nowhere.fileno())
        return self._gateway


@pytest.fixture(scope="session", autouse=True)
def one_jvm() -> Iterator[None]:
    """Share one JVM in this process; see the module."""
    with patch.object(session, "start_jvm", _Jvm()), patch.dict(os.environ, spark_classes.environ()):
        yield
