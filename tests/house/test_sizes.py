"""Functions have at most 60 lines; modules and public classes have docstrings."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

FUNCTION_LINES = 60


def lines_of(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def test_functions_fit_on_a_screen(sources: Sequence[Any]) -> None:
    long = [
        f"{source.path} {node.name}: {lines_of(node)}"
        for source in sources
        for node in ast.walk(source.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and lines_of(node) > FUNCTION_LINES
    ]
    assert long == []


def test_modules_and_public_classes_say_what_they_are(sources: Sequence[Any]) -> None:
    silent = [
        f"{source.path} {getattr(node, 'name', '')}"
        for source in sources
        for node in [source.tree, *(each for each in source.tree.body if isinstance(each, ast.ClassDef))]
        if not ast.get_docstring(node) and not getattr(node, "name", "").startswith("_") and source.text.strip()
    ]
    assert silent == []
