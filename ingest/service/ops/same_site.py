"""Decide which HTTP requests to reject because a page of another site may have sent them through a browser. Pure.

1. A page of another site sends its own `Origin`, or the browser sends `Sec-Fetch-Site: cross-site`.
2. With DNS rebinding the owner of the site makes its name resolve to this process. Then both headers agree with
   `Host`, and the browser lets the page read the answer. They are detected by the name, unless a token is required.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from urllib.parse import urlsplit

_SHOWN = 100


def other_name(host: str, own: str) -> str | None:
    """Return why a request without a token is rejected for its `Host` header; None if it is accepted.

    `own`: the configured host. A request without the header does not come from a browser.
    """
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return f"{host[:_SHOWN]!r} is not an address"
    if not host or name in ("localhost", own) or _is_address(name):
        return None
    taken = " and localhost" if own == "localhost" or _is_address(own) else f", localhost and {own}"
    return f"asked by the name {name[:_SHOWN]!r}; without daemon.token only IP addresses{taken} are taken"


def other_site(headers: Mapping[str, str]) -> str | None:
    """Return why a request is rejected that a page of another site sent through a browser; None for any other
    request."""
    host, origin = headers.get("Host", ""), headers.get("Origin")
    try:
        site = None if origin is None else urlsplit(origin).netloc
    except ValueError:
        return f"{(origin or '')[:_SHOWN]!r} is not an address"
    if site is not None and site != host:
        return f"a page of {origin[:_SHOWN] if origin else ''} asked {host[:_SHOWN]}; {_ONLY}"
    if headers.get("Sec-Fetch-Site", "").lower() == "cross-site":
        return f"a page of another site asked {host[:_SHOWN]}; {_ONLY}"
    return None


_ONLY = "only the page of this process may ask it from a browser"


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
