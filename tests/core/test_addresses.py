"""The client's address behind proxies, and the key of per-client limits."""

from __future__ import annotations

import pytest

from omni_ws.core.addresses import Addresses

PROXIES = Addresses(["10.0.0.0/8", "2001:db8:ffff::/48", "127.0.0.1"])


@pytest.mark.parametrize(
    ("peer", "forwarded", "client"),
    [
        ("192.0.2.1", ["198.51.100.7"], "192.0.2.1"),  # no proxy is trusted
        ("10.0.0.1", [], "10.0.0.1"),
        ("10.0.0.1", ["198.51.100.7"], "198.51.100.7"),
        ("10.0.0.1", ["203.0.113.9", "198.51.100.7"], "198.51.100.7"),  # anything before it may be forged
        ("10.0.0.1", ["198.51.100.7", "10.1.2.3"], "198.51.100.7"),
        ("10.0.0.1", ["10.9.9.9", "10.1.2.3"], "10.9.9.9"),
        ("10.0.0.1", ["198.51.100.7", "unknown"], "10.0.0.1"),
        ("10.0.0.1", ["198.51.100.7:4711"], "198.51.100.7"),
        ("::ffff:10.0.0.1", ['"[2001:db8::1]:4711"'], "2001:db8::1"),
        ("2001:db8:ffff::2", ["::ffff:198.51.100.7"], "198.51.100.7"),
        ("127.0.0.1", ["198.51.100.7"], "198.51.100.7"),
        ("", ["198.51.100.7"], ""),
    ],
)
def test_client_behind_proxies(peer: str, forwarded: list[str], client: str) -> None:
    assert PROXIES.client(peer, forwarded) == client


def test_without_proxies_the_peer_is_the_client() -> None:
    assert Addresses().client("127.0.0.1", ["198.51.100.7"]) == "127.0.0.1"


@pytest.mark.parametrize(
    ("client", "counted"),
    [
        ("198.51.100.7", "198.51.100.7"),
        ("::ffff:198.51.100.7", "198.51.100.7"),
        ("2001:db8::1", "2001:db8::/64"),
        ("2001:db8::ffff:1", "2001:db8::/64"),
        ("2001:db8:0:1::1", "2001:db8:0:1::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        *((uncounted, None) for uncounted in ("", "127.0.0.1", "127.8.0.1", "::1", "10.0.0.1", "unix")),
    ],
)
def test_what_a_client_is_counted_under(client: str, counted: str | None) -> None:
    assert PROXIES.counted(client) == counted


@pytest.mark.parametrize("bad", ["", "10.0.0.0/33", "example.org"])
def test_no_network(bad: str) -> None:
    with pytest.raises(ValueError, match="does not appear to be an IPv4 or IPv6 network"):
        Addresses([bad])
