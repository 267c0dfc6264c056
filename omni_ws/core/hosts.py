"""Which names a server answers to: those that no foreign page can have pointed at it."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable


class Hosts:
    """``allowed`` are names besides this machine's own and addresses; ``*`` for all."""

    def __init__(self, allowed: Iterable[str]) -> None:
        self._allowed = frozenset(_name(one) for one in allowed)

    def answers_to(self, host: str) -> bool:
        """Whether a ``Host`` field, with or without a port, is an address, this machine, or one of the allowed.

        A page of another name reaches an address only as a foreign origin, by which it is known. Where its own name is
        pointed at this server (DNS rebinding) it looks like the server's own page: by its name alone it is found out.
        """
        name = _name(host)
        if "*" in self._allowed or name in self._allowed:
            return True
        return name == "localhost" or name.endswith(".localhost") or _is_address(name)


def _name(host: str) -> str:
    """In lower case, without its port and the dot at its end; an address of IPv6 keeps its brackets."""
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
