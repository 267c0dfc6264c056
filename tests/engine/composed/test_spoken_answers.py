"""What a composition says of what its LLM writes, and what of it was heard."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from support.engine_answers import AUDIO, BOTH, Input, collect, heard, said, written
from support.live_server import live_server
from support.native_client import native_client
from support.patience import until
from support.scripted_engines import ReadingEngine, RetortEngine

from omni_ws.config.model import VoiceChoice
from omni_ws.core.chunks import InputChunk, Modality, Task, Word
from omni_ws.core.history import Message
from omni_ws.engine.base import (
    Engine,
    EngineOutput,
    GenerationRequest,
    HeardLanguage,
    InputSource,
    OutputWriter,
    TextOutput,
)
from omni_ws.engine.clauses import pieces_of
from omni_ws.engine.composed.engine import ComposedEngine
from omni_ws.engine.composed.stages import _spoken_pieces
from omni_ws.engine.remote.engine import RemoteVoice
from omni_ws.engine.remote.settings import RemoteTtsSettings
from omni_ws.engine.spoken.speakable_text import SpeakableText
from omni_ws.engine.tts.speech_engine import SpeechEngine
from omni_ws.engine.tts.voice_process import VoiceProcess

pytestmark = pytest.mark.usefixtures("no_task_left")

REPLY = "# Prices\n\nIt is **$20** today.\n\n```\npay(20)\n```\n\nSee [here](https://example.com/x?y). 🎉"
#: What a ReadingEngine says of it, a word each 20 ms.
SAID = "Prices. It is twenty dollars today. Code left out. See here. "


class Telling(ReadingEngine):
    """A ReadingEngine that keeps what it was given to read."""

    def __init__(self) -> None:
        super().__init__()
        self.read = ""

    async def generate(self, request: GenerationRequest, out: OutputWriter) -> None:
        async def kept(source: InputSource) -> AsyncGenerator[InputChunk, None]:
            async for chunk in source:
                self.read += chunk.payload.decode()
                yield InputChunk(Modality.TEXT, chunk.payload.replace(b"\n", b" "))

        given = kept(request.input)
        async with aclosing(given):
            await super().generate(replace(request, input=given), out)


async def answered(llm: RetortEngine, tts: Engine, **fields: Any) -> list[EngineOutput]:
    engine = ComposedEngine(llm, tts=tts)
    await engine.start()
    return (await collect(engine, Input("What does it cost?"), modalities=BOTH, **fields)).outputs


async def read(text: str, tts: Engine, **fields: Any) -> list[EngineOutput]:
    """What a voice makes of a text that is read aloud as it is."""
    return (await collect(tts, Input(text), task=Task.SPEECH, modalities=AUDIO, **fields)).outputs


def sound_of(outputs: list[EngineOutput]) -> bytes:
    return b"".join(bytes(output.samples) for output in heard(outputs))


async def test_the_text_stays_and_the_voice_gets_its_spoken_form() -> None:
    tts = Telling()
    outputs = await answered(RetortEngine(REPLY), tts)
    assert said(outputs) == REPLY
    assert tts.read.replace("\n", " ") == SAID


async def test_words_are_those_that_are_written() -> None:
    outputs = await answered(RetortEngine(REPLY), Telling())
    words = [word for output in heard(outputs) for word in output.words]
    assert [word.text for word in words if word.text_end != REPLY.index("```")] == [
        *("Prices", "It", "is", "$20", "today", "See", "here"),
    ]
    assert Word("$20", 60, 100, REPLY.index(" today")) in words
    assert [word.text for word in words if word.text_end == REPLY.index("```")] == ["Code", "left", "out."]


async def test_real_voices_time_the_words_that_are_written(voice_choice: VoiceChoice) -> None:
    tts = SpeechEngine(VoiceProcess(voice_choice))
    try:
        outputs = await answered(RetortEngine(REPLY), tts)
    finally:
        await tts.stop()
    words = [word for output in heard(outputs) for word in output.words]
    assert [word.text for word in words] == [
        *("Prices", "It", "is", "$20", "today", "Code", "left", "out", "See", "here"),
    ]
    ends = [word.text_end for word in words if word.text_end is not None]
    assert (len(ends), ends) == (len(words), sorted(ends))
    assert all(before.end_ms <= after.start_ms for before, after in pairwise(words))


NAMES = "**Siobhan** runs nginx for $20. It is in New York."
LEXICON = {"Siobhan": "shi vawn", "nginx": "engine x", "New York": "noo york"}
NAMES_SAID = "shi vawn runs engine x for twenty dollars. It is in noo york."


async def test_the_voice_gets_words_as_the_lexicon_says_and_nobody_else() -> None:
    llm, tts = RetortEngine(NAMES), Telling()
    outputs = await answered(llm, tts, lexicon=LEXICON)
    assert said(outputs) == NAMES
    assert tts.read == NAMES_SAID
    words = [word for output in heard(outputs) for word in output.words]
    assert [word.text for word in words] == ["Siobhan", "runs", "nginx", "for", "$20", "It", "is", "in", "New York"]
    assert words[0] == Word("Siobhan", 0, 40, len("**Siobhan**"))
    assert [part.lexicon for part in (*llm.requests, *tts.requests)] == [{}, {}]  # it is in its spoken form


async def test_real_voices_time_the_words_of_a_lexicon_as_they_are_written(voice_choice: VoiceChoice) -> None:
    tts = SpeechEngine(VoiceProcess(voice_choice))
    try:
        chat = await answered(RetortEngine(NAMES), tts, lexicon=LEXICON)
        speech = await read(NAMES.replace("*", ""), tts, lexicon=LEXICON)
        plain = await read(NAMES.replace("*", ""), tts)
    finally:
        await tts.stop()
    for outputs in (chat, speech):
        words = [word for output in heard(outputs) for word in output.words]
        assert [word.text for word in words] == ["Siobhan", "runs", "nginx", "for", "$20", "It", "is", "in", "New York"]
    assert sound_of(speech) != sound_of(plain)


async def test_a_voice_behind_a_url_gets_words_as_the_lexicon_says() -> None:
    back_tts = Telling()
    async with live_server(back_tts) as back:
        tts = SpeechEngine(RemoteVoice(RemoteTtsSettings(urls=(f"http://127.0.0.1:{back.port}",), start_timeout=0)))
        try:
            outputs = await answered(RetortEngine(NAMES), tts, lexicon=LEXICON)
            read_aloud = await read(NAMES, tts, lexicon=LEXICON)
        finally:
            await tts.stop()
    ends = dict.fromkeys(output.text_end for output in heard(outputs))
    assert [NAMES[:end] for end in ends] == [NAMES.partition(" It")[0], NAMES]
    ends = dict.fromkeys(output.text_end for output in heard(read_aloud))
    assert [NAMES[:end] for end in ends] == [NAMES.partition(" It")[0], NAMES]
    once = NAMES_SAID.replace("twenty dollars", "$20")  # numbers are left to it
    spoken = once + once.replace("shi vawn", "**shi vawn**")
    assert back_tts.read.replace(" ", "") == spoken.replace(" ", "")


async def test_what_was_heard_is_what_is_written_however_it_was_said() -> None:
    llm = RetortEngine(NAMES)
    async with live_server(ComposedEngine(llm, tts=Telling())) as server, native_client(server) as client:
        await client.configure(modalities=["text", "audio"], tts={"lexicon": LEXICON})
        await client.say("Who runs it?")
        answer = await client.answer()
        assert answer.text == NAMES
        await client.send("output_ack", sequence_id=answer.final["sequence_id"], played_ms=90)  # "engine" of "engine x"
        await client.send("cancel")
        await client.say("And then?")
        await client.answer()
        heard = NAMES.partition(" for")[0]
        assert llm.requests[-1].history == (Message("user", "Who runs it?"), Message("assistant", heard))


async def test_a_voice_behind_a_url_tells_the_clauses_that_are_written() -> None:
    reply = "It is **$20** today, and no more.\n\n- Buy it.\n"
    async with live_server(ReadingEngine()) as back:
        tts = SpeechEngine(RemoteVoice(RemoteTtsSettings(urls=(f"http://127.0.0.1:{back.port}",), start_timeout=0)))
        outputs = await answered(RetortEngine(reply), tts)
        await tts.stop()
    ends = dict.fromkeys(output.text_end for output in heard(outputs))
    assert [reply[:end] for end in ends] == [reply.partition("\n")[0], reply.rstrip()]


async def test_numbers_are_left_to_a_voice_of_another_language() -> None:
    tts = Telling()
    await answered(RetortEngine(REPLY), tts, voice="bell")
    assert tts.read.replace("\n", " ") == "Prices. It is $20 today. See here. "


@pytest.mark.parametrize(("language", "read"), [("fi", "$20"), ("en", "twenty dollars"), (None, "twenty dollars")])
async def test_numbers_are_left_alone_in_an_answer_in_a_language_that_no_voice_speaks(
    language: str | None, read: str
) -> None:
    tts = Telling()
    await answered(RetortEngine(REPLY), tts, heard_language=HeardLanguage(language))
    assert f"It is {read} today." in tts.read


@pytest.mark.parametrize("reply", ["🎉", "***", "```\n```", "\n\n"])
async def test_an_answer_without_anything_to_read_is_not_spoken(reply: str) -> None:
    tts = Telling()
    outputs = await answered(RetortEngine(reply), tts)
    assert tts.requests == [] if "`" not in reply else len(tts.requests) == 1
    assert any(isinstance(output, TextOutput) for output in outputs)


async def test_a_sentence_is_read_while_the_llm_pauses_behind_it() -> None:
    class Pausing(RetortEngine):
        async def generate(self, request: GenerationRequest, out: OutputWriter) -> None:
            async for output in written(partial(super().generate, request)):
                if isinstance(output, TextOutput) and output.text == " Then":
                    await go_on.wait()
                out.write(output)

    go_on = asyncio.Event()
    tts = Telling()
    answer = asyncio.create_task(answered(Pausing("It is $5. Then it ends."), tts))
    await until(lambda: "five dollars." in tts.read)
    assert not answer.done()
    go_on.set()
    await answer
    assert tts.read == "It is five dollars. Then it ends."


@pytest.mark.parametrize(
    ("played_ms", "heard"),
    [
        (70, "# Prices\n\nIt is **$20**"),  # "twenty" of "twenty dollars"
        (150, "# Prices\n\nIt is **$20** today."),  # and the announcement of the code
        (185, "# Prices\n\nIt is **$20** today.\n\n```\npay(20)\n```\n\nSee"),
    ],
)
async def test_an_interrupted_answer_is_cut_where_it_was_heard(played_ms: int, heard: str) -> None:
    llm = RetortEngine(REPLY)
    async with live_server(ComposedEngine(llm, tts=Telling())) as server, native_client(server) as client:
        await client.configure(modalities=["text", "audio"])
        await client.say("What does it cost?")
        answer = await client.answer()
        await client.send("output_ack", sequence_id=answer.final["sequence_id"], played_ms=played_ms)
        await client.send("cancel")
        await client.say("And then?")
        await client.answer()
        assert llm.requests[-1].history == (Message("user", "What does it cost?"), Message("assistant", heard))


@pytest.mark.counts_passes
@pytest.mark.parametrize("length", [1, 7, 10_000])
async def test_other_tasks_run_while_a_long_text_is_made_speakable(length: int) -> None:
    turns, most = 0, 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def source() -> AsyncIterator[str]:
        for piece in pieces_of("In 1998 it cost $3. " * 500, length):
            yield piece

    async with asyncio.TaskGroup() as group:
        running, seen, held = group.create_task(other()), 0, 0
        async for pieces in _spoken_pieces("", source(), SpeakableText("en")):
            held = sum(len(piece.written) for piece in pieces) + (held if turns == seen else 0)
            most, seen = max(most, held), turns
        running.cancel()
    assert turns > 30
    assert most < 300


FISH = "One fish swims in the sea. "


@pytest.mark.parametrize(
    ("reply", "fields", "text", "reason"),
    [
        (FISH * 20, {}, FISH * 10, "length"),
        (FISH * 10, {}, FISH * 10, "stop"),  # just within it
        (FISH * 20, {"sampling": {"max_tokens": 1000}}, FISH * 20, "stop"),
        (FISH * 20, {"modalities": ["text"]}, FISH * 20, "stop"),
        pytest.param("鱼在海里游。" * 40, {}, "鱼在海里游。" * 10, "length", id="Chinese"),
        # Without the end of a sentence in sight: at a clause, or a word.
        ("fish, " * 100, {}, "fish, " * 60, "length"),
        ("fish " * 100, {}, "fish " * 60, "length"),
    ],
)
async def test_a_spoken_answer_without_a_limit_ends_with_a_sentence(
    reply: str, fields: dict[str, Any], text: str, reason: str
) -> None:
    """The client's own limit and written answers are left alone; what is not said is not written either."""
    llm = RetortEngine(reply)
    engine = ComposedEngine(llm, tts=ReadingEngine(), max_spoken_tokens=60)
    async with live_server(engine) as server, native_client(server) as client:
        await client.configure(**{"modalities": ["text", "audio"], **fields})
        await client.say("Tell me of the sea.")
        answer = await client.answer()
        assert (answer.text.strip(), answer.reason) == (text.strip(), reason)
        assert llm.aborted == (reason == "length")
        if reason == "length":
            usage = answer.final["usage"]
            assert (usage["input_tokens"], usage["output_tokens"]) == (5, 61)
        await client.say("And then?")
        await client.answer()
        assert llm.requests[-1].history[-1].text.strip() == text.strip()
