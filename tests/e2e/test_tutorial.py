"""Run every command of the README of configs/tutorial, in its order and on a real broker, and compare the output with
the output that the README shows.

MEMWAL_REWRITE_GOLDEN=1 writes the output of the commands into the README. MEMWAL_PICTURES=configs/tutorial takes the
picture of the README again.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.conftest import Cli, Running, wait_until
from tests.page_site import Looked
from tests.s3_server import free_ports

ROOT = Path(__file__).resolve().parent.parent.parent
README = ROOT / "configs" / "tutorial" / "README.md"
LASTING = (
    "make broker",
    "python configs/tutorial/send_flights.py",
    "memwal run configs/tutorial/flights.toml",
)
"""Commands that keep running and need a terminal each, by the last line of their block."""
ACTIVATION = ". .venv/bin/activate\n"
BROKER, PAGE = "9092", "9464"
"""Ports of the tutorial; the test replaces them."""
RATES = {"default=100,": "default=400,", "--rate 500": "--rate 1000"}
"""Events per second that a reader sees arrive, and the higher rates of the test."""
FENCE = re.compile(r"^```(\w+)\n(.*?)^```\n(?:\n^```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A block of commands or a program: its text, the output that the README shows for it or None, and the span of that
    output."""

    kind: str
    text: str
    printed: str | None
    span: tuple[int, int]

    @property
    def lasting(self) -> bool:
        return self.text.splitlines()[-1] in LASTING


def blocks(readme: str) -> list[Block]:
    """Return the blocks of the README that a reader runs."""
    return [Block(found[1], found[2], found[3], found.span(3)) for found in FENCE.finditer(readme)]


def alike(text: str) -> list[str]:
    """Return the lines to compare: without numbers that differ between runs, without the space around them, and with
    every rule of a table one character long, because its length is the width of those numbers."""
    lines = [re.sub("─+", "─", re.sub(" +", " ", line)).rstrip() for line in text.splitlines()]
    return [re.sub(r"-?\d+\.\d{3,}|\d+(\.\d+)? ?(ms|s)\b|(?<=version )\d+", "#", line) for line in lines if line]


@dataclass
class Reader:
    """A reader who works through the tutorial in a separate checkout."""

    home: Path
    env: Mapping[str, str]
    start: Callable[..., Running]
    cli: Cli
    changes: Callable[[str], str]
    """Replaces the ports and rates in a command or file by those of this test."""
    terminals: list[tuple[Block, Running]] = field(default_factory=list)

    def run(self, block: Block) -> str:
        """Run a block to its end; return its output followed by its errors. One command of memwal runs in this process,
        which is quicker."""
        command = self.changes(block.text).removeprefix(ACTIVATION).replace("\\\n", "")
        if command.startswith("memwal ") and command.count("\n") == 1:
            ran = self.cli(*shlex.split(command)[1:], cwd=self.home, env=self.env)
            code, printed = ran.code, "\n".join([*ran.out.splitlines(), *ran.err.splitlines()])
        else:
            running = self._begin(block)
            code = running.wait(300)
            printed = "\n".join([*running.lines, *running.errors])
        assert code == 0, (block.text, printed)
        return printed

    def begin(self, block: Block) -> None:
        """Start a block in a new terminal."""
        self.terminals.append((block, self._begin(block)))

    def terminal(self, command: str) -> Running:
        """Return the newest terminal of a command."""
        return next(running for block, running in reversed(self.terminals) if command in block.text)

    def _begin(self, block: Block) -> Running:
        # One file for each block: a shell reads its script while it runs.
        script = self.home / f"block{block.span[0]}.{'py' if block.kind == 'python' else 'sh'}"
        script.write_text(self.changes(block.text))
        command = ["python", str(script)] if block.kind == "python" else ["bash", "-e", str(script)]
        return self.start(command, cwd=self.home, env=self.env)


@pytest.fixture
def reader(tmp_path: Path, start: Callable[..., Running], cli: Cli, kafka_connector: dict[str, str]) -> Reader:
    """Return a reader whose checkout equals this one, with other ports and rates and without `data`."""
    home, ports = tmp_path / "checkout", dict(zip((BROKER, PAGE), map(str, free_ports(2)), strict=True))
    replaced = ports | RATES

    def changes(text: str) -> str:
        return re.sub("|".join(replaced), lambda found: replaced[found[0]], text)

    (home / "configs" / "tutorial").mkdir(parents=True)
    for each in (*ROOT.iterdir(), *README.parent.parent.iterdir(), *README.parent.iterdir()):
        there = home / each.relative_to(ROOT)
        if each.parent == README.parent and each.suffix in (".toml", ".py"):
            there.write_text(changes(each.read_text()))
        elif each.name not in ("data", "configs", "tutorial", ".git"):
            there.symlink_to(each)
    env = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "COLUMNS": "80",
        "PORT": ports[BROKER],
        "PAGE": ports[PAGE],
        "ARGS": "",  # the arguments of `make test` must not reach `make live`,
        "MAKEFLAGS": "",  # where a make above this one keeps those of its command line
        "MEMWAL__SOURCE__SPARK": json.dumps(kafka_connector),
        "MEMWAL__COMMIT__INTERVAL": "3s",
    }
    return Reader(home, env, start, cli, changes)


