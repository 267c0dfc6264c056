"""The client's address behind proxies, the key of per-client limits, and the names of this server."""

from __future__ import annotations

import pytest

from omni_ws.service.sessions.admission import (
    Addresses,
    Hosts,
)

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


# The names that the ``Host`` field may have.

HOSTS = Hosts(["voice.example", "Other.Example:8443"])


@pytest.mark.parametrize(
    "host",
    [
        *("localhost", "localhost:8080", "LOCALHOST", "localhost.", "app.localhost:1", "127.0.0.1", "127.0.0.1:8080"),
        *("[::1]", "[::1]:8080", "192.0.2.7:80", "[2001:db8::5:6]", "10.0.0.1:"),
        *("voice.example", "voice.example:9000", "VOICE.example.", "other.example"),
    ],
)
def test_its_own_names(host: str) -> None:
    assert HOSTS.answers_to(host)


@pytest.mark.parametrize(
    "host",
    [
        *("", ":8080", "evil.example", "evil.example:8080", "localhost.evil.example", "127.0.0.1.evil.example"),
        *("xlocalhost", "voice.example.evil", "sub.voice.example", "[::1].evil.example", "[::1", "::1", "[]", "*"),
        *("evil.example:80:80", "127.0.0.1:80x", "999.0.0.1"),
    ],
)
def test_foreign_names(host: str) -> None:
    assert not HOSTS.answers_to(host)


def test_all_names() -> None:
    assert Hosts(["*"]).answers_to("anything.example")
