"""``/v1/realtime/translations``: speech in, and its translation as speech and text; every event by OpenAI's types."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import orjson
import pytest
from openai.types.realtime import RealtimeTranslationClientSecretCreateResponse, RealtimeTranslationServerEvent
from support.embedded_engine import ears
from support.inline_workers import inline
from support.inline_workers import loud_24k as loud
from support.inline_workers import quiet_24k as quiet
from support.live_server import LiveServer, live_server
from support.native_client import FrameClient
from support.raw_http import post
from support.realtime_client import by_type
from support.scripted_engines import Ears, RetortEngine, ToneEngine
from support.scripted_upstream import ScriptedUpstream, says, upstream
from support.speech_clips import at_24k, clip_bytes, silence
from support.voices import need
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from omni_ws.config.keys import ApiKey, digest
from omni_ws.config.model import VoiceChoice
from omni_ws.core.chunks import Hearing
from omni_ws.engine.base import Engine, TranscriptOutput
from omni_ws.engine.composed.engine import ComposedEngine
from omni_ws.engine.fake import EchoEngine
from omni_ws.engine.llm.rules_engine import RulesEngine
from omni_ws.engine.remote.engine import RemoteLlmEngine
from omni_ws.engine.remote.settings import RemoteLlmSettings
from omni_ws.engine.tts.speech_engine import SpeechEngine
from omni_ws.engine.tts.voice_process import VoiceProcess
from omni_ws.transport.realtime import translation_sessions

PATH = "/v1/realtime/translations"
_EVENTS = by_type(RealtimeTranslationServerEvent)
#: Voices of two languages, which say of themselves what they speak.
VOICES: dict[str, Any] = {"voice_languages": {"tone": "en", "bell": "es"}}


class Interpreting(FrameClient):
    """One connection, which holds every event to the types of OpenAI's library."""

    async def send(self, kind: str, **fields: Any) -> None:
        await self.connection.send(orjson.dumps({"type": kind, **fields}).decode())

    async def receive(self) -> dict[str, Any]:
        event: dict[str, Any] = orjson.loads(await self.message())
        _EVENTS[event["type"]].model_validate(event)
        self.frames.append(event)
        return event

    async def say(self, audio: bytes) -> None:
        for start in range(0, len(audio), 9600):
            piece = base64.b64encode(audio[start : start + 9600]).decode()
            await self.send("session.input_audio_buffer.append", audio=piece)

    async def update(self, **audio: Any) -> dict[str, Any]:
        await self.send("session.update", session={"audio": audio})
        session: dict[str, Any] = (await self.until("session.updated"))["session"]
        return session

    def text(self, kind: str) -> str:
        return "".join(event["delta"] for event in self.seen(f"session.{kind}_transcript.delta"))

    @property
    def audio(self) -> bytes:
        return b"".join(base64.b64decode(event["delta"]) for event in self.seen("session.output_audio.delta"))


@contextlib.asynccontextmanager
async def interpreter(server: LiveServer, query: str = "model=gpt-x", **options: Any) -> AsyncIterator[Interpreting]:
    url = f"ws://127.0.0.1:{server.port}{PATH}?{query}"
    async with connect(url, max_size=None, ping_interval=None, proxy=None, **options) as connection:
        client = Interpreting(connection)
        assert (await client.receive())["type"] == "session.created"
        yield client


def engine(*turns: list[Any], llm: Engine | None = None, **voice: Any) -> ComposedEngine:
    return ComposedEngine(llm or RetortEngine("hola mundo"), asr=Ears(*turns), tts=ToneEngine(**{**VOICES, **voice}))


@pytest.mark.virtual_clock
async def test_utterances_are_translated_one_after_the_other() -> None:
    llm = RetortEngine("hola mundo")
    parts = engine(["good morning"], [], ["and good night"], llm=llm)
    async with live_server(parts) as server, interpreter(inline(server)) as client:
        created = client.frames[0]["session"]
        assert (created["model"], created["type"]) == ("gpt-x", "translation")
        session = await client.update(output={"language": "es-MX"}, input={"transcription": {"model": "any"}})
        assert session["audio"]["output"] == {"language": "es-MX"}
        assert session["audio"]["input"]["transcription"] == {"model": "any"}
        for _ in range(3):  # the second has no words
            await client.say(quiet(96) + loud(320) + quiet(640))
        await client.send("session.close")
        assert (await client.until("session.closed"))["type"] == "session.closed"
        with pytest.raises(ConnectionClosed) as closed:
            await client.receive()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1000
    assert client.text("input") == "good morning and good night"
    assert client.text("output") == "hola mundo hola mundo"
    assert len(client.audio) == 2 * 2 * 480 * 2  # two words of 20 ms each time
    (first, *_) = client.seen("session.output_audio.delta")
    assert (first["sample_rate"], first["channels"], first["format"]) == (24_000, 1, "pcm16")
    times = [event["elapsed_ms"] for event in client.frames if "elapsed_ms" in event]
    assert times == sorted(times)
    assert all(time % 200 == 0 for time in times)
    assert times[-1] <= 3200
    # What the LLM is told: nothing of what was said before, and nothing but to translate.
    assert [request.history for request in llm.requests] == [(), (), ()]
    assert llm.aborted == 1  # where nothing was said, nothing is
    assert all("Translate what the user says into Spanish" in request.instructions for request in llm.requests)


