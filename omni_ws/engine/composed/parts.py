"""The parts of a composed engine: their roles and their common capabilities.

StallTimer cancels a part that makes no progress; AheadLoad decides whether the LLM may begin an answer before the
turn has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final, Protocol, runtime_checkable

from msgspec import Struct

from omni_ws.config.values import ConfigurationError
from omni_ws.core.chunks import InputChunk, InputMode, Modality, OutputModality, Task
from omni_ws.engine.base import (
    AnswerOptions,
    Cut,
    Engine,
    EngineCapabilities,
    EngineOutput,
    EngineState,
    GenerationRequest,
    InputSource,
    OutputFilter,
    OutputWriter,
    PartFailed,
    UsageMeter,
    incident,
)
from omni_ws.errors import EngineFailed, OmniError, SessionConflict


class Role(StrEnum):
    """The role of a part: speech recognition, answering, or speech synthesis."""

    ASR = "asr"
    LLM = "llm"
    TTS = "tts"


@dataclass(frozen=True, slots=True)
class PartDescription:
    """A part as clients and operators see it: the name of its engine, and of its model."""

    name: str
    model: str
    #: The names of the other machines to which it sends its input.
    hosts: tuple[str, ...] = ()


@runtime_checkable
class HasParts(Protocol):
    """An engine that is made of other engines."""

    @property
    def parts(self) -> dict[str, PartDescription | None]:
        """The parts by role; None for a role without a part."""
        ...

    @property
    def part_states(self) -> dict[str, EngineState]:
        """The states of the parts by role. Before the start, this includes parts that may turn out not to be used."""
        ...


def parts_of(engine: Engine) -> dict[str, PartDescription | None]:
    """Return the parts of any engine by role. An engine that is not made of others counts as its own LLM."""
    if isinstance(engine, HasParts):
        return engine.parts
    return {role.value: description_of(engine) if role is Role.LLM else None for role in Role}


def shown_parts(engine: Engine) -> dict[str, Any]:
    """Return the parts of any engine by role, as JSON objects without hosts; None for a role without a part."""
    return {
        role: None if part is None else {"name": part.name, "model": part.model}
        for role, part in parts_of(engine).items()
    }


def description_of(part: Engine) -> PartDescription:
    """Return the description of ``part``, an engine, for clients and operators."""
    return PartDescription(part.name, getattr(part, "credited", part.model), getattr(part, "hosts", ()))


@contextmanager
def failures_of(role: Role, engine: Engine, *, request_id: str | None = None) -> Iterator[None]:
    """Add ``role`` to an EngineFailed that the block raises, and convert unexpected exceptions to an EngineFailed.

    Other OmniErrors, and a ConfigurationError, pass unchanged. A failure of the ASR or the TTS is not fatal to the
    session, which can go on with text.
    """
    try:
        yield
    except EngineFailed as error:
        error.set_part(role.value, engine.name, fatal=role is Role.LLM)
        raise
    except (OmniError, ConfigurationError):
        raise
    except Exception as error:
        failure = incident(f"{role.upper()} ({engine.name}): the engine failed", error, request_id=request_id)
        raise failure.about(param=role.value) from error


def part_failed(role: Role, error: OmniError) -> PartFailed:
    """Return a PartFailed that reports ``error`` of the part with ``role``, for a request that goes on without it."""
    return PartFailed(error.about(param=role.value))


def asked_of(
    part: Engine,
    request: GenerationRequest,
    source: InputSource,
    *,
    role: Role,
    task: Task,
    output: OutputModality,
    guesses: bool = False,
) -> GenerationRequest:
    """Return the request to an ASR or TTS: ``request`` with the input ``source``, without the LLM's own fields.

    These are the history, the instructions, the tools and the sampling parameters. The lexicon is left out, too: the
    text that a TTS gets is already in its spoken form. With ``guesses``, an ASR writes TranscriptGuesses.
    """
    return replace(
        request,
        request_id=f"{request.request_id}-{role}",
        task=task,
        input=source,
        input_mode=mode_of(part),
        modalities=frozenset({output}),
        remembered=False,
        instructions="",
        history=(),
        sampling={},
        lexicon={},
        tools=(),
        tool_choice=None,
        options=AnswerOptions(
            priority=request.options.priority, skip_unreadable=True, spoken_form=True, transcript_guesses=guesses
        ),
        begun="",
        begun_end=None,
        voice_from=0,
        voice_from_ms=0,
        meter=UsageMeter(),
        cut=request.cut if role is Role.ASR else Cut(),
    )


def mode_of(part: Engine) -> InputMode:
    """Return the input mode for requests to ``part``: EXTEND if the part supports it, since input arrives gradually."""
    return InputMode.EXTEND if part.capabilities.extend else InputMode.SNAPSHOT


# What the parts can do together.


def hears(engine: Engine | None) -> bool:
    """Whether ``engine`` can be the ASR. Certain only after the engine has started."""
    return engine is not None and Task.TRANSCRIBE in engine.capabilities.tasks


def speaks(engine: Engine | None) -> bool:
    """Whether ``engine`` can be the TTS. Certain only after the start: there may be no voice on this machine."""
    return engine is not None and Task.SPEECH in engine.capabilities.tasks


def composed_capabilities(llm: Engine, *, asr: Engine | None, tts: Engine | None) -> EngineCapabilities:
    """Return the capabilities of a composed engine: those of its LLM, extended by those of the other parts."""
    able = replace(llm.capabilities, continues=frozenset({OutputModality.TEXT}))  # by go_on, whatever the LLM can
    if asr is not None and hears(asr):
        ears = asr.capabilities
        able = replace(
            able,
            input_modalities=able.input_modalities | {Modality.AUDIO},
            output_modalities=able.output_modalities | {OutputModality.TRANSCRIPT},
            tasks=able.tasks | {Task.TRANSCRIBE},
            languages=ears.languages,
            word_times=ears.word_times,
            keywords=ears.keywords,
            translates=ears.translates,
            stage_params=able.stage_params | ears.stage_params,
            stage_sampling=able.stage_sampling | ears.stage_sampling,
            # The LLM need not support late input, because its request can wait for the whole input.
            extend=able.extend or ears.extend,
            # An LLM that takes audio does not wait for transcripts.
            transcribes_first=Modality.AUDIO not in able.input_modalities,
            hears_on=True,
            transcript_guesses=ears.transcript_guesses,
        )
    if tts is not None and speaks(tts):
        voice = tts.capabilities
        able = replace(
            able,
            output_modalities=able.output_modalities | {OutputModality.AUDIO},
            tasks=able.tasks | {Task.SPEECH},
            continues=able.continues | {OutputModality.AUDIO},
            voices=voice.voices,
            voice_aliases=voice.voice_aliases,
            voice_languages=voice.voice_languages,
            speech_languages=voice.speech_languages,
            speed=voice.speed,
            lexicon=voice.lexicon,
            stage_params=able.stage_params | voice.stage_params,
            stage_sampling=able.stage_sampling | voice.stage_sampling,
        )
    return replace(able, stages=_stages(llm, asr=asr, tts=tts))


def _stages(llm: Engine, *, asr: Engine | None, tts: Engine | None) -> tuple[str, ...]:
    stages: list[str] = []
    able = ((Role.ASR, asr if hears(asr) else None), (Role.LLM, llm), (Role.TTS, tts if speaks(tts) else None))
    for role, engine in able:
        if engine is not None:
            stages += engine.capabilities.stages or (role.value,)
    return tuple(dict.fromkeys(stages))


# How long a part may make no progress.

#: How long an ASR or a TTS may make no progress, in seconds. Long, because an ASR may process a whole recording before
#: its first output.
STALLED_SEC: Final = 300.0


class StallTimer(AsyncIterator[InputChunk]):
    """A timer that cancels a part if it neither takes input nor makes output for ``seconds``; None for no limit.

    It is the input of the part, which reads ``source`` through it. The clock stops while the part waits for input, and
    between ``rest`` and ``wait``. Outputs are reported by ``wait``. A single timer callback reads the clock, so
    watching a part costs only two assignments for each item. ``ended`` is called at the end of the input.
    """

    def __init__(self, seconds: float | None, source: InputSource, *, ended: Callable[[], None] = lambda: None) -> None:
        self._seconds = seconds
        self._source = aiter(source)
        self._input_over = ended
        self._loop = asyncio.get_running_loop()
        #: Whether the part waits for input.
        self._reading = False
        #: Since when the part has had something to do; None while it has nothing.
        self._since: float | None = None
        self._timeout: asyncio.Timeout | None = None
        self._timer: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def limiting(self, role: Role, engine: Engine, *, request_id: str) -> AsyncIterator[None]:
        """Cancel the block and raise EngineFailed if the part stalls. Other errors are treated by ``failures_of``."""
        try:
            async with asyncio.timeout(None) as self._timeout:
                self._look()
                with failures_of(role, engine, request_id=request_id):
                    yield
        except TimeoutError:
            failure = f"{role.upper()} ({engine.name}): nothing came within {self._seconds:g} seconds"
            raise EngineFailed(failure, param=role.value) from None
        finally:
            self.stop()

    def wait(self) -> None:
        """Restart the clock, because the part has something to do."""
        self._since = self._loop.time()

    def rest(self) -> None:
        """Stop the clock, because the part has nothing to do."""
        self._since = None

    def stop(self) -> None:
        """Remove the time-out of the part. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._timeout = None

    def _look(self) -> None:
        """Cancel the part if it has stalled; otherwise schedule the next check."""
        if self._seconds is None or self._timeout is None:
            return
        now = self._loop.time()
        since = now if self._reading or self._since is None else self._since
        left = since + self._seconds - now
        if left <= 0:
            self._timeout.reschedule(now)
        else:
            self._timer = self._loop.call_later(left, self._look)

    async def __anext__(self) -> InputChunk:
        self._reading = True
        try:
            return await anext(self._source)
        except StopAsyncIteration:
            self._input_over()
            raise
        finally:
            self._reading = False
            self.wait()


