"""What later turns know of spoken ones, over real sockets."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from support.live_server import live_server
from support.native_client import NativeClient, native_client
from support.scripted_engines import HEARS, PlayingEngine
from support.speech_clips import clip_bytes

from omni_ws.core.chunks import AudioFormat, FinishReason, Modality, Usage, Word
from omni_ws.core.history import WORDS_UNKNOWN, Message, Speech
from omni_ws.engine.base import (
    Finished,
    TextOutput,
    TranscriptOutput,
)

SPOKEN = clip_bytes("cards_001")


DEAF_TO_HISTORY = {"speech_in_history": False}


async def speak(client: NativeClient, audio: bytes = SPOKEN, **fields: Any) -> None:
    for start in range(0, len(audio), 640):
        await client.binary(audio[start : start + 640], **fields)
    await client.send("finish")


async def next_history(client: NativeClient, engine: PlayingEngine) -> tuple[Message, ...]:
    """What a further request sees; and, as a message of its own, what it continues, as nothing was answered to it."""
    count = len(engine.requests)
    await client.say("next")
    await client.answer()
    assert len(engine.requests) == count + 1
    *earlier, own = engine.inputs[-1]
    assert own.payload.strip() == b"next"
    text = b"".join(chunk.payload for chunk in earlier if chunk.modality is Modality.TEXT).decode()
    audio = tuple(chunk for chunk in earlier if chunk.modality is Modality.AUDIO)
    continued = Message("user", text, speech=Speech(audio, AudioFormat(), 0) if audio else None)
    return (*engine.requests[-1].history, *([continued] if earlier else ()))


async def test_spoken_turn_is_in_the_history_as_its_audio() -> None:
    engine = PlayingEngine([TextOutput("Indeed.")])
    async with live_server(engine) as server, native_client(server) as client:
        assert client.created["capabilities"]["transcripts"] is False
        await client.chunk("This card:")
        await speak(client)
        await client.answer()
        user, assistant = await next_history(client, engine)
        assert (assistant.role, assistant.text) == ("assistant", "Indeed.")
        assert (user.role, user.text) == ("user", "This card:")
        assert user.speech is not None
        assert b"".join(chunk.payload for chunk in user.speech.chunks) == SPOKEN
        assert user.speech.format.sample_rate == 16_000
        assert len(SPOKEN) < server.held_bytes < len(SPOKEN) + 4096


async def test_what_was_transcribed_is_in_the_history_as_text() -> None:
    engine = PlayingEngine([TranscriptOutput("ten of", interim=True), TranscriptOutput("ten of clubs")], **HEARS)
    async with live_server(engine) as server, native_client(server) as client:
        assert client.created["capabilities"]["transcripts"] is True
        await speak(client)
        await client.answer()
        assert await next_history(client, engine) == (Message("user", "ten of clubs"),)
        assert server.held_bytes < 4096


async def test_what_a_transcribing_engine_found_no_words_in_had_none() -> None:
    engine = PlayingEngine([TextOutput("What?")], **HEARS)
    async with live_server(engine) as server, native_client(server) as client:
        await speak(client)
        await client.answer()
        assert await next_history(client, engine) == (Message("assistant", "What?"),)


@pytest.mark.parametrize("ended_by", ["cancel", "interrupt"])
async def test_the_last_interim_of_a_request_that_is_cut_short_is_settled(ended_by: str) -> None:
    shown = TranscriptOutput("ten of", interim=True, start_ms=40, words=(Word("ten", 40, 300),))
    engine = PlayingEngine([TranscriptOutput("ten", interim=True), shown, asyncio.Event().wait], **HEARS)
    async with live_server(engine) as server, native_client(server) as client:
        await client.configure(overlap=ended_by if ended_by == "interrupt" else "wait")
        await speak(client)
        while (await client.until("output_chunk"))["text"] != "ten of":
            pass
        engine.script = ()
        if ended_by == "cancel":
            await client.send("cancel")
        else:
            await client.say("stop")
        answer = await client.answer()
        assert answer.reason == "cancelled"
        (settled,) = answer.chunks
        assert (settled["modality"], settled["text"], settled.get("interim", False)) == ("transcript", "ten of", False)
        assert (settled["start_ms"], settled["words"]) == (40, [{"text": "ten", "start_ms": 40, "end_ms": 300}])
        if ended_by == "interrupt":
            await client.answer()
        # The engine hears: its history has what was said, and not what it seemed to be.
        user = (await next_history(client, engine))[0]
        assert user.speech is not None
        assert b"".join(chunk.payload for chunk in user.speech.chunks).startswith(SPOKEN)


async def test_where_the_engine_takes_no_speech_the_interim_text_has_to_do() -> None:
    shown = TranscriptOutput("ten of", interim=True)
    engine = PlayingEngine([shown, asyncio.Event().wait], **HEARS, **DEAF_TO_HISTORY)
    async with live_server(engine) as server, native_client(server) as client:
        await speak(client)
        await client.until("output_chunk")
        engine.script = ()
        await client.send("cancel")
        await client.answer()
        assert await next_history(client, engine) == (Message("user", "ten of"),)


async def test_a_settled_transcript_is_not_settled_again() -> None:
    engine = PlayingEngine(
        [TranscriptOutput("ten", interim=True), TranscriptOutput("ten"), asyncio.Event().wait], **HEARS
    )
    async with live_server(engine) as server, native_client(server) as client:
        await speak(client)
        while (await client.until("output_chunk")).get("interim"):
            pass
        await client.send("cancel")
        assert (await client.answer()).chunks == []


@pytest.mark.parametrize("changes", [{}, HEARS], ids=["writes nothing down", "had not written yet"])
async def test_cancelled_speech_without_words_is_in_the_history_as_its_audio(changes: dict[str, Any]) -> None:
    engine = PlayingEngine([asyncio.Event().wait], **changes)
    async with live_server(engine) as server, native_client(server) as client:
        await speak(client)
        await server.until(lambda: engine.active_requests == 1, "the request")
        await client.send("cancel")
        assert (await client.answer()).reason == "cancelled"
        engine.script = ()
        (user,) = await next_history(client, engine)
        assert user.speech is not None
        assert b"".join(chunk.payload for chunk in user.speech.chunks) == SPOKEN


async def test_where_the_engine_takes_no_speech_the_history_says_that_there_was_some(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = PlayingEngine([TextOutput("Indeed.")], **DEAF_TO_HISTORY)
    async with live_server(engine) as server, native_client(server) as client:
        await speak(client)
        final = (await client.answer()).final
        user, _ = await next_history(client, engine)
        assert user == Message("user", WORDS_UNKNOWN)
        assert f"{final['request_id']}: speech dropped from the history: the engine does not support" in caplog.text


@pytest.mark.parametrize("past", [False, True])
async def test_speech_longer_than_the_history_may_be(past: bool, caplog: pytest.LogCaptureFixture) -> None:
    engine = PlayingEngine([TextOutput("Indeed.")])
    async with live_server(engine, limits={"max_history_tokens": 26}) as server, native_client(server) as client:
        with caplog.at_level(logging.WARNING):
            await speak(client, bytes(33_282 if past else 32_000))
            await client.answer()
            user, _ = await next_history(client, engine)
        assert (user.speech is None) is past
        assert ("exceeds the history's token limit" in caplog.text) is past


async def test_oldest_turns_make_room_and_give_back_their_bytes() -> None:
    engine = PlayingEngine([TextOutput("Yes.")])
    async with live_server(engine, limits={"max_history_tokens": 60}) as server, native_client(server) as client:
        for _ in range(4):
            await speak(client, bytes(32_000))
            await client.answer()
        history = await next_history(client, engine)
        assert [message.speech is not None for message in history] == [True, False, True, False]
        await client.barrier()
        assert server.held_bytes < 2 * 32_000 + 4096


async def test_without_history_no_speech_is_kept() -> None:
    engine = PlayingEngine([TextOutput("Indeed.")])
    async with live_server(engine) as server, native_client(server) as client:
        await client.configure(history=False)
        await speak(client)
        await client.answer()
        await client.barrier()
        assert server.held_bytes < 4096
        await client.configure(history=True)
        assert await next_history(client, engine) == (Message("assistant", "Indeed."),)


async def test_a_failed_request_holds_nothing() -> None:
    engine = PlayingEngine([RuntimeError("broken")])
    async with live_server(engine, expect_errors=True) as server, native_client(server) as client:
        await speak(client)
        assert (await client.answer()).reason == "error"
        await client.barrier()
        assert server.held_bytes < 4096


# ends of sessions; ``live_server`` checks that nothing is held behind them


@pytest.mark.parametrize("end", ["leaves", "vanishes", "in the middle"])
async def test_held_bytes_are_given_back_with_the_session(end: str) -> None:
    script = [asyncio.Event().wait] if end == "in the middle" else [TextOutput("Indeed.")]
    engine = PlayingEngine(script)
    async with live_server(engine) as server:
        async with native_client(server) as client:
            await speak(client)
            if end == "in the middle":
                await server.until(lambda: engine.active_requests == 1, "the request")
            else:
                await client.answer()
            assert server.held_bytes > len(SPOKEN)
            if end != "leaves":
                client.gone()
        await server.check_empty()


@pytest.mark.virtual_clock
async def test_session_that_is_resumed_keeps_its_speech_and_one_that_expires_gives_it_back() -> None:
    engine = PlayingEngine([TextOutput("Indeed.")])
    keeps = {"resume_grace_sec": 30}
    async with live_server(engine, streaming_input=keeps) as server:
        async with native_client(server) as client:
            await speak(client)
            await client.answer()
            created = client.created
            client.gone()
            await server.until(lambda: not server.connections, "the loss")
        query = f"?session_id={created['session_id']}&resume_token={created['resume_token']}&last_output=1"
        async with native_client(server, query=query, greeted=False) as again:
            again.next_sequence_id = (await again.until("session_resumed"))["next_sequence_id"]
            again.guarantees.next_output = 2
            history = await next_history(again, engine)
            assert history[0].speech is not None
            assert server.held_bytes > len(SPOKEN)
            again.gone()
            await server.until(lambda: not server.connections, "the loss")
        await asyncio.sleep(29)
        assert server.held_bytes > len(SPOKEN)
        await asyncio.sleep(2)
        assert server.held_bytes == 0


async def test_length_that_the_engine_decoded_counts() -> None:
    usage = Usage(input_audio_ms=10_000_000)
    engine = PlayingEngine([Finished(FinishReason.STOP, usage)])
    async with live_server(engine) as server, native_client(server) as client:
        await speak(client)
        await client.answer()
        assert await next_history(client, engine) == (Message("user", WORDS_UNKNOWN),)
