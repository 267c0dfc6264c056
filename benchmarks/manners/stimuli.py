"""What is said and what sounds in the benchmark of manners: made once, kept in the cache, with its times.

Speech is rendered by the voices of the server; those that the classifier of acknowledgements was trained on are not
used. What is said in one breath is rendered by itself, with a comma behind it where the sentence goes on.
"""

from __future__ import annotations

import hashlib
import random
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.speech.rendered import Rendering, keep
from benchmarks.speech.wordless import keyboard, music, quiet_room, silence
from omni_ws.audio.pcm import Samples, resampled
from omni_ws.caller.live_caller import (
    MIC_TICK,
    levelled,
    pink_noise,
)
from omni_ws.caller.script import frame_levels, loud_part
from omni_ws.config.values import user_cache_folder
from omni_ws.engine.tts.neural import Hibari, Kokoro
from omni_ws.engine.tts.synthesiser import Speak, Synthesiser
from omni_ws.weights import pinned_weights, weights_cache

RATE: Final = 16_000
#: The voices of Kokoro that speak, and the small voice; none is one that the classifier was trained on.
SMALL: Final = "hibari"
VOICES: Final = ("af_heart", "am_michael", "bf_emma", "bm_george", "af_nova", "am_puck", SMALL)
#: Levels in dBFS: the mean power of the loud frames.
LEVEL, QUIET, TELEVISION, BABBLE = -22.0, -30.0, -35.0, -38.0
_SEED: Final = 39
#: What is kept of a rendering around its sound.
_BEFORE_MS, _BEHIND_MS = 40, 60


@dataclass(frozen=True, slots=True)
class Stimulus:
    """A sound to say to the server, 16 kHz, with where its speech begins and ends, in milliseconds.

    ``gaps`` are its pauses. ``groups`` are the words between them.
    """

    name: str
    samples: Samples
    onset_ms: float
    end_ms: float
    gaps: tuple[tuple[float, float], ...] = ()
    groups: tuple[str, ...] = ()
    stops: bool = False
    quiet: bool = False


def texts() -> dict[str, list[str]]:
    """What is said, by kind."""
    return _read("sentences.toml")


def _read(file: str) -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name(file).read_text(encoding="utf-8"))


# Rendering


def folder() -> Path:
    """Where rendered speech is kept."""
    return user_cache_folder() / "manners"


def _file(voice: str, text: str) -> Path:
    return folder() / f"{hashlib.sha256(f'{voice} {text}'.encode()).hexdigest()[:20]}.npy"


def render(pairs: Sequence[tuple[str, str]]) -> None:
    """Render each voice and text that is not in the cache yet. Raises WeightsError if a voice cannot be fetched."""
    missing = [pair for pair in dict.fromkeys(pairs) if not _file(*pair).exists()]
    for name in ("kokoro", SMALL):
        of_part = [pair for pair in missing if (pair[0] == SMALL) == (name == SMALL)]
        if not of_part:
            continue
        folder().mkdir(parents=True, exist_ok=True)
        weights = pinned_weights()[name]
        place = weights_cache().fetch(weights)
        voice: Synthesiser = Hibari(place / weights.files[0].name) if name == SMALL else Kokoro(place)
        for number, (speaker, text) in enumerate(of_part):
            if not number % 25:
                print(f"rendering: {number} of {len(of_part)}", file=sys.stderr, flush=True)
            keep(_file(speaker, text), partial(_read_aloud, voice, speaker, text))


def _read_aloud(voice: Synthesiser, speaker: str, text: str) -> Samples:
    speaker = voice.facts.voices[0] if speaker == SMALL else speaker
    rendering = Rendering()
    voice.speak(Speak(0, speaker, 1.0, text), rendering)
    return resampled(rendering.samples, rendering.rate, RATE)


def spoken(voice: str, text: str) -> Samples:
    """Speech from the cache. Raises FileNotFoundError before ``render``."""
    samples: Samples = np.load(_file(voice, text))
    return samples


