"""The speech of callers, rendered once and kept in the user's cache; and word errors in what was heard of an answer.

Voices run in processes of their own, and the recogniser in a thread, all at low priority.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

import numpy as np

from omni_ws.audio.pcm import NO_SAMPLES, SampleLayout, Samples, as_samples, mixed_down, resampled, samples_from_bytes
from omni_ws.caller.live_caller import (
    MIC_RATE,
    MIC_TICK,
    levelled,
)
from omni_ws.caller.script import frame_levels, loud_part
from omni_ws.client.audio import UnreadableAudio, read_wav
from omni_ws.config.model import VoiceChoice
from omni_ws.config.values import user_cache_folder
from omni_ws.engine.spoken.speakable_text import spoken_form
from omni_ws.engine.tts.voice_process import VoiceProcess, espeak_is_here
from omni_ws.errors import EngineFailed, InvalidValue
from omni_ws.scenarios.form import ScenarioUnusable
from omni_ws.weights import (
    fetched_file,
    fetched_folder,
    pinned_weights,
)

#: The mean power of the loud frames of rendered speech, in dBFS.
LEVEL_DB: Final = -22.0
#: What is kept of a rendering around its sound, in ticks.
_BEFORE, _BEHIND = 2, 3
_NICE: Final = 10
_KINDS: Final = {
    "hibari": VoiceChoice.HIBARI,
    "kokoro": VoiceChoice.KOKORO,
    "espeak-ng": VoiceChoice.ESPEAK,
}
_PACKAGES: Final = {"hibari": "hibari-tts", "kokoro": "hibari-tts", "espeak-ng": "espeakng-loader"}
#: The longest piece of sound that the recogniser is given, and where the place to cut it is looked for, in seconds.
_LONGEST_SEC, _CUT_FROM_SEC = 25, 15


@dataclass(frozen=True, slots=True)
class CallersVoice:
    """A voice of callers: its synthesiser, and its name there; None is the synthesiser's first voice."""

    kind: str
    name: str | None = None

    @classmethod
    def parse(cls, text: str) -> CallersVoice:
        """Parse ``hibari``, ``kokoro[:NAME]`` or ``espeak-ng[:NAME]``. Raises ScenarioUnusable."""
        kind, _, name = text.partition(":")
        if kind not in _KINDS:
            raise ScenarioUnusable(f"no voice {text!r}: voices are hibari, kokoro[:NAME] and espeak-ng[:NAME]")
        return cls(kind, name or None)

    @property
    def text(self) -> str:
        return self.kind if self.name is None else f"{self.kind}:{self.name}"

    @property
    def release(self) -> str:
        """The versions of the synthesiser and its model, on which the rendered speech depends."""
        try:
            found = version(_PACKAGES[self.kind])
        except PackageNotFoundError:
            found = "none"
        if self.kind == "espeak-ng":
            return found
        return " ".join([found, *(file.sha256 for file in pinned_weights()[self.kind].files)])


def best_voice() -> CallersVoice:
    """Return the voice for callers that name none. Raises ScenarioUnusable if there is no voice at all."""
    if fetched_folder("kokoro") is not None:
        return CallersVoice("kokoro", "af_heart")
    if fetched_file("hibari") is not None:
        return CallersVoice("hibari")
    if espeak_is_here():
        return CallersVoice("espeak-ng")
    raise ScenarioUnusable("no voice for callers: `omni-ws weights fetch hibari` fetches one, or install espeak-ng")


