"""Allowlist of hosts from which media may be fetched."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from omni_ws.config.literal_address import Address, Network, literal_address

DEFAULT_PORTS: Final = {"https": 443, "http": 80}

_NAME: Final = re.compile(r"[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*")
_HOST_AND_PORT: Final = re.compile(r"(?P<host>\[[^\]]*\]|[^:\[\]]*)(?::(?P<port>\d{1,5}))?")
#: Well-known prefix of NAT64 (RFC 6052).
_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")


@dataclass(frozen=True, slots=True)
class MediaDomain:
    """An entry of the list: a host name or a network.

    ``port`` None means the default port of the scheme.
    """

    name: str | None
    network: Network | None
    port: int | None
    plain_http: bool

    @classmethod
    def parse(cls, entry: str) -> MediaDomain:
        """Parses ``example.org``, ``example.org:8443``, ``192.0.2.7``, ``10.0.0.0/8`` or ``[::1]:80``.

        A prefix ``http://`` allows plain HTTP as well; ``https://`` is the default. Raises ValueError.
        """
        scheme, separator, host = entry.strip().lower().rpartition("://")
        if separator and scheme not in DEFAULT_PORTS:
            raise ValueError(f"{entry!r}: the scheme must be https or http")
        plain_http = scheme == "http"
        if (network := _network(host)) is not None:
            return cls(None, network, None, plain_http)
        match = _HOST_AND_PORT.fullmatch(host)
        port = int(match["port"]) if match and match["port"] else None
        if match is None or (port is not None and not 0 < port < 65536):
            raise ValueError(f"{entry!r} is not a host such as example.org, example.org:8443 or 10.0.0.0/8")
        if (network := _network(match["host"])) is not None:
            return cls(None, network, port, plain_http)
        name = match["host"].rstrip(".")
        if not _NAME.fullmatch(name):
            raise ValueError(f"{entry!r} is not a host such as example.org, example.org:8443 or 10.0.0.0/8")
        return cls(name, None, port, plain_http)

    def lists(self, scheme: str, host: str, port: int) -> bool:
        """Returns whether the entry covers this scheme, host and port."""
        if (scheme == "http" and not self.plain_http) or port != (self.port or DEFAULT_PORTS.get(scheme)):
            return False
        if self.name is not None:
            return host == self.name
        address = literal_address(host)
        return address is not None and self.holds(address)

    def holds(self, address: Address) -> bool:
        """Returns whether the entry is a network with this address."""
        return self.network is not None and address in self.network


class MediaDomains:
    """The entries of ``http.media_domains``. An empty list allows nothing."""

    def __init__(self, entries: Iterable[str]) -> None:
        """Parses the entries. Raises ValueError for an invalid one."""
        self._domains = tuple(MediaDomain.parse(entry) for entry in entries)

    def __bool__(self) -> bool:
        return bool(self._domains)

    def allow_url(self, scheme: str, host: str, port: int) -> bool:
        """Returns whether a URL with this scheme, host and port may be fetched."""
        host = host.lower().rstrip(".")
        return any(domain.lists(scheme, host, port) for domain in self._domains)

    def allow_address(self, address: str) -> bool:
        """Returns whether a listed host may resolve to ``address``.

        It must be public, or within a listed network; otherwise a name could lead into the private network (SSRF).
        """
        parsed = literal_address(address)
        if parsed is None:
            return False
        if any(domain.holds(parsed) for domain in self._domains):
            return True
        return all(one.is_global and not one.is_multicast for one in (parsed, _embedded(parsed)))


def _network(text: str) -> Network | None:
    try:
        return ipaddress.ip_network(text.strip("[]"), strict=False)
    except ValueError:
        return None


def _embedded(address: Address) -> Address:
    """Returns the IPv4 address that NAT64, 6to4 or Teredo embeds in an IPv6 one; otherwise ``address``."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.sixtofour or (address.teredo[1] if address.teredo else address)
