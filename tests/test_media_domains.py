"""Which URLs and addresses a list of hosts allows."""

from __future__ import annotations

import pytest

from omni_ws.config import ConfigurationError, load
from omni_ws.config.model import MediaDomains


@pytest.mark.parametrize(
    ("entry", "scheme", "host", "port", "allowed"),
    [
        ("example.org", "https", "example.org", 443, True),
        ("example.org", "https", "EXAMPLE.org.", 443, True),
        ("example.org", "http", "example.org", 80, False),
        ("example.org", "https", "example.org", 8443, False),
        ("example.org", "https", "a.example.org", 443, False),
        ("example.org", "https", "badexample.org", 443, False),
        ("example.org", "ftp", "example.org", 21, False),
        ("https://example.org", "https", "example.org", 443, True),
        ("http://example.org", "http", "example.org", 80, True),
        ("http://example.org", "https", "example.org", 443, True),
        ("example.org:8443", "https", "example.org", 8443, True),
        ("example.org:8443", "https", "example.org", 443, False),
        ("192.0.2.7", "https", "192.0.2.7", 443, True),
        ("192.0.2.7", "https", "192.0.2.8", 443, False),
        ("192.0.2.7", "https", "example.org", 443, False),
        ("10.0.0.0/8", "https", "10.200.0.1", 443, True),
        ("http://10.0.0.1:8000", "http", "10.0.0.1", 8000, True),
        ("http://10.0.0.1:8000", "http", "10.0.0.1", 80, False),
        ("[2001:db8::1]:8443", "https", "2001:db8::1", 8443, True),
        ("127.0.0.1", "https", "::ffff:127.0.0.1", 443, True),
    ],
)
def test_urls(entry: str, scheme: str, host: str, port: int, allowed: bool) -> None:
    assert MediaDomains([entry]).allow_url(scheme, host, port) is allowed


@pytest.mark.parametrize(
    ("address", "allowed"),
    [
        ("93.184.215.14", True),
        ("2606:2800:21f::1", True),
        ("127.0.0.1", False),
        ("10.1.2.3", False),
        ("172.16.0.1", False),
        ("192.168.0.1", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("255.255.255.255", False),
        ("::1", False),
        ("::", False),
        ("fe80::1%eth0", False),
        ("fc00::1", False),
        ("ff02::1", False),
        ("::ffff:10.0.0.1", False),
        ("64:ff9b::10.0.0.1", False),
        ("64:ff9b::5db8:d70e", True),
        ("64:ff9b:1::10.0.0.1", False),
        ("::127.0.0.1", False),
        ("::ffff:0:10.0.0.1", False),
        ("fec0::1", False),
        ("2002:a00:1::1", False),
        ("2001:0:53aa:64c:0:0:f5ff:fffe", False),
        ("not an address", False),
    ],
)
def test_addresses_are_public_unless_they_are_listed(address: str, allowed: bool) -> None:
    assert MediaDomains(["example.org"]).allow_address(address) is allowed


def test_private_addresses_may_be_listed() -> None:
    domains = MediaDomains(["media.example", "10.0.0.0/8", "[fc00::1]"])
    assert [domains.allow_address(one) for one in ("10.1.2.3", "::ffff:10.1.2.3", "fc00::1")] == [True] * 3
    assert [domains.allow_address(one) for one in ("11.0.0.1", "192.168.0.1", "fc00::2")] == [True, False, False]


@pytest.mark.parametrize(
    "entry", ["ftp://example.org", "example.org/path", "exa mple.org", "*", "a:0", "a:65536", "http://"]
)
def test_what_is_no_host_is_refused_at_the_start(entry: str) -> None:
    with pytest.raises(ConfigurationError, match="media_domains"):
        load(["--http.media-domains", entry], {})