@pytest.mark.virtual_clock
async def test_without_transcription_only_the_translation_is_told() -> None:
    async with live_server(engine(["good morning"])) as server, interpreter(inline(server)) as client:
        await client.update(output={"language": "es"})
        session = await client.update(input={"noise_reduction": {"type": "near_field"}})
        assert session["audio"]["output"] == {"language": "es"}
        await client.say(quiet(96) + loud(320))
        await client.send("session.close")  # in the middle of an utterance, which is translated still
        await client.send("session.input_audio_buffer.append", audio="")
        assert (await client.until("error"))["error"]["code"] == "invalid_value"
        await client.send("session.close")
        await client.until("session.closed")
    assert client.text("output").split() == ["hola", "mundo"]
    assert client.text("input") == ""


@pytest.mark.virtual_clock
@pytest.mark.parametrize(
    ("voice", "language", "named", "spoken"),
    [
        (VOICES, "es", "bell", None),
        (VOICES, "en", "tone", None),
        ({"voice_languages": {}}, "fr", "tone", None),
        ({"voice_languages": {"tone": "en"}, "speech_languages": frozenset({"en", "fr"})}, "fr", "tone", "fr"),
    ],
)
async def test_a_voice_of_the_language_speaks(
    voice: dict[str, Any], language: str, named: str, spoken: str | None
) -> None:
    tts = ToneEngine(**voice)
    parts = ComposedEngine(RetortEngine("bon jour"), asr=Ears(["good morning"]), tts=tts)
    async with live_server(parts) as server, interpreter(inline(server)) as client:
        await client.update(output={"language": language})
        await client.say(quiet(96) + loud(320) + quiet(640))
        await client.until("session.output_audio.delta")
        await client.send("session.close")
        await client.until("session.closed")
    (request,) = tts.requests
    assert (request.voice, request.speech_language) == (named, spoken)


@pytest.mark.virtual_clock
async def test_the_model_reads_what_was_said_and_nothing_about_it() -> None:
    """Elsewhere it is told which language the user speaks; here that would be translated, too."""
    llm = RetortEngine("good morning")
    heard = TranscriptOutput("buenos días", hearing=Hearing("spanish"))
    async with live_server(engine([heard], llm=llm)) as server, interpreter(inline(server)) as client:
        await client.say(quiet(96) + loud(320) + quiet(640))
        await client.send("session.close")
        await client.until("session.closed")
    assert b"".join(chunk.payload for chunk in llm.reads).decode() == "buenos días"
    assert client.text("output") == "good morning"


@pytest.mark.virtual_clock
async def test_wrong_events_are_refused_by_name_and_the_session_goes_on() -> None:
    async with live_server(engine(["good morning"])) as server, interpreter(inline(server)) as client:
        wrong: tuple[tuple[str, dict[str, Any], str], ...] = (
            ("session.update", {"session": {"audio": {"output": {"language": "fr"}}}}, "session.audio.output.language"),
            ("session.update", {"session": {"audio": {"output": {"language": 5}}}}, "session.audio.output.language"),
            ("session.update", {"session": {"audio": {"input": {"transcription": {"model": 5}}}}}, "session.audio"),
            ("session.update", {"session": {"audio": {"input": {"transcription": {}}}}}, "session.audio"),
            ("session.update", {"session": {"type": "realtime"}}, "session.type"),
            ("session.input_audio_buffer.append", {"audio": "!"}, "audio"),
            ("session.input_audio_buffer.append", {"audio": "AAAA"}, "audio"),
            ("response.create", {}, "type"),
            ("input_audio_buffer.commit", {}, "type"),
        )
        for kind, fields, param in wrong:
            await client.send(kind, event_id="mine", **fields)
            error = (await client.until("error"))["error"]
            assert (error["type"], error["event_id"]) == ("invalid_request_error", "mine"), (kind, error)
            assert error["param"].startswith(param), (kind, error)
        await client.update(output={"language": "es"})


@pytest.mark.virtual_clock
async def test_a_failure_is_told_and_the_next_utterance_is_translated() -> None:
    async with (
        upstream(says("hola"), says("mundo")) as model,
        live_server(engine(["one"], ["two"], llm=_remote(model)), expect_errors=True) as server,
        interpreter(inline(server)) as client,
    ):
        model.chat.insert(0, _broken)
        await client.update(output={"language": "es"})
        await client.say(quiet(96) + loud(320) + quiet(640))
        assert (await client.until("error"))["error"]["type"] == "invalid_request_error"  # as the LLM said
        await client.say(quiet(96) + loud(320) + quiet(640))
        await client.until("session.output_transcript.delta")
        await client.send("session.close")
        await client.until("session.closed")


