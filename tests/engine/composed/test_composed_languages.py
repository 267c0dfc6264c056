"""The language that the user speaks, on its way from the ASR to the LLM, to the voice and to the history."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import pytest
from support.engine_answers import BOTH, Answer, answered, collect, open_input, request_of
from support.engine_answers import text as typed
from support.live_server import live_server
from support.native_client import native_client
from support.patience import until
from support.realtime_client import realtime_client
from support.scripted_engines import PAUSE, SILENCE, RetortEngine, ToneEngine, WordEngine, speech

from omni_ws.engine.base import HeardLanguage
from omni_ws.engine.composed.engine import ComposedEngine
from omni_ws.engine.llm.rules_engine import RulesEngine

pytestmark = pytest.mark.usefixtures("no_task_left")

SPANISH = "\n(The user speaks Spanish.)"


class Parts:
    """A composition whose voice speaks some languages, and whose ASR hears Spanish."""

    def __init__(
        self, *, speaks: frozenset[str] = frozenset({"en", "es"}), llm: Any = None, ahead: bool = False
    ) -> None:
        self.asr = WordEngine(languages=frozenset({"en", "es"}))
        self.asr.language = "es"
        self.llm = llm or RetortEngine("hola")
        self.tts = ToneEngine(speech_languages=speaks)
        self.engine = ComposedEngine(self.llm, asr=self.asr, tts=self.tts, think_ahead=ahead)

    async def say(self, *chunks: Any, **fields: Any) -> Answer:
        return await answered(self.engine, *chunks, modalities=BOTH, **fields)


async def test_the_llm_is_told_and_the_voice_follows() -> None:
    parts = Parts()
    await parts.say(speech("qué"), speech("hora"))
    assert parts.llm.read == "qué hora" + SPANISH
    assert parts.tts.requests[0].speech_language == "es"
    assert parts.engine.capabilities.speech_languages == {"en", "es"}


@pytest.mark.parametrize(
    ("fields", "speaks", "spoken"),
    [
        ({}, {"en"}, None),  # a language that the voice does not speak
        ({"voice": "tones"}, {"es"}, "es"),
        ({"language": "es"}, {"es"}, "es"),
        ({"language": "es", "voice": "tone"}, {"es"}, "es"),  # the voice is the default
        ({"language": "es", "voice": "tone", "voice_named": True}, {"es"}, None),  # the client has decided both
    ],
)
async def test_what_the_voice_is_asked_for(fields: dict[str, Any], speaks: set[str], spoken: str | None) -> None:
    parts = Parts(speaks=frozenset(speaks))
    await parts.say(speech("hola"), **fields)
    assert parts.tts.requests[0].speech_language == spoken


async def test_a_language_that_the_client_named_is_told_too() -> None:
    parts = Parts()
    parts.asr.language = None
    await parts.say(speech("hola"), language="es")
    assert parts.llm.read == "hola" + SPANISH


async def test_what_is_typed_is_answered_in_the_voice_of_before() -> None:
    parts = Parts()
    await parts.say(typed("hola"), heard_language=HeardLanguage("es"))
    assert parts.llm.read == "hola"
    assert parts.tts.requests[0].speech_language == "es"


async def test_english_changes_nothing() -> None:
    parts = Parts()
    parts.asr.language = "en"
    await parts.say(speech("hello"))
    assert (parts.llm.read, parts.tts.requests[0].speech_language) == ("hello", "en")


@pytest.mark.parametrize(
    ("before", "said"), [("es", "No he oído nada."), ("xx", ""), (None, "I did not hear anything.")]
)
async def test_silence_is_answered_in_the_language_of_before(before: str | None, said: str) -> None:
    parts = Parts(llm=RulesEngine())
    await parts.llm.start()
    answer = await parts.say(SILENCE, heard_language=HeardLanguage(before))
    await parts.llm.stop()
    assert answer.text == said


@pytest.mark.parametrize(
    ("language", "said"),
    [
        ("es", "Lo siento, solo puedo responder en inglés."),
        ("haw", "I only understand English."),  # no sentence of ours
        ("en", "That makes 4."),
    ],
)
async def test_the_rules_say_that_they_are_english(language: str, said: str) -> None:
    parts = Parts(llm=RulesEngine())
    await parts.llm.start()
    parts.asr.language = language
    answer = await parts.say(speech("What is two plus two?"))
    await parts.llm.stop()
    assert answer.text == said


@pytest.mark.parametrize(("guessed", "outcome"), [("es", "used"), ("pt", "differed")])
async def test_an_answer_ahead_in_another_language_is_not_used(guessed: str, outcome: str) -> None:
    parts = Parts(llm=RetortEngine(), ahead=True)
    parts.asr.guessed_language = guessed
    outcomes: list[str] = []
    parts.engine.on_speculation = lambda one: outcomes.append(one.value)
    source, answer = open_input(), Answer()
    answering = asyncio.create_task(collect(parts.engine, request_of(source, modalities=BOTH), answer))
    source.put_nowait(speech("hola"))
    source.put_nowait(PAUSE)
    await until(lambda: len(parts.llm.reads_of.get("req_1-ahead1", ())) == 2)
    source.close()
    await answering
    assert outcomes == [outcome]
    assert answer.text == "You said hola" + SPANISH
    assert parts.tts.requests[-1].speech_language == "es"


async def test_a_session_keeps_the_language_and_tells_it_in_the_history() -> None:
    parts = Parts()
    async with live_server(parts.engine) as server, native_client(server) as client:
        for language, words in (("es", "uno."), ("es", "dos."), ("en", "three.")):
            parts.asr.language = language
            await client.chunk(speech(words).payload, modality="audio", end=True)
            answer = await client.answer()
            assert [one["language"] for one in answer.chunks if one["modality"] == "transcript"] == [language]
    histories = [[message.text for message in request.history] for request in parts.llm.requests]
    assert histories == [[], ["uno." + SPANISH, "hola"], ["uno." + SPANISH, "hola", "dos.", "hola"]]
    assert [request.heard_language.before for request in parts.llm.requests] == [None, "es", "es"]
    assert parts.llm.read == "three.\n(The user speaks English.)"


async def test_a_client_that_names_the_language_alone_is_answered_in_it() -> None:
    parts = Parts()
    parts.asr.language = None
    async with live_server(parts.engine) as server, native_client(server) as client:
        for fields in ({}, {"voice": "alloy"}, {"voice": "tone"}, {"voice": None}):
            await client.configure(input_audio={"language": "es"}, **fields)
            await client.chunk(speech("hola").payload, modality="audio", end=True)
            await client.answer()
        async with realtime_client(server) as realtime:
            heard = {"transcription": {"language": "es"}, "turn_detection": None}
            for voice in ({}, {"output": {"voice": "bell"}}):
                await realtime.update(audio={"input": heard, **voice})
                audio = base64.b64encode(speech("hola").payload).decode()
                await realtime.send("input_audio_buffer.append", audio=audio)
                await realtime.send("input_audio_buffer.commit")
                await realtime.respond()
    asked = [(request.voice, request.speech_language) for request in parts.tts.requests]
    assert asked == [("tone", "es"), ("tone", "es"), ("tone", None), ("tone", "es"), ("tone", "es"), ("bell", None)]
