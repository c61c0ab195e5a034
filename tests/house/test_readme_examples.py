"""Configurations in the documents name existing settings. tests/e2e/test_wheel.py tests the program of the README."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from memwal.ingest.errors import Invalid
from memwal.ingest.settings.load import load_every


def unknown(text: str, file: Path) -> list[str]:
    """Return the errors of a configuration about unknown settings, wrong values and invalid TOML.

    Errors about missing settings are ignored: an example may show a part of a configuration.
    """
    file.write_text(text)
    try:
        load_every(file, {})
    except Invalid as error:
        return [line for line in error.lines if re.search("unknown|not TOML|is not a column type|must be", line)]
    return []


def test_configurations_of_the_documents_name_settings_that_there_are(texts: Mapping[str, str], tmp_path: Path) -> None:
    blocks = [
        (name, block)
        for name, text in texts.items()
        if name.endswith(".md")
        for block in re.findall(r"^```toml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    ]
    assert len(blocks) >= 9
    found = [(name, line) for name, block in blocks for line in unknown(block, tmp_path / "block.toml")]
    assert found == []


def test_the_first_pipeline_of_the_readme_is_a_whole_one(texts: Mapping[str, str], tmp_path: Path) -> None:
    _, _, rest = texts["README.md"].partition("## A pipeline of your own")
    (tmp_path / "orders.toml").write_text(rest.partition("```toml\n")[2].partition("```")[0])
    assert list(load_every(tmp_path / "orders.toml", {})) == [str(tmp_path / "orders.toml")]


def test_the_rule_sees_settings_that_there_are_not(tmp_path: Path) -> None:
    assert unknown('[wal]\nlinger = "5ms"\n', tmp_path / "block.toml")
    assert unknown("[wall]\nlinger_max = 5\n", tmp_path / "block.toml")
    assert unknown("[wal\n", tmp_path / "block.toml")
