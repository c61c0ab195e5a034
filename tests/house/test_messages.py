"""The golden file of error messages: each entry has its test, and a change of a message fails."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.messages import GOLDEN, GoldenMessages, parsed, raises, written


def test_every_entry_has_its_test(request: pytest.FixtureRequest) -> None:
    """Checks the files that this run collected, so all of them in `make test`. `--rewrite` removes the others."""
    golden: Any = request.config.pluginmanager.get_plugin("golden_messages")
    assert golden.gone() == []


def test_the_file_is_as_rewrite_writes_it() -> None:
    text = GOLDEN.read_text(encoding="utf-8")
    assert written(parsed(text)) == text


def run_with(expected: tuple[str, ...], *texts: str) -> None:
    """Run a test that raises these errors, against the messages in the golden file."""
    golden: Any = GoldenMessages(rewrite=False)
    golden.expected = {"a test": expected}
    running = golden.pytest_runtest_call(SimpleNamespace(nodeid="a test"))
    next(running)
    for text in texts:
        with raises(ValueError):
            raise ValueError(text)
    with pytest.raises(StopIteration):
        running.send(None)


def test_the_same_messages_pass_and_repetitions_count_once() -> None:
    run_with(("ValueError: one", "ValueError: two\nlines"), "one", "one", "two\nlines")


def test_what_differs_from_run_to_run_is_replaced() -> None:
    run_with(
        ("ValueError: <tmp>/t.lance, process <pid> at 127.0.0.1:<port>",),
        "/dev/shm/memwal-tests-x1/pytest-of-me/pytest-12/test_a_b0/t.lance, process 4711 at 127.0.0.1:40001",
    )


@pytest.mark.parametrize("texts", [["other"], ["one", "more"], []], ids=["other", "more", "none"])
def test_other_messages_fail_and_name_the_remedy(texts: list[str]) -> None:
    with pytest.raises(pytest.fail.Exception, match="pytest --rewrite a test"):
        run_with(("ValueError: one",), *texts)
