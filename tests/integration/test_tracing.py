"""Spans of real processes, as a real OTLP/HTTP collector receives them; and no effect at all while tracing is off."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import memwal
from memwal.ingest.settings.load import load
from tests.conftest import PATIENCE, Cli, SmallConfig, Start
from tests.messages import raises
from tests.otlp_collector import Collector, Span, collecting

ROWS = 64
SERVER, CLIENT = 2, 3
"""Kinds of spans in OTLP."""
TOKEN, SECRET = "a-token-that-no-span-may-show", "a-value-that-no-span-may-show"
PROGRAM = """
import subprocess
import sys
import memwal
import pyarrow as pa
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

provider = TracerProvider(resource=Resource.create({"service.name": "program"}))
provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=sys.argv[2] + "/v1/traces")))
trace.set_tracer_provider(provider)
rows = [{"id": n, "name": sys.argv[4], "price": n, "body": sys.argv[4], "vector": [0.5] * 8} for n in range(64)]
with memwal.connect(sys.argv[1].split(","), token=sys.argv[3]) as table:
    with trace.get_tracer("program").start_as_current_span("order"):
        table.put(rows, token="loader:1")
        table.get([1, 2])
        table.count()
    try:
        table.put([{"id": sys.argv[4]}])
    except memwal.Invalid as error:
        print("refused", error)
    table.flush()
    table.commit()
    table.scan().read_all()
"""


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as found:
        yield found


def only(spans: list[Span], **attributes: Any) -> Span:
    found = [span for span in spans if attributes.items() <= span.attributes.items()]
    assert len(found) == 1, (attributes, spans)
    return found[0]


def is_child(span: Span, parent: Span) -> bool:
    return (span.trace, span.parent) == (parent.trace, parent.id)


def test_a_put_is_one_trace_from_the_program_to_the_log(
    small_config: SmallConfig, start: Start, collector: Collector
) -> None:
    config = small_config(
        tracing={"enabled": True, "endpoint": collector.url},
        daemon={"token": "env:MEMWAL_TEST_TOKEN", "workers": 2},
        regions={"count": 16},
        gc={"interval": "200ms"},
    )
    env = {"MEMWAL_TEST_TOKEN": TOKEN, "OTEL_BSP_SCHEDULE_DELAY": "100"}
    daemon = start([sys.executable, "-m", "memwal.ingest.cli.app", "serve", str(config)], env=env)
    endpoint = daemon.line_with("serving").partition(" at ")[2].replace(" ", "")
    program = start([sys.executable, "-c", PROGRAM, endpoint, collector.url, TOKEN, SECRET])
    assert program.wait(3 * PATIENCE) == 0, program.errors
    assert program.lines[0].startswith("refused"), program.lines
    daemon.process.terminate()
    assert daemon.wait() == 0, daemon.errors

    order = only(collector.named("order"))
    put = only([span for span in collector.named("memwal.put") if is_child(span, order)])
    assert (put.service, put.kind, put.attributes["memwal.rows"]) == ("program", CLIENT, ROWS)
    taken = [span for span in collector.named("memwal.daemon.put") if is_child(span, put)]
    assert {(span.service, span.kind) for span in taken} == {("memwal-daemon", SERVER)}
    assert len(taken) == 2, "one for each daemon"
    assert sum(span.attributes["memwal.rows"] for span in taken) == ROWS
    for step in ("memwal.region.append", "memwal.region.apply"):
        steps = [span for span in collector.named(step) if any(is_child(span, each) for each in taken)]
        assert sum(span.attributes["memwal.rows"] for span in steps) == ROWS
        assert all(span.attributes["memwal.region"] and span.attributes["memwal.bytes"] > 0 for span in steps)
    get = only([span for span in collector.named("memwal.get") if is_child(span, order)])
    assert get.attributes["memwal.rows"] == 2
    answered = [span for span in collector.named("memwal.daemon.get") if is_child(span, get)]
    assert sum(span.attributes["memwal.rows"] for span in answered) == 2
    counts = collector.named("memwal.count")
    assert only(counts).attributes["memwal.rows"] == ROWS
    assert all(is_child(span, counts[0]) for span in collector.named("memwal.daemon.count"))
    refused = only([span for span in collector.named("memwal.put") if span.failed])
    assert refused.attributes["error.type"] == "Invalid"
    assert {span.attributes["memwal.region"] for span in collector.named("memwal.region.flush")}
    committed = collector.named("memwal.table.commit")
    assert sum(span.attributes["memwal.rows"] for span in committed) == ROWS
    asked = only(collector.named("memwal.daemon.commit"))
    assert any(is_child(span, asked) for span in committed)
    assert collector.named("memwal.table.collect")
    names = {span.name for span in collector.spans if span.kind == SERVER}
    assert not names & {"memwal.daemon.regions", "memwal.daemon.look"}
    assert not any(each.encode() in body for body in collector.bodies for each in (TOKEN, SECRET))


def test_a_micro_batch_is_one_trace_from_the_run_to_the_log(
    small_config: SmallConfig, cli: Cli, collector: Collector, tmp_path: Path, made: Any
) -> None:
    (tmp_path / "in").mkdir()
    for number in range(2):
        pq.write_table(made.table(range(number * 20, number * 20 + 20)), tmp_path / "in" / f"{number}.parquet")
    config = small_config(tracing={"enabled": True, "endpoint": collector.url}, source={"path": str(tmp_path / "in")})
    ran = cli("run", config, "--once", process=True, timeout=3 * PATIENCE)
    assert ran.code == 0, ran.err
    for batch_id in range(2):
        batch = only(collector.named("memwal.micro_batch"), **{"memwal.batch_id": batch_id})
        assert (batch.service, batch.attributes["memwal.rows"]) == ("memwal-run", 20)
        puts = [span for span in collector.named("memwal.daemon.put") if is_child(span, batch)]
        assert sum(span.attributes["memwal.rows"] for span in puts) == 20
        assert {span.attributes["memwal.batch_id"] for span in puts} == {batch_id}
        for put in puts:
            appended = [span for span in collector.named("memwal.region.append") if is_child(span, put)]
            assert [span.attributes["memwal.region"] for span in appended] == [put.attributes["memwal.region"]]


EMBEDDED = """
import json
import subprocess
import sys
import memwal
import pyarrow as pa

