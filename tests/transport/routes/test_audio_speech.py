"""POST /v1/audio/speech with ordinary bodies, on the real server over real sockets."""

from __future__ import annotations

import asyncio
import base64
import io
import wave
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from support.live_server import LiveServer, live_server
from support.raw_http import DONE, RawResponse, chunked, events_of, post, raw_client, request
from support.scripted_engines import SAMPLE_RATE, ToneEngine, tone

from omni_ws.engine.base import AudioOutput, TextOutput
from omni_ws.engine.fake import EchoEngine, ScriptedEngine
from omni_ws.errors import EngineFailed

PATH = "/v1/audio/speech"
TEXT = "one two three"
#: The tone engine's audio: 20 ms a word, at 24 kHz in 16 bits.
PCM_BYTES = 3 * 20 * 24 * 2


async def speak(server: LiveServer, *headers: str, **body: Any) -> RawResponse:
    return await post(server.port, PATH, {"input": TEXT, **body}, *headers)


def spoken(server: LiveServer) -> Any:
    (one,) = server.engine.requests  # type: ignore[attr-defined]
    return one


# --- whole responses


async def test_a_whole_reply_is_mp3_by_default() -> None:
    async with live_server(ToneEngine()) as server:
        response = await speak(server, voice="alloy", model="tts-1")
        seen = spoken(server)
    assert response.status == 200
    assert response.headers["content-type"] == "audio/mpeg"
    assert int(response.headers["content-length"]) == len(response.body)
    assert Decoded(response.body).codec == "mp3float"
    assert (seen.task, seen.voice, seen.modalities) == ("speech", "tone", {"audio"})


@pytest.mark.parametrize(
    ("name", "kind", "codec"),
    [
        ("mp3", "audio/mpeg", "mp3float"),
        ("flac", "audio/flac", "flac"),
        ("opus", "audio/ogg;codecs=opus", "opus"),
        ("ogg", "audio/ogg", "opus"),
        ("aac", "audio/aac", "aac"),
        ("wav", "audio/wav", "pcm_s16le"),
    ],
)
async def test_every_file_format(name: str, kind: str, codec: str) -> None:
    async with live_server(ToneEngine()) as server:
        response = await speak(server, response_format=name)
    assert response.headers["content-type"].replace(" ", "").partition(";")[0] == kind.partition(";")[0]
    file = Decoded(response.body)
    assert file.codec.removeprefix("lib") == codec
    assert 60 <= file.milliseconds <= 140
    if name == "wav":
        assert int.from_bytes(response.body[40:44], "little") == PCM_BYTES == len(response.body) - 44
    if name in ("flac", "wav"):
        expected = np.concatenate([tone(300), tone(300), tone(500)])
        assert np.allclose(file.samples, expected, atol=1e-3)


async def test_bare_samples() -> None:
    async with live_server(ToneEngine()) as server:
        response = await speak(server, response_format="pcm")
        assert response.headers["content-type"] == "audio/pcm;rate=24000;channels=1"
        samples = np.frombuffer(response.body, "<i2") / 32768
        assert np.allclose(samples, np.concatenate([tone(300), tone(300), tone(500)]), atol=1e-3)
        response = await speak(server, response_format="pcm", output_audio={"sample_rate": 8000})
        assert response.headers["content-type"] == "audio/pcm;rate=8000;channels=1"
        assert abs(len(response.body) - PCM_BYTES / 3) <= 4
        response = await speak(server, output_audio={"format": "wav"})
        assert response.headers["content-type"] == "audio/wav"


@pytest.mark.parametrize("name", ["m4a", "webm", "nonsense", "MP3"])
async def test_formats_that_are_not_served(name: str) -> None:
    async with live_server(ToneEngine()) as server:
        response = await speak(server, response_format=name)
        assert server.engine.requests == []  # type: ignore[attr-defined]
    assert (response.status, response.error["code"], response.error["param"]) == (
        415,
        "unsupported_format",
        "response_format",
    )


async def test_a_rate_that_a_codec_does_not_have_is_refused_before_work_begins() -> None:
    async with live_server(ToneEngine()) as server:
        for body in ({"response_format": "mp3"}, {"response_format": "opus", "stream_format": "audio"}):
            response = await speak(server, **body, output_audio={"sample_rate": 9001})
            assert (response.status, response.error["param"]) == (415, "output_audio.sample_rate")
        assert server.engine.requests == []  # type: ignore[attr-defined]


