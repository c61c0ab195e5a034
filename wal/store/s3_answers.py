"""Classify an answer of S3, or a missing answer: one pure function, `meaning_of`.

    answer                                                  meaning
    ------------------------------------------------------  --------------------------------------------------
    412, 304                                                EXISTS   the key is taken, maybe by this writer
    404 NoSuchKey                                           MISSING
    409 ConditionalRequestConflict, 429                     NOTHING  this attempt left nothing; retry it
    400 of a body that did not arrive whole                 NOTHING
    no connection could be made                             NOTHING
    5xx, reset, read timeout, an answer cut off             UNKNOWN  it may have landed, now or later
    other 4xx, redirects, 501, no credentials, certificate  REFUSED  configuration: retrying cannot help

aiobotocore also raises EndpointConnectionError ("could not connect") for a reset in the middle of a request. Its
underlying error decides.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from enum import Enum
from typing import Any

import aiohttp
from botocore import exceptions as boto


class Meaning(Enum):
    """The meaning of one request's answer."""

    EXISTS = "exists"
    MISSING = "missing"
    NOTHING = "nothing landed"
    UNKNOWN = "unknown"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Answer:
    """A meaning, and the text for an error message: the answer and the remedy. Contains no secrets."""

    meaning: Meaning
    said: str


_KEY = "correct the storage options access_key_id and secret_access_key"
_TOKEN = "give a fresh session_token, or take it out of the storage options to use the standard chain"  # noqa: S105
_RIGHTS = "allow these credentials s3:GetObject, s3:PutObject, s3:DeleteObject on the table and s3:ListBucket"
_REGION = "correct the storage option region"
_DAMAGED = "the bytes were damaged on the way"
_BY_CODE: dict[str, tuple[Meaning, str]] = {
    "PreconditionFailed": (Meaning.EXISTS, ""),
    "NoSuchKey": (Meaning.MISSING, ""),
    "ConditionalRequestConflict": (Meaning.NOTHING, "another request for this key was under way"),
    "BadDigest": (Meaning.NOTHING, _DAMAGED),
    "XAmzContentChecksumMismatch": (Meaning.NOTHING, _DAMAGED),
    "XAmzContentSHA256Mismatch": (Meaning.NOTHING, _DAMAGED),
    "IncompleteBody": (Meaning.NOTHING, _DAMAGED),
    "RequestTimeout": (Meaning.NOTHING, "the request did not arrive in time"),
    "TooManyRequests": (Meaning.NOTHING, "storage asks for fewer requests"),
    "SlowDown": (Meaning.UNKNOWN, "storage asks for fewer requests"),
    "InvalidAccessKeyId": (Meaning.REFUSED, f"the access key is not known there; {_KEY}"),
    "SignatureDoesNotMatch": (Meaning.REFUSED, f"the secret key does not fit the access key; {_KEY}"),
    "AccessDenied": (Meaning.REFUSED, _RIGHTS),
    "AllAccessDisabled": (Meaning.REFUSED, _RIGHTS),
    "AccountProblem": (Meaning.REFUSED, "ask whoever runs the account"),
    "ExpiredToken": (Meaning.REFUSED, f"the credentials have expired; {_TOKEN}"),
    "InvalidToken": (Meaning.REFUSED, f"the session token is not valid; {_TOKEN}"),
    "InvalidTokenId": (Meaning.REFUSED, f"the session token is not valid; {_TOKEN}"),
    "NoSuchBucket": (Meaning.REFUSED, "there is no such bucket; create it or correct table.uri"),
    "InvalidBucketName": (Meaning.REFUSED, "no bucket can have this name; correct table.uri"),
    "PermanentRedirect": (Meaning.REFUSED, f"the bucket is in another region; {_REGION}"),
    "TemporaryRedirect": (Meaning.REFUSED, f"the bucket is in another region; {_REGION}"),
    "AuthorizationHeaderMalformed": (Meaning.REFUSED, f"the bucket is in another region; {_REGION}"),
    "IllegalLocationConstraintException": (Meaning.REFUSED, f"the bucket is in another region; {_REGION}"),
    "RequestTimeTooSkewed": (Meaning.REFUSED, "this machine's clock is wrong; set it"),
    "NotImplemented": (Meaning.REFUSED, "this storage has no conditional writes; use one that has"),
    "MethodNotAllowed": (Meaning.REFUSED, "this is no S3 endpoint; correct the storage option endpoint"),
    "EntityTooLarge": (Meaning.REFUSED, "lower wal.entry_size_max"),
    "QuotaExceeded": (Meaning.NOTHING, "the bucket's quota is used up; raise it or free space"),
    "XMinioStorageFull": (Meaning.NOTHING, "storage is full; free space"),
}
_BY_STATUS: dict[int, tuple[Meaning, str]] = {
    304: (Meaning.EXISTS, ""),
    301: (Meaning.REFUSED, f"the bucket is in another region; {_REGION}"),
    307: (Meaning.REFUSED, f"the bucket is in another region; {_REGION}"),
    401: (Meaning.REFUSED, _KEY),
    403: (Meaning.REFUSED, _RIGHTS),
    404: (Meaning.REFUSED, "there is no such bucket or endpoint; correct table.uri or the storage option endpoint"),
    405: (Meaning.REFUSED, "this is no S3 endpoint; correct the storage option endpoint"),
    408: (Meaning.NOTHING, "the request did not arrive in time"),
    409: (Meaning.NOTHING, "another request for this key was under way"),
    412: (Meaning.EXISTS, ""),
    429: (Meaning.NOTHING, "storage asks for fewer requests"),
    501: (Meaning.REFUSED, "this storage has no conditional writes; use one that has"),
}
_CREDENTIALS = "give access_key_id and secret_access_key as storage options, or set up the standard chain"
_BY_TYPE: tuple[tuple[type[BaseException], Meaning, str], ...] = (
    (boto.NoCredentialsError, Meaning.REFUSED, f"there are no credentials; {_CREDENTIALS}"),
    (boto.PartialCredentialsError, Meaning.REFUSED, f"half of the credentials is missing; {_CREDENTIALS}"),
    (boto.ProfileNotFound, Meaning.REFUSED, "there is no such profile; correct AWS_PROFILE"),
    (boto.SSOError, Meaning.REFUSED, "the sign-on has expired; sign on again"),
    (boto.TokenRetrievalError, Meaning.REFUSED, "the sign-on has expired; sign on again"),
    (boto.CredentialRetrievalError, Meaning.NOTHING, "credentials could not be fetched"),
    (boto.MetadataRetrievalError, Meaning.NOTHING, "credentials could not be fetched"),
    (
        boto.SSLError,
        Meaning.REFUSED,
        "no TLS connection: its certificate is not trusted, or it is plain HTTP; correct the storage option endpoint",
    ),
    (boto.ConnectTimeoutError, Meaning.NOTHING, "no connection within connect_timeout; is the endpoint right?"),
    (boto.ProxyConnectionError, Meaning.NOTHING, "the proxy does not answer; correct the storage option proxy_url"),
    (boto.ReadTimeoutError, Meaning.UNKNOWN, "no answer in time"),
    (boto.FlexibleChecksumError, Meaning.UNKNOWN, "what arrived is not what was stored: its checksum differs"),
    (boto.IncompleteReadError, Meaning.UNKNOWN, "the answer was cut off"),
    (boto.ConnectionClosedError, Meaning.UNKNOWN, "the connection was closed without an answer"),
    (boto.HTTPClientError, Meaning.UNKNOWN, "the connection broke"),
    (aiohttp.ClientError, Meaning.UNKNOWN, "the connection broke"),
    (TimeoutError, Meaning.UNKNOWN, "no answer in time"),
)


