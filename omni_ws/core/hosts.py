"""Hosts: the names in the ``Host`` field that this server accepts, a defence against DNS rebinding."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable


class Hosts:
    """Decides whether a ``Host`` field may name this server.

    ``allowed`` are names besides ``localhost`` and IP addresses, which are always accepted; ``*`` accepts all.
    """

    def __init__(self, allowed: Iterable[str]) -> None:
        self._allowed = frozenset(_name(one) for one in allowed)

    def answers_to(self, host: str) -> bool:
        """Whether ``host``, with or without a port, is an IP address, ``localhost`` (or below it), or an allowed name.

        In a DNS rebinding attack a web page resolves its own name to this server, so that its requests pass as
        same-origin: only the ``Host`` field, which has the page's name, betrays them. A page that connects to an
        address or to localhost instead is a foreign origin and subject to the check of ``Origin``.
        """
        name = _name(host)
        if "*" in self._allowed or name in self._allowed:
            return True
        return name == "localhost" or name.endswith(".localhost") or _is_address(name)


def _name(host: str) -> str:
    """Return ``host`` in lower case without port and trailing dot; an IPv6 address keeps its brackets."""
    name, colon, port = host.strip().lower().rpartition(":")
    if not colon or not (port == "" or port.isdecimal()) or (name.startswith("[") and not name.endswith("]")):
        name = host.strip().lower()
    return name.removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        if name.startswith("["):
            return name.endswith("]") and ipaddress.IPv6Address(name[1:-1]) is not None
        return ipaddress.IPv4Address(name) is not None
    except ValueError:
        return False