async def run_part(role: Role, part: Engine, request: GenerationRequest, out: OutputWriter) -> None:
    """Run a request on an ASR or TTS, with a StallTimer; its outputs go to ``out``."""
    stall_timer = StallTimer(STALLED_SEC, request.input)
    async with stall_timer.limiting(role, part, request_id=request.request_id):
        await part.generate(replace(request, input=stall_timer), _WatchedOutputs(out, stall_timer))


class _WatchedOutputs(OutputFilter):
    """An OutputWriter that reports the outputs of a part to ``stall_timer`` as progress."""

    def __init__(self, out: OutputWriter, stall_timer: StallTimer) -> None:
        super().__init__(out)
        self._stall_timer = stall_timer

    def write(self, output: EngineOutput) -> None:
        self._stall_timer.wait()
        self._out.write(output)

    async def drain(self) -> None:
        self._stall_timer.rest()
        await self._out.drain()
        self._stall_timer.wait()


class FirstOutput(OutputFilter):
    """An OutputWriter that stops ``stall_timer`` at the first output; later outputs bypass it, at no cost."""

    def __init__(self, out: OutputWriter, stall_timer: StallTimer) -> None:
        super().__init__(out)
        self._stall_timer = stall_timer
        self.write = self._write_first  # type: ignore[method-assign]

    def _write_first(self, output: EngineOutput) -> None:
        self._stall_timer.stop()
        self._out.write(output)
        # Behind the first output, after which ``_out`` may take the others in another way, too.
        self.write = self._out.write  # type: ignore[method-assign]