# From speech to stimuli


def _range_ms(samples: Samples) -> tuple[float, float]:
    first, last = loud_part(frame_levels(samples, MIC_TICK))
    return first * 20.0, last * 20.0


def _stimulus(name: str, samples: Samples, dbfs: float = LEVEL, **fields: Any) -> Stimulus:
    samples = levelled(samples, dbfs)
    onset, end = _range_ms(samples)
    begin = max(0, int(onset) - _BEFORE_MS) * RATE // 1000
    samples = samples[begin : (int(end) + _BEHIND_MS) * RATE // 1000]
    onset, end = _range_ms(samples)
    return Stimulus(name, samples, onset, end, **fields)


def groups_of(text: str) -> list[str]:
    """What a speaker says in one breath each, with the tone of somebody who goes on."""
    groups = [group.strip() for group in text.split("|")]
    return [group if group[-1] in ".,?" else f"{group}," for group in groups]


def with_pauses(voice: str, text: str, pauses_ms: Sequence[int]) -> Stimulus:
    """A sentence with a pause at each | of its text."""
    pieces: list[Samples] = []
    gaps: list[tuple[float, float]] = []
    for number, group in enumerate(groups_of(text)):
        one = _stimulus(group, spoken(voice, group))
        length = sum(map(len, pieces)) * 1000 / RATE
        if pieces:
            # The pause is from sound to sound.
            pause = pauses_ms[(number - 1) % len(pauses_ms)] - _BEFORE_MS - _BEHIND_MS
            pieces.append(np.zeros(pause * RATE // 1000, np.float32))
            gaps.append((length - _BEHIND_MS, length + pause + _BEFORE_MS))
        pieces.append(one.samples)
    whole = np.concatenate(pieces)
    onset, end = _range_ms(whole)
    said = tuple(group.strip(" .,?") for group in groups_of(text))
    return Stimulus(f"{voice}: {text}", whole, onset, end, tuple(gaps), said)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is said in a run: for each stimulus its voice and text, and what makes it of that speech."""

    acknowledgements: list[Planned]
    interruptions: list[Planned]
    pauses: list[Planned]
    wholes: list[Planned]
    dictations: list[Planned]

    @classmethod
    def of(cls, share: float) -> Plan:
        """A share, always the same, of 85 acknowledgements, 88 interruptions, 60 pauses, 24 wholes, 40 dictations."""
        return cls(
            *(_some(all_of(), share) for all_of in (_acknowledgements, _interruptions, _pauses, _wholes, _dictations))
        )

    @classmethod
    def of_others(cls) -> Plan:
        """Other sentences and dictations, each once, by other voices."""
        pauses, wholes, dictations = (
            [
                _by_another_voice(said["voices"][number % len(said["voices"])], text, number)
                for said in _read("other_sentences.toml")["said"]
                for number, text in enumerate(said[kind])
            ]
            for kind in ("pauses", "wholes", "dictations")
        )
        return cls([], [], pauses, wholes, dictations)

    def render(self, kinds: Iterable[str]) -> None:
        """Put the speech of these kinds, names of fields or "news", into the cache if it is not there."""
        wanted = {kind: _NEWS if kind == "news" else _speech(getattr(self, kind)) for kind in kinds}
        render([speech for of_kind in wanted.values() for speech in of_kind])


@dataclass(frozen=True, slots=True)
class Planned:
    """A stimulus to come: made of speech in the cache, or without."""

    speech: tuple[tuple[str, str], ...]
    make: Callable[[], Stimulus]


def _speech(planned: Iterable[Planned]) -> list[tuple[str, str]]:
    return [speech for one in planned for speech in one.speech]


def _some(planned: list[Planned], share: float) -> list[Planned]:
    """A share of them, at least four, always the same: every text once before any is there twice."""
    random.Random(_SEED).shuffle(planned)
    times: Counter[str] = Counter()
    rounds: list[tuple[int, int, Planned]] = []
    for one in planned:
        text = " ".join(text for _, text in one.speech)
        rounds.append((times[text], len(rounds), one))
        times[text] += 1
    rounds.sort(key=lambda each: each[:2])
    return [one for *_, one in rounds[: max(min(4, len(planned)), round(share * len(planned)))]]


def _said(voice: str, text: str, **fields: Any) -> Planned:
    quiet = QUIET if fields.get("quiet") else LEVEL
    name = f"{voice}{', quiet' if fields.get('quiet') else ''}: {text}"
    return Planned(((voice, text),), lambda: _stimulus(name, spoken(voice, text), quiet, **fields))


def _paused(voice: str, text: str, pauses_ms: Sequence[int]) -> Planned:
    speech = tuple((voice, group) for group in groups_of(text))
    return Planned(speech, lambda: with_pauses(voice, text, pauses_ms))


def _acknowledgements() -> list[Planned]:
    """Eleven texts in seven voices, and eight hums."""
    said = [_said(voice, text) for text in texts()["acknowledgements"] for voice in VOICES]
    return said + [Planned((), partial(_hum, number)) for number in range(8)]


def noises_of_the_body() -> list[Stimulus]:
    """Coughs, clicks of the tongue and breaths, made."""
    return [_burst(number) for number in range(8)]


def _interruptions() -> list[Planned]:
    """42 that mean stop, 46 questions and corrections; 20 of all are said quietly."""
    said, found = texts(), list[Planned]()
    for kind in ("stop_words", "interruptions"):
        for text in said[kind]:
            found += [
                _said(voice, text, stops=kind == "stop_words", quiet=(number + len(found)) % 5 == 4)
                for number, voice in enumerate(VOICES)
            ]
    return found + [_said(voice, said["interruptions"][2], quiet=True) for voice in VOICES[:4]]


def _pauses() -> list[Planned]:
    """Sentences with a pause of 500 to 1,200 ms."""
    return [
        _paused(VOICES[(n + k) % 7], text, ((500, 700, 900, 1200, 600)[k], 700))
        for n, text in enumerate(texts()["pauses"])
        for k in range(5)
    ]


def _wholes() -> list[Planned]:
    """Questions without a pause."""
    return [_said(VOICES[(n + 3 * k) % 7], text) for n, text in enumerate(texts()["wholes"]) for k in range(2)]


def _dictations() -> list[Planned]:
    """Numbers, spellings and lists, with pauses of 500 to 1,100 ms between their groups."""
    return [
        _paused(VOICES[(n + 2 * k) % 7], text, ((700, 900), (500, 800), (1100, 700), (900, 600))[k])
        for n, text in enumerate(texts()["dictations"])
        for k in range(4)
    ]


def _by_another_voice(voice: str, text: str, number: int) -> Planned:
    if "|" not in text:
        return _said(voice, text)
    return _paused(voice, text, ((500, 900), (750, 650), (1000, 600), (600, 800))[number % 4])


# What sounds beside the speaker


_READERS: Final = ("bm_george", "af_nova")
_NEWS: Final = [(voice, text) for voice, text in product(_READERS, texts()["news"])]


def television(seconds: float, number: int = 0) -> Samples:
    """A reader of news at -35 dBFS."""
    news = texts()["news"]
    order = news[number % 6 :] + news[: number % 6]
    read = np.concatenate([spoken(_READERS[number % 2], text) for text in order])
    return np.resize(levelled(read, TELEVISION), int(seconds * RATE))


def babble(seconds: float, number: int = 0) -> Samples:
    """Four speakers at once, at -38 dBFS."""
    mixed = sum((television(seconds, other + number) for other in range(4)), np.zeros(int(seconds * RATE), np.float32))
    return levelled(np.asarray(mixed, np.float32), BABBLE)


def surroundings() -> dict[str, Callable[[float], Samples]]:
    """Sounds that are no speech, by name."""
    return {
        "silence": silence,
        "a quiet room": quiet_room,
        "pink noise": _pink,
        "typing": keyboard,
        "music": lambda seconds: levelled(music(seconds), -30.0),
        "doors": _doors,
    }


def _pink(seconds: float) -> Samples:
    return levelled(np.asarray(pink_noise(int(seconds * RATE), np.random.default_rng(_SEED)), np.float32), -45.0)


def _doors(seconds: float) -> Samples:
    """A thud every four seconds, the loudest at -14 dBFS."""
    random_ = np.random.default_rng(_SEED)
    sound = np.zeros(int(seconds * RATE), np.float32)
    time = np.arange(RATE // 2) / RATE
    for at in np.arange(1.0, seconds - 1, 4.0):
        thud = np.sin(2 * np.pi * random_.uniform(60, 110) * time) * np.exp(-time / 0.06)
        thud += 0.3 * random_.normal(0, 1, len(time)) * np.exp(-time / 0.015)
        begin = int(at * RATE)
        sound[begin : begin + len(time)] += (0.28 * thud).astype(np.float32)
    return sound


def _voiced(pitch: NDArray[np.float64], formants: Sequence[tuple[float, float]]) -> NDArray[np.float64]:
    """Harmonics of a pitch (Hz, a sample each) through resonances (Hz, width)."""
    phase = 2 * np.pi * np.cumsum(pitch) / RATE
    sound = np.zeros(len(pitch))
    for harmonic in range(1, 25):
        frequency = harmonic * pitch
        gain = sum(1 / (1 + ((frequency - centre) / width) ** 2) for centre, width in formants)
        sound += gain * np.sin(harmonic * phase) / harmonic**0.5 * (frequency < RATE / 2.2)
    return sound


def _hum(number: int) -> Stimulus:
    """ "Mm-hm" or "uh-huh" with the mouth closed or half open: two notes with a breath between them."""
    random_ = np.random.default_rng(100 + number)
    base, closed = random_.uniform(95, 230), number % 2 == 0
    formants = ((250, 80),) if closed else ((600, 120), (1200, 200))
    notes = []
    for ratio, seconds in (
        (1.0, random_.uniform(0.14, 0.22)),
        (random_.uniform(1.1, 1.35), random_.uniform(0.18, 0.3)),
    ):
        count = int(seconds * RATE)
        envelope = np.sin(np.pi * np.linspace(0, 1, count)) ** 0.5
        notes.append(envelope * _voiced(base * ratio * np.linspace(1, 1.05, count), formants))
    breath = 0.02 * random_.normal(0, 1, int(0.06 * RATE))
    samples = np.concatenate([notes[0] / abs(notes[0]).max(), breath, notes[1] / abs(notes[1]).max()])
    return _stimulus(f"hum: {'mm-hm' if closed else 'uh-huh'} at {base:.0f} Hz", samples.astype(np.float32))


def _burst(number: int) -> Stimulus:
    """A cough (two bursts of noise), a click or a breath."""
    random_ = np.random.default_rng(200 + number)
    kind = ("cough", "click", "breath", "cough")[number % 4]
    seconds = {"cough": 0.35, "click": 0.03, "breath": 0.6}[kind]
    time = np.arange(int(seconds * RATE)) / RATE
    noise = random_.normal(0, 1, len(time))
    if kind == "cough":
        shape = np.exp(-time / 0.05) + 0.6 * (time > 0.18) * np.exp(-np.maximum(0, time - 0.18) / 0.06)
        noise = np.convolve(noise, np.ones(4) / 4, "same")
    elif kind == "click":
        shape = np.exp(-time / 0.004)
    else:
        shape = np.sin(np.pi * time / seconds) ** 2
        noise = np.convolve(noise, np.ones(8) / 8, "same")
    level = -35.0 if kind == "breath" else LEVEL
    return replace(_stimulus(f"{kind} {number}", (shape * noise).astype(np.float32), level), groups=(kind,))
