"""Objects in an S3 bucket, below a prefix.

put-if-absent is one PUT with `If-None-Match: *`: S3 creates the object whole, or answers 412. `wal.store.s3_answers`
classifies every other answer. Each set of options has two clients on the process's event loop. The client for
conditional PUTs sends each request exactly once, since a hidden second attempt would hide that the first one landed.
The other client retries reads, lists, deletes and hints by itself.

Integrity. A PUT carries the CRC-32 of its bytes, which the server checks before it creates the object and stores with
it. A GET fetches it and compares.
"""

from __future__ import annotations

import asyncio
import base64
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from typing import Any, NoReturn, TypeVar
from urllib.parse import parse_qs, unquote, urlsplit

import aiohttp
from aiobotocore.config import AioConfig
from aiobotocore.httpsession import AIOHTTPSession
from aiobotocore.session import AioSession, get_session
from botocore import UNSIGNED
from botocore.exceptions import BotoCoreError, ClientError

from memwal.wal.errors import StoreRefused, StoreUnavailable
from memwal.wal.store.event_loop import event_loop
from memwal.wal.store.port import ObjectInfo, PutOutcome
from memwal.wal.store.requests import REQUESTS, Operation
from memwal.wal.store.s3_answers import Answer, Meaning, meaning_of
from memwal.wal.store.s3_options import S3Options

T = TypeVar("T")

_READ_ATTEMPTS = 3
_FAULTS = (ClientError, BotoCoreError, aiohttp.ClientError, TimeoutError, OSError)
_SLOWEST = 1 << 20
"""Bytes per second of the slowest supported connection. With a fixed timeout, an entry of 16 MiB on a slow connection
would be cut off and sent again from its beginning, forever.
"""
_PAGE = 1000  # S3's maximum
_FIRST_BYTE = "bytes=0-0"
_NOT_SATISFIABLE = 416
_OPERATIONS: dict[str, Operation] = {"PUT": "put", "DELETE": "delete", "HEAD": "head"}
_PUT_OUTCOMES = {Meaning.EXISTS: PutOutcome.ALREADY_EXISTS, Meaning.UNKNOWN: PutOutcome.OUTCOME_UNKNOWN}


