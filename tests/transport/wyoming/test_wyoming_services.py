"""Wyoming's services over real sockets, by the client of the reference implementation: which events answer which."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.live_server import live_server, read
from support.scripted_engines import HearingEngine
from support.wyoming_peer import ON, AudioStart, AudioStop, WyomingPeer, peer
from wyoming.asr import Transcribe, Transcript
from wyoming.handle import Handled
from wyoming.info import Describe, Info, SelectProgram
from wyoming.ping import Ping
from wyoming.tts import Synthesize, SynthesizeChunk, SynthesizeStart, SynthesizeStop, SynthesizeVoice

from omni_ws import __version__
from omni_ws.core.chunks import Hearing, Modality, Task
from omni_ws.engine.base import AudioOutput, EngineState, TextOutput, TranscriptOutput
from omni_ws.errors import EngineFailed

pytestmark = pytest.mark.virtual_clock

SAID = (
    TranscriptOutput("What is", interim=True),
    TranscriptOutput("What is it?", hearing=Hearing("english")),
    TranscriptOutput(" A cup."),
)
HALF_A_SECOND = AudioOutput(np.full(12_000, 0.25, np.float32), 24_000)
VOICES: dict[str, Any] = {
    "voices": ("ann", "bert"),
    "voice_languages": {"ann": "en-us", "bert": "de"},
    "speech_languages": frozenset({"en", "de"}),
    "languages": frozenset({"en", "de"}),
}


def talker(*answer: Any, **changes: Any) -> HearingEngine:
    """Hears SAID in any speech, and gives this answer to any text."""
    return HearingEngine(answer or (HALF_A_SECOND,), heard=SAID, **{**VOICES, **changes})


async def dictate(client: WyomingPeer, audio: bytes, rate: int, width: int, channels: int) -> None:
    await client.send(Transcribe(language="en"), AudioStart(rate, width, channels))
    await client.speak(audio, rate=rate, width=width, channels=channels)
    await client.send(AudioStop())


# description


async def test_info_says_what_is_served() -> None:
    async with live_server(talker(), **ON) as server, peer(server) as client:
        await client.send(SelectProgram("omni_ws"), Describe())
        info = Info.from_event(await client.until("info"))
        [ears], [mouth], [mind] = info.asr, info.tts, info.handle
        programs = (ears, mouth, mind)
        assert {(one.name, one.version, one.installed) for one in programs} == {("omni_ws", __version__, True)}
        assert [(one.name, one.languages) for one in ears.models] == [("scripted", ["de", "en"])]
        assert [(one.name, one.languages) for one in mouth.voices] == [("ann", ["en-US"]), ("bert", ["de"])]
        assert [one.languages for one in mind.models] == [["de", "en"]]
        assert ears.supports_transcript_streaming
        assert ears.requires_external_vad
        assert mouth.supports_synthesize_streaming == server.engine.capabilities.extend
        assert mind.supports_handled_streaming
        assert not mind.supports_home_control
        assert all(one.attribution.name for one in (*programs, *ears.models, *mouth.voices, *mind.models))
        assert (info.wake, info.intent, info.mic, info.snd, info.satellite) == ([], [], [], [], None)
        await client.send(Ping(text="still there?"))
        assert (await client.until("pong")).data == {"text": "still there?"}
        assert server.sessions == 0


@pytest.mark.parametrize("task", [Task.TRANSCRIBE, Task.SPEECH, Task.CHAT])
async def test_info_has_no_service_that_the_engine_lacks(task: Task) -> None:
    engine = talker(tasks=frozenset({Task.TRANSCRIBE, Task.SPEECH, Task.CHAT} - {task}))
    async with live_server(engine, **ON) as server, peer(server) as client:
        await client.send(Describe())
        info = Info.from_event(await client.until("info"))
        found = {Task.TRANSCRIBE: info.asr, Task.SPEECH: info.tts, Task.CHAT: info.handle}
        assert [one for one, programs in found.items() if not programs] == [task]


async def test_while_the_engine_starts_a_client_is_told_to_come_back() -> None:
    engine = talker()
    async with live_server(engine, **ON) as server, peer(server) as client:
        engine.state = EngineState.STARTING
        await client.send(Describe())
        assert await client.refused() == "engine_overloaded"
        engine.state = EngineState.OK


# speech to text


@pytest.mark.parametrize(("rate", "width", "channels"), [(16_000, 2, 1), (48_000, 3, 2), (8_000, 1, 1), (22_050, 4, 3)])
async def test_speech_is_written_down_from_any_pcm(rate: int, width: int, channels: int) -> None:
    engine = talker()
    tone = np.sin(np.arange(rate) * 0.3) * 0.5
    scaled = np.round(np.repeat(tone, channels) * (2 ** (8 * width - 1) - 1)).astype("<i4")
    whole = scaled + 128 if width == 1 else scaled
    audio = whole.astype("<i4").view(np.uint8).reshape(-1, 4)[:, :width].tobytes()
    async with live_server(engine, **ON) as server, peer(server) as client:
        await dictate(client, audio, rate, width, channels)
        await client.until("transcript-stop")
        assert client.types == ["transcript-start", "transcript-chunk", "transcript", "transcript-stop"]
        pieces = [event.data["text"] for event in client.seen if event.type == "transcript-chunk"]
        assert pieces == ["What is it?", " A cup."]
        assert Transcript.from_event(client.seen[-2]) == Transcript("What is it? A cup.", language="en")
        [taken] = engine.inputs
        [request] = engine.requests
        heard = np.frombuffer(b"".join(chunk.payload for chunk in taken), "<i2") / 32768
        assert {chunk.modality for chunk in taken if chunk.payload} == {Modality.AUDIO}
        assert heard == pytest.approx(tone, abs=0.01 if width == 1 else 0.001)
        assert (request.task, request.input_audio.sample_rate, request.language) == (Task.TRANSCRIBE, rate, "en")


async def test_one_connection_writes_down_one_speech_after_the_other() -> None:
    engine = talker(keywords=True)
    async with live_server(engine, **ON) as server, peer(server) as client:
        names = {"transcript_names": ["Anna", " ", "x" * 65], "transcript_terms": ["samovar"]}
        await client.say("transcribe", {"name": "scripted", **names})
        await client.speak(bytes(640))
        await client.send(AudioStop())
        await client.until("transcript-stop")
        await client.send(AudioStart(16_000, 2, 1))
        await client.speak(bytes(640))
        await client.send(AudioStart(16_000, 2, 1))  # the speech before was given up
        await client.speak(bytes(1280))
        await client.send(AudioStop())
        await client.until("transcript-stop")
        assert [event.type for event in client.seen].count("transcript") == 2
        assert [sum(len(chunk.payload) for chunk in taken) for taken in engine.inputs] == [640, 1280]
        assert [request.expected for request in engine.requests] == ["Anna, samovar."] * len(engine.requests)


async def test_without_sound_there_are_no_words() -> None:
    async with live_server(talker(), **ON) as server, peer(server) as client:
        await client.send(Transcribe(), AudioStart(16_000, 2, 1), AudioStop())
        assert Transcript.from_event(await client.until("transcript")).text == ""
        await client.send(AudioStop())  # of nothing
        await client.speak(bytes(640))  # that nobody expects
        await client.send(Ping())
        await client.until("pong")
        assert client.types == ["transcript-start", "transcript", "transcript-stop", "pong"]


# text to speech


async def test_a_text_is_read_aloud() -> None:
    engine = talker()
    async with live_server(engine, **ON) as server, peer(server) as client:
        await client.send(Synthesize("Good morning."))
        await client.until("audio-stop")
        await client.send(Synthesize("Guten Morgen.", voice=SynthesizeVoice(language="de_DE")))
        await client.until("audio-stop")
        await client.send(Synthesize("Hello.", voice=SynthesizeVoice(name="bert")), Synthesize(" "))
        await client.until("audio-stop")
        await client.until("audio-stop")
        assert client.types == ["audio-start", "audio-chunk", "audio-stop"] * 3 + ["audio-start", "audio-stop"]
        assert client.heard() == np.full(36_000, 8192, "<i2").tobytes()
        starts = [event for event in client.seen if event.type == "audio-start"]
        assert {tuple(event.data.items()) for event in starts} == {
            (("rate", 24_000), ("width", 2), ("channels", 1), ("timestamp", 0))
        }
        assert [request.voice for request in engine.requests] == ["ann", "bert", "bert"]
        assert {request.task for request in engine.requests} == {Task.SPEECH}


async def test_a_text_is_read_aloud_as_it_comes() -> None:
    engine = talker()
    async with live_server(engine, **ON) as server, peer(server) as client:
        await client.send(SynthesizeStart(voice=SynthesizeVoice(name="bert")))
        for piece in ("", "Good ", "morning. ", "How are you?"):
            await client.send(SynthesizeChunk(piece))
        await client.send(Synthesize("Good morning. How are you?"), SynthesizeStop())
        await client.until("synthesize-stopped")
        await client.send(SynthesizeStart(), SynthesizeChunk(" "), SynthesizeStop())
        await client.until("synthesize-stopped")
        once = ["audio-start", "audio-chunk", "audio-stop", "synthesize-stopped"]
        assert client.types == [*once, "audio-start", "audio-stop", "synthesize-stopped"]
        [taken] = engine.inputs
        assert b"".join(chunk.payload for chunk in taken).decode() == "Good morning. How are you?"
        assert [request.voice for request in engine.requests] == ["bert"]


# answers


async def test_a_text_is_answered_and_what_was_said_is_known_over_the_next_connection() -> None:
    engine = talker(TextOutput("It is "), TextOutput("seven."))
    context = {"conversation_id": "01J", "more": 1}
    async with live_server(engine, wyoming={"port": 0, "instructions": "Be brief."}) as server:
        for text in ("Three and four?", "And now?"):
            async with peer(server) as client:
                await client.send(Transcript(text, context=context))
                await client.until("handled-stop")
                assert client.types == ["handled-start", "handled-chunk", "handled", "handled-stop"]
                assert Handled.from_event(client.seen[-2]) == Handled("It is seven.", context=context)
        async with peer(server) as client:
            await client.send(Transcript("And I?", context={"conversation_id": "another"}))
            await client.until("handled-stop")
        told = [[(one.role, one.text) for one in request.history] for request in engine.requests]
        assert told == [[], [("user", "Three and four?"), ("assistant", "It is seven.")], []]
        assert {request.instructions for request in engine.requests} == {"Be brief."}
        requests = read(server).labels("requests_total")
        assert [(one["origin"], one["finish_reason"]) for one in requests] == [("wyoming", "stop")]


async def test_what_cannot_be_answered_is_not_handled() -> None:
    engine = talker(EngineFailed("the model is away"))
    async with live_server(engine, **ON, expect_errors=True) as server, peer(server) as client:
        await client.send(Transcript("Hello?"))
        assert (await client.until("not-handled")).data["text"]
        assert client.types == ["error", "not-handled"]
        assert client.seen[0].data["code"] == "engine_failed"
        engine.script = ()
        await client.send(Transcript("Hello?"), Transcript(" "))
        await client.until("not-handled")
        await client.until("not-handled")


@pytest.mark.parametrize("asked", [Synthesize("Hello."), Transcribe()])
async def test_a_failure_ends_the_connection_as_a_client_would_wait_for_an_answer(asked: Any) -> None:
    engine = talker(EngineFailed("the model is away"))
    engine.heard = engine.script
    async with live_server(engine, **ON, expect_errors=True) as server, peer(server) as client:
        await client.send(asked)
        if isinstance(asked, Transcribe):
            await client.speak(bytes(640))
            await client.send(AudioStop())
        assert await client.refused() == "engine_failed"
