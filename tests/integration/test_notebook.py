"""The notebook of `configs/notebooks` runs from its first cell to its last, and prints the outputs stored in it."""

from __future__ import annotations

import io
import json
from contextlib import chdir, redirect_stdout
from typing import Any

from tests.conftest import ROOT

NOTEBOOK = ROOT / "configs" / "notebooks" / "first_search.ipynb"


def test_every_cell_prints_what_the_notebook_shows() -> None:
    cells = [cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    variables: dict[str, Any] = {}
    for number, cell in enumerate(cells):
        printed = io.StringIO()
        with chdir(NOTEBOOK.parent), redirect_stdout(printed):
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), variables)
        assert printed.getvalue() == "".join(cell["outputs"][0]["text"]), f"cell {number}"
    assert len(cells) >= 6
