"""`memwal doctor`: check whether this machine can run a configuration, and print a remedy for every problem.

It runs the checks of `config check`, and those of the machine: libraries, storage, clock, disk, memory, open files,
daemons. It leaves nothing behind: it deletes the objects that it writes to storage to test conditional writes.
"""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any, Literal

from rich.filesize import decimal
from rich.markup import escape

from memwal import wal
from memwal.flush import BaseTable
from memwal.ingest.cli.command import Call, CommandConsole, lines_of
from memwal.ingest.cli.open import open_for_reading
from memwal.ingest.cli.print import count, write_json
from memwal.ingest.errors import Invalid, MemWalError, classify
from memwal.ingest.service.client.remote import RemoteTable
from memwal.ingest.service.ops import skew
from memwal.ingest.settings.load import Settings
from memwal.ingest.spark.pipeline.checks import find_problems, has_source
from memwal.wal.layout import PROBE_PREFIX

State = Literal["ok", "notice", "wrong"]
_STYLES: Mapping[State, str] = {"ok": "green", "notice": "yellow", "wrong": "bold red"}
SKEW_MOST = 60.0
"""Seconds. `gc` computes ages of files by storage's clock, and S3 rejects requests that are 15 minutes off."""
FILES_LEAST = 1024
"""Descriptors. A daemon with two regions uses about 90, and one more for each file that a read has open."""
DISK_LEAST = 1 << 30


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. `text`: for "wrong" and "notice" with the remedy."""

    check: str
    state: State
    text: str


class Wrong(Exception):
    """A check failed; the text states the remedy."""


class Notice(Exception):
    """Something works now but may fail later; the text states what to change."""


def show(pipelines: Mapping[str, Settings], environ: Mapping[str, str], *, as_json: bool) -> int:
    """Print the result of every check as it completes; return 2 if something is wrong, else 0."""
    found, console = dict[str, list[Finding]](), CommandConsole()
    for name, settings in pipelines.items():
        if not as_json:
            console.say(name)
        found[name] = []
        examine(settings, environ, partial(_take, found[name], None if as_json else console))
    if as_json:
        write_json({name: [asdict(each) for each in findings] for name, findings in found.items()})
    states = [each.state for findings in found.values() for each in findings]
    wrong, notices = states.count("wrong"), states.count("notice")
    if not as_json:
        told = [count(wrong, "problem")] * bool(wrong) + [count(notices, "notice")] * bool(notices)
        console.say(f"{' and '.join(told)}; each line names its remedy" if told else "everything is as it should be")
    return 2 if wrong else 0


def examine(settings: Settings, environ: Mapping[str, str], tell: Callable[[Finding], None]) -> None:
    """Run every check and pass each result to `tell`. Errors of checks become results."""

    def check(name: str, work: Callable[..., str], *args: Any) -> None:
        try:
            tell(Finding(name, "ok", work(*args)))
        except (Notice, Wrong) as told:
            tell(Finding(name, "notice" if isinstance(told, Notice) else "wrong", str(told)))
        except Exception as error:  # noqa: BLE001 - reported like any other problem
            tell(Finding(name, "wrong", "; ".join(lines_of(classify(error)))))

    def checked(name: str, found: Any, problem: MemWalError | None) -> None:
        lines = () if problem is None else lines_of(problem)
        for line in lines:
            tell(Finding(name, "wrong", line))
        if not lines:
            tell(Finding(name, "ok", _said(name, found)))

    check("libraries", _libraries)
    base, _ = find_problems(settings, environ, starts=False, checked=checked)
    with suppress(Invalid):  # reported with the table
        check("storage", _storage, settings, settings.storage_options(environ))
    check("regions", _regions, settings, base)
    if base is not None:
        check("daemons", _daemons, settings, environ)
    check("disk", _disk, settings)
    check("memory", _memory, settings, 1 if base is None else base.buckets)
    check("open files", _open_files)


def _take(into: list[Finding], console: CommandConsole | None, finding: Finding) -> None:
    into.append(finding)
    if console is not None:
        state = f"[{_STYLES[finding.state]}]{finding.state:<6}[/]"
        console.print(f"  {state}  {escape(finding.check):<16} {escape(finding.text)}", highlight=False, soft_wrap=True)


def _said(name: str, found: Any) -> str:
    """Return the text of a successful check of the configuration."""
    if isinstance(found, BaseTable):
        return f"{found.uri}, version {found.version}, {count(found.buckets, 'region')}"
    if name == "table":
        return "does not exist yet; `memwal init`, `run` or `serve` creates it"
    if name == "PySpark":
        return f"version {version('pyspark')}"
    return f"version {found}" if name == "Java" else "as it should be"


# ---- the machine ---------------------------------------------------------------------------------------------------


def _libraries() -> str:
    """Compare the installed libraries with the requirements of memwal."""
    from packaging.requirements import Requirement

    wanted = [Requirement(line) for line in requires("memwal") or ()]
    off = []
    for each in wanted:
        if each.marker is not None and not each.marker.evaluate({"extra": ""}):
            continue
        try:
            found = version(each.name)
        except PackageNotFoundError:
            found = "none"
        if found == "none" or not each.specifier.contains(found, prereleases=True):
            off.append(f"{each.name} {found} (needs {each.specifier})")
    if off:
        raise Wrong(f"{', '.join(off)}: install memwal again into an environment of its own")
    return ", ".join(f"{name} {version(name)}" for name in ("memwal", "pylance", "pyarrow"))


def _regions(settings: Settings, base: BaseTable | None) -> str:
    """Check that the whole key decides the region of a row."""
    if text := skew.by_key(settings, base):
        raise Notice(text)
    return "rows are spread over them by the whole key" if settings.table.key else "as it should be"


def _storage(settings: Settings, options: Mapping[str, str]) -> str:
    """Create, read, list and delete an object, let four threads race for one key, and compare the clocks."""
    with _scratch(settings, options) as store:
        key = f"{PROBE_PREFIX}{wal.SystemIds().token()}"
        clock = wal.SystemClock()
        began = clock.monotonic()
        wal.probe(store, wal.SystemIds(), options=settings.wal.options())
        seconds = clock.monotonic() - began
        try:
            store.put(key, b"memwal doctor")
            now = clock.now()
            info = next((each for each in store.describe(PROBE_PREFIX) if each.key == key), None)
        finally:
            store.delete(key)
        if info is None:
            raise Wrong(f"{store.url(key)} was written and is not listed; memwal needs listings that show every object")
        skew = now - info.modified
        if abs(skew) > SKEW_MOST:
            ahead = "ahead of" if skew > 0 else "behind"
            raise Wrong(f"this machine's clock is {abs(skew):.0f} s {ahead} storage's; set it by NTP")
        return f"conditional writes work ({seconds * 1e3:.0f} ms for a race), clocks agree"


@contextmanager
def _scratch(settings: Settings, options: Mapping[str, str]) -> Iterator[wal.ObjectStore]:
    """Yield a store for tests: the table's on S3, else a directory on its disk that is removed at the end."""
    store = wal.open_store(settings.table.uri, options, put_timeout=settings.wal.put_timeout)
    if store.remote:
        yield store
        return
    with tempfile.TemporaryDirectory(prefix=".memwal-doctor-", dir=_existing(Path(store.url("")))) as directory:
        yield wal.open_store(directory)


