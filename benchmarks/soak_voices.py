"""The ears, the model and the voice of the soak's conversations. What they hear and say is in the samples themselves.

A *word of the user* is WORD_MS of sound, of which each sample is the word's number. The ears write down the words of
which they had at least half. A *word of an answer* is sound in a voice: each sample has the place of the word in the
answer, and the last one of a word says so. Whoever plays it knows which words were played, without a look at any text.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from support.scripted_engines import ActingEngine

from omni_ws.audio.pcm import PCM16_SCALE, Pcm16, Samples
from omni_ws.core.chunks import FinishReason, Modality, OutputModality, Task, Usage, Word
from omni_ws.engine.base import (
    AudioOutput,
    EngineCapabilities,
    Finished,
    GenerationRequest,
    OutputWriter,
    TextOutput,
    TranscriptOutput,
)
from omni_ws.errors import EmptyInput

RATE: Final = 16_000
VOICE_RATE: Final = 24_000
WORD_MS: Final = 240
#: Samples of a word that are enough to know it.
ENOUGH: Final = WORD_MS * RATE // 2000
#: Loud enough to be speech: a cough, which is no word, and what a listener says who wants the speaker to go on. Each
#: has a number of its own.
FIRST_COUGH, FIRST_ACKNOWLEDGEMENT = 7000, 8000
ACKNOWLEDGED: Final = "Yeah."
#: The number of the first word of a user, and how many there are. All sounds are within 12 dB, so none is taken for one
#: from far away.
FIRST_WORD, WORDS = 9000, 18_000
#: What an interim transcript has beyond the words that were said: nobody may take it for settled.
DOUBT: Final = "perhaps"
#: The samples of a character in the voice without word times.
CHARACTER: Final = VOICE_RATE // 12
#: A voice with the times of words, and one without, of which all characters take the same time.
TIMED, UNTIMED = "timed", "untimed"

_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"
_SYLLABLES: Final = [consonant + vowel for consonant in _CONSONANTS for vowel in _VOWELS]


def spelled(number: int) -> str:
    """A word for a number, of three syllables or more."""
    syllables: list[str] = []
    while number or len(syllables) < 3:
        number, syllable = divmod(number, len(_SYLLABLES))
        syllables.append(_SYLLABLES[syllable])
    return "".join(syllables)


@dataclass(frozen=True, slots=True)
class Given:
    """What the model was given: the history, and the user's message."""

    request_id: str
    messages: tuple[tuple[str, str], ...]


class Scenes:
    """What the engines know of each conversation: its chance, what the model was given in it, and what it answered."""

    def __init__(self, seed: str) -> None:
        self._seed = seed
        self._numbers: dict[str, int] = {}
        self._chances: dict[tuple[str, str], random.Random] = {}
        self._spoken = 0
        self.given: defaultdict[str, list[Given]] = defaultdict(list)
        #: The numbers of the sounds in the audio of each request, by conversation.
        self.sounds: defaultdict[str, dict[str, dict[int, int]]] = defaultdict(dict)
        #: The words of each answer, by its request.
        self.answers: dict[str, list[str]] = {}

    def begin(self, conversation: str, number: int) -> None:
        self._numbers[conversation] = number

    def chance(self, request: GenerationRequest, role: str) -> random.Random:
        key = (request.conversation or "", role)
        if key not in self._chances:
            self._chances[key] = random.Random(f"{self._seed} {self._numbers.get(key[0])} {role}")
        return self._chances[key]

    def next_words(self, count: int) -> list[str]:
        """Words of an answer, that no other has. They end in a consonant, and those of users do not."""
        self._spoken += count
        return [spelled(number) + "n" for number in range(self._spoken - count, self._spoken)]


