"""A real Kafka broker for tests, benchmarks and the tutorial: Apache's own, one node (KRaft), in `java` on loopback.

`python -m tests.kafka_server` (`make kafka`) downloads its jars and those of Spark's Kafka connector into the user's
cache, once per machine; see `tests.maven_jars`.

    with KafkaServer.started(directory) as kafka:
        kafka.create_topic("flights", partitions=4)
        kafka.produce("flights", [Record(b'{"id": 1}', key=b"1")])

`python -m tests.kafka_server --serve 9092` (`make broker`) runs a broker on that port until Ctrl-C or SIGTERM; its
messages are deleted with it.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from tests.maven_jars import MavenJars, java, pyspark_jars, say
from tests.support.server import ServerProcess

JARS = MavenJars(
    "the tests' Kafka broker and Spark's connector", "kafka", Path(__file__).with_name("kafka_server.lock"), "55 MB"
)

_READY_WITHIN = 120.0
_STARTS = 5
"""Number of attempts to start, since another process may take a port between its choice and the broker's bind."""
_LARGEST_MESSAGE = 16 << 20
USER, PASSWORD = "flights", "never-to-be-printed"
_PLAIN = "org.apache.kafka.common.security.plain.PlainLoginModule"
_LOGGING = ("slf4j-api", "log4j-api", "log4j-core", "log4j-slf4j2-impl")


# ---- fetching ------------------------------------------------------------------------------------------------------


def cache() -> Path:
    """Return the directory of the jars, shared by all checkouts of this user; its name has a hash of the lock file."""
    return JARS.cache


def jars(part: str) -> list[Path]:
    """Return the jars of a part, `broker` or `connector`; they may not exist yet."""
    return JARS.jars(part)


# ---- running -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Record:
    """A message. `timestamp`: milliseconds since 1970; 0: the time of sending."""

    value: bytes | None
    key: bytes | None = None
    headers: Mapping[str, bytes] = field(default_factory=dict)
    partition: int = -1
    timestamp: int = 0


class Ports(NamedTuple):
    """Ports of the broker's listeners on 127.0.0.1."""

    plain: int
    controller: int
    sasl: int
    tls: int