async def test_voices() -> None:
    engine = ToneEngine()
    async with live_server(engine) as server:
        for voice in ("bell", "nova", {"id": "bell"}, None):
            assert (await speak(server, voice=voice)).status == 200
        response = await speak(server, voice="nobody")
        assert (response.status, response.error["param"]) == (400, "voice")
        assert "tone, bell" in response.error["message"]
        response = await speak(server, voice={"id": "nobody"})
        assert (response.status, response.error["param"]) == (400, "voice.id")
    assert [one.voice for one in engine.requests] == ["bell", "tone", "bell", "tone"]


async def test_a_voice_has_further_names() -> None:
    engine = ToneEngine(voice_aliases={"ding": "bell", "echo": "bell"})
    async with live_server(engine) as server:
        for voice in ("ding", "echo", "alloy"):
            assert (await speak(server, voice=voice)).status == 200
    # The engine's own names for a voice go before OpenAI's.
    assert [one.voice for one in engine.requests] == ["bell", "bell", "tone"]


async def test_speed() -> None:
    engine = ToneEngine(speed=True)
    async with live_server(engine) as server:
        for speed in (0.5, 2, None, 1):
            assert (await speak(server, speed=speed)).status == 200
    assert [one.speed for one in engine.requests] == [0.5, 2, 1, 1]


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"speed": 1.5}, "unsupported_parameter", "speed"),
    ({"speed": "fast"}, "invalid_value", "speed"),
    ({"speed": 0.49}, "invalid_value", "speed"),
    ({"speed": 2.01}, "invalid_value", "speed"),
    ({"input": ""}, "empty_input", "input"),
    ({"input": " \n"}, "empty_input", "input"),
    ({"input": None}, "invalid_value", "input"),
    ({"input": ["a"]}, "invalid_value", "input"),
    ({"stream_format": "wav"}, "invalid_value", "stream_format"),
    ({"response_format": 5}, "invalid_value", "response_format"),
    ({"model": 5}, "invalid_value", "model"),
    ({"talker_seed": 5}, "unsupported_parameter", "talker_seed"),
]


async def test_what_is_wrong_is_named() -> None:
    async with live_server(ToneEngine()) as server:
        for body, code, param in WRONG:
            response = await speak(server, **body)
            assert (response.status, response.error["code"], response.error["param"]) == (400, code, param), body


async def test_harmless_fields() -> None:
    async with live_server(ToneEngine()) as server:
        response = await speak(server, speed=1.0, instructions="Softly.", temperature=0.8, top_k=-1, unknown=1, n=None)
        assert response.status == 200
        assert spoken(server).instructions == "Softly."


@pytest.mark.parametrize("name", ["mp3", "flac", "opus", "wav", "pcm"])
async def test_a_reply_without_any_sound_is_an_empty_file(name: str) -> None:
    """The fake engine does not read aloud."""
    async with live_server(EchoEngine()) as server:
        response = await speak(server, response_format=name)
        raw = await speak(server, response_format=name, stream_format="audio")
    assert (response.status, raw.status) == (200, 200)
    assert raw.body == b""
    if name == "wav":
        assert response.body[:4] == b"RIFF"
        assert len(response.body) == 44


# --- streams


async def test_raw_audio() -> None:
    async with live_server(ToneEngine()) as server:
        for body in ({}, {"stream": True}):
            response = await speak(server, stream_format="audio", **body)
            assert response.headers["content-type"] == "audio/pcm;rate=24000;channels=1"
            assert response.headers["transfer-encoding"] == "chunked"
            assert len(response.body) == PCM_BYTES
        response = await speak(server, stream_format="audio", response_format="mp3")
        assert response.headers["content-type"] == "audio/mpeg"
        assert Decoded(response.body).codec == "mp3float"
        response = await speak(server, stream_format="audio", response_format="wav")
        assert response.body.count(b"RIFF") == 1


async def test_events_as_openai_has_them() -> None:
    async with live_server(ToneEngine()) as server:
        events = events_of(await speak(server, stream_format="sse", response_format="pcm", stream=True))
    *said, last = [event.json() for event in events]
    assert all(set(one) == {"type", "audio"} and one["type"] == "speech.audio.delta" for one in said)
    assert len(b"".join(base64.b64decode(one["audio"], validate=True) for one in said)) == PCM_BYTES
    assert last == {
        "type": "speech.audio.done",
        "usage": {"input_tokens": 3, "output_tokens": 3, "total_tokens": 6},
    }


