"""TLS of a client: the trusted CA, the client's certificate, and the reasons of failed handshakes.

When a daemon rejects a client certificate, gRPC reports only that the socket was closed, as for a stopped daemon.
`ClientTls.translated` distinguishes the two cases.
"""

from __future__ import annotations

import socket
import ssl
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from memwal.ingest.errors import LOST, UNAUTHENTICATED, Invalid, MemWalError, Unavailable
from memwal.ingest.service.rpc.wire import from_flight

_PROBE_TIMEOUT = 2.0
"""Seconds for the daemon's answer in each step of a probe."""
_CERTIFICATE = b"-----BEGIN CERTIFICATE-----"
_NOT_CONNECTED = "failed to connect"
_CLOSED = ("Socket closed", "reset by peer")
"""Texts of gRPC for a connection that was closed during the handshake. Flight has no error type for it."""
_MEETINGS = 4
"""Rounds of messages in a handshake: two in TLS 1.3, and spare ones."""


@dataclass(frozen=True, slots=True)
class ClientTls:
    """TLS credentials of a client, in PEM.

    Thread safety. Immutable. No repr contains the private key.
    """

    ca: bytes | None = None
    """Certificates of the CA that signed the daemon's; None: the system's CAs."""
    certificate: bytes | None = None
    """The client's certificate, followed by intermediate ones; None: the client presents none."""
    key: bytes | None = field(default=None, repr=False)

    def flight_options(self) -> dict[str, Any]:
        """Return the arguments for a Flight client."""
        return {"tls_root_certs": self.ca, "cert_chain": self.certificate, "private_key": self.key}

    def translated(self, error: Exception, endpoint: str) -> MemWalError:
        """Return the error for the user, as `from_flight` does, with two more cases.

        Invalid if the daemon rejects the client certificate; Unavailable ("untrusted") if the daemon is alive and
        gives no reason. May probe the daemon, which takes a few milliseconds, or `_PROBE_TIMEOUT` per step if it does
        not answer.
        """
        text = str(error)
        if _NOT_CONNECTED not in text or not any(closed in text for closed in _CLOSED):
            return from_flight(error, endpoint)
        demands = _demands(endpoint)
        if demands is None:
            asked = f"closed a connection during its handshake, and does not say why within {_PROBE_TIMEOUT:g} s; retry"
            return Unavailable(f"the daemon at {endpoint} {asked}", {"reason": LOST, "untrusted": True})
        if not demands:
            return from_flight(error, endpoint)
        if self.certificate is None:
            what = "requires a client certificate; set daemon.tls_client_cert and daemon.tls_client_key"
        else:
            what = (
                "does not accept the client certificate; its daemon.tls_client_ca must hold the CA that signed "
                "daemon.tls_client_cert"
            )
        return Invalid(f"the daemon at {endpoint} {what} (tls_cert and tls_key in Python)", {"reason": UNAUTHENTICATED})


NO_TLS = ClientTls()
"""The system's CAs, and no client certificate."""


def authority(given: str | Path | bytes, name: str = "tls_ca") -> bytes:
    """Return the certificates in a PEM file or in bytes. Raises: Invalid, naming `name`."""
    pem = given if isinstance(given, bytes) else read_pem(given, name, ", or its bytes")
    if _CERTIFICATE not in pem:
        what = "it" if isinstance(given, bytes) else str(given)
        raise Invalid(f"{name}: {what} has no certificate in PEM; give that of the CA, or of the daemon itself")
    return pem


def client_certificate(
    certificate: str | Path, key: str | Path, names: tuple[str, str] = ("tls_cert", "tls_key")
) -> tuple[bytes, bytes]:
    """Return a client's certificate and its private key, read from PEM files.

    `names`: names of the two arguments in errors.
    Raises: Invalid if the files cannot be read or do not match, or if the certificate has expired or is not for
    clients.
    """
    read = read_pem(certificate, names[0]), read_pem(key, names[1])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    load_pair(context, str(certificate), str(key), names[0])
    problem = _problem(context, read[0], str(certificate), str(key))
    if problem is not None:
        raise Invalid(f"{names[0]}: {certificate}: {problem}; give a certificate that is valid for a TLS client")
    return read


def read_pem(path: str | Path, name: str, or_else: str = "") -> bytes:
    """Return the bytes of a file. Raises: Invalid, naming `name`. `or_else`: alternatives to a path."""
    try:
        return Path(path).read_bytes()
    except TypeError:
        raise Invalid(f"{name} = {path!r}: give the path of a PEM file{or_else}") from None
    except OSError as error:
        raise Invalid(f"{name}: {path!s}: {error.strerror}; give the path of a PEM file") from None


def load_pair(context: ssl.SSLContext, certificate: str, key: str, name: str) -> None:
    """Load a certificate into `context`. Raises: Invalid, naming `name`, if certificate and key do not match."""
    try:
        context.load_cert_chain(certificate, key, password=_no_password)
    except (ssl.SSLError, ValueError) as error:
        raise Invalid(
            f"{name}: {certificate} and {key} must be a certificate and its key, in PEM form and without a password "
            f"({getattr(error, 'reason', None) or error})"
        ) from None


def _no_password() -> str:
    """Raise instead of prompting for a password on the terminal: a daemon has no user to answer."""
    raise ValueError("it has a password")


def _problem(client: ssl.SSLContext, certificate: bytes, certificate_file: str, key_file: str) -> str | None:
    """Return why every server would reject a client certificate, such as "certificate has expired"; None if it is
    valid.

    `ssl` does not expose dates, but verifies them. `client` presents the certificate, in a handshake in memory, to a
    server that trusts this very certificate.
    """
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certificate_file, key_file, password=_no_password)
    server.verify_mode = ssl.CERT_REQUIRED
    server.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    server.load_verify_locations(cadata=certificate.decode("ascii", "ignore"))
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = client.wrap_bio(down, up), server.wrap_bio(up, down, server_side=True)
    for _ in range(_MEETINGS):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLCertVerificationError as error:
                return error.verify_message
    return None


def _demands(endpoint: str) -> bool | None:
    """Return whether the daemon at `endpoint` requires client certificates; None if it accepts a connection (so it is
    alive) but does not answer.

    A daemon that requires certificates completes the handshake of a client without one, because in TLS 1.3 the
    client's handshake ends before the daemon has seen the certificate, and then closes the connection. A stopping
    daemon closes the first connection too, but accepts no second one.
    """
    host, _, port = endpoint.partition("://")[2].rpartition(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # the probe sends no data and ignores the answer's content
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with suppress(OSError, ValueError):
        is_closed = partial(_is_closed_at_once, context, host.strip("[]"), int(port))
        return is_closed() and is_closed()
    return False


def _is_closed_at_once(context: ssl.SSLContext, host: str, port: int) -> bool | None:
    """Return whether a connection is closed after its handshake; None if it is established but not answered in time."""
    with socket.create_connection((host, port), _PROBE_TIMEOUT) as raw:
        with suppress(TimeoutError), context.wrap_socket(raw) as secured:
            try:
                return not secured.recv(1)  # an HTTP/2 server sends first
            except ConnectionResetError:
                return True
            except ssl.SSLError as error:  # a TLS alert
                return "CERTIFICATE" in str(error.reason)
        return None
