"""Events of clients of the Realtime and the Live API: each is accepted, or refused with an error that can be sent.

The first byte chooses between wild events and typed ones. The bytes that follow are the wild event; or they choose one
of ``TYPED``, and what is changed in it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import harness

with harness.instrumented():
    import msgspec

    from omni_ws.core.chunks import Modality
    from omni_ws.errors import InvalidRequest
    from omni_ws.wire.live_session import (
        MAX_APPEND_TOKENS,
        checked_append,
        live_config,
        read_start,
        read_update,
        session_resource,
    )
    from omni_ws.wire.openai_fields import check_tools, object_field
    from omni_ws.wire.realtime_events import (
        Number,
        check_event,
        decode_event,
        encode_event,
        error_event,
        optional_id,
        read,
        read_item,
    )
    from omni_ws.wire.realtime_session import (
        RealtimeAbilities,
        SessionFields,
        TranslationAbilities,
        TranslationFields,
        merged_session,
        merged_translation,
        read_client_secret,
        read_response,
        response_config,
        session_config,
        session_object,
        translation_config,
        translation_object,
    )
    from omni_ws.wire.session_config import SessionConfig, effective, merge

_TYPED = 1
_ABLE = RealtimeAbilities(
    audio_output=True,
    text_output=True,
    turn_detection_types=("server_vad", "semantic_vad"),
    languages=frozenset({"en", "de"}),
    keywords=True,
    cleans_audio=True,
    temperature=True,
    max_tokens=True,
)
_UNABLE = RealtimeAbilities(
    audio_output=False,
    text_output=True,
    turn_detection_types=(),
    languages=frozenset(),
    keywords=False,
    cleans_audio=False,
    temperature=False,
    max_tokens=False,
)
_INTERPRETER = TranslationAbilities(
    speech_languages=frozenset({"en"}), voice_languages={"anna": "de"}, max_tokens=True, cleans_audio=True
)
_FUNCTION = {"type": "function", "name": "find", "description": "Finds it.", "parameters": {"type": "object"}}
_MESSAGE = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello."}]}
#: An event of each kind that a client may send, with most of the fields that it may have.
TYPED: tuple[dict[str, Any], ...] = (
    {
        "type": "session.update",
        "event_id": "event_1",
        "session": {
            "type": "realtime",
            "instructions": "Be brief.",
            "output_modalities": ["audio"],
            "audio": {
                "input": {
                    "format": {"type": "audio/pcm", "rate": 24000},
                    "transcription": {"model": "whisper-1", "language": "de", "prompt": "Lisbon"},
                    "noise_reduction": {"type": "near_field"},
                    "turn_detection": {
                        "type": "server_vad",
                        "threshold": 0.5,
                        "prefix_padding_ms": 300,
                        "silence_duration_ms": 500,
                        "create_response": True,
                        "interrupt_response": True,
                    },
                },
                "output": {"format": {"type": "audio/pcmu"}, "voice": "marin", "speed": 1.25},
            },
            "tools": [_FUNCTION],
            "tool_choice": {"type": "function", "name": "find"},
            "max_output_tokens": 100,
            "temperature": 0.8,
            "parallel_tool_calls": False,
            "reasoning": {"effort": "low"},
            "truncation": {
                "type": "retention_ratio",
                "retention_ratio": 0.5,
                "token_limits": {"post_instructions": 1000},
            },
        },
    },
    {"type": "session.update", "session": {"turn_detection": {"type": "semantic_vad", "eagerness": "low"}}},
    {
        "type": "session.update",
        "session": {"input_audio_format": "g711_ulaw", "modalities": ["text"], "voice": {"id": "v"}},
    },
    {"type": "transcription_session.update", "session": {"input_audio_transcription": {"model": "whisper-1"}}},
    {"type": "input_audio_buffer.append", "audio": "AAECAw=="},
    {"type": "conversation.item.create", "previous_item_id": "root", "item": _MESSAGE},
    {"type": "conversation.item.create", "item": {**_MESSAGE, "id": "item_1", "role": "system"}},
    {
        "type": "conversation.item.create",
        "item": {
            "type": "message",
            "role": "user",
            "content": [
                {"type": "input_audio", "audio": "AAECAw==", "transcript": "a"},
                {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo=", "detail": "high"},
            ],
        },
    },
    {
        "type": "conversation.item.create",
        "item": {**_MESSAGE, "role": "assistant", "content": [{"type": "output_audio", "transcript": "Hi."}]},
    },
    {
        "type": "conversation.item.create",
        "item": {"type": "function_call", "call_id": "call_1", "name": "find", "arguments": "{}"},
    },
    {
        "type": "conversation.item.create",
        "item": {"type": "function_call_output", "call_id": "call_1", "output": {"found": [1, None]}},
    },
    {"type": "conversation.item.truncate", "item_id": "item_1", "content_index": 0, "audio_end_ms": 1500},
    {
        "type": "response.create",
        "response": {
            "instructions": "Sing.",
            "input": [_MESSAGE],
            "metadata": {"name": "value"},
            "audio": {"output": {"voice": "marin"}},
            "conversation": "none",
            "max_output_tokens": "inf",
        },
    },
    {
        "type": "client_secret",
        "expires_after": {"anchor": "created_at", "seconds": 60},
        "session": {"type": "realtime"},
    },
    {
        "type": "session.start",
        "event_id": "event_2",
        "session": {
            "model": "gpt-live-1",
            "instructions": "Be brief.",
            "input": [
                {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "a"}]},
                {"role": "assistant", "status": "completed", "content": [{"type": "output_text", "text": "b"}]},
                {"role": "user", "id": "item_1", "content": [{"type": "input_text", "text": "c"}]},
            ],
            "audio": {"format": {"type": "audio/pcm", "rate": 16000}, "output": {"voice": {"id": "voice_1"}}},
            "delegation": {
                "type": "responses",
                "acknowledgement_delay_ms": 400,
                "responses": {
                    "model": "gpt-5.6-luna",
                    "instructions": "Look it up.",
                    "tools": [_FUNCTION, {"type": "web_search"}],
                    "tool_choice": "auto",
                    "parallel_tool_calls": False,
                    "reasoning": {"effort": "low"},
                    "text": {"verbosity": "low"},
                    "service_tier": "default",
                    "max_output_tokens": 16,
                },
            },
            "store": False,
            "safety_identifier": "user_1",
        },
    },
    {"type": "session.start", "session": {"model": "gpt-live-1", "delegation": {"type": "client"}}},
    {
        "type": "session.start",
        "session": {
            "model": "gpt-live-1",
            "audio": {"format": {"type": "audio/pcma", "rate": 8000}},
            "delegation": {"type": "decisions", "decisions": {"model": "m", "questions": []}},
            "triggers": [],
            "client": {"data_channel": {"allowed_client_events": "all"}},
            "idle_timeout_s": 5,
            "wake_policy": {"type": "speech", "vad_threshold": 0.5},
        },
    },
    {
        "type": "session.update",
        "live": True,
        "session": {"delegation": {"type": "responses", "responses": {"tools": []}}, "triggers": []},
    },
    {"type": "session.commentary.append", "delegation_id": None, "content": "The parcel is in Lisbon."},
    {"type": "session.thinking.append", "delegation_id": "item_1", "content": "Asked."},
    {"type": "session.instructions.append", "delegation_id": None, "content": "Speak English."},
    {"type": "session.input_audio.append", "audio": "AAECAw=="},
    {
        "type": "session.update",
        "session": {
            "type": "translation",
            "audio": {
                "input": {"transcription": {"model": "any"}, "noise_reduction": {"type": "far_field"}},
                "output": {"language": "de-AT"},
            },
        },
    },
)
#: What a value may be changed to.
_ODD: tuple[Any, ...] = (
    None, True, 0, -1, 0.5, 1 << 53, 1 << 64, 1e308, "", " ", "\0", "\U0001f642", "a" * 300, "data:,", "https://a/b",
    "inf", "audio/pcm", "semantic_vad", [], [None], [[]], {}, {"": 0}, {"type": None}, {"type": "function"}, _FUNCTION,
    _MESSAGE,
)  # fmt: skip


class Choices:
    """Choices that bytes make; the first of all where they are used up."""

    def __init__(self, data: bytes) -> None:
        self._data = iter(data)

    def below(self, count: int) -> int:
        return next(self._data, 0) % count if count else 0


def check(data: bytes) -> None:
    is_typed = bool(data[:1]) and data[0] % 2 == _TYPED
    data = msgspec.json.encode(typed(Choices(data[1:]))) if is_typed else data[1:]
    try:
        event = decode_event(data)
        check_event(event)
    except InvalidRequest as error:
        _can_be_told(error)
        return
    for reads in (_read_realtime, _read_translation, _read_live):
        try:
            reads(event)
        except InvalidRequest as error:
            _can_be_told(error)


def typed(choices: Choices) -> Any:
    """An event of ``TYPED``, changed in as many places as the bytes want, four at most."""
    event = copy.deepcopy(TYPED[choices.below(len(TYPED))])
    for _ in range(choices.below(5)):
        _change(event, choices)
    return event


def _change(event: dict[str, Any], choices: Choices) -> None:
    holder: Any = event
    while True:
        keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        if not keys:
            return
        key = keys[choices.below(len(keys))]
        if isinstance(holder[key], dict | list) and choices.below(3):
            holder = holder[key]
            continue
        match choices.below(4):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, dict):
                name = ("unknown", "id", "type", "tools", "audio")[choices.below(5)]
                holder[name] = copy.deepcopy(holder[key])
            case 2:
                holder[key] = [copy.deepcopy(holder[key]) for _ in range(choices.below(4))]
            case _:
                holder[key] = copy.deepcopy(_ODD[choices.below(len(_ODD))])
        return


def _read_realtime(event: Mapping[str, Any]) -> None:
    event_id = optional_id(event.get("event_id"), "event_id")
    assert event_id is None or event_id
    match event["type"]:
        case "session.update" | "transcription_session.update":
            for able in (_ABLE, _UNABLE):
                _check_session(object_field(event, "session"), able)
        case "conversation.item.create":
            item = read_item(object_field(event, "item"), "item_new")
            assert item.item_id
            assert encode_event(item.shown())
            assert item.size >= sum(len(chunk.payload) for chunk in item.chunks)
            assert all(type(chunk.payload) is bytes and chunk.modality in Modality for chunk in item.chunks)
        case "conversation.item.truncate":
            optional_id(event.get("item_id"), "item_id")
            assert 0 <= read(event.get("audio_end_ms"), Number, "audio_end_ms") < 1 << 53
        case "response.create":
            response = read_response(object_field(event, "response"))
            for able in (_ABLE, _UNABLE):
                _in_effect(response_config(response, able))
            for index, one in enumerate(response.input or ()):
                read_item(one, "item_new", place=f"response.input[{index}]")
        case "input_audio_buffer.append":
            assert type(read(event.get("audio"), bytes, "audio")) is bytes
        case "client_secret":  # not an event: the body of POST /v1/realtime/client_secrets
            secret = read_client_secret(event)
            assert 10 <= secret.lifetime <= 7200
            merged_session(SessionFields(), secret.session or {})


def _check_session(patch: Mapping[str, Any], able: RealtimeAbilities) -> None:
    session = merged_session(SessionFields(), patch)
    assert merged_session(session, patch) == session
    config = _in_effect(session_config(session, able))
    assert encode_event({"type": "session.updated", "session": session_object(session, config, session_id="sess_1")})


def _in_effect(fields: Mapping[str, Any]) -> SessionConfig:
    config = effective(merge({}, fields))
    check_tools(config.tools, config.tool_choice)
    return config


def _read_translation(event: Mapping[str, Any]) -> None:
    if event["type"] == "session.update":
        session = merged_translation(TranslationFields(), object_field(event, "session"))
        assert merged_translation(session, {}) == session
        _in_effect(translation_config(session, _INTERPRETER))
        assert encode_event(translation_object(session, session_id="sess_1", model="any", expires_at=1))


def _read_live(event: Mapping[str, Any]) -> None:
    match event["type"]:
        case "session.start":
            fields = object_field(event, "session")
            for media in (False, True):
                _check_start(fields, media=media)
        case "session.update":
            read_update(object_field(event, "session"))
        case "session.commentary.append" | "session.thinking.append" | "session.instructions.append":
            content, delegation_id = checked_append(event)
            assert content.strip()
            assert len(content) <= MAX_APPEND_TOKENS * 64
            assert delegation_id is None or isinstance(delegation_id, str)
        case "session.input_audio.append":
            assert type(read(event.get("audio"), bytes, "audio")) is bytes


def _check_start(fields: Mapping[str, Any], *, media: bool) -> None:
    try:
        start = read_start(fields, media=media)
    except InvalidRequest as error:
        _can_be_told(error)
        return
    assert all(message.text is not None for message in start.messages())
    _in_effect(live_config(start, turn_detection="server_vad", tools=()))
    assert encode_event(session_resource(start, session_id="live_1", expires_at=1, voice=None))


def _can_be_told(error: InvalidRequest) -> None:
    told = encode_event(error_event(error, event_id="event_1"))
    assert len(told) < 4096, told
    assert error.message
    assert error.param is None or error.param


def seeds() -> Iterator[bytes]:
    for number, event in enumerate(TYPED):
        yield bytes([0]) + msgspec.json.encode(event)
        yield bytes([_TYPED, number])
        yield bytes([_TYPED, number, 2, 1, 1, 0, 3, 5, 1, 2, 0, 3, 9])
    yield bytes([0]) + b'{"type":7}'
    yield bytes([0]) + b"[]"
    yield bytes([0]) + b'{"type":"session.update","session":' + b'{"audio":' * 200 + b"1" + b"}" * 201


if __name__ == "__main__":
    harness.fuzz(check, seeds)
