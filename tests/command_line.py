"""Run the `memwal` command in the tests' own process: a separate process takes 1.4 s of CPU before it does anything."""

from __future__ import annotations

import io
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, chdir, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import patch

from memwal.ingest.cli.app import main

_ONE_AT_A_TIME = threading.RLock()
"""Serialises commands, since arguments, environment, directory and output belong to the whole process."""


def run_here(arguments: Sequence[str], *, cwd: Path, environ: Mapping[str, str]) -> tuple[int, str, str]:
    """Run `memwal` with `arguments` through its entry point; return its exit code, output and errors.

    It behaves like a new process with `environ` in `cwd` and without input: unconfigured log records go to standard
    error from WARNING on, and changes of the process (environment, signal handlers, log handlers) are restored
    afterwards. Output of other libraries to file descriptors 1 and 2 is not captured. Spark starts in the JVM that all
    tests of this process share (`tests.one_jvm`).
    """
    if arguments[:1] == ["run"] and (sql := sys.modules.get("pyspark.sql")) is not None:
        assert sql.SparkSession.getActiveSession() is None, "`run` would use the Spark of the tests, and end it"
    out, err = _stream(), _stream()
    with ExitStack() as stack:
        stack.enter_context(_ONE_AT_A_TIME)
        for context in (
            patch.object(sys, "argv", ["memwal", *arguments]),
            patch.object(sys, "stdin", stack.enter_context(Path(os.devnull).open(encoding="utf-8"))),
            chdir(cwd),
            _environment(environ),
            _signal_handlers(),
            redirect_stdout(out),
            redirect_stderr(err),
            _logging(),
        ):
            stack.enter_context(context)
        if arguments[:1] == ["serve"]:
            # `serve` keeps pandas from pyarrow unless it is imported
            import pandas  # type: ignore[import-untyped]  # noqa: F401
        code = _exit_code(main)
    return code, _text(out), _text(err)


def _stream() -> io.TextIOWrapper:
    """Return a stream like a piped standard output or error; `main` changes its encoding."""
    return io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)


def _text(stream: io.TextIOWrapper) -> str:
    stream.flush()
    written = stream.buffer
    assert isinstance(written, io.BytesIO)
    return written.getvalue().decode().replace("\r\n", "\n")  # as `subprocess` reads text


def _exit_code(call: Callable[[], None]) -> int:
    try:
        call()
    except SystemExit as ended:
        return int(ended.code or 0)
    raise AssertionError("main returned; it always exits")


@contextmanager
def _environment(wanted: Mapping[str, str]) -> Iterator[None]:
    """Set `os.environ` to `wanted`; write only the differences, since other threads may read it."""
    before = dict(os.environ)
    try:
        _become(wanted)
        yield
    finally:
        _become(before)


def _become(wanted: Mapping[str, str]) -> None:
    for name in set(os.environ) - set(wanted):
        del os.environ[name]
    for name, value in wanted.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


@contextmanager
def _signal_handlers() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _logging() -> Iterator[None]:
    """Set up loggers as in a new process: pytest's handlers on the root logger would take records for standard
    error."""
    loggers = [logging.getLogger(name) for name in (None, "memwal")]
    before = [(each, each.handlers[:], each.filters[:], each.level, each.propagate) for each in loggers]
    for logger in loggers:
        logger.handlers[:] = []
    loggers[0].setLevel(logging.WARNING)
    loggers[1].setLevel(logging.NOTSET)
    loggers[1].propagate = True
    try:
        yield
    finally:
        for logger, handlers, filters, level, propagate in before:
            logger.handlers[:], logger.filters[:] = handlers, filters
            logger.setLevel(level)
            logger.propagate = propagate