class CallersSpeech:
    """Renders and caches the speech of callers. A voice's process starts at the first text that is not in the cache."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or user_cache_folder() / "speech"
        self._voices: dict[str, VoiceProcess] = {}
        self._rendering = asyncio.Lock()
        #: What was said or is about to be, so that no file is read while a call goes on.
        self._known: dict[tuple[CallersVoice, str], Samples] = {}
        self._recordings: dict[Path, Samples] = {}
        #: How many texts were rendered, and not found in the cache.
        self.rendered = 0

    async def render(self, said: Iterable[tuple[CallersVoice, str]]) -> None:
        """Load the speech of each text, rendered first if it is not in the cache. Raises ScenarioUnusable."""
        for voice, text in said:
            await self.of(voice, text)

    async def of(self, voice: CallersVoice, text: str) -> Samples:
        """Return the speech of a text, at 16 kHz. Raises ScenarioUnusable."""
        if (known := self._known.get((voice, text))) is not None:
            return known
        file = self._file(voice, text)
        async with self._rendering:
            if not file.exists():
                await asyncio.to_thread(_keep, file, await self._render(voice, text))
                self.rendered += 1
        samples = np.asarray(await asyncio.to_thread(np.load, file), np.float32)
        self._known[voice, text] = samples
        return samples

    def recording(self, path: Path) -> Samples:
        """Return a recording as mono at 16 kHz, which is read once and kept. Raises ScenarioUnusable."""
        if path not in self._recordings:
            self._recordings[path] = recording(path)
        return self._recordings[path]

    def _file(self, voice: CallersVoice, text: str) -> Path:
        key = "\n".join((voice.text, voice.release, text))
        return self._folder / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.npy"

    async def _render(self, voice: CallersVoice, text: str) -> Samples:
        parts: list[Samples] = []
        try:
            speaker = self._voices.get(voice.kind)
            if speaker is None:
                # What is said is kept before it is needed, however busy the machine is.
                speaker = VoiceProcess(_KINDS[voice.kind], may_stutter=True)
                await speaker.start()
                self._voices[voice.kind] = speaker
                if (pid := speaker.worker_pid) is not None:
                    with suppress(OSError):
                        os.setpriority(os.PRIO_PROCESS, pid, _NICE)
            rate = MIC_RATE
            async for output in speaker.say(text, voice=voice.name):
                rate = output.sample_rate
                parts.append(as_samples(output.samples))
        except (EngineFailed, InvalidValue) as error:
            raise ScenarioUnusable(f"no voice {voice.text}: {error.message}") from None
        samples = resampled(np.concatenate([NO_SAMPLES, *parts]), rate, MIC_RATE)
        try:
            return _trimmed(samples)
        except ValueError:
            raise ScenarioUnusable(f"{voice.text} makes no sound of {text!r}") from None

    async def close(self) -> None:
        """End the processes of the voices."""
        for voice in self._voices.values():
            await voice.stop()
        self._voices.clear()


def _trimmed(samples: Samples) -> Samples:
    """Return speech at LEVEL_DB, without the silence around it. Raises ValueError if there is no sound."""
    first, end = loud_part(frame_levels(samples, MIC_TICK))
    begin = max(0, (first - _BEFORE) * MIC_TICK)
    speech = levelled(samples, LEVEL_DB)[begin : (end + _BEHIND) * MIC_TICK]
    return np.clip(speech, -1, 1)


def _keep(file: Path, samples: Samples) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(f".{os.getpid()}.npy")
    np.save(part, samples)
    part.replace(file)


def recording(path: Path) -> Samples:
    """Read a WAV file as mono at 16 kHz. Raises ScenarioUnusable."""
    try:
        audio = read_wav(path)
    except (OSError, UnreadableAudio) as error:
        raise ScenarioUnusable(f"{path}: {error.strerror if isinstance(error, OSError) else error}") from None
    samples = mixed_down(samples_from_bytes(audio.samples, SampleLayout.S16), audio.channels)
    return resampled(samples, audio.sample_rate, MIC_RATE)


def end_of_speech(samples: Samples) -> tuple[int, int]:
    """Return the range [first, end) of the microphone's ticks that contains the speech; (0, 0) without sound."""
    try:
        return loud_part(frame_levels(samples, MIC_TICK))
    except ValueError:
        return 0, 0


