"""The exact order of stream chunks, and whole objects, for given outputs."""

from __future__ import annotations

import base64
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from omni_ws.core.chunks import FinalChunk, FinishReason, OutputChunk, OutputModality, Usage
from omni_ws.wire.openai_responses import (
    AUDIO_EXPIRES_SEC,
    Base64Stream,
    ChatCompletion,
    ChatStream,
    ResponseOptions,
    SpeechChunks,
    SpeechEvents,
    ended_normally,
    usage_object,
)
from omni_ws.wire.server_frames import event

USAGE = Usage(input_tokens=2, output_tokens=3, input_audio_ms=100, output_audio_ms=200, input_after_start_bytes=7)
FINAL = FinalChunk(request_id="req_1", sequence_id=9, finish_reason=FinishReason.STOP, usage=USAGE)


def options(**fields: Any) -> ResponseOptions:
    return ResponseOptions(completion_id="chatcmpl-a-b", created=1000, model="m", **fields)


def text(said: str) -> OutputChunk:
    return OutputChunk(request_id="req_1", sequence_id=0, modality=OutputModality.TEXT, text=said)


def audio(payload: bytes) -> OutputChunk:
    return OutputChunk(request_id="req_1", sequence_id=0, modality=OutputModality.AUDIO, payload=payload)


def heard(said: str, *, interim: bool = False) -> OutputChunk:
    return OutputChunk(
        request_id="req_1", sequence_id=0, modality=OutputModality.TRANSCRIPT, text=said, interim=interim, start_ms=4
    )


def stream(outputs: list[OutputChunk], final: FinalChunk = FINAL, **fields: Any) -> list[dict[str, Any]]:
    encoder = ChatStream(options(**fields))
    chunks = [chunk for output in outputs for chunk in encoder.output(output)]
    # Parsed from the wire, because some chunks are built as JSON.
    return [orjson.loads(event(chunk).removeprefix(b"data: ")) for chunk in (*chunks, *encoder.final(final))]


def deltas(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]


def test_every_chunk_has_its_whole_head() -> None:
    for chunk in stream([text("a"), heard("b")], include_usage=True):
        assert (chunk["id"], chunk["object"]) == ("chatcmpl-a-b", "chat.completion.chunk")
        assert (chunk["created"], chunk["model"]) == (1000, "m")


def test_role_content_terminal() -> None:
    chunks = stream([text("a"), text("b")])
    assert [chunk["choices"] for chunk in chunks] == [
        [{"index": 0, "delta": {"role": "assistant"}, "finish_reason": None}],
        [{"index": 0, "delta": {"content": "a"}, "finish_reason": None}],
        [{"index": 0, "delta": {"content": "b"}, "finish_reason": None}],
        [{"index": 0, "delta": {}, "finish_reason": "stop"}],
    ]
    assert all("usage" not in chunk for chunk in chunks)


@given(st.text(), st.text(), st.integers(0, 1))
def test_any_text_of_any_model_and_choice(said: str, model: str, choice: int) -> None:
    encoder = ChatStream(ResponseOptions(completion_id='""', created=1, model=model, choices=2))
    *_, chunk = encoder.output(replace(text(said), choice=choice))
    assert orjson.loads(event(chunk).removeprefix(b"data: ")) == {
        "id": '""',
        "object": "chat.completion.chunk",
        "created": 1,
        "model": model,
        "choices": [{"index": choice, "delta": {"content": said}, "finish_reason": None}],
    }


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.TOOL_CALLS])
def test_finish_reasons(reason: FinishReason) -> None:
    final = FinalChunk(request_id="req_1", sequence_id=0, finish_reason=reason, usage=USAGE)
    assert stream([], final)[-1]["choices"][0]["finish_reason"] == reason.value
    assert ended_normally(final)


@pytest.mark.parametrize("reason", [FinishReason.CANCELLED, FinishReason.ERROR])
def test_reasons_that_http_has_no_word_for(reason: FinishReason) -> None:
    assert not ended_normally(FinalChunk(request_id="req_1", sequence_id=0, finish_reason=reason, usage=USAGE))


def test_usage() -> None:
    assert usage_object(USAGE) == {
        "prompt_tokens": 2,
        "completion_tokens": 3,
        "total_tokens": 5,
        "input_audio_ms": 100,
        "output_audio_ms": 200,
        "input_after_start_bytes": 7,
    }
    own = stream([text("a")], include_usage=True)
    assert (own[-1]["choices"], own[-1]["usage"]["total_tokens"]) == ([], 5)
    on_terminal = stream([text("a")], include_usage=True, usage_on_final_chunk=True)
    assert on_terminal[-1]["choices"][0]["finish_reason"] == "stop"
    assert on_terminal[-1]["usage"]["total_tokens"] == 5


def test_transcripts_have_no_choices_and_come_after_the_role() -> None:
    chunks = stream([heard("a", interim=True), heard("b"), text("c")])
    assert deltas(chunks) == [{"role": "assistant"}, {"content": "c"}, {}]
    assert [chunk["input_transcript"] for chunk in chunks if "input_transcript" in chunk] == [
        {"text": "a", "interim": True, "start_ms": 4},
        {"text": "b", "interim": False, "start_ms": 4},
    ]
    assert stream([heard("a")], input_transcript=False) == stream([])


