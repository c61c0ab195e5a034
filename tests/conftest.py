"""Shared by all tests: small tables, the real packages, and memwal's processes with a bounded life."""

from __future__ import annotations

import gc
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, settings

import tests.inside  # noqa: F401 - what is imported changes what tests see
from tests.command_line import run_here

pytest_plugins = [
    "tests.certificates",
    "tests.damaged_table",
    "tests.kafka_fixtures",
    "tests.messages",
    "tests.one_jvm",
    "tests.page_site",
    "tests.s3_fixtures",
    "tests.simulation_fixtures",
    "tests.support.indexes",
    "tests.support.interpose",
    "tests.support.views",
    "tests.table_stages",
    "tests.temporary_files",
    "tests.ways",
]

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ROOT / "configs" / "quickstart"
SCRIPTS = Path(__file__).resolve().parent / "scripts"
PATIENCE = 90.0
"""Seconds to wait for a condition. It only bounds a failure, and no test passes by it: a machine with other work may
take tens of seconds for what otherwise takes one."""
WIDTH = 8
WORDS = ("harbor", "copper", "violet", "meadow", "tunnel", "pepper", "saddle", "candle")

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("name", pa.string()),
        pa.field("price", pa.int64()),
        pa.field("body", pa.string()),
        pa.field("vector", pa.list_(pa.float32(), WIDTH)),
    ]
)
INDEXES = {"vector": "ivf_pq", "body": "fts", "price": "btree"}


_Extent = TypeVar("_Extent")
_RUN = {"long": False}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--long`, which `make test-all` passes."""
    parser.addoption("--long", action="store_true", help="long searches (tests.conftest.extent), and tests marked long")


def pytest_configure(config: pytest.Config) -> None:
    """Read `--long`, and register the marker `long`. pytest calls this before it imports test modules."""
    config.addinivalue_line("markers", "long: runs with --long only, since a shorter test covers the same behaviour")
    _RUN["long"] = config.getoption("long")


def extent(short: _Extent, long: _Extent) -> _Extent:
    """Return `short`, or `long` if pytest runs with `--long`: the number of seeds, cuts or examples of a search."""
    return long if _RUN["long"] else short


LONGEST_FIRST = (
    "integration/test_failure_matrix.py",
    "integration/test_model.py",
    "integration/test_kafka.py",
    "integration/test_on_spark_standalone.py",
    "e2e/test_kill.py",
    "e2e/test_chaos.py",
    "integration/test_cluster_simulation.py",
)
"""Files that take a minute or more, `test_model` only where TLC runs. They run first, so that no process starts one of
them when the others are idle."""


# The same examples in every run, without a deadline; `--hypothesis-profile=heavy` runs other and more examples of the
# state machines.
settings.register_profile(
    "memwal", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("heavy", settings.get_profile("memwal"), max_examples=2000, derandomize=False)
settings.load_profile("memwal")


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell leaves it to background processes
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the longest files first; the others, and the tests of a file, keep their order. Deselect tests marked `long`
    without `--long`."""
    if not extent(False, True):
        deselected = [item for item in items if item.get_closest_marker("long")]
        items[:] = [item for item in items if item not in deselected]
        config.hook.pytest_deselected(items=deselected)
    ranks = {str(ROOT / "tests" / name): rank for rank, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: ranks.get(str(item.path), len(ranks)))


def pytest_collection_finish() -> None:
    """Leave what exists now out of garbage collections: tests that collect would search the modules and thousands of
    tests each time."""
    gc.collect()
    gc.freeze()


def wait_until(condition: Callable[[], Any], timeout: float = PATIENCE, every: float = 0.02) -> Any:
    """Return the first true result of `condition`; raise AssertionError if there is none within `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not (answer := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"did not happen within {timeout} s")
        time.sleep(every)
    return answer


def end(process: subprocess.Popen[str]) -> None:
    """Kill a process that a test started, and all its descendants."""
    with_children = []
    with suppress(psutil.NoSuchProcess):
        with_children = psutil.Process(process.pid).children(recursive=True)
    if process.poll() is None:
        process.kill()
    process.wait(PATIENCE)
    for child in with_children:
        with suppress(psutil.NoSuchProcess):
            child.kill()


