"""Whose address a request comes from, behind proxies too, and which addresses stand for one client."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from typing import Final

from omni_ws.config.literal_address import Address, Network, literal_address

#: What one subscriber of IPv6 has at least (RFC 6177): more addresses than anybody can count.
_IPV6_CLIENT_PREFIX: Final = 64


class Addresses:
    """``trusted_proxies`` are networks in CIDR form, or single addresses. Raises ValueError for anything else."""

    def __init__(self, trusted_proxies: Iterable[str] = ()) -> None:
        self._trusted: tuple[Network, ...] = tuple(ipaddress.ip_network(one, strict=False) for one in trusted_proxies)

    def client(self, peer: str, forwarded: Sequence[str]) -> str:
        """The address of the client behind ``peer``.

        ``forwarded`` are the members of ``X-Forwarded-For``. Each proxy writes at their end whom it hears, so they are
        read from there, and only as far as a trusted proxy has written them; what stands before is the client's word.
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
        """What ``client`` is counted under.

        None for this machine and trusted proxies, behind which there may be many, and where there is no address.
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
    """An address as proxies write it, with or without a port; IPv4 inside IPv6 as IPv4. None for anything else."""
    text = text.strip().strip('"')
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    return literal_address(text)
