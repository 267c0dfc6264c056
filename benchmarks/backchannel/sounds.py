"""The sounds on which the classifier of short sounds is trained and judged: spoken by voices, and made.

Voices say hums, acknowledgements and words that mean something; hums, laughs, coughs and clicks are also made of
harmonics and noise. Spoken sounds are kept in a folder, since Kokoro takes a second for each.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from benchmarks.speech.rendered import Rendering, keep
from omni_ws.audio.pcm import Pcm16, Samples, pcm16_from_samples, resampled, samples_from_pcm16
from omni_ws.audio.vad import SAMPLE_RATE
from omni_ws.engine.tts.espeak import (
    Espeak,
    WordTimes,
)
from omni_ws.engine.tts.neural import (
    Alphabet,
    Hibari,
    HibariReader,
    Kokoro,
)
from omni_ws.engine.tts.synthesiser import Speak
from omni_ws.weights import fetched_folder

#: Kokoro's voices for judging at the end, which ``benchmarks/manners`` uses, too; and those by which training is
#: chosen. The others train.
JUDGING: Final = ("af_heart", "af_nova", "am_michael", "am_puck", "bf_emma", "bm_george")
CHOOSING: Final = ("af_bella", "am_fenrir", "bf_lily", "bm_fable", "if_sara")
HIBARI: Final = "hibari"
#: Voices of espeak-ng: a mark, an accent and a timbre.
_ESPEAK: Final = "espeak:"
_ACCENTS: Final = ("en-US", "en", "en-GB-scotland", "en-GB-x-rp", "en-GB-x-gbclan", "en-GB-x-gbcwmd", "en-US-nyc")
_TIMBRES: Final = (
    *(
        "",
        "+m1",
        "+m2",
        "+m3",
        "+m4",
        "+m6",
        "+m7",
        "+f1",
        "+f2",
        "+f3",
        "+f4",
        "+Alex",
        "+Alicia",
        "+Andrea",
        "+Denis",
    ),
    *("+Hugo", "+Lee", "+Mario", "+adam", "+anika", "+belinda", "+edward", "+ian", "+linda", "+steph", "+klatt2"),
)
_TIMBRES_FOR_CHOOSING: Final = ("+m5", "+m8", "+f5", "+Annie", "+Michael", "+john")
_PITCH: Final = 3
_UTF8_PHONEMES: Final = 0x1101

_TEXTS: Final = tomllib.loads(Path(__file__).with_name("texts.toml").read_text(encoding="utf-8"))
HUMS: Final[Sequence[str]] = _TEXTS["hums"]
ESPEAK_HUMS: Final[Sequence[str]] = _TEXTS["espeak_hums"]
ACKNOWLEDGEMENTS: Final[Sequence[str]] = _TEXTS["acknowledgements"]
SENTENCES: Final[Sequence[str]] = _TEXTS["sentences"]
#: Words that mean something: those of training, and those that are only for choosing and judging.
TRAINED_WORDS: Final = tuple(each for place, each in enumerate(_TEXTS["words"]) if place % 3 < 2)
OTHER_WORDS: Final = tuple(each for place, each in enumerate(_TEXTS["words"]) if place % 3 == 2)

#: What a sound is; the first three are backchannels.
HUM, ACKNOWLEDGEMENT, WORDLESS, WORDS = "hum", "acknowledgement", "wordless", "words"


@dataclass(frozen=True, slots=True)
class Saying:
    """What is to be said: a text, or phonemes if it is a hum, by a voice, at a speed."""

    kind: str
    text: str
    voice: str
    speed: float

    @property
    def name(self) -> str:
        key = f"{self.kind}|{self.text}|{self.voice}|{self.speed:.2f}"
        return f"{self.kind}-{self.voice}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.npy"


@dataclass(frozen=True, slots=True)
class Part:
    """Those who speak in a part of the sounds, what they say, and how many sayings of each kind of voice there are."""

    voices: Sequence[str]
    words: Sequence[str]
    count: int
    espeak_timbres: Sequence[str] = ()
    espeak_count: int = 0

    def sayings(self, seed: int) -> Iterator[Saying]:
        """Yield all sayings in random order, the slow voices first."""
        random = np.random.default_rng(seed)
        for _ in range(self.count):
            yield self._drawn(str(random.choice(self.voices)), random, hums=HUMS)
        for _ in range(self.espeak_count):
            voice = f"{_ESPEAK}{random.choice(_ACCENTS)}{random.choice(self.espeak_timbres)}"
            yield self._drawn(voice, random, hums=ESPEAK_HUMS)

    def _drawn(self, voice: str, random: np.random.Generator, *, hums: Sequence[str]) -> Saying:
        speed, draw = round(float(random.uniform(0.75, 1.35)), 2), random.random()
        if draw < 0.2:
            return Saying(HUM, str(random.choice(hums)), voice, speed)
        if draw < 0.5:
            return Saying(ACKNOWLEDGEMENT, str(random.choice(ACKNOWLEDGEMENTS)), voice, speed)
        words = SENTENCES if random.random() < 0.15 else self.words
        return Saying(WORDS, str(random.choice(words)), voice, speed)


def parts(kokoro: Sequence[str]) -> dict[str, Part]:
    """Return the parts by name, for these voices of Kokoro."""
    training = [voice for voice in kokoro if voice not in (*JUDGING, *CHOOSING)]
    return {
        "training": Part(training, TRAINED_WORDS, 1200, _TIMBRES, 2400),
        "choosing": Part(CHOOSING, OTHER_WORDS, 300, _TIMBRES_FOR_CHOOSING, 300),
        "judging": Part((*JUDGING, HIBARI), OTHER_WORDS, 300),
    }


class Speakers:
    """Kokoro, hibari and espeak-ng, each loaded when it first speaks. What they say is kept in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def has(self, saying: Saying) -> bool:
        """Return whether a saying is kept, or costs little to speak."""
        return saying.voice.startswith(_ESPEAK) or (self._folder / saying.name).exists()

    def said(self, saying: Saying) -> Samples:
        """Return what a saying sounds like, at 16 kHz, without the silence at both ends."""
        file = self._folder / saying.name
        keep(file, lambda: self._rendered(saying))
        return trimmed(samples_from_pcm16(np.load(file)))

    def _rendered(self, saying: Saying) -> Pcm16:
        samples, rate = self._spoken(saying)
        return pcm16_from_samples(resampled(samples, rate, SAMPLE_RATE, "HQ"))

    def _spoken(self, saying: Saying) -> tuple[Samples, int]:
        if saying.voice.startswith(_ESPEAK):
            return self._by_espeak(saying)
        pieces = self._alphabet.pieces([self._alphabet.word(None, saying.text)])
        if saying.kind != HUM:
            pieces = self._reader.pieces(saying.text)
        ids = next(iter(pieces)).ids
        if saying.voice == HIBARI:
            return self._hibari._samples(self._hibari._network, self._hibari._outputs, ids, saying.speed)[0], 24_000
        styles = np.fromfile(self._kokoro._files[saying.voice], np.float32).reshape(-1, 1, 256)
        return self._kokoro._samples(ids, styles, saying.speed, onnxruntime.RunOptions())[0], 24_000

    def _by_espeak(self, saying: Saying) -> tuple[Samples, int]:
        espeak, heard = self._espeak, Rendering()
        espeak._identifiers[saying.voice] = f"gmw/{saying.voice.removeprefix(_ESPEAK)}".encode()
        espeak._espeak.espeak_SetParameter(_PITCH, 20 + round(100 * saying.speed) % 61, 0)
        if saying.kind != HUM:
            espeak.speak(Speak(0, saying.voice, saying.speed, saying.text), heard)
        else:
            espeak.speak(Speak(0, saying.voice, saying.speed, "."), Rendering())  # chooses the voice and the speed
            espeak._listener, espeak._times = heard, WordTimes("")
            phonemes = f"[[{saying.text}]]\0".encode()
            espeak._espeak.espeak_Synth(phonemes, len(phonemes), 0, 1, 0, _UTF8_PHONEMES, None, None)
        return heard.samples, heard.rate

    @cached_property
    def voices(self) -> Sequence[str]:
        """The voices of Kokoro, those of English first."""
        names = {file.stem for folder in self._folders for file in folder.glob("*.bin")}
        return sorted(names, key=lambda name: (name[0] not in "ab", name))

    @cached_property
    def _folders(self) -> Sequence[Path]:
        folders = [fetched_folder("kokoro"), fetched_folder("kokoro-languages")]
        return [each for each in folders if each is not None]

    @cached_property
    def _kokoro(self) -> Kokoro:
        return Kokoro(*self._folders)

    @cached_property
    def _hibari(self) -> Hibari:
        folder = fetched_folder("hibari")
        if folder is None:
            raise SystemExit("the voice hibari is not fetched: omni-ws weights fetch hibari")
        return Hibari(folder / "hibari.onnx")

    @cached_property
    def _espeak(self) -> Espeak:
        return Espeak()

    @cached_property
    def _reader(self) -> HibariReader:
        return HibariReader()

    @cached_property
    def _alphabet(self) -> Alphabet:
        return Alphabet()