class S3Store:
    """Keys are objects of `bucket` whose names begin with `prefix`.

    Thread safety. Any thread, any number of processes; safe after fork.
    Durability. S3 answers when the object is durable.
    Invariants. (1) One call of `put_if_absent` is one request. (2) It ends within about `put_timeout` plus one second
    for each MiB of the object; every other request ends within `put_timeout`, except for the body of a large object.
    Errors. Every message names bucket, key and endpoint, and the storage option to correct; never a secret.
    """

    remote = True

    def __init__(self, bucket: str, prefix: str, url: str, options: S3Options, put_timeout: float) -> None:
        """`prefix`: without slashes at its ends; `url`: the URL that pylance opens for it. Sends no request."""
        self.storage_options = dict(options.lance)
        self._bucket, self._prefix, self._url = bucket, f"{prefix}/", url
        self._options, self._put_timeout = options, put_timeout
        self._more, self._more_of_puts = dict(options.extra), dict(options.put_extra)

    def __repr__(self) -> str:
        return f"S3Store({self._url!r})"

    def put_if_absent(self, key: str, data: bytes) -> PutOutcome:
        """Create `key` by one PUT. Raises StoreUnavailable if nothing landed, StoreRefused."""
        parameters = self._put_parameters(key, data)
        try:
            self._run(lambda clients: clients.creating.put_object(IfNoneMatch="*", **parameters), self._time_for(data))
        except _FAULTS as error:
            answer = meaning_of(error)
            outcome = _PUT_OUTCOMES.get(answer.meaning)
            if outcome is None:
                self._fail(key, answer, error)
            return outcome
        return PutOutcome.CREATED

    def put(self, key: str, data: bytes) -> None:
        """Create or overwrite `key`; the client retries. Raises StoreUnavailable, StoreRefused."""
        parameters = self._put_parameters(key, data)
        self._ask(key, lambda clients: clients.reading.put_object(**parameters), self._time_for(data))

    def get(self, key: str) -> bytes | None:
        """Return the object's bytes, checked against the stored checksum; None if it does not exist.

        Raises: StoreUnavailable, StoreRefused.
        """
        return self._ask(key, partial(self._get, key), None)

    def exists(self, key: str) -> bool:
        """Return whether `key` holds an object. Raises StoreUnavailable, StoreRefused."""
        return bool(self._ask(key, partial(self._exists, key), self._put_timeout))

    def children(self, prefix: str) -> list[str]:
        """Return the names of the first segment after `prefix` with keys below them. Raises StoreUnavailable,
        StoreRefused.
        """
        pages = self._pages(prefix, Delimiter="/")
        found = [each["Prefix"] for page in pages for each in page.get("CommonPrefixes", ())]
        return sorted(name.removesuffix("/").rpartition("/")[2] for name in found)

    def describe(self, prefix: str) -> list[ObjectInfo]:
        """Return every object whose key begins with `prefix`. Raises StoreUnavailable, StoreRefused."""
        cut = len(self._prefix)
        found = [each for page in self._pages(prefix) for each in page.get("Contents", ())]
        return [ObjectInfo(each["Key"][cut:], each["Size"], each["LastModified"].timestamp()) for each in found]

    def leftovers(self, prefix: str) -> list[ObjectInfo]:  # noqa: ARG002 - a parameter of the port
        """Return an empty list: a PUT that is cut off leaves no file. Sends no request."""
        return []

    def list_some(self, prefix: str, most: int) -> list[str]:
        """Return any `most` keys that begin with `prefix` (first pages). Raises StoreUnavailable, StoreRefused."""
        pages = self._pages(prefix, MaxKeys=min(most, _PAGE))
        keys = (each["Key"][len(self._prefix) :] for page in pages for each in page.get("Contents", ()))
        return [*islice(keys, most)]

    def list(self, prefix: str) -> list[str]:
        """Return every key that begins with `prefix`. Raises StoreUnavailable, StoreRefused."""
        return [each.key for each in self.describe(prefix)]

    def delete(self, key: str) -> None:
        """Delete `key`. Raises StoreUnavailable, StoreRefused."""
        self._ask(key, lambda clients: clients.reading.delete_object(**self._at(key)), self._put_timeout)

    def remove_leftovers(self, prefix: str) -> None:
        """Do nothing: a bucket has no directories. Sends no request."""

    def url(self, key: str) -> str:
        """Return `s3://bucket/…`, as pylance opens it."""
        return f"{self._url}/{key}" if key else self._url

    # ---- requests, on the loop ---------------------------------------------------------------------------------

    async def _get(self, key: str, clients: Clients) -> bytes:
        """Return an object's bytes.

        The library retries until there is an answer; a body that breaks off is requested again here. The answer must
        begin within `put_timeout`, or a caller's retry budget would be spent several times; a body may take as long as
        bytes arrive.
        """
        attempt = 1
        while True:
            async with asyncio.timeout(self._put_timeout):
                answer = await clients.reading.get_object(**self._at(key))
            try:
                body: bytes = await answer["Body"].read()
            except _FAULTS:
                if attempt == _READ_ATTEMPTS:
                    raise
                attempt += 1
            else:
                return body

    async def _exists(self, key: str, clients: Clients) -> bool:
        """GET one byte: the answer to a HEAD does not distinguish a missing key from a missing bucket."""
        try:
            await (await clients.reading.get_object(**self._at(key), Range=_FIRST_BYTE))["Body"].read()
        except ClientError as error:
            if error.response["ResponseMetadata"]["HTTPStatusCode"] != _NOT_SATISFIABLE:  # it exists, and is empty
                raise
        return True

    def _pages(self, prefix: str, **more: str | int) -> Iterator[dict[str, Any]]:
        """Yield every page of a listing."""
        asked = {"Bucket": self._bucket, "Prefix": self._prefix + prefix, "MaxKeys": _PAGE, **self._more, **more}
        while True:
            page: dict[str, Any] = (
                self._ask(prefix, lambda clients: clients.reading.list_objects_v2(**asked), self._put_timeout) or {}
            )
            yield page
            if not page.get("IsTruncated"):
                return
            asked["ContinuationToken"] = page["NextContinuationToken"]

    def _time_for(self, body: bytes) -> float:
        """Return the seconds that a PUT of `body` may take."""
        return self._put_timeout + len(body) / _SLOWEST

    def _at(self, key: str) -> dict[str, Any]:
        return {"Bucket": self._bucket, "Key": self._prefix + key, **self._more}

    def _put_parameters(self, key: str, data: bytes) -> dict[str, Any]:
        checksum = base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()
        return {**self._at(key), "Body": data, "ChecksumCRC32": checksum, **self._more_of_puts}

    # ---- between the caller's thread and the loop --------------------------------------------------------------

    def _run(self, request: Callable[[Clients], Awaitable[T]], seconds: float | None) -> T:
        """Return the answer to a request. `seconds`: how long it may take; None if it has its own limit."""
        loop = event_loop()
        clients = loop.opened(self._options, partial(_open_clients, self._options))

        async def limited() -> T:
            async with asyncio.timeout(seconds):
                return await request(clients)

        return loop.run(limited())

    def _ask(self, key: str, request: Callable[[Clients], Awaitable[T]], seconds: float | None) -> T | None:
        """Return the answer to a request that may be repeated; None for a missing key. `seconds`: as for `_run`."""
        try:
            return self._run(request, seconds)
        except _FAULTS as error:
            answer = meaning_of(error)
            if answer.meaning is Meaning.MISSING:
                return None
            self._fail(key, answer, error)

    def _fail(self, key: str, answer: Answer, error: Exception) -> NoReturn:
        kind = StoreRefused if answer.meaning is Meaning.REFUSED else StoreUnavailable
        raise kind(f"{self.url(key)} at {self._options.endpoint or 'AWS'}: {answer.said}") from error


