"""VoiceProcess: a Voice that speaks clause by clause, with hibari, Kokoro or espeak-ng in a separate process."""

from __future__ import annotations

import asyncio
import ctypes.util
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from omni_ws.audio.pcm import NO_SAMPLES, SampleLayout, Samples, samples_from_bytes
from omni_ws.audio.vad import has_runtime
from omni_ws.config.model import VoiceChoice
from omni_ws.core.chunks import Word
from omni_ws.core.json_values import primary_subtag
from omni_ws.engine.base import AudioOutput, EngineCapabilities, EngineState, GenerationRequest, OutputWriter
from omni_ws.engine.channel import Channel
from omni_ws.engine.child import Backoff, Child, ChildEnded, keep_running
from omni_ws.engine.spoken.languages import load_rules
from omni_ws.engine.threads import end_tasks
from omni_ws.engine.tts.speech_engine import clause_by_clause, speech_capabilities
from omni_ws.engine.tts.synthesiser import (
    Cancel,
    Done,
    FromWorker,
    NoVoice,
    Pronounce,
    Pronounced,
    PronouncedWord,
    Speak,
    SpokenPcm,
    SpokenWord,
    SpokenWords,
    VoiceFacts,
    VoiceReady,
)
from omni_ws.errors import EngineFailed, InvalidValue, UnsupportedParameter
from omni_ws.installing import fetch_command, install_command
from omni_ws.profiler import events
from omni_ws.weights import (
    fetched_file,
    fetched_folder,
)

log = logging.getLogger(__name__)


WORKER_MODULE = "omni_ws.engine.tts.voice_worker"

#: hibari takes a second of CPU time to start, and a busy machine far longer.
START_TIMEOUT = 30.0
#: A clause is synthesised some hundred times faster than it is played; a worker without output for so long hangs.
SILENCE_TIMEOUT = 10.0
#: A clause of Kokoro takes nearly as long as it lasts, so both are so many times longer for it.
KOKORO_TIMEOUTS = 6.0
#: The CPU time of a second of speech, in seconds, with which a voice is refused: it would stutter.
SLOWEST_PACE = 1.0

#: After so many deaths of the worker without a finished job in between, the voice counts as broken.
UNHEALTHY_AFTER = 3

#: A synthesiser with at least so many voices has languages rather than persons, and its default is not worth naming.
MANY_VOICES = 60

HOW_TO_GET_ONE = install_command("espeak")


class _Job:
    """An order to the worker and its results: a clause to speak and its audio, or a text to pronounce and its words."""

    def __init__(self, asked: Speak | Pronounce) -> None:
        self.asked = asked
        self.pronounced: list[PronouncedWord] = []
        #: Unbounded, so that a slow reader delays no other job; the length of the clause limits its size.
        self.output: Channel[AudioOutput] = Channel(0, cost=lambda spoken: len(spoken.samples))
        self.withdrawn = False
        #: Words that wait for the next audio, and the sample rate of the audio so far, 0 before the first.
        self._words: tuple[Word, ...] = ()
        self._sample_rate = 0

    def withdraw(self) -> None:
        """Drop all further audio, because nobody reads it."""
        self.withdrawn = True

    def take_words(self, words: list[SpokenWord]) -> None:
        """Keep ``words`` until the next call of ``take_audio``."""
        self._words += tuple(Word(*word) for word in words)

    def take_audio(self, samples: Samples, sample_rate: int) -> None:
        """Queue audio as an output, with the words that came before it."""
        self._sample_rate = sample_rate
        words, self._words = self._words, ()
        if not self.withdrawn:
            self.output.put_nowait(AudioOutput(samples, sample_rate, words))

    def end(self) -> None:
        """Queue words that came after the last audio, if any, and end the outputs."""
        if self._words and self._sample_rate and not self.withdrawn:
            self.output.put_nowait(AudioOutput(NO_SAMPLES, self._sample_rate, self._words))
        self.output.close()


