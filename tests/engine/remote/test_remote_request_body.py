"""Requests as upstreams get them."""

from __future__ import annotations

import base64
import io
import wave
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pytest
from numpy.typing import NDArray
from PIL import Image
from support.engine_answers import asking, text

from omni_ws.audio.container import wav_header
from omni_ws.core.chunks import AudioEncoding, AudioFormat, InputChunk, Modality, OutputModality
from omni_ws.core.history import WORDS_UNKNOWN, Message, Speech
from omni_ws.engine.base import GenerationRequest
from omni_ws.engine.remote.settings import (
    Dialect,
    Prompt,
    RemoteLlmSettings,
    chat_body,
    read_prompt,
)
from omni_ws.engine.threads import MediaRoom
from omni_ws.errors import EmptyInput, PayloadTooLarge, UnsupportedFormat

TONE = (np.sin(np.arange(16_000) / 9) * 20_000).astype("<i2")


@pytest.fixture
async def executor() -> AsyncIterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


async def body_of(
    request: GenerationRequest, executor: ThreadPoolExecutor, *, audio: bool = False, **settings: Any
) -> dict[str, Any]:
    prompt = await read_prompt(request, executor=executor, max_bytes=1 << 24, share=MediaRoom().share())
    if audio:
        request = replace(request, modalities=frozenset({OutputModality.TEXT, OutputModality.AUDIO}))
    return sent(request, prompt, **settings)


def sent(request: GenerationRequest, prompt: Prompt, **settings: Any) -> dict[str, Any]:
    asked = RemoteLlmSettings(urls=(), **settings)
    body: dict[str, Any] = orjson.loads(
        chat_body(request, prompt, model="tiny", settings=asked, dialect=Dialect.OPENAI)
    )
    return body


async def content_of(executor: ThreadPoolExecutor, *chunks: InputChunk | str, **fields: Any) -> Any:
    return (await body_of(asking(*chunks, **fields), executor))["messages"][-1]["content"]


def picture(kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (4, 4), "red").save(buffer, kind)
    return buffer.getvalue()


def samples_of(part: dict[str, Any]) -> tuple[int, Any]:
    assert part["type"] == "input_audio"
    assert part["input_audio"]["format"] == "wav"
    with wave.open(io.BytesIO(base64.b64decode(part["input_audio"]["data"]))) as file:
        assert (file.getnchannels(), file.getsampwidth()) == (1, 2)
        return file.getframerate(), np.frombuffer(file.readframes(file.getnframes()), "<i2")


def audio_chunk(data: bytes, **fields: Any) -> InputChunk:
    return InputChunk(Modality.AUDIO, data, **fields)


async def test_the_least_that_a_request_says(executor: ThreadPoolExecutor) -> None:
    assert await body_of(asking("hel", "lo"), executor) == {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hello"}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def test_everything_that_a_request_says(executor: ThreadPoolExecutor) -> None:
    request = asking(
        "and now?",
        instructions="Be brief.",
        history=(Message("user", "hello"), Message("assistant", "hi")),
        sampling={"temperature": 0.5, "max_tokens": 9, "stop": ["x"], "seed": 3},
        stage_sampling={"talker": {"top_k": 5}},
        stage_params={"code2wav": {"chunk": 10}},
        voice="ann",
    )
    body = await body_of(request, executor, audio=True, modalities=("text", "audio"), audio_format="wav")
    assert body == {
        "model": "tiny",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": "hi"},
            {"role": "user", "content": "and now?"},
        ],
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
        "max_tokens": 9,
        "stop": ["x"],
        "seed": 3,
        "modalities": ["text", "audio"],
        "audio": {"voice": "ann", "format": "wav"},
        "stage_sampling": {"talker": {"top_k": 5}},
        "stage_params": {"code2wav": {"chunk": 10}},
    }


async def test_a_model_that_can_speak_is_told_when_it_need_not(executor: ThreadPoolExecutor) -> None:
    body = await body_of(asking("x", voice="ann"), executor, modalities=("text", "audio"))
    assert body["modalities"] == ["text"]
    assert "audio" not in body


async def test_no_voice_is_named_where_none_is_known(executor: ThreadPoolExecutor) -> None:
    assert (await body_of(asking("x"), executor, audio=True))["audio"] == {"format": "pcm16"}