# ---- clients -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Clients:
    """The two clients of one set of options."""

    creating: Any
    """Sends each request once."""
    reading: Any
    """Retries by itself."""


class _OnceSession(AIOHTTPSession):  # type: ignore[misc]
    """Sends each request once: by default aiohttp repeats a PUT if the server closed a kept connection."""

    async def _get_session(self, proxy_url: str | None) -> Any:
        session = await super()._get_session(proxy_url)
        session._retry_connection = False  # noqa: SLF001 - aiohttp has no public name for it
        return session


@asynccontextmanager
async def _open_clients(options: S3Options) -> AsyncIterator[Clients]:
    once = _config(options, attempts=1, http_session_cls=_OnceSession)
    several = _config(options, attempts=_READ_ATTEMPTS)
    async with _client(options, once) as creating, _client(options, several) as reading:
        for client in (creating, reading):
            client.meta.events.register("before-send.s3", _count)
        yield Clients(creating, reading)


def _count(request: Any, **_: Any) -> None:
    """Count a request that is being sent; each attempt of the client counts. `request`: botocore's prepared one."""
    url = urlsplit(request.url)
    query = parse_qs(url.query, keep_blank_values=True) if request.method == "GET" else {}
    if "list-type" in query:
        REQUESTS.add("list", query.get("prefix", [""])[0], remote=True)
    else:
        REQUESTS.add(_OPERATIONS.get(request.method, "get"), unquote(url.path), remote=True)


def _config(options: S3Options, *, attempts: int, **more: Any) -> AioConfig:
    style = "virtual" if options.virtual_hosted else "path" if options.endpoint else "auto"
    unsigned = {"signature_version": UNSIGNED} if options.skip_signature else {}
    proxies = {"proxies": {"http": options.proxy, "https": options.proxy}} if options.proxy else {}
    return AioConfig(
        retries={"mode": "standard", "total_max_attempts": attempts},
        s3={"addressing_style": style},
        connect_timeout=options.connect_timeout,
        read_timeout=options.timeout,
        max_pool_connections=options.pool,
        parameter_validation=False,  # it has a cost, and this module sets the parameters
        user_agent="memwal",  # building the default one takes a tenth of a request
        ignore_configured_endpoint_urls=True,  # read_options has read them
        **unsigned,
        **proxies,
        **more,
    )


@cache
def _session() -> AioSession:
    """Return the process's only session: each session parses the service's description again, which takes 10 MB."""
    return get_session()


def _client(options: S3Options, config: AioConfig) -> Any:
    return _session().create_client(
        "s3",
        endpoint_url=options.endpoint,
        region_name=options.region,
        aws_access_key_id=options.access_key_id,
        aws_secret_access_key=options.secret_access_key,
        aws_session_token=options.session_token,
        verify=None if options.verify else False,
        config=config,
    )