@dataclass
class KafkaServer(ServerProcess):
    """A running broker on loopback, with its messages in one directory.

    Thread safety. Any thread; but start it from a thread that lives as long as the broker must: on Linux the
    broker ends with that thread, so that a killed test run leaves no broker behind.
    """

    directory: Path
    ports: Ports
    process: subprocess.Popen[bytes]

    @classmethod
    def start(cls, directory: Path, port: int | None = None) -> KafkaServer:
        """Start a broker, at `port` of 127.0.0.1 if given, and wait until it answers.

        Raises: RuntimeError with the broker's last lines if it does not answer within 2 minutes.
        """
        if not cache().exists():
            raise RuntimeError(f"{cache()} is not there; run `make kafka`")
        from tests.s3_server import free_ports  # not above: `make kafka` needs no server of S3

        deadline = time.monotonic() + _READY_WITHIN
        for attempt in range(_STARTS):
            plain, *others = free_ports(4)
            ports = Ports(port or plain, *others)
            place = directory.absolute() / str(attempt)
            place.mkdir(parents=True)
            _certify(place)
            _configure(place, ports)
            server = cls(place, ports, _launch(place))
            if server.answers(deadline):
                return server
            server.stop()
        raise RuntimeError(f"the Kafka broker did not answer; its last words: {_last_words(place)}")

    @property
    def brokers(self) -> str:
        """The value of `source.brokers`, and of any Kafka client's bootstrap servers."""
        return f"127.0.0.1:{self.ports.plain}"

    @property
    def sasl_brokers(self) -> str:
        """The same for clients that log in as USER with PASSWORD (SASL_PLAINTEXT, PLAIN)."""
        return f"127.0.0.1:{self.ports.sasl}"

    @property
    def tls_brokers(self) -> str:
        """The same for clients that use TLS (SSL) and trust `authority`."""
        return f"127.0.0.1:{self.ports.tls}"

    @staticmethod
    def login(password: str = "") -> str:
        """Return the value of `kafka.sasl.jaas.config`; `password`: another one than PASSWORD."""
        return f'{_PLAIN} required username="{USER}" password="{password or PASSWORD}";'

    @property
    def authority(self) -> Path:
        """PEM file of the authority that signed the broker's certificate."""
        return self.directory / "authority.pem"

    def create_topic(self, name: str, partitions: int = 1) -> None:
        """Create an empty topic; it exists when this returns."""
        from confluent_kafka import KafkaError, KafkaException
        from confluent_kafka.cimpl import NewTopic

        admin = self._admin()  # kept until the answer arrives, since that needs it alive
        try:
            admin.create_topics([NewTopic(name, partitions, 1)])[name].result(_READY_WITHIN)
        except KafkaException as error:  # the client repeats a request that is answered late
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise

    def produce(self, topic: str, records: Sequence[Record]) -> None:
        """Append records, in order within a partition; they are stored when this returns."""
        from confluent_kafka import Producer

        failed: list[Any] = []
        # Without idempotence, a batch that the broker of a new topic refuses at first is stored behind later ones.
        limits = {"message.max.bytes": _LARGEST_MESSAGE, "linger.ms": 5, "enable.idempotence": True}
        producer = Producer({"bootstrap.servers": self.brokers, **limits, **_QUIET})
        for record in records:
            while len(producer) > 50_000:
                producer.poll(0.1)
            producer.produce(
                topic,
                record.value,
                record.key,
                record.partition,
                timestamp=record.timestamp,
                headers=list(record.headers.items()),
                on_delivery=lambda error, _: failed.append(error) if error else None,
            )
            producer.poll(0)
        left = producer.flush(_READY_WITHIN)
        if left or failed:
            raise RuntimeError(f"{left} records of {topic} were not stored: {failed[:1]}")

    def produce_at_once(self, topic: str, values: Sequence[bytes], *, kept: bool) -> None:
        """Append values in one transaction; commit it if `kept`, else abort it."""
        from confluent_kafka import Producer

        producer = Producer({"bootstrap.servers": self.brokers, "transactional.id": topic, **_QUIET})
        producer.init_transactions(_READY_WITHIN)
        producer.begin_transaction()
        for value in values:
            producer.produce(topic, value)
        producer.flush(_READY_WITHIN)
        (producer.commit_transaction if kept else producer.abort_transaction)(_READY_WITHIN)

    def delete_records(self, topic: str, before: Mapping[int, int]) -> None:
        """Delete the records of partitions below an offset each."""
        from confluent_kafka import TopicPartition

        admin, places = self._admin(), [TopicPartition(topic, *place) for place in before.items()]
        for done in admin.delete_records(places).values():
            done.result(_READY_WITHIN)

    def delete_topic(self, name: str) -> None:
        """Delete a topic with its messages; its name is free when this returns."""
        admin = self._admin()
        admin.delete_topics([name])[name].result(_READY_WITHIN)
        while name in admin.list_topics(timeout=_READY_WITHIN).topics:
            time.sleep(0.05)

    def restart(self) -> None:
        """Restart the broker, on the same port and with its messages. Raises: RuntimeError."""
        self.stop()
        self.process = _launch(self.directory)
        if not self.answers(time.monotonic() + _READY_WITHIN):
            raise RuntimeError(f"the Kafka broker did not come back; its last words: {_last_words(self.directory)}")

    def pause(self) -> None:
        """Stop the broker with SIGSTOP: its connections stay open, without answers."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Continue the broker."""
        self.process.send_signal(signal.SIGCONT)

    def _admin(self) -> Any:
        from confluent_kafka.admin import AdminClient

        return AdminClient({"bootstrap.servers": self.brokers, **_QUIET})

    def answers(self, deadline: float) -> bool:
        """Return whether the broker serves clients before `deadline`; False at once if it has ended."""
        from confluent_kafka import KafkaException

        admin = self._admin()
        while self.process.poll() is None and time.monotonic() < deadline:
            try:
                if admin.list_topics(timeout=2).brokers:
                    return True
            except KafkaException:
                time.sleep(0.05)
        return False


_QUIET = {"log_level": 0, "reconnect.backoff.max.ms": 200}


def _certify(directory: Path) -> None:
    """Write an authority, and a certificate of 127.0.0.1 with its key in the format that Java reads (PKCS #8)."""
    import trustme  # not above: `make kafka` needs neither
    from cryptography.hazmat.primitives import serialization as form

    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    key = form.load_pem_private_key(issued.private_key_pem.bytes(), None)
    packed = key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())
    (directory / "broker.pem").write_bytes(packed + b"".join(each.bytes() for each in issued.cert_chain_pems))
    authority.cert_pem.write_to_path(str(directory / "authority.pem"))


