"""The edge of a Spark task: errors keep their kind, and imported objects are not collected again."""

from __future__ import annotations

import gc
import socket
import sys
import traceback
from collections.abc import Iterator
from types import ModuleType

import pytest
from py4j.protocol import Py4JError, Py4JJavaError
from pydantic import SecretStr
from pyspark.errors import PySparkException

from memwal.ingest.errors import KINDS, Internal, Invalid, MemWalError, Unavailable
from memwal.ingest.secret_refs import resolve
from memwal.ingest.spark import task as task_memory
from memwal.ingest.spark.errors import found_in, of_kafka, of_spark
from memwal.ingest.spark.task import MARK, TaskError, as_task_error, task_edge
from memwal.memtable import InvalidRows
from memwal.wal import Fenced


def as_spark_shows_it(error: BaseException) -> str:
    """Return a traceback inside a Java exception inside a streaming exception, cut and repeated as Spark does."""
    printed = "".join(traceback.format_exception(error))
    return f"[STREAM_FAILED] Query terminated: {printed[:4000]}\n\tat Task.run\nCaused by: {printed}\n=== Plan ==="


@pytest.mark.parametrize("kind", KINDS.values())
def test_every_kind_comes_back_with_message_and_details(kind: type[MemWalError]) -> None:
    sent = kind('column "a": {"b"} is\nwrong – twice\\', {"row": 7, "column": "a"})
    found = found_in(as_spark_shows_it(as_task_error(sent)))
    assert type(found) is kind
    assert (found.message, found.details) == (sent.message, sent.details)


def test_what_crosses_is_one_line() -> None:
    assert "\n" not in str(as_task_error(Invalid("two\nlines")))


def test_errors_of_the_packages_are_classified_in_the_task() -> None:
    with pytest.raises(TaskError) as raised, task_edge():
        raise InvalidRows("column 'a' is null in row 3", column="a", row=3)
    assert isinstance(found_in(str(raised.value)), Invalid)


def test_an_edge_within_an_edge_packs_once() -> None:
    with pytest.raises(TaskError) as raised, task_edge(), task_edge():
        raise Unavailable("gone")
    assert str(raised.value).count(MARK) == 1
    assert str(found_in(str(raised.value))) == "gone"


def test_a_cancelled_task_is_not_an_error() -> None:
    with pytest.raises(GeneratorExit), task_edge():
        raise GeneratorExit


def test_texts_that_carry_nothing() -> None:
    assert found_in("some other error") is None
    assert found_in(f"{MARK}{{cut off") is None


def test_details_that_json_does_not_know_do_not_hide_the_error() -> None:
    found = found_in(str(as_task_error(Invalid("wrong", {"path": object()}))))
    assert isinstance(found, Invalid)
    assert found.message == "wrong"


def test_an_error_of_ours_on_the_driver_is_what_it_is() -> None:
    error = Invalid("as it is")
    assert of_spark(error) is error
    assert isinstance(of_spark(ValueError("a fault")), Internal)
    assert of_spark(RuntimeError(as_spark_shows_it(as_task_error(Unavailable("gone"))))).kind == "UNAVAILABLE"


def test_what_spark_refuses_by_itself_names_the_setting() -> None:
    class Refused(PySparkException):
        def getCondition(self) -> str:  # noqa: N802 - Spark's name
            return "PATH_NOT_FOUND"

    found = of_spark(Refused("[PATH_NOT_FOUND] Path does not exist: file:/nowhere.\nand more"))
    assert isinstance(found, Invalid)
    assert "source.path" in str(found)
    assert len(found.lines) == 1


class JavaThrown:
    """A Java exception as py4j presents it. Only Spark's own exceptions have a condition."""

    def __init__(self, said: str | None, condition: str | None = None, cause: JavaThrown | None = None) -> None:
        self._said, self._condition, self._cause = said, condition, cause
        self._target_id, self._gateway_client = "o1", self

    def getCondition(self) -> str:  # noqa: N802 - Spark's name
        if self._condition is None:
            raise Py4JError("Method getCondition([]) does not exist")
        return self._condition

    def getMessage(self) -> str | None:  # noqa: N802 - Java's name
        return self._said

    def getCause(self) -> JavaThrown | None:  # noqa: N802 - Java's name
        return self._cause

    def getClass(self) -> JavaThrown:  # noqa: N802 - Java's name
        return self

    def getName(self) -> str:  # noqa: N802 - Java's name
        return "java.lang.Exception"

    def toString(self) -> str:  # noqa: N802 - Java's name
        return "java.lang.Exception"

    def send_command(self, _: str) -> str:
        return "ysjava.lang.Exception\\n\tat org.apache.spark.A\\n\tat org.apache.spark.B"


