"""A docstring or a comment in wal/, flush/ or ingest/ names each action of the models.

The text has the form `(model: Module!Action)` or `(model: Module!One, Module!Two)` and stands at the step that the
action models. It leads from the code to the model, and shows which action must change when the step changes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest

from tests.model.modules import Module, modules

_NAMED = re.compile(r"\(model:\s+([A-Z]\w*!\w[^)]*)\)")
_MODULES = modules()


def named(texts: Sequence[str]) -> list[str]:
    """Return the actions that texts name, as `Module!Action`."""
    found = [" ".join(names.replace("#", " ").split()) for text in texts for names in _NAMED.findall(text)]
    return [name.strip() for names in found for name in names.split(",")]


@pytest.fixture(scope="module")
def in_code(sources: Sequence[Any]) -> set[str]:
    """Return the actions that the docstrings and comments of the code name."""
    return set(named([source.text for source in sources]))


@pytest.mark.parametrize("module", _MODULES, ids=lambda module: module.name)
def test_the_code_names_each_action_of_a_module(module: Module, in_code: set[str]) -> None:
    assert module.actions
    assert [action for action in module.actions if f"{module.name}!{action}" not in in_code] == []


def test_each_name_in_the_code_is_an_action(in_code: set[str]) -> None:
    assert sorted(in_code - {f"{module.name}!{action}" for module in _MODULES for action in module.actions}) == []


def test_the_rule_reads_names_that_a_line_break_divides() -> None:
    assert named(["put it (model: Log!Put,\n    # Log!PutAgain), or"]) == ["Log!Put", "Log!PutAgain"]


def test_disjuncts_are_read_from_the_module() -> None:
    source = (
        "Next ==\n  \\/ \\E w \\in Writers : \\* of all\n       \\/ Put(w)\n       \\/ \\E k \\in Keys : Get(w, k)\n"
        "  \\/ Environment\n\nEnvironment ==\n  \\/ Tick\n"
    )
    module = Module("Toy", "", source, [], [])
    assert (module.actions, module.all_actions) == (["Put", "Get"], ["Put", "Get", "Tick"])