@pytest.mark.parametrize("size", [1, 333, 3200, 32_000])
async def test_samples_stay_what_they_are(executor: ThreadPoolExecutor, size: int) -> None:
    data = TONE[:1600].tobytes() if size == 1 else TONE.tobytes()
    chunks = [audio_chunk(data[place : place + size]) for place in range(0, len(data), size)]
    content = await content_of(executor, *chunks)
    assert len(content) == 1
    rate, samples = samples_of(content[0])
    assert rate == 16_000
    assert samples.tobytes() == data


async def test_other_rates_and_formats_become_one(executor: ThreadPoolExecutor) -> None:
    wide = np.repeat(TONE, 3)
    bare = await content_of(executor, audio_chunk(wide.tobytes()), input_audio=AudioFormat(sample_rate=48_000))
    rate, samples = samples_of(bare[0])
    assert (rate, len(samples)) == (16_000, len(TONE))
    file = wav_header(sample_rate=8_000, channels=1, data_bytes=2 * len(TONE)) + TONE.tobytes()
    held = await content_of(executor, audio_chunk(file), input_audio=AudioFormat(AudioEncoding.WAV))
    rate, samples = samples_of(held[0])
    assert (rate, len(samples)) == (16_000, 2 * len(TONE))


async def test_audio_of_two_formats_is_two_parts(executor: ThreadPoolExecutor) -> None:
    content = await content_of(executor, audio_chunk(TONE.tobytes()), audio_chunk(b"\xff" * 800, format="pcmu"))
    assert [len(samples_of(part)[1]) for part in content] == [16_000, 800]


async def test_parts_keep_their_order(executor: ThreadPoolExecutor) -> None:
    png, jpeg = picture(), picture("JPEG")
    chunks = [
        text("look "),
        text("at this"),
        InputChunk(Modality.IMAGE, png, format="image/whatever"),
        InputChunk(Modality.IMAGE, jpeg),
        text("and hear"),
        audio_chunk(TONE.tobytes()),
        InputChunk(Modality.TEXT, b""),
        audio_chunk(TONE.tobytes()),
        text("well?"),
    ]
    content = await content_of(executor, *chunks)
    assert [part["type"] for part in content] == ["text", "image_url", "image_url", "text", "input_audio", "text"]
    assert content[0]["text"] == "look at this"
    assert content[1]["image_url"]["url"] == "data:image/png;base64," + base64.b64encode(png).decode()
    assert content[2]["image_url"]["url"].startswith("data:image/jpeg;base64,")
    assert len(samples_of(content[4])[1]) == 32_000


async def test_video_frames_are_images_and_files_are_files(executor: ThreadPoolExecutor) -> None:
    mp4 = b"\0\0\0\x18ftypmp42" + bytes(40)
    content = await content_of(
        executor,
        InputChunk(Modality.VIDEO, picture()),
        InputChunk(Modality.VIDEO, mp4[:20], format="video/mp4"),
        InputChunk(Modality.VIDEO, mp4[20:], format="video/mp4"),
        InputChunk(Modality.VIDEO, b"unknown", format="video/x-flv"),
    )
    assert [part["type"] for part in content] == ["image_url", "video_url", "video_url"]
    assert content[1]["video_url"]["url"] == "data:video/mp4;base64," + base64.b64encode(mp4).decode()
    assert content[2]["video_url"]["url"].startswith("data:video/x-flv;base64,")


@pytest.mark.parametrize(
    ("data", "mime"),
    [
        (b"\x1aE\xdf\xa3\x9fB\x82\x84webm", "video/webm"),
        (b"\x1aE\xdf\xa3\x9fB\x82\x88matroska", "video/x-matroska"),
        (b"\x47" + bytes(187) + b"\x47", "video/mp2t"),
    ],
)
async def test_the_type_of_a_video_is_seen(executor: ThreadPoolExecutor, data: bytes, mime: str) -> None:
    content = await content_of(executor, InputChunk(Modality.VIDEO, data))
    assert content[0]["video_url"]["url"].startswith(f"data:{mime};base64,")


