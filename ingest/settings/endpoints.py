"""Where the daemons of a table are found: the endpoints of the configuration, with every worker process its own."""

from __future__ import annotations

from collections.abc import Sequence

from memwal.ingest.settings.model import Settings

SCHEME, TLS = "grpc://", "grpc+tls://"


def at(host: str, port: int, scheme: str = SCHEME) -> str:
    """The endpoint of a host and port."""
    return f"{scheme}{url_host(host)}:{port}"


def url_host(host: str) -> str:
    """A host as it stands in a URL: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def scheme_of(tls_cert: str) -> str:
    """That of a daemon which shows this certificate, "" where it has none."""
    return TLS if tls_cert else SCHEME


def expanded(endpoints: Sequence[str], workers: int) -> list[str]:
    """The endpoints of all worker processes: each daemon's are at ports from its own on."""
    found = []
    for endpoint in endpoints:
        address, _, port = endpoint.rpartition(":")
        found += [f"{address}:{int(port) + worker}" for worker in range(workers)]
    return found


def own(endpoints: Sequence[str], host: str, port: int, advertise: str = "", scheme: str = SCHEME) -> str | None:
    """Which of `endpoints` the daemon at `host` and `port` is; None where it is none of them."""
    wanted = advertise or at(host, port, scheme)
    return wanted if wanted in endpoints else None


def none_of_them(host: str, port: int, scheme: str = SCHEME) -> str:
    """What to say to a daemon that is not one of the endpoints."""
    return (
        f"daemon.endpoints: {at(host, port, scheme)}, this daemon's host and port, is not one of them; add it, or say "
        "in daemon.advertise which one it is"
    )


def configured_endpoint(settings: Settings) -> str | None:
    """The configured daemons, in the form that `memwal.connect` takes; None for a child daemon."""
    return ",".join(expanded(settings.daemon.endpoints, settings.daemon.workers)) or None
