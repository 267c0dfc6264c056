"""Bodies of the OpenAI-compatible routes, without a server; tests/transport has the refusals over the wire."""

from __future__ import annotations

import base64
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_ws.core.chunks import MAX_FORMAT_CHARACTERS, InputChunk, Modality
from omni_ws.errors import EmptyInput, InvalidRequest, InvalidValue, UnsupportedFormat, UnsupportedParameter
from omni_ws.wire.openai_fields import ConfigurationPatch
from omni_ws.wire.openai_requests import (
    MAX_MESSAGES,
    MAX_PROMPT_TOKENS,
    HistoryMessage,
    Messages,
    SpeechDialect,
    chat_wants_events,
    read_chat,
    read_completion,
    read_speech,
    speech_wants_events,
)

USER = {"role": "user", "content": "hello"}
#: Values that a client may send for any field.
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def chat(**body: Any) -> Any:
    return read_chat({"messages": [USER], **body}, input_follows=False)


def speech(**body: Any) -> Any:
    return read_speech({"input": "hello", **body}, input_follows=False)


def test_a_plain_chat() -> None:
    request = chat()
    assert request.input == (InputChunk(Modality.TEXT, b"hello"),)
    assert request.history == ()
    assert request.stream is None
    assert (request.wants_text, request.wants_audio) == (True, False)
    assert (request.include_usage, request.usage_on_final_chunk, request.input_transcript) == (False, True, True)
    assert request.patch.fields == {"sampling": {}, "modalities": ["text"]}


def test_messages_are_all_history_where_the_input_follows() -> None:
    request = read_chat({"messages": [USER]}, input_follows=True)
    assert request.input == ()
    assert request.history == (HistoryMessage("user", "hello"),)
    assert read_chat({}, input_follows=True).history == ()


def test_the_patch_has_the_fields_of_a_configuration_and_nothing_else() -> None:
    fields = chat(start_policy="on_end_only", user="me", voice="x", max_lead_ms=5, sampling={"seed": 1}).patch.fields
    assert fields == {
        "start_policy": "on_end_only",
        "voice": "x",
        "sampling": {"seed": 1},
        "modalities": ["text"],
    }


