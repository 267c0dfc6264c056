"""ComposedEngine: an engine made of an ASR, an LLM and a TTS. FirstToStart: the first of several engines that starts.

AheadStage begins the answer while the user pauses, and holds it back until the turn has ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

from omni_ws.core.chunks import FinishReason, InputChunk, Modality, OutputModality, Task, Usage
from omni_ws.engine.answer_limit import go_on
from omni_ws.engine.base import (
    Engine,
    EngineCapabilities,
    EngineOutput,
    EngineState,
    Finished,
    GenerationRequest,
    HasTokens,
    HeardLanguage,
    OutputWriter,
    TokenEngine,
    TraceableEngine,
    TurnTimes,
    UsageMeter,
)
from omni_ws.engine.channel import OUTPUT_BYTES, Channel, ChannelClosed, Outputs, output_cost, pipeline
from omni_ws.engine.clauses import (
    ContinuedInput,
    told_language,
)
from omni_ws.engine.composed.parts import (
    AheadLoad,
    AnswerUnderWay,
    FirstOutput,
    GrowingLlm,
    HasParts,
    PartDescription,
    Role,
    SpeculationOutcome,
    StallTimer,
    composed_capabilities,
    description_of,
    failures_of,
    hears,
    parts_of,
    speaks,
)
from omni_ws.engine.composed.stages import INPUT_LINK, AnswerStages, AsrStage, Guess
from omni_ws.engine.decoding import Chunks
from omni_ws.engine.threads import end_tasks
from omni_ws.errors import EngineFailed, UnsupportedParameter

logger = logging.getLogger(__name__)

#: How many answers are begun ahead for one request at most, since a user may pause often.
MOST_TRIES: Final = 8
#: The limit, in bytes, on input that is kept for a second LLM request. With more input no answer is begun ahead: it
#: would be sent, and images decoded, twice.
MAX_KEPT_BYTES: Final = 64 * 1024


class AheadStage:
    """A Stage of one request that may begin the answer at a pause: chunks and Guesses in, outputs for the client out.

    Two answers may be in progress. The *open* answer reads the input as it arrives, as it would without this stage. The
    answer *ahead* was begun at a pause, with the input so far and a guess of the rest; its outputs are held back. If
    the complete input equals the guess, the answer ahead is released, and the open one cancelled; otherwise the answer
    ahead is discarded. So neither the answer that the user gets nor the history depends on a guess.
    """

    name = "answer"

    def __init__(
        self,
        answered: Callable[[GenerationRequest], AnswerStages],
        request: GenerationRequest,
        load: AheadLoad,
        *,
        report: Callable[[SpeculationOutcome], None],
    ) -> None:
        #: How the answer ended; None until then.
        self.finished: Finished | None = None
        self._answered = answered
        self._request = request
        self._load = load
        self._report = report
        self._ahead: _Attempt | None = None
        #: The input so far.
        self._given: list[InputChunk] = []
        self._kept_bytes = 0
        self._tries = 0
        #: A timeout that is used to stop reading the input; None while the input is not read.
        self._reading: asyncio.Timeout | None = None

    async def run(self, source: AsyncIterator[InputChunk | Guess], sink: Channel[Any] | None, outputs: Outputs) -> None:
        """Answer the input that ``source`` yields, and write the answer to ``outputs``."""
        prompt: Channel[InputChunk] = Channel(INPUT_LINK.capacity, cost=INPUT_LINK.cost)
        opened = _Attempt(self._answered, replace(self._request, input=prompt), prompt, outputs)
        passing = asyncio.create_task(self._pass_on(opened, outputs), name="open answer")
        try:
            await self._read(source, prompt, outputs)
            if (ahead := self._ahead_of(opened)) is not None:
                passing.cancel()
                opened.cancel()
                await self._use(ahead)
            else:
                await self._drop(SpeculationOutcome.DIFFERED)
                opened.count(self._load.begin(ahead=False))
                prompt.close()
                await passing
                if outputs.closed:
                    raise ChannelClosed
                self.finished = opened.finished
        finally:
            # All are cancelled before the first await: this task may be cancelled again while it waits.
            passing.cancel()
            opened.cancel()
            if self._ahead is not None:
                self._ahead.cancel()
            await self._drop(SpeculationOutcome.FAILED)
            await asyncio.gather(passing, return_exceptions=True)
            await opened.aclose()

    async def _read(
        self, source: AsyncIterator[InputChunk | Guess], prompt: Channel[InputChunk], outputs: Outputs
    ) -> None:
        """Copy the input to ``prompt``; at each Guess, begin or drop an answer. Ends with the input or the answer."""
        with suppress(TimeoutError):
            async with asyncio.timeout(None) as self._reading:
                async for item in source:
                    if isinstance(item, Guess):
                        await self._take_guess(item, outputs)
                    else:
                        await self._take(item)
                        await prompt.put(item)
        self._reading = None

    def _ahead_of(self, opened: _Attempt) -> _Attempt | None:
        """Return the answer ahead if its guess proved right, and the open answer has no output yet."""
        ahead = self._ahead
        if ahead is None or ahead.failed or opened.began or ahead.input != tuple(self._given):
            return None
        return ahead if ahead.language == self._request.heard_language.code else None

    async def _pass_on(self, opened: _Attempt, outputs: Outputs) -> None:
        try:
            await opened.release()
            if self._reading is not None:
                self._reading.reschedule(asyncio.get_running_loop().time())
        except Exception as error:
            outputs.fail(error)  # at once: the speaker may say nothing more for a while

    async def _take(self, chunk: InputChunk) -> None:
        self._kept_bytes += len(chunk.payload)
        if self._kept_bytes > MAX_KEPT_BYTES:
            self._given.clear()
            await self._drop(SpeculationOutcome.WENT_ON)
            return
        self._given.append(chunk)
        ahead = self._ahead
        if ahead is not None and ahead.input[: len(self._given)] != tuple(self._given):
            guessed = len(self._given) == len(ahead.input)
            await self._drop(SpeculationOutcome.DIFFERED if guessed else SpeculationOutcome.WENT_ON)

    async def _take_guess(self, guess: Guess, outputs: Outputs) -> None:
        await self._drop(SpeculationOutcome.WENT_ON)
        chunk = guess.chunk
        if chunk is None or self._tries >= MOST_TRIES or self._kept_bytes > MAX_KEPT_BYTES:
            return
        self._tries += 1
        if not self._load.has_room:
            self._report(SpeculationOutcome.SKIPPED)
            return
        given = (*self._given, chunk)
        request_id = f"{self._request.request_id}-ahead{self._tries}"
        heard = self._request.heard_language
        guessed = HeardLanguage(heard.before, code=guess.language or self._request.language or heard.code)
        request = replace(
            self._request,
            request_id=request_id,
            input=Chunks(given),
            meter=UsageMeter(),
            heard_language=guessed,
            times=TurnTimes(),
        )
        self._ahead = _Attempt(self._answered, request, Chunks(given), outputs, given=given)
        self._ahead.count(self._load.begin(ahead=True))

    async def _use(self, ahead: _Attempt) -> None:
        self._report(SpeculationOutcome.USED)
        self._ahead = None
        self._request.meter.read = ahead.read_meter
        self._request.times.take_over(ahead.times)
        try:
            await ahead.release()
            self.finished = ahead.finished
        finally:
            await ahead.aclose()

    async def _drop(self, outcome: SpeculationOutcome) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            self._report(SpeculationOutcome.FAILED if ahead.failed else outcome)
            seconds, usage = ahead.spent()
            self._request.times.discard(seconds, 0 if usage is None else usage.output_tokens)
            await ahead.aclose()


class _Attempt:
    """An answer in progress, and its OutputWriter, which holds the outputs back until ``release``.

    The work pauses while OUTPUT_BYTES of outputs are held back.
    """

    def __init__(
        self,
        answered: Callable[[GenerationRequest], AnswerStages],
        request: GenerationRequest,
        source: Any,
        outputs: Outputs,
        *,
        given: tuple[InputChunk, ...] = (),
    ) -> None:
        #: For an answer ahead, the input so far and the guess; otherwise empty.
        self.input = given
        #: The code of the user's language with which the answer was begun; None if it was not known.
        self.language = request.heard_language.code
        #: Whether the answer has any output.
        self.began = False
        self.failed = False
        #: The moments of this answer; for the open answer, those of the request.
        self.times = request.times
        self._answer = answered(request)
        self._meter = request.meter
        self._loop = asyncio.get_running_loop()
        self._begun_at = self._loop.time()
        self._ended_at: float | None = None
        self._outputs = outputs
        self._held: list[EngineOutput] = []
        self._held_bytes = 0.0
        self._released = asyncio.Event()
        self._error: Exception | None = None
        self._under_way: AnswerUnderWay | None = None
        self._making = asyncio.create_task(self._make(source), name=f"answer {request.request_id}")

    @property
    def finished(self) -> Finished:
        """The Finished of the answer."""
        return self._answer.finished

    def read_meter(self) -> Any:
        """Return the usage so far, or None; see UsageMeter."""
        return self._meter.read()

    def spent(self) -> tuple[float, Usage | None]:
        """Return the duration of the work on the answer so far, in seconds, and its usage, or None if not known."""
        ended = self._loop.time() if self._ended_at is None else self._ended_at
        return ended - self._begun_at, self._meter.read()

    def count(self, under_way: AnswerUnderWay) -> None:
        """Note that the input is complete; from now on ``under_way`` measures the answer."""
        self._under_way = under_way

    @property
    def full(self) -> bool:
        return self._outputs.full if self._released.is_set() else self._held_bytes >= OUTPUT_BYTES

    def write(self, output: EngineOutput) -> None:
        """See OutputWriter."""
        self.began = True
        if self._under_way is not None:
            self._under_way.note_output()
        if self._released.is_set():
            self._outputs.write(output)
        else:
            self._held.append(output)
            self._held_bytes += output_cost(output)

    async def drain(self) -> None:
        """See OutputWriter."""
        if self._held_bytes >= OUTPUT_BYTES:
            await self._released.wait()
        if self._released.is_set():
            await self._outputs.drain()

    async def release(self) -> None:
        """Pass on the outputs held back and all later ones, until the answer ends. Raises the error of the answer."""
        self._released.set()
        if self._under_way is not None:
            self._under_way.used()
        for output in self._held:
            self._outputs.write(output)
        self._held.clear()
        await asyncio.wait([self._making])
        if self._error is not None:
            raise self._error

    async def _make(self, source: Any) -> None:
        try:
            await pipeline(aiter(source), self._answer.stages, self._answer.links, self)
        except Exception as error:
            self.failed = True
            self._error = error
        finally:
            self._ended_at = self._loop.time()
            if self._under_way is not None:
                self._under_way.end()

    def cancel(self) -> None:
        """Cancel the answer, without waiting for its end. Idempotent."""
        self._held.clear()
        if not self._making.done() and not self._making.cancelling():
            self._making.cancel()

    async def aclose(self) -> None:
        """Cancel the answer, and wait for its end. Idempotent."""
        self.cancel()
        await asyncio.gather(self._making, return_exceptions=True)
        if self._under_way is not None:
            self._under_way.end()  # a task that is cancelled before its first step has not done so


#: Long, because a model that is busy, or is loaded at the first request, may need a minute.
FIRST_BYTE_TIMEOUT_SEC: Final = 120.0


class ComposedEngine:
    """An engine of up to three engines, its parts, which work concurrently: ASR, LLM and TTS.

    The ASR does the task ``transcribe``, the LLM the task ``chat``, the TTS the task ``speech``. Parts may be the same
    engine. An LLM that takes audio gets it directly, and an ASR then only makes the transcript. An LLM that speaks
    needs no TTS; if there is a TTS, the TTS speaks instead.

    The state of the engine is that of the LLM. If the ASR or the TTS fails, a request that needs this part fails with
    an EngineFailed, whose ``param`` is the part's role; any other request gets a PartFailed, and goes on.

    ``name`` and ``model`` are the LLM's unless given. With ``where_missing``, the ASR is not used if the LLM takes
    audio, nor the TTS if the LLM speaks; this is known after the start. With ``asr_optional``, an ASR that fails to
    start is not used, and ``shortcomings`` has the reason. ``first_byte_timeout_sec`` is how long the LLM may take from
    the end of its input to its first output; None if the LLM has its own timeout. ``max_spoken_tokens`` limits spoken
    answers if the client set no limit; None for no limit. With ``think_ahead``, an answer may be begun while the user
    pauses, and is held back until the turn has ended (AheadStage).
    """

    def __init__(
        self,
        llm: Engine,
        *,
        asr: Engine | None = None,
        tts: Engine | None = None,
        name: str | None = None,
        model: str | None = None,
        where_missing: bool = False,
        asr_optional: bool = False,
        first_byte_timeout_sec: float | None = FIRST_BYTE_TIMEOUT_SEC,
        max_spoken_tokens: int | None = None,
        think_ahead: bool = False,
    ) -> None:
        self.name = name or llm.name
        self.model = model or llm.model
        self.active_requests = 0
        self._llm = llm
        self._asr = asr
        self._tts = tts
        self._given_model = model
        self._first_byte_timeout_sec = first_byte_timeout_sec
        self._max_spoken_tokens = max_spoken_tokens
        self._ahead_load = AheadLoad() if think_ahead else None
        #: Called with the outcome of each answer that was, or could have been, begun ahead.
        self.on_speculation: Callable[[SpeculationOutcome], None] = lambda outcome: None
        #: Called when the LLM has become another one, see AutoLlm.
        self.on_change: Callable[[], None] = lambda: None
        if hasattr(llm, "on_change"):
            llm.on_change = self._llm_changed
        self._started = False
        self._where_missing = where_missing
        self._asr_optional = asr_optional
        #: Why the ASR is not used; None if it is.
        self._without_asr: str | None = None
        others = ((Role.ASR, asr), (Role.TTS, tts))
        roles = ((Role.LLM, llm), *others) if where_missing else (*others, (Role.LLM, llm))
        #: Each engine once, with the first of its roles, in the order of starting.
        self._engines: Final[dict[Engine, Role]] = {}
        for role, part in roles:
            if part is not None:
                self._engines.setdefault(part, role)
        self._capabilities: EngineCapabilities | None = None

    @property
    def llm_part(self) -> Engine:
        """The part that answers."""
        return self._llm

    @property
    def parts(self) -> dict[str, PartDescription | None]:
        """The parts by role, including the parts of an LLM that is itself composed; None for a role without a part."""
        found = {
            Role.ASR: self._asr if hears(self._asr) else None,
            Role.TTS: self._tts if speaks(self._tts) else None,
        }
        own = {role.value: description_of(part) for role, part in found.items() if part is not None}
        return parts_of(self._llm) | own

    @property
    def shortcomings(self) -> tuple[str, ...]:
        """For each part that is missing or not the best of its kind, a line with the reason; known after the start."""
        stand_ins = (part.why for part in self._engines if isinstance(part, FirstToStart))
        return tuple(why for why in (self._without_asr, *stand_ins) if why is not None)

    @property
    def part_states(self) -> dict[str, EngineState]:
        """The states of the parts, by role. An optional ASR that did not start is UNHEALTHY."""
        llm = self._llm
        answers = llm.engine if isinstance(llm, GrowingLlm) else llm
        states = llm.part_states if isinstance(llm, HasParts) else {Role.LLM.value: answers.state}
        found = {Role.ASR: self._asr, Role.TTS: self._tts}
        missing = {} if self._without_asr is None else {Role.ASR.value: EngineState.UNHEALTHY}
        return states | missing | {role.value: part.state for role, part in found.items() if part is not None}

    @property
    def capabilities(self) -> EngineCapabilities:
        return self._capabilities or composed_capabilities(self._llm, asr=self._asr, tts=self._tts)

    @property
    def state(self) -> EngineState:
        """The state of the LLM: without it there are no answers, without the other parts there are answers in text."""
        return self._llm.state if self._started else EngineState.STARTING

    def describe(self) -> tuple[str, ...]:
        lacking = () if self._without_asr is None else (self._without_asr,)
        return (*lacking, *(line for part in self._engines for line in part.describe()))

    # life

    async def start(self) -> None:
        """Start the ASR and the TTS concurrently, and then the LLM; with ``where_missing``, the LLM before the others.

        Idempotent. Raises the first failure, after all parts were stopped.
        """
        if self._started:
            return
        try:
            if self._where_missing:
                await self._start_part(self._llm)
                self._leave_out()
            await self._start_others([part for part in self._engines if part is not self._llm])
            if not self._where_missing:
                await self._start_part(self._llm)
        except BaseException:
            await self.stop()
            raise
        self.model = self._given_model or self._llm.model
        self._capabilities = composed_capabilities(self._llm, asr=self._asr, tts=self._tts)
        self._started = True

    async def _start_others(self, parts: Sequence[Engine]) -> None:
        # An engine that measures the free memory when it starts, such as vLLM, starts alone.
        if any(getattr(part, "measures_memory", False) for part in parts):
            for part in parts:
                await self._start_part(part)
            return
        starting = [asyncio.create_task(self._start_part(part), name=f"start of {part.name}") for part in parts]
        try:
            await asyncio.gather(*starting)
        finally:
            await end_tasks(*starting)

    async def _start_part(self, part: Engine) -> None:
        try:
            with failures_of(self._engines[part], part):
                await part.start()
        except EngineFailed as error:
            if part is not self._asr or not self._asr_optional:
                raise
            await part.stop()
            self._without_asr = f"No audio input: {error.message}"
            self._asr = None
            del self._engines[part]

    def _leave_out(self) -> None:
        """Drop the ASR if the LLM takes audio, and the TTS if the LLM speaks."""
        able = self._llm.capabilities
        if Modality.AUDIO in able.input_modalities:
            self._asr = None
        if OutputModality.AUDIO in able.output_modalities:
            self._tts = None
        kept = {self._asr, self._llm, self._tts}
        for part in [part for part in self._engines if part not in kept]:
            del self._engines[part]

    def _llm_changed(self) -> None:
        if self._started:
            self._capabilities = composed_capabilities(self._llm, asr=self._asr, tts=self._tts)
            self.on_change()

    async def stop(self) -> None:
        self._started = False
        self._capabilities = None
        for part in self._engines:
            await part.stop()

    # requests

    async def generate(self, request: GenerationRequest, out: OutputWriter) -> None:
        if request.task is Task.TRANSCRIBE and self._asr is not None and hears(self._asr):
            await self._alone(Role.ASR, self._asr, request, out)
        elif request.task is Task.SPEECH and self._tts is not None and speaks(self._tts):
            await self._alone(Role.TTS, self._tts, request, out)
        elif request.task is not Task.CHAT:
            await self._alone(Role.LLM, self._llm, request, out)  # which refuses a task that it cannot do
        else:
            await self._chat(request, out)

    async def _chat(self, request: GenerationRequest, out: OutputWriter) -> None:
        asr = self._asr if hears(self._asr) and not request.without_audio else None
        spoken = OutputModality.AUDIO in request.modalities and speaks(self._tts)
        if not spoken:
            request = self._within_speech(request)
        if asr is None and not spoken:
            await self._plain_chat(request, out)
        else:
            await self._staged_chat(request, out, asr=asr, tts=self._tts if spoken else None)

    @contextmanager
    def _counted(self, request: GenerationRequest) -> Iterator[None]:
        """Count a chat as an active request during the block, and in the AheadLoad, too, if it is without audio.

        A chat with audio is counted in the AheadLoad by its AheadStage, from the end of its input on.
        """
        load = self._ahead_load if request.without_audio else None
        under_way = None if load is None else load.begin(ahead=False)
        self.active_requests += 1
        try:
            yield
        finally:
            self.active_requests -= 1
            if under_way is not None:
                under_way.end()

    def _within_speech(self, request: GenerationRequest) -> GenerationRequest:
        """Return ``request`` for an LLM that speaks, with ``max_spoken_tokens`` as ``max_tokens`` if none is set."""
        limit, able = self._max_spoken_tokens, self._llm.capabilities
        if limit is None or OutputModality.AUDIO not in request.modalities or "max_tokens" not in able.sampling:
            return request
        if able.max_tokens is not None and able.max_tokens <= limit:
            return request
        return replace(request, sampling={"max_tokens": limit, **request.sampling})

    async def _alone(self, role: Role, part: Engine, request: GenerationRequest, out: OutputWriter) -> None:
        """Have one part handle the whole request; an EngineFailed gets the ``role`` as its ``param``."""
        self.active_requests += 1
        try:
            with failures_of(role, part, request_id=request.request_id):
                await go_on(part, request, out)
        finally:
            self.active_requests -= 1

    async def _plain_chat(self, request: GenerationRequest, out: OutputWriter) -> None:
        """Have the LLM handle the whole request, under a StallTimer, and measure it for AheadLoad."""
        times = request.times
        asked = told_language(request, self._llm)
        stall_timer = StallTimer(
            self._first_byte_timeout_sec, asked.input, ended=lambda: times.mark("llm_asked", Role.LLM.value)
        )
        asked = replace(asked, input=stall_timer)
        with self._counted(request):
            async with stall_timer.limiting(Role.LLM, self._llm, request_id=request.request_id):
                await go_on(self._llm, asked, FirstOutput(out, stall_timer))

    async def _staged_chat(
        self, request: GenerationRequest, out: OutputWriter, *, asr: Engine | None, tts: Engine | None
    ) -> None:
        """Handle a request in concurrent stages: those of ASR, LLM and TTS that the request needs."""
        if tts is not None and request.options.choices > 1:
            raise UnsupportedParameter("only one answer can be spoken", param="n")
        llm_hears = Modality.AUDIO in self._llm.capabilities.input_modalities
        answered = partial(
            AnswerStages,
            llm=self._llm,
            tts=tts,
            words_only=asr is not None and not llm_hears,
            transcribed=asr is not None,
            first_byte_timeout_sec=self._first_byte_timeout_sec,
            max_spoken_tokens=self._max_spoken_tokens,
        )
        load = self._ahead_load if asr is not None and not llm_hears and not request.begun else None
        answer: AnswerStages | AheadStage
        if load is None:
            answer = answered(request)
            stages, links = answer.stages, answer.links
        else:
            answer = AheadStage(answered, request, load, report=self.on_speculation)
            stages, links = [answer], []
        hearing, source, cut = None, request.input, None
        if asr is not None:
            earlier, cut = None, request.cut
            if isinstance(source, ContinuedInput):
                earlier, source = source.earlier, source.own
            hearing = AsrStage(asr, request, beside=llm_hears, guesses=load is not None, earlier=earlier)
            stages, links = [hearing, *stages], [INPUT_LINK, *links]
        with self._counted(request):
            await pipeline(aiter(source), stages, links, out, cut=cut)
            if hearing is not None and request.cut.made:
                out.write(Finished(FinishReason.STOP, Usage(input_audio_ms=hearing.audio_ms)))
                return
            finished = answer.finished
            assert finished is not None
            out.write(_with_input(finished, hearing))

    # what only some LLMs have

    @property
    def tokens(self) -> TokenEngine:
        """The LLM's interface for token sessions; see ``EngineCapabilities.token_sessions``."""
        return cast("HasTokens", self._llm).tokens

    @property
    def can_trace(self) -> bool:
        return bool(self._traceable)

    @property
    def _traceable(self) -> list[TraceableEngine]:
        return [part for part in self._engines if isinstance(part, TraceableEngine) and part.can_trace]

    async def start_trace(self, template: Path) -> None:
        for part in self._traceable:
            await part.start_trace(template)

    async def stop_trace(self) -> tuple[Path, ...]:
        return tuple([file for part in self._traceable for file in await part.stop_trace()])


