"""Answers that are begun at a pause: used when the turn ends as was guessed, else as if they had never been."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest
from support.engine_answers import BOTH, IMAGE, Answer, collect, open_input, request_of, streamed
from support.engine_answers import text as typed
from support.patience import until
from support.scripted_engines import PAUSE, SILENCE, WORD_MS, RetortEngine, ToneEngine, WordEngine, speech

from omni_ws.core.chunks import FinishReason, InputChunk, Modality, Usage
from omni_ws.engine.base import (
    AnswerOptions,
    Finished,
    GenerationRequest,
    OutputWriter,
    TextOutput,
    ToolCallOutput,
    TranscriptGuess,
)
from omni_ws.engine.clauses import (
    ContinuedInput,
    EarlierParts,
)
from omni_ws.engine.composed.engine import (
    MAX_KEPT_BYTES,
    MOST_TRIES,
    ComposedEngine,
)
from omni_ws.engine.composed.parts import MOST_AHEAD, AheadLoad
from omni_ws.errors import EngineFailed, InvalidValue

pytestmark = pytest.mark.usefixtures("no_task_left")


class Talk:
    """A composition that thinks ahead, and one request to it."""

    def __init__(
        self,
        llm: RetortEngine | None = None,
        *,
        tts: ToneEngine | None = None,
        earlier: EarlierParts | None = None,
        **fields: object,
    ) -> None:
        self.asr = WordEngine()
        self.llm = llm or RetortEngine()
        self.engine = ComposedEngine(self.llm, asr=self.asr, tts=tts, think_ahead=True)
        self.outcomes: list[str] = []
        self.engine.on_speculation = lambda outcome: self.outcomes.append(outcome.value)
        self.input = open_input()
        self.result = Answer()
        self.request = request_of(self.input, **({"modalities": BOTH} if tts else {}), **fields)
        if earlier is not None:
            self.request = replace(self.request, input=ContinuedInput(earlier, self.input))
        self.answering = asyncio.create_task(collect(self.engine, self.request, self.result))

    async def say(self, *chunks: InputChunk) -> None:
        """Send input, and wait until the ASR has taken it."""
        for chunk in chunks:
            self.input.put_nowait(chunk)
        await until(lambda: not self.input.queued)
        for _ in range(200):  # passes of the loop, far more than needed
            await asyncio.sleep(0)

    async def end(self) -> Answer:
        self.input.close()
        await self.answering
        assert [part.active_requests for part in (self.engine, self.asr, self.llm)] == [0, 0, 0]
        assert self.engine._ahead_load is not None
        assert self.engine._ahead_load.active == 0
        return self.result


async def test_the_answer_is_there_when_the_turn_ends() -> None:
    talk = Talk()
    await talk.say(speech("go"), speech("forward"), PAUSE)
    assert talk.llm.read == "go forward"
    assert talk.result.text == ""
    result = await talk.end()
    assert (result.text, result.transcript) == ("You said go forward", "go forward")
    assert result.finished == Finished(
        FinishReason.STOP, Usage(input_tokens=2, output_tokens=4, input_audio_ms=3 * WORD_MS)
    )
    assert talk.outcomes == ["used"]
    assert [request.request_id for request in talk.llm.requests] == ["req_1", "req_1-ahead1"]


class Earlier(EarlierParts):
    """A turn before, whose speech is transcribed when the test says so."""

    known = False

    async def chunks(self) -> tuple[InputChunk, ...]:
        assert self.known
        return (typed("please"),)


async def test_a_guess_follows_earlier_parts_that_were_just_written_down() -> None:
    """Also where it is told in a callback, which cannot wait for them: with the next audio."""
    earlier = Earlier()
    talk = Talk(earlier=earlier)
    talk.asr.drains_guesses = False
    await talk.say(speech("go"))
    earlier.known = True
    await talk.say(PAUSE)
    assert talk.llm.read == ""
    await talk.say(PAUSE)
    assert talk.llm.read == "please go"
    result = await talk.end()
    assert (result.text, talk.outcomes[-1]) == ("You said please go", "used")


async def test_speech_is_made_ahead_too() -> None:
    tts = ToneEngine()
    talk = Talk(tts=tts)
    await talk.say(speech("go"), PAUSE)
    assert len(tts.requests) == 1
    assert talk.result.spoken_words == 0
    result = await talk.end()
    assert (result.text, result.spoken_words) == ("You said go", 3)
    assert (len(tts.requests), talk.outcomes) == (1, ["used"])


async def test_an_answer_that_is_not_ready_goes_on_after_the_turn() -> None:
    llm = RetortEngine("one two three")
    llm.pause = asyncio.Event()
    talk = Talk(llm)
    await talk.say(speech("go"), PAUSE)
    talk.input.close()
    await until(lambda: talk.result.text != "")
    llm.pause.set()
    await talk.end()
    assert [output.text for output in talk.result.outputs if isinstance(output, TextOutput)] == [
        "one",
        " two",
        " three",
    ]
    assert talk.outcomes == ["used"]


async def test_a_speaker_who_goes_on_has_one_answer_to_all() -> None:
    talk = Talk()
    await talk.say(speech("go"), PAUSE, speech("forward"))
    assert talk.llm.active_requests == 1
    result = await talk.end()
    assert result.text == "You said go forward"
    assert talk.outcomes == ["went_on"]


async def test_a_speaker_who_goes_on_after_a_settled_guess_is_noticed() -> None:
    talk = Talk()
    await talk.say(speech("go"), PAUSE, speech("."))
    assert talk.llm.reads_of["req_1"]
    await talk.say(speech("now"), PAUSE)
    assert (await talk.end()).text == "You said go . now"
    assert talk.outcomes == ["went_on", "used"]


async def test_a_second_pause_is_a_second_try() -> None:
    talk = Talk()
    await talk.say(speech("go"), PAUSE, speech("forward"), PAUSE)
    assert (await talk.end()).text == "You said go forward"
    assert talk.outcomes == ["went_on", "used"]


async def test_settled_text_before_the_pause_belongs_to_the_question() -> None:
    talk = Talk()
    await talk.say(typed("please"), speech("go."), speech("on"), PAUSE)
    assert (await talk.end()).text == "You said please go. on"
    assert talk.outcomes == ["used"]


@pytest.mark.counts_passes
async def test_another_transcript_than_was_guessed_is_answered_itself() -> None:
    talk = Talk()
    talk.asr.wrong_guess = "no forward"
    await talk.say(speech("go"), speech("forward"), PAUSE)
    assert talk.llm.read == "no forward"
    result = await talk.end()
    assert (result.text, talk.outcomes) == ("You said go forward", ["differed"])


async def test_words_that_turn_out_to_be_none_are_not_answered() -> None:
    talk = Talk()
    talk.asr.wrong_guess = "the"
    await talk.say(SILENCE, PAUSE)
    result = await talk.end()
    assert (result.text, talk.outcomes) == ("", ["differed"])


@pytest.mark.parametrize("more", [typed("really"), IMAGE])
async def test_input_after_the_pause_is_not_left_out(more: InputChunk) -> None:
    talk = Talk()
    await talk.say(speech("go"), PAUSE, more)
    result = await talk.end()
    assert result.text == ("You said go really" if more.modality is Modality.TEXT else "You said go")
    assert more.modality in {chunk.modality for chunk in talk.llm.reads_of["req_1"]}
    assert talk.outcomes == ["went_on"]


async def test_a_failure_ahead_is_nobodys() -> None:
    talk = Talk(RetortEngine("one two"))
    talk.llm.failure = EngineFailed("out of memory")
    await talk.say(speech("go"), PAUSE)
    talk.llm.failure = None
    assert (await talk.end()).text == "one two"
    assert talk.outcomes == ["failed"]


async def test_a_failure_after_the_turn_is_told() -> None:
    llm = RetortEngine("one two")
    llm.pause = asyncio.Event()
    talk = Talk(llm)
    await talk.say(speech("go"), PAUSE)
    talk.input.close()
    await until(lambda: talk.result.text == "one")
    llm.failure = EngineFailed("out of memory")
    llm.pause.set()
    with pytest.raises(EngineFailed, match="out of memory") as failed:
        await talk.answering
    assert failed.value.param == "llm"


async def test_a_request_that_the_llm_refuses_fails_while_its_speaker_speaks() -> None:
    class Strict(RetortEngine):
        async def generate(self, request: GenerationRequest, out: OutputWriter) -> None:
            raise InvalidValue("too hot", param="sampling.temperature")

    talk = Talk(Strict())
    await talk.say(speech("go"))
    with pytest.raises(InvalidValue, match="too hot"):
        await talk.answering


async def test_an_llm_that_ends_before_its_input_ends_the_answer() -> None:
    class Hasty(RetortEngine):
        async def generate(self, request: GenerationRequest, out: OutputWriter) -> None:
            await anext(aiter(request.input))
            out.write(TextOutput("Enough."))
            out.write(Finished(FinishReason.STOP, Usage()))

    talk = Talk(Hasty())
    await talk.say(speech("go."), speech("on"))
    await talk.answering
    assert talk.result.text == "Enough."


async def test_a_cancelled_request_withdraws_both_answers() -> None:
    talk = Talk()
    talk.llm.gate = asyncio.Event()
    await talk.say(speech("go"), PAUSE)
    assert talk.llm.active_requests == 2
    talk.answering.cancel()
    await asyncio.gather(talk.answering, return_exceptions=True)
    assert (talk.llm.active_requests, talk.asr.active_requests) == (0, 0)
    assert talk.outcomes == ["failed"]


@pytest.mark.parametrize("passes", range(12))
async def test_a_request_that_is_cancelled_again_while_it_ends_leaves_no_answer(passes: int) -> None:
    talk = Talk()
    talk.llm.gate = asyncio.Event()
    await talk.say(speech("go"), PAUSE)
    talk.answering.cancel()
    for _ in range(passes):
        await asyncio.sleep(0)
    talk.answering.cancel()
    await asyncio.gather(talk.answering, return_exceptions=True)
    await until(lambda: talk.llm.active_requests == 0)


async def test_the_meter_is_that_of_the_answer_that_is_used() -> None:
    class Metered(RetortEngine):
        async def generate(self, request: GenerationRequest, out: OutputWriter) -> None:
            request.meter.read = lambda: Usage(input_tokens=len(request.request_id))
            await super().generate(request, out)

    talk = Talk(Metered())
    await talk.say(speech("go"), PAUSE)
    await talk.end()
    assert talk.request.meter.read() == Usage(input_tokens=len("req_1-ahead1"))


# bounds


async def test_tries_are_bounded() -> None:
    talk = Talk()
    for _ in range(MOST_TRIES + 3):
        await talk.say(speech("go"), PAUSE)
    assert len(talk.llm.requests) == 1 + MOST_TRIES
    await talk.end()
    assert talk.outcomes == ["went_on"] * MOST_TRIES


async def test_what_is_held_back_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omni_ws.engine.composed.engine.OUTPUT_BYTES", 1280)
    talk = Talk(RetortEngine(" ".join(["word"] * 5000)))
    await talk.say(speech("go"), PAUSE)
    assert talk.llm.active_requests == 2  # the one ahead waits
    assert len((await talk.end()).text) == 24_999
    assert talk.outcomes == ["used"]


async def test_long_input_is_not_given_twice() -> None:
    talk = Talk()
    words = "go " * (MAX_KEPT_BYTES // 3 + 1)
    await talk.say(typed(words), speech("on"), PAUSE)
    assert len(talk.llm.requests) == 1
    assert (await talk.end()).text == f"You said {words}on"
    assert talk.outcomes == []


async def test_no_answer_is_begun_beside_one_that_somebody_waits_for() -> None:
    first = Talk()
    first.llm.gate = asyncio.Event()
    await first.say(speech("go"))
    first.input.close()
    await until(lambda: first.llm.read == "go")
    other = open_input(speech("stop"), PAUSE)
    answering = asyncio.create_task(collect(first.engine, request_of(other)))
    await until(lambda: first.outcomes == ["skipped"])
    first.llm.gate.set()
    other.close()
    assert (await answering).text == "You said stop"
    await first.end()


def test_an_llm_that_takes_answers_in_its_stride_thinks_ahead_beside_them() -> None:
    async def learn(beside_sec: float) -> AheadLoad:
        load = AheadLoad()
        first = load.begin(ahead=False)
        await asyncio.sleep(0.01)
        first.note_output()
        second = load.begin(ahead=False)
        await asyncio.sleep(beside_sec)
        second.note_output()
        second.end()
        return load

    assert asyncio.run(learn(0.0)).has_room
    assert not asyncio.run(learn(0.1)).has_room


async def test_an_llm_that_is_idle_for_a_moment_only_counts_as_busy() -> None:
    load = AheadLoad()
    for _ in range(5):
        both = [load.begin(ahead=False) for _ in range(2)]
        for one in both:
            one.end()
    room = [load.has_room]  # half of the answers were alone
    crowd = [load.begin(ahead=False) for _ in range(6)]
    for one in crowd:
        one.end()
    assert load.active == 0
    room.append(load.has_room)
    for _ in range(3):
        load.begin(ahead=False).end()
    assert [*room, load.has_room] == [True, False, True]


async def test_answers_ahead_are_bounded_for_all_requests() -> None:
    load = AheadLoad()
    begun = []
    for _ in range(MOST_AHEAD):
        begun.append(load.begin(ahead=True))
        begun[-1].note_output()
    assert not load.has_room
    begun.pop().end()
    for one in begun:
        one.used()
        one.end()
        one.end()
    assert load.active == 0
    assert load.has_room


async def test_without_thinking_ahead_no_guess_is_asked_for() -> None:
    asr, llm = WordEngine(), RetortEngine()
    source = open_input(speech("go"), PAUSE)
    source.close()
    await collect(ComposedEngine(llm, asr=asr), request_of(source))
    assert not asr.requests[0].options.transcript_guesses
    assert len(llm.requests) == 1


async def test_a_tool_is_called_when_the_turn_has_ended() -> None:
    from support.scripted_engines import tool_call

    class Calling(RetortEngine):
        async def generate(self, request: GenerationRequest, out: OutputWriter) -> None:
            async for _ in request.input:
                pass
            for output in tool_call("lights", "{}"):
                out.write(output)
            out.write(Finished(FinishReason.TOOL_CALLS, Usage()))

    talk = Talk(Calling())
    await talk.say(speech("lights"), PAUSE)
    assert not any(isinstance(output, ToolCallOutput) for output in talk.result.outputs)
    result = await talk.end()
    assert sum(isinstance(output, ToolCallOutput) for output in result.outputs) == 2
    assert result.finished.reason is FinishReason.TOOL_CALLS


# guesses for turn detection


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("wanted", [False, True])
async def test_guesses_are_written_if_they_are_wanted(wanted: bool, ahead: bool) -> None:
    engine = ComposedEngine(RetortEngine(), asr=WordEngine(transcript_guesses=True), think_ahead=ahead)
    assert engine.capabilities.transcript_guesses
    source = open_input()
    for chunk in (speech("set"), PAUSE, speech("it"), PAUSE):
        source.put_nowait(chunk)
    source.close()
    request = request_of(source, options=AnswerOptions(transcript_guesses=wanted))
    async with aclosing(streamed(engine, request)) as outputs:
        guesses = [output.text async for output in outputs if isinstance(output, TranscriptGuess)]
    assert guesses == (["set", "", "set it"] if wanted else [])


def test_an_asr_that_tells_no_guesses() -> None:
    assert not ComposedEngine(RetortEngine(), asr=WordEngine()).capabilities.transcript_guesses