@pytest.mark.parametrize(
    ("body", "sampling"),
    [
        ({"max_tokens": 5}, {"max_tokens": 5}),
        ({"max_tokens": 5, "max_completion_tokens": 3}, {"max_tokens": 3}),
        ({"max_tokens": 5, "max_completion_tokens": 0}, {"max_tokens": 5}),
        ({"max_tokens": 0}, {}),
        ({"max_tokens": None, "temperature": None}, {}),
        ({"sampling": {"temperature": 1, "top_p": 0.5}, "temperature": 0.1}, {"temperature": 0.1, "top_p": 0.5}),
        ({"presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1, "min_p": 0, "top_k": -1}, {}),
        ({"presence_penalty": 0.5}, {"presence_penalty": 0.5}),
        # Equal to the neutral number, but of the wrong type, which must be refused.
        ({"presence_penalty": False}, {"presence_penalty": False}),
    ],
)
def test_sampling(body: dict[str, Any], sampling: dict[str, Any]) -> None:
    assert chat(**body).patch.fields["sampling"] == sampling


def test_names_in_the_body() -> None:
    patch = chat(
        stop=["a"],
        max_completion_tokens=5,
        modalities=["text", "audio"],
        audio={"voice": "x", "format": "mp3"},
        sampling={"top_p": 1},
    ).patch
    for ours, theirs in (
        ("sampling.stop", "stop"),
        ("sampling.stop[0]", "stop[0]"),
        ("sampling.max_tokens", "max_completion_tokens"),
        ("sampling.top_p", "sampling.top_p"),
        ("output_audio.format", "audio.format"),
        ("voice", "audio.voice"),
        ("modality", "messages"),
        # Fields that the client did not send.
        ("output_audio.sample_rate", None),
        ("start_policy.type", None),
        (None, None),
    ):
        assert patch.name_in_body(ours) == theirs
    patch = ConfigurationPatch({}, {"sampling.stop": "stop"}, frozenset({"sampling"}))
    assert patch.name_in_body("sampling.stopping") == "sampling.stopping"
    assert patch.name_in_body("format") == "format"  # a field of a chunk


@pytest.mark.parametrize(
    ("body", "encoding"),
    [
        ({"stream": True}, "pcm16"),
        ({}, "wav"),
        ({"stream": False}, "wav"),
        ({"audio": {"format": "mp3"}}, "mp3"),
        ({"audio": {"format": "pcm"}}, "pcm16"),
        ({"audio": {"format": "g711_ulaw"}}, "pcmu"),
        ({"audio": {"format": "g711_alaw"}}, "pcma"),
        ({"output_audio": {"format": "flac"}}, "flac"),
        ({"output_audio": {"format": "flac"}, "audio": {"format": "opus"}}, "opus"),
    ],
)
def test_audio_formats_of_chat(body: dict[str, Any], encoding: str) -> None:
    patch = chat(modalities=["text", "audio"], **body).patch
    assert patch.fields["output_audio"]["format"] == encoding


def test_text_alone_needs_no_audio_format() -> None:
    assert "output_audio" not in chat(audio={"format": "mp3"}).patch.fields
    assert chat(modalities=["audio"]).patch.fields["modalities"] == ["text", "audio"]


# --- messages


def test_instructions_come_from_every_system_message() -> None:
    messages = Messages(
        [
            {"role": "system", "content": "one"},
            {"role": "developer", "content": [{"type": "text", "text": "two"}]},
            {"role": "assistant"},
            USER,
        ],
        input_follows=False,
    )
    assert messages.system == ["one", "two"]
    assert messages.history == [HistoryMessage("assistant", "")]


@pytest.mark.parametrize(
    ("part", "error", "place"),
    [
        ({"type": "input_audio", "input_audio": {"data": 5}}, InvalidValue, "input_audio.data"),
        ({"type": "input_audio", "input_audio": {"data": "?"}}, InvalidValue, "input_audio.data"),
        ({"type": "input_audio", "input_audio": {"data": "", "format": 5}}, InvalidValue, "input_audio.format"),
        (
            {"type": "input_audio", "input_audio": {"data": "", "format": "aiff"}},
            UnsupportedFormat,
            "input_audio.format",
        ),
        ({"type": "image_url", "image_url": "ftp://x"}, UnsupportedParameter, "image_url.url"),
        ({"type": "video_url", "video_url": "data:image/png;base64,"}, UnsupportedFormat, "video_url.url"),
        ({"type": "file", "file": {}}, InvalidValue, "type"),
        ({}, InvalidValue, "type"),
    ],
)
def test_parts_that_are_none(part: dict[str, Any], error: type[InvalidRequest], place: str) -> None:
    with pytest.raises(error) as caught:
        Messages([{"role": "user", "content": [part]}], input_follows=False)
    assert caught.value.param == f"messages[0].content[0].{place}"


@given(st.binary(max_size=50), st.sampled_from(["image/png", "IMAGE/PNG", "image/svg+xml;charset=utf-8"]))
def test_data_urls(data: bytes, kind: str) -> None:
    data = b"GIF89a" + data
    url = f"data:{kind};base64,{base64.b64encode(data).decode()}"
    (chunk,) = Messages(
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}], input_follows=False
    ).input
    assert chunk == InputChunk(Modality.IMAGE, data, format=kind.partition(";")[0].lower())


@pytest.mark.parametrize(
    "url",
    [
        *("data:image/gif;base64,{bare}", "data:image/gif;base64,{escaped}", "data:image/gif;base64,{lines}"),
        *("data:image/gif; base64,{padded}", " \nDATA:IMAGE/GIF ; charset=x;\tBASE64 ,{padded}#part"),
        *("data:image/gif;base64,%20{padded}%0A", "data:image/gif,{percent}", "data:image/g\nif,\t{percent}"),
    ],
)
def test_data_urls_as_the_url_standard_has_them(url: str) -> None:
    data = b"GIF89a\xfb\xef\xbe\xff"
    padded = base64.b64encode(data).decode()
    assert padded.endswith("==")
    assert {"+", "/"} <= set(padded)
    url = url.format(
        padded=padded,
        bare=padded.rstrip("="),
        escaped="".join(f"%{ord(one):02x}" for one in padded),
        lines="\r\n".join(padded),
        percent="".join(f"%{one:02X}" for one in data),
    )
    content = [{"type": "image_url", "image_url": {"url": url}}]
    (chunk,) = Messages([{"role": "user", "content": content}], input_follows=False).input
    assert chunk == InputChunk(Modality.IMAGE, data, format="image/gif")
    (item,) = chat(images=[url]).input[:1]
    assert item == chunk


