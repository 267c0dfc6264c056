"""VoiceProcess: speaks clause by clause with hibari or espeak-ng, in a process of its own."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np

from omni_ws.audio.pcm import samples_from_pcm16
from omni_ws.audio.vad import PACKAGE as RUNTIME
from omni_ws.config.model import VoiceChoice
from omni_ws.core.chunks import Modality, OutputModality, Task, Word
from omni_ws.engine.base import AudioOutput, EngineCapabilities, EngineState, GenerationRequest
from omni_ws.engine.channel import Channel
from omni_ws.engine.child import child_environment, end_process
from omni_ws.engine.tts.speech_engine import clause_by_clause
from omni_ws.engine.tts.synthesiser import (
    HEAD,
    RATE,
    BrokenPipeFrame,
    Frame,
    FrameKind,
    NoVoice,
    VoiceFacts,
    decode_head,
    decode_object,
    encode_frame,
    encode_object,
)
from omni_ws.errors import EngineFailed, InvalidValue, UnsupportedParameter
from omni_ws.installing import fetch_command, install_command
from omni_ws.profiler import events
from omni_ws.weights import fetched_file

log = logging.getLogger(__name__)


WORKER_MODULE = "omni_ws.engine.tts.voice_worker"

#: hibari takes a second of CPU time to start, and a busy machine far longer.
START_TIMEOUT = 30.0
#: A clause is spoken some hundred times faster than it is heard; a worker that is silent for so long hangs.
SILENCE_TIMEOUT = 10.0

FIRST_BACKOFF = 0.05
MAX_BACKOFF = 5.0
#: After so many failures in a row the wait has long been ``MAX_BACKOFF``.
_MOST_DOUBLINGS = 10
#: So many deaths without a finished job in between, and the voice counts as broken.
UNHEALTHY_AFTER = 3

#: So many are languages rather than persons, and the first is no name to tell.
MANY_VOICES = 20

HOW_TO_GET_ONE = install_command("espeak")


@dataclass(slots=True, eq=False)
class _Job:
    number: int
    voice: str
    speed: float
    text: str
    #: Filled without waiting, so that a slow listener holds up nobody else; the length of the text bounds it.
    output: Channel[AudioOutput] = field(default_factory=lambda: Channel(0, cost=lambda spoken: len(spoken.samples)))
    words: tuple[Word, ...] = ()
    sample_rate: int = 0
    withdrawn: bool = False


class VoiceProcess:
    """A Voice, hibari or espeak-ng: owns the worker process, gives it one job at a time, and starts it again.

    It speaks for any number of callers; their texts take turns in the order in which they came. Where ``choice`` is
    AUTO and there is no synthesiser, it starts all the same, and can do nothing. ``default_voice`` is one of the voices
    of the synthesiser, None for its usual one; ``file`` is what hibari speaks from, None for the one in the cache of
    weights.
    """

    hosts: tuple[str, ...] = ()
    measures_memory = False

    def __init__(
        self, choice: VoiceChoice = VoiceChoice.AUTO, *, default_voice: str | None = None, file: Path | None = None
    ) -> None:
        self.name = "synthesis"
        self.model = choice.value
        #: What speaks; None before ``start`` and where there is no voice.
        self.facts: VoiceFacts | None = None
        #: Why there is no voice.
        self.reason = ""
        #: Process id of the worker; None while none runs.
        self.worker_pid: int | None = None
        self._choice = choice
        self._default_voice = default_voice
        self._file = file
        self._waiting: deque[_Job] = deque()
        self._current: _Job | None = None
        self._next_number = 1
        self._process: asyncio.subprocess.Process | None = None
        #: Whether the process has said that it is ready: it may take longer to start than to speak.
        self._ready = False
        self._keeper: asyncio.Task[None] | None = None
        self._watchdog: asyncio.TimerHandle | None = None
        self._deaths = 0

    @property
    def state(self) -> EngineState:
        return EngineState.OK if self.healthy else EngineState.UNHEALTHY

    @property
    def capabilities(self) -> EngineCapabilities:
        voices = self.voices
        return EngineCapabilities(
            input_modalities=frozenset({Modality.TEXT}),
            output_modalities=frozenset({OutputModality.AUDIO} if voices else ()),
            tasks=frozenset({Task.SPEECH} if voices else ()),
            extend=True,
            voices=voices,
            voice_aliases=self.aliases,
            voice_languages=self.languages,
            speed=bool(voices),
            sampling=frozenset({"max_tokens", "stop"}),
            sampling_no_ops=frozenset({"temperature", "top_p", "seed"}),
        )

    @property
    def voices(self) -> tuple[str, ...]:
        """The default first; empty where there is no voice."""
        if self.facts is None:
            return ()
        default = self.facts.voices[0] if self._default_voice is None else self._named(self._default_voice)
        return (default, *(voice for voice in self.facts.voices if voice != default))

    @property
    def languages(self) -> Mapping[str, str]:
        """The language of each voice."""
        return {} if self.facts is None else self.facts.languages

    @property
    def aliases(self) -> Mapping[str, str]:
        """Voices by their languages, and by those without their regions: the first of each."""
        first = {language: voice for voice, language in reversed(list(self.languages.items()))}
        wider = {language.partition("-")[0]: voice for language, voice in first.items()}
        return {**wider, **first}

    def _named(self, voice: str) -> str:
        """Return the name of a voice, which may be given by its language."""
        return voice if voice in self.languages else self.aliases.get(voice, voice)

    @property
    def healthy(self) -> bool:
        return self._deaths < UNHEALTHY_AFTER

    @property
    def jobs(self) -> int:
        """Texts that are being spoken or wait for it."""
        return len(self._waiting) + (self._current is not None and not self._current.withdrawn)

    def describe(self) -> tuple[str, ...]:
        if self.facts is None:
            return (f"voice: none ({self.reason}): answers are text only; to hear them, {HOW_TO_GET_ONE}",)
        name = f" {self.voices[0]}" if len(self.facts.voices) < MANY_VOICES else ""
        return (f"voice: {self.facts.synthesiser}{name} ({self.facts.source})",)

    async def start(self) -> None:
        """Finds a voice and starts its worker. Finding none is no error, unless one was asked for by name."""
        if self._choice is VoiceChoice.NONE:
            self.reason = "switched off"
            return
        if self._choice is VoiceChoice.HIBARI:
            try:
                self._file = await asyncio.to_thread(hibari_file, self._file)
            except NoVoice as reason:
                raise EngineFailed(f"no voice hibari: {reason}") from None
        ready = await self._launch()
        if "reason" in ready:
            self.reason = ready["reason"]
            await self._end_process()
            if self._choice is not VoiceChoice.AUTO:
                raise EngineFailed(f"no voice {self._choice}: {self.reason}")
            return
        self.facts = VoiceFacts(
            ready["synthesiser"],
            ready["source"],
            tuple(ready["voices"]),
            ready["languages"],
            latin_only=ready["latin_only"],
        )
        if self.voices[0] not in self.languages:
            known = ", ".join(self.facts.voices)
            await self.stop()
            raise EngineFailed(f"{ready['synthesiser']} has no voice {self._default_voice!r}; there are {known}")
        self.name, self.model = self.facts.synthesiser.partition(" ")[0], self.voices[0]
        self._keeper = asyncio.create_task(self._keep_worker(), name="voice worker")

    async def stop(self) -> None:
        """Ends the worker; whoever still waits for speech gets EngineFailed. Idempotent."""
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)
        await self._end_process()
        self.facts = None
        self._fail_all("the engine has stopped")

    def check(self, voice: str) -> str:
        """Return the name of a voice. Raises InvalidValue for one that is not there."""
        name = self._named(voice)
        if name not in self.languages:
            raise InvalidValue(f"unknown voice {voice!r}; there are {', '.join(self.voices)}", param="voice")
        return name

    async def speak(self, request: GenerationRequest, text: AsyncIterator[str]) -> AsyncGenerator[AudioOutput, None]:
        """See Voice. Raises UnsupportedParameter where there is none."""
        if self.facts is None:
            (reason,) = self.describe()
            raise UnsupportedParameter(f"this server has no voice; {reason}", param="task")
        voice = self.voices[0] if request.voice is None else self.check(request.voice)
        spoken = clause_by_clause(
            request,
            text,
            lambda clause: self.say(clause, voice=voice, speed=request.speed),
            language=self.languages[voice],
            latin_only=self.facts.latin_only,
            tells_words=True,
        )
        async with aclosing(spoken) as outputs:
            async for output in outputs:
                yield output

    async def say(
        self, text: str, *, voice: str | None = None, speed: float = 1.0
    ) -> AsyncGenerator[AudioOutput, None]:
        """Speaks one clause, ``speed`` times as fast as the voice does by itself; words count from its beginning.

        Closing the iterator takes the job back, at once and wherever it stands.
        Raises EngineFailed where there is no voice or the worker dies with this text.
        """
        if self._keeper is None:
            raise EngineFailed("there is no voice")
        if not self.healthy and self._process is None:
            raise EngineFailed("the voice worker does not start")
        chosen = self.voices[0] if voice is None else self.check(voice)
        job = _Job(self._next_number, chosen, speed, text)
        self._next_number = self._next_number % 0xFFFF_FFFF + 1
        self._waiting.append(job)
        self._give_next()
        try:
            async for spoken in events.awaited("voice", job.output):
                yield spoken
        finally:
            self._withdraw(job)

    def _give_next(self) -> None:
        """Gives the worker its next job, if it is ready and free."""
        if self._current is not None or not self._waiting or not self._ready:
            return
        assert self._process is not None
        assert self._process.stdin is not None
        self._current = job = self._waiting.popleft()
        spoken = {"voice": job.voice, "speed": job.speed, "text": job.text}
        self._process.stdin.write(encode_object(FrameKind.SPEAK, job.number, spoken))
        self._watch()

    def _withdraw(self, job: _Job) -> None:
        if job in self._waiting:
            self._waiting.remove(job)
        elif job is self._current and not job.withdrawn:
            job.withdrawn = True
            if self._process is not None and self._process.stdin is not None:
                self._process.stdin.write(encode_frame(FrameKind.CANCEL, job.number))

    def _watch(self) -> None:
        """A sign of life: the clock starts anew while a job runs."""
        if self._watchdog is not None:
            self._watchdog.cancel()
            self._watchdog = None
        if self._current is not None:
            self._watchdog = asyncio.get_running_loop().call_later(SILENCE_TIMEOUT, self._kill)

    def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def _keep_worker(self) -> None:
        """Reads from the worker; when it has died, starts another one."""
        while True:
            if self._process is not None:
                await self._read_all(self._process)
                await self._bury()
            doublings = min(self._deaths - 1, _MOST_DOUBLINGS)
            await asyncio.sleep(min(MAX_BACKOFF, FIRST_BACKOFF * 2**doublings))
            try:
                ready = await self._launch()
            except EngineFailed as error:
                ready = {"reason": str(error)}
            if "reason" in ready:
                log.error("the voice worker does not start: %s", ready["reason"])
                await self._end_process()
                self._deaths += 1
                self._fail_all("the voice worker does not start")
            else:
                self._give_next()

    async def _bury(self) -> None:
        """The worker is gone: the text that it was speaking may be the reason, and is not tried again."""
        job, self._current = self._current, None
        self._watch()
        self._deaths += 1
        code = await self._end_process()
        log.warning("the voice worker died (exit status %s); starting another", code)
        if job is not None:
            job.output.fail(EngineFailed("the voice worker died while it spoke"))

    def _fail_all(self, message: str) -> None:
        jobs = [*([self._current] if self._current is not None else []), *self._waiting]
        self._current = None
        self._waiting.clear()
        self._watch()
        for job in jobs:
            job.output.fail(EngineFailed(message))

    async def _launch(self) -> dict[str, Any]:
        """Starts a worker and returns what it says about itself. Raises EngineFailed."""
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                WORKER_MODULE,
                self._choice.value,
                *([] if self._file is None else [str(self._file)]),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=child_environment(),
            )
            self.worker_pid = self._process.pid
            async with asyncio.timeout(START_TIMEOUT):
                frame = await _read_frame(self._process)
        except (OSError, TimeoutError, asyncio.IncompleteReadError, BrokenPipeFrame) as error:
            await self._end_process()
            raise EngineFailed("the voice worker does not start") from error
        except asyncio.CancelledError:
            await self._end_process()
            raise
        ready: dict[str, Any] = decode_object(frame.payload)
        self._ready = "reason" not in ready
        return ready

    async def _end_process(self) -> int | None:
        """Closes the worker's input, which ends it; kills it where that does not help. Returns its exit status."""
        process, self._process, self.worker_pid = self._process, None, None
        self._ready = False
        return None if process is None else await end_process(process, name="voice worker")

    async def _read_all(self, process: asyncio.subprocess.Process) -> None:
        try:
            while True:
                self._take(await _read_frame(process))
        except asyncio.IncompleteReadError:
            return
        except BrokenPipeFrame:
            log.exception("the voice worker's pipe carries something else than frames")
            self._kill()

    def _take(self, frame: Frame) -> None:
        job = self._current
        self._watch()
        if job is None or frame.job != job.number:
            return
        match frame.kind:
            case FrameKind.AUDIO if not job.withdrawn:
                (job.sample_rate,) = RATE.unpack_from(frame.payload)
                samples = samples_from_pcm16(np.frombuffer(frame.payload, "<i2", offset=RATE.size))
                words, job.words = job.words, ()
                job.output.put_nowait(AudioOutput(samples, job.sample_rate, words))
            case FrameKind.WORDS:
                job.words += tuple(Word(*word) for word in decode_object(frame.payload))
            case FrameKind.DONE:
                if job.words and job.sample_rate and not job.withdrawn:
                    # The last words of a text may be told after its last sample.
                    job.output.put_nowait(AudioOutput(np.empty(0, np.float32), job.sample_rate, job.words))
                self._deaths = 0
                self._end_job()
            case FrameKind.FAILED:
                self._end_job(EngineFailed(decode_object(frame.payload)["message"]))
            case _:
                pass

    def _end_job(self, error: EngineFailed | None = None) -> None:
        job, self._current = self._current, None
        self._watch()
        if job is not None:
            if error is None:
                job.output.close()
            else:
                job.output.fail(error)
        self._give_next()


