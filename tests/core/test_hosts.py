"""The names that the ``Host`` field may have."""

from __future__ import annotations

import pytest

from omni_ws.core.addresses import Hosts

HOSTS = Hosts(["voice.example", "Other.Example:8443"])


@pytest.mark.parametrize(
    "host",
    [
        *("localhost", "localhost:8080", "LOCALHOST", "localhost.", "app.localhost:1", "127.0.0.1", "127.0.0.1:8080"),
        *("[::1]", "[::1]:8080", "192.0.2.7:80", "[2001:db8::1]", "10.0.0.1:"),
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
