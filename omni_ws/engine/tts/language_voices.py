"""LanguageVoices: a Voice that speaks each language with the voice that a table has for it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from omni_ws.config.model import VoiceChoice
from omni_ws.core.json_values import primary_subtag
from omni_ws.engine.base import EngineCapabilities, EngineState, GenerationRequest, OutputWriter
from omni_ws.engine.spoken.languages import load_rules
from omni_ws.engine.tts.voice_process import VoiceProcess, voice_capabilities
from omni_ws.errors import EngineFailed


@dataclass(frozen=True, slots=True)
class _Speaker:
    """Who speaks a language, and why it is not the best one; "" if it is."""

    process: VoiceProcess
    voice: str
    why: str = ""


class LanguageVoices:
    """A Voice over one process for each kind of synthesiser that the languages of a table need.

    ``table`` has the voices that may speak each language, as "kokoro:ef_dora", the best first. ``base`` is the voice of
    the TTS, for all other languages. Processes start with it; one that only reads for another starts when it is first
    needed. A request with a ``speech_language`` is spoken by its ``voice`` if that speaks this language, else as the
    table says. The start fails without the voices of ``required`` languages, which the operator has named. The speaker
    of the language ``first``, if it has one, speaks where no voice and no language is named.
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
        """Start the base and what the table needs. Raises EngineFailed without the base, or what the operator named."""
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
        """See Voice. Raises as VoiceProcess."""
        if request.voice is None and request.speech_language is None and self._first in self._speakers:
            request = replace(request, voice=self._speakers[self._first].voice)
        process = self._owner(request.voice)
        speaker = self._speakers.get(request.speech_language or "")
        if speaker is not None and not self._speaks(request.voice, request.speech_language):
            process, request = speaker.process, replace(request, voice=speaker.voice, speech_language=None)
        await process.speak(request, text, out)

    def _owner(self, voice: str | None) -> VoiceProcess:
        """Return the process of a voice: the base unless another has one of this name."""
        if voice is None or voice in self._base.languages:
            return self._base
        others = (one.process for one in self._speakers.values())
        return next((process for process in others if voice in process.languages), self._base)

    def _speaks(self, voice: str | None, language: str | None) -> bool:
        """Whether the client named a voice of this language."""
        return voice is not None and primary_subtag(self.capabilities.voice_languages.get(voice, "")) == language

    async def _find_speaker(self, language: str, choices: Sequence[str]) -> None:
        """Find the first of some voices that starts. Raises EngineFailed if none does for a required language."""
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
        """Return the running process of a kind. Raises EngineFailed if it does not start, then at once."""
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
        """Return what all can do: the voices of the base, and those of others in the languages that they speak."""
        base = self._base.capabilities
        languages, aliases = dict(base.voice_languages), dict(base.voice_aliases)
        for language, speaker in self._speakers.items():
            theirs = {name: its for name, its in speaker.process.languages.items() if primary_subtag(its) == language}
            languages |= {speaker.voice: theirs.get(speaker.voice, language), **theirs}
            aliases[language] = speaker.voice
        first = [self._speakers[self._first].voice] if self._first in self._speakers else []
        voices = tuple(dict.fromkeys((*first, *base.voices, *languages)))
        return voice_capabilities(voices, aliases, languages)