async def _read_frame(process: asyncio.subprocess.Process) -> Frame:
    """Raises IncompleteReadError at the end of the pipe, BrokenPipeFrame for what is no frame."""
    assert process.stdout is not None
    length, kind, job = decode_head(await process.stdout.readexactly(HEAD.size))
    return Frame(kind, job, await process.stdout.readexactly(length))


# The voice hibari: whether this machine has what it needs. Loads none of its packages.

#: Its network and its rules are no interface: another version may not fit.
VERSION: Final = "0.2.1"


def hibari_file(file: Path | None = None) -> Path:
    """Return the file of the voice: ``file``, else the one in the cache of weights. Fetches nothing.

    Blocks: it reads the file whole where it has not been seen before. Raises NoVoice, which says what to do.
    """
    try:
        installed = version("hibari-tts")
    except PackageNotFoundError:
        installed = ""
    if not installed or not all(map(find_spec, ("hibari", RUNTIME))):
        raise NoVoice(f"its packages are not installed: {install_command('hibari')}")
    if installed != VERSION:
        raise NoVoice(f"it needs hibari-tts {VERSION}, and {installed} is installed: {install_command('hibari')}")
    if file is not None:
        if not file.is_file():
            raise NoVoice(f"there is no file {file}")
        return file
    if (fetched := fetched_file("hibari")) is None:
        raise NoVoice(f"its weights are not on this machine: {fetch_command('hibari')}")
    return fetched