def voice_capabilities(
    voices: tuple[str, ...], aliases: Mapping[str, str], languages: Mapping[str, str]
) -> EngineCapabilities:
    """Return the capabilities of a Voice of one or more processes.

    ``voices`` are the names of its voices, ``aliases`` maps further names to these, and ``languages`` has the language
    of each voice.
    """
    return speech_capabilities(
        voices,
        speaks=bool(voices),
        voice_aliases=aliases,
        voice_languages=languages,
        speech_languages=frozenset(map(primary_subtag, languages.values())),
        speed=bool(voices),
        sampling=frozenset({"max_tokens", "stop"}),
        sampling_no_ops=frozenset({"temperature", "top_p", "seed"}),
    )


class VoiceProcess:
    """A Voice whose synthesiser, hibari, Kokoro or espeak-ng, runs in a worker process, which is restarted if it dies.

    The worker gets one job at a time: texts of all callers are spoken in the order of arrival. If ``choice`` is AUTO
    and there is no synthesiser, the start succeeds, but the voice cannot speak. ``default_voice`` is the name of a
    voice of the synthesiser; None for the synthesiser's default. ``file`` is hibari's file or Kokoro's folder; None for
    the one in the cache of weights. A request with a ``speech_language`` is spoken by the first voice of this language,
    unless the request's ``voice`` speaks it.

    For Kokoro's voices of languages other than English, the ``reader``, a process of espeak-ng, provides the phonemes.
    With None, the voice has a reader of its own, which starts when it is first needed. A voice that is slower than
    speech is refused at the start, unless ``may_stutter`` is set because nobody listens live.
    """

    hosts: tuple[str, ...] = ()
    measures_memory = False

    def __init__(
        self,
        choice: VoiceChoice = VoiceChoice.AUTO,
        *,
        default_voice: str | None = None,
        file: Path | None = None,
        reader: VoiceProcess | None = None,
        may_stutter: bool = False,
    ) -> None:
        self.name = "synthesis"
        self.model = choice.value
        #: The description of the synthesiser; None before ``start``, and if there is no voice.
        self.facts: VoiceFacts | None = None
        #: Why there is no voice.
        self.reason = ""
        self._choice = choice
        self._default_voice = default_voice
        #: Whether the operator named the default voice.
        self.default_named = default_voice is not None
        self._file = file
        self._may_stutter = may_stutter
        self._own_reader = VoiceProcess(VoiceChoice.ESPEAK) if choice is VoiceChoice.KOKORO and reader is None else None
        #: The process that reads languages other than English for this one; None if it reads all that it speaks.
        self.reader = reader or self._own_reader
        self._starting = asyncio.Lock()
        self._patience = KOKORO_TIMEOUTS if choice is VoiceChoice.KOKORO else 1.0
        self._waiting: deque[_Job] = deque()
        self._current: _Job | None = None
        self._next_number = 1
        self._child: Child | None = None
        #: Whether the process has reported that it is ready. It may take longer to start than to speak.
        self._ready = False
        self._keeper: asyncio.Task[None] | None = None
        self._watchdog: asyncio.TimerHandle | None = None
        self._deaths = 0
        self._backoff = Backoff()

    @property
    def kind(self) -> VoiceChoice:
        """The kind of synthesiser; for AUTO, this is espeak-ng."""
        return VoiceChoice.ESPEAK if self._choice is VoiceChoice.AUTO else self._choice

    @property
    def state(self) -> EngineState:
        return EngineState.OK if self.healthy else EngineState.UNHEALTHY

    @property
    def capabilities(self) -> EngineCapabilities:
        return voice_capabilities(self.voices, self.aliases, self.languages)

    @property
    def voices(self) -> tuple[str, ...]:
        """The names of the voices, the default first; empty if there is no voice."""
        if self.facts is None:
            return ()
        default = self.facts.voices[0] if self._default_voice is None else self.named(self._default_voice)
        return (default, *(voice for voice in self.facts.voices if voice != default))

    @property
    def languages(self) -> Mapping[str, str]:
        """The language of each voice, by its name."""
        return {} if self.facts is None else self.facts.languages

    @property
    def aliases(self) -> Mapping[str, str]:
        """The first voice of each language, by the language's code with its region ("en-us") and without it ("en")."""
        first = {language: voice for voice, language in reversed(list(self.languages.items()))}
        wider = {primary_subtag(language): voice for language, voice in first.items()}
        # French is that of France.
        own = {code: first[f"{code}-{code}"] for code in wider if f"{code}-{code}" in first}
        return {**wider, **own, **first}

    def named(self, voice: str) -> str:
        """Return the name of a voice; ``voice`` is this name, or the code of a language."""
        return voice if voice in self.languages else self.aliases.get(voice, voice)

    @property
    def worker_pid(self) -> int | None:
        """The process ID of the worker; None while none runs."""
        return None if self._child is None else self._child.pid

    @property
    def healthy(self) -> bool:
        return self._deaths < UNHEALTHY_AFTER

    @property
    def jobs(self) -> int:
        """The number of clauses that are being spoken or wait to be spoken."""
        return len(self._waiting) + (self._current is not None and not self._current.withdrawn)

    def describe(self) -> tuple[str, ...]:
        if self.facts is None:
            return (f"voice: none ({self.reason}): answers are text only; to hear them, {HOW_TO_GET_ONE}",)
        name = f" {self.voices[0]}" if len(self.facts.voices) < MANY_VOICES else ""
        pace = f", {self.facts.pace:.2f} s of CPU time for a second of speech" if self.facts.pace else ""
        return (f"voice: {self.facts.synthesiser}{name} ({self.facts.source}{pace})",)

    async def start(self) -> None:
        """Find a synthesiser and start its worker. Idempotent.

        Raises EngineFailed if there is no synthesiser and ``choice`` is not AUTO, if the worker does not start, or if
        the synthesiser is too slow or lacks the ``default_voice``. If ``choice`` is NONE, nothing is started.
        """
        async with self._starting:
            if self._keeper is None:
                await self._start()

    async def _start(self) -> None:
        if self._choice is VoiceChoice.NONE:
            self.reason = "switched off"
            return
        if (find := _FILES.get(self._choice)) is not None:
            try:
                self._file = await asyncio.to_thread(find, self._file)
            except NoVoice as reason:
                raise EngineFailed(f"no voice {self._choice}: {reason}") from None
        try:
            self.facts = await self._launch()
        except NoVoice as reason:
            self.reason = str(reason)
            if self._choice is not VoiceChoice.AUTO:
                raise EngineFailed(f"no voice {self._choice}: {self.reason}") from None
            return
        if self.facts.pace > SLOWEST_PACE and not self._may_stutter:
            pace = self.facts.pace
            await self.stop()
            raise EngineFailed(
                f"no voice {self._choice}: it would stutter: a second of speech takes this machine {pace:.1f} s of CPU "
                "time, at best; --tts hibari takes a fiftieth of that"
            )
        if self.voices[0] not in self.languages:
            name, known = self.facts.synthesiser, ", ".join(self.facts.voices)
            await self.stop()
            raise EngineFailed(f"{name} has no voice {self._default_voice!r}; there are {known}")
        self.name, self.model = self.facts.synthesiser.partition(" ")[0], self.voices[0]
        keeping = keep_running("the voice worker", self._until_death, self._start_again, self._backoff)
        self._keeper = asyncio.create_task(keeping, name="voice worker")

    async def stop(self) -> None:
        """End the worker; jobs in progress fail with EngineFailed. Idempotent."""
        keeper, self._keeper = self._keeper, None
        await end_tasks(keeper)
        await self._end()
        if self._own_reader is not None:
            await self._own_reader.stop()
        self.facts = None
        self._fail_all("the engine has stopped")

    def voice_for(self, request: GenerationRequest) -> str:
        """Return the name of the voice that speaks a request. Raises InvalidValue if its ``voice`` is not known."""
        voice = self.voices[0] if request.voice is None else self.check(request.voice)
        language = request.speech_language
        return (
            voice
            if language in (None, primary_subtag(self.languages[voice]))
            else self.aliases.get(language or "", voice)
        )

    def check(self, voice: str) -> str:
        """Return the name of a voice, see ``named``. Raises InvalidValue if there is no such voice."""
        name = self.named(voice)
        if name not in self.languages:
            raise InvalidValue(f"unknown voice {voice!r}; there are {', '.join(self.voices)}", param="voice")
        return name

    async def speak(self, request: GenerationRequest, text: AsyncIterator[str], out: OutputWriter) -> None:
        """Speak a request, see Voice. Raises UnsupportedParameter if there is no voice."""
        if self.facts is None:
            (reason,) = self.describe()
            raise UnsupportedParameter(f"this server has no voice; {reason}", param="task")
        voice = self.voice_for(request)
        language = self.languages[voice]
        await clause_by_clause(
            request,
            text,
            out,
            lambda clause: self.say(clause, voice=voice, speed=request.speed),
            language=language,
            latin_only=self.facts.latin_only and primary_subtag(language) == "en",
            tells_words=True,
            slow=self.facts.pace > 0,
        )

    async def say(
        self, text: str, *, voice: str | None = None, speed: float = 1.0
    ) -> AsyncGenerator[AudioOutput, None]:
        """Yield the audio of one clause; the times of words count from its beginning.

        ``speed`` is relative to the voice's own. Closing the generator cancels the job, whether it waits or is being
        spoken. Raises InvalidValue for an unknown ``voice``, and EngineFailed if there is no voice, or if the worker
        dies or fails while it speaks this text.
        """
        if self._keeper is None:
            raise EngineFailed("there is no voice")
        if not self.healthy and self._child is None:
            raise EngineFailed("the voice worker does not start")
        chosen = self.voices[0] if voice is None else self.check(voice)
        # Half of a surrogate pair, which a model may write, cannot be sent.
        text = text.encode(errors="replace").decode()
        words = await self._read(text, self.languages[chosen])
        if self._keeper is None:
            raise EngineFailed("the engine has stopped")  # while the other synthesiser read
        job = _Job(Speak(self._new_number(), chosen, speed, text, words))
        async with aclosing(self._outputs(job)) as outputs:
            async for spoken in outputs:
                yield spoken

    async def pronounced(self, text: str, voice: str) -> list[PronouncedWord]:
        """Return the words of ``text`` as ``voice``, one of espeak-ng's, speaks them.

        Starts the worker if needed. Raises the errors of ``start`` and of ``say``.
        """
        await self.start()
        job = _Job(Pronounce(self._new_number(), self.check(voice), text))
        async with aclosing(self._outputs(job)) as outputs:
            async for _ in outputs:
                pass
        return job.pronounced

    async def _read(self, text: str, language: str) -> list[PronouncedWord]:
        """Return the pronounced words of a text that the synthesiser cannot read itself; [] for a text that it can."""
        if self.reader is None or primary_subtag(language) == "en":
            return []
        return await self.reader.pronounced(text, language)

    def _new_number(self) -> int:
        number, self._next_number = self._next_number, self._next_number % 0xFFFF_FFFF + 1
        return number

    async def _outputs(self, job: _Job) -> AsyncGenerator[AudioOutput, None]:
        """Queue a job, and yield its outputs; withdraw the job if the caller stops early."""
        self._waiting.append(job)
        self._give_next()
        try:
            async for spoken in events.awaited("voice", job.output):
                yield spoken
        finally:
            self._withdraw(job)

    def _give_next(self) -> None:
        """Give the worker its next job, if it is ready and free."""
        if self._current is not None or not self._waiting or not self._ready:
            return
        assert self._child is not None
        self._current = self._waiting.popleft()
        self._child.send(self._current.asked)
        self._watch()

    def _withdraw(self, job: _Job) -> None:
        if job in self._waiting:
            self._waiting.remove(job)
        elif job is self._current and not job.withdrawn:
            job.withdraw()
            if self._child is not None:
                self._child.send(Cancel(job.asked.job))

    def _watch(self) -> None:
        """Restart the timer that detects a hanging worker, if a job runs."""
        if self._watchdog is not None:
            self._watchdog.cancel()
            self._watchdog = None
        if self._current is not None:
            self._watchdog = asyncio.get_running_loop().call_later(SILENCE_TIMEOUT * self._patience, self._kill_silent)

    def _kill_silent(self) -> None:
        if self._child is not None:
            self._child.kill()

    async def _until_death(self) -> str:
        """Handle the worker's messages until it dies; fail the job that it was speaking, and return its exit status."""
        assert self._child is not None
        try:
            while True:
                self._take(*await self._child.receive())
        except ChildEnded:
            pass
        job, self._current = self._current, None
        self._watch()
        self._deaths += 1
        try:
            status = await self._end()
        finally:  # also if the engine stops meanwhile
            if job is not None:
                job.output.fail(EngineFailed("the voice worker died while it spoke"))
        return f"exit status {status}"

    async def _start_again(self) -> None:
        try:
            await self._launch()
        except (EngineFailed, NoVoice) as error:
            self._deaths += 1
            self._fail_all("the voice worker does not start")
            raise EngineFailed(str(error)) from None
        self._give_next()

    def _fail_all(self, message: str) -> None:
        jobs = [*([self._current] if self._current is not None else []), *self._waiting]
        self._current = None
        self._waiting.clear()
        self._watch()
        for job in jobs:
            job.output.fail(EngineFailed(message))

    async def _launch(self) -> VoiceFacts:
        """Start a worker, and return its description of the synthesiser. Raises NoVoice or EngineFailed."""
        files = [] if self._file is None else [self._file]
        if self._choice is VoiceChoice.KOKORO and (more := await asyncio.to_thread(_more_voices)) is not None:
            files.append(more)
        try:
            arguments = (self._choice.value, *map(str, files))
            child = await Child.start("the voice worker", WORKER_MODULE, *arguments, kinds=FromWorker)
        except OSError as error:
            raise EngineFailed("the voice worker does not start") from error
        self._child = child
        try:
            async with asyncio.timeout(START_TIMEOUT * self._patience):
                said, _ = await child.receive()
            assert isinstance(said, VoiceReady)
            if said.facts is None:
                raise NoVoice(said.reason)
        except (TimeoutError, ChildEnded) as error:
            await self._end()
            raise EngineFailed("the voice worker does not start") from error
        except BaseException:
            await self._end()
            raise
        self._ready = True
        return said.facts

    async def _end(self) -> int | None:
        child, self._child, self._ready = self._child, None, False
        return None if child is None else await child.end()

    def _take(self, said: Any, body: bytes) -> None:
        job = self._current
        self._watch()
        if job is None or said.job != job.asked.job:
            return
        match said:
            case SpokenPcm(_, sample_rate):
                job.take_audio(samples_from_bytes(body, SampleLayout.S16), sample_rate)
            case SpokenWords(_, words):
                job.take_words(words)
            case Pronounced(_, told):
                job.pronounced.extend(told)
            case Done(_, failure):
                self._current = None
                self._watch()
                if failure:
                    job.output.fail(EngineFailed(failure))
                else:
                    self._deaths = 0
                    self._backoff.reset()
                    job.end()
                self._give_next()


