"""Calls of tools and their results, as upstreams take them, however the conversation went."""

from __future__ import annotations

from typing import Any

import pytest

from omni_ws.engine.remote.settings import with_results


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str, *calls: str) -> dict[str, Any]:
    called = [{"id": call, "type": "function", "function": {"name": "clock", "arguments": "{}"}} for call in calls]
    return {"role": "assistant", "content": text} | ({"tool_calls": called} if called else {})


def result(call: str, text: str = "noon") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call, "content": text}


@pytest.mark.parametrize(
    "messages",
    [
        [user("a"), said("b"), user("c")],
        [user("a"), said("", "1"), result("1")],
        [user("a"), said("wait", "1", "2"), result("1"), result("2"), said("b"), user("c")],
        [user("a"), said("", "1"), result("1"), said("", "1"), result("1"), user("the same id again")],
        [result("unknown"), user("a")],
    ],
)
def test_what_is_in_order_stays_as_it_is(messages: list[dict[str, Any]]) -> None:
    assert list(with_results(messages)) == messages


@pytest.mark.parametrize(
    ("messages", "sent"),
    [
        ([user("a"), said("", "1"), user("b")], [user("a"), user("b")]),
        ([user("a"), said("wait", "1"), user("b")], [user("a"), said("wait"), user("b")]),
        ([user("a"), said("", "1", "2"), result("2")], [user("a"), said("", "2"), result("2")]),
        (
            [user("a"), said("wait", "1"), user("b"), said("c"), result("1")],
            [user("a"), said("wait"), user("b"), said("c"), said("", "1"), result("1")],
        ),
        (
            [user("a"), said("", "1", "2"), result("2"), said("b"), result("1"), user("c")],
            [user("a"), said("", "2"), result("2"), said("b"), said("", "1"), result("1"), user("c")],
        ),
        (
            [user("a"), said("", "1"), user("b"), result("1"), result("1", "again")],
            [user("a"), user("b"), said("", "1"), result("1"), result("1", "again")],
        ),
    ],
)
def test_a_call_stands_before_its_result(messages: list[dict[str, Any]], sent: list[dict[str, Any]]) -> None:
    assert list(with_results(messages)) == sent
