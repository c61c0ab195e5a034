"""Avro values: a schema of the configuration, or schemas by id from a Confluent-style registry.

    registry:   0x00 | schema id, 4 bytes big-endian | Avro binary
    inline:     Avro binary, all of it

A schema is fetched once per worker; ids never change their meaning.
"""

from __future__ import annotations

import base64
import json
import os
import struct
from collections.abc import Callable
from functools import lru_cache
from io import BytesIO
from typing import Any

from pydantic import SecretStr

from memwal.ingest.errors import Invalid, Unavailable
from memwal.ingest.secret_refs import resolve
from memwal.wal.errors import first_line

MAGIC = 0
_HEADER = struct.Struct(">bI")
_ACCEPT = "application/vnd.schemaregistry.v1+json"
_TIMEOUT = 30.0
Options = tuple[tuple[str, str], ...]
HEAD = _HEADER.size
"""Bytes in front of a value that name its schema."""


def decoder(schema: str, registry: str, options: Options) -> Callable[[bytes], Any]:
    """What reads a value. It raises ValueError with a reason, Unavailable where the registry does not answer."""
    if registry:
        return lambda value: _of_registry(value, registry, options)
    parsed = inline_schema(schema)
    return lambda value: _decoded(BytesIO(value), len(value), parsed)


def check_schema(text: str) -> None:
    """Refuse an inline schema that is none. Raises: ValueError."""
    try:
        inline_schema(text)
    except Exception as error:  # noqa: BLE001 - as many kinds as there are mistakes
        raise ValueError(f"is no Avro schema: {first_line(error)}") from None


@lru_cache(maxsize=8)
def inline_schema(text: str) -> Any:
    """A schema of the configuration, parsed."""
    import fastavro

    return fastavro.parse_schema(json.loads(text))


def _of_registry(value: bytes, registry: str, options: Options) -> Any:
    schema = writer_schema(value, registry, options)
    stream = BytesIO(value)
    stream.seek(HEAD)
    return _decoded(stream, len(value), schema)


def writer_schema(value: bytes, registry: str, options: Options) -> Any:
    """The schema that the first `HEAD` bytes of a value name. Raises: as a `decoder`."""
    if len(value) < HEAD or value[0] != MAGIC:
        raise ValueError("no schema id in front of the Avro value; for plain Avro write avro_schema, not registry")
    _, number = _HEADER.unpack_from(value)
    return _registered(registry, options, number)


def _decoded(stream: BytesIO, size: int, schema: Any) -> Any:
    import fastavro

    try:
        found = fastavro.schemaless_reader(stream, schema, None)
    except Exception as error:  # noqa: BLE001 - whatever a damaged value makes the library raise, the value is at fault
        raise ValueError(f"no Avro of that schema ({type(error).__name__}: {str(error)[:80]})") from None
    if stream.tell() != size:
        raise ValueError(f"no Avro of that schema: {size - stream.tell()} bytes too many")
    return found


@lru_cache(maxsize=1024)
def _registered(registry: str, options: Options, number: int) -> Any:
    found = _asked(registry, options, f"/schemas/ids/{number}")
    if found is None:
        raise ValueError(f"schema id {number} is not in the registry")
    import fastavro

    if found.get("schemaType", "AVRO") != "AVRO":
        raise ValueError(f"schema id {number} is {found['schemaType']}, not Avro")
    named: dict[str, Any] = {}
    _parse_references(registry, options, found, named)
    return fastavro.parse_schema(json.loads(found["schema"]), named_schemas=named)


def _parse_references(registry: str, options: Options, found: dict[str, Any], named: dict[str, Any]) -> None:
    """Bring the types that a schema refers to into `named`, those they refer to first."""
    from urllib.parse import quote

    import fastavro

    for each in found.get("references") or ():
        if each["name"] in named:
            continue
        subject = quote(each["subject"], safe="")
        below = _asked(registry, options, f"/subjects/{subject}/versions/{each['version']}")
        if below is None:
            raise ValueError(f"{each['subject']!r} version {each['version']} is not in the registry")
        _parse_references(registry, options, below, named)
        fastavro.parse_schema(json.loads(below["schema"]), named_schemas=named)


def _asked(registry: str, options: Options, path: str) -> dict[str, Any] | None:
    """The registry's answer; None for 404. Raises: Invalid when it refuses us, Unavailable when it does not answer."""
    from urllib.error import HTTPError
    from urllib.request import Request, urlopen

    # Only http and https: settings refuse other URLs.
    request = Request(registry.rstrip("/") + path, headers=_headers(options))  # noqa: S310
    try:
        with urlopen(request, timeout=_TIMEOUT) as answer:  # noqa: S310
            found = json.load(answer)
    except HTTPError as error:
        if error.code == 404:
            return None
        if error.code in (401, 403):
            raise Invalid(f"source.registry: {registry} answers {error.code}; correct registry_options") from None
        raise Unavailable(f"source.registry: {registry} answers {error.code}; run the same command again") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise Unavailable(f"source.registry: {registry} does not answer ({reason}); start it or correct it") from None
    return found if isinstance(found, dict) else None


def _headers(options: Options) -> dict[str, str]:
    clear = resolve({name: SecretStr(value) for name, value in options}, os.environ, "[source] registry_options")
    headers = {"Accept": _ACCEPT}
    if "token" in clear:
        headers["Authorization"] = f"Bearer {clear['token']}"
    elif "username" in clear:
        pair = f"{clear['username']}:{clear.get('password', '')}".encode()
        headers["Authorization"] = f"Basic {base64.b64encode(pair).decode()}"
    return headers
