"""The order in which upstreams take calls of tools and their results."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any


def with_results(messages: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Messages of a chat body in which every call is followed by its result at once.

    Servers refuse anything else, and with it every later request of the conversation. But whoever talks does not wait
    for a tool: a call whose result comes later moves to right before it, and one without a result is left out.
    """
    runs = [(of_tools, list(run)) for of_tools, run in groupby(messages, lambda message: message["role"] == "tool")]
    waiting: dict[str, dict[str, Any]] = {}
    for index, (of_tools, run) in enumerate(runs):
        if of_tools:
            late = {one["tool_call_id"]: None for one in run if one["tool_call_id"] in waiting}
            if late:
                yield {"role": "assistant", "content": "", "tool_calls": [waiting.pop(call_id) for call_id in late]}
            yield from run
            continue
        results = runs[index + 1][1] if index + 1 < len(runs) else []
        answered = {one["tool_call_id"] for one in results}
        for message in run:
            calls = message.get("tool_calls", [])
            # Only what stands last is followed by the results.
            results_follow = message is run[-1]
            kept = [call for call in calls if results_follow and call["id"] in answered]
            waiting |= {call["id"]: call for call in calls if not (results_follow and call["id"] in answered)}
            for call in kept:
                waiting.pop(call["id"], None)
            if kept or message["content"] or not calls:
                yield _calling(message, kept)


def _calling(message: dict[str, Any], calls: list[dict[str, Any]]) -> dict[str, Any]:
    fields = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**fields, "tool_calls": calls} if calls else fields