@pytest.mark.parametrize(
    ("chunk", "error"),
    [
        (InputChunk(Modality.IMAGE, b"no image", 3, "image/png"), UnsupportedFormat),
        (InputChunk(Modality.VIDEO, b"no video", 3), UnsupportedFormat),
        (InputChunk(Modality.AUDIO, b"no wav at all", 3, "wav"), UnsupportedFormat),
        (InputChunk(Modality.AUDIO, b"x", 3), EmptyInput),
        (InputChunk(Modality.TEXT, b"", 3), EmptyInput),
    ],
)
async def test_input_that_is_none(executor: ThreadPoolExecutor, chunk: InputChunk, error: type[Exception]) -> None:
    with pytest.raises(error):
        await content_of(executor, chunk)


async def test_too_much(executor: ThreadPoolExecutor) -> None:
    async def read(*chunks: InputChunk, limit: int) -> int:
        return (await read_prompt(asking(*chunks), executor=executor, max_bytes=limit, share=MediaRoom().share())).size

    sound = audio_chunk(bytes(32_000))
    size = await read(sound, limit=1 << 20)
    assert 32_000 * 4 / 3 <= size < 43_000
    assert await read(sound, limit=size) == size
    for chunks in ([sound], [InputChunk(Modality.IMAGE, picture() + bytes(32_000))], [text("x" * size), text("y")]):
        with pytest.raises(PayloadTooLarge):
            await read(*chunks, limit=size - 1 if chunks[0] is sound else size)


async def test_an_audio_bomb_does_not_unfold(executor: ThreadPoolExecutor) -> None:
    """A small flac file that is fourteen minutes of silence."""
    import av

    buffer = io.BytesIO()
    with av.open(buffer, "w", format="flac") as container:
        stream = container.add_stream("flac", rate=16_000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 65_536), np.int16), format="s16", layout="mono")
        frame.sample_rate = 16_000
        for _ in range(200):
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    assert len(buffer.getvalue()) < 1 << 18
    with pytest.raises(PayloadTooLarge):
        await read_prompt(
            asking(audio_chunk(buffer.getvalue(), format="flac")),
            executor=executor,
            max_bytes=1 << 20,
            share=MediaRoom().share(),
        )


def spoken(samples: NDArray[np.int16], *, audio_ms: float | None = None) -> Speech:
    chunk = InputChunk(Modality.AUDIO, samples.tobytes())
    return Speech((chunk,), AudioFormat(), len(samples) / 16 if audio_ms is None else audio_ms)


async def test_earlier_speech_is_an_audio_part_of_its_message(executor: ThreadPoolExecutor) -> None:
    history = (
        Message("user", "Listen:", speech=spoken(TONE)),
        Message("assistant", "A tone."),
        Message("user", "", speech=spoken(TONE[::-1])),
    )
    first, answer, second, last = (await body_of(asking("And now?", history=history), executor))["messages"]
    assert first["content"][0] == {"type": "text", "text": "Listen:"}
    rate, samples = samples_of(first["content"][1])
    assert rate == 16_000
    np.testing.assert_allclose(samples, TONE, atol=1)
    assert answer["content"] == "A tone."
    np.testing.assert_allclose(samples_of(second["content"][0])[1], TONE[::-1], atol=1)
    assert last["content"] == "And now?"


@pytest.mark.parametrize("room", [0, -1])
async def test_oldest_speech_goes_first_where_a_body_has_no_room(executor: ThreadPoolExecutor, room: int) -> None:
    history = (Message("user", "", speech=spoken(TONE)), Message("user", "", speech=spoken(TONE)))
    request = asking("And?", history=history)
    whole = (await read_prompt(request, executor=executor, max_bytes=1 << 24, share=MediaRoom().share())).size
    share = MediaRoom().share()
    prompt = await read_prompt(asking("And?", history=history), executor=executor, max_bytes=whole + room, share=share)
    body = sent(request, prompt)
    first, second, _ = body["messages"]
    assert second["content"][0]["type"] == "input_audio"
    assert (first["content"] == WORDS_UNKNOWN) is bool(room)


@pytest.mark.parametrize("past", [False, True])
async def test_speech_that_is_far_longer_than_it_was_counted_is_not_sent(
    executor: ThreadPoolExecutor, past: bool
) -> None:
    speech = spoken(np.zeros(6 * 32_000 + past, np.int16), audio_ms=2000)
    body = await body_of(asking("And?", history=(Message("user", "", speech=speech),)), executor)
    assert (body["messages"][0]["content"] == WORDS_UNKNOWN) is past
