"""Addresses of clients behind proxies, and the names that this server answers to."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from typing import Final

from omni_ws.config.values import Address, Network, literal_address

#: One subscriber gets at least a /64 (RFC 6177), so all addresses of a /64 count as one client.
_IPV6_CLIENT_PREFIX: Final = 64


class Addresses:
    """Determines the address of a client behind trusted proxies, and the key under which limits count the client.

    ``trusted_proxies`` are networks in CIDR notation or single addresses; anything else raises ValueError.
    """

    def __init__(self, trusted_proxies: Iterable[str] = ()) -> None:
        self._trusted: tuple[Network, ...] = tuple(ipaddress.ip_network(one, strict=False) for one in trusted_proxies)

    def client(self, peer: str, forwarded: Sequence[str]) -> str:
        """Return the address of the client for whom ``peer`` connected: ``peer`` itself, unless it is a trusted proxy.

        ``forwarded`` are the members of ``X-Forwarded-For``. Each proxy appends the address of its own peer, so the
        list is read from the end, and only for as long as the writer of a member is a trusted proxy; anything further
        to the front may be forged.
        """
        address = parse_address(peer) if self._trusted and forwarded else None
        for member in reversed(forwarded):
            if address is None or not self._is_trusted(address):
                break
            before = parse_address(member)
            if before is None:
                break
            address = before
        return peer if address is None else str(address)

    def counted(self, client: str) -> str | None:
        """Return the key under which per-client limits count ``client``: its IPv4 address, or its IPv6 network (/64).

        None exempts the client from these limits: loopback and trusted proxies, which stand for many clients, and peers
        without an IP address (Unix sockets).
        """
        address = parse_address(client)
        if address is None or address.is_loopback or self._is_trusted(address):
            return None
        if isinstance(address, ipaddress.IPv6Address):
            return str(ipaddress.ip_network((int(address), _IPV6_CLIENT_PREFIX), strict=False))
        return str(address)

    def _is_trusted(self, address: Address) -> bool:
        return any(address in network for network in self._trusted)


def parse_address(text: str) -> Address | None:
    """Parse an address as proxies write it: with or without port, brackets and quotes.

    IPv4-mapped IPv6 becomes IPv4. Returns None if ``text`` is no IP address.
    """
    text = text.strip().strip('"')
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    return literal_address(text)


class Hosts:
    """Decides whether a ``Host`` field may name this server: a defence against DNS rebinding.

    ``allowed`` are names besides ``localhost`` and IP addresses, which are always accepted; ``*`` accepts all.
    """

    def __init__(self, allowed: Iterable[str]) -> None:
        self._allowed = frozenset(_name(one) for one in allowed)

    def answers_to(self, host: str) -> bool:
        """Return whether ``host`` is an IP address, ``localhost`` (or below it), or an allowed name, with any port.

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
