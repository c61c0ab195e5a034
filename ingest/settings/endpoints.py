"""Addresses (endpoints) of a table's daemons by the configuration: one for each worker process."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from memwal.ingest.errors import Invalid
from memwal.ingest.settings.configuration import Settings
from memwal.ingest.settings.sections import DaemonSettings

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


def own_endpoint(daemon: DaemonSettings) -> str | None:
    """Return the one of `daemon.endpoints` that is this daemon: `daemon.advertise`, or host and port. None without
    endpoints.

    Raises: Invalid if this daemon is not one of them.
    """
    here = endpoint_of(daemon.host, daemon.port, scheme_of(daemon.tls_cert))
    mine = daemon.advertise or here
    if daemon.endpoints and mine not in daemon.endpoints:
        raise Invalid(
            f"daemon.endpoints: {here}, this daemon's host and port, is not one of them; add it, or set "
            "daemon.advertise to the endpoint that it is"
        )
    return mine if daemon.endpoints else None


def configured_endpoint(settings: Settings) -> str | None:
    """Return the configured daemons in the form that `memwal.connect` accepts; None without any (child daemon)."""
    return ",".join(expanded(settings.daemon.endpoints, settings.daemon.workers)) or None