schema = pa.schema([pa.field("id", pa.int64(), nullable=False)])
settings = {"tracing": json.loads(sys.argv[2]), "commit": {"interval": "0s"}}
with memwal.open(sys.argv[1], schema=schema, key="id", settings=settings) as table:
    table.put([{"id": 1}])
    assert table.count() == 1
print(json.dumps([name for name in sys.modules if name.startswith("opentelemetry")]))
"""


def test_commands_make_spans_of_their_steps(
    small_config: SmallConfig, cli: Cli, collector: Collector, uri: str, made: Any
) -> None:
    with memwal.open(uri, settings=small_config()) as table:
        table.put(made.rows(range(10)))
        table.flush()
    config = small_config("traced.toml", tracing={"enabled": True, "endpoint": collector.url})
    for command in ("commit", "gc"):
        ran = cli(command, config, process=True)
        assert ran.code == 0, ran.err
    committed = only(collector.named("memwal.table.commit"))
    assert (committed.service, committed.attributes["memwal.rows"]) == ("memwal", 10)
    assert only(collector.named("memwal.table.collect")).attributes["memwal.regions"] > 0


def test_off_imports_nothing_and_the_sample_counts(start: Start, collector: Collector, tmp_path: Path) -> None:
    def ran(tracing: str, **env: str) -> Any:
        place = tmp_path / f"{len(list(tmp_path.iterdir()))}.lance"
        running = start([sys.executable, "-c", EMBEDDED, str(place), tracing], env=env)
        assert running.wait() == 0, running.errors
        return running

    assert ran('{"enabled": false}', OTEL_EXPORTER_OTLP_ENDPOINT=collector.url).lines == ["[]"]
    assert collector.spans == []
    ran('{"enabled": true, "sample": 0.0}', OTEL_EXPORTER_OTLP_ENDPOINT=collector.url)
    assert collector.spans == []
    ran('{"enabled": true}', OTEL_EXPORTER_OTLP_ENDPOINT=collector.url, OTEL_SERVICE_NAME="shop")
    put = only(collector.named("memwal.put"))
    assert put.service == "shop"
    assert is_child(only(collector.named("memwal.region.append")), put)


def test_a_collector_that_is_down_stops_nothing(start: Start, tmp_path: Path) -> None:
    tracing = '{"enabled": true, "endpoint": "http://127.0.0.1:1"}'
    env = {"OTEL_EXPORTER_OTLP_TIMEOUT": "1"}
    running = start([sys.executable, "-c", EMBEDDED, str(tmp_path / "t.lance"), tracing], env=env)
    assert running.wait() == 0, running.errors


@pytest.mark.parametrize(
    "tracing",
    [
        {"endpoint": "127.0.0.1:4318"},
        {"endpoint": "https://user:secret@host"},
        {"sample": 1.5},
    ],
)
def test_settings_that_are_wrong(tracing: dict[str, Any], small_config: SmallConfig) -> None:
    with raises(memwal.Invalid) as refused:
        load(small_config(tracing=tracing), {})
    assert "secret" not in str(refused.value)


def test_a_missing_extra_is_named(small_config: SmallConfig, start: Start) -> None:
    config = small_config(tracing={"enabled": True})
    hidden = "import sys; sys.modules['opentelemetry'] = None; from memwal.ingest.cli.app import main; main()"
    for command in (("config", "check"), ("serve",)):
        running = start([sys.executable, "-c", hidden, *command, str(config)])
        assert running.wait() == 2
        assert "OpenTelemetry is not installed, and this needs it: pip install 'memwal[otel]'" in running.errors[0]
        assert len(running.errors) == 1


def test_threads_of_a_call_stay_in_its_trace() -> None:
    """A thread that is started for a call carries the trace, even if the process only forwards it."""
    code = """
from concurrent.futures import ThreadPoolExecutor
from memwal.ingest import tracing
from memwal.ingest.caller import carried

given = (("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),)
with ThreadPoolExecutor(1) as pool, tracing.continued(given):
    assert pool.submit(carried(tracing.headers)).result() == given
    assert pool.submit(tracing.headers).result() == ()
assert tracing.headers() == ()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE)
