"""The address of the client behind proxies, and the key under which a client's connections are counted."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from typing import Final

from omni_ws.config.literal_address import Address, Network, literal_address

#: One subscriber gets at least a /64 (RFC 6177), so all addresses of a /64 count as one client.
_IPV6_CLIENT_PREFIX: Final = 64


class Addresses:
    """Resolves client addresses with a list of trusted proxies.

    ``trusted_proxies`` are networks in CIDR notation or single addresses; anything else raises ValueError.
    """

    def __init__(self, trusted_proxies: Iterable[str] = ()) -> None:
        self._trusted: tuple[Network, ...] = tuple(ipaddress.ip_network(one, strict=False) for one in trusted_proxies)

    def client(self, peer: str, forwarded: Sequence[str]) -> str:
        """Return the address of the client that a connection from ``peer`` serves.

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
        """Return the key under which per-client limits count ``client``: IPv4 addresses alone, IPv6 by /64.

        None exempts it from those limits: loopback and trusted proxies, which stand for many clients, and peers without
        an IP address (Unix sockets).
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

    IPv4-mapped IPv6 becomes IPv4. Returns None for anything else.
    """
    text = text.strip().strip('"')
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    return literal_address(text)
