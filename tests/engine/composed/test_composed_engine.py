"""An engine made of engines: what reaches which part, what each makes of it, and what the client gets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from support.engine_answers import (
    AUDIO,
    BOTH,
    IMAGE,
    TEXT,
    Answer,
    Input,
    answered,
    collect,
    open_input,
    request_of,
)
from support.engine_answers import text as typed
from support.patience import until
from support.scripted_engines import SILENCE, WORD_MS, RetortEngine, ToneEngine, WordEngine, speech
from support.token_engine import TokenEngine

from omni_ws.core.chunks import FinishReason, InputChunk, InputMode, Modality, OutputModality, Task, Usage
from omni_ws.engine.base import (
    EngineCapabilities,
    EngineOutput,
    EngineState,
    Finished,
    GenerationRequest,
    OutputWriter,
    TextOutput,
    TraceableEngine,
    TranscriptOutput,
)
from omni_ws.engine.composed.engine import ComposedEngine
from omni_ws.engine.composed.parts import PartDescription, parts_of
from omni_ws.engine.fake import EchoEngine, ScriptedEngine
from omni_ws.errors import EmptyInput, EngineFailed, UnsupportedParameter

pytestmark = pytest.mark.usefixtures("no_task_left")


@pytest.fixture
def asr() -> WordEngine:
    return WordEngine()


@pytest.fixture
def llm() -> RetortEngine:
    return RetortEngine()


@pytest.fixture
def tts() -> ToneEngine:
    return ToneEngine()


@pytest.fixture
async def engine(asr: WordEngine, llm: RetortEngine, tts: ToneEngine) -> AsyncIterator[ComposedEngine]:
    composed = ComposedEngine(llm, asr=asr, tts=tts)
    await composed.start()
    yield composed
    assert [part.active_requests for part in (composed, asr, llm, tts)] == [0, 0, 0, 0]
    await composed.stop()


async def test_speech_is_written_down_answered_and_spoken(engine: ComposedEngine, llm: RetortEngine) -> None:
    result = await answered(engine, speech("go"), speech("forward"), modalities=BOTH)
    assert result.transcript == "go forward"
    assert [one.text for one in result.transcripts if one.interim] == ["go", "go forward"]
    assert llm.read == "go forward"
    assert result.text == "You said go forward"
    assert result.spoken_words == 4
    assert result.finished.reason is FinishReason.STOP


async def test_usage_is_that_of_all_parts(engine: ComposedEngine) -> None:
    result = await answered(engine, speech("go"), speech("forward"), modalities=BOTH)
    usage = result.finished.usage
    assert (usage.input_tokens, usage.output_tokens, usage.input_audio_ms) == (2, 4, 2 * WORD_MS)


async def test_the_audio_of_the_answer_is_counted(asr: WordEngine, llm: RetortEngine) -> None:
    tts = ScriptedEngine([Finished(FinishReason.STOP, Usage(output_audio_ms=40, output_tokens=9))])
    result = await answered(ComposedEngine(llm, asr=asr, tts=tts), typed("a"), modalities=BOTH)
    assert (result.finished.usage.output_audio_ms, result.finished.usage.output_tokens) == (40, 3)


async def test_an_answer_in_audio_alone_has_no_text(engine: ComposedEngine) -> None:
    result = await answered(engine, typed("hello"), modalities=AUDIO)
    assert (result.text, result.spoken_words) == ("", 3)


async def test_a_written_answer_is_not_spoken(engine: ComposedEngine, tts: ToneEngine) -> None:
    result = await answered(engine, typed("hello"))
    assert (result.text, result.spoken_words, tts.requests) == ("You said hello", 0, [])


async def test_what_follows_audio_waits_until_that_is_written_down(
    engine: ComposedEngine, asr: WordEngine, llm: RetortEngine
) -> None:
    asr.gate = asyncio.Event()
    source = Input(typed("first"), speech("second"), IMAGE, typed("third"))
    answering = asyncio.create_task(collect(engine, request_of(source)))
    await until(lambda: not source.queued or asr.active_requests == 1)
    await until(lambda: bool(llm.reads))
    assert llm.read == "first"
    asr.gate.set()
    await answering
    assert [chunk.modality for chunk in llm.reads] == [Modality.TEXT, Modality.TEXT, Modality.IMAGE, Modality.TEXT]
    assert llm.read == "first secondthird"  # an image stands between the last two


@pytest.mark.parametrize(
    ("chunks", "read"),
    [
        ([typed("look"), speech("here")], "look here"),
        ([speech("look"), typed("he"), typed("re")], "look here"),
        ([typed("look "), speech("here"), typed(" now")], "look here now"),
        ([speech("one."), speech("two"), typed("three"), speech("four")], "one. two three four"),
    ],
)
async def test_typed_and_spoken_words_do_not_run_together(
    engine: ComposedEngine, llm: RetortEngine, chunks: list[InputChunk], read: str
) -> None:
    await answered(engine, *chunks)
    assert llm.read == read


async def test_the_transcript_of_interrupted_speech_is_one(engine: ComposedEngine) -> None:
    result = await answered(engine, speech("one"), IMAGE, speech("two"), speech("three"))
    settled = [one for one in result.transcripts if not one.interim]
    assert [one.text for one in settled] == ["one", " two three"]
    assert [one.start_ms for one in settled] == [0, WORD_MS]
    assert [word.start_ms for one in settled for word in one.words] == [0, WORD_MS, WORD_MS]
    assert result.finished.usage.input_audio_ms == 3 * WORD_MS


async def test_settled_words_reach_the_llm_while_the_rest_is_spoken(engine: ComposedEngine, llm: RetortEngine) -> None:
    source = open_input(speech("go"), speech("forward."), speech("ten"))
    answering = asyncio.create_task(collect(engine, request_of(source)))
    await llm.took.wait()
    assert llm.read == "go forward."
    assert llm.requests[0].input_mode is InputMode.EXTEND
    source.put_nowait(speech("meters"))
    source.close()
    assert (await answering).text == "You said go forward. ten meters"


async def test_the_parts_get_only_what_is_theirs(
    engine: ComposedEngine, asr: WordEngine, llm: RetortEngine, tts: ToneEngine
) -> None:
    fields = {"instructions": "be brief", "sampling": {"max_tokens": 5}, "voice": "bell", "speed": 1.5, "owner": "key"}
    request = request_of(Input(speech("go")), modalities=BOTH, **fields)
    await collect(engine, request)
    heard, answered, spoken = asr.requests[0], llm.requests[0], tts.requests[0]
    assert (heard.task, answered.task, spoken.task) == (Task.TRANSCRIBE, Task.CHAT, Task.SPEECH)
    assert (answered.instructions, answered.sampling) == ("be brief", {"max_tokens": 5})
    assert (answered.voice, answered.speed) == (None, 1)
    assert answered.modalities == TEXT
    assert answered.meter is request.meter
    assert len({heard.request_id, answered.request_id, spoken.request_id}) == 3
    for part in (heard, spoken):
        assert (part.instructions, part.sampling, part.history) == ("", {}, ())
        assert part.meter is not request.meter
        assert part.owner == "key"
    assert (spoken.voice, spoken.speed) == ("bell", 1.5)


async def test_a_part_that_takes_no_late_input_is_not_told_of_any(asr: WordEngine) -> None:
    llm = RetortEngine(extend=False)
    engine = ComposedEngine(llm, asr=asr)
    assert engine.capabilities.extend
    assert (await answered(engine, speech("go"), typed("on"))).text == "You said go on"
    assert llm.requests[0].input_mode is InputMode.SNAPSHOT


async def test_a_request_without_input_is_refused(engine: ComposedEngine, llm: RetortEngine) -> None:
    for chunks in ((), (InputChunk.end(),)):
        with pytest.raises(EmptyInput):
            await answered(engine, *chunks)
    assert llm.aborted == len(llm.requests)


# silence


async def test_silence_never_reaches_the_llm(engine: ComposedEngine, llm: RetortEngine, tts: ToneEngine) -> None:
    result = await answered(engine, SILENCE, SILENCE, modalities=BOTH)
    assert (result.text, result.transcript, result.spoken_words) == ("", "", 0)
    assert result.finished.reason is FinishReason.STOP
    assert result.finished.usage.input_audio_ms == 2 * WORD_MS
    assert llm.aborted == len(llm.requests)


async def test_silence_is_answered_as_the_llm_wants_it(asr: WordEngine, tts: ToneEngine) -> None:
    engine = ComposedEngine(RetortEngine(nothing_heard="I heard nothing."), asr=asr, tts=tts)
    result = await answered(engine, SILENCE, modalities=BOTH)
    assert (result.text, result.spoken_words, result.finished.usage.output_tokens) == ("I heard nothing.", 3, 3)


async def test_silence_beside_other_input_leaves_that(engine: ComposedEngine, llm: RetortEngine) -> None:
    assert (await answered(engine, SILENCE, typed("hello"))).text == "You said hello"
    assert (await answered(engine, IMAGE, SILENCE)).text == "You said "
    assert llm.aborted == 0


# LLMs that hear or speak by themselves

HEARING = {"input_modalities": frozenset({Modality.TEXT, Modality.AUDIO})}


async def test_an_llm_that_hears_gets_the_audio_and_does_not_wait_for_the_transcript(asr: WordEngine) -> None:
    llm = RetortEngine("Yes.", **HEARING)
    asr.gate = asyncio.Event()
    result = Answer()
    engine = ComposedEngine(llm, asr=asr)
    request = request_of(Input(speech("go"), typed("on")))
    answering = asyncio.create_task(collect(engine, request, result))
    await until(lambda: result.text == "Yes.")
    assert [chunk.modality for chunk in llm.reads] == [Modality.AUDIO, Modality.TEXT]
    assert result.transcript == ""
    asr.gate.set()
    await answering
    assert result.transcript == "go"
    assert result.finished.usage.input_audio_ms == WORD_MS


async def test_the_transcript_of_an_llm_that_hears_gives_way_to_that_of_the_asr(asr: WordEngine) -> None:
    llm = ScriptedEngine([TranscriptOutput("it heard this"), TextOutput("Yes.")])
    result = await answered(ComposedEngine(llm, asr=asr), speech("go"))
    assert (result.transcript, result.text) == ("go", "Yes.")


async def test_a_slow_transcript_is_not_lost_where_the_answer_is_spoken(asr: WordEngine, tts: ToneEngine) -> None:
    asr.gate = asyncio.Event()
    result = Answer()
    engine = ComposedEngine(RetortEngine("Yes.", **HEARING), asr=asr, tts=tts)
    request = request_of(Input(speech("go")), modalities=BOTH)
    answering = asyncio.create_task(collect(engine, request, result))
    await until(lambda: result.spoken_words == 1 and tts.active_requests == 0)
    asr.gate.set()
    await answering
    assert result.transcript == "go"


async def test_without_other_parts_the_llm_has_the_request_to_itself() -> None:
    llm = RetortEngine()
    engine = ComposedEngine(llm)
    request = request_of(Input(typed("hello")), modalities=BOTH, voice="bell")
    await collect(engine, request)
    assert [replace(one, input=request.input) for one in llm.requests] == [request]


async def test_an_llm_that_speaks_needs_no_tts() -> None:
    engine = ComposedEngine(ToneEngine(), asr=WordEngine())
    result = await answered(engine, typed("one two"), modalities=BOTH)
    assert (result.text, result.spoken_words) == ("one two ", 2)
    assert engine.capabilities.voices == ("tone", "bell")


async def test_a_tts_takes_the_place_of_an_llm_that_speaks(tts: ToneEngine) -> None:
    result = await answered(ComposedEngine(EchoEngine(), tts=tts), typed("one two"), modalities=BOTH)
    assert len(tts.requests) == 1
    assert result.spoken_words == 2


# tasks of one part


async def test_tasks_of_one_part_go_to_it(
    engine: ComposedEngine, asr: WordEngine, llm: RetortEngine, tts: ToneEngine
) -> None:
    written = request_of(Input(speech("go")), task=Task.TRANSCRIBE)
    assert (await collect(engine, written)).text == "go"
    spoken = request_of(Input(typed("one two")), task=Task.SPEECH, modalities=AUDIO)
    assert (await collect(engine, spoken)).spoken_words == 2
    assert (asr.requests, tts.requests, llm.requests) == ([written], [spoken], [])


async def test_only_one_answer_is_spoken(engine: ComposedEngine) -> None:
    options = replace(request_of(Input()).options, choices=2)
    with pytest.raises(UnsupportedParameter) as refused:
        await answered(engine, typed("a"), modalities=BOTH, options=options)
    assert refused.value.param == "n"


# outputs


async def test_text_takes_the_short_way(engine: ComposedEngine) -> None:
    """Each word is sent in the task of the request."""
    running = asyncio.current_task()

    class Watching(Answer):
        def write(self, output: EngineOutput) -> None:
            assert asyncio.current_task() is running
            super().write(output)

    asked = request_of(Input(typed("hello")), without_audio=True)
    result = await collect(engine, asked, Watching())
    assert result.text == "You said hello"
    assert len(result.outputs) == 4


async def test_the_llm_waits_for_a_tts_that_is_slow(asr: WordEngine) -> None:
    llm = RetortEngine(" ".join(["word"] * 5000))
    result = Answer()
    reading = asyncio.Event()

    class Unread(ToneEngine):
        async def generate(self, request: GenerationRequest, out: OutputWriter) -> None:
            await reading.wait()
            await super().generate(request, out)

    engine = ComposedEngine(llm, asr=asr, tts=Unread())
    request = request_of(Input(typed("go on")), modalities=BOTH)
    answering = asyncio.create_task(collect(engine, request, result))
    await until(lambda: len(result.text) >= 2000)
    for _ in range(100):  # passes of the loop, far more than needed
        await asyncio.sleep(0)
    assert len(result.text) < 2100
    reading.set()
    await answering
    assert result.spoken_words == 5000


async def test_a_tts_that_ends_early_ends_no_text(llm: RetortEngine) -> None:
    tts = ScriptedEngine([])
    llm.reply = " ".join(["word"] * 2000)
    assert len((await answered(ComposedEngine(llm, tts=tts), typed("a"), modalities=BOTH)).text) == 9999


async def test_an_asr_that_ends_early_loses_nothing_else(llm: RetortEngine) -> None:
    class Curt(WordEngine):
        async def generate(self, request: GenerationRequest, out: OutputWriter) -> None:
            await anext(aiter(request.input))
            out.write(TranscriptOutput("one"))
            out.write(Finished(FinishReason.LENGTH, Usage()))

    result = await answered(ComposedEngine(llm, asr=Curt()), speech("one"), speech("two"), speech("three"), "four")
    assert result.text == "You said one four"


@pytest.mark.parametrize("position", range(3))
async def test_a_cancelled_request_leaves_nothing_behind(
    engine: ComposedEngine, asr: WordEngine, llm: RetortEngine, tts: ToneEngine, position: int
) -> None:
    """Cancelled while the ASR, the LLM, or the TTS is at work."""
    asr.gate = asyncio.Event() if position == 0 else None
    llm.gate = asyncio.Event() if position == 1 else None
    source = Input(speech("go")) if position < 2 else open_input(speech("go"))
    answering = asyncio.create_task(collect(engine, request_of(source, modalities=BOTH)))
    await until(lambda: asr.active_requests == 1 if position != 1 else bool(llm.reads))
    answering.cancel()
    await asyncio.gather(answering, return_exceptions=True)
    assert [part.active_requests for part in (asr, llm, tts)] == [0, 0, 0]


# capabilities


def test_capabilities_are_those_of_the_llm_widened(asr: WordEngine, tts: ToneEngine) -> None:
    llm = RetortEngine(tools=True, logprobs=True, stage_params=frozenset({"retort.depth"}))
    able = ComposedEngine(llm, asr=asr, tts=tts).capabilities
    assert able.input_modalities == {Modality.TEXT, Modality.IMAGE, Modality.AUDIO}
    assert able.output_modalities == {OutputModality.TEXT, OutputModality.AUDIO, OutputModality.TRANSCRIPT}
    assert able.tasks == frozenset(Task)
    assert able.transcripts
    assert (set(able.languages), able.word_times) == ({"en"}, True)
    assert able.voices == ("tone", "bell")
    assert able.stages == ("asr", "llm", "tts")
    assert able.stage_params == {"retort.depth", "words.beam", "fake.fail_after_chunks"}
    assert (able.tools, able.logprobs, able.choices, able.echo) == (True, True, False, False)


def test_stages_of_a_part_keep_their_names(asr: WordEngine) -> None:
    llm = RetortEngine(stages=("thinker", "talker"))
    assert ComposedEngine(llm, asr=asr).capabilities.stages == ("asr", "thinker", "talker")


def test_a_part_that_cannot_do_its_task_adds_nothing(llm: RetortEngine) -> None:
    """As the TTS where no voice is installed."""
    able = ComposedEngine(llm, asr=RetortEngine(), tts=RetortEngine()).capabilities
    assert able.output_modalities == TEXT
    assert able.tasks == {Task.CHAT}
    assert not able.voices


def test_a_part_that_cannot_do_its_task_is_none(llm: RetortEngine) -> None:
    engine = ComposedEngine(llm, asr=RetortEngine(), tts=RetortEngine())
    assert engine.parts == {"asr": None, "llm": PartDescription("retort", "retort"), "tts": None}
    assert engine.capabilities.stages == ("llm",)


def test_the_parts_of_any_engine(asr: WordEngine, llm: RetortEngine) -> None:
    engine = ComposedEngine(llm, asr=asr)
    assert parts_of(engine) == engine.parts
    assert parts_of(llm) == {"asr": None, "llm": PartDescription("retort", "retort"), "tts": None}


async def test_parts_of_an_llm_that_has_some_are_parts(asr: WordEngine, llm: RetortEngine, tts: ToneEngine) -> None:
    inner = ComposedEngine(llm, tts=tts)
    engine = ComposedEngine(inner, asr=asr)
    await engine.start()
    names = {role: part and part.name for role, part in engine.parts.items()}
    assert names == {"asr": "words", "llm": "retort", "tts": "tone"}
    tts.state = EngineState.UNHEALTHY
    assert engine.part_states == {"asr": EngineState.OK, "llm": EngineState.OK, "tts": EngineState.UNHEALTHY}
    await engine.stop()


async def test_speech_needs_a_part_that_can_speak(llm: RetortEngine) -> None:
    engine = ComposedEngine(llm, tts=RetortEngine())
    assert (await answered(engine, typed("hello"), modalities=BOTH)).spoken_words == 0


def test_parts_are_named(asr: WordEngine, llm: RetortEngine) -> None:
    engine = ComposedEngine(llm, asr=asr)
    assert engine.parts == {
        "asr": PartDescription("words", "words"),
        "llm": PartDescription("retort", "retort"),
        "tts": None,
    }
    assert (engine.name, engine.model) == ("retort", "retort")
    named = ComposedEngine(llm, name="whole", model="a model")
    assert (named.name, named.model) == ("whole", "a model")


# life


class Life(EchoEngine):
    """Notes when it starts and stops."""

    def __init__(self, name: str, log: list[str], *, failure: Exception | None = None) -> None:
        super().__init__()
        self.name = self.model = name
        self._log = log
        self._failure = failure

    async def start(self) -> None:
        self._log.append(f"start {self.name}")
        if self._failure is not None:
            raise self._failure
        await super().start()
        self.model = f"model of {self.name}"

    async def stop(self) -> None:
        self._log.append(f"stop {self.name}")
        await super().stop()


class Able(Life):
    """Has capabilities that a test gives."""

    def __init__(self, name: str, log: list[str], capabilities: EngineCapabilities) -> None:
        super().__init__(name, log)
        self._capabilities = capabilities

    @property
    def capabilities(self) -> EngineCapabilities:
        return self._capabilities


async def test_parts_start_one_after_the_other_and_each_once() -> None:
    log: list[str] = []
    both, llm = Life("both", log), Life("llm", log)
    engine = ComposedEngine(llm, asr=both, tts=both)
    assert engine.state is EngineState.STARTING
    await engine.start()
    await engine.start()
    assert (engine.state, engine.model) == (EngineState.OK, "model of llm")
    assert len(engine.describe()) == 2
    await engine.stop()
    assert log == ["start both", "start llm", "stop both", "stop llm"]
    assert engine.state is EngineState.STARTING


@pytest.mark.parametrize(
    ("hears", "speaks", "started"),
    [(False, False, ["llm", "ears", "voice"]), (True, False, ["llm", "voice"]), (False, True, ["llm", "ears"]),
     (True, True, ["llm"])],
)  # fmt: skip
async def test_parts_that_only_stand_in_are_left_out_where_the_llm_does_their_work(
    hears: bool, speaks: bool, started: list[str]
) -> None:
    log: list[str] = []
    able = replace(
        RetortEngine().capabilities,
        input_modalities=frozenset({Modality.TEXT} | ({Modality.AUDIO} if hears else set())),
        output_modalities=frozenset({OutputModality.TEXT} | ({OutputModality.AUDIO} if speaks else set())),
    )
    llm = Able("llm", log, able)
    engine = ComposedEngine(llm, asr=Life("ears", log), tts=Life("voice", log), where_missing=True)
    await engine.start()
    assert log == [f"start {name}" for name in started]
    assert [role for role, part in engine.parts.items() if part is None] == (["asr"] * hears + ["tts"] * speaks)
    assert Modality.AUDIO in engine.capabilities.input_modalities
    assert OutputModality.AUDIO in engine.capabilities.output_modalities
    await engine.stop()
    assert log[len(started) :] == [f"stop {name}" for name in started]


async def test_an_engine_that_is_two_of_the_parts_is_left_out_only_where_it_is_neither() -> None:
    log: list[str] = []
    hearing = replace(RetortEngine().capabilities, input_modalities=frozenset(Modality))
    both = Life("both", log)
    engine = ComposedEngine(Able("llm", log, hearing), asr=both, tts=both, where_missing=True)
    await engine.start()
    assert log == ["start llm", "start both"]
    assert (engine.parts["asr"], engine.parts["tts"]) == (None, PartDescription("both", "model of both"))


class Waiting(Life):
    """Its start ends with that of another."""

    def __init__(self, name: str, log: list[str]) -> None:
        super().__init__(name, log)
        self.other: Life | None = None
        self.begun = asyncio.Event()

    async def start(self) -> None:
        self.begun.set()
        if isinstance(self.other, Waiting):
            await self.other.begun.wait()
        await super().start()


async def test_the_asr_and_the_tts_start_at_the_same_time_and_the_llm_after_them() -> None:
    log: list[str] = []
    ears, voice = Waiting("ears", log), Waiting("voice", log)
    ears.other, voice.other = voice, ears
    engine = ComposedEngine(Life("llm", log), asr=ears, tts=voice)
    await engine.start()
    assert sorted(log[:2]) == ["start ears", "start voice"]
    assert log[2:] == ["start llm"]


class Measuring(Waiting):
    measures_memory = True


async def test_a_part_that_measures_the_free_memory_starts_alone() -> None:
    log: list[str] = []
    ears, voice = Waiting("ears", log), Measuring("voice", log)
    engine = ComposedEngine(Life("llm", log), asr=ears, tts=voice)
    voice.other = ears
    await engine.start()
    assert log == ["start ears", "start voice", "start llm"]


async def test_a_part_that_fails_ends_the_start_of_the_other() -> None:
    log: list[str] = []
    ears, voice = Waiting("ears", log), Life("voice", log, failure=EngineFailed("no voice"))
    ears.other = Waiting("nobody", log)  # for whom it would wait for ever
    engine = ComposedEngine(Life("llm", log), asr=ears, tts=voice)
    with pytest.raises(EngineFailed, match=r"TTS \(voice\): no voice"):
        await engine.start()
    assert log == ["start voice", "stop ears", "stop voice", "stop llm"]
    assert engine.state is EngineState.STARTING


async def test_a_part_that_does_not_start_is_named_and_the_others_are_stopped() -> None:
    log: list[str] = []
    engine = ComposedEngine(Life("llm", log), asr=Life("ears", log, failure=EngineFailed("no model", fatal=True)))
    with pytest.raises(EngineFailed, match=r"ASR \(ears\): no model") as failed:
        await engine.start()
    assert failed.value.param == "asr"
    assert log == ["start ears", "stop ears", "stop llm"]


async def test_only_the_llm_makes_it_unhealthy(
    engine: ComposedEngine, asr: WordEngine, llm: RetortEngine, tts: ToneEngine
) -> None:
    states = []
    for part in (asr, tts, llm):
        part.state = EngineState.UNHEALTHY
        states.append(engine.state)
    assert states == [EngineState.OK, EngineState.OK, EngineState.UNHEALTHY]


# what only some LLMs have


def test_token_sessions_are_those_of_the_llm(asr: WordEngine) -> None:
    llm = TokenEngine()
    engine = ComposedEngine(llm, asr=asr)
    assert engine.capabilities.token_sessions
    assert engine.tokens is llm.tokens


class Traced(RetortEngine):
    can_trace = True

    async def start_trace(self, template: Path) -> None:
        self.template = template

    async def stop_trace(self) -> Sequence[Path]:
        return (self.template,)


async def test_the_parts_that_can_be_traced_are() -> None:
    llm = Traced()
    engine = ComposedEngine(llm, asr=WordEngine())
    assert isinstance(engine, TraceableEngine)
    assert engine.can_trace
    await engine.start_trace(Path("trace"))
    assert await engine.stop_trace() == (Path("trace"),)
    assert not ComposedEngine(RetortEngine()).can_trace