def environment(changes: Mapping[str, str | None] | None = None) -> dict[str, str]:
    """Return this process's environment without MEMWAL__ variables, with `changes` (None removes a variable)."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MEMWAL")}
    environ["COLUMNS"] = "200"
    for name, value in (changes or {}).items():
        if value is None:
            environ.pop(name, None)
        else:
            environ[name] = value
    return environ


# ---- rows ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Made:
    """Rows of SCHEMA as a pure function of (id, version), so that a test can compute what it expects."""

    schema: pa.Schema = SCHEMA

    def row(self, id: int, version: int = 0) -> dict[str, Any]:
        """Return one row; `version` distinguishes two rows of one key in every column."""
        price, body, vector = _made(id, version)
        return {"id": id, "name": f"row {id} v{version}", "price": price, "body": body, "vector": list(vector)}

    def rows(self, ids: Sequence[int], version: int = 0) -> list[dict[str, Any]]:
        """Return rows of several keys."""
        return [self.row(id, version) for id in ids]

    def table(self, ids: Sequence[int], version: int = 0) -> pa.Table:
        """Return the same rows as an Arrow table."""
        return pa.Table.from_pylist(self.rows(ids, version), schema=self.schema)


@lru_cache(1 << 13)
def _made(id: int, version: int) -> tuple[int, str, tuple[float, ...]]:
    """Return price, body and vector. Most tests make the same rows: a few small ids, in version 0 or 1."""
    rng = np.random.default_rng((id & 0xFFFFFFFF, version))
    price, words = int(rng.integers(0, 1000)), rng.choice(WORDS, 2, replace=False)
    return price, " ".join(words), tuple(rng.standard_normal(WIDTH).astype(np.float32).tolist())


@pytest.fixture(scope="session")
def made() -> Made:
    """Return the maker of small rows."""
    return Made()


@pytest.fixture
def uri(tmp_path: Path) -> str:
    """Return the URI of a test's table, which does not exist yet."""
    return str(tmp_path / "table.lance")


@pytest.fixture
def open_small(uri: str) -> Iterator[Callable[..., Any]]:
    """Return a function that opens the small table at `uri`, and creates it at the first call; another call fences the
    open writer. Tables that the test leaves open are closed at its end."""
    import memwal

    opened: list[Any] = []

    def open_table(
        at: str = uri, *, commit: str = "0s", regions: int = 2, take_over: bool = False, **sections: Any
    ) -> Any:
        settings = {"commit": {"interval": commit}, **sections}
        new: dict[str, Any] = {} if Path(at).exists() else {"regions": regions}
        take_over = take_over or any(not table.closed for table in opened)
        table = memwal.open(at, schema=SCHEMA, key="id", indexes=INDEXES, settings=settings, take_over=take_over, **new)
        opened.append(table)
        return table

    yield open_table
    for table in opened:
        with suppress(memwal.FencedError):  # an older writer has rows that were never durable
            table.close()


# ---- the real packages ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Packages:
    """The quickstart's data, read without memwal: `files` in stream order, `newest` row per package."""

    files: tuple[Path, ...]
    newest: dict[str, dict[str, Any]]
    changed: frozenset[str]
    """Packages whose version the updates changed."""
    allowed: dict[str, frozenset[str]]
    """Every version that a package ever had."""


@pytest.fixture(scope="session")
def packages() -> Packages:
    """Return the 4,000 packages with the result of their updates."""
    files = tuple(sorted(PACKAGES.glob("*.parquet")))
    first: dict[str, dict[str, Any]] = {}
    newest: dict[str, dict[str, Any]] = {}
    versions: dict[str, set[str]] = {}
    for file in files:
        for row in pq.read_table(file).to_pylist():
            first.setdefault(row["package"], row)
            newest[row["package"]] = row
            versions.setdefault(row["package"], set()).add(row["version"])
    changed = frozenset(name for name, row in newest.items() if row["version"] != first[name]["version"])
    return Packages(files, newest, changed, {name: frozenset(found) for name, found in versions.items()})