def trimmed(samples: Samples) -> Samples:
    """Return a sound from its first to its last 10 ms within 40 dB of the loudest."""
    frames = samples[: len(samples) // 160 * 160].reshape(-1, 160)
    levels = (frames**2).mean(axis=1)
    loud = np.flatnonzero(levels > levels.max(initial=0) * 1e-4)
    return samples[160 * loud[0] : 160 * (loud[-1] + 1)] if len(loud) else samples


# Sounds that are made


def made(random: np.random.Generator) -> Samples:
    """Return a hum, a laugh, a cough, a breath or a click."""
    kinds = (_hum, _hum, _hum, _laugh, _laugh, _cough, _breath, _click)
    return trimmed(kinds[random.integers(len(kinds))](random))


def _voiced(
    pitch: NDArray[np.float64], formants: Sequence[tuple[float, float]], random: np.random.Generator
) -> Samples:
    """Return a sound with a pitch for each sample, of harmonics under the resonances (hertz, width) of a mouth."""
    phase = 2 * np.pi * np.cumsum(pitch) / SAMPLE_RATE + random.uniform(0, 2 * np.pi)
    mean, tilt = float(pitch.mean()), random.uniform(0.8, 1.8)
    sound = np.zeros(len(pitch))
    for harmonic in range(1, int(min(40, 7000 / mean)) + 1):
        hertz = harmonic * mean
        gain = sum(
            1 / (1 + ((hertz - centre) / width) ** 2) / (1 + place) for place, (centre, width) in enumerate(formants)
        )
        sound += (gain + 0.003) * harmonic**-tilt * np.sin(harmonic * phase)
    return np.asarray(sound / np.abs(sound).max(), np.float32)


def _pitch(count: int, random: np.random.Generator, low: float = 80, high: float = 280) -> NDArray[np.float64]:
    """Return a pitch that goes through three random points, and trembles a little."""
    base = random.uniform(low, high)
    points = base * np.exp(random.normal(0, 0.12, 3))
    curve = np.interp(np.linspace(0, 2, count), range(3), points)
    return curve * (1 + 0.01 * np.sin(np.linspace(0, random.uniform(10, 40), count)))


def _swell(count: int, random: np.random.Generator) -> NDArray[np.float64]:
    rise, fall = random.uniform(0.05, 0.4), random.uniform(0.1, 0.6)
    place = np.linspace(0, 1, count)
    return np.minimum(1, np.minimum(place / rise, (1 - place) / fall))


def _mouth(random: np.random.Generator, *, closed: bool) -> list[tuple[float, float]]:
    if closed:
        return [(random.uniform(200, 320), 80), (random.uniform(900, 1300), 200), (random.uniform(2000, 2600), 300)]
    return [(random.uniform(450, 800), 100), (random.uniform(1000, 1500), 150), (random.uniform(2200, 2800), 250)]


def _noise(count: int, random: np.random.Generator, low: float, high: float) -> NDArray[np.float64]:
    spectrum = np.fft.rfft(random.normal(size=count))
    hertz = np.fft.rfftfreq(count, 1 / SAMPLE_RATE)
    sound = np.asarray(np.fft.irfft(spectrum * ((hertz > low) & (hertz < high)), count))
    return np.asarray(sound / (np.abs(sound).max() + 1e-9))


def _hum(random: np.random.Generator) -> Samples:
    """Return "mm", "mm-hm" or "uh-huh"."""
    syllables = int(random.choice([1, 2, 2]))
    counts = [int(SAMPLE_RATE * random.uniform(0.1, 0.38)) for _ in range(syllables)]
    gap, closed = int(SAMPLE_RATE * random.uniform(0.0, 0.1)), random.random() < 0.65
    pitch = np.concatenate([_pitch(sum(counts) + gap, random)])
    sound = _voiced(pitch, _mouth(random, closed=closed), random)
    level = np.full(len(sound), random.uniform(0.0, 0.15))
    start = 0
    for count in counts:
        level[start : start + count] += random.uniform(0.5, 1) * _swell(count, random)
        start += count + gap
    level = np.convolve(level, np.full(320, 1 / 320), "same")
    breath = _noise(len(sound), random, 400, 5000) * random.uniform(0.005, 0.08)
    return np.asarray(level * sound + breath * level.max(), np.float32)


def _laugh(random: np.random.Generator) -> Samples:
    """Return "ha ha ha", with breath between."""
    parts, base = list[NDArray[np.float64]](), random.uniform(120, 380)
    mouth = _mouth(random, closed=random.random() < 0.2)
    for place in range(int(random.integers(2, 7))):
        count, breath = int(SAMPLE_RATE * random.uniform(0.06, 0.13)), int(SAMPLE_RATE * random.uniform(0.04, 0.12))
        tone = _voiced(_pitch(count, random, base * 0.9, base * 1.1), mouth, random) * _swell(count, random)
        parts += [
            tone * 0.93**place,
            _noise(breath, random, 500, 6000) * random.uniform(0.05, 0.4) * _swell(breath, random),
        ]
    return np.asarray(np.concatenate(parts), np.float32)


def _cough(random: np.random.Generator) -> Samples:
    """Return one cough or two: a burst, and a hoarse end."""
    parts = list[NDArray[np.float64]]()
    for _ in range(int(random.choice([1, 2]))):
        count = int(SAMPLE_RATE * random.uniform(0.15, 0.4))
        fall = np.exp(-np.linspace(0, random.uniform(3, 8), count))
        hoarse = _voiced(_pitch(count, random, 90, 200), _mouth(random, closed=False), random) * random.uniform(0, 0.5)
        noise = _noise(count, random, random.uniform(100, 600), random.uniform(3000, 8000))
        pause = np.zeros(int(SAMPLE_RATE * random.uniform(0.05, 0.2)))
        parts += [fall * (noise + hoarse * np.linspace(0, 1, count)), pause]
    return np.asarray(np.concatenate(parts), np.float32)


def _breath(random: np.random.Generator) -> Samples:
    count = int(SAMPLE_RATE * random.uniform(0.2, 0.9))
    return np.asarray(
        _noise(count, random, random.uniform(200, 1500), random.uniform(3000, 8000)) * _swell(count, random), np.float32
    )


def _click(random: np.random.Generator) -> Samples:
    """Return one click or some: of a tongue, a key, a cup."""
    sound = np.zeros(int(SAMPLE_RATE * random.uniform(0.1, 0.5)))
    for _ in range(int(random.integers(1, 4))):
        count = int(SAMPLE_RATE * random.uniform(0.005, 0.05))
        start = int(random.integers(0, len(sound) - count))
        sound[start : start + count] += _noise(count, random, 300, 8000) * np.exp(-np.linspace(0, 6, count))
    return np.asarray(sound, np.float32)
