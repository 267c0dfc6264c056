"""The dialects of streamed chat answers, and what breaks them."""

from __future__ import annotations

import base64
import io
import json
import wave
from random import Random
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.scripted_upstream import finish

from omni_ws.core.chunks import FinishReason
from omni_ws.engine.base import AudioOutput, EngineOutput, TextOutput, ThoughtOutput, ToolCallOutput, TranscriptOutput
from omni_ws.engine.remote.answer_stream import ChatAnswer
from omni_ws.engine.remote.event_stream import ServerSentEvent, UpstreamAudio
from omni_ws.errors import EngineFailed

TONE = (np.sin(np.arange(24_000) / 9) * 20_000).astype("<i2")


def reader() -> ChatAnswer:
    return ChatAnswer(sample_rate=24_000)


def read(answer: ChatAnswer, *events: Any, done: bool = True) -> list[EngineOutput]:
    outputs: list[EngineOutput] = []
    for event in events:
        data = event if isinstance(event, bytes) else orjson.dumps(event)
        outputs += answer.read(ServerSentEvent("message", data))
    if done:
        outputs += answer.read(ServerSentEvent("message", b"[DONE]"))
    return outputs


def delta(content: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": content, "finish_reason": None}], **more}


def audio(data: bytes, **more: Any) -> dict[str, Any]:
    return delta({"audio": {"data": base64.b64encode(data).decode(), **more}})


def wav(samples: np.ndarray[Any, Any], rate: int = 24_000) -> bytes:
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples.astype("<i2").tobytes())
    return buffer.getvalue()


def samples(outputs: list[EngineOutput]) -> np.ndarray[Any, Any]:
    blocks = [output.samples for output in outputs if isinstance(output, AudioOutput)]
    return np.rint(np.concatenate(blocks) * 32768).astype(int) if blocks else np.zeros(0, int)


def finished(answer: ChatAnswer) -> Any:
    return answer.finished(input_words=5, input_audio_ms=70)


def test_text_and_usage() -> None:
    answer = reader()
    outputs = read(
        answer,
        delta({"role": "assistant", "content": ""}),
        delta({"content": "Hel"}),
        delta({"content": "lo"}),
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]},
        {"choices": [], "usage": {"prompt_tokens": 11, "completion_tokens": 2, "input_audio_ms": 40}},
    )
    assert outputs == [TextOutput("Hel"), TextOutput("lo")]
    assert answer.done
    end = finished(answer)
    assert end.reason is FinishReason.LENGTH
    assert (end.usage.input_tokens, end.usage.output_tokens, end.usage.input_audio_ms) == (11, 2, 40)


def test_usage_is_counted_where_none_is_told() -> None:
    answer = reader()
    read(answer, delta({"content": "one t"}), delta({"content": "wo three"}), {"usage": {"prompt_tokens": True}})
    usage = finished(answer).usage
    assert (usage.input_tokens, usage.output_tokens, usage.input_audio_ms) == (5, 3, 70)


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("stop", "stop"),
        ("length", "length"),
        ("tool_calls", "stop"),  # nobody is to wait for the result of none
        ("content_filter", "stop"),
        ("content_filter\n", "stop"),
        ("insufficient_system_resource", "stop"),
        ("", "stop"),
        (None, "stop"),
    ],
)
def test_finish_reasons(reason: str | None, expected: str) -> None:
    answer = reader()
    read(answer, {"choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": reason}]})
    assert finished(answer).reason == expected
    foreign = () if reason in ("stop", "length", "tool_calls", "", None) else (reason.strip(),)
    assert finished(answer).foreign_reasons == foreign
    assert [one.code for one in finished(answer).warnings] == ["finish_reason"] * len(foreign)


@pytest.mark.parametrize("reason", ["abort", "error", "cancelled"])
def test_an_answer_that_was_given_up(reason: str) -> None:
    with pytest.raises(EngineFailed, match="gave up"):
        read(reader(), {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})


def test_what_was_heard() -> None:
    heard = [
        {"choices": [], "input_transcript": {"text": "go", "interim": True, "start_ms": 20}},
        {"choices": [], "input_transcript": {"text": "go forward", "interim": False, "start_ms": None}},
    ]
    assert read(reader(), *heard, done=False) == [
        TranscriptOutput("go", interim=True, start_ms=20),
        TranscriptOutput("go forward"),
    ]