async def _broken(exchange: Any) -> None:
    await exchange.respond_json(400, {"error": {"message": "no", "type": "invalid_request_error"}})


def _remote(model: ScriptedUpstream) -> RemoteLlmEngine:
    return RemoteLlmEngine(RemoteLlmSettings(urls=(model.url,), start_timeout=0))


@pytest.mark.virtual_clock
async def test_a_session_ends_when_it_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(translation_sessions, "MAX_SESSION_SEC", 100)
    async with live_server(engine()) as server, interpreter(inline(server)) as client:
        await client.until("session.closed")


@pytest.mark.virtual_clock
@pytest.mark.parametrize(
    ("parts", "lacks"),
    [
        (EchoEngine(), "a recogniser that knows languages"),
        (engine(llm=RulesEngine()), "start the server with --llm URL"),
        (ComposedEngine(RetortEngine(), asr=Ears()), "start the server with --tts"),
        (engine(voice_languages={"tone": "it"}), "--languages"),
    ],
)
async def test_what_cannot_translate_says_what_it_lacks(parts: Engine, lacks: str) -> None:
    async with live_server(parts) as server:
        url = f"ws://127.0.0.1:{server.port}{PATH}"
        async with connect(url, ping_interval=None, proxy=None) as connection:
            error = orjson.loads(await connection.recv())["error"]
            assert (error["code"], lacks in error["message"]) == ("unsupported_parameter", True), error
            with pytest.raises(ConnectionClosed):
                await connection.recv()
        answer = await post(server.port, f"{PATH}/client_secrets", {})
        assert answer.status == 400
        assert lacks in answer.json()["error"]["message"]


# Client secrets.

KEYS = (ApiKey(name="one", key_sha256=digest("sesame")),)
ONE = "Authorization: Bearer sesame"


async def test_a_client_secret_opens_translations_alone() -> None:
    async with live_server(engine(), keys=KEYS) as server:
        inline(server)
        wanted = {"model": "gpt-y", "audio": {"output": {"language": "es"}}}
        body = {"session": wanted, "expires_after": {"anchor": "created_at", "seconds": 60}}
        answer = await post(server.port, f"{PATH}/client_secrets", body, ONE)
        assert answer.status == 200, answer.body
        made = RealtimeTranslationClientSecretCreateResponse.model_validate(answer.json())
        assert (made.session.audio.output.language, made.session.model) == ("es", "gpt-y")  # type: ignore[union-attr]
        bearer = {"additional_headers": {"Authorization": f"Bearer {made.value}"}}
        async with interpreter(server, query="", **bearer) as client:
            session = client.frames[0]["session"]
            assert (session["model"], session["audio"]["output"]["language"]) == ("gpt-y", "es")
        realtime = (await post(server.port, "/v1/realtime/client_secrets", {}, ONE)).json()["value"]
        for path, value in (("/v1/realtime", made.value), (PATH, realtime), (PATH, "none")):
            assert await _refused(f"ws://127.0.0.1:{server.port}{path}?model=x", value) == 401
        for wrong in ({"session": {"audio": {"output": {"language": "fr"}}}}, {"session": {"model": 5}}):
            assert (await post(server.port, f"{PATH}/client_secrets", wrong, ONE)).status == 400
        assert (await post(server.port, f"{PATH}/client_secrets", {})).status == 401


async def _refused(url: str, value: str) -> int:
    with pytest.raises(InvalidStatus) as refusal:
        await _open(url, value)
    return refusal.value.response.status_code


async def _open(url: str, value: str) -> ClientConnection:
    return await connect(url, proxy=None, additional_headers={"Authorization": f"Bearer {value}"})


# A real voice and a real model, which is asked by URL.


@pytest.mark.slow
@pytest.mark.real_time
async def test_speech_is_heard_translated_by_a_server_and_spoken_in_the_language() -> None:
    async with upstream(says("Avance", " diez", " metros."), says("Diez", " de", " tréboles.")) as model:
        tts = SpeechEngine(VoiceProcess(need(VoiceChoice.ESPEAK)))
        async with (
            live_server(ComposedEngine(_remote(model), asr=ears(), tts=tts)) as server,
            interpreter(server) as client,
        ):
            await client.update(output={"language": "es"}, input={"transcription": {"model": "any"}})
            for clip in ("goforward", "cards_001"):
                await client.say(at_24k(silence(0.6) + clip_bytes(clip) + silence(1.5)))
            await client.send("session.close")
            await client.until("session.closed")
    assert client.text("input") == "go forward ten meters ten of clubs"
    assert client.text("output") == "Avance diez metros. Diez de tréboles."
    samples = np.frombuffer(client.audio, "<i2").astype(np.float32) / 32768
    assert 1 < len(samples) / 24_000 < 8
    assert np.sqrt(np.mean(samples**2)) > 0.02
    for request, said in zip(model.requests, ("go forward ten meters", "ten of clubs"), strict=True):
        told, asked = request["messages"]
        assert (told["role"], "into Spanish" in told["content"]) == ("system", True)
        assert (asked["role"], asked["content"]) == ("user", said)