class Ears:
    """A recogniser of English, for what callers heard. It is loaded at its first use."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "ears", initializer=_be_nice)
        self._model: object = None

    async def words(self, samples: Samples) -> str:
        """Return the words in audio at 16 kHz. Raises ScenarioUnusable if there is no recogniser."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._words, samples)

    def _words(self, samples: Samples) -> str:
        from omni_ws.engine.asr.whisper import (
            DEFAULT_MODEL,
            WhisperModel,
            whisper_folder,
        )

        if not isinstance(self._model, WhisperModel):
            try:
                self._model = WhisperModel(whisper_folder(DEFAULT_MODEL))
            except EngineFailed as error:
                raise ScenarioUnusable(error.message) from None
        return " ".join(self._model.transcribe(part, words=False).text.strip() for part in _parts(samples))

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


def _be_nice() -> None:
    """Lower the priority of this thread, and of those that it starts (Linux)."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, _NICE)


def _parts(samples: Samples) -> list[Samples]:
    """Cut audio at quiet places into parts that are short enough for the recogniser."""
    parts: list[Samples] = []
    while len(samples) > _LONGEST_SEC * MIC_RATE:
        levels = frame_levels(samples[_CUT_FROM_SEC * MIC_RATE : _LONGEST_SEC * MIC_RATE], MIC_TICK)
        cut = _CUT_FROM_SEC * MIC_RATE + int(np.argmin(levels)) * MIC_TICK
        parts.append(samples[:cut])
        samples = samples[cut:]
    return [*parts, samples] if len(samples) >= MIC_TICK else parts


# Word errors: what was said against what was heard, different spellings of the same words made equal.


#: Spellings of one word.
_EQUAL: Final = {
    "mr": "mister",
    "mrs": "missus",
    "missis": "missus",
    "dr": "doctor",
    "st": "saint",
    "ok": "okay",
    "miz": "miss",
    "metre": "meter",
    "metres": "meters",
    "colour": "color",
    "favour": "favor",
    "honour": "honor",
    "grey": "gray",
    "o": "zero",
    "oh": "zero",
    "ooh": "zero",
    "cheque": "check",
    "programme": "program",
    "til": "till",
}
#: Words written as one or apart: "voice mail", "P.B.X.". So many at most.
_MOST_JOINED: Final = 4
#: Shorter ones are not read digit by digit.
_NUMBERS: Final = re.compile(r"\d{3,}")
_NOT_SPOKEN: Final = re.compile(r"[^a-z' ]+")
#: "one hundred and five" is "hundred five".
_AND: Final = re.compile(r"\b(hundred|thousand|million) and (?=[a-z])")
_ONE: Final = re.compile(r"\b(?:one|a) (?=(?:hundred|thousand|million)(?:th)?\b)")


@dataclass(frozen=True, slots=True)
class WordErrors:
    """The word errors of a recognised text.

    ``wrong`` is their number, ``words`` the number of words that were said. ``differences`` has each error, such as
    "clubs → clothes", "+you" or "-the".
    """

    wrong: int
    words: int
    differences: tuple[str, ...] = ()

    @property
    def rate(self) -> float:
        return self.wrong / self.words if self.words else float(self.wrong > 0)


def total(errors: Iterable[WordErrors]) -> WordErrors:
    wrong = words = 0
    differences: tuple[str, ...] = ()
    for each in errors:
        wrong, words, differences = wrong + each.wrong, words + each.words, differences + each.differences
    return WordErrors(wrong, words, differences)


def word_errors(said: str, heard: str, *, language: str = "en") -> WordErrors:
    """Return the fewest substitutions, insertions and deletions that turn ``said`` into ``heard``.

    Numbers are compared as they are read aloud. In English, recognised digits are right if any reading fits: as a
    number, as a year, or digit by digit. Case, punctuation, and whether words are joined are ignored.
    """
    if language != "en":
        wanted = _words_of(said, language)
        return min((compared(wanted, words) for words in _readings_of(heard, language)), key=lambda found: found.wrong)
    wanted = spoken_words(said)
    return min((compared(wanted, words) for words in _readings(heard)), key=lambda errors: errors.wrong)


def spoken_words(text: str) -> list[str]:
    """Return the words of an English text as they are read aloud: lower case, numbers in words, no punctuation."""
    text = re.sub(r"(?<=[A-Za-z])\.(?=[A-Za-z]\b)", " ", text.replace("’", "'"))  # P.B.X.
    read = "".join(piece.text for piece in spoken_form(text))
    words = _ONE.sub("", _AND.sub(r"\1 ", " ".join(_NOT_SPOKEN.sub(" ", read.lower()).split()))).split()
    stripped = (word.strip("'") for word in words)
    return [_EQUAL.get(word, word) for word in stripped if word]


def _readings(heard: str) -> Iterator[list[str]]:
    yield spoken_words(heard)
    # A time of day, as "3:30".
    yield spoken_words(re.sub(r"\b(\d{1,2})\.(\d\d)(?!\d)", r"\1:\2", heard))
    if _NUMBERS.search(heard):
        yield spoken_words(_NUMBERS.sub(lambda number: " ".join(number[0]), heard))
        # Not a year: "1905" may have been "one thousand nine hundred five"; and years as two numbers.
        yield spoken_words(re.sub(r"\b(\d{1,3})(\d{3})\b", r"\1,\2", heard))
        yield spoken_words(re.sub(r"\b(\d\d)(\d\d)\b", r"\1 \2", heard))


def _words_of(text: str, language: str) -> list[str]:
    """Return the words of a text in a language other than English, as they are read aloud."""
    read = "".join(piece.text for piece in spoken_form(text.replace("’", "'"), language))
    return re.sub(r"[^\w']+|_", " ", read.lower().replace("-", " ")).split()


#: A recogniser writes amounts with the name of the currency, and times in other ways.
_NAMED_MONEY: Final = re.compile(r"(\d+,\d\d) (?:euros?|Euro)\b")
_NAMED_TIME: Final = re.compile(r"\b(\d{1,2})\.(\d\d)\b")


def _readings_of(heard: str, language: str) -> Iterator[list[str]]:
    yield _words_of(heard, language)
    yield _words_of(_NAMED_MONEY.sub(r"\1 €", heard), language)
    yield _words_of(_NAMED_TIME.sub(r"\1:\2", heard), language)


def compared(said: Sequence[str], heard: Sequence[str]) -> WordErrors:
    """Return the fewest errors between two texts: edit distance by words, where joining words is no error."""
    rows, columns = len(said) + 1, len(heard) + 1
    cost = [[0] * columns for _ in range(rows)]
    step: list[list[tuple[int, int]]] = [[(0, 0)] * columns for _ in range(rows)]
    for row in range(rows):
        for column in range(columns):
            if row or column:
                cost[row][column], step[row][column] = min(
                    (cost[row - down][column - right] + price, (down, right))
                    for down, right, price in _steps(said, heard, row, column)
                )
    return WordErrors(cost[-1][-1], len(said), tuple(_differences(said, heard, step)))


def _steps(said: Sequence[str], heard: Sequence[str], row: int, column: int) -> Iterator[tuple[int, int, int]]:
    """Yield the edit steps that end at a cell of the table: the words used on either side, and the cost."""
    if row and column:
        yield 1, 1, int(said[row - 1] != heard[column - 1])
        for count in range(2, _MOST_JOINED + 1):
            if count <= row and "".join(said[row - count : row]) == heard[column - 1]:
                yield count, 1, 0
            if count <= column and "".join(heard[column - count : column]) == said[row - 1]:
                yield 1, count, 0
    if row:
        yield 1, 0, 1
    if column:
        yield 0, 1, 1


def _differences(said: Sequence[str], heard: Sequence[str], step: Sequence[Sequence[tuple[int, int]]]) -> list[str]:
    found: list[str] = []
    row, column = len(said), len(heard)
    while row or column:
        down, right = step[row][column]
        wanted, got = said[row - down : row], heard[column - right : column]
        if not got:
            found.append(f"-{wanted[0]}")
        elif not wanted:
            found.append(f"+{got[0]}")
        elif "".join(wanted) != "".join(got):
            found.append(f"{wanted[0]} → {got[0]}")
        row, column = row - down, column - right
    return found[::-1]
