"""Decode Avro values, with a schema of the configuration or with schemas from a Confluent-compatible registry.

    registry:   0x00 | schema id, 4 bytes big-endian | Avro binary
    inline:     Avro binary only

A worker fetches each schema once; the schema of an id never changes.
"""

from __future__ import annotations

import base64
import json
import os
import struct
from collections.abc import Callable, Mapping
from functools import lru_cache
from io import BytesIO
from typing import Any

from pydantic import SecretStr

from memwal.ingest.errors import Invalid, Unavailable
from memwal.ingest.secret_refs import redacted, resolve
from memwal.wal.errors import first_line

MAGIC = 0
_HEADER = struct.Struct(">bI")
_ACCEPT = "application/vnd.schemaregistry.v1+json"
_TIMEOUT = 30.0
Options = tuple[tuple[str, str], ...]
"""Settings of `registry_options`; secrets stay references."""
HEAD = _HEADER.size
"""Length in bytes of the header that names the schema of a value."""


def options_of(given: Mapping[str, SecretStr]) -> Options:
    """Return `registry_options` as a value that can be hashed and pickled."""
    return tuple((name, value.get_secret_value()) for name, value in given.items())


def decoder(schema: str, registry: str, options: Options) -> Callable[[bytes], Any]:
    """Return a decoder of values.

    It raises ValueError with a reason, and Unavailable if the registry does not answer.
    """
    import fastavro

    inline = None if registry else inline_schema(schema)

    def decode(value: bytes) -> Any:
        parsed: Any = writer_schema(value, registry, options) if registry else inline
        stream = BytesIO(value)
        stream.seek(HEAD if registry else 0)
        try:
            decoded = fastavro.schemaless_reader(stream, parsed, None)
        except Exception as error:  # noqa: BLE001 - whatever the library raises, the value is the cause
            raise ValueError(f"not Avro of that schema ({type(error).__name__}: {str(error)[:80]})") from None
        if stream.tell() != len(value):
            raise ValueError(f"not Avro of that schema: {len(value) - stream.tell()} bytes too many")
        return decoded

    return decode


def check_schema(text: str) -> None:
    """Check an inline schema. Raises: ValueError if it is not an Avro schema."""
    try:
        inline_schema(text)
    except Exception as error:  # noqa: BLE001 - each mistake raises another type
        raise ValueError(f"is not an Avro schema: {first_line(error)}") from None


@lru_cache(maxsize=8)
def inline_schema(text: str) -> Any:
    """Parse a schema of the configuration."""
    import fastavro

    return fastavro.parse_schema(json.loads(text))


def writer_schema(value: bytes, registry: str, options: Options) -> Any:
    """Return the schema that the first `HEAD` bytes of a value name. Raises: as a decoder."""
    if len(value) < HEAD or value[0] != MAGIC:
        raise ValueError("the Avro value does not begin with a schema id; for plain Avro set avro_schema, not registry")
    _, number = _HEADER.unpack_from(value)
    return _registered(registry, options, number)


def newest_schema(topic: str, registry: str, options: Options) -> Any:
    """Return the newest schema of the values of a topic, None if the registry has none.

    Producers register it for the subject TOPIC-value by default (Confluent's TopicNameStrategy). Raises: as a decoder.
    """
    from urllib.parse import quote

    subject = f"{topic}-value"
    registered = _fetch(registry, options, f"/subjects/{quote(subject, safe='')}/versions/latest")
    return None if registered is None else _parsed(registry, options, registered, f"the schema of {subject}")


@lru_cache(maxsize=1024)
def _registered(registry: str, options: Options, number: int) -> Any:
    registered = _fetch(registry, options, f"/schemas/ids/{number}")
    if registered is None:
        raise ValueError(f"schema id {number} is not in the registry")
    return _parsed(registry, options, registered, f"schema id {number}")


def _parsed(registry: str, options: Options, registered: dict[str, Any], what: str) -> Any:
    import fastavro

    if registered.get("schemaType", "AVRO") != "AVRO":
        raise ValueError(f"{what} is {registered['schemaType']}, not Avro")
    named: dict[str, Any] = {}
    _parse_references(registry, options, registered, named)
    return fastavro.parse_schema(json.loads(registered["schema"]), named_schemas=named)


def _parse_references(registry: str, options: Options, registered: dict[str, Any], named: dict[str, Any]) -> None:
    """Parse the types that a schema refers to into `named`; dependencies first."""
    from urllib.parse import quote

    import fastavro

    for reference in registered.get("references") or ():
        if reference["name"] in named:
            continue
        subject = quote(reference["subject"], safe="")
        schema = _fetch(registry, options, f"/subjects/{subject}/versions/{reference['version']}")
        if schema is None:
            raise ValueError(f"{reference['subject']!r} version {reference['version']} is not in the registry")
        _parse_references(registry, options, schema, named)
        fastavro.parse_schema(json.loads(schema["schema"]), named_schemas=named)


def _fetch(registry: str, options: Options, path: str) -> dict[str, Any] | None:
    """Return the registry's answer; None for 404.

    Raises: Invalid if the registry rejects the credentials, Unavailable without an answer.
    """
    from urllib.error import HTTPError
    from urllib.request import Request, urlopen

    shown = redacted(registry)
    # The URL is http or https: settings reject other schemes.
    request = Request(registry.rstrip("/") + path, headers=_headers(options))  # noqa: S310
    try:
        with urlopen(request, timeout=_TIMEOUT) as answer:  # noqa: S310
            fetched = json.load(answer)
    except HTTPError as error:
        if error.code == 404:
            return None
        if error.code in (401, 403):
            raise Invalid(f"source.registry: {shown} answers {error.code}; correct registry_options") from None
        raise Unavailable(f"source.registry: {shown} answers {error.code}; run the same command again") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise Unavailable(f"source.registry: {shown} does not answer ({reason}); start it or correct the URL") from None
    return fetched if isinstance(fetched, dict) else None


def _headers(options: Options) -> dict[str, str]:
    clear = resolve({name: SecretStr(value) for name, value in options}, os.environ, "[source] registry_options")
    headers = {"Accept": _ACCEPT}
    if "token" in clear:
        headers["Authorization"] = f"Bearer {clear['token']}"
    elif "username" in clear:
        pair = f"{clear['username']}:{clear.get('password', '')}".encode()
        headers["Authorization"] = f"Basic {base64.b64encode(pair).decode()}"
    return headers
