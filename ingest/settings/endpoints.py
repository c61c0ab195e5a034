"""Addresses (endpoints) of a table's daemons by the configuration: one for each worker process."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from memwal.ingest.settings.model import Settings

SCHEME, TLS = "grpc://", "grpc+tls://"


def endpoint_of(host: str, port: int, scheme: str = SCHEME) -> str:
    """Return the endpoint of a host and port."""
    return f"{scheme}{url_host(host)}:{port}"


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address. Of host names only localhost counts; others are not
    resolved."""
    try:
        return ipaddress.ip_address(host.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"


def url_host(host: str) -> str:
    """Return a host in the form of URLs, with IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def scheme_of(tls_cert: str) -> str:
    """Return the scheme of a daemon with the certificate file `tls_cert`; "": no TLS."""
    return TLS if tls_cert else SCHEME


def expanded(endpoints: Sequence[str], workers: int) -> list[str]:
    """Return the endpoints of all worker processes: those of a daemon use consecutive ports, beginning with its own."""
    every = []
    for endpoint in endpoints:
        address, _, port = endpoint.rpartition(":")
        every += [f"{address}:{int(port) + worker}" for worker in range(workers)]
    return every


def own_endpoint(
    endpoints: Sequence[str], host: str, port: int, advertise: str = "", scheme: str = SCHEME
) -> str | None:
    """Return the endpoint in `endpoints` of the daemon at `host` and `port`; None if it is not listed.

    `advertise`: the daemon's own endpoint, if it differs from host and port.
    """
    wanted = advertise or endpoint_of(host, port, scheme)
    return wanted if wanted in endpoints else None


def not_listed_text(host: str, port: int, scheme: str = SCHEME) -> str:
    """Return the error text for a daemon that is not one of the endpoints."""
    return (
        f"daemon.endpoints: {endpoint_of(host, port, scheme)}, this daemon's host and port, is not one of them; add "
        "it, or set daemon.advertise to the endpoint that it is"
    )


def configured_endpoint(settings: Settings) -> str | None:
    """Return the configured daemons in the form that `memwal.connect` accepts; None without any (child daemon)."""
    return ",".join(expanded(settings.daemon.endpoints, settings.daemon.workers)) or None
