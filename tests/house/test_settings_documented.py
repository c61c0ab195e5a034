"""One source of truth for the configuration: the models. default.toml and the README say what they say."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping

from ingest.settings import Settings
from ingest.settings_reference import between_markers, render_reference, render_settings, to_dict


def test_default_toml_holds_every_key_at_its_default(texts: Mapping[str, str]) -> None:
    text = texts["configs/default.toml"]
    assert tomllib.loads(text) == to_dict(Settings()), "run `make docs`"
    assert text == render_settings(Settings(), comments=True), "run `make docs`"


def test_every_setting_says_what_it_means() -> None:
    silent = [
        f"{section}.{key}"
        for section, part in Settings()
        for key, field in type(part).model_fields.items()
        if not field.description
    ]
    assert silent == []


def test_the_readme_holds_the_reference(texts: Mapping[str, str]) -> None:
    assert between_markers(texts["README.md"]) == render_reference().strip("\n") + "\n", "run `make docs`"