# Whether an answer may be begun before the turn has ended.

#: How many answers may be begun ahead and held back at the same time, in all requests of an engine.
MOST_AHEAD: Final = 4
#: While the LLM makes other answers, one may be begun ahead if concurrent answers have a time to first output of at
#: most so many times that of single answers.
STRIDE: Final = 1.5
#: From this share of concurrent answers on, the LLM counts as busy, since it is seldom idle for long.
MOST_CROWDED: Final = 0.5
#: The weight of the latest measurement in the moving averages.
_SMOOTHING: Final = 0.2


class SpeculationOutcome(StrEnum):
    """The outcome of an answer that was begun before the turn had ended, or the reason why none was begun."""

    #: Used: the turn ended with the guessed input.
    USED = "used"
    #: Discarded: the speaker went on.
    WENT_ON = "went_on"
    #: Discarded: the final transcript, or other input, differs from the guess.
    DIFFERED = "differed"
    #: The answer failed, or the request ended before the turn did.
    FAILED = "failed"
    #: Not begun: the LLM was too busy.
    SKIPPED = "skipped"


class AheadLoad:
    """An estimate of an LLM's load, which decides whether an answer may be begun ahead, before the turn has ended.

    An idle LLM may begin an answer ahead. A busy one may do so only if concurrent answers begin hardly later than
    single ones: an answer ahead, which may be discarded, must not delay an answer that a user waits for.
    """

    def __init__(self) -> None:
        #: The number of answers in progress whose input is complete.
        self.active = 0
        self._ahead = 0
        #: The recent share of answers that began while others were in progress.
        self._crowded = 0.0
        self._alone: float | None = None
        self._beside: float | None = None

    @property
    def has_room(self) -> bool:
        """Whether an answer may be begun ahead now."""
        if self._ahead >= MOST_AHEAD:
            return False
        if self.active == 0 and self._crowded < MOST_CROWDED:
            return True
        return self._alone is not None and self._beside is not None and self._beside <= STRIDE * self._alone

    def begin(self, *, ahead: bool) -> AnswerUnderWay:
        """Note that the LLM begins an answer whose input is complete; return its measurement.

        ``ahead``: the answer is begun before the turn has ended.
        """
        beside = self.active > 0
        if ahead:
            self._ahead += 1
        else:
            self._crowded += _SMOOTHING * (beside - self._crowded)
        self.active += 1
        return AnswerUnderWay(self, beside=beside, ahead=ahead)

    def note_used(self) -> None:
        """Note that an answer begun ahead is no longer held back: its turn has ended, or the answer was discarded."""
        self._ahead -= 1

    def note_end(self) -> None:
        """Note that an answer is no longer in progress."""
        self.active -= 1

    def learn(self, seconds: float, *, beside: bool) -> None:
        """Note the ``seconds`` to an answer's first output; ``beside``: whether other answers were in progress."""
        known = self._beside if beside else self._alone
        learnt = seconds if known is None else known + _SMOOTHING * (seconds - known)
        if beside:
            self._beside = learnt
        else:
            self._alone = learnt