@pytest.mark.parametrize("data", ["A", "AA=A", "AAAA=", "A===", "AA-_", "AA\N{LATIN SMALL LETTER E WITH ACUTE}A"])
def test_what_is_no_base64_by_the_url_standard(data: str) -> None:
    content = [{"type": "image_url", "image_url": {"url": f"data:image/gif;base64,{data}"}}]
    with pytest.raises(InvalidValue, match="not base64"):
        Messages([{"role": "user", "content": content}], input_follows=False)


@pytest.mark.parametrize("follows", [False, True])
def test_the_longest_conversation_and_one_message_more(follows: bool) -> None:
    messages = [{"role": "user", "content": "a"}] * MAX_MESSAGES
    assert len(Messages(messages, input_follows=follows).history) == MAX_MESSAGES - (not follows)
    with pytest.raises(InvalidValue, match="at most") as caught:
        Messages([*messages, *messages[:1]], input_follows=follows)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("kind", "parameters"),
    [("image", ""), ("audio", ";rate=" + "1" * 10)],
)
def test_a_media_type_has_a_longest_length(kind: str, parameters: str) -> None:
    def read(characters: int) -> InputChunk:
        name = f"{kind}/".ljust(characters - len(parameters), "x")
        url = f"data:{name}{parameters};base64,{base64.b64encode(b'GIF89a').decode()}"
        content = [{"type": f"{kind}_url", f"{kind}_url": {"url": url}}]
        (chunk,) = Messages([{"role": "user", "content": content}], input_follows=False).input
        assert isinstance(chunk, InputChunk)
        return chunk

    assert len(read(MAX_FORMAT_CHARACTERS).format or "") == MAX_FORMAT_CHARACTERS
    with pytest.raises(UnsupportedFormat) as caught:
        read(MAX_FORMAT_CHARACTERS + 1)
    assert caught.value.param == f"messages[0].content[0].{kind}_url.url"


# --- speech


@pytest.mark.parametrize(
    ("body", "follows", "dialect", "encoding"),
    [
        ({}, False, SpeechDialect.WHOLE, "mp3"),
        ({"stream": False}, False, SpeechDialect.WHOLE, "mp3"),
        ({"stream": True}, False, SpeechDialect.CHUNKS, "pcm16"),
        ({"stream_format": "sse"}, False, SpeechDialect.EVENTS, "pcm16"),
        ({"stream_format": "audio"}, False, SpeechDialect.RAW, "pcm16"),
        ({"stream_format": "audio", "stream": True}, False, SpeechDialect.RAW, "pcm16"),
        ({"stream_format": "sse", "stream": True, "response_format": "mp3"}, False, SpeechDialect.EVENTS, "mp3"),
        ({}, True, SpeechDialect.RAW, "pcm16"),
        ({"stream": True}, True, SpeechDialect.CHUNKS, "pcm16"),
        ({"stream": False}, True, SpeechDialect.WHOLE, "mp3"),
        ({"stream": False, "stream_format": "sse"}, True, SpeechDialect.EVENTS, "pcm16"),
        ({"output_audio": {"format": "opus"}}, True, SpeechDialect.RAW, "opus"),
    ],
)
def test_dialects(body: dict[str, Any], follows: bool, dialect: SpeechDialect, encoding: str) -> None:
    request = read_speech(body if follows else {"input": "a", **body}, input_follows=follows)
    assert request.dialect is dialect
    assert request.patch.fields["output_audio"]["format"] == encoding
    assert request.patch.fields["task"] == "speech"
    assert request.patch.fields["modalities"] == ["audio"]


