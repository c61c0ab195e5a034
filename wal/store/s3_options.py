"""Lance's storage options for S3, read once and written out in full for both clients: memwal's and Lance's.

The names are those of the object_store crate that Lance uses, in any case, with or without `aws_` before them. As in
Lance, `AWS_…` environment variables replace options that are not given. The result goes to pylance with every name in
one spelling, so that neither client reads a setting that the other does not: an endpoint always has a region, and keys
given without a session token are never combined with the environment's token. Without keys both use the standard chain:
environment, profile, container, instance. Sources: `AmazonS3ConfigKey`, `ClientConfigKey` and `AmazonS3Builder` of
object_store; `providers/aws.rs` of lance-io.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any
from urllib.parse import urlsplit

from botocore.utils import is_valid_endpoint_url, is_valid_ipv6_endpoint_url

from memwal.wal.errors import StoreRefused

_ALIASES = {
    "token": "session_token",
    "endpoint_url": "endpoint",
    "endpoint_url_s3": "endpoint",
    "default_region": "region",
    "bucket_name": "bucket",
    "request_timeout": "timeout",
}
_OURS = {
    "access_key_id",
    "secret_access_key",
    "session_token",
    "skip_signature",
    "endpoint",
    "region",
    "virtual_hosted_style_request",
    "request_payer",
    "conditional_put",
    "server_side_encryption",
    "sse_kms_key_id",
    "sse_bucket_key_enabled",
}
_CLIENT = {
    "allow_http",
    "allow_invalid_certificates",
    "connect_timeout",
    "timeout",
    "pool_max_idle_per_host",
    "proxy_url",
}
_LANCE_ONLY = {
    "bucket",
    "checksum_algorithm",
    "client_max_retries",
    "client_retry_timeout",
    "copy_if_not_exists",
    "default_content_type",
    "disable_bulk_delete",
    "disable_tagging",
    "download_retry_count",
    "http1_only",
    "pool_idle_timeout",
    "randomize_addresses",
    "read_timeout",
    "unsigned_payload",
    "user_agent",
}
"""Options for Lance's requests only; memwal's client does not use them."""
_KNOWN = _OURS | _CLIENT | _LANCE_ONLY
_CREDENTIALS = ("access_key_id", "secret_access_key", "session_token")
_PREFIXED = _OURS | {"bucket", "checksum_algorithm", "copy_if_not_exists", "disable_tagging", "disable_bulk_delete"}
"""Options whose names for Lance begin with `aws_`."""
_TRUE, _FALSE = {"1", "true", "on", "yes", "y"}, {"0", "false", "off", "no", "n", ""}
_SWITCHES = ("allow_http", "allow_invalid_certificates", "skip_signature", "virtual_hosted_style_request")
_SECONDS = {"ms": 0.001, "s": 1, "sec": 1, "second": 1, "seconds": 1, "m": 60, "min": 60, "minute": 60, "minutes": 60}
_DURATION = re.compile(r"(\d+)\s*([a-z]+)")
_ENCRYPTION = ("AES256", "aws:kms", "aws:kms:dsse")

Items = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class S3Options:
    """The options of both clients. Hashable: stores with equal options share their connections.

    Thread safety. Immutable. `repr` shows no secret.
    """

    endpoint: str | None
    """None for AWS itself. Does not include the bucket, which Lance expects before the host in virtual-hosted style."""
    region: str | None
    virtual_hosted: bool
    connect_timeout: float
    """Seconds."""
    timeout: float
    """Seconds without a byte after which a read fails."""
    pool: int
    """Maximum number of connections of one client."""
    verify: bool
    """Whether TLS certificates are checked."""
    skip_signature: bool
    access_key_id: str | None = field(repr=False)
    secret_access_key: str | None = field(repr=False)
    session_token: str | None = field(repr=False)
    proxy: str | None = field(repr=False)
    put_extra: Items = field(repr=False)
    """Additional parameters of every PutObject: encryption, payer."""
    extra: Items
    """Additional parameters of every other request: payer."""
    lance: Items = field(repr=False)
    """The options for pylance."""


def read_options(given: Mapping[str, str], bucket: str, environ: Mapping[str, str]) -> S3Options:
    """Return the options from `given`, else from `environ`, for a table in `bucket`.

    Raises StoreRefused with every mistake, in one line, without any value that may be a secret.
    """
    problems: list[str] = []
    options = _named(given, problems)
    _add_environment(options, environ)
    endpoint = options.get("endpoint") or None
    if endpoint is not None:
        options.setdefault("region", "us-east-1")
    _check(options, endpoint, problems)
    switches = {name: _switch(options, name, problems) for name in _SWITCHES}
    connect_timeout = _duration(options, "connect_timeout", 5.0, problems)
    timeout = _duration(options, "timeout", 30.0, problems)
    pool = _number(options, "pool_max_idle_per_host", 64, problems)
    if endpoint is not None and switches["virtual_hosted_style_request"]:
        endpoint = _without_bucket(endpoint, bucket, problems)
    extra: Items = (("RequestPayer", "requester"),) if _is_on(options, "request_payer") else ()
    if problems:
        raise StoreRefused(f"storage options: {'; '.join(problems)}")
    return S3Options(
        endpoint=endpoint,
        region=options.get("region") or None,
        virtual_hosted=switches["virtual_hosted_style_request"],
        connect_timeout=connect_timeout,
        timeout=timeout,
        pool=pool,
        verify=not switches["allow_invalid_certificates"],
        skip_signature=switches["skip_signature"],
        access_key_id=options.get("access_key_id") or None,
        secret_access_key=options.get("secret_access_key") or None,
        session_token=options.get("session_token") or None,
        proxy=options.get("proxy_url") or None,
        put_extra=extra + _encryption(options),
        extra=extra,
        lance=tuple(sorted(_for_lance(options).items())),
    )


def _canonical(name: str) -> str:
    short = name.lower().removeprefix("aws_")
    return _ALIASES.get(short, short)


def _named(given: Mapping[str, str], problems: list[str]) -> dict[str, str]:
    """Return the options under one name each."""
    options: dict[str, str] = {}
    for name, value in given.items():
        known = _canonical(name)
        if known not in _KNOWN:
            close = get_close_matches(known, _KNOWN, n=1)
            hint = f"did you mean {close[0]}?" if close else "see Lance's documentation of object stores"
            problems.append(f"{name} is no option of S3 here; {hint}")
        elif value and options.setdefault(known, value) != value:
            problems.append(f"{name} is given twice with two values; keep one")
    empty = {_canonical(name): "" for name in given if _canonical(name) in _KNOWN}
    return empty | options


def _add_environment(options: dict[str, str], environ: Mapping[str, str]) -> None:
    """Add `AWS_…` variables for options that are not given. Credentials are left to the standard chain."""
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AWS_REGION", "AWS_DEFAULT_REGION"):
        if environ.get(name):
            options.setdefault(_canonical(name), environ[name])
    for name in sorted(_KNOWN - set(_CREDENTIALS)):
        if value := environ.get(f"AWS_{name.upper()}"):
            options.setdefault(name, value)


def _check(options: Mapping[str, str], endpoint: str | None, problems: list[str]) -> None:
    for one, other in (("access_key_id", "secret_access_key"), ("secret_access_key", "access_key_id")):
        if options.get(one) and not options.get(other):
            problems.append(f"{one} is given without {other}; give both, or neither to use the standard chain")
    if endpoint is not None:
        problems.extend(_of_endpoint(endpoint, options))
    if options.get("conditional_put", "etag") != "etag":
        problems.append("conditional_put must be etag: nothing is safe without conditional writes")
    if options.get("server_side_encryption", "AES256") not in _ENCRYPTION:
        problems.append(f"server_side_encryption must be one of {', '.join(_ENCRYPTION)}")


def _of_endpoint(endpoint: str, options: Mapping[str, str]) -> Iterator[str]:
    url = urlsplit(endpoint)
    if "@" in endpoint:  # even without a scheme, when no user name is parsed: never print it
        yield "endpoint must not hold credentials; give access_key_id and secret_access_key"
    elif url.scheme not in ("http", "https") or not (  # the client library accepts no underscore in a host
        is_valid_endpoint_url(endpoint) or is_valid_ipv6_endpoint_url(endpoint)
    ):
        yield f"endpoint {endpoint!r} is no URL of a valid host name; write https://host or http://host:port"
    elif url.scheme == "http" and not _is_on(options, "allow_http"):
        yield f'endpoint {endpoint} is plain HTTP; use https, or allow it with allow_http = "true"'


def _switch(options: Mapping[str, str], name: str, problems: list[str]) -> bool:
    value = options.get(name, "").lower()
    if value not in _TRUE | _FALSE:
        problems.append(f"{name} = {value!r} must be true or false")
    return value in _TRUE


def _duration(options: Mapping[str, str], name: str, default: float, problems: list[str]) -> float:
    """Return a duration in seconds. A unit is required, as in Lance: `30s`, `1m 30s`, `500ms`."""
    text = options.get(name, "").strip().lower()
    if not text:
        return default
    parts = _DURATION.findall(text)
    seconds = sum(int(number) * _SECONDS.get(unit, 0) for number, unit in parts)
    if _DURATION.sub("", text).strip() or seconds <= 0 or any(unit not in _SECONDS for _, unit in parts):
        problems.append(f"{name} = {text!r} is no duration; write 30s, 500ms or 2min")
    return float(seconds)


def _number(options: Mapping[str, str], name: str, default: int, problems: list[str]) -> int:
    text = options.get(name, "") or str(default)
    if not text.isdecimal() or int(text) < 1:
        problems.append(f"{name} = {text!r} must be a whole number above 0")
        return default
    return int(text)


def _without_bucket(endpoint: str, bucket: str, problems: list[str]) -> str:
    scheme, _, host = endpoint.partition("://")
    if not host.startswith(f"{bucket}."):
        problems.append(
            f"endpoint {endpoint} with virtual_hosted_style_request must begin with the bucket: {scheme}://{bucket}.{host}"
        )
    return f"{scheme}://{host.removeprefix(f'{bucket}.')}"


def _is_on(options: Mapping[str, str], name: str) -> bool:
    return options.get(name, "").lower() in _TRUE


def _encryption(options: Mapping[str, str]) -> Items:
    asked = {
        "ServerSideEncryption": options.get("server_side_encryption"),
        "SSEKMSKeyId": options.get("sse_kms_key_id"),
        "BucketKeyEnabled": _is_on(options, "sse_bucket_key_enabled"),
    }
    return tuple((name, value) for name, value in asked.items() if value)


def _for_lance(options: Mapping[str, str]) -> dict[str, str]:
    """Return the options with Lance's names, so complete that no environment variable changes them."""
    spelled = {f"aws_{name}" if name in _PREFIXED else name: value for name, value in options.items() if value}
    if options.get("access_key_id"):
        spelled.setdefault("aws_session_token", "")
    if options.get("endpoint"):
        spelled["aws_endpoint_url_s3"] = options["endpoint"]
    return spelled