def test_every_command_prints_what_the_tutorial_says(reader: Reader, look: Callable[..., Looked]) -> None:
    """The page is open before the first event is sent, and counts the rows while events arrive."""
    readme, seen = README.read_text(encoding="utf-8"), dict[tuple[int, int], str]()
    page: Looked | None = None
    for block in blocks(readme):
        if block.lasting:
            reader.begin(block)
            wait_for_broker(reader, block)
            if "memwal run" in block.text:
                page = page_without_rows(reader, look)
            continue
        if "--key 32,UA" in block.text:  # the first query of the tutorial
            assert page is not None, "the pipeline starts before events are sent"
            watch_rows_arrive(reader.terminal("memwal run"), page)
            for begun, terminal in reader.terminals:
                expected = begun.printed or ""
                wait_until(lambda t=terminal, e=expected: set(alike(reader.changes(e))) <= set(alike(told(t))))
        printed = reader.run(block)
        if block.printed is not None:
            seen[block.span] = printed
            if not os.environ.get("MEMWAL_REWRITE_GOLDEN"):
                assert alike(printed) == alike(block.printed), block.text
    if os.environ.get("MEMWAL_REWRITE_GOLDEN"):
        README.write_text(rewritten(readme, seen), encoding="utf-8")
    assert len(seen) >= 10
    assert noise(reader.terminal("memwal run")) == []


def test_two_commands_lead_to_a_page_that_shows_rows_as_they_come(reader: Reader) -> None:
    """After `make install`, which does nothing here, and `make live` the page shows rows, and later more rows."""
    reader.run(Block("sh", "make install", None, (0, 0)))
    reader.begin(Block("sh", "make live", None, (0, 0)))
    url = wait_until(lambda: re.findall(r"page, .*(http://\S+)", told(reader.terminal("make live"))), timeout=300)[0]

    def rows() -> int:
        with urllib.request.urlopen(f"{url}/live", timeout=10) as answer:
            return int(json.load(answer)["run"]["rows"])

    first = wait_until(rows, timeout=300)  # takes ten seconds on an idle machine
    wait_until(lambda: rows() > first)


def told(terminal: Running) -> str:
    """Return the output of a terminal so far."""
    return "\n".join([*terminal.lines, *terminal.errors])


def noise(terminal: Running) -> list[str]:
    """Return the lines of a pipeline's terminal that a reader does not expect."""
    usual = ("page, metrics", "memwal: starting", "memwal: streaming", "memwal: micro-batch", "Killed")
    return [line for line in terminal.errors if line.strip() and not any(part in line for part in usual)]


def wait_for_broker(reader: Reader, block: Block) -> None:
    """Wait until the broker reports that it answers, and until the topic exists."""
    if "make broker" in block.text:
        wait_until(lambda: "Kafka answers" in told(reader.terminal("make broker")))
    if "send_flights" in block.text:
        broker = reader.changes(f"127.0.0.1:{BROKER}")
        from confluent_kafka.admin import AdminClient

        admin = AdminClient({"bootstrap.servers": broker})
        wait_until(lambda: "flights" in admin.list_topics(timeout=30).topics)


def page_without_rows(reader: Reader, look: Callable[..., Looked]) -> Looked:
    """Open the page of a pipeline that streams, and assert that no row has arrived."""
    wait_until(lambda: "memwal: streaming" in told(reader.terminal("memwal run")), timeout=300)
    page = look(re.findall(r"page, .*(http://\S+)", told(reader.terminal("memwal run")))[0])
    page.until("document.querySelector('#health').dataset.state === 'healthy'")
    assert rows_shown(page) == 0
    return page


def watch_rows_arrive(pipeline: Running, page: Looked) -> None:
    """Assert that a page which was opened before counts the rows, and reports a healthy table in two regions."""

    def all_are_shown() -> bool:
        assert pipeline.process.poll() is None, told(pipeline)
        return rows_shown(page) == 2522

    wait_until(all_are_shown)
    page.until("document.querySelector('#health').dataset.state === 'healthy'")
    page.until("document.querySelectorAll('#regions tbody tr:not(.daemon)').length === 2")
    page.until("document.querySelectorAll('#commits tbody tr').length >= 1")
    page.picture("page")
    page.page.close()


def rows_shown(page: Looked) -> int:
    """Return the number of rows of the run that the page shows."""
    found = re.search(r"([\d,]+) rows, [\d,]+ sent again", page.text("main"))
    return 0 if found is None else int(found[1].replace(",", ""))


def rewritten(readme: str, seen: Mapping[tuple[int, int], str]) -> str:
    """Return the README with the new output of the commands."""
    for (first, last), printed in sorted(seen.items(), reverse=True):
        lines = [line.rstrip() for line in printed.strip("\n").splitlines()]
        while lines and not lines[0]:
            del lines[0]
        readme = readme[:first] + "".join(f"{line}\n" for line in lines) + readme[last:]
    return readme