@pytest.fixture(scope="session")
def real_packages() -> pa.Table:
    """Return the same packages as an Arrow table, before their updates."""
    return pa.concat_tables(pq.read_table(file) for file in sorted(PACKAGES.glob("01-packages-*.parquet")))


# ---- processes -----------------------------------------------------------------------------------------------------


@dataclass
class Ran:
    """The result of a command."""

    code: int
    out: str
    err: str
    """Standard error, without the lines of the log at level info."""

    def __post_init__(self) -> None:
        self.err = "".join(line for line in self.err.splitlines(keepends=True) if " INFO memwal." not in line)

    @property
    def error_lines(self) -> list[str]:
        """The non-empty lines of standard error."""
        return [line for line in self.err.splitlines() if line.strip()]


@dataclass
class Running:
    """A process whose lines are read as they arrive."""

    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    """The lines of standard error."""
    _arrived: queue.Queue[str | None] = field(default_factory=queue.Queue)
    _readers: list[threading.Thread] = field(default_factory=list)

    def __post_init__(self) -> None:
        for stream, kept, announce in (
            (self.process.stdout, self.lines, True),
            (self.process.stderr, self.log, False),
        ):
            reader = threading.Thread(target=self._read, args=(stream, kept, announce), daemon=True)
            reader.start()
            self._readers.append(reader)

    def _read(self, stream: Any, kept: list[str], announce: bool) -> None:
        for line in stream:
            kept.append(line.rstrip("\n"))
            if announce:
                self._arrived.put(kept[-1])
        if announce:
            self._arrived.put(None)

    @property
    def errors(self) -> list[str]:
        """The lines of standard error, without those of the log at level info."""
        return [line for line in self.log if " INFO memwal." not in line]

    def line(self, timeout: float = PATIENCE) -> str | None:
        """Return the next line of standard output; None once the process has closed it."""
        return self._arrived.get(timeout=timeout)

    def line_with(self, text: str, timeout: float = PATIENCE) -> str:
        """Return the next line of standard output that contains `text`."""
        deadline = time.monotonic() + timeout
        while (line := self.line(max(0.1, deadline - time.monotonic()))) is not None:
            if text in line:
                return line
        raise AssertionError(f"ended (exit code {self.wait()}) without {text!r}: {self.lines} {self.errors}")

    def tell(self, text: str) -> None:
        """Write one line to standard input."""
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def wait(self, timeout: float = PATIENCE) -> int:
        """Return the exit code, after all output was read."""
        code = self.process.wait(timeout)
        for reader in self._readers:
            reader.join(timeout)
        return code

    def kill(self) -> None:
        """Send SIGKILL to this process only; its children continue."""
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(PATIENCE)


# What the fixtures below return.
Cli = Callable[..., Ran]
OpenSmall = Callable[..., Any]
Script = Callable[..., Running]
Serve = Callable[..., tuple[Running, str]]
SmallConfig = Callable[..., Path]
Start = Callable[..., Running]
Tree = Callable[[Path], dict[str, int]]
WaitUntil = Callable[..., Any]


@pytest.fixture
def start() -> Iterator[Start]:
    """Return a function that starts a process with piped input and output; the test's end kills it."""
    yield from starter()


@pytest.fixture(scope="module")
def start_for_module() -> Iterator[Start]:
    """Return the same as `start`; the module's end kills the processes."""
    yield from starter()