def _with_input(finished: Finished, hearing: AsrStage | None) -> Finished:
    """Return ``finished`` with the input audio of the ASR in its usage. Audio that the LLM got, too, counts once."""
    if hearing is None:
        return finished
    usage = replace(finished.usage, input_audio_ms=max(finished.usage.input_audio_ms, hearing.audio_ms))
    return replace(finished, usage=usage)


# A part that is the first of several that starts.


class FirstToStart:
    """An engine that delegates to the first of several ``engines`` that can be started on this machine.

    The keys of ``engines`` are names for the operator; the best engine comes first. After the start, ``why`` is the
    reason why the best engine is not used; None if it is used.
    """

    def __init__(self, engines: Mapping[str, Engine]) -> None:
        self._engines = dict(engines)
        self.engine = next(iter(self._engines.values()))
        self.name = self.engine.name
        self.model = self.engine.model
        self.why: str | None = None

    @property
    def capabilities(self) -> EngineCapabilities:
        return self.engine.capabilities

    @property
    def state(self) -> EngineState:
        return self.engine.state

    @property
    def active_requests(self) -> int:
        return self.engine.active_requests

    def describe(self) -> tuple[str, ...]:
        return (*self.engine.describe(), *filter(None, [self.why]))

    async def start(self) -> None:
        """Start the engines in order until one succeeds. Idempotent. Raises the error of the last one if all fail."""
        if self.state is not EngineState.STARTING:
            return
        best, last = next(iter(self._engines)), next(reversed(self._engines))
        reasons = []
        for name, engine in self._engines.items():
            self.engine = engine
            try:
                await engine.start()
                break
            except Exception as error:
                await engine.stop()
                if name == last:
                    raise
                if not isinstance(error, EngineFailed):
                    logger.warning("%s does not start", name, exc_info=error)
                reasons.append(error.message if isinstance(error, EngineFailed) else f"{type(error).__name__}: {error}")
        self.name, self.model = self.engine.name, self.engine.model
        self.why = f"{name} instead of {best}: {'; '.join(reasons)}" if reasons else None

    async def stop(self) -> None:
        await self.engine.stop()

    async def generate(self, request: GenerationRequest, out: OutputWriter) -> None:
        await self.engine.generate(request, out)
