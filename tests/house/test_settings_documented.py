"""The models are the only source of the configuration: default.toml and the documents must agree with them."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping

from memwal.ingest.cli.docs import METRICS, METRICS_PAGE, PYTHON, render_metrics, render_python
from memwal.ingest.service.ops.metrics import COMMITTED, COUNTED, HELD, TABLE
from memwal.ingest.settings.load import Settings
from memwal.ingest.settings.reference import render_settings, to_dict
from memwal.ingest.spark.pipeline.metrics import RAN

_CALLS = {("table", "delete")}


def test_default_toml_holds_every_key_at_its_default(texts: Mapping[str, str]) -> None:
    text = texts["configs/default.toml"]
    assert tomllib.loads(text) == to_dict(Settings()), "run `make docs`"
    assert text == render_settings(Settings(), comments=True), "run `make docs`"


def test_every_setting_says_what_it_means() -> None:
    silent = [
        f"{section}.{key}"
        for section, part in Settings().sections().items()
        for key, field in type(part).model_fields.items()
        if not field.description
    ]
    assert silent == []


def test_the_readme_holds_the_table_of_metrics(texts: Mapping[str, str]) -> None:
    begins, ends = METRICS
    found = texts[METRICS_PAGE.as_posix()].partition(begins)[2].partition(ends)[0]
    assert found.strip("\n") == render_metrics().strip("\n"), "run `make docs`"


def test_the_python_reference_is_what_the_docstrings_say(texts: Mapping[str, str]) -> None:
    assert texts[PYTHON.as_posix()] == render_python(), "run `make docs`"


def test_the_readme_names_settings_and_metrics_that_there_are(texts: Mapping[str, str]) -> None:
    rooms = ("ingest", "wal", "flush", "memtable", "bench", "tests/model")
    inside = [f"{room}/README.md" for room in rooms]  # these documents name modules in the same form
    pages = [text for name, text in texts.items() if name.endswith("README.md") and name not in inside]
    text, sections = "\n".join(pages), Settings().sections()
    named = set(re.findall(r"`(\w+)\.([a-z_]+)\b(?!\()", text)) - _CALLS
    named -= {(section, "toml") for section in sections}  # files of configurations
    assert [pair for pair in named if pair[0] in sections and not hasattr(sections[pair[0]], pair[1])] == []
    declared = set(re.findall(r"^\| `(memwal_\w+)`", text, re.MULTILINE))
    said = {name.removesuffix("_bucket") for name in re.findall(r"(?<!_)memwal_[a-z_]+", text)}
    assert len(declared) > 30
    assert said <= declared


def test_metrics_are_named_as_prometheus_wants_them() -> None:
    declared = (*COUNTED, *HELD, *COMMITTED, *TABLE, *RAN)
    names = [each.name for each in declared]
    assert len(set(names)) == len(names)
    assert all(name.startswith("memwal_") and not name.endswith(("_total", "_ms", "_mb", "_count")) for name in names)