def starter() -> Iterator[Start]:
    """Implement the fixture `start`."""
    started: list[Running] = []

    def start_process(
        arguments: Sequence[str], *, cwd: Path | None = None, env: Mapping[str, str | None] | None = None
    ) -> Running:
        process = subprocess.Popen(
            list(arguments),
            cwd=cwd,
            env=environment(env),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(Running(process))
        return started[-1]

    yield start_process
    for running in started:
        end(running.process)


@pytest.fixture(scope="session")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Cli:
    """Return a function that runs `memwal …` in this process, or with `process=True` in a separate one."""
    elsewhere = tmp_path_factory.mktemp("cwd")

    def run(
        *arguments: str | Path,
        cwd: Path = elsewhere,
        env: Mapping[str, str | None] | None = None,
        process: bool = False,
        timeout: float = 500.0,
    ) -> Ran:
        words = list(map(str, arguments))
        if process:
            return _in_a_process(words, cwd, environment(env), timeout)
        return Ran(*run_here(words, cwd=cwd, environ=environment(env)))

    return run


def _in_a_process(words: list[str], cwd: Path, environ: dict[str, str], timeout: float) -> Ran:
    process = subprocess.Popen(
        [sys.executable, "-m", "memwal.ingest.cli.app", *words],
        cwd=cwd,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        end(process)
    return Ran(process.returncode, out, err)


def toml(sections: Mapping[str, Mapping[str, Any]]) -> str:
    """Format a configuration file; tables inside a section become separate sections."""
    parts = []
    for section, values in sections.items():
        flat = {key: value for key, value in values.items() if not isinstance(value, Mapping)}
        parts.append(f"[{section}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in flat.items()))
        for key, value in values.items():
            if isinstance(value, Mapping):
                lines = "".join(f"{json.dumps(name)} = {json.dumps(each)}\n" for name, each in value.items())
                parts.append(f"[{section}.{key}]\n{lines}")
    return "\n".join(parts)


def small_sections(uri: str) -> dict[str, dict[str, Any]]:
    """Return the configuration of the small table, with the columns, key and indexes of SCHEMA."""
    columns = {"id": "int64", "name": "string", "price": "int64", "body": "string", "vector": f"vector[{WIDTH}]"}
    return {
        "table": {"uri": uri, "key": ["id"], "columns": columns, "indexes": INDEXES},
        "commit": {"interval": "0s"},
    }


@pytest.fixture
def small_config(tmp_path: Path, uri: str) -> SmallConfig:
    """Return a function that writes the small table's configuration, with changed or added sections, and returns its
    path."""

    def write(name: str = "config.toml", **changes: Mapping[str, Any]) -> Path:
        sections = small_sections(uri)
        for section, values in changes.items():
            sections.setdefault(section, {}).update(values)
        path = tmp_path / name
        path.write_text(toml(sections))
        return path

    return write


@pytest.fixture
def serve(start: Start) -> Serve:
    """Return a function that starts `memwal serve CONFIG` with options, and returns the process and its endpoint once
    it answers."""
    return lambda config, *options: serve_with(start, config, *options)


@pytest.fixture
def watchful(script: Script) -> Serve:
    """Return a function like `serve`, for a daemon that reads storage more often; see `scripts/watchful.py`."""

    def begin(config: Path, *options: str) -> tuple[Running, str]:
        running = script("watchful.py", "serve", config, *options)
        return running, running.line_with("serving").rsplit(" ", 1)[1]

    return begin


def serve_with(start: Start, config: Path, *options: str) -> tuple[Running, str]:
    """Implement the fixture `serve`."""
    running = start([sys.executable, "-m", "memwal.ingest.cli.app", "serve", str(config), *options])
    line = running.line_with("serving")
    return running, line.rsplit(" ", 1)[1]


RUN_SCRIPT = """import runpy, sys
from memwal.ingest.own_process import without_pandas
without_pandas()
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a script without pandas, as a command does: its import takes a quarter of the start's processor time."""


@pytest.fixture
def script(start: Start) -> Script:
    """Return a function that starts one of `tests/scripts/` with arguments."""
    return lambda name, *arguments: start([sys.executable, "-c", RUN_SCRIPT, str(SCRIPTS / name), *map(str, arguments)])


def tree(path: Path) -> dict[str, int]:
    """Return every file below `path` with its size, to check that nothing was written."""
    return {str(each.relative_to(path)): each.stat().st_size for each in sorted(path.rglob("*")) if each.is_file()}


@pytest.fixture(scope="session", name="tree")
def tree_fixture() -> Tree:
    """Return `tree`."""
    return tree


@pytest.fixture(scope="session", name="wait_until")
def wait_until_fixture() -> WaitUntil:
    """Return `wait_until`."""
    return wait_until
