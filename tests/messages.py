"""Compare the messages of expected errors with one golden file, `golden/messages.txt`.

    with raises(Invalid):
        table.put(rows)

checks the kind of the error, as `pytest.raises` does. When the test has passed, its messages are compared with those in
the golden file, in order; a message that repeats the one before it counts once, and parts that differ from run to run
are replaced. `pytest --rewrite FILES` writes the messages of the tests that ran and passed.
"""

from __future__ import annotations

import difflib
import itertools
import os
import re
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

GOLDEN = Path(__file__).parent / "golden" / "messages.txt"
REWRITE = "MEMWAL_REWRITE_GOLDEN"
"""The environment variable that makes tests write their golden files. `--rewrite` sets it."""

_OF_ONE_TEST = r"(?:/popen-gw\d+)?(?:/[\w.-]*\d\b)?"
_VARIABLE = [
    (rf"(?:/[\w.-]+)*/pytest-of-[^/]+/pytest-\d+{_OF_ONE_TEST}", "<tmp>"),
    (r"(?:/[\w.-]+)*/tmp[a-z0-9_]{8}\b", "<tmp>"),
    (r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", "<uuid>"),
    (r"\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:?\d\d)?", "<time>"),
    (r"\b(?=[0-9a-f]*[a-f])(?=[0-9a-f]*\d)[0-9a-f]{16,}\b", "<hex>"),
    (r"\b[0-9a-f]{8}(?=_gen_\d)", "<hex>"),
    (r"(checksum is |recorded is ')[0-9a-f]{8}\b", r"\1<hex>"),
    (r"(JoinError::Panic\(Id\()\d+", r"\1<number>"),
    (r"/\S+\.rs:\d+:\d+", "<source>"),
    (r"\b0x[0-9a-f]{6,}\b", "<address>"),
    (r"((?:127\.0\.0\.1|localhost|\[::1\])(?::|', ))\d{4,5}\b", r"\1<port>"),
    (r"\b(process|pid) \d+\b", r"\1 <pid>"),
    (r"\b\d+ attempts in [\d.]+s\b", "<number> attempts in <time>"),
    (r"(Not found: )\d+/", r"\1<tmp>/"),
    (r"(s3://memwal-tests/)\d+\b", r"\1<number>"),
    (r"(_mem_wal/probe/)[0-9a-f]{8}\b", r"\1<hex>"),
]
"""What differs from run to run, and its replacement."""

_Error = TypeVar("_Error", bound=BaseException)
_Messages = Mapping[str, tuple[str, ...]]
"""The messages of each test, by node id."""

_raised: list[str] | None = None
"""The messages of the running test."""


@contextmanager
def raises(kind: type[_Error] | tuple[type[_Error], ...]) -> Iterator[pytest.ExceptionInfo[_Error]]:
    """Expect an error of `kind` with the message of the golden file; yield what `pytest.raises` yields."""
    with pytest.raises(kind) as error:
        yield error
    assert _raised is not None, "raises() works while a test runs; fixtures and commands use pytest.raises"
    _raised.append(_text(error.value))


def _text(error: BaseException) -> str:
    """Return the kind of an error, the reason in its details and its message, without what differs from run to run."""
    reason = getattr(error, "details", {}).get("reason")
    text = f"{type(error).__name__}{f' ({reason})' if reason else ''}: {error}"
    for pattern, replacement in _VARIABLE:
        text = re.sub(pattern, replacement, text)
    return "".join(each if each.isprintable() or each == "\n" else repr(each)[1:-1] for each in text)


class GoldenMessages:
    """The plugin of one pytest session: reads the golden file, compares, and writes it with `--rewrite`."""

    def __init__(self, rewrite: bool) -> None:
        self._rewrite = rewrite
        self.expected = parsed(GOLDEN.read_text(encoding="utf-8"))
        self._found: dict[str, tuple[str, ...]] = {}
        self._collected: set[str] = set()

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Remember every test of the files that were collected as a whole, before options deselect some."""
        if not any("::" in argument for argument in config.args):
            self._collected = {item.nodeid for item in items}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Compare the messages of a test that passed."""
        global _raised  # noqa: PLW0603 - `raises` has no argument that names the test
        _raised = messages = []
        try:
            result = yield
        finally:
            _raised = None
        found = self._found[item.nodeid] = tuple(message for message, _ in itertools.groupby(messages))
        expected = self.expected.get(item.nodeid, ())
        if found != expected and not self._rewrite:
            difference = "\n".join(difflib.ndiff(expected, found))
            remedy = f"read them, then run `pytest --rewrite {item.nodeid.partition('::')[0]}`"
            pytest.fail(f"other messages than in tests/golden/messages.txt; {remedy}:\n{difference}", pytrace=False)
        return result

    def pytest_sessionfinish(self) -> None:
        """Write the golden file."""
        if self._rewrite:
            gone = set(self.gone())
            latest = parsed(GOLDEN.read_text(encoding="utf-8"))  # another run may have written it meanwhile
            kept = {test: messages for test, messages in latest.items() if test not in gone}
            GOLDEN.write_text(written(kept | self._found), encoding="utf-8")

    def gone(self) -> list[str]:
        """Return the tests of the golden file that no longer exist, as far as the collected files show."""
        files = {test.partition("::")[0] for test in self._collected}
        return [
            test
            for test in self.expected
            if (test.partition("::")[0] in files and test not in self._collected)
            or not (GOLDEN.parents[2] / test.partition("::")[0]).exists()
        ]


def parsed(text: str) -> _Messages:
    """Read the golden file: node ids at the margin, then their messages, indented."""
    golden: dict[str, tuple[str, ...]] = {}
    tests: list[str] = []
    messages: list[str] = []
    for line in [*text.splitlines(), ""]:
        if line.startswith("    | "):
            messages[-1] += "\n" + line.removeprefix("    | ")
        elif line.startswith("    "):
            messages.append(line.removeprefix("    "))
        else:
            if messages:
                golden |= dict.fromkeys(tests, tuple(messages))
                tests, messages = [], []
            if line:
                tests.append(line)
    return golden


def written(golden: _Messages) -> str:
    """Return the text of the golden file, sorted. Cases of one test with the same messages are listed together."""
    tests = sorted(test for test, messages in golden.items() if messages)
    blocks = itertools.groupby(tests, key=lambda test: (test.partition("[")[0], golden[test]))
    lines: list[str] = []
    for (_, messages), cases in blocks:
        lines.extend(cases)
        lines.extend("    " + message.replace("\n", "\n    | ") for message in messages)
        lines.append("")
    return "\n".join(lines)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--rewrite`."""
    parser.addoption("--rewrite", action="store_true", help="write the golden files instead of comparing with them")


def pytest_configure(config: pytest.Config) -> None:
    """Register the plugin."""
    if config.option.basetemp:
        _VARIABLE.insert(0, (re.escape(config.option.basetemp) + _OF_ONE_TEST, "<tmp>"))
    if config.getoption("--rewrite"):
        os.environ[REWRITE] = "1"
    rewrite = bool(os.environ.get(REWRITE))
    if rewrite and config.getoption("numprocesses", None):
        raise pytest.UsageError("--rewrite writes one file: run pytest without --numprocesses")
    config.pluginmanager.register(GoldenMessages(rewrite), "golden_messages")
