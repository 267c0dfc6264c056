"""Parts that are slow, wrong, or gone: what the client still gets, and that the next request works."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest
from support.engine_answers import AUDIO, BOTH, Answer, Input, answered, collect, open_input, request_of, written
from support.engine_answers import text as typed
from support.patience import until
from support.scripted_engines import RetortEngine, ToneEngine, WordEngine, speech

from omni_ws.core.chunks import FinishReason, Modality
from omni_ws.engine.base import EngineCapabilities, Finished, GenerationRequest, OutputWriter, TextOutput
from omni_ws.engine.composed.engine import ComposedEngine
from omni_ws.engine.composed.parts import STALLED_SEC
from omni_ws.engine.fake import EchoEngine
from omni_ws.errors import EngineFailed, EngineOverloaded, InvalidValue

pytestmark = pytest.mark.usefixtures("no_task_left")


class SilentEngine(EchoEngine):
    """Takes its input, if it ``reads``, and never makes an output."""

    def __init__(self, like: RetortEngine | WordEngine | ToneEngine, *, reads: bool = True) -> None:
        super().__init__()
        self.name = "silent"
        self._like = like
        self._reads = reads

    @property
    def capabilities(self) -> EngineCapabilities:
        return self._like.capabilities

    async def generate(self, request: GenerationRequest, out: OutputWriter) -> None:
        self.active_requests += 1
        try:
            async for _ in request.input:
                if not self._reads:
                    break
            await asyncio.get_running_loop().create_future()
            out.write(TextOutput("never"))
        finally:
            self.active_requests -= 1


# the ASR


async def test_a_dead_asr_fails_speech_and_not_text() -> None:
    asr, llm = WordEngine(), RetortEngine()
    engine = ComposedEngine(llm, asr=asr)
    asr.failure = EngineFailed("gone", fatal=True)
    with pytest.raises(EngineFailed, match=r"ASR \(words\): gone") as failed:
        await answered(engine, speech("go"))
    assert (failed.value.param, failed.value.fatal) == ("asr", False)
    assert (await answered(engine, typed("hello"))).text == "You said hello"
    asr.failure = None
    assert (await answered(engine, speech("go"))).text == "You said go"


async def test_an_asr_that_dies_is_told_of_while_the_speaker_pauses() -> None:
    asr, llm = WordEngine(), RetortEngine()
    result = Answer()
    source = open_input(speech("go."))
    answering = asyncio.create_task(collect(ComposedEngine(llm, asr=asr), request_of(source), result))
    await llm.took.wait()
    asr.failure = ValueError("secret")
    source.put_nowait(speech("on"))
    with pytest.raises(EngineFailed) as failed:
        await answering
    assert failed.value.param == "asr"
    assert "secret" not in failed.value.message
    assert (result.transcript, result.text) == ("go.", "")


async def test_an_asr_without_room_is_a_refusal() -> None:
    asr = WordEngine()
    asr.failure = EngineOverloaded("no seat", retry_after_ms=10)
    with pytest.raises(EngineOverloaded):
        await answered(ComposedEngine(RetortEngine(), asr=asr), speech("go"))


async def test_an_llm_that_hears_answers_without_the_asr() -> None:
    asr = WordEngine()
    asr.failure = EngineFailed("gone")
    llm = RetortEngine("Yes.", input_modalities=frozenset({Modality.AUDIO, Modality.TEXT}))
    result = await answered(ComposedEngine(llm, asr=asr), speech("go"), speech("on"))
    assert [one.error.param for one in result.failures] == ["asr"]
    assert (result.text, result.finished.reason) == ("Yes.", FinishReason.STOP)


# the TTS


async def test_text_goes_on_without_the_tts() -> None:
    llm, tts = RetortEngine("one two three four five"), ToneEngine(fail_at=2)
    engine = ComposedEngine(llm, tts=tts)
    result = await answered(engine, typed("hello"), modalities=BOTH)
    assert (result.text, result.spoken_words) == ("one two three four five", 2)
    assert result.finished.reason is FinishReason.STOP
    (failure,) = result.failures
    assert isinstance(failure.error, EngineFailed)
    assert (failure.error.param, failure.error.fatal) == ("tts", False)
    assert failure.error.message.startswith("TTS (tone): ")
    assert "secret" not in failure.error.message
    tts.fail_at = None
    assert (await answered(engine, typed("hello"), modalities=BOTH)).spoken_words == 5


async def test_a_long_answer_does_not_wait_for_a_dead_tts() -> None:
    llm = RetortEngine(" ".join(["word"] * 3000))
    result = await answered(ComposedEngine(llm, tts=ToneEngine(fail_at=0)), typed("hello"), modalities=BOTH)
    assert len(result.text) == 14_999


async def test_without_text_nothing_is_left_of_an_answer_without_a_voice() -> None:
    engine = ComposedEngine(RetortEngine(), tts=ToneEngine(fail_at=1))
    with pytest.raises(EngineFailed) as failed:
        await answered(engine, typed("hello"), modalities=AUDIO)
    assert failed.value.param == "tts"


class Choosy(ToneEngine):
    """Refuses the request."""

    def __init__(self, param: str) -> None:
        super().__init__()
        self._param = param

    async def generate(self, request: GenerationRequest, out: OutputWriter) -> None:
        raise InvalidValue("no", param=self._param)


async def test_what_the_client_asked_of_the_tts_is_refused_and_the_text_of_the_llm_is_not() -> None:
    with pytest.raises(InvalidValue) as refused:
        await answered(ComposedEngine(RetortEngine(), tts=Choosy("stage_params.tone.pitch")), "a", modalities=BOTH)
    assert refused.value.param == "stage_params.tone.pitch"
    result = await answered(ComposedEngine(RetortEngine(), tts=Choosy("text")), typed("a"), modalities=BOTH)
    assert [one.error.param for one in result.failures] == ["tts"]
    assert result.text == "You said a"


# the LLM


async def test_an_llm_that_dies_in_its_answer_ends_it() -> None:
    llm, tts = RetortEngine("one two three"), ToneEngine()
    engine = ComposedEngine(llm, tts=tts)
    llm.failure = EngineFailed("gone", fatal=True)
    result = Answer()
    with pytest.raises(EngineFailed, match=r"LLM \(retort\): gone") as failed:
        await collect(engine, request_of(Input(typed("hello")), modalities=BOTH), result)
    assert (failed.value.param, failed.value.fatal) == ("llm", True)
    assert result.text == "one"
    assert tts.active_requests == 0
    llm.failure = None
    assert (await answered(engine, typed("hello"), modalities=BOTH)).spoken_words == 3


class Endless(RetortEngine):
    """Ends without a Finished."""

    async def generate(self, request: GenerationRequest, out: OutputWriter) -> None:
        async for output in written(partial(super().generate, request)):
            if not isinstance(output, Finished):
                out.write(output)


async def test_an_answer_without_an_end_is_a_failure() -> None:
    with pytest.raises(EngineFailed, match="no end") as failed:
        await answered(ComposedEngine(Endless(), asr=WordEngine()), typed("hello"))
    assert failed.value.param == "llm"


# parts that hang


@pytest.mark.virtual_clock
@pytest.mark.parametrize("reads", [True, False], ids=["after its input", "within its input"])
@pytest.mark.parametrize("parts", [{}, {"asr": WordEngine()}, {"tts": ToneEngine()}], ids=["alone", "asr", "tts"])
async def test_an_llm_that_stalls_is_given_up(parts: dict[str, Any], reads: bool) -> None:
    llm = SilentEngine(RetortEngine(), reads=reads)
    engine = ComposedEngine(llm, first_byte_timeout_sec=20, **parts)
    loop = asyncio.get_running_loop()
    source = open_input(typed("hello"), typed("there"))
    answering = asyncio.create_task(collect(engine, request_of(source, modalities=BOTH)))
    if reads:
        await asyncio.sleep(500)  # the speaker takes their time
        assert not answering.done()
    began = loop.time()
    source.close()
    with pytest.raises(EngineFailed, match="within 20 seconds") as failed:
        await answering
    assert failed.value.param == "llm"
    assert 20 <= loop.time() - began < 21
    assert llm.active_requests == 0


@pytest.mark.virtual_clock
@pytest.mark.parametrize("parts", [{}, {"asr": WordEngine()}], ids=["alone", "asr"])
async def test_an_llm_that_has_begun_may_take_its_time(parts: dict[str, Any]) -> None:
    class Slow(RetortEngine):
        async def generate(self, request: GenerationRequest, out: OutputWriter) -> None:
            async for output in written(partial(super().generate, request)):
                if isinstance(output, Finished):
                    await asyncio.sleep(1000)
                out.write(output)

    engine = ComposedEngine(Slow("one two"), first_byte_timeout_sec=20, **parts)
    assert (await answered(engine, typed("hello"))).finished.reason is FinishReason.STOP


@pytest.mark.virtual_clock
async def test_an_asr_that_hangs_is_given_up_and_one_that_listens_is_not() -> None:
    asr = SilentEngine(WordEngine())
    source = open_input(speech("go"))
    answering = asyncio.create_task(collect(ComposedEngine(RetortEngine(), asr=asr), request_of(source)))
    await asyncio.sleep(10 * STALLED_SEC)
    assert not answering.done()
    source.close()
    with pytest.raises(EngineFailed) as failed:
        await answering
    assert failed.value.param == "asr"
    assert asr.active_requests == 0


@pytest.mark.virtual_clock
async def test_an_asr_that_has_shown_something_may_listen_on() -> None:
    asr = WordEngine()
    source = open_input(speech("go"))
    answering = asyncio.create_task(collect(ComposedEngine(RetortEngine(), asr=asr), request_of(source)))
    await asyncio.sleep(10 * STALLED_SEC)
    source.close()
    assert (await answering).text == "You said go"


@pytest.mark.virtual_clock
async def test_a_tts_that_hangs_is_given_up() -> None:
    tts = SilentEngine(ToneEngine())
    result = await answered(ComposedEngine(RetortEngine(), tts=tts), typed("hello"), modalities=BOTH)
    assert [one.error.param for one in result.failures] == ["tts"]
    assert result.text == "You said hello"
    assert tts.active_requests == 0


@pytest.mark.virtual_clock
async def test_a_tts_waits_for_an_llm_that_writes_slowly() -> None:
    gate = asyncio.Event()
    llm = RetortEngine("one two")
    llm.pause = gate
    engine = ComposedEngine(llm, tts=ToneEngine())
    result = Answer()
    request = request_of(Input(typed("hello")), modalities=BOTH)
    answering = asyncio.create_task(collect(engine, request, result))
    await until(lambda: result.text == "one")
    await asyncio.sleep(10 * STALLED_SEC)
    gate.set()
    await answering
    assert (result.spoken_words, result.failures) == (2, [])
