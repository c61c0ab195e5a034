"""Documents have no dead links and name no missing make target, every make target has an explanation, and the commands
of a first hour fit into a terminal of 80 columns."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

_LINK = re.compile(r"\]\(([^)#\s]*)(#[^)\s]*)?\)")
_SHOWN = re.compile(r"^```(sh|text)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


def anchors(text: str) -> set[str]:
    """Return the anchors of a document's headings, in the form of repository browsers."""
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in _HEADING.findall(text))
    return {heading.strip().replace(" ", "-") for heading in plain}


def dead_links(name: str, text: str, root: Path) -> list[str]:
    dead = []
    for target, anchor in _LINK.findall(text):
        if "://" in target or target.startswith("mailto:"):
            continue
        file = (root / name).parent / target if target else root / name
        known = not anchor or (file.suffix == ".md" and anchor[1:] in anchors(file.read_text(encoding="utf-8")))
        if not file.exists() or not known:
            dead.append(f"{name}: {target}{anchor}")
    return dead


def test_no_relative_link_is_dead(texts: Mapping[str, str], root: Path) -> None:
    found = [dead for name, text in texts.items() if name.endswith(".md") for dead in dead_links(name, text, root)]
    assert found == []


def test_the_rule_sees_dead_links(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("# One thing\n", encoding="utf-8")
    text = "[x](none.md) [y](a.md#another-thing) [z](a.md#one-thing) [w](a.md)"
    assert dead_links("b.md", text, tmp_path) == ["b.md: none.md", "b.md: a.md#another-thing"]


def test_make_targets_of_the_documents_exist(texts: Mapping[str, str]) -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):.*## ", texts["Makefile"], re.MULTILINE))
    assert {"run", "test", "install", "lint", "bench", "help"} <= targets
    named = {
        target
        for name, text in texts.items()
        if name.endswith(".md")
        for target in re.findall(r"`make ([a-z0-9-]+)", text)
    }
    assert named <= targets


def wider_than_a_terminal(text: str) -> list[str]:
    """Return the lines of commands and outputs that need more than 80 columns."""
    return [line for _, block in _SHOWN.findall(text) for line in block.splitlines() if len(line) > 80]


def test_commands_and_outputs_of_the_first_hour_fit_into_80_columns(texts: Mapping[str, str]) -> None:
    pages = ("README.md", "configs/tutorial/README.md")
    assert [line for name in pages for line in wider_than_a_terminal(texts[name])] == []
    assert sum(len(_SHOWN.findall(texts[name])) for name in pages) > 20


def test_the_rule_sees_wide_commands() -> None:
    assert wider_than_a_terminal(f"```sh\n{'x' * 81}\n```\n```python\n{'x' * 81}\n```\n{'x' * 81}\n") == ["x" * 81]