async def test_chunks_that_end_in_done() -> None:
    async with live_server(ToneEngine()) as server:
        events = events_of(await speak(server, stream=True))
    assert events[-1] == DONE
    *said, last = [event.json() for event in events[:-1]]
    assert len({one["id"] for one in [*said, last]}) == 1
    assert [one["index"] for one in [*said, last]] == list(range(len(said) + 1))
    assert {one["object"] for one in [*said, last]} == {"audio.speech.chunk"}
    for one in said:
        assert one["finish_reason"] is None
        audio = one["audio"]
        assert (audio["format"], audio["mime_type"]) == ("pcm", "audio/pcm;rate=24000;channels=1")
        assert audio["sample_rate"] == SAMPLE_RATE
    assert len(b"".join(base64.b64decode(one["audio"]["data"]) for one in said)) == PCM_BYTES
    assert (last["audio"], last["finish_reason"], last["usage"]["total_tokens"]) == (None, "stop", 6)


@pytest.mark.parametrize("rate", [24_000, 16_000])
async def test_each_wav_chunk_is_a_file_of_its_own(rate: int) -> None:
    async with live_server(ToneEngine()) as server:
        body = {"response_format": "wav", "output_audio": {"sample_rate": rate}}
        events = events_of(await speak(server, stream=True, **body))
        bare = await speak(server, stream_format="audio", **(body | {"response_format": "pcm"}))
    said = [event.json()["audio"] for event in events[:-2]]
    assert len(said) > 1
    samples = b""
    for audio in said:
        assert (audio["format"], audio["mime_type"], audio["sample_rate"]) == ("wav", "audio/wav", rate)
        data = base64.b64decode(audio["data"])
        with wave.open(io.BytesIO(data)) as file:
            assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (1, 2, rate)
            frames = file.readframes(file.getnframes())
        assert frames
        assert len(data) == 44 + len(frames)
        samples += frames
    assert samples == bare.body


async def test_wav_in_events_of_openai_is_one_file() -> None:
    async with live_server(ToneEngine()) as server:
        events = events_of(await speak(server, stream_format="sse", response_format="wav"))
    data = b"".join(base64.b64decode(event.json()["audio"]) for event in events[:-1])
    assert data.count(b"RIFF") == 1
    assert len(data) == 44 + PCM_BYTES


# --- errors


@pytest.mark.parametrize(
    ("body", "as_event"),
    [
        ({"stream_format": "sse"}, True),
        ({"stream": True}, True),
        ({"stream_format": "audio", "stream": True}, False),
        ({"stream_format": "audio"}, False),
        ({}, False),
    ],
)
async def test_errors_before_the_answer(body: dict[str, Any], as_event: bool) -> None:
    async with live_server(ToneEngine()) as server:
        response = await speak(server, voice="nobody", **body)
        if as_event:
            (event,) = events_of(response)
            assert (event.name, event.json()["param"]) == ("error", "voice")
        else:
            assert (response.status, response.error["param"]) == (400, "voice")
        response = await speak(server, "Accept: application/json", voice="nobody", **body)
        assert (response.status, response.error["param"]) == (400, "voice")


@pytest.mark.parametrize("body", [{}, {"stream_format": "audio"}])
async def test_an_engine_that_fails_before_the_first_sound(body: dict[str, Any]) -> None:
    async with live_server(ToneEngine(fail_at=0), expect_errors=True) as server:
        response = await speak(server, **body)
    assert (response.status, response.error["code"]) == (500, "engine_failed")
    assert b"secret" not in response.body


@pytest.mark.parametrize(("body", "ends_in"), [({"stream_format": "sse"}, "error"), ({"stream": True}, "error")])
async def test_an_engine_that_fails_midway_through_events(body: dict[str, Any], ends_in: str) -> None:
    async with live_server(ToneEngine(fail_at=2), expect_errors=True) as server:
        response = await speak(server, **body)
    events = events_of(response)
    assert [event.name for event in events] == [None, None, ends_in]
    assert events[-1].json()["error"]["code"] == "engine_failed"
    assert b"secret" not in response.body


