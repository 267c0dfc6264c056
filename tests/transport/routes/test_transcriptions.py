"""POST /v1/audio/transcriptions on the real server over real sockets."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from openai.types.audio import TranscriptionVerbose
from support.live_server import LiveServer, live_server
from support.raw_http import Event, RawResponse, events_of, post, raw_client
from support.scripted_engines import CapableEngine

from omni_ws.audio.container import wav_header
from omni_ws.client import connect
from omni_ws.core.chunks import FinishReason, HeardSegment, Hearing, InputChunk, Modality, Usage, Word
from omni_ws.engine.base import Finished, TextOutput, TranscriptOutput
from omni_ws.errors import EngineFailed, InvalidValue, OmniError, UnsupportedParameter
from omni_ws.transport.http.exchange import MAX_FIELD_BYTES, MAX_PARTS, FormReader
from omni_ws.wire.openai_requests import form_fields

PATH = "/v1/audio/transcriptions"
WAV = wav_header(sample_rate=16_000, channels=1, data_bytes=320) + bytes(320)
#: Two frames of MP3 at 8 kHz, and one of AAC.
MPEG_2_5 = (b"\xff\xe3\x48\xc4" + bytes(284)) * 2
ADTS = (b"\xff\xf1\x58\x40\x01\x7f\xfc" + bytes(4)) * 2
FILE = (("file", "a.wav"), WAV)
FIRST = HeardSegment(
    "go forward", 100, 900, tokens=(5, 6), avg_logprob=-0.25, compression_ratio=0.5, no_speech_prob=0.125
)
SECOND = HeardSegment(
    *("ten meters", 3_661_001, 3_662_042),
    tokens=(7,),
    avg_logprob=-0.5,
    compression_ratio=0.75,
    no_speech_prob=0.0,
    temperature=0.2,
)
SCRIPT: list[Any] = [
    TranscriptOutput("go", interim=True, start_ms=100),
    TranscriptOutput(
        "go forward",
        start_ms=100,
        words=(Word("go", 100, 300), Word("forward", 310, 900)),
        hearing=Hearing(segments=(FIRST,)),
    ),
    TextOutput("go forward"),
    TranscriptOutput(
        " ten meters",
        start_ms=3_661_001,
        words=(Word("ten", 3_661_001, 3_661_500), Word("meters", 3_661_500, 3_662_042)),
        hearing=Hearing(segments=(SECOND,)),
    ),
    TextOutput(" ten meters"),
    Finished(FinishReason.STOP, Usage(output_tokens=4, input_audio_ms=3_663_000)),
]
TEXT = "go forward ten meters"

Part = tuple[Any, bytes]


def form(*parts: Part, boundary: str = "xXx", **fields: Any) -> bytes:
    """A multipart body; ``parts`` are ((name, filename or None[, content type]), data)."""
    body = b""
    everything: list[Part] = [((name.replace("__", "[]"), None), value.encode()) for name, value in fields.items()]
    for (name, filename, *kind), data in (*everything, *parts):
        body += f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"'.encode()
        body += f'; filename="{filename}"'.encode() if filename is not None else b""
        body += f"\r\nContent-Type: {kind[0]}".encode() if kind else b""
        body += b"\r\n\r\n" + data + b"\r\n"
    return body + f"--{boundary}--\r\n".encode()


async def transcribe(
    server: LiveServer, *headers: str, parts: tuple[Part, ...] = (FILE,), **fields: str
) -> RawResponse:
    return await send(server, form(*parts, **fields), *headers)


async def send(server: LiveServer, body: bytes, *headers: str) -> RawResponse:
    return await post(server.port, PATH, body, "Content-Type: multipart/form-data; boundary=xXx", *headers)


# --- response formats


async def test_json() -> None:
    engine = CapableEngine(SCRIPT)
    async with live_server(engine) as server:
        response = await transcribe(server, model="whisper-1", temperature="0")
    assert response.json() == {"text": TEXT, "usage": {"type": "duration", "seconds": 3663.0}}
    (seen,) = engine.requests
    assert seen.task == "transcribe"
    assert seen.sampling == {"temperature": 0.0}
    assert engine.inputs == [[InputChunk(Modality.AUDIO, WAV, format="wav")]]


async def test_text() -> None:
    async with live_server(CapableEngine(SCRIPT)) as server:
        response = await transcribe(server, response_format="text")
    assert (response.headers["content-type"], response.body) == ("text/plain; charset=utf-8", f"{TEXT}\n".encode())


async def test_verbose_json_has_the_times_that_were_asked_for() -> None:
    segments = [
        {
            "id": 0,
            "seek": 10,
            "start": 0.1,
            "end": 0.9,
            "text": "go forward",
            "tokens": [5, 6],
            "temperature": 0.0,
            "avg_logprob": -0.25,
            "compression_ratio": 0.5,
            "no_speech_prob": 0.125,
        },
        {
            "id": 1,
            "seek": 366_100,
            "start": 3661.001,
            "end": 3662.042,
            "text": "ten meters",
            "tokens": [7],
            "temperature": 0.2,
            "avg_logprob": -0.5,
            "compression_ratio": 0.75,
            "no_speech_prob": 0.0,
        },
    ]
    head = {"task": "transcribe", "language": "english", "duration": 3663.0, "text": TEXT}
    usage = {"usage": {"type": "duration", "seconds": 3663.0}}
    async with live_server(CapableEngine(SCRIPT)) as server:
        plain = await transcribe(server, response_format="verbose_json", language="en-US")
        assert plain.json() == {**head, "segments": segments, **usage}
        words = await transcribe(server, response_format="verbose_json", timestamp_granularities__="word")
        both = await send(
            server,
            form(
                FILE,
                (("timestamp_granularities[]", None), b"word"),
                (("timestamp_granularities[]", None), b"segment"),
                response_format="verbose_json",
            ),
        )
    assert "language" not in words.json()  # the engine supports two, and does not say which it was
    assert "segments" not in words.json()
    assert words.json()["words"][0] == {"word": "go", "start": 0.1, "end": 0.3}
    assert [len(both.json()[name]) for name in ("words", "segments")] == [4, 2]
    typed = TranscriptionVerbose.model_validate(plain.json(), strict=True)
    assert typed.segments is not None
    assert typed.segments[1].tokens == [7]


async def test_segments_of_which_not_all_is_known_are_none() -> None:
    script = [*SCRIPT[:4], replace(SCRIPT[3], hearing=None), *SCRIPT[4:]]
    async with live_server(CapableEngine(script)) as server:
        response = (await transcribe(server, response_format="verbose_json")).json()
        subtitles = await transcribe(server, response_format="vtt")
    assert response["segments"] == []
    assert subtitles.body.count(b"-->") == 3


@pytest.mark.parametrize(("found", "asked", "told"), [("german", "", "german"), (None, "de", "german")])
async def test_the_language_that_was_found(found: str | None, asked: str, told: str) -> None:
    script = [replace(SCRIPT[1], hearing=Hearing(found)), TextOutput("go forward")]
    async with live_server(CapableEngine(script)) as server:
        response = await transcribe(server, response_format="verbose_json", language=asked)
    assert response.json()["language"] == told


async def test_translations() -> None:
    engine = CapableEngine(SCRIPT)
    content_type = "Content-Type: multipart/form-data; boundary=xXx"
    async with live_server(engine) as server:
        body = form(FILE, response_format="verbose_json", language="de")
        response = await post(server.port, "/v1/audio/translations", body, content_type)
        await transcribe(server)
    assert response.json()["text"] == TEXT
    assert (response.json()["task"], response.json()["language"]) == ("translate", "english")
    translated, transcribed = engine.requests
    assert (translated.task, translated.language, translated.options.translate) == ("transcribe", "de", True)
    assert not transcribed.options.translate


async def test_an_engine_that_does_not_translate_says_so() -> None:
    async with live_server() as server:
        response = await post(
            server.port, "/v1/audio/translations", form(FILE), "Content-Type: multipart/form-data; boundary=xXx"
        )
    assert (response.status, response.error["code"]) == (400, "unsupported_parameter")
    assert "translation is not supported" in response.error["message"]


async def test_subtitles() -> None:
    async with live_server(CapableEngine(SCRIPT)) as server:
        srt = await transcribe(server, response_format="srt")
        vtt = await transcribe(server, response_format="vtt")
    assert srt.headers["content-type"] == "application/x-subrip; charset=utf-8"
    assert srt.body.decode() == (
        "1\n00:00:00,100 --> 00:00:00,900\ngo forward\n\n2\n01:01:01,001 --> 01:01:02,042\nten meters\n\n"
    )
    assert vtt.headers["content-type"] == "text/vtt; charset=utf-8"
    assert vtt.body.decode() == (
        "WEBVTT\n\n00:00:00.100 --> 00:00:00.900\ngo forward\n\n01:01:01.001 --> 01:01:02.042\nten meters\n\n"
    )


def typed(events: list[Event]) -> list[tuple[str, str]]:
    assert all(event.name is None for event in events)
    return [(event.json()["type"], event.json().get("delta", event.json().get("text"))) for event in events]


async def test_a_stream_of_typed_events() -> None:
    async with live_server(CapableEngine([TextOutput(" "), TextOutput(" Oh "), *SCRIPT])) as server:
        events = events_of(await transcribe(server, stream="true"))
        whole = await transcribe(server)
    assert typed(events) == [
        ("transcript.text.delta", "Oh "),
        ("transcript.text.delta", "go forward"),
        ("transcript.text.delta", " ten meters"),
        ("transcript.text.done", f"Oh {TEXT}"),
    ]
    assert events[-1].json()["usage"] == whole.json()["usage"]
    assert whole.json()["text"] == events[-1].json()["text"]


async def test_silence_has_an_empty_text() -> None:
    async with live_server(CapableEngine([])) as server:
        assert (await transcribe(server)).json()["text"] == ""
        assert typed(events_of(await transcribe(server, stream="1"))) == [("transcript.text.done", "")]
        assert (await transcribe(server, response_format="srt")).body == b""


# --- streaming input


async def test_audio_that_is_streamed_is_answered_in_events() -> None:
    engine = CapableEngine(SCRIPT)
    async with live_server(engine) as server:
        answer = await post(
            server.port,
            f"{PATH}?model=whisper-1",
            bytes(640),
            "X-Streaming-Input: true",
            "Content-Type: audio/pcm;rate=8000",
        )
        assert typed(events_of(answer))[-1] == ("transcript.text.done", TEXT)
        whole = await post(
            server.port, f"{PATH}?stream=false", WAV, "X-Streaming-Input: true", "Content-Type: audio/wav"
        )
        assert whole.json()["text"] == TEXT
        lines = b'{"response_format":"text","stream":false}\n{"modality":"audio","payload":"AAAA"}\n'
        assert (await post(server.port, PATH, lines, "X-Streaming-Input: true")).body.decode().strip() == TEXT
    assert engine.requests[0].input_audio.sample_rate == 8000


# --- files


@pytest.mark.parametrize(
    ("filename", "kind", "data", "format"),
    [
        ("a.bin", None, WAV, "wav"),
        ("a.wav", None, b"fLaC....", "flac"),
        ("a", None, b"OggS\0\2..", "ogg"),
        ("a", None, b"\x1a\x45\xdf\xa3....", "webm"),
        ("a", None, b"ID3\3\0\0\0\0\0\2..\xff\xfb\x90\0", "mp3"),
        ("a", None, b"ID3\3\0\0\0\0\0\2..fLaC....", "flac"),
        ("blob", None, MPEG_2_5, "mp3"),
        ("blob", "text/plain", b"BW64" + WAV[4:], "wav"),
        ("a.mp3", "audio/mpeg", WAV, "wav"),
        ("a.pcm", "audio/pcm", b"\0\0\0\x18ftypM4A ....", "mp4"),
        ("blob", None, ADTS, "aac"),
        ("memo.m4a", None, b"\0\0\0\x08moov", "m4a"),
        ("a.mp3", None, b"......", "mp3"),
        ("a.pcm", None, b"......", "pcm16"),
        ("a.PCMU", "application/octet-stream", b"......", "pcmu"),
        ("a", "audio/pcm;rate=8000", b"......", "audio/pcm;rate=8000"),
    ],
)
async def test_kinds_of_files(filename: str, kind: str | None, data: bytes, format: str) -> None:
    engine = CapableEngine([])
    async with live_server(engine) as server:
        head = ("file", filename) if kind is None else ("file", filename, kind)
        assert (await transcribe(server, parts=((head, data),))).status == 200
    assert engine.inputs == [[InputChunk(Modality.AUDIO, data, format=format)]]


async def test_the_language_reaches_the_engine_from_every_front_end() -> None:
    engine = CapableEngine(SCRIPT)
    async with live_server(engine) as server:
        await transcribe(server, language="de-CH")
        await transcribe(server)
        async with connect(server.websocket_url, config={"input_audio": {"language": "EN"}}) as session:
            assert session.input_audio.language == "EN"
            await session.ask_text("x")
            refusals: list[tuple[Any, type[OmniError]]] = [
                ("tlh", UnsupportedParameter),
                ("d!", InvalidValue),
                (3, InvalidValue),
            ]
            for language, error in refusals:
                with pytest.raises(error) as caught:
                    await session.configure(input_audio={"language": language})
                assert caught.value.param == "input_audio.language"
            await session.configure(input_audio={"language": None})
            await session.ask_text("x")
    assert [request.language for request in engine.requests] == ["de", None, "en", None]


async def test_what_is_expected_reaches_the_engine_from_every_front_end() -> None:
    engine = CapableEngine(SCRIPT)
    most = ["a" * 64] * 100
    async with live_server(engine) as server:
        assert (await transcribe(server, prompt="Names: Ng")).status == 200
        assert (await transcribe(server, prompt="a" * 4096)).status == 200
        async with connect(server.websocket_url, config={"input_audio": {"keywords": ["Ng", "Ngo"]}}) as session:
            assert session.created.capabilities.keywords is True
            assert session.input_audio.keywords == ["Ng", "Ngo"]
            await session.ask_text("x")
            for fields, param in (
                ({"keywords": [*most, "a"]}, "keywords"),
                ({"keywords": ["a" * 65]}, "keywords[0]"),
                ({"prompt": "a" * 4097}, "prompt"),
            ):
                with pytest.raises(InvalidValue) as caught:
                    await session.configure(input_audio=fields)
                assert caught.value.param == f"input_audio.{param}"
            await session.configure(input_audio={"keywords": most, "prompt": "Then."})
            await session.ask_text("x")
            await session.configure(input_audio={"keywords": None, "prompt": None})
            await session.ask_text("x")
    texts = ["Names: Ng", "a" * 4096, "Ng, Ngo.", f"Then. {', '.join(most)}.", ""]
    assert [request.expected for request in engine.requests] == texts


async def test_an_engine_that_can_expect_nothing_refuses_it_by_name() -> None:
    async with live_server(CapableEngine(SCRIPT, keywords=False)) as server:
        refusal = await transcribe(server, prompt="Ng")
        assert (refusal.status, refusal.error["code"]) == (400, "unsupported_parameter")
        assert refusal.error["param"] == "prompt"
        async with connect(server.websocket_url) as session:
            assert not session.created.capabilities.keywords
            for name, value in (("keywords", ["Ng"]), ("prompt", "Ng")):
                with pytest.raises(UnsupportedParameter) as caught:
                    await session.configure(input_audio={name: value})
                assert caught.value.param == f"input_audio.{name}"
            await session.configure(input_audio={"keywords": [], "prompt": ""})


async def test_empty_fields_are_absent() -> None:
    engine = CapableEngine(SCRIPT)
    names = (
        "language",
        "temperature",
        "response_format",
        "stream",
        "prompt",
        "chunking_strategy",
        "known_speaker_names",
    )
    lists = ("timestamp_granularities[]", "timestamp_granularities[0]", "include[]", "model")
    async with live_server(engine) as server:
        response = await send(server, form(FILE, *(((name, None), b"") for name in (*names, *lists))))
    assert response.json() == {"text": TEXT, "usage": {"type": "duration", "seconds": 3663.0}}
    assert (engine.requests[0].language, engine.requests[0].sampling) == (None, {})


@pytest.mark.parametrize(
    "name", ["timestamp_granularities", "timestamp_granularities[]", "timestamp_granularities[{}]"]
)
async def test_lists_in_a_form(name: str) -> None:
    parts: list[Part] = [((name.format(index), None), value) for index, value in ((1, b"segment"), (0, b"word"))]
    async with live_server(CapableEngine(SCRIPT)) as server:
        response = await send(server, form(FILE, *parts, response_format="verbose_json"))
    assert {"words", "segments"} <= response.json().keys()


def test_an_indexed_list_is_in_the_order_of_its_indexes() -> None:
    pairs = [
        ("include[10]", "c"),
        ("include[2]", "b"),
        ("include[0]", "a"),
        ("a]", "x"),
        ("chunking_strategy[type]", "y"),
    ]
    assert form_fields(pairs) == {"include": ["a", "b", "c"], "a]": "x", "chunking_strategy": {"type": "y"}}


async def test_languages_by_their_names() -> None:
    engine = CapableEngine(SCRIPT)
    names = ["auto", "AUTO", "English", "gERMAN", "de", " english "]
    async with live_server(engine) as server:
        for language in names:
            assert (await transcribe(server, language=language)).status == 200, language
        assert [request.language for request in engine.requests] == [None, None, "en", "de", "de", "en"]
        for language in ("Dutch", "haitian creole", "Old Norse (runic)"):
            refusal = await transcribe(server, language=language)
            assert (refusal.status, refusal.error["code"]) == (400, "unsupported_parameter"), language
            assert refusal.error["param"] == "language"
            assert language.lower() in refusal.error["message"].lower()


@pytest.mark.parametrize("disposition", ['name="file"', "name=file; filename*=UTF-8''%D0%B7%D0%B0.wav"])
async def test_a_file_larger_than_a_field_may_lack_a_name(disposition: str) -> None:
    engine = CapableEngine(SCRIPT)
    data = wav_header(sample_rate=16_000, channels=1, data_bytes=100_000) + bytes(100_000)
    body = f"--xXx\r\nContent-Disposition: form-data; {disposition}\r\n\r\n".encode() + data + b"\r\n--xXx--\r\n"
    async with live_server(engine) as server:
        assert (await send(server, body)).json()["text"] == TEXT
    assert b"".join(chunk.payload for chunk in engine.inputs[0]) == data


def test_an_extended_file_name_is_read() -> None:
    reader = FormReader("multipart/form-data; boundary=xXx")
    reader.feed(b"--xXx\r\nContent-Disposition: form-data; name=sound; filename*=utf-8'en'%e2%82%ac%20a.pcmu\r\n\r\n")
    reader.feed(b"\r\n--xXx--\r\n")
    (part,) = reader.finish()
    assert part.filename == "€ a.pcmu"


# --- bad input


REFUSED_FIELDS: list[tuple[dict[str, Any], int, str, str]] = [
    ({"language": "tlh"}, 400, "unsupported_parameter", "language"),
    ({"language": "d!"}, 400, "invalid_value", "language"),
    ({"prompt": "a" * 4097}, 400, "invalid_value", "prompt"),
    ({"include__": "logprobs"}, 400, "unsupported_parameter", "include"),
    ({"chunking_strategy": "server_vad"}, 400, "unsupported_parameter", "chunking_strategy"),
    ({"response_format": "xml"}, 400, "invalid_value", "response_format"),
    ({"temperature": "hot"}, 400, "invalid_value", "temperature"),
    ({"temperature": "3"}, 400, "invalid_value", "temperature"),
    ({"model": "whisper-1", "model__": "whisper-1"}, 400, "invalid_value", "model"),
    ({"model__": "whisper-1", "model": "whisper-1"}, 400, "invalid_value", "model"),
    ({"stream": "maybe"}, 400, "invalid_value", "stream"),
    ({"stream": "true", "response_format": "srt"}, 400, "unsupported_parameter", "response_format"),
    ({"timestamp_granularities__": "word"}, 400, "invalid_value", "timestamp_granularities"),
    (
        {"response_format": "verbose_json", "timestamp_granularities__": "letter"},
        400,
        "invalid_value",
        "timestamp_granularities[0]",
    ),
]


async def test_fields_that_are_refused() -> None:
    async with live_server(CapableEngine([])) as server:
        for fields, status, code, param in REFUSED_FIELDS:
            response = await transcribe(server, "Accept: application/json", **fields)
            assert (response.status, response.error["code"], response.error["param"]) == (status, code, param), fields
            if "stream" not in fields:
                (event,) = events_of(await transcribe(server, **{**fields, "stream": "true"}))
                assert event.name == "error", fields


NO_FILES: list[tuple[tuple[Part, ...], int, str]] = [
    ((), 400, "invalid_value"),
    (((("file", None), b""),), 400, "invalid_value"),
    (((("file", None), b"hello"),), 415, "unsupported_format"),
    (((("sound", "a.wav"), WAV),), 400, "invalid_value"),
    ((FILE, FILE), 400, "invalid_value"),
    (((("file", "a.wav"), b""),), 400, "invalid_value"),
    (((("file", "a.txt"), b"hello"),), 415, "unsupported_format"),
    (((("file", "a.aiff"), b"FORM...."),), 415, "unsupported_format"),
]


async def test_files_that_are_none() -> None:
    async with live_server(CapableEngine([])) as server:
        for parts, status, code in NO_FILES:
            response = await transcribe(server, parts=parts)
            assert (response.status, response.error["code"], response.error["param"]) == (status, code, "file"), parts


UNREADABLE_FORMS: list[tuple[bytes, str]] = [
    (b"", "invalid_frame"),
    (b"hello", "invalid_frame"),
    (b"hello\r\n" + form(FILE), "invalid_frame"),
    (b"--xX", "invalid_frame"),
    (form(FILE)[:-8], "invalid_frame"),
    (b'--xXx\r\nContent-Disposition: form-data; filename="a"\r\n\r\na\r\n--xXx--\r\n', "invalid_frame"),
    (b"--xXx\r\n\r\na\r\n--xXx--\r\n", "invalid_frame"),
    (b"--xXx\r\nContent-Disposition: " + b"a" * 5000, "invalid_frame"),
    (form((("model", None), b"\xff"), FILE), "invalid_value"),
]


async def test_forms_that_cannot_be_read() -> None:
    async with live_server(CapableEngine([])) as server:
        for body, code in UNREADABLE_FORMS:
            response = await send(server, body)
            assert (response.status, response.error["code"]) == (400, code), body


@pytest.mark.parametrize(
    "kind", ["application/json", "multipart/form-data", "multipart/mixed; boundary=a", "multipart/form-data; boundary="]
)
async def test_bodies_of_another_type(kind: str) -> None:
    async with live_server(CapableEngine([])) as server:
        response = await post(server.port, PATH, b"{}", f"Content-Type: {kind}")
        assert (response.status, response.error["param"]) == (415, "Content-Type")
        response = await send(server, form(FILE), "Content-Encoding: gzip")
        assert (response.status, response.error["param"]) == (415, "Content-Encoding")


async def test_limits_of_a_form() -> None:
    async with live_server(CapableEngine([]), http={"max_body_bytes": 200_000}) as server:
        for size, status in ((MAX_FIELD_BYTES, 200), (MAX_FIELD_BYTES + 1, 413)):
            assert (await transcribe(server, unknown="a" * size)).status == status
        for count, status in ((MAX_PARTS - 1, 200), (MAX_PARTS, 400)):
            fields: dict[str, Any] = {f"field{index}": "a" for index in range(count)}
            response = await transcribe(server, **fields)
            assert response.status == status
        assert (await transcribe(server, parts=((("file", "a.pcm"), bytes(200_000)),))).status == 413


async def test_a_body_that_grows_over_the_cap_is_refused_while_it_uploads() -> None:
    async with (
        live_server(CapableEngine([]), http={"max_body_bytes": 100_000}) as server,
        raw_client(server.port) as client,
    ):
        await client.send(
            f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
            "Content-Type: multipart/form-data; boundary=xXx\r\n\r\n"
        )
        start = b'--xXx\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
        await client.send(b"%x\r\n%b\r\n" % (len(start), start))
        for _ in range(2):
            await client.send(b"%x\r\n%b\r\n" % (60_000, bytes(60_000)))
        assert (await client.response()).status == 413


async def test_what_an_engine_cannot_do_is_named() -> None:
    async with live_server() as server:
        for param, value in (("response_format", "verbose_json"), ("response_format", "srt"), ("language", "en")):
            field: dict[str, Any] = {param: value}
            response = await transcribe(server, **field)
            assert (response.status, response.error["code"]) == (400, "unsupported_parameter")
            assert response.error["param"] == param


async def test_an_engine_that_fails_midway_ends_the_stream_with_an_error() -> None:
    async with live_server(CapableEngine([TextOutput("a"), EngineFailed("broken")])) as server:
        events = events_of(await transcribe(server, stream="true"))
    assert [event.name for event in events] == [None, "error"]


@pytest.mark.slow
async def test_the_embedded_engine_writes_a_recording_down() -> None:
    from support.embedded_engine import EmbeddedEngine

    data = await asyncio.to_thread((Path(__file__).parents[2] / "data" / "goforward.wav").read_bytes)
    async with live_server(EmbeddedEngine()) as server:
        response = await transcribe(
            server,
            parts=((("file", "goforward.wav"), data),),
            response_format="verbose_json",
            timestamp_granularities__="word",
            language="en",
        )
        streamed = events_of(await transcribe(server, parts=((("file", "goforward.wav"), data),), stream="true"))
    heard = response.json()
    assert heard["text"] == "go forward ten meters"
    assert [word["word"] for word in heard["words"]] == heard["text"].split()
    assert 0 < heard["words"][0]["start"] < heard["words"][-1]["end"] < heard["duration"]
    assert streamed[-1].json()["text"] == heard["text"]


@pytest.mark.parametrize("cut", [0, 1, 3, 5, 9, 60, 100, 150])
async def test_a_form_is_the_same_however_it_is_cut(cut: int) -> None:
    reader = FormReader("multipart/form-data; boundary=xXx")
    body = b"\r\n" + form(FILE, model="whisper-1")
    reader.feed(body[:cut])
    reader.feed(body[cut:])
    model, file = reader.finish()
    assert (model.name, model.filename, bytes(model.data)) == ("model", None, b"whisper-1")
    assert (file.name, file.filename, bytes(file.data)) == ("file", "a.wav", WAV)
