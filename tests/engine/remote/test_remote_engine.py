"""The remote engine before a scripted upstream: what it asks, what it makes of the answers, how it speaks."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from support.engine_answers import Answer as EngineAnswer
from support.engine_answers import answer, asking, final, heard, said, streamed, text
from support.http_server import tls_contexts
from support.patience import PATIENCE_SEC
from support.scripted_upstream import (
    Answer,
    ScriptedUpstream,
    cut,
    delta,
    finish,
    hang,
    refuses,
    remote,
    says,
    streams,
    upstream,
    usage,
)

from omni_ws.core.chunks import FinishReason, InputChunk, Modality, OutputModality, Task
from omni_ws.core.history import Message
from omni_ws.engine.base import AudioOutput, EngineOutput, PartFailed, TextOutput, ToolCallOutput, TranscriptOutput
from omni_ws.errors import (
    EngineFailed,
    EngineOverloaded,
    InvalidValue,
    ModelNotFound,
    OmniError,
    PayloadTooLarge,
    UnsupportedModality,
    UnsupportedParameter,
    UpstreamInvalid,
)
from omni_ws.transport.http.exchange import HttpExchange

pytestmark = pytest.mark.usefixtures("no_task_left")

TONE = (np.sin(np.arange(4_800) / 9) * 20_000).astype("<i2")
PICTURE = b"GIF89a" + bytes(20)


def samples(outputs: list[EngineOutput]) -> Any:
    blocks = [output.samples for output in heard(outputs)]
    return np.rint(np.concatenate(blocks) * 32768).astype(int) if blocks else np.zeros(0, int)


def pcm(*pieces: bytes, content_type: str = "audio/pcm", breaks: bool = False) -> Answer:
    async def speak(exchange: HttpExchange) -> None:
        await exchange.start(200, [("Content-Type", content_type)])
        for piece in pieces:
            await exchange.write(piece)
        await (cut(exchange) if breaks else exchange.end())

    return speak


# chat


async def test_an_answer() -> None:
    answers = streams(delta(role="assistant"), delta(content="Hi "), delta(content="there"), finish(), usage(7, 2))
    async with upstream(answers) as there, remote(there, api_key="right") as engine:
        outputs = await answer(engine, "hello", request_id="req_7", sampling={"max_tokens": 5})
        assert outputs[:-1] == [TextOutput("Hi "), TextOutput("there")]
        assert (final(outputs).usage.input_tokens, final(outputs).usage.output_tokens) == (7, 2)
        assert there.requests[0]["max_tokens"] == 5
        assert there.headers[-1]["authorization"] == "Bearer right"
        assert there.headers[-1]["x-request-id"] == "req_7"
        assert (there.headers[-1]["user-agent"] or "").startswith("omni_ws/")


@pytest.mark.parametrize("audio", [False, True], ids=["text", "spoken"])
async def test_an_answer_is_the_same_however_it_is_read(audio: bool) -> None:
    writes = streams(*(delta(content=f"Sentence {number}. ") for number in range(9)), finish())
    async with (
        upstream(writes, speech=[pcm(TONE.tobytes())]) as there,
        remote(there, speech_upstream=there.url) as engine,
    ):
        expected = await answer(engine, audio=audio)
        one_by_one = [output async for output in streamed(engine, asking("hello", audio=audio))]
    assert said(one_by_one) == said(expected)
    assert (samples(one_by_one) == samples(expected)).all()
    assert one_by_one[-1] == expected[-1]


async def test_output_comes_as_it_is_made() -> None:
    goes_on = asyncio.Event()

    async def wait(exchange: HttpExchange) -> None:
        await goes_on.wait()

    async with (
        upstream(streams(delta(content="a"), wait, delta(content="b"), finish())) as there,
        remote(there) as engine,
    ):
        outputs = streamed(engine, asking("x"))
        assert await anext(outputs) == TextOutput("a")
        goes_on.set()
        assert await anext(outputs) == TextOutput("b")
        assert final([output async for output in outputs]).reason is FinishReason.STOP


async def test_any_ends_of_lines_and_no_blank_line_at_the_end() -> None:
    raw = b': hi\r\n\r\ndata: {"choices":[{"index":0,"delta":{"content":"x"}}]}\r\n\r\ndata: [DONE]'
    async with upstream(streams(raw, done=False)) as there, remote(there) as engine:
        assert said(await answer(engine)) == "x"


@pytest.mark.parametrize("kind", ["application/json", "text/plain; charset=utf-8", "application/octet-stream", ""])
@pytest.mark.parametrize("head", [b"", b"\r\n", b": working\n\n"])
async def test_events_under_any_content_type(kind: str, head: bytes) -> None:
    headers = (("Content-Type", kind),) if kind else ()
    answers = streams(
        head, delta(content="Hi "), delta(content="there"), finish("length"), usage(7, 2), headers=headers
    )
    async with upstream(answers) as there, remote(there) as engine:
        outputs = await answer(engine)
    assert (said(outputs), final(outputs).reason, final(outputs).usage.input_tokens) == (
        "Hi there",
        FinishReason.LENGTH,
        7,
    )


@pytest.mark.parametrize("kind", ["application/json", "text/event-stream", ""])
async def test_a_whole_answer_in_place_of_a_stream(kind: str) -> None:
    calls = [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}]
    message = {"role": "assistant", "content": "Hi there", "tool_calls": calls, "reasoning_content": "hm"}
    whole = {
        "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}],
        "usage": usage(7, 2)["usage"],
    }
    data = b" \n" + orjson.dumps(whole, option=orjson.OPT_INDENT_2)
    headers = (("Content-Type", kind),) if kind else ()
    async with (
        upstream(streams(data[:1], data[1:9], data[9:], done=False, headers=headers)) as there,
        remote(there) as engine,
    ):
        outputs = await answer(engine)
    assert (said(outputs), final(outputs).reason, final(outputs).usage.output_tokens) == (
        "Hi there",
        FinishReason.TOOL_CALLS,
        2,
    )
    assert [one.call.name for one in outputs if isinstance(one, ToolCallOutput)] == ["look"]


@pytest.mark.parametrize("body", [b"<html>busy</html>", b"", b" ", b'{"choices": "x"}', b"[]"])
async def test_a_body_that_is_no_answer(body: bytes) -> None:
    answers = streams(body, done=False, headers=(("Content-Type", "text/html"),))
    async with upstream(answers) as there, remote(there) as engine:
        with pytest.raises(UpstreamInvalid):
            await answer(engine)


@pytest.mark.parametrize(
    ("kind", "body"),
    [("text/html", b"{"), ("application/json", b'{"choices":[{"message":{"content":"He'), ("text/event-stream", b"")],
)
async def test_an_answer_that_is_cut_off(kind: str, body: bytes) -> None:
    answers = streams(body, done=False, headers=(("Content-Type", kind),))
    async with upstream(answers) as there, remote(there) as engine:
        with pytest.raises(EngineFailed):
            await answer(engine)


@pytest.mark.parametrize("events", [[], [usage(3, 1)]])
async def test_a_stream_may_end_without_done_behind_its_reason(events: list[Any]) -> None:
    ends = streams(delta(content="x"), finish("length"), *events, done=False)
    async with upstream(ends) as there, remote(there) as engine:
        outputs = await answer(engine)
        assert (said(outputs), final(outputs).reason) == ("x", FinishReason.LENGTH)
        assert final(outputs).usage.output_tokens == 1


@pytest.mark.parametrize(
    "breaks",
    [
        streams(done=False),
        streams(delta(content="x"), usage(3, 1), done=False),
        streams(delta(content="x"), {"choices": [{"index": 0, "delta": {}, "finish_reason": []}]}, done=False),
        streams(delta(content="x"), b'data: {"choi', done=False),
        streams(delta(content="x"), cut),
        streams(b"data: {]\n\n"),
        streams(b"data: 7\n\n"),
        streams(b'event: error\ndata: {"message":"hush","type":"server_error"}\n\n', done=False),
        streams(delta(content="x"), {"error": {"message": "hush", "type": "InternalServerError", "code": 500}}),
        streams(delta(content="x"), {"error": "hush"}),
        refuses(500, {"error": {"message": "hush"}}),
        refuses(401, {"error": {"message": "hush"}}),
        cut,
    ],
)
async def test_what_breaks_is_a_failure_without_the_upstreams_words(breaks: Answer) -> None:
    async with upstream(breaks) as there, remote(there) as engine:
        with pytest.raises(EngineFailed) as caught:
            await answer(engine)
        assert "hush" not in caught.value.message
        assert not caught.value.fatal


@pytest.mark.parametrize(
    ("refusal", "kind", "param"),
    [
        (refuses(400, {"error": {"message": "hot", "param": "temperature"}}), InvalidValue, "sampling.temperature"),
        (
            refuses(400, {"error": {"message": "no", "code": "unsupported_parameter", "param": "min_p"}}),
            UnsupportedParameter,
            "sampling.min_p",
        ),
        (refuses(404, {"error": {"message": "no model", "param": "model"}}), ModelNotFound, "model"),
        (refuses(413), PayloadTooLarge, None),
        (refuses(429, retry_after="60"), EngineOverloaded, None),
        (streams({"error": {"message": "hot", "type": "BadRequestError", "code": 400}}), InvalidValue, None),
    ],
)
async def test_refusals(refusal: Answer, kind: type[OmniError], param: str | None) -> None:
    async with upstream(refusal) as there, remote(there) as engine:
        with pytest.raises(kind) as caught:
            await answer(engine)
        assert caught.value.param == param


async def test_an_error_page_without_an_end_is_not_read_to_its_end() -> None:
    async def endless(exchange: HttpExchange) -> None:
        await exchange.start(400, [("Content-Type", "text/html")])
        while True:
            await exchange.write(b"x" * 65536)

    async with upstream(endless) as there, remote(there) as engine:
        with pytest.raises(InvalidValue):
            await answer(engine)
        await there.deserted.wait()


async def test_what_was_heard_comes_along() -> None:
    event = {"choices": [], "input_transcript": {"text": "go", "interim": False, "start_ms": 0}}
    async with (
        upstream(streams(event, delta(content="ok"), finish()), owner="omni_ws", transcripts=True) as there,
        remote(there) as engine,
    ):
        assert (await answer(engine))[0] == TranscriptOutput("go", start_ms=0)
        assert OutputModality.TRANSCRIPT in engine.capabilities.output_modalities
    async with upstream(says("x"), owner="omni_ws") as there, remote(there) as engine:
        assert OutputModality.TRANSCRIPT not in engine.capabilities.output_modalities


@pytest.mark.parametrize(
    ("owner", "hears", "takes"), [("others", True, True), ("others", False, False), ("omni_ws", True, False)]
)
async def test_which_upstreams_take_earlier_speech(owner: str, hears: bool, takes: bool) -> None:
    modalities = ("text", "audio") if hears else ("text",)
    async with upstream(says("x"), owner=owner) as there, remote(there, input_modalities=modalities) as engine:
        assert engine.capabilities.speech_in_history is takes


async def test_earlier_pictures_go_where_something_sees() -> None:
    picture = InputChunk(Modality.IMAGE, PICTURE)
    history = (Message("user", "What is this?", picture=picture), Message("assistant", "A dot."))
    async with upstream(says("Red.")) as there, remote(there, input_modalities=("text", "image")) as engine:
        assert engine.capabilities.pictures_in_history == {Modality.IMAGE}
        await answer(engine, "What colour?", history=history)
        first, second, third = there.requests[0]["messages"]
        assert [part["type"] for part in first["content"]] == ["text", "image_url"]
        assert base64.b64decode(first["content"][1]["image_url"]["url"].partition(",")[2]) == PICTURE
        assert (second["content"], third["content"]) == ("A dot.", "What colour?")


async def test_large_requests_and_events_go_through_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omni_ws.engine.remote.engine._INLINE_BYTES", 10)
    data = base64.b64encode(TONE.tobytes()).decode()
    async with (
        upstream(streams(delta(audio={"data": data}), finish())) as there,
        remote(there, modalities=("text", "audio")) as engine,
    ):
        outputs = await answer(engine, "x" * 100, audio=True)
        assert (samples(outputs) == TONE).all()
        assert there.requests[0]["messages"][0]["content"] == "x" * 100


async def test_sound_goes_in() -> None:
    async with upstream(says("x")) as there, remote(there) as engine:
        outputs = await answer(engine, text("what is this"), InputChunk(Modality.AUDIO, bytes(32_000)))
        parts = there.requests[0]["messages"][0]["content"]
        assert [part["type"] for part in parts] == ["text", "input_audio"]
        assert final(outputs).usage.input_audio_ms == 1000


async def test_too_much_goes_nowhere() -> None:
    async with upstream(says("x")) as there, remote(there, max_request_bytes=1000) as engine:
        with pytest.raises(PayloadTooLarge):
            await answer(engine, "x" * 1001)
        assert said(await answer(engine, "x" * 1000)) == "x"


# capabilities


async def test_capabilities_are_what_the_operator_says() -> None:
    async with upstream(says("x")) as there:
        async with remote(there) as engine:
            can = engine.capabilities
            assert can.input_modalities == frozenset({Modality.TEXT})
            assert can.output_modalities == frozenset({OutputModality.TEXT})
            assert (can.tasks, can.extend, can.voices) == (frozenset({Task.CHAT}), False, ())
        settings: dict[str, Any] = {
            "input_modalities": ("text", "audio"),
            "speech_upstream": there.url,
            "voices": ("ann", "bob"),
            "sampling": ("temperature",),
            "stage_params": ("talker.speed",),
        }
        async with remote(there, **settings) as engine:
            can = engine.capabilities
            assert can.input_modalities == {Modality.TEXT, Modality.AUDIO}
            assert can.output_modalities == {OutputModality.TEXT, OutputModality.AUDIO}
            assert (can.tasks, can.voices) == (frozenset({Task.CHAT, Task.SPEECH}), ("ann", "bob"))
            assert (can.sampling, can.stage_params) == (frozenset({"temperature"}), frozenset({"talker.speed"}))


# the model speaks


async def test_a_model_that_speaks() -> None:
    events = [
        delta(role="assistant"),
        delta(content="Hi"),
        *(delta(audio={"data": base64.b64encode(piece.tobytes()).decode()}) for piece in np.split(TONE, 4)),
        delta(audio={"transcript": "Hi"}),
        finish(),
    ]
    async with upstream(streams(*events)) as there, remote(there, modalities=("text", "audio")) as engine:
        outputs = await answer(engine, audio=True, voice="ann")
        assert said(outputs) == "Hi"
        assert (samples(outputs) == TONE).all()
        assert final(outputs).usage.output_audio_ms == 200
        assert there.requests[0]["audio"] == {"voice": "ann", "format": "pcm16"}
        await answer(engine)
        assert there.requests[1]["modalities"] == ["text"]


# another server speaks


async def test_a_voice_for_a_model_that_only_writes() -> None:
    words = ["One is", " here. T", "wo is there", ". Three"]
    speech = [pcm(TONE[start : start + 1600].tobytes()) for start in (0, 1600, 3200)]
    async with (
        upstream(says(*words)) as there,
        upstream(says(), speech=speech, models=("voice",)) as other,
        remote(there, speech_upstream=other.url, voices=("ann",)) as engine,
    ):
        outputs = await answer(engine, audio=True, voice="ann")
        assert said(outputs) == "".join(words)
        assert final(outputs).usage.output_audio_ms == 200
        assert (samples(outputs) == TONE).all()
        assert [body["input"] for body in other.spoken] == ["One is here.", "Two is there.", "Three"]
        assert other.spoken[0] == {
            "model": "voice",
            "input": "One is here.",
            "response_format": "pcm",
            "stream": True,
            "stream_format": "audio",
            "voice": "ann",
        }
        assert "modalities" not in there.requests[0]
        # Without a wish for sound nothing is spoken.
        await answer(engine)
        assert len(other.spoken) == 3


async def test_speed_is_that_of_the_voice() -> None:
    async with (
        upstream(says("Hi."), speech=[pcm(b"\1\0")]) as there,
        remote(there, speech_upstream=there.url) as engine,
    ):
        assert engine.capabilities.speed
        await answer(engine, audio=True, speed=0.5)
        assert there.spoken[0]["speed"] == 0.5
        assert "speed" not in there.requests[0]
    async with upstream(says("Hi.")) as there, remote(there) as engine:
        assert not engine.capabilities.speed


async def test_it_speaks_while_the_rest_is_written() -> None:
    goes_on = asyncio.Event()

    async def wait(exchange: HttpExchange) -> None:
        await goes_on.wait()

    writes = streams(delta(content="First. Se"), wait, delta(content="cond."), finish())
    async with (
        upstream(writes, speech=[pcm(TONE.tobytes())]) as there,
        remote(there, speech_upstream=there.url) as engine,
    ):
        outputs = streamed(engine, asking("x", audio=True))
        assert await anext(outputs) == TextOutput("First. Se")
        assert isinstance(await anext(outputs), AudioOutput)
        goes_on.set()
        rest = [output async for output in outputs]
        assert said(rest) == "cond."
        assert len(there.spoken) == 2


@pytest.mark.parametrize(
    ("content_type", "rate"),
    [
        ("audio/pcm", 24_000),
        ("audio/pcm;rate=16000", 16_000),
        ("application/octet-stream", 24_000),
        ("audio/wav", 24_000),
    ],
)
async def test_speech_as_bytes(content_type: str, rate: int) -> None:
    data = TONE.tobytes()
    pieces = [data[place : place + 999] for place in range(0, len(data), 999)]
    async with (
        upstream(says(), speech=[pcm(*pieces, content_type=content_type)]) as there,
        remote(there, speech_upstream=there.url) as engine,
    ):
        outputs = await answer(engine, "Read me.", audio=True, task=Task.SPEECH)
        assert (samples(outputs) == TONE).all()
        assert {output.sample_rate for output in heard(outputs)} == {rate}
        assert there.requests == []
        assert final(outputs).usage.input_tokens == 2


@pytest.mark.parametrize("dialect", ["openai", "chunks"])
async def test_speech_as_events(dialect: str) -> None:
    pieces = [base64.b64encode(piece.tobytes()).decode() for piece in np.split(TONE, 3)]
    if dialect == "openai":
        events: list[Any] = [{"type": "speech.audio.delta", "audio": piece} for piece in pieces]
        answers = streams(*events, {"type": "speech.audio.done", "usage": {}}, done=False)
    else:
        kind = "audio.speech.chunk"
        events = [
            {"object": kind, "audio": {"data": piece, "sample_rate": 16_000}, "finish_reason": None} for piece in pieces
        ]
        answers = streams(*events, {"object": kind, "audio": None, "finish_reason": "stop"})
    async with upstream(says(), speech=[answers]) as there, remote(there, speech_upstream=there.url) as engine:
        outputs = await answer(engine, "Read me.", audio=True, task=Task.SPEECH)
        assert (samples(outputs) == TONE).all()
        assert heard(outputs)[0].sample_rate == (24_000 if dialect == "openai" else 16_000)


@pytest.mark.parametrize(
    "speech",
    [
        refuses(200, {"detail": "hush"}),
        pcm(TONE.tobytes(), content_type="audio/mpeg"),
        pcm(TONE.tobytes(), content_type="audio/pcm;channels=2"),
        pcm(TONE.tobytes(), content_type="text/html"),
        pcm(TONE.tobytes(), breaks=True),
        streams({"type": "speech.audio.delta", "audio": "AAAA"}, done=False),
        streams({"type": "speech.audio.delta", "audio": "#"}),
        streams({"error": {"message": "hush"}}),
        refuses(500, {"error": {"message": "hush"}}),
        cut,
    ],
)
@pytest.mark.parametrize("task", [Task.CHAT, Task.SPEECH])
async def test_speech_that_breaks(speech: Answer, task: Task) -> None:
    async with upstream(says("Hi."), speech=[speech]) as there, remote(there, speech_upstream=there.url) as engine:
        if task is Task.SPEECH:
            with pytest.raises(EngineFailed) as caught:
                await answer(engine, "Hi.", audio=True, task=task)
            failure: OmniError = caught.value
        else:  # the text goes on
            outputs = await answer(engine, "Hi.", audio=True, task=task)
            assert said(outputs) == "Hi."
            (failure,) = (output.error for output in outputs if isinstance(output, PartFailed))
        assert failure.param == "tts"
        assert "hush" not in failure.message


async def test_a_refused_voice_is_the_clients_fault() -> None:
    no_voice = refuses(400, {"error": {"message": "unknown voice", "param": "voice"}})
    async with upstream(says("Hi."), speech=[no_voice]) as there, remote(there, speech_upstream=there.url) as engine:
        with pytest.raises(InvalidValue, match="unknown voice") as caught:
            await answer(engine, audio=True, voice="zoe")
        assert caught.value.param == "voice"


async def test_a_chat_that_breaks_ends_the_speech() -> None:
    breaks = streams(delta(content="First. "), delta(content="Second."), cut)
    async with (
        upstream(breaks, speech=[pcm(TONE.tobytes())]) as there,
        remote(there, speech_upstream=there.url) as engine,
    ):
        outputs: list[EngineOutput] = []
        with pytest.raises(EngineFailed):
            await engine.generate(asking("x", audio=True), EngineAnswer(outputs))
        assert said(outputs) == "First. Second."


async def test_cancelling_reaches_both_servers() -> None:
    async with (
        upstream(streams(delta(content="First. Second"), hang)) as there,
        upstream(says(), speech=[hang], models=("voice",)) as other,
        remote(there, speech_upstream=other.url) as engine,
    ):
        asked = asyncio.create_task(answer(engine, audio=True))
        await other.asked.wait()
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        async with asyncio.timeout(PATIENCE_SEC):
            await there.deserted.wait()
            await other.deserted.wait()


async def test_texts_are_read_in_clauses_and_what_cannot_be_said_is_not() -> None:
    async with upstream(says(), speech=[pcm(b"\1\0")]) as there, remote(there, speech_upstream=there.url) as engine:
        await answer(engine, "One. ", "Two! ", "... ", "Three", audio=True, task=Task.SPEECH)
        assert [body["input"] for body in there.spoken] == ["One.", "Two!", "Three"]
        assert heard(await answer(engine, "...", audio=True, task=Task.SPEECH)) == []


async def test_what_cannot_be_read_aloud() -> None:
    async with upstream(says(), speech=[pcm(b"\1\0")]) as there, remote(there, speech_upstream=there.url) as engine:
        with pytest.raises(UnsupportedModality):
            await answer(engine, InputChunk(Modality.AUDIO, bytes(3200)), audio=True, task=Task.SPEECH)
        with pytest.raises(UnsupportedParameter):
            await answer(engine, "x", task=Task.SPEECH)
    async with upstream(says("x")) as there, remote(there) as engine:
        with pytest.raises(UnsupportedParameter, match="no voice"):
            await answer(engine, "x", audio=True)


# keys


async def test_a_key_is_told_to_its_own_server_alone() -> None:
    async with (
        upstream(says("Hi."), speech=[pcm(b"\1\0")]) as there,
        upstream(says(), speech=[pcm(b"\1\0")], models=("voice",)) as other,
    ):

        async def keys(speech: str, **settings: Any) -> tuple[set[str | None], set[str | None]]:
            there.headers.clear()
            other.headers.clear()
            async with remote(there, api_key="one", speech_upstream=speech, **settings) as engine:
                await answer(engine, audio=True)
            told = [{one["authorization"] for one in server.headers} for server in (there, other)]
            return told[0], told[1]

        assert await keys(other.url) == ({"Bearer one"}, {None})
        assert await keys(other.url, speech_api_key="two") == ({"Bearer one"}, {"Bearer two"})
        assert await keys(there.url.removesuffix("/v1")) == ({"Bearer one"}, set())


async def test_the_environment_adds_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login me password hush\n")
    monkeypatch.setenv("NETRC", str(netrc))
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with upstream(says("x")) as there, remote(there) as engine:
        assert said(await answer(engine)) == "x"
        assert {one["authorization"] for one in there.headers} == {None}


async def test_redirects_are_not_followed() -> None:
    async with (
        upstream(says("x")) as other,
        upstream(refuses(307, location=other.url + "/chat/completions")) as there,
        remote(there, api_key="one") as engine,
    ):
        with pytest.raises(EngineFailed):
            await answer(engine)
        assert other.requests == []


async def test_https(tmp_path: Path) -> None:
    server, _ = tls_contexts(tmp_path)
    async with ScriptedUpstream(chat=[says("x")]).serve(ssl=server) as there:
        url = there.url.replace("http:", "https:")
        async with remote(url, ca_file=tmp_path / "certificate.pem") as engine:
            assert said(await answer(engine)) == "x"
        with pytest.raises(EngineFailed, match="certificate"):
            async with remote(url):
                pytest.fail("nobody vouches for this certificate")