async def test_an_engine_that_fails_midway_through_raw_audio_cuts_it_short() -> None:
    engine = ScriptedEngine([AudioOutput(tone(300), SAMPLE_RATE), EngineFailed("broken")])
    async with live_server(engine) as server, raw_client(server.port) as client:
        await client.send(request("POST", PATH, body=b'{"input":"a","stream_format":"audio"}'))
        _, status, headers = await client.head()
        assert (status, headers["transfer-encoding"]) == (200, "chunked")
        rest = await client.rest()
    assert not rest.endswith(b"0\r\n\r\n")
    assert b"broken" not in rest


async def test_an_engine_that_fails_midway_through_a_whole_reply() -> None:
    engine = ScriptedEngine([AudioOutput(tone(300), SAMPLE_RATE), EngineFailed("broken")])
    async with live_server(engine) as server:
        assert (await speak(server)).status == 500


async def test_text_of_a_speaking_engine_is_not_sent() -> None:
    async with live_server(ScriptedEngine([TextOutput("psst"), AudioOutput(tone(300), SAMPLE_RATE)])) as server:
        for body in ({}, {"stream_format": "sse"}, {"stream": True}, {"stream_format": "audio"}):
            assert b"psst" not in (await speak(server, **body)).body


async def test_the_engine_stops_when_the_client_goes() -> None:
    async def forever() -> None:
        await asyncio.Event().wait()

    for body in (b'{"input":"a"}', b'{"input":"a","stream_format":"audio"}', b'{"input":"a","stream":true}'):
        engine = ScriptedEngine([AudioOutput(tone(300), SAMPLE_RATE), forever])
        async with live_server(engine) as server, raw_client(server.port) as client:
            await client.send(request("POST", PATH, body=body))
            await server.until(lambda: server.engine.active_requests == 1)
            client.reset()


# --- Mode A: text that is still being written


def mode_a(*headers: str) -> bytes:
    return request("POST", PATH, "X-Streaming-Input: true", "Transfer-Encoding: chunked", *headers)


async def test_speech_begins_while_the_text_is_still_being_written() -> None:
    async with live_server(ToneEngine()) as server, raw_client(server.port) as client:
        await client.send(mode_a(), chunked(b'{"text":"one "}\n', end=False))
        _, status, headers = await client.head()
        assert (status, headers["content-type"]) == (200, "audio/pcm;rate=24000;channels=1")
        heard = b""
        for text in (b"two ", b"three "):
            # The audio of a word arrives before the next word is sent.
            heard += await client.chunk()
            await client.send(chunked(b'{"text":"%b"}\n' % text, end=False))
        await client.send(b"0\r\n\r\n")
        async for chunk in client.chunks():
            heard += chunk
        assert len(heard) == PCM_BYTES


async def test_a_gap_in_raw_audio_of_a_streamed_text_begins_with_the_head() -> None:
    """The head is sent when work starts, before any audio."""
    async with live_server(ToneEngine()) as server, raw_client(server.port) as client:
        await client.send(mode_a(), chunked(b'{"text":"unfinis"}\n', end=False))
        assert (await client.head())[1] == 200
        await client.send(chunked(b'{"text":"hed"}\n'))
        assert len(b"".join([chunk async for chunk in client.chunks()])) == PCM_BYTES / 3


DIALECTS: list[tuple[bytes, str]] = [
    (b"{}", "audio/pcm;rate=24000;channels=1"),
    (b'{"response_format":"wav"}', "audio/wav"),
    (b'{"stream_format":"audio","response_format":"mp3"}', "audio/mpeg"),
    (b'{"stream_format":"sse"}', "text/event-stream; charset=utf-8"),
    (b'{"stream":true}', "text/event-stream; charset=utf-8"),
    (b'{"stream":false}', "audio/mpeg"),
    (b'{"stream":false,"response_format":"flac"}', "audio/flac"),
]