def meaning_of(error: Exception) -> Answer:
    """Return the meaning of `error`, which one request of aiobotocore raised. Pure.

    Raises `error` if it is not an answer of storage but a defect of this program.
    """
    if isinstance(error, boto.ClientError):
        return _of_response(error.response)
    if isinstance(error, boto.EndpointConnectionError):
        if isinstance(error.kwargs.get("error"), aiohttp.ClientConnectorError | socket.gaierror):
            return Answer(Meaning.NOTHING, "no connection; is the endpoint right, and up?")
        return Answer(Meaning.UNKNOWN, "the connection broke")
    for kind, meaning, said in _BY_TYPE:
        if isinstance(error, kind):
            return Answer(meaning, said)
    if type(error).__name__ == "ResponseParserError":  # botocore has it outside its exceptions
        return Answer(Meaning.UNKNOWN, "the answer is not of S3's form; is the storage option endpoint right?")
    if isinstance(error, boto.BotoCoreError) and not isinstance(error, boto.ParamValidationError):
        return Answer(Meaning.REFUSED, f"{type(error).__name__}; correct the storage options")
    raise error


def _of_response(response: dict[str, Any]) -> Answer:
    detail = response.get("Error", {})
    code, status = str(detail.get("Code", "")), int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    answered = f"HTTP {status}" + (f" {code}" if code and not code.isdecimal() else "")
    if status >= 500 and status != 501 and code != "XMinioStorageFull":
        meaning, remedy = Meaning.UNKNOWN, _BY_CODE["SlowDown"][1] if code == "SlowDown" else ""
    elif code in _BY_CODE:
        meaning, remedy = _BY_CODE[code]
    elif status in _BY_STATUS:
        meaning, remedy = _BY_STATUS[status]
    else:
        meaning, remedy = Meaning.REFUSED, " ".join(str(detail.get("Message", "")).split())[:200]
    region = f" (it says {detail['Region']})" if remedy.endswith(_REGION) and detail.get("Region") else ""
    return Answer(meaning, f"{answered}: {remedy}{region}" if remedy else answered)
