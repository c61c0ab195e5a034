"""Refuses what the page of another site makes a browser ask of this process."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True)
class SameSite:
    """Tells requests of our own page, and of programs, from those of another site's page.

    Thread safety. Immutable.
    """

    host: str
    """Name by which the process may be asked, beside IP addresses and localhost."""
    has_token: bool
    """Whether callers need a token, so that any name will do."""

    def refusal(self, host: str, origin: str | None) -> str | None:
        """Return why a request is refused, None if it is not. `host`, `origin`: its headers.

        A page of another site sends its own Origin. Where it made its name lead to our address, so that both agree, it
        is told by the name, unless a token keeps it out.
        """
        try:
            name, site = urlsplit(f"//{host}").hostname or "", None if origin is None else urlsplit(origin).netloc
        except ValueError:
            return f"{host} or {origin} is not an address"
        if site is not None and site != host:
            return f"a page of {origin} asked {host}; only the page of this process may ask it from a browser"
        if self.has_token or name in ("localhost", self.host) or _is_address(name):
            return None
        return (
            f"asked by the name {name!r}; without daemon.token only IP addresses, localhost and {self.host} are taken"
        )


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