# The neural voices: whether this machine has what they need. Loads none of their packages.

#: The package's network and rules are no public interface: another version may not work.
VERSION: Final = "0.2.1"


def hibari_file(file: Path | None = None) -> Path:
    """Return the file of hibari's voice: ``file``, or else the file in the cache of weights. Downloads nothing.

    Blocks: the first call reads the whole file. Raises NoVoice, whose message says what to do.
    """
    _check_packages("", "hibari")
    if file is not None:
        if not file.is_file():
            raise NoVoice(f"there is no file {file}")
        return file
    if (fetched := fetched_file("hibari")) is None:
        raise NoVoice(f"its weights are not on this machine: {fetch_command('hibari')}")
    return fetched


def kokoro_folder(folder: Path | None = None) -> Path:
    """Return the folder of Kokoro's weights; see ``hibari_file``."""
    _check_packages("kokoro", "hibari", "onnxruntime")
    found = folder or fetched_folder("kokoro")
    if found is None:
        raise NoVoice(f"its weights are not on this machine: {fetch_command('kokoro')}")
    return found


def _more_voices() -> Path | None:
    """Return the folder of Kokoro's voices of languages other than English, which need espeak-ng.

    Returns None if the folder or espeak-ng is not on this machine.
    """
    return fetched_folder("kokoro-languages") if espeak_is_here() else None