def test_other_choices_are_left_out() -> None:
    events = [
        {"choices": [{"index": 1, "delta": {"content": "no"}}]},
        delta({"reasoning_content": "hm", "reasoning": "hm"}),
        delta({"content": None, "tool_calls": None}),
        {"choices": [{"delta": {"content": "yes"}}]},
        {"choices": [None, {"index": 0, "delta": None}]},
        {"choices": None},
        {},
    ]
    assert read(reader(), *events) == [ThoughtOutput("hm"), TextOutput("yes")]


# audio


@pytest.mark.parametrize("size", [1000, 999, 48_000, 7])
def test_bare_samples_cut_anywhere(size: int) -> None:
    """OpenAI's way: 16-bit samples, each delta with base64 of its own."""
    data = TONE[:2000].tobytes()
    answer = reader()
    outputs = read(answer, *(audio(data[place : place + size]) for place in range(0, len(data), size)))
    assert (samples(outputs) == TONE[:2000]).all()
    assert finished(answer).usage.output_audio_ms == round(2000 / 24)


def test_base64_cut_anywhere() -> None:
    text = base64.b64encode(TONE[:100].tobytes()).decode()
    pieces = [text[place : place + 5] for place in range(0, len(text), 5)]
    outputs = read(reader(), *(delta({"audio": {"data": piece}}) for piece in pieces))
    assert (samples(outputs) == TONE[:100]).all()


def test_one_wav_stream() -> None:
    """A header in the first piece only, and cut in two."""
    file = wav(TONE)
    outputs = read(reader(), audio(file[:20]), audio(file[20:5001]), audio(file[5001:]))
    assert (samples(outputs) == TONE).all()


def test_a_wav_file_a_piece() -> None:
    """SGLang-Omni's way."""
    outputs = read(reader(), *(audio(wav(piece), id="audio-1") for piece in np.split(TONE, 8)))
    assert (samples(outputs) == TONE).all()


def test_audio_where_text_is_otherwise() -> None:
    """vLLM-Omni's way: the kind of content is said beside the choices."""
    pieces = [
        delta({"content": base64.b64encode(wav(piece)).decode()}, modality="audio") for piece in np.split(TONE, 4)
    ]
    answer = reader()
    ends_early = {"choices": [{"index": 0, "delta": {"content": "."}, "finish_reason": "stop"}], "modality": "text"}
    outputs = read(answer, delta({"content": "Hi"}, modality="text"), ends_early, *pieces)
    assert outputs[:2] == [TextOutput("Hi"), TextOutput(".")]
    assert (samples(outputs) == TONE).all()
    assert answer.done


def test_pieces_of_other_rates_are_brought_to_the_first() -> None:
    outputs = read(reader(), audio(wav(TONE, 24_000)), audio(wav(TONE[:8000], 8_000)))
    rates = {output.sample_rate for output in outputs if isinstance(output, AudioOutput)}
    assert rates == {24_000}
    assert len(samples(outputs)) == 48_000


def test_long_pieces_go_on_in_short_ones() -> None:
    outputs = read(reader(), audio(wav(TONE)))
    assert [len(output.samples) for output in outputs if isinstance(output, AudioOutput)] == [12_000, 12_000]


def test_spoken_text_is_not_said_twice() -> None:
    """Servers that send the text both as content and as the transcript of the audio."""
    both = [delta({"content": "Hi there"}), audio(b"\0\0", transcript="Hi there")]
    assert [output for output in read(reader(), *both) if isinstance(output, TextOutput)] == [TextOutput("Hi there")]
    spoken = [audio(b"\0\0", transcript="Hi"), delta({"audio": {"transcript": " there", "expires_at": 7}})]
    texts = [output.text for output in read(reader(), *spoken) if isinstance(output, TextOutput)]
    assert texts == ["Hi", " there"]


@pytest.mark.parametrize(
    "piece",
    [
        "####",
        "AAAAA",
        "AA=A",
        base64.b64encode(b"RIFF\x10\0\0\0WAVE").decode(),
        base64.b64encode(b"RIFFxxxxAVI ").decode(),
    ],
)
def test_audio_that_is_none(piece: str) -> None:
    with pytest.raises(EngineFailed):
        read(reader(), delta({"audio": {"data": piece}}))


