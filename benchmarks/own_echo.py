"""The server's own echo in an open microphone: does it interrupt itself, and does a person interrupt it?

Recorded speech is the answer and the person. The room delays the sound, and adds reflections. The canceller and the
detector are the server's, without its sockets: as if the microphone's pieces of 20 ms came in time, and the answer was
sent 400 ms ahead. A person counts if speech is noticed after they began. CPU time is that of the canceller.
"""

from __future__ import annotations

import argparse
import itertools
import resource
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from support.speech_clips import SAMPLE_RATE, Room, clip_samples, noises

from omni_ws.audio.echo import NoiseReduction, NoiseSuppressor, OwnEcho
from omni_ws.audio.pcm import Samples, pcm16_from_samples
from omni_ws.audio.speech_watch import BARGE_IN_BAR, SpeechOnset, TurnDetector
from omni_ws.audio.vad import SpeechDetector
from omni_ws.core.chunks import AudioFormat
from omni_ws.core.ledger import (
    Playing,
    SentPiece,
)

ANSWER_SEC: Final = 10
LEVEL: Final = 0.08
DELAYS_MS: Final = (40, 120, 250)
GAINS_DB: Final = (-20, -6)
ANSWERS: Final = ("librivox_ss_0870", "cards_005")
PERSONS: Final = ("goforward", "cards_001")
BEGINS_SEC: Final = (1.0, 2.0, 4.0, 6.0)
FRAME: Final = SAMPLE_RATE // 50
LEAD_MS: Final = 400
#: What is to be reached by people who speak from the second second of a conversation's first answer on.
LEAST_HEARD: Final = 0.95
#: The most of a core that a talker's canceller may take.
MOST_CPU: Final = 0.15