def espeak_is_here() -> bool:
    """Whether espeak-ng is installed. Does not load it. Blocks."""
    return find_spec("espeakng_loader") is not None or ctypes.util.find_library("espeak-ng") is not None


def _check_packages(extra: str, *packages: str) -> None:
    """Check that packages of the extra ``extra`` and an ONNX runtime are installed, and hibari-tts in our version.

    Raises NoVoice.
    """
    try:
        installed = version("hibari-tts")
    except PackageNotFoundError:
        installed = ""
    if not installed or not has_runtime() or not all(map(find_spec, packages)):
        raise NoVoice(f"its packages are not installed: {install_command(extra)}")
    if installed != VERSION:
        raise NoVoice(f"it needs hibari-tts {VERSION}, and {installed} is installed: {install_command(extra)}")


_FILES: Final[Mapping[VoiceChoice, Callable[[Path | None], Path]]] = {
    VoiceChoice.HIBARI: hibari_file,
    VoiceChoice.KOKORO: kokoro_folder,
}


# LanguageVoices: a Voice that speaks each language with the voice that a table has for it.


@dataclass(frozen=True, slots=True)
class _Speaker:
    """The voice for a language, and its process. ``why`` says why it is not the best voice; "" if it is."""

    process: VoiceProcess
    voice: str
    why: str = ""