@pytest.mark.parametrize("bytes_long", [2, 4, 6])
def test_base64_may_lack_its_padding(bytes_long: int) -> None:
    audio, told = UpstreamAudio(sample_rate=24_000), bytes(range(bytes_long))
    text = base64.b64encode(told).decode().rstrip("=")
    outputs = [*audio.feed_base64(text[:3]), *audio.feed_base64(text[3:]), *audio.flush()]
    assert (np.concatenate([output.samples for output in outputs]) * 32768).astype("<i2").tobytes() == told


@pytest.mark.parametrize("magic", [b"ID3\x03", b"OggS", b"fLaC"])
def test_compressed_audio_is_not_played_as_noise(magic: bytes) -> None:
    with pytest.raises(EngineFailed, match="neither 16-bit samples nor wav"):
        read(reader(), audio(magic + bytes(100)))


def test_a_rate_that_cannot_be() -> None:
    for rate in (7_999, 192_001):
        with pytest.raises(EngineFailed):
            UpstreamAudio(sample_rate=24_000).feed(b"\0\0", sample_rate=rate)
    assert UpstreamAudio(sample_rate=24_000).feed(b"\0\0", sample_rate=8_000)[0].sample_rate == 8_000


# garbage


@pytest.mark.parametrize("data", [b"not json", b"[1]", b'"text"', b"7", b'{"choices":', b"\xff\xfe"])
def test_garbage(data: bytes) -> None:
    with pytest.raises(EngineFailed, match="the upstream sent"):
        read(reader(), data)


@given(st.text(st.sampled_from("a😀é\U0010ffff"), max_size=12), st.randoms(use_true_random=False), st.booleans())
def test_characters_that_are_cut_in_two(text: str, random: Random, thought: bool) -> None:
    """As a server sends them that cuts its text between units of UTF-16."""
    units = text.encode("utf-16-le")
    field = "reasoning_content" if thought else "content"
    pieces = []
    while units:
        cut = 2 * random.randint(1, 3)
        pieces.append(units[:cut].decode("utf-16-le", "surrogatepass"))
        units = units[cut:]
    outputs = read(reader(), *(json.dumps(delta({field: piece})).encode() for piece in pieces), finish("stop"))
    assert all(output.text for output in outputs if isinstance(output, TextOutput | ThoughtOutput))
    assert "".join(output.text for output in outputs if isinstance(output, TextOutput | ThoughtOutput)) == text


def test_halves_of_characters_without_the_other() -> None:
    cut = [json.dumps(delta({"content": text})).encode() for text in ("a\ud83d", "b\ude00", "c\ud83d")]
    assert (
        "".join(output.text for output in read(reader(), *cut) if isinstance(output, TextOutput))
        == "a\ufffdb\ufffdc\ufffd"
    )
    call = {"index": 0, "id": "call\ud83d", "function": {"name": "f", "arguments": '{"a":"\ud83d"}'}}
    (called,) = read(reader(), json.dumps(delta({"tool_calls": [call]})).encode())
    assert isinstance(called, ToolCallOutput)
    assert (called.call.id, called.call.arguments) == ("call\ufffd", '{"a":"\ufffd"}')


@pytest.mark.parametrize(
    "event",
    [
        ServerSentEvent("error", b'{"message":"hush","type":"server_error"}'),
        ServerSentEvent("message", b'{"error":{"message":"hush","type":"server_error","code":null}}'),
        ServerSentEvent("error", b'{"message":"hush","error":{"message":"hush"}}'),
        ServerSentEvent("message", b'{"error":"hush"}'),
        ServerSentEvent("error", b"hush"),
        ServerSentEvent("error", b"{}"),
    ],
)
def test_error_events(event: ServerSentEvent) -> None:
    with pytest.raises(EngineFailed) as caught:
        reader().read(event)
    assert "hush" not in caught.value.message


def test_an_error_that_is_null_is_none() -> None:
    assert read(reader(), {**delta({"content": "x"}), "error": None}) == [TextOutput("x")]


def test_nothing_follows_the_end() -> None:
    answer = reader()
    read(answer, finish("stop"))
    assert read(answer, delta({"content": "late"}), b"garbage") == []