def test_transcripts_that_are_off_bring_no_role() -> None:
    encoder = ChatStream(options(input_transcript=False))
    assert list(encoder.output(heard("a"))) == []


@given(st.lists(st.binary(max_size=10) | st.text(max_size=3), max_size=12), st.booleans())
def test_audio_joins_to_what_went_in(outputs: list[bytes | str], wants_text: bool) -> None:
    chunks = stream(
        [audio(one) if isinstance(one, bytes) else text(one) for one in outputs],
        wants_audio=True,
        wants_text=wants_text,
    )
    said = [delta["audio"] for delta in deltas(chunks) if "audio" in delta]
    pieces = [one["data"] for one in said if "data" in one]
    assert all(pieces)
    assert all(len(piece) % 4 == 0 and "=" not in piece for piece in pieces[:-1])
    everything = b"".join(one for one in outputs if isinstance(one, bytes))
    assert base64.b64decode("".join(pieces), validate=True) == everything
    words = "".join(one for one in outputs if isinstance(one, str))
    assert "".join(one.get("transcript", "") for one in said) == words
    contents = "".join(delta.get("content", "") for delta in deltas(chunks))
    assert contents == (words if wants_text else "")
    if said:
        assert [set(one) >= {"id"} for one in said] == [True] + [False] * (len(said) - 1)
        assert said[0]["id"] == "audio_a-b"
        assert said[-1] == {"expires_at": 1000 + AUDIO_EXPIRES_SEC}
    assert deltas(chunks)[-1] == {}


@given(st.lists(st.binary(max_size=20)))
def test_base64_in_pieces_is_base64_of_the_whole(pieces: list[bytes]) -> None:
    encoder = Base64Stream()
    joined = "".join([*map(encoder.feed, pieces), encoder.finish()])
    assert joined == base64.b64encode(b"".join(pieces)).decode()


# --- whole responses


def whole(outputs: list[OutputChunk], *, file: bytes | None = None, **fields: Any) -> dict[str, Any]:
    completion = ChatCompletion(options(**fields))
    for output in outputs:
        completion.output(output)
    return completion.final(FINAL, audio=file)


def test_a_completion() -> None:
    completion = whole([heard("x", interim=True), heard("y"), heard("z"), text("a"), text("b")])
    assert completion == {
        "id": "chatcmpl-a-b",
        "object": "chat.completion",
        "created": 1000,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "ab", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": usage_object(USAGE),
        "input_transcript": {"text": "y z"},
    }
    assert "input_transcript" not in whole([heard("y")], input_transcript=False)


def test_a_completion_with_audio() -> None:
    outputs = [text("a"), audio(b"12"), audio(b"3")]
    message = whole(outputs, wants_audio=True, wants_text=False)["choices"][0]["message"]
    assert message["content"] is None
    assert message["audio"] == {
        "id": "audio_a-b",
        "data": base64.b64encode(b"123").decode(),
        "expires_at": 1000 + AUDIO_EXPIRES_SEC,
        "transcript": "a",
    }
    message = whole(outputs, wants_audio=True, file=b"RIFF")["choices"][0]["message"]
    assert base64.b64decode(message["audio"]["data"]) == b"RIFF"
    assert message["content"] == "a"


def test_a_spoken_refusal_is_in_the_transcript_that_is_kept() -> None:
    completion = ChatCompletion(options(wants_audio=True))
    completion.output(replace(text("I cannot."), refusal=True))
    assert completion.spoken == "I cannot."
    message = completion.final(FINAL)["choices"][0]["message"]
    assert (message["audio"]["transcript"], message["refusal"]) == ("I cannot.", "I cannot.")


# --- speech


def test_speech_events() -> None:
    encoder = SpeechEvents()
    assert list(encoder.output(text("psst"))) == []
    assert list(encoder.output(audio(b"1"))) == [{"type": "speech.audio.delta", "audio": "MQ=="}]
    assert list(encoder.final(FINAL)) == [
        {"type": "speech.audio.done", "usage": {"input_tokens": 2, "output_tokens": 3, "total_tokens": 5}}
    ]


def test_speech_chunks() -> None:
    encoder = SpeechChunks("speech-1", "pcm", "audio/pcm", 24_000)
    assert list(encoder.output(text("psst"))) == []
    said = [*encoder.output(audio(b"1")), *encoder.output(audio(b"2")), *encoder.final(FINAL)]
    assert [one["index"] for one in said] == [0, 1, 2]
    assert said[0] == {
        "id": "speech-1",
        "object": "audio.speech.chunk",
        "index": 0,
        "audio": {"data": "MQ==", "format": "pcm", "mime_type": "audio/pcm", "sample_rate": 24_000},
        "finish_reason": None,
    }
    assert (said[2]["audio"], said[2]["finish_reason"], said[2]["usage"]) == (None, "stop", usage_object(USAGE))


@pytest.mark.parametrize(("cached", "details"), [(None, None), (0, {"cached_tokens": 0}), (7, {"cached_tokens": 7})])
def test_cached_tokens_are_told_where_they_are_known(cached: int | None, details: Any) -> None:
    assert usage_object(Usage(cached_tokens=cached)).get("prompt_tokens_details") == details