class LanguageVoices:
    """A Voice that speaks each language with the voice that a table has for it; each kind of synthesiser is a process.

    ``table`` has, for each language, the voices that may speak it, such as "kokoro:ef_dora", the best first. ``base``
    is the voice for all other languages. All processes start with ``base``, except a process that only provides
    phonemes for another one: it starts when it is first needed. A request with a ``speech_language`` is spoken by its
    ``voice`` if this voice speaks the language, otherwise by the voice in the table. The start fails if a language in
    ``required``, which the operator has named, has no voice. A request that names neither voice nor language is spoken
    by the voice for the language ``first``, if there is one.
    """

    hosts: tuple[str, ...] = ()
    measures_memory = False

    def __init__(
        self, base: VoiceProcess, table: Mapping[str, Sequence[str]], *, required: Collection[str] = (), first: str = ""
    ) -> None:
        self.name, self.model = base.name, base.model
        self._base = base
        self._table = table
        self._required = required
        self._first = first
        self._processes = {base.kind: base}
        if base.reader is not None:
            self._processes[VoiceChoice.ESPEAK] = base.reader
        self._speakers: dict[str, _Speaker] = {}
        #: Why there is no voice for a language, and why kinds of synthesisers did not start.
        self._without: dict[str, str] = {}
        self._failed: dict[VoiceChoice, str] = {}
        self._capabilities: EngineCapabilities | None = None

    @property
    def state(self) -> EngineState:
        return self._base.state

    @property
    def capabilities(self) -> EngineCapabilities:
        return self._capabilities or self._base.capabilities

    def describe(self) -> tuple[str, ...]:
        others = dict.fromkeys(one.process for one in self._speakers.values() if one.process is not self._base)
        told = [*self._base.describe(), *(line for process in others for line in process.describe())]
        for language, speaker in self._speakers.items():
            told.append(f"voice for {language}: {speaker.voice} ({speaker.process.name}){speaker.why}")
        told += [f"no voice for {language}: {reason}" for language, reason in self._without.items()]
        return tuple(told)

    async def start(self) -> None:
        """Start ``base`` and the voices of ``table``. Raises EngineFailed if ``base`` or a required voice fails."""
        await self._base.start()
        self.name, self.model = self._base.name, self._base.model
        for language, choices in self._table.items():
            await self._find_speaker(language, choices)
            await load_rules(language)
        self._capabilities = self._combined()

    async def stop(self) -> None:
        for process in reversed(self._processes.values()):  # a reader after those for which it reads
            await process.stop()

    async def speak(self, request: GenerationRequest, text: AsyncIterator[str], out: OutputWriter) -> None:
        """Speak a request, see Voice. Raises the errors of ``VoiceProcess.speak``."""
        if request.voice is None and request.speech_language is None and self._first in self._speakers:
            request = replace(request, voice=self._speakers[self._first].voice)
        process = self._owner(request.voice)
        speaker = self._speakers.get(request.speech_language or "")
        if speaker is not None and not self._speaks(request.voice, request.speech_language):
            process, request = speaker.process, replace(request, voice=speaker.voice, speech_language=None)
        await process.speak(request, text, out)

    def _owner(self, voice: str | None) -> VoiceProcess:
        """Return the process that has ``voice``; the base if none has it."""
        if voice is None or voice in self._base.languages:
            return self._base
        others = (one.process for one in self._speakers.values())
        return next((process for process in others if voice in process.languages), self._base)

    def _speaks(self, voice: str | None, language: str | None) -> bool:
        """Whether ``voice``, named by the client, speaks ``language``; False for None."""
        return voice is not None and primary_subtag(self.capabilities.voice_languages.get(voice, "")) == language

    async def _find_speaker(self, language: str, choices: Sequence[str]) -> None:
        """Start the voices of ``choices`` in order until one succeeds; it becomes the speaker of ``language``.

        Raises EngineFailed if none succeeds and the language is required.
        """
        reasons = list[str]()
        for choice in choices:
            kind, _, voice = choice.partition(":")
            try:
                process = await self._started(VoiceChoice(kind))
                if (name := process.named(voice)) not in process.languages:
                    raise EngineFailed(f"{process.name} has no voice {voice!r}")
            except EngineFailed as error:
                reasons.append(f"{choice}: {error.message}")
                continue
            self._speakers[language] = _Speaker(process, name, "".join(f"; not {reason}" for reason in reasons))
            return
        if language in self._required:
            raise EngineFailed(f"no voice for {language}: {'; '.join(reasons)}")
        self._without[language] = "; ".join(reasons)

    async def _started(self, kind: VoiceChoice) -> VoiceProcess:
        """Return the process of a kind of synthesiser, and start it if needed.

        Raises EngineFailed if it does not start; later calls then raise the error without another attempt.
        """
        if kind in self._failed:
            raise EngineFailed(self._failed[kind])
        process = self._process(kind)
        try:
            await process.start()
        except EngineFailed as error:
            self._failed[kind] = error.message
            raise
        return process

    def _process(self, kind: VoiceChoice) -> VoiceProcess:
        if kind not in self._processes:
            reader = self._process(VoiceChoice.ESPEAK) if kind is VoiceChoice.KOKORO else None
            self._processes[kind] = VoiceProcess(kind, reader=reader)
        return self._processes[kind]

    def _combined(self) -> EngineCapabilities:
        """Return the capabilities: the voices of the base, and other processes' voices for languages of the table."""
        base = self._base.capabilities
        languages, aliases = dict(base.voice_languages), dict(base.voice_aliases)
        for language, speaker in self._speakers.items():
            theirs = {name: its for name, its in speaker.process.languages.items() if primary_subtag(its) == language}
            languages |= {speaker.voice: theirs.get(speaker.voice, language), **theirs}
            aliases[language] = speaker.voice
        first = [self._speakers[self._first].voice] if self._first in self._speakers else []
        voices = tuple(dict.fromkeys((*first, *base.voices, *languages)))
        return voice_capabilities(voices, aliases, languages)