def test_what_the_format_is_called_in_events() -> None:
    assert speech(stream=True).response_format == "pcm"
    assert speech(stream=True, response_format="mp3").response_format == "mp3"
    assert speech(stream=True, output_audio={"format": "wav"}).response_format == "wav"


def test_the_text_of_speech() -> None:
    assert speech().text == "hello"
    with pytest.raises(EmptyInput):
        speech(input=" ")
    with pytest.raises(InvalidValue):
        speech(input=None)
    with pytest.raises(InvalidValue):
        read_speech({"input": "a"}, input_follows=True)
    assert read_speech({"input": ""}, input_follows=True).text == ""


def test_voices_by_name_and_by_id() -> None:
    assert speech(voice="a").patch.fields["voice"] == "a"
    patch = speech(voice={"id": "b"}).patch
    assert (patch.fields["voice"], patch.name_in_body("voice")) == ("b", "voice.id")
    assert speech(voice={}).patch.fields["voice"] is None


def test_who_wants_events() -> None:
    assert chat_wants_events({"stream": True})
    assert not chat_wants_events({"stream": 1})
    assert not chat_wants_events({})
    assert speech_wants_events({"stream": True})
    assert speech_wants_events({"stream_format": "sse"})
    assert not speech_wants_events({"stream": True, "stream_format": "audio"})
    assert not speech_wants_events({"input": "a"})


# --- anything at all

CHAT_FIELDS = ["messages", "modalities", "audio", "stream", "stream_options", "max_tokens", "sampling", "output_audio"]
CHAT_FIELDS += [
    "instructions",
    "voice",
    "tools",
    "n",
    "response_format",
    "request_id",
    "input_transcript",
    "logit_bias",
]
SPEECH_FIELDS = ["input", "voice", "response_format", "speed", "stream_format", "stream", "output_audio", "sampling"]


@given(st.dictionaries(st.sampled_from(CHAT_FIELDS), JSON), st.booleans())
def test_any_chat_body_is_read_or_refused(body: dict[str, Any], input_follows: bool) -> None:
    with suppress(InvalidRequest):
        request = read_chat(body, input_follows=input_follows)
        assert request.input_transcript in (True, False)
        assert input_follows or request.input or body["messages"]


@given(st.dictionaries(st.sampled_from(SPEECH_FIELDS), JSON), st.booleans())
def test_any_speech_body_is_read_or_refused(body: dict[str, Any], input_follows: bool) -> None:
    with suppress(InvalidRequest):
        request = read_speech(body, input_follows=input_follows)
        assert input_follows or (request.text or "").strip()


@given(
    st.lists(st.dictionaries(st.sampled_from(["role", "content", "tool_calls"]), JSON | st.just("user")), max_size=3)
)
def test_any_messages_are_read_or_refused(messages: list[dict[str, Any]]) -> None:
    place: str | None = "messages"
    try:
        Messages(messages, input_follows=False)
    except InvalidRequest as error:
        place = error.param
    assert (place or "").startswith("messages")


@pytest.mark.parametrize("past", [0, 1])
def test_a_prompt_has_so_many_token_ids(past: int) -> None:
    prompt = [7] * (MAX_PROMPT_TOKENS + past)
    if not past:
        assert len(read_completion({"prompt": prompt}).prompts[0]) == MAX_PROMPT_TOKENS
        return
    with pytest.raises(InvalidValue) as refused:
        read_completion({"prompt": [prompt]})
    assert refused.value.param == "prompt[0]"


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ("json", "response_format"),
        ({"type": "jsonx"}, "response_format.type"),
        ({}, "response_format.type"),
        ({"type": "json_schema"}, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": {"schema": {}}}, "response_format.json_schema.name"),
    ],
)
def test_a_bad_form_of_the_answer_is_told_with_the_good_ones(value: Any, param: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        chat(response_format=value)
    assert caught.value.param == param
    assert '{"type": "json_object"}' in caught.value.message


def test_a_bad_format_of_audio_is_told_with_those_that_are_known() -> None:
    with pytest.raises(UnsupportedFormat, match=r"unsupported audio format 'aiff'; supported: .*mp3.*wav") as caught:
        read_speech({"input": "a", "response_format": "aiff"}, input_follows=False)
    assert caught.value.param == "response_format"
