"""Which requests over HTTP are refused because a page of another site may have made a browser send them. Pure.

1. A page of another site sends its own `Origin`, or the browser says `Sec-Fetch-Site: cross-site`.
2. Where its owner has made its name lead to our address (DNS rebinding), both agree with `Host`, and the browser lets
   the page read the answer. It is told by the name, unless a token keeps it out.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from urllib.parse import urlsplit

_SHOWN = 100


def other_name(host: str, own: str) -> str | None:
    """Return why a request without a token is refused for its `Host` header, None if it is not. `own`: the configured
    host. Without the header it is not from a browser.
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
    """Return why a request is refused that a page of another site made a browser send, None if none did."""
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
