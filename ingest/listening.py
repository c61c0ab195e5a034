"""Addresses that processes of ours listen on: free, and on loopback unless callers must show who they are."""

from __future__ import annotations

import ipaddress
import socket
from typing import TYPE_CHECKING

from ingest.errors import Invalid

if TYPE_CHECKING:
    from ingest.security import Guard


def check_address(setting: str, host: str, port: int, guard: Guard | None = None, *, free: bool = True) -> None:
    """Refuse an address that nobody can or may listen on, before anything is claimed.

    `setting` names the port, such as daemon.http_port. `free` False: it may be taken, maybe by the very process.
    Raises: Invalid when the address is unknown, taken, or reachable from elsewhere while `guard` does not ask for a
    token and TLS.
    """
    section = setting.partition(".")[0]
    host_setting = "sink.http_host" if section == "sink" else "daemon.host"
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise Invalid(f"{host_setting}: '{host}' is no address ({error.strerror}); write 127.0.0.1") from None
    if not is_loopback(str(address[0])) and not (guard is not None and guard.complete):
        raise Invalid(
            f"{host_setting}: {host} is not a loopback address, others can reach it: set daemon.token, daemon.tls_cert "
            "and daemon.tls_key, or write 127.0.0.1"
        )
    if not free:
        return
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise Invalid(
                f"{setting}: {port} on {host} is in use or not allowed ({error.strerror}); "
                "choose another port, or 0 for any free one"
            ) from None


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address; of names localhost alone, the others are not asked for."""
    try:
        return ipaddress.ip_address(host.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"
