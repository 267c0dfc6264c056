"""A speaker who pauses and goes on loses no word, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from support.inline_workers import MS, InlineWorkers, loud, quiet
from support.live_server import LiveServer, live_server
from support.native_client import NativeClient, native_client
from support.patience import until
from support.scripted_engines import Ears, RetortEngine, interim, takes

from omni_ws.core.chunks import Modality
from omni_ws.core.history import WORDS_UNKNOWN
from omni_ws.engine.base import OutputWriter
from omni_ws.engine.composed.engine import ComposedEngine
from omni_ws.errors import EngineFailed, EngineOverloaded
from omni_ws.service.conversation.interrupted import FINAL_WAITS_SEC, MOST_WRITTEN_DOWN

pytestmark = pytest.mark.virtual_clock

FRAME = 20 * MS
#: A turn of speech: what turn detection takes for it, and the silence that ends it.
BEGINNING, END = quiet(96) + loud(320), quiet(640)
NAME, QUESTION = "My name is Robert.", "What is my name?"


class Speaker(NativeClient):
    """Knows when the ASR has begun with a turn: it takes them in that order for those it is to hear."""

    def __init__(self, client: NativeClient, ears: Ears) -> None:
        super().__init__(client.connection)
        self.created = client.created
        self.ears = ears

    async def stream_turn(self, audio: bytes, told: str) -> None:
        begun = self.ears.begun
        await stream(self, audio)
        await self.until(told)
        await until(lambda: self.ears.begun > begun)


@contextlib.asynccontextmanager
async def conversation(
    *turns: list[Any], llm: RetortEngine | None = None, config: dict[str, Any] | None = None, **fields: Any
) -> AsyncIterator[tuple[LiveServer, Speaker, RetortEngine]]:
    """A session with turn detection over an ASR that hears ``turns``, and an LLM that repeats what it was told."""
    llm, ears = llm or RetortEngine(speech_in_history=False), Ears(*turns)
    async with live_server(ComposedEngine(llm, asr=ears), expect_errors=True, **fields) as server:
        server.app.sessions.speech_workers = InlineWorkers()
        async with native_client(server) as client:
            await client.configure(modalities=["text"], turn_detection={"type": "server_vad"}, **(config or {}))
            yield server, Speaker(client, ears), llm


async def stream(client: NativeClient, audio: bytes) -> None:
    for start in range(0, len(audio), FRAME):
        await client.binary(audio[start : start + FRAME])


async def speak(client: Speaker) -> None:
    """A whole turn."""
    await client.stream_turn(BEGINNING + END, "speech_stopped")


async def go_on(client: Speaker) -> None:
    """The beginning of the next turn."""
    await client.stream_turn(BEGINNING, "speech_started")


def told(client: NativeClient) -> list[tuple[str, str]]:
    """The settled transcripts, late ones among them, the starts and the finals, in their order."""
    found = []
    for frame in client.frames:
        if frame["type"] == "response_started":
            found.append(("started", ""))
        elif frame.get("final"):
            found.append(("final", frame["finish_reason"]))
        elif frame.get("modality") == "transcript" and not frame.get("interim"):
            found.append(("late" if frame.get("late") else "transcript", frame["text"]))
    return found


async def history_of(client: NativeClient, llm: RetortEngine) -> list[tuple[str, str]]:
    """What a further request sees, and reads itself."""
    await client.configure(turn_detection=None, overlap=None)
    await client.say("and?")
    await client.answer()
    return [*((one.role, one.text) for one in llm.requests[-1].history), ("input", llm.read)]


# the speaker goes on


async def test_both_parts_are_one_message_for_the_model_and_the_history() -> None:
    async with conversation([takes(1.0), NAME], [QUESTION]) as (_, client, llm):
        await speak(client)
        await go_on(client)
        await stream(client, END)
        first, second = await client.answer(), await client.answer()
        assert (first.reason, second.reason) == ("cancelled", "stop")
        assert second.text == f"You said {NAME} {QUESTION}"
        assert told(client) == [
            ("started", ""),
            ("transcript", NAME),
            ("final", "cancelled"),
            ("started", ""),
            ("transcript", QUESTION),
            ("final", "stop"),
        ]
        assert await history_of(client, llm) == [
            ("user", f"{NAME} {QUESTION}"),
            ("assistant", f"You said {NAME} {QUESTION}"),
            ("input", "and?"),
        ]


async def test_no_model_reads_a_part_alone() -> None:
    async with conversation([takes(1.0), NAME], [takes(1.0), "Tell me."], [QUESTION]) as (_, client, llm):
        for _ in range(2):
            await speak(client)
        await speak(client)
        answers = [await client.answer() for _ in range(3)]
        assert [answer.reason for answer in answers] == ["cancelled", "cancelled", "stop"]
        assert [read for request in llm.requests if (read := _read(llm, request.request_id))] == [
            f"{NAME} Tell me. {QUESTION}"
        ]
        assert [text for kind, text in told(client) if kind == "transcript"] == [NAME, "Tell me.", QUESTION]


def _read(llm: RetortEngine, request_id: str) -> str:
    chunks = llm.reads_of.get(request_id, ())
    return b"".join(chunk.payload for chunk in chunks if chunk.modality is Modality.TEXT).decode()


@pytest.mark.parametrize("past", [False, True])
async def test_the_final_waits_for_the_words_for_so_long(past: bool) -> None:
    known = asyncio.Event()
    async with conversation([known.wait, NAME], [QUESTION]) as (_, client, _llm):
        await speak(client)
        await go_on(client)
        await client.barrier()
        loop, began = asyncio.get_running_loop(), asyncio.get_running_loop().time()
        loop.call_later(FINAL_WAITS_SEC + (0.2 if past else -0.2), known.set)
        await stream(client, END)
        first = await client.answer()
        assert loop.time() - began <= FINAL_WAITS_SEC
        assert [chunk["text"] for chunk in first.chunks] == ([] if past else [NAME])
        assert (await client.answer()).text == f"You said {NAME} {QUESTION}"
        words = ("late", NAME) if past else ("transcript", NAME)
        assert [one for one in told(client) if one[0] in ("late", "transcript")] == [words, ("transcript", QUESTION)]
        # Nothing of the next request comes before the words that it begins with.
        assert told(client).index(words) < [kind for kind, _ in told(client)].index("started", 1)


async def test_the_words_of_a_cancelled_turn_follow_its_final() -> None:
    known = asyncio.Event()
    async with conversation([known.wait, NAME]) as (_, client, llm):
        await speak(client)
        await client.until("response_started")
        await client.send("cancel")
        assert ((await client.answer()).reason, known.is_set()) == ("cancelled", False)
        await client.configure(turn_detection=None, overlap=None)
        await client.say(QUESTION)
        await client.barrier()
        known.set()
        answer = await client.answer()
        assert answer.text == f"You said {NAME} {QUESTION}"
        assert told(client) == [
            ("started", ""),
            ("final", "cancelled"),
            ("late", NAME),
            ("started", ""),
            ("final", "stop"),
        ]
        assert (await history_of(client, llm))[0] == ("user", f"{NAME} {QUESTION}")


async def test_a_cancel_takes_the_finals_before_it_along() -> None:
    known = asyncio.Event()
    async with conversation([known.wait, NAME], [known.wait, QUESTION]) as (_, client, _):
        await speak(client)
        await speak(client)
        await client.send("cancel")
        finals = [await client.answer(), await client.answer()]
        assert [final.reason for final in finals] == ["cancelled", "cancelled"]
        known.set()
        late = [await client.until("output_chunk") for _ in range(2)]
        assert [frame["text"] for frame in late] == [NAME, QUESTION]
        assert [frame["request_id"] for frame in late] == [final.final["request_id"] for final in finals]
        turns = [frame["turn_id"] for frame in client.seen("speech_started")]
        assert [frame["turn_id"] for frame in late] == [final.final["turn_id"] for final in finals] == turns


async def test_typed_text_that_interrupts_continues_the_message() -> None:
    async with conversation([takes(1.0), "Add to that"], config={"overlap": "interrupt"}) as (_, client, _llm):
        await speak(client)
        await client.say("two and three")
        assert [(await client.answer()).reason, (await client.answer()).text] == [
            "cancelled",
            "You said Add to that two and three",
        ]


async def test_typed_text_stays_between_what_was_said_before_and_after() -> None:
    before = asyncio.Event()
    async with conversation([before.wait, "Add to that"], ["and six."], config={"overlap": "interrupt"}) as (
        _,
        client,
        _llm,
    ):
        await speak(client)
        await client.say("two and three")  # which is known before what was said before it
        await client.barrier()
        await speak(client)
        await client.barrier()
        before.set()
        answers = [await client.answer() for _ in range(3)]
        assert [answer.reason for answer in answers] == ["cancelled", "cancelled", "stop"]
        assert answers[2].text == "You said Add to that two and three and six."


async def test_a_sound_without_words_leaves_the_question_and_it_is_answered() -> None:
    async with conversation([takes(1.0), QUESTION], []) as (_, client, llm):
        await speak(client)
        await speak(client)
        assert (await client.answer()).reason == "cancelled"
        assert (await client.answer()).text == f"You said {QUESTION}"
        assert await history_of(client, llm) == [
            ("user", QUESTION),
            ("assistant", f"You said {QUESTION}"),
            ("input", "and?"),
        ]


async def test_a_turn_that_the_engine_never_began_with_is_written_down() -> None:
    """The answer before it winds up, and the speaker goes on meanwhile."""
    wound_up = asyncio.Event()

    class Slow(RetortEngine):
        async def act(self, request: Any, out: OutputWriter) -> None:
            first = len(self.requests) == 1
            self.pause = asyncio.Event() if first else None
            try:
                await super().act(request, out)
            finally:
                if first:
                    await wound_up.wait()

    async with conversation([NAME], [QUESTION], llm=Slow(speech_in_history=False)) as (_, client, llm):
        await client.say("hello")
        await client.until("output_chunk")
        # A turn, which interrupts the answer, and another one: the ASR begins with neither.
        await stream(client, BEGINNING + END)
        await client.until("speech_stopped")
        await stream(client, BEGINNING)
        await client.until("speech_started")
        await client.barrier()
        assert len(llm.requests) == 1
        await stream(client, END)
        wound_up.set()
        while (answer := await client.answer()).reason == "cancelled":
            pass
        assert answer.text == f"You said {NAME} {QUESTION}"
        assert [text for kind, text in told(client) if kind == "transcript"] == [NAME, QUESTION]


async def test_an_answer_of_which_something_was_read_stands_between() -> None:
    going_on = asyncio.Event()
    llm = RetortEngine()
    llm.pause = going_on
    async with conversation([NAME], [QUESTION], llm=llm) as (_, client, _):
        await speak(client)
        await client.until("response_started")
        while (await client.until("output_chunk")).get("modality") != "text":
            pass
        await go_on(client)
        going_on.set()
        await stream(client, END)
        assert (await client.answer()).reason == "cancelled"
        await client.answer()
        assert (await history_of(client, llm))[:3] == [("user", NAME), ("assistant", "You"), ("user", QUESTION)]


# what is taken for settled


@pytest.mark.parametrize("failure", [EngineFailed("broken"), EngineOverloaded("no recogniser", retry_after_ms=1)])
@pytest.mark.parametrize("shown", [True, False])
async def test_where_recognition_fails_the_interim_text_has_to_do(failure: Any, shown: bool) -> None:
    steps: list[Any] = [interim("My name is Rob")] if shown else []
    async with conversation([*steps, takes(1.0), failure], [QUESTION]) as (_, client, _llm):
        await speak(client)
        await speak(client)
        first, second = await client.answer(), await client.answer()
        assert (first.reason, first.errors) == ("cancelled", [])
        assert told(client)[1:-3] == [("transcript", "My name is Rob")] * shown + [("final", "cancelled")]
        assert second.text == f"You said {'My name is Rob' if shown else WORDS_UNKNOWN} {QUESTION}"


@pytest.mark.parametrize("past", [False, True])
async def test_recognition_is_given_up_after_so_long(past: bool) -> None:
    known = asyncio.Event()
    turns: list[list[Any]] = [[interim("My name is Rob"), known.wait, NAME], [QUESTION]]
    async with conversation(*turns, asr={"timeout_sec": 5}) as (_, client, _llm):
        await speak(client)
        await go_on(client)
        await client.barrier()
        asyncio.get_running_loop().call_later(5 + (0.2 if past else -0.2), known.set)
        await stream(client, END)
        assert (await client.answer()).chunks == [], "settled"
        heard = "My name is Rob" if past else NAME
        assert (await client.answer()).text == f"You said {heard} {QUESTION}"
        assert ("late", heard) in told(client)


async def test_an_interim_text_is_no_settled_one() -> None:
    async with conversation([interim("My aim is"), takes(1.0), NAME], [QUESTION]) as (_, client, _llm):
        await speak(client)
        await speak(client)
        first = await client.answer()
        assert [chunk["text"] for chunk in first.chunks] == [NAME]
        assert [frame["text"] for frame in client.frames if frame.get("interim")] == ["My aim is"]
        assert (await client.answer()).text == f"You said {NAME} {QUESTION}"


async def test_nothing_that_was_understood_late_is_told_as_that() -> None:
    known = asyncio.Event()
    async with conversation([interim("Hm"), known.wait]) as (_, client, llm):
        await speak(client)
        await client.send("cancel")
        await client.answer()
        known.set()
        assert (await client.until("output_chunk"))["text"] == ""
        assert await history_of(client, llm) == [("input", "and?")]


async def test_a_late_transcript_has_in_one_what_was_not_sent() -> None:
    known = asyncio.Event()
    async with conversation([NAME, known.wait, "I am", "called Bob."]) as (_, client, _):
        await speak(client)
        while (await client.until("output_chunk"))["text"] != NAME:
            pass
        await client.send("cancel")
        await client.answer()
        known.set()
        await client.until("output_chunk")
        assert told(client)[1:] == [("transcript", NAME), ("final", "cancelled"), ("late", " I am called Bob.")]


# an LLM that hears


async def test_a_model_that_hears_waits_for_the_words_and_hears_the_rest() -> None:
    llm = RetortEngine(input_modalities=frozenset({Modality.TEXT, Modality.AUDIO}))
    llm.gate = asyncio.Event()
    async with conversation([takes(1.0), NAME], [QUESTION], llm=llm) as (_, client, _):
        await speak(client)
        await go_on(client)
        llm.gate.set()
        await stream(client, END)
        assert (await client.answer()).reason == "cancelled"
        await client.answer()
        (read,) = [reads for reads in llm.reads_of.values() if reads and reads[0].modality is Modality.TEXT]
        assert read[0].payload.decode() == NAME
        assert {chunk.modality for chunk in read[1:]} == {Modality.AUDIO}


async def test_a_model_that_hears_is_given_the_audio_whose_words_nobody_knows() -> None:
    llm = RetortEngine(input_modalities=frozenset({Modality.TEXT, Modality.AUDIO}), speech_in_history=True)
    llm.gate = asyncio.Event()
    turns: list[list[Any]] = [[interim("My aim"), takes(1.0), EngineFailed("broken")], [QUESTION]]
    async with conversation(*turns, llm=llm) as (_server, client, _):
        await speak(client)
        await go_on(client)
        llm.gate.set()
        await stream(client, END)
        await client.answer()
        await client.answer()
        first, second = llm.reads_of.values()
        assert b"".join(chunk.payload for chunk in second).startswith(b"".join(chunk.payload for chunk in first))
        await history_of(client, llm)
        (user, _) = llm.requests[-1].history
        assert user.role == "user"
        assert [part.text for part in user.parts] == ["", QUESTION]
        assert user.speech is not None


# the session


async def test_truncating_at_either_part_drops_the_message() -> None:
    async with conversation([takes(1.0), NAME], [QUESTION]) as (_, client, llm):
        await client.say("hello")
        await client.answer()
        await speak(client)
        await speak(client)
        await client.answer()
        second = await client.answer()
        await client.send("history_truncate", request_id=second.final["request_id"])
        assert (await client.until("history_truncated"))["dropped_requests"] == 2
        assert await history_of(client, llm) == [("user", "hello"), ("assistant", "You said hello"), ("input", "and?")]


async def test_what_is_written_down_of_a_turn_that_was_truncated_is_not_kept() -> None:
    known = asyncio.Event()
    async with conversation([known.wait, NAME]) as (_, client, llm):
        await speak(client)
        await client.send("cancel")
        final = (await client.answer()).final
        await client.send("history_truncate", request_id=final["request_id"])
        assert (await client.until("history_truncated"))["dropped_requests"] == 1
        known.set()
        await client.until("output_chunk")
        assert await history_of(client, llm) == [("input", "and?")]


async def test_without_history_nothing_waits_for_the_words() -> None:
    known = asyncio.Event()
    async with conversation([known.wait, NAME], [QUESTION], config={"history": False}) as (_, client, _llm):
        await speak(client)
        await speak(client)
        assert (await client.answer()).reason == "cancelled"
        assert (await client.answer()).text == f"You said {QUESTION}"
        known.set()
        assert (await client.until("output_chunk"))["late"] is True


async def test_a_late_transcript_is_sent_again_over_the_next_connection() -> None:
    known = asyncio.Event()
    async with conversation([known.wait, NAME], streaming_input={"resume_grace_sec": 60}) as (server, client, _):
        await speak(client)
        await client.send("cancel")
        last = (await client.answer()).final["sequence_id"]
        created = client.created
        client.gone()
        await server.until(lambda: not server.connections, "the loss")
        known.set()
        query = f"?session_id={created['session_id']}&resume_token={created['resume_token']}&last_output={last}"
        async with native_client(server, query=query, greeted=False) as again:
            again.guarantees.next_output = last + 1
            again.guarantees.finished = client.guarantees.finished
            late = await again.until("output_chunk")
            assert (late["text"], late["late"]) == (NAME, True)
            again.gone()
            await server.until(lambda: not server.connections, "the loss")
        await asyncio.sleep(61)


async def test_a_drain_waits_for_the_words() -> None:
    known = asyncio.Event()
    async with conversation([known.wait, NAME], still_answers=False) as (server, client, _):
        await speak(client)
        await client.send("cancel")
        await client.answer()
        draining = asyncio.create_task(server.running.drain(30))
        await client.until("session_closing")
        known.set()
        assert (await client.until("output_chunk"))["text"] == NAME
        assert await client.closed() == 1012
        await draining


@pytest.mark.parametrize("way", ["leaves", "vanishes"])
async def test_nothing_is_left_of_a_client_that_goes_meanwhile(way: str) -> None:
    async with conversation([asyncio.Event().wait], [asyncio.Event().wait]) as (server, client, _):
        await speak(client)
        await speak(client)
        assert server.held_bytes > 0
        if way == "vanishes":
            client.gone()
    await asyncio.sleep(0)  # ``live_server`` has found nothing left


@pytest.mark.parametrize("past", [False, True])
async def test_so_many_turns_are_written_down_at_the_same_time(past: bool) -> None:
    known = asyncio.Event()
    count = MOST_WRITTEN_DOWN + past
    turns: list[list[Any]] = [[interim("So fa"), known.wait, f"Word {number}."] for number in range(count)]
    async with conversation(*turns, ["Over."]) as (_, client, _llm):
        for _ in range(count):
            await speak(client)
        await go_on(client)
        await client.barrier()
        known.set()
        await stream(client, END)
        while (answer := await client.answer()).reason == "cancelled":
            pass
        words = [f"Word {number}." for number in range(count)]
        first = "So fa" if past else words[0]
        assert answer.text == f"You said {' '.join([first, *words[1:]])} Over."


async def test_an_unspoken_message_is_not_in_the_history_of_a_turn_that_holds_an_answer() -> None:
    """Neither an empty question nor an empty answer goes to the model."""
    llm = RetortEngine()
    llm.gate = asyncio.Event()
    detection = {"type": "server_vad", "interrupt_resume": True}
    async with conversation([takes(1.0), NAME], [QUESTION], llm=llm) as (_, client, _):
        await client.configure(turn_detection=detection)
        await speak(client)
        await go_on(client)
        await stream(client, END)
        llm.gate.set()
        assert [(await client.answer()).reason, (await client.answer()).text] == [
            "cancelled",
            f"You said {NAME} {QUESTION}",
        ]
        assert llm.requests[-1].history == ()


async def test_messages_that_nothing_answered_are_one_however_they_came_about() -> None:
    async with conversation(config={"overlap": "interrupt"}) as (_, client, llm):
        llm.gate = asyncio.Event()
        await client.configure(turn_detection=None)
        for text in ("one", "two"):
            await client.say(text)
        await client.until("output_chunk")
        await client.send("cancel")
        await client.answer()
        llm.gate.set()
        await client.say("three")
        assert (await client.answer()).text == "You said one two three"
        assert await history_of(client, llm) == [
            ("user", "one two three"),
            ("assistant", "You said one two three"),
            ("input", "and?"),
        ]