def main(arguments: Sequence[str] = ()) -> bool:
    parser = argparse.ArgumentParser(prog="python -m benchmarks own_echo", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one answer, one person")
    quick = parser.parse_args(arguments).quick
    answers, persons = (ANSWERS[:1], PERSONS[:1]) if quick else (ANSWERS, PERSONS)
    spent: list[float] = []
    rooms = [Room(delay, gain) for gain, delay in itertools.product(GAINS_DB, DELAYS_MS)]
    with_echo = sum(noticed(recorded(room, clip), clip, cleans=False) is not None for room in rooms for clip in answers)
    alone = sum(noticed(recorded(room, clip), clip, spent=spent) is not None for room in rooms for clip in answers)
    print(f"alone, without the canceller: {with_echo} of {len(rooms) * len(answers)} answers interrupt themselves")
    print(f"alone, with it: {alone} of {len(rooms) * len(answers)}\n")
    print("| echo | the person | from the second | interrupts | noticed after (median), without any echo |")
    print("|---|---|---|---|---|")
    heard_late = asked_late = 0
    for gain, loudness in itertools.product(GAINS_DB, ("as the echo", "as the answer")):
        level = LEVEL * 10 ** (gain / 20) if loudness == "as the echo" else LEVEL
        for begin in BEGINS_SEC:
            late, clear = [], []
            for delay, clip, person in itertools.product(DELAYS_MS, answers, persons):
                said = person, begin, level
                found = noticed(recorded(Room(delay, gain), clip, said), clip, spent=spent)
                late.append(found)
                clear.append(noticed(recorded(Room(delay, -200), clip, said), clip, cleans=False))
            heard = [at - begin * 1000 for at in late if at is not None and at >= begin * 1000]
            plain = statistics.median(at - begin * 1000 for at in clear if at is not None)
            after = f"{statistics.median(heard):.0f}" if heard else "-"
            print(f"| {gain} dB | {loudness} | {begin:g} | {len(heard)} of {len(late)} | {after}, {plain:.0f} ms |")
            if begin >= 2:
                heard_late, asked_late = heard_late + len(heard), asked_late + len(late)
    print(f"\nFrom the second second on, {heard_late} of {asked_late} interrupt.")
    cost = statistics.median(spent)
    print(f"A canceller at work takes {memory_of_one():.1f} MB.")
    print(f"The canceller takes {cost * 100:.1f} % of a core while an answer plays.")
    print_noise()
    return not alone and heard_late >= LEAST_HEARD * asked_late and cost <= MOST_CPU


def memory_of_one() -> float:
    """Return by how many MB the process grows for each canceller at work (Linux)."""
    heard, before = np.zeros(SAMPLE_RATE, np.float32), resident_mb()
    working = [OwnEcho() for _ in range(20)]
    sent = SentPiece("a", 0, AudioFormat(sample_rate=SAMPLE_RATE), bytes([1]) * 2 * SAMPLE_RATE)
    for own in working:
        own.clean(heard, Playing(1000, "a", 1000, sounds=True, moves=True, sent=(sent,)))
    return (resident_mb() - before) / len(working)


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize() / 1e6


def at_level(samples: Samples, level: float) -> Samples:
    return np.asarray(samples * (level / np.sqrt(np.mean(samples**2))), np.float32)


def played(clip: str) -> Samples:
    return np.resize(at_level(clip_samples(clip), LEVEL), ANSWER_SEC * SAMPLE_RATE)


def recorded(room: Room, clip: str, said: tuple[str, float, float] | None = None) -> Samples:
    """What the microphone hears, with its own noise at -70 dBFS. ``said`` is a clip, when it begins, and its level."""
    answer = played(clip)
    echo = np.convolve(answer, room.response)[: len(answer)]
    delay = room.delay_ms * SAMPLE_RATE // 1000
    heard = np.random.default_rng(1).normal(0, 3e-4, len(answer)).astype(np.float32)
    heard[delay:] += echo[: len(answer) - delay]
    if said is not None:
        person, begin, level = said
        speech = at_level(clip_samples(person), level)
        first = round(begin * SAMPLE_RATE)
        last = min(len(heard), first + len(speech))
        heard[first:last] += speech[: last - first]
    return heard


def noticed(heard: Samples, clip: str, *, cleans: bool = True, spent: list[float] | None = None) -> int | None:
    """Return when speech is noticed over the answer, in milliseconds; None if it is not."""
    detector, turns = SpeechDetector(), TurnDetector(bar=BARGE_IN_BAR)
    for piece in without_echo(heard, clip, spent) if cleans else np.split(heard, len(heard) // FRAME):
        for probability in detector.process(piece):
            if isinstance(event := turns.feed(probability), SpeechOnset):
                return event.detected_ms
    return None


def without_echo(heard: Samples, clip: str, spent: list[float] | None) -> Iterator[Samples]:
    own, pcm, sent = OwnEcho(), pcm16_from_samples(played(clip)), 0
    for begin in range(0, len(heard), FRAME):
        now = (begin + FRAME) * 1000 / SAMPLE_RATE
        upto = min(len(pcm), round((now + LEAD_MS) * SAMPLE_RATE / 1000))
        more = SentPiece("a", sent * 1000 / SAMPLE_RATE, AudioFormat(sample_rate=SAMPLE_RATE), pcm[sent:upto].tobytes())
        pieces, sent = (more,) if upto > sent else (), upto
        began = time.thread_time()
        cleaned = own.clean(heard[begin : begin + FRAME], Playing(now, "a", now, True, True, pieces))
        if spent is not None:
            spent.append((time.thread_time() - began) / (FRAME / SAMPLE_RATE))
        yield cleaned


def print_noise() -> None:
    """Print how much of noise is taken for speech, and how much of speech is noticed in noise that is louder."""
    white = np.random.default_rng(3).normal(0, 1, 10 * SAMPLE_RATE)
    spectrum = np.fft.rfft(white)
    pink = np.fft.irfft(spectrum / np.sqrt(np.arange(1, len(spectrum) + 1)), len(white))
    speech = np.concatenate([np.pad(at_level(clip_samples(clip), LEVEL), SAMPLE_RATE) for clip in PERSONS])
    kinds: tuple[NoiseReduction | None, ...] = (None, "near_field", "far_field")
    print("\n| noise, 10 dB louder | taken for speech, alone: as it is, near, far | with speech |")
    print("|---|---|---|")
    for name, sound in {"none": 0 * white, "white": white, "pink": pink, "music": noises(10)["music"]}.items():
        noise = np.resize(np.asarray(sound, np.float32), len(speech))
        noise = at_level(noise, LEVEL * 10**0.5) if noise.any() else noise
        shares = [[share_of_speech(heard, kind) for kind in kinds] for heard in (noise, noise + speech)]
        alone, over = (", ".join(f"{share * 100:.0f} %" for share in row) for row in shares)
        print(f"| {name} | {alone} | {over} |")


def share_of_speech(heard: Samples, kind: NoiseReduction | None) -> float:
    quieter = heard if kind is None else NoiseSuppressor(kind).process(heard)
    return float(np.mean(np.asarray(SpeechDetector().process(quieter)) > 0.5))