class AnswerUnderWay:
    """The measurement of one answer, from the end of its input to its own end."""

    def __init__(self, load: AheadLoad, *, beside: bool, ahead: bool) -> None:
        self._load = load
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._beside = beside
        self._ahead = ahead
        self._has_output = self._ended = False

    def note_output(self) -> None:
        """Note that an output was made."""
        if not self._has_output:
            self._has_output = True
            self._load.learn(self._loop.time() - self._began, beside=self._beside)

    def used(self) -> None:
        """Note that the answer is no longer held back, because its turn has ended or it was discarded."""
        if self._ahead:
            self._ahead = False
            self._load.note_used()

    def end(self) -> None:
        """Note that the answer has ended, with or without output. Idempotent."""
        if not self._ended:
            self._ended = True
            self.used()
            self._load.note_end()


# The state of a language model that is being fetched and will replace the rules; see ``auto_llm.AutoLlm``.


#: The name of the rules, as that of an engine and of a model.
RULES: Final = "rules"


class ComingState(StrEnum):
    """The state of a model that will answer instead of the rules: offered for download, fetching, loading, failed."""

    OFFERED = "offered"
    FETCHING = "fetching"
    LOADING = "loading"
    FAILED = "failed"


class Coming(Struct, frozen=True, omit_defaults=True):
    """A model that will answer instead of the rules. ``why`` is a line for the user: what happens, or what to do."""

    model: str
    state: ComingState
    why: str
    bytes_done: int | None = None
    bytes_total: int | None = None
    #: Whether ``fetch`` would begin with it.
    can_begin: bool = False


class GrowingLlm:
    """Base class of an LLM that may be replaced by another model while the server runs."""

    #: The model that is to answer; None if none is.
    coming: Coming | None = None

    @property
    def engine(self) -> Engine:
        """The engine that answers now."""
        raise NotImplementedError

    @property
    def advice(self) -> tuple[str, ...]:
        """Lines of advice for a person who can restart the server."""
        return ()

    async def fetch(self) -> Coming:
        """Begin to download the model; return its state.

        Raises SessionConflict if there is no model, or the download is not allowed.
        """
        raise SessionConflict("there is no model to fetch")


def growing_llm(engine: object) -> GrowingLlm | None:
    """Return ``engine`` or its LLM part, whichever is a GrowingLlm; None if neither is."""
    llm = getattr(engine, "llm_part", engine)
    return llm if isinstance(llm, GrowingLlm) else None


def has_model(engine: Engine) -> bool:
    """Whether a language model answers now, alone or together with the rules."""
    llm = parts_of(engine)[Role.LLM.value]
    return llm is not None and llm.name != RULES
