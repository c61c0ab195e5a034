"""Secrets by reference: `secret_access_key = "env:NAME"` or `"file:PATH"`, resolved only where they are used.

The configuration keeps the reference, so nothing that prints, logs or hands on settings can hand on the secret.
Literal values are allowed, because most storage options are no secrets (`region = "eu-west-1"`); one whose name says
that it is a secret is never shown.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from pydantic import SecretStr

from memwal.ingest.errors import Invalid

HIDDEN = "(hidden)"
_SECRET_NAME = re.compile(r"key|secret|token|password|credential|sas|jaas|proxy", re.IGNORECASE)
FROM_FILE = "file:"
_SCHEMES = ("env:", FROM_FILE)
UNRESOLVED = "unresolved"
"""Reason of an error about a reference that points to nothing where it was resolved."""


def check_reference(value: SecretStr) -> SecretStr:
    """Refuse a reference that names nothing. Raises: ValueError."""
    text = value.get_secret_value()
    if text in _SCHEMES:
        raise ValueError(f"names nothing behind {text!r}; write env:NAME or file:PATH")
    return value


def check_only_reference(value: SecretStr) -> SecretStr:
    """Refuse a secret that stands in the configuration itself. Raises: ValueError, which does not repeat it."""
    text = value.get_secret_value()
    if text and not text.startswith(_SCHEMES):
        raise ValueError("is not a reference; write env:NAME or file:PATH, and put the secret there")
    return check_reference(value)


def resolve_one(setting: str, value: SecretStr, environ: Mapping[str, str]) -> str:
    """What a setting's reference points to, "" where the setting is empty.

    Raises: Invalid, naming the setting, when it points to nothing or to nothing but space.
    """
    text = value.get_secret_value()
    try:
        found = _resolve(text, environ).strip()
    except ValueError as problem:
        raise Invalid(f"{setting}: {problem}", {"reason": UNRESOLVED}) from None
    if text and not found:
        raise Invalid(f"{setting}: {text} is empty; put the secret there, or take the setting out")
    return found


def resolve(
    options: Mapping[str, SecretStr], environ: Mapping[str, str], setting: str = "[table] storage_options"
) -> dict[str, str]:
    """The options with every reference replaced by what it points to. `setting`: where they are written.

    A file's trailing newline is dropped. Raises: Invalid with every reference that cannot be resolved, one line each.
    """
    resolved: dict[str, str] = {}
    problems: list[str] = []
    for name, value in options.items():
        try:
            resolved[name] = _resolve(value.get_secret_value(), environ)
        except ValueError as problem:
            problems.append(f"{setting}.{name}: {problem}")
    if problems:
        raise Invalid("\n".join(problems), {"reason": UNRESOLVED})
    return resolved


def shown(name: str, value: SecretStr) -> str:
    """What may be printed of an option: references and values whose name does not speak of a secret."""
    text = value.get_secret_value()
    return HIDDEN if _SECRET_NAME.search(name) and not text.startswith(_SCHEMES) else text


def _resolve(text: str, environ: Mapping[str, str]) -> str:
    if text.startswith("env:"):
        name = text.removeprefix("env:")
        if name not in environ:
            raise ValueError(f"the environment variable {name} is not set; set it or correct the reference")
        return environ[name]
    if text.startswith(FROM_FILE):
        path = text.removeprefix(FROM_FILE)
        try:
            return Path(path).read_text(encoding="utf-8").rstrip("\n")
        except OSError as error:
            raise ValueError(f"{path}: {error.strerror}; correct the path or its permissions") from None
        except UnicodeDecodeError:
            raise ValueError(f"{path} is not UTF-8 text; correct the path") from None
    return text
