"""The HTTP service of ``mas-gym serve``, and the telemetry shared with other commands.

`search.service.app` contains the routes and the HTTP server, `chat_format` the OpenAI format, and `search_pool` the
searches. The service needs ``pip install 'mas-gym[serve]'``; `telemetry` does not. This module checks that a request
comes from this machine; the check protects local servers from web pages and DNS rebinding.
"""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit


def is_loopback(host: str) -> bool:
    """Return whether a host name or address is a loopback name or address.

    >>> is_loopback("127.0.0.1"), is_loopback("[::1]"), is_loopback("localhost"), is_loopback("evil.example")
    (True, True, True, False)
    """
    name = host.removeprefix("[").removesuffix("]")
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name.lower() == "localhost"


def foreign(host: str | None, origin: str | None) -> str | None:
    """Return the reason for rejecting a request to a loopback server; None if it comes from this machine.

    A web page can reach a local server across origins (``Origin`` is then the page's site), or through the page's
    host name if it resolves to 127.0.0.1 (``Host`` is then that name).

    Args:
        host: The header ``Host``.
        origin: The header ``Origin``; None if absent.
    """
    if not _local(f"//{host}"):
        return f"expected Host to be 127.0.0.1, localhost or [::1], got {(host or '')[:80]!r}"
    if origin is not None and not _local(origin):
        return f"expected no Origin, or one on this machine, got {origin[:80]!r}"
    return None


def _local(url: str) -> bool:
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 - raises if it is not a number
        # Accept only a name and a port: no user, path or query, and no characters that urlsplit drops.
        return is_loopback(parts.hostname or "") and not parts.username and url.partition("//")[2] == parts.netloc
    except ValueError:
        return False