async def test_dialects_of_a_streamed_text() -> None:
    async with live_server(ToneEngine()) as server:
        for parameters, kind in DIALECTS:
            body = parameters + b'\n{"text":"one two"}\n{"text":" three"}\n'
            response = await post(server.port, PATH, body, "X-Streaming-Input: true")
            assert (response.status, response.headers["content-type"]) == (200, kind), parameters
            if kind.startswith("text/"):
                events = events_of(response)
                assert (events[-1] == DONE) is (b"stream_format" not in parameters), parameters


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        (b'{"input":"no"}\n{"text":"a"}\n', 400, "invalid_value", "input"),
        (b'{"voice":"nobody"}\n{"text":"a"}\n', 400, "invalid_value", "voice"),
        (b'{"response_format":"aiff"}\n{"text":"a"}\n', 415, "unsupported_format", "response_format"),
        (b"{}\n", 400, "empty_input", None),
        (b"", 400, "empty_input", None),
    ],
)
async def test_refusals_of_a_streamed_text(body: bytes, status: int, code: str, param: str | None) -> None:
    async with live_server(ToneEngine()) as server:
        response = await post(server.port, PATH, body, "X-Streaming-Input: true", "Accept: text/event-stream")
    assert (response.status, response.error["code"], response.error["param"]) == (status, code, param)


async def test_the_engine_stops_when_the_writer_goes() -> None:
    engine = ToneEngine()
    async with live_server(engine) as server, raw_client(server.port) as client:
        await client.send(mode_a(), chunked(b'{"text":"one two "}\n', end=False))
        await client.head()
        await client.chunk()
        client.reset()
        await server.until(lambda: engine.aborted == 1)


async def test_audio_through_mode_a_comes_back_from_the_fake_engine() -> None:
    pcm = (tone(300) * 32767).astype("<i2").tobytes()
    async with live_server() as server:
        response = await post(server.port, PATH, pcm, "Content-Type: audio/pcm;rate=24000", "X-Streaming-Input: true")
    assert response.body == pcm


# --- curl and the openai package


async def test_curl(tmp_path: Path) -> None:
    async with live_server(ToneEngine()) as server:
        curl = await asyncio.create_subprocess_exec(
            *("curl", "-sS", "-o", str(tmp_path / "speech.mp3"), f"http://127.0.0.1:{server.port}{PATH}"),
            *("-H", "Content-Type: application/json", "-d", '{"model":"tts-1","voice":"alloy","input":"one two"}'),
        )
        assert await curl.wait() == 0
    assert Decoded((tmp_path / "speech.mp3").read_bytes()).codec == "mp3float"


async def test_openai_package(tmp_path: Path) -> None:
    openai = pytest.importorskip("openai", reason="the openai package is not installed")

    def use(port: int) -> None:
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client:
            speech = client.audio.speech
            whole = speech.create(model="tts-1", voice="coral", input=TEXT)
            assert Decoded(whole.content).codec == "mp3float"
            pcm = speech.create(model="gpt-4o-mini-tts", voice="coral", input=TEXT, response_format="pcm")
            assert len(pcm.content) == PCM_BYTES
            create = speech.with_streaming_response.create
            with create(model="tts-1", voice="alloy", input=TEXT, response_format="wav") as streaming:
                streaming.stream_to_file(tmp_path / "speech.wav")
            with create(model="tts-1", voice="alloy", input=TEXT, stream_format="sse") as streaming:
                lines = [line for line in streaming.iter_lines() if line]
            assert "speech.audio.done" in lines[-1]
            with pytest.raises(openai.BadRequestError) as caught:
                speech.create(model="tts-1", voice="nobody", input=TEXT)
            assert caught.value.param == "voice"

    async with live_server(ToneEngine()) as server:
        await asyncio.to_thread(use, server.port)
        base = f"http://127.0.0.1:{server.port}/v1"
        async with openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0) as client:
            whole = await client.audio.speech.create(model="tts-1", voice="coral", input=TEXT, response_format="flac")
            assert Decoded(whole.content).codec == "flac"
    assert Decoded((tmp_path / "speech.wav").read_bytes()).milliseconds == 60


# --- helpers


class Decoded:
    """An audio file, decoded by libav."""

    def __init__(self, data: bytes) -> None:
        with av.open(io.BytesIO(data), "r") as container:
            self.codec = container.streams.audio[0].codec_context.name
            frames = [frame.to_ndarray() for frame in container.decode(audio=0)]
            rate = container.streams.audio[0].rate
        samples = np.concatenate([frame.reshape(-1) for frame in frames])
        self.samples = samples / 32768 if samples.dtype == np.int16 else samples
        self.milliseconds = round(len(self.samples) * 1000 / rate)
