"""Input that is whole and answered on request, beside the stream of a conversation's input."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from support.live_server import live_server
from support.scripted_engines import CapableEngine, said

from omni_ws.core.chunks import AudioEncoding, FinalChunk, FinishReason, InputChunk, Modality
from omni_ws.core.history import Message
from omni_ws.errors import EmptyInput, OmniError, ShuttingDown
from omni_ws.service.conversation.conversation import Conversation


@asynccontextmanager
async def conversation(engine: CapableEngine) -> AsyncIterator[Conversation]:
    async with live_server(engine) as server:
        opened = server.app.sessions.open(output_formats=frozenset({AudioEncoding.PCM16}))
        running = asyncio.create_task(opened.run())
        yield opened
        opened.close()
        await running
        while opened.outbox.take() is not None:
            pass
        opened.observed.ended()


def text(words: str) -> list[InputChunk]:
    return [InputChunk(Modality.TEXT, words.encode())]


def asked(opened: Conversation, words: str, **fields: Any) -> str:
    return opened.respond(text(words), opened.configuration.effective, **fields)


async def over(opened: Conversation) -> tuple[list[OmniError], FinalChunk]:
    """The errors before the next final, and that."""
    errors: list[OmniError] = []
    while True:
        message = opened.outbox.take()
        if isinstance(message, FinalChunk):
            return errors, message
        if isinstance(message, OmniError):
            errors.append(message)
        if message is None:
            await asyncio.sleep(0)


async def test_it_is_answered_in_its_order_and_leaves_the_open_input_alone() -> None:
    engine = CapableEngine([said("yes")])
    async with conversation(engine) as opened:
        now = asyncio.get_running_loop().time
        first = asked(opened, "one")
        opened.receive_chunk(InputChunk(Modality.TEXT, b"two", 0), now=now())
        assert (await over(opened))[1].request_id == first
        opened.receive_chunk(InputChunk(Modality.TEXT, b" three", 1, end_of_input=True), now=now())
        assert (await over(opened))[1].finish_reason is FinishReason.STOP
        assert [b"".join(chunk.payload for chunk in taken) for taken in engine.inputs] == [b"one", b"two three"]
        assert [message.text for message in opened.ledger.messages(now=0)] == ["one", "yes", "two three", "yes"]


@pytest.mark.parametrize(
    ("fields", "left"),
    [
        ({"input_kept": False}, ["yes"]),
        ({"answer_kept": False}, ["one"]),
        ({"input_kept": False, "answer_kept": False}, []),
    ],
)
async def test_the_history_keeps_what_it_is_told_to(fields: dict[str, bool], left: list[str]) -> None:
    async with conversation(CapableEngine([said("yes")])) as opened:
        asked(opened, "one", **fields)
        await over(opened)
        assert [message.text for message in opened.ledger.messages(now=0)] == left


async def test_a_context_takes_the_place_of_the_history() -> None:
    engine = CapableEngine([said("yes")])
    async with conversation(engine) as opened:
        asked(opened, "one")
        await over(opened)
        context = (Message("assistant", "Hi."),)
        opened.respond(text("two"), opened.configuration.effective, context=context)
        await over(opened)
        assert engine.requests[1].history == context


async def test_its_configuration_is_its_own() -> None:
    engine = CapableEngine([said("yes")])
    async with conversation(engine) as opened:
        config = opened.configuration.with_patch({"instructions": "Be brief."})
        opened.respond(text("one"), config)
        await over(opened)
        assert engine.requests[0].instructions == "Be brief."
        assert opened.configuration.effective.instructions != "Be brief."


async def test_without_input_it_fails() -> None:
    async with conversation(CapableEngine()) as opened:
        opened.respond([], opened.configuration.effective)
        errors, final = await over(opened)
        assert [type(error) for error in errors] == [EmptyInput]
        assert final.finish_reason is FinishReason.ERROR


async def test_while_the_server_drains_it_is_refused() -> None:
    async with conversation(CapableEngine([said("yes")])) as opened:
        opened.drain()
        request_id = asked(opened, "one")
        errors, final = await over(opened)
        assert [type(error) for error in errors] == [ShuttingDown]
        assert (final.request_id, final.finish_reason) == (request_id, FinishReason.ERROR)
