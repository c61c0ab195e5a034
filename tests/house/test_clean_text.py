"""Texts that no file under version control may contain, and calls that no test may make."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping

# The patterns are written in pieces, so that this file does not match them.
_REGISTRY = re.compile("py" + r"pi\.|python" + r"hosted|--(extra-)?index" + r"-url\s|find" + r"-links", re.IGNORECASE)
_MACHINE_PATH = re.compile(r"(?<![\w.~-])/" + r"(root|home/[a-z]\w*|Users/\w+|work)/")
_UNFINISHED = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X|NotImplemented" + r"Error)\b")
_SKIPS = {"skip", "skipif", "importorskip", "xfail"}


def _holding(pattern: re.Pattern[str], texts: Mapping[str, str]) -> list[str]:
    return [
        f"{name}:{number}: {line.strip()[:100]}"
        for name, text in texts.items()
        for number, line in enumerate(text.splitlines(), 1)
        if pattern.search(line)
    ]


def test_no_registry_host_is_named(texts: Mapping[str, str]) -> None:
    assert _holding(_REGISTRY, texts) == []
    assert _holding(re.compile("://"), {name: text for name, text in texts.items() if name.endswith(".lock")}) == []


def test_no_path_of_one_machine_is_named(texts: Mapping[str, str]) -> None:
    assert _holding(_MACHINE_PATH, texts) == []


def test_nothing_is_left_unfinished(texts: Mapping[str, str]) -> None:
    assert _holding(_UNFINISHED, {name: text for name, text in texts.items() if name != "LICENSE"}) == []


def test_no_test_is_skipped(texts: Mapping[str, str]) -> None:
    suspect = {name: text for name, text in texts.items() if any(f".{each}" in text for each in _SKIPS)}
    found = [
        f"{name}:{node.lineno}"
        for name, text in suspect.items()
        if name.startswith("tests/") and name.endswith(".py")
        for node in ast.walk(ast.parse(text, name))
        if isinstance(node, ast.Attribute)
        and node.attr in _SKIPS
        and ast.unparse(node.value).split(".")[0] in ("pytest", "unittest", "mark")
    ]
    assert found == []


def test_every_dependency_is_locked_with_hashes(texts: Mapping[str, str]) -> None:
    runtime, everything = texts["requirements.lock"], texts["requirements-dev.lock"]
    for lock in (runtime, everything):
        pins = re.split(r"\n(?=[a-z])", lock.strip())
        assert len(pins) > 20
        assert [pin for pin in pins if not re.match(r"[a-z0-9-]+==\S+", pin) or "--hash=sha256:" not in pin] == []
    versions = re.compile(r"^[a-z0-9-]+==\S+.*?(?= \\$)", re.MULTILINE)
    assert set(versions.findall(runtime)) <= set(versions.findall(everything))
    for name in re.findall(r'^    "([a-z-]+)[=>]', texts["pyproject.toml"], re.MULTILINE):
        assert re.search(rf"^{name}==", everything, re.MULTILINE), name
