"""Secrets by reference: `secret_access_key = "env:NAME"` or `"file:PATH"`, resolved only where they are used.

Settings hold the reference, so code that prints, logs or sends settings cannot leak the secret. Literal values are
permitted too, because most options are not secret (`region = "eu-west-1"`). A literal value is printed only if the
option is known to hold no secret (`ingest.option_names`), and never with the credentials and the query of a URL.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from pydantic import SecretStr

from memwal.ingest.errors import Invalid
from memwal.ingest.option_names import PRINTABLE

HIDDEN = "(hidden)"
_SECRET_NAME = re.compile(r"key|secret|token|password|credential|sas|jaas|proxy|javaoptions$", re.IGNORECASE)
_USER = re.compile(r"(?<=://)[^\s/?#]*@")
_QUERY = re.compile(r"(://[^\s?#]*)[?#]\S+")
FROM_FILE = "file:"
_SCHEMES = ("env:", FROM_FILE)
UNRESOLVED = "unresolved"
"""`details["reason"]` of an error about a reference that could not be resolved."""


def check_reference(value: SecretStr) -> SecretStr:
    """Return `value`. Raises: ValueError for a reference without a name or path."""
    text = value.get_secret_value()
    if text in _SCHEMES:
        raise ValueError(f"has no name after {text!r}; write env:NAME or file:PATH")
    return value


def check_only_reference(value: SecretStr) -> SecretStr:
    """Return `value`. Raises: ValueError for a literal secret, without repeating it; errors of `check_reference`."""
    text = value.get_secret_value()
    if text and not text.startswith(_SCHEMES):
        raise ValueError("is not a reference; put the secret into a variable or file, and write env:NAME or file:PATH")
    return check_reference(value)


def resolve_one(setting: str, value: SecretStr, environ: Mapping[str, str]) -> str:
    """Return the secret of a setting's reference; "" if the setting is empty.

    Raises: Invalid, naming the setting, if the reference cannot be resolved or the secret is empty or only
    whitespace.
    """
    text = value.get_secret_value()
    try:
        secret = _resolve(text, environ).strip()
    except ValueError as problem:
        raise Invalid(f"{setting}: {problem}", {"reason": UNRESOLVED}) from None
    if text and not secret:
        raise Invalid(f"{setting}: {text} is empty; put the secret there, or remove the setting")
    return secret


def resolve(
    options: Mapping[str, SecretStr],
    environ: Mapping[str, str],
    setting: str = "[table] storage_options",
    is_reference: Callable[[str, str], bool] = lambda _name, _text: True,
) -> dict[str, str]:
    """Return the options with every reference replaced by its secret.

    `setting`: name of the setting, for errors. `is_reference`: whether the value of an option, given by name and
    text, may be a reference. A file's trailing newline is removed.
    Raises: Invalid with one line for each reference that cannot be resolved.
    """
    resolved: dict[str, str] = {}
    problems: list[str] = []
    for name, value in options.items():
        try:
            text = value.get_secret_value()
            resolved[name] = _resolve(text, environ) if is_reference(name, text) else text
        except ValueError as problem:
            problems.append(f"{setting}.{name}: {problem}")
    if problems:
        raise Invalid("\n".join(problems), {"reason": UNRESOLVED})
    return resolved


def resolve_spark(conf: Mapping[str, SecretStr], environ: Mapping[str, str]) -> dict[str, str]:
    """Return Spark's configuration with every reference replaced by its secret.

    `env:NAME` is a reference in every value. `file:PATH` is a reference only if the setting's name resembles that of
    a secret, or ends with JavaOptions; elsewhere it is a URL that Spark reads. Raises: errors of `resolve`.
    """

    def is_reference(name: str, text: str) -> bool:
        return not text.startswith(FROM_FILE) or _SECRET_NAME.search(name) is not None

    return resolve(conf, environ, "[source] spark", is_reference=is_reference)


def shown(name: str, value: SecretStr) -> str:
    """Return an option's printable value: a reference, or a literal of an option that is known to hold no secret."""
    text = value.get_secret_value()
    if text.startswith(_SCHEMES):
        return text
    return redacted(text) if name.lower().removeprefix("aws_") in PRINTABLE else HIDDEN


def redacted(text: str) -> str:
    """Return printable `text`, without the credentials and the queries of URLs."""
    return _QUERY.sub(rf"\1?{HIDDEN}", _USER.sub(f"{HIDDEN}@", text))


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
