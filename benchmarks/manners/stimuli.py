"""What is said and what sounds in the benchmark of manners: made once, kept in the cache, with its times.

Speech is rendered by the server's own voices; those that the classifier of acknowledgements was trained on are not
used. A sentence is rendered whole and cut where a word ends, so that a pause in it sounds like one.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import tomllib
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.server_process import free_port, running_command, wait_until_ready
from benchmarks.speech.degraded import pink_noise
from benchmarks.speech.wordless import keyboard, music, quiet_room, silence
from omni_ws.audio.pcm import SampleLayout, Samples, resampled, samples_from_bytes
from omni_ws.caller.script import frame_levels, loud_part
from omni_ws.client import AudioChunk, connect
from omni_ws.client import Final as LastChunk
from omni_ws.config.values import user_cache_folder

RATE: Final = 16_000
#: The voices of Kokoro that speak, and the small voice; none is one that the classifier was trained on.
VOICES: Final = ("af_heart", "am_michael", "bf_emma", "bm_george", "af_nova", "am_puck", "hibari")
#: Levels in dBFS: the mean power of the loud frames.
LEVEL, QUIET, TELEVISION, BABBLE = -22.0, -30.0, -35.0, -38.0
_FRAME: Final = RATE // 50
_SEED: Final = 39


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


@dataclass(frozen=True, slots=True)
class Spoken:
    """A text in a voice: its sound, and where each word ends and the next begins, in milliseconds."""

    voice: str
    text: str
    samples: Samples
    words: tuple[tuple[str, int, int], ...]


def texts() -> dict[str, list[str]]:
    """What is said, by kind."""
    return tomllib.loads(Path(__file__).with_name("sentences.toml").read_text(encoding="utf-8"))


# Rendering


def folder() -> Path:
    """Where rendered speech is kept."""
    return user_cache_folder() / "manners"


def _file(voice: str, text: str) -> Path:
    return folder() / f"{hashlib.sha256(f'{voice} {text}'.encode()).hexdigest()[:20]}.npz"


def _plain(text: str) -> str:
    return " ".join(text.replace("|", " ").split())


def render(pairs: Sequence[tuple[str, str]]) -> None:
    """Render each voice and text that is not in the cache yet, with little priority."""
    missing = [pair for pair in dict.fromkeys(pairs) if not _file(*pair).exists()]
    for part in ("kokoro", "hibari"):
        of_part = [pair for pair in missing if (pair[0] == "hibari") == (part == "hibari")]
        if not of_part:
            continue
        folder().mkdir(parents=True, exist_ok=True)
        port = free_port()
        with running_command(*_server(part), port=port):
            wait_until_ready(port)
            asyncio.run(_render(f"http://127.0.0.1:{port}", of_part))


def _server(part: str) -> list[str]:
    import sys

    return [
        "nice",
        "-n",
        "5",
        sys.executable,
        "-m",
        "omni_ws",
        "serve",
        "--llm",
        "rules",
        "--tts",
        part,
        "--log-level",
        "warning",
    ]


async def _render(base: str, pairs: Sequence[tuple[str, str]]) -> None:
    async with AsyncExitStack() as stack:
        sessions: dict[str, Any] = {}
        for number, (voice, text) in enumerate(pairs):
            if voice not in sessions:
                config = {"task": "speech"} | ({} if voice == "hibari" else {"voice": voice})
                sessions[voice] = await stack.enter_async_context(connect(base, config=config))
            spoken = await _spoken(sessions[voice], voice, text)
            # A file that is there is whole.
            part = _file(voice, text).with_suffix(".part")
            with part.open("wb") as file:
                np.savez(file, samples=spoken.samples.astype(np.float32), words=json.dumps(spoken.words))
            part.rename(_file(voice, text))
            if number % 25 == 0:
                print(f"  rendering: {number} of {len(pairs)}", flush=True)


async def _spoken(session: Any, voice: str, text: str) -> Spoken:
    await session.send_text(_plain(text), end=True)
    audio, words, rate = b"", [], 24_000
    async for event in session.events():
        if isinstance(event, AudioChunk):
            audio, rate = audio + event.audio, event.sample_rate
            words += [(word.text, word.start_ms, word.end_ms) for word in event.words]
        elif isinstance(event, LastChunk):
            break
    samples = resampled(samples_from_bytes(audio, SampleLayout.S16), rate, RATE)
    return Spoken(voice, text, samples, tuple(words))


def spoken(voice: str, text: str) -> Spoken:
    """Speech from the cache. Raises FileNotFoundError before ``render``."""
    with np.load(_file(voice, text)) as kept:
        return Spoken(voice, text, kept["samples"], tuple(tuple(word) for word in json.loads(str(kept["words"]))))


# From speech to stimuli


def levelled(samples: Samples, dbfs: float) -> Samples:
    """The sound with its loud frames at this mean power."""
    levels = frame_levels(samples, _FRAME)
    loud = levels[levels > 0.05 * levels.max()]
    return np.asarray(samples * (10 ** (dbfs / 20) / np.sqrt(np.mean(loud**2))), np.float32)


def _range_ms(samples: Samples) -> tuple[float, float]:
    first, last = loud_part(frame_levels(samples, _FRAME))
    return first * 20.0, last * 20.0


def _stimulus(name: str, samples: Samples, dbfs: float = LEVEL, **fields: Any) -> Stimulus:
    samples = levelled(samples, dbfs)
    onset, end = _range_ms(samples)
    begin = max(0, int(onset) - 40) * RATE // 1000
    samples = samples[begin : (int(end) + 60) * RATE // 1000]
    onset, end = _range_ms(samples)
    return Stimulus(name, samples, onset, end, **fields)


def with_pauses(one: Spoken, pauses_ms: Sequence[int]) -> Stimulus:
    """A sentence with a pause at each | of its text."""
    groups = [group.split() for group in one.text.split("|")]
    samples, pieces, gaps, at, place = levelled(one.samples, LEVEL), [], [], 0, 0
    length = 0
    for number, group in enumerate(groups[:-1]):
        place += len(group)
        cut = _cut(one, samples, place, len(_plain(one.text).split()))
        pause = np.zeros(pauses_ms[number % len(pauses_ms)] * RATE // 1000, np.float32)
        piece = _faded(samples[at:cut])
        pieces += [piece, pause]
        # From the last sound before it to the first sound after it.
        gaps.append([(length + len(piece)) * 1000 / RATE, (length + len(piece) + len(pause)) * 1000 / RATE])
        length += len(piece) + len(pause)
        at = cut
    pieces.append(_faded(samples[at:]))
    whole = np.concatenate(pieces)
    onset, end = _range_ms(whole)
    whole = whole[: int(end + 60) * RATE // 1000]
    said = tuple(" ".join(group).strip(" .,?") for group in groups)
    return Stimulus(f"{one.voice}: {one.text}", whole, onset, end, tuple((a, b) for a, b in gaps), said)


def _cut(one: Spoken, samples: Samples, place: int, count: int) -> int:
    """The sample between the word before ``place`` and the next one: the quietest near where they meet."""
    if len(one.words) == count:
        meet = (one.words[place - 1][2] + one.words[place][1]) / 2000
    else:  # a text that is read in other words than it is written in
        heard = " ".join(_plain(one.text).split()[:place])
        first, last = _range_ms(samples)
        meet = (first + (last - first) * len(heard) / len(_plain(one.text))) / 1000
    begin = max(0, int((meet - 0.08) * RATE))
    levels = frame_levels(samples[begin : begin + int(0.16 * RATE)], RATE // 100)
    return begin + int(np.argmin(levels)) * RATE // 100


def _faded(samples: Samples) -> Samples:
    """Without a click at either end."""
    count = min(len(samples) // 2, RATE // 200)
    ramp = np.linspace(0, 1, count, dtype=np.float32)
    samples = samples.copy()
    samples[:count] *= ramp
    samples[len(samples) - count :] *= ramp[::-1]
    return samples


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
        """A share of all, always the same: 85 acknowledgements, 88 interruptions, 60 pauses, 24 wholes, 40 dictations."""
        return cls(
            *(_some(all_of(), share) for all_of in (_acknowledgements, _interruptions, _pauses, _wholes, _dictations))
        )

    def render(self) -> None:
        """Put all speech into the cache that is not there."""
        kinds = (self.acknowledgements, self.interruptions, self.pauses, self.wholes, self.dictations)
        render([one.speech for kind in kinds for one in kind if one.speech is not None] + _NEWS)


@dataclass(frozen=True, slots=True)
class Planned:
    """A stimulus to come: made of speech in the cache, or without."""

    speech: tuple[str, str] | None
    make: Callable[[], Stimulus]


def _some(planned: list[Planned], share: float) -> list[Planned]:
    """A share of them, at least four, always the same, spread over all."""
    random.Random(_SEED).shuffle(planned)
    return planned[: max(min(4, len(planned)), round(share * len(planned)))]


def _said(voice: str, text: str, **fields: Any) -> Planned:
    quiet = QUIET if fields.get("quiet") else LEVEL
    name = f"{voice}{', quiet' if fields.get('quiet') else ''}: {text}"
    return Planned((voice, text), lambda: _stimulus(name, spoken(voice, text).samples, quiet, **fields))


def _paused(voice: str, text: str, pauses_ms: Sequence[int]) -> Planned:
    return Planned((voice, text), lambda: with_pauses(spoken(voice, text), pauses_ms))


def _acknowledgements() -> list[Planned]:
    """Eleven texts in seven voices, and eight hums."""
    said = [_said(voice, text) for text in texts()["acknowledgements"] for voice in VOICES]
    return said + [Planned(None, partial(_hum, number)) for number in range(8)]


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


# What sounds beside the speaker


_READERS: Final = ("bm_george", "af_nova")
_NEWS: Final = [(voice, text) for voice, text in product(_READERS, texts()["news"])]


def television(seconds: float, number: int = 0) -> Samples:
    """A reader of news at -35 dBFS."""
    news = texts()["news"]
    order = news[number % 6 :] + news[: number % 6]
    read = np.concatenate([spoken(_READERS[number % 2], text).samples for text in order])
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
