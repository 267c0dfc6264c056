"""Entries of MCP servers: filters, names that do not collide, and what is kept of them."""

from __future__ import annotations

import re

import msgspec
import pytest

from omni_ws.errors import InvalidValue
from omni_ws.wire.session_config import (
    MAX_SERVERS,
    McpServer,
    offered_name,
    read_servers,
    scrubbed,
)

ENTRY = {"type": "mcp", "server_label": "one", "server_url": "https://example.org/mcp"}


def read(**fields: object) -> McpServer:
    return read_servers([{**ENTRY, **fields}], known=())[0]


@pytest.mark.parametrize(
    ("allowed", "tools"),
    [
        (None, ["look", "write"]),
        (["look"], ["look"]),
        ({"tool_names": ["write"]}, ["write"]),
        ({"read_only": True}, ["look"]),
        ({"tool_names": ["write"], "read_only": True}, []),
    ],
)
def test_tools_are_allowed(allowed: object, tools: list[str]) -> None:
    server = read(allowed_tools=allowed)
    assert [name for name in ("look", "write") if server.allows(name, reads_only=name == "look")] == tools


@pytest.mark.parametrize(
    ("rule", "asks"),
    [
        (None, ["look", "write"]),
        ("always", ["look", "write"]),
        ("never", []),
        ({"never": {"tool_names": ["look"]}}, ["write"]),
        ({"always": {"tool_names": ["look"]}, "never": {}}, ["look"]),
        ({"always": {"read_only": False}, "never": {"read_only": True}}, ["write"]),
    ],
)
def test_calls_are_approved(rule: object, asks: list[str]) -> None:
    server = read(require_approval=rule)
    assert [name for name in ("look", "write") if server.asks(name, reads_only=name == "look")] == asks


def test_names_are_valid_and_their_own() -> None:
    taken: set[str] = set()
    for label, tool in [("a", "b"), ("a", "b"), ("a__b", "c"), ("a", "b__c"), ("a", "ü.x"), ("a", "y" * 90)]:
        name = offered_name(label, tool, taken)
        assert re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", name)
        assert name not in taken
        taken.add(name)
    assert "a__b" in taken


def test_a_session_has_eight_servers() -> None:
    many = [{**ENTRY, "server_label": f"label{number}"} for number in range(MAX_SERVERS + 1)]
    assert len(read_servers(many[:-1], known=())) == MAX_SERVERS
    with pytest.raises(InvalidValue, match="at most 8"):
        read_servers(many, known=())


def test_errors_do_not_quote_credentials() -> None:
    for fields in ({"authorization": ["sekrit"]}, {"headers": {"X": 5, "Y": "sekrit"}}, {"headers": "sekrit"}):
        with pytest.raises(InvalidValue) as told:
            read(**fields)
        assert "sekrit" not in str(told.value)
    assert "sekrit" not in repr(read(authorization="sekrit", headers={"X": "sekrit"}))


@pytest.mark.parametrize("kind", ["mcp", "\\u006dcp"])
def test_recorded_messages_have_no_credentials(kind: str) -> None:
    secrets = '"server_url": "https://h/?sekrit", "authorization": "sekrit", "headers": {"a": "sekrit"}'
    entry = f'{{"type": "{kind}", {secrets}}}'
    message = f'{{"type": "session.update", "session": {{"tools": [{entry}], "instructions": "mcp"}}}}'.encode()
    kept = scrubbed(message)
    assert b"sekrit" not in kept
    assert msgspec.json.decode(kept)["session"]["tools"] == [{"type": "mcp", "server_url": "https://h/"}]
    assert scrubbed(b'{"text": "mcp"}') == b'{"text": "mcp"}'
    assert scrubbed(message[:-1]) == b"null"
    assert b"sekrit" not in scrubbed(message[:-1] + b', "session": {}}')