def _configure(directory: Path, ports: Ports) -> None:
    """Write the broker's settings, and its storage without messages."""
    kinds = {"PLAINTEXT": ports.plain, "SASL_PLAINTEXT": ports.sasl, "SSL": ports.tls}
    listeners = ",".join(f"{kind}://127.0.0.1:{port}" for kind, port in kinds.items())
    settings = {
        "process.roles": "broker,controller",
        "node.id": 1,
        "controller.quorum.voters": f"1@127.0.0.1:{ports.controller}",
        "listeners": f"{listeners},CONTROLLER://127.0.0.1:{ports.controller}",
        "advertised.listeners": listeners,
        "controller.listener.names": "CONTROLLER",
        "listener.security.protocol.map": ",".join(f"{kind}:{kind}" for kind in kinds) + ",CONTROLLER:PLAINTEXT",
        "sasl.enabled.mechanisms": "PLAIN",
        "listener.name.sasl_plaintext.plain.sasl.jaas.config": f'{_PLAIN} required user_{USER}="{PASSWORD}";',
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": directory / "broker.pem",
        "log.dirs": directory / "messages",
        "message.max.bytes": _LARGEST_MESSAGE,
        "replica.fetch.max.bytes": _LARGEST_MESSAGE,
        "log.retention.ms": -1,  # tests set the times of records, which may be years old
        "auto.create.topics.enable": "false",
        "offsets.topic.replication.factor": 1,
        "offsets.topic.num.partitions": 1,
        "transaction.state.log.replication.factor": 1,
        "transaction.state.log.min.isr": 1,
        "group.initial.rebalance.delay.ms": 0,
    }
    (directory / "server.properties").write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
    formatted = cache() / f"formatted-{hashlib.sha256(' '.join(_FORMATTING).encode()).hexdigest()[:12]}"
    if not formatted.exists():
        _format(directory, formatted)
    shutil.copytree(formatted, directory / "messages", dirs_exist_ok=True)


_FORMATTING = (
    *("kafka.tools.StorageTool", "format", "--cluster-id", "bWVtd2FsLXRlc3RzLTAwMQ"),
    # With the feature off, a killed broker becomes leader again.
    *("--feature", "eligible.leader.replicas.version=0", "--config"),
)
"""The program that formats storage, and its arguments before the settings."""


def _format(directory: Path, formatted: Path) -> None:
    """Format the storage of a broker, which takes a JVM, and keep a copy as `formatted` for the next brokers."""
    with (directory / "log").open("ab") as log:
        subprocess.run(_command(directory, *_FORMATTING), stdout=log, stderr=log, cwd=directory, check=True)
    with tempfile.TemporaryDirectory(dir=cache()) as scratch:
        copy = shutil.copytree(directory / "messages", Path(scratch) / "copy")
        with suppress(OSError):  # another process has stored its copy
            copy.rename(formatted)


def _launch(directory: Path) -> subprocess.Popen[bytes]:
    bound = [setpriv, "--pdeathsig", "KILL"] if (setpriv := shutil.which("setpriv")) else []
    with (directory / "log").open("ab") as log:
        return subprocess.Popen(
            [*bound, *_command(directory, "kafka.Kafka")],
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )


def _command(directory: Path, *main: str) -> list[str]:
    """Return the command of a program in the broker's jars; it logs with Spark's jars, which come first."""
    theirs = pyspark_jars()
    assert theirs is not None
    logging = [str(next(theirs.glob(f"{name}-[0-9]*.jar"))) for name in _LOGGING]
    classpath = os.pathsep.join([*logging, *map(str, jars("broker"))])
    tuned = ["-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
    return [java(), *tuned, "-cp", classpath, *main, str(directory / "server.properties")]


def _last_words(directory: Path) -> str:
    return (directory / "log").read_text(errors="replace")[-800:]


def serve(port: int) -> None:
    """Run a broker at `port` of 127.0.0.1 until Ctrl-C or SIGTERM. Raises: SystemExit with one line if it cannot."""

    def end(*_: object) -> NoReturn:
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise SystemExit(f"memwal: port {port}: {error.strerror}; end what listens there, or use it") from error
    with tempfile.TemporaryDirectory(prefix="memwal-kafka-") as directory:
        server = KafkaServer.start(Path(directory), port)
        try:
            say(f"Kafka answers at {server.brokers} until Ctrl-C; its messages end with it")
            server.process.wait()
        finally:
            server.stop()
    raise SystemExit("memwal: the Kafka broker has ended")


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="Fetch the Kafka broker of the tests, and run it.")
    options.add_argument("--serve", type=int, metavar="PORT", help="run it at this port of 127.0.0.1")
    given = options.parse_args()
    JARS.fetch()
    if given.serve:
        serve(given.serve)
