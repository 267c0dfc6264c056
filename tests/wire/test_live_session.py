"""The object ``session`` of the Live API: strict, as at OpenAI, and with OpenAI's limits."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.live import SessionResource

from omni_ws.errors import InvalidRequest
from omni_ws.wire.live_session import (
    MAX_APPEND_TOKENS,
    MAX_INPUT_MESSAGES,
    MAX_INPUT_TOKENS,
    MAX_INSTRUCTIONS_TOKENS,
    checked_append,
    read_start,
    read_update,
    session_resource,
)


def refusal(fields: dict[str, Any], *, media: bool = False) -> tuple[str, str | None]:
    with pytest.raises(InvalidRequest) as refused:
        read_start({"model": "gpt-live-1", **fields}, media=media)
    return refused.value.code, refused.value.param


def message(text: str, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": [{"text": text}]}


def words(count: int) -> str:
    return "a " * count


#: Every field of section 3 of OpenAI's reference that a WebSocket may set, with a value that is accepted.
ACCEPTED: dict[str, list[Any]] = {
    "instructions": ["Be brief.", "", None],
    "input": [[], [message("a")], [message("a", "assistant"), message("b", "developer")], None],
    "audio": [
        {},
        {"format": {"type": "audio/pcm", "rate": 16_000}},
        {"format": {"type": "audio/pcm", "rate": 24_000}},
        {"format": {"type": "audio/pcmu", "rate": 8000}},
        {"format": {"type": "audio/pcma", "rate": 8000}},
        {"output": {"voice": "marin"}},
        {"output": {"voice": {"id": "voice_1"}}},
    ],
    "delegation": [
        None,
        {"type": "client"},
        {"type": "client", "acknowledgement_delay_ms": 0},
        {
            "type": "responses",
            "responses": {
                "model": "gpt-5.6-luna",
                "instructions": "Find it.",
                "tools": [{"type": "function", "name": "find", "parameters": {}}],
                "tool_choice": "auto",
                "parallel_tool_calls": True,
                "reasoning": {"effort": "low"},
                "text": {"verbosity": "low"},
                "service_tier": "auto",
                "max_output_tokens": 16,
            },
        },
    ],
    "triggers": [[], None],
    "store": [True, False, None],
    "safety_identifier": ["user-1"],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in ACCEPTED.items() for value in values])
def test_fields_are_accepted_and_shown_as_openai_shows_them(name: str, value: Any) -> None:
    start = read_start({"model": "gpt-live-1", name: value})
    shown = session_resource(start, session_id="live_1", expires_at=1, voice="ann")
    SessionResource.model_validate(shown)
    if value and name not in ("audio",):
        assert shown[name] == value


def test_no_field_of_openai_is_unknown() -> None:
    known = set(SessionResource.model_fields) - {"id", "expires_at", "status"}
    assert known == {"model", "client", *ACCEPTED}
    assert refusal({"client": {"data_channel": {}}}) == ("unsupported_parameter", "session.client")


@pytest.mark.parametrize(
    ("most", "more", "param"),
    [
        (
            {"instructions": words(MAX_INSTRUCTIONS_TOKENS)},
            {"instructions": words(MAX_INSTRUCTIONS_TOKENS + 1)},
            "session.instructions",
        ),
        (
            {"input": [message("a")] * MAX_INPUT_MESSAGES},
            {"input": [message("a")] * (MAX_INPUT_MESSAGES + 1)},
            "session.input",
        ),
        (
            {"input": [message(words(MAX_INPUT_TOKENS // 2))] * 2},
            {"input": [message(words(MAX_INPUT_TOKENS // 2)), message(words(MAX_INPUT_TOKENS // 2 + 1))]},
            "session.input",
        ),
        (
            {"delegation": {"type": "client", "acknowledgement_delay_ms": 60_000}},
            {"delegation": {"type": "client", "acknowledgement_delay_ms": 60_001}},
            "session.delegation.acknowledgement_delay_ms",
        ),
        ({"safety_identifier": "a" * 512}, {"safety_identifier": "a" * 513}, "session.safety_identifier"),
    ],
)
def test_limits(most: dict[str, Any], more: dict[str, Any], param: str) -> None:
    read_start({"model": "gpt-live-1", **most})
    assert refusal(more) == ("invalid_value", param)


def test_the_limit_of_an_append() -> None:
    content = words(MAX_APPEND_TOKENS)
    assert checked_append({"content": content, "delegation_id": None}) == (content, None)
    with pytest.raises(InvalidRequest, match="must not exceed 500 tokens"):
        checked_append({"content": words(MAX_APPEND_TOKENS + 1), "delegation_id": None})


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"audio": {"format": {"type": "audio/pcm", "rate": 24_000}}}, "unknown_parameter", "session.audio.format"),
        ({"idle_timeout_s": 30}, "unsupported_parameter", "session.idle_timeout_s"),
        ({"wake_policy": {"type": "speech"}}, "unsupported_parameter", "session.wake_policy"),
    ],
)
def test_a_session_over_webrtc_has_its_own_fields(fields: dict[str, Any], code: str, param: str) -> None:
    assert refusal(fields, media=True) == (code, param)


def test_an_update_may_be_empty() -> None:
    assert read_update({}).delegation is None