@pytest.mark.parametrize(
    ("thrown", "kind", "says"),
    [
        (JavaThrown("[DATA_SOURCE_NOT_FOUND] no bla", "DATA_SOURCE_NOT_FOUND"), Invalid, "correct source.format"),
        (JavaThrown("x\nand more", cause=JavaThrown("y", "PATH_NOT_FOUND")), Invalid, "correct source.path"),
        (JavaThrown(None), Internal, "Spark: java.lang.Exception"),
        (
            JavaThrown(
                "a.json.  SQLSTATE: KD001", "FAILED_READ_FILE.NO_HINT", JavaThrown("not 'x'", "CANNOT_PARSE_JSON_FIELD")
            ),
            Invalid,
            "Spark: a.json: not 'x'; correct the record, or leave such rows out by dlq.mode",
        ),
    ],
)
def test_what_pyspark_has_no_class_for_is_one_line_too(thrown: JavaThrown, kind: type[MemWalError], says: str) -> None:
    found = of_spark(Py4JJavaError("An error occurred while calling o69.load.\n", thrown))
    assert isinstance(found, kind)
    assert says in str(found)
    assert len(found.lines) == 1


def test_a_fence_keeps_both_epochs() -> None:
    import uuid

    fenced = Fenced(uuid.UUID(int=1), 6, 7)
    found = found_in(as_spark_shows_it(as_task_error(fenced)))
    assert found is not None
    assert (found.kind, found.details["ours"], found.details["theirs"]) == ("FENCED", 6, 7)


class Captured(Exception):
    """An exception as PySpark creates it for a Java exception without a class of its own."""

    def __init__(self, desc: str, cause: Captured | None = None) -> None:
        super().__init__(desc)
        self._desc, self._cause = desc, cause


@pytest.mark.parametrize(
    ("name", "kind", "says"),
    [
        ("common.errors.TimeoutException", Unavailable, "Kafka does not answer: node 1"),
        ("common.errors.SaslAuthenticationException", Invalid, "Kafka refuses us: node 1"),
        ("common.config.ConfigException", Invalid, "correct brokers or options"),
        ("common.errors.UnknownTopicOrPartitionException", Invalid, "a topic is gone"),
    ],
)
def test_what_kafkas_client_throws_is_told_by_its_class(name: str, kind: type[MemWalError], says: str) -> None:
    thrown = Captured(f"org.apache.kafka.{name}: node 1\nand more")
    wrapped = Captured("java.util.ExecutionException: x", Captured("org.apache.kafka.common.KafkaException: y", thrown))
    found = of_kafka(wrapped)
    assert isinstance(found, kind)
    assert says in str(found)
    assert len(found.lines) == 1
    assert of_kafka(Captured("java.lang.IllegalStateException: org.apache.kafka.common.errors.X: y")) is None


def test_offsets_that_are_gone_are_told_with_what_to_do() -> None:
    """The message of Spark 4.2 for a topic that was deleted and created again."""
    said = [
        "Some data may have been lost because they are not available in Kafka any more;",
        "If you don't want your streaming query to fail on such cases, set the source option failOnDataLoss to false.",
        "Reason: Partition t-0 offset was changed from 20 to 5.",
        "This could be either 1) a user error … or 2) the kafka topic-partition is deleted and re-created.",
    ]
    thrown = Captured("org.apache.spark.sql.kafka010.KafkaIllegalStateException: " + "\n".join(said))
    found = of_kafka(Captured("[STREAM_FAILED] Query x terminated", thrown))
    assert isinstance(found, Invalid)
    assert "records are gone unread: Partition t-0 offset was changed from 20 to 5; to read a topic" in str(found)
    assert len(found.lines) == 1


def test_a_reference_to_nothing_tells_that_it_is_an_executor_who_misses_it() -> None:
    with pytest.raises(TaskError) as raised, task_edge():
        resolve({"secret_access_key": SecretStr("env:ONLY_ON_THE_DRIVER")}, {})
    found = found_in(str(raised.value))
    assert isinstance(found, Invalid)
    assert "ONLY_ON_THE_DRIVER is not set; " in str(found)
    assert str(found).endswith(f"(on the executor {socket.gethostname()})")


def test_an_executor_without_memwal_is_told_as_one() -> None:
    printed = "Traceback\nModuleNotFoundError: No module named 'ingest'\n\tat org.apache.spark.Task"
    assert "executors cannot import memwal" in str(of_spark(PySparkException(printed)))


@pytest.fixture
def thawed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give the garbage collector the state of a new process, before and after the test."""
    monkeypatch.setattr(task_memory, "_frozen_with", 0)
    gc.unfreeze()
    yield
    gc.unfreeze()


def test_what_is_there_at_the_end_of_a_workers_task_is_not_looked_at_again(
    thawed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyspark.worker", ModuleType("pyspark.worker"))
    with task_edge():
        pass
    frozen = gc.get_freeze_count()
    assert frozen > 10_000
    later = [[number] for number in range(100_000)]  # many, as frozen objects of earlier tests may be freed
    with task_edge():  # this task has imported no module
        pass
    assert gc.get_freeze_count() <= frozen
    monkeypatch.setitem(sys.modules, "more", ModuleType("more"))
    with task_edge():
        pass
    assert gc.get_freeze_count() >= frozen + len(later) // 2


def test_the_collector_of_another_process_is_left_alone(thawed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "pyspark.worker", raising=False)
    with task_edge():
        pass
    assert gc.get_freeze_count() == 0