def _existing(path: Path) -> Path:
    """Return the nearest existing directory at or above `path`, outside of a table."""
    return next(each for each in path.absolute().parents if each.is_dir())


def _daemons(settings: Settings, environ: Mapping[str, str]) -> str:
    table = open_for_reading(Call(settings, environ))
    if not isinstance(table, RemoteTable):
        text = "no daemon answers for every region: `memwal serve` starts one, `memwal run` has its own"
        if settings.daemon.endpoints:
            raise Notice(f"{text}; configured are {', '.join(settings.daemon.endpoints)}")
        return text
    with table:
        owners = {region["owner"] for region in table.status()["regions"]}
    return f"{count(len(owners), 'daemon')} found: {', '.join(sorted(owners))}"


def _disk(settings: Settings) -> str:
    """Check the free space of the disks of the table, the checkpoint and temporary files."""
    places = [tempfile.gettempdir(), *([settings.checkpoint] if has_source(settings) else [])]
    if "://" not in settings.table.uri:
        places.append(settings.table.uri)
    free = {}
    for place in map(str, places):
        path = Path(place)
        free[place] = shutil.disk_usage(path if path.is_dir() else _existing(path)).free
    least = min(free, key=lambda place: free[place])
    if free[least] < DISK_LEAST:
        raise Notice(f"{decimal(free[least])} are free at {least}: free some; a full disk stops every put")
    return f"{decimal(free[least])} free at {least}"


def _memory(settings: Settings, regions: int) -> str:
    """Compare the limits in the settings with the memory of this machine, or of its container."""
    rows = {
        "flush.cache_max": settings.flush.cache_max,
        "memtable.size_max of each region": settings.memtable.size_max * regions,
    }
    if settings.table.memory_max:
        rows = {"table.memory_max": settings.table.memory_max}
    wanted = {"table.cache_max": settings.table.cache_max, **rows, "commit.memory_max": settings.commit.memory_max}
    machine, limit = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), Path("/sys/fs/cgroup/memory.max")
    told = limit.read_text().strip() if limit.is_file() else "max"
    most, here = sum(wanted.values()), min(machine, int(told)) if told.isdigit() else machine
    if most > here:
        parts = ", ".join(f"{name} {decimal(size)}" for name, size in wanted.items())
        raise Notice(f"the limits add up to {decimal(most)}, this machine has {decimal(here)}: lower one of {parts}")
    return f"{decimal(here)}; the limits of caches and memtables add up to {decimal(most)}"


def _open_files() -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < FILES_LEAST:
        raise Notice(f"a process may open {soft} files; allow {FILES_LEAST} (`ulimit -n {FILES_LEAST}`, LimitNOFILE=)")
    return f"a process may open {'any number of' if soft == resource.RLIM_INFINITY else f'{soft:,}'} files"