class CodedEars(ActingEngine):
    """An ASR: it takes a while after the end of its input, and now and then longer than a final waits for it."""

    def __init__(self, scenes: Scenes) -> None:
        super().__init__("ears")
        self._scenes = scenes
        self._able = EngineCapabilities(
            input_modalities=frozenset({Modality.AUDIO}),
            output_modalities=frozenset({OutputModality.TEXT, OutputModality.TRANSCRIPT}),
            tasks=frozenset({Task.TRANSCRIBE}),
            extend=True,
            languages=frozenset({"en"}),
        )

    async def act(self, request: GenerationRequest, out: OutputWriter) -> None:
        chance = self._scenes.chance(request, "ears")
        heard: dict[int, int] = {}
        self._scenes.sounds[request.conversation or ""][request.request_id.removesuffix("-asr")] = heard
        samples, told = 0, 0
        async for chunk in request.input:
            piece = np.frombuffer(chunk.payload, "<i2")
            samples += len(piece)
            before = len(heard)
            for number, count in zip(*np.unique(piece[piece >= FIRST_COUGH], return_counts=True), strict=True):
                heard[int(number)] = heard.get(int(number), 0) + int(count)
            words = _words(heard)
            if len(heard) > before and words[told:]:
                if len(words) > told + 2 and chance.random() < 0.2:
                    out.write(TranscriptOutput(_joined(words[told:-1], told)))
                    await out.drain()
                    told = len(words) - 1
                elif chance.random() < 0.3:
                    out.write(TranscriptOutput(_joined([*words[told:], DOUBT], told), interim=True))
                    await out.drain()
        if not samples:
            raise EmptyInput("no audio")
        match chance.random():
            case share if share < 0.75:
                await asyncio.sleep(chance.uniform(0.01, 0.4))
            case share if share < 0.93:
                await asyncio.sleep(chance.uniform(0.4, 2.5))
            case _:
                await asyncio.sleep(chance.uniform(2.5, 6))
        words = _words(heard)
        while words[told:]:
            upto = chance.randint(told + 1, len(words)) if chance.random() < 0.3 else len(words)
            out.write(TranscriptOutput(_joined(words[told:upto], told)))
            await out.drain()
            told = upto
        out.write(Finished(FinishReason.STOP, Usage(input_audio_ms=samples * 1000 // RATE)))


def _words(heard: dict[int, int]) -> list[str]:
    known = [number for number, count in heard.items() if count >= ENOUGH and number >= FIRST_ACKNOWLEDGEMENT]
    return [ACKNOWLEDGED if number < FIRST_WORD else spelled(number - FIRST_WORD) for number in known]


def coded_probability(samples: Samples) -> float:
    """Return what the judge of short sounds would: 0 for words, 1 for coughs and acknowledgements."""
    return float(np.max(samples, initial=0) * PCM16_SCALE < FIRST_WORD)


def _joined(words: list[str], told: int) -> str:
    return (" " if told else "") + " ".join(words)


class ScenicModel(ActingEngine):
    """An LLM: it notes what it is given, and answers with words of its own, quickly or not."""

    def __init__(self, scenes: Scenes) -> None:
        super().__init__(
            "scenic",
            input_modalities=frozenset({Modality.TEXT}),
            output_modalities=frozenset({OutputModality.TEXT}),
            tasks=frozenset({Task.CHAT}),
            voices=(),
            speech_in_history=False,
        )
        self._scenes = scenes

    async def act(self, request: GenerationRequest, out: OutputWriter) -> None:
        chance = self._scenes.chance(request, "model")
        read = b"".join([chunk.payload async for chunk in request.input]).decode()
        history = [(message.role, message.text) for message in request.history]
        self._scenes.given[request.conversation or ""].append(Given(request.request_id, (*history, ("user", read))))
        said = self._scenes.answers[request.request_id] = []
        await asyncio.sleep(chance.choice([0.02, chance.uniform(0.1, 1.5)]))
        pace_sec = chance.choice([0.0, 0.03, 0.1, 0.5])
        for word in _punctuated(self._scenes.next_words(chance.randint(2, 30)), chance):
            said.append(word)
            output = TextOutput(word if len(said) == 1 else f" {word}")
            out.write(output)
            await out.drain()
            if pace_sec:
                await asyncio.sleep(pace_sec)
        out.write(Finished(FinishReason.STOP, Usage()))


def _punctuated(words: list[str], chance: random.Random) -> Iterator[str]:
    begins = True
    for index, word in enumerate(words):
        mark = "." if index == len(words) - 1 else chance.choice(["", "", "", ",", "."])
        yield (word.capitalize() if begins else word) + mark
        begins = mark == "."


class CodedVoice(ActingEngine):
    """A TTS: it says each word once that is complete."""

    def __init__(self, scenes: Scenes) -> None:
        super().__init__("voice", voices=(TIMED, UNTIMED), tasks=frozenset({Task.SPEECH}))
        self._scenes = scenes

    async def act(self, request: GenerationRequest, out: OutputWriter) -> None:
        chance = self._scenes.chance(request, "voice")
        say: Callable[[str, int, random.Random], Iterator[tuple[Pcm16, int]]]
        say = _say_at_will if request.voice != UNTIMED else _say_evenly
        place, samples, rest = 0, 0, ""
        async for chunk in _ended(request):
            *whole, rest = (rest + chunk).split(" ")
            for word in whole:
                if not word.rstrip("\0"):
                    continue
                # What ends the text has no blank behind it.
                written = word.rstrip("\0") + ("" if word.endswith("\0") else " ")
                if chance.random() < 0.1:
                    await asyncio.sleep(chance.uniform(0.01, 0.6))
                for sound, length in say(written, place, chance):
                    begin_ms, end_ms = samples * 1000 // VOICE_RATE, (samples + length) * 1000 // VOICE_RATE
                    times = (Word(written.strip(" .,"), begin_ms, end_ms),) if say is _say_at_will else ()
                    samples += len(sound)
                    out.write(AudioOutput(sound, VOICE_RATE, times))
                    await out.drain()
                place += 1
        out.write(Finished(FinishReason.STOP, Usage(output_audio_ms=samples * 1000 // VOICE_RATE)))


async def _ended(request: GenerationRequest) -> AsyncIterator[str]:
    async for chunk in request.input:
        yield chunk.payload.decode()
    yield "\0 "


def _say_at_will(written: str, place: int, chance: random.Random) -> Iterator[tuple[Pcm16, int]]:
    """The sound of a word and the silence behind it, and the length of the first: whole milliseconds."""
    length, gap = (chance.randint(low, high) * VOICE_RATE // 1000 for low, high in ((60, 500), (0, 120)))
    yield np.concatenate((word_sound(place, length), np.zeros(gap, "<i2"))), length


def _say_evenly(written: str, place: int, chance: random.Random) -> Iterator[tuple[Pcm16, int]]:
    length = len(written.rstrip(" .,")) * CHARACTER
    marks = (len(written) * CHARACTER) - length
    yield np.concatenate((word_sound(place, length), np.zeros(marks, "<i2"))), length


def word_sound(place: int, length: int) -> Pcm16:
    """The sound of a word of an answer."""
    sound = np.full(length, 2 * place + 2, "<i2")
    sound[-1] += 1
    return sound
