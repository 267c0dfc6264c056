"""How soon the words are known after the end of speech: when the pause is noticed, and what the recogniser then costs.

A microphone sends recorded sentences in chunks of 20 ms. Turn detection collects them in pieces, by the rules of
``TurnListener``, and the recogniser begins with the piece that shows the pause: all that is time of the audio. Work is
CPU time of this process, the median of ``--repeat`` runs. Speech ends with the last 20 ms within 26 dB of the loudest.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from benchmarks.speech.corpus import recordings
from benchmarks.turn_words import no_interim_texts
from omni_ws.audio.pcm import Pcm16, Samples, pcm16_from_samples, samples_from_pcm16
from omni_ws.audio.sound_levels import FallingVoice
from omni_ws.audio.speech_watch import TurnDetector
from omni_ws.audio.vad import WINDOW_SAMPLES, SpeechDetector
from omni_ws.caller.script import frame_levels, loud_part
from omni_ws.core.chunks import AudioFormat
from omni_ws.engine.asr.recogniser import SAMPLE_RATE, UtteranceLimits
from omni_ws.engine.asr.recogniser_engine import UtterancePaused, UtteranceSplitter
from omni_ws.engine.asr.whisper import (
    DEFAULT_MODEL,
    WhisperModel,
    whisper_folder,
)
from omni_ws.service.conversation.turn_listener import PIECE_MS, TURN_PIECE_MS, URGENT_PIECE_MS

#: Of the recordings, sentences of so many seconds at most, and of these one in so many.
MAX_SEC: Final = 6
EVERY: Final = 5
#: Samples before a sentence: its end falls anywhere in a window.
LEADS: Final = range(0, WINDOW_SAMPLES, WINDOW_SAMPLES // 4)
_CHUNK: Final = SAMPLE_RATE // 50
_BEHIND: Final = SAMPLE_RATE
_LONGEST: Final = UtteranceLimits(20 * SAMPLE_RATE, 28 * SAMPLE_RATE)


def pieces(samples: Samples, *, falling: bool) -> Iterator[tuple[int, Samples]]:
    """The pieces in which a sentence is judged, whole windows, each with the millisecond at which it is complete."""
    detector, turns, voice = SpeechDetector(), TurnDetector(silence_duration_ms=1500), FallingVoice()
    pcm, judged, speaking = pcm16_from_samples(samples), 0, False
    for end in range(_CHUNK, len(samples) + 1, _CHUNK):
        falls = turns.speaking and voice.falls(pcm[end - _CHUNK : end].tobytes(), AudioFormat()) and falling
        speaking, voice = turns.speaking, voice if turns.speaking else FallingVoice()
        urgent = speaking and (falls or turns.silent_windows > 0)
        least = URGENT_PIECE_MS if urgent else TURN_PIECE_MS if speaking else PIECE_MS
        if (end - judged) * 1000 / SAMPLE_RATE < least:
            continue
        begin, judged = judged, end // WINDOW_SAMPLES * WINDOW_SAMPLES
        for probability in detector.process(samples[begin:judged]):
            turns.feed(probability)
        yield end * 1000 // SAMPLE_RATE, samples[begin:judged]


def last_pause(samples: Samples, *, falling: bool) -> tuple[int, Pcm16] | None:
    """When the recogniser is asked for the last time, in milliseconds, and about which samples."""
    splitter = UtteranceSplitter(no_interim_texts(), _LONGEST)
    asked = None
    for now, piece in pieces(samples, falling=falling):
        splitter.feed(piece)
        while splitter.ready and (event := splitter.advance()) is not None:
            if isinstance(event, UtterancePaused):
                asked = now, event.pcm
    splitter.close()
    return asked


def work_of(model: WhisperModel, pcm: Pcm16) -> tuple[float, float]:
    """Milliseconds of CPU time to the text, and from there to the times of its words."""
    told: list[float] = []
    began = time.process_time()
    model.transcribe(samples_from_pcm16(pcm), tell=lambda _: told.append(time.process_time()))
    ended = time.process_time()
    text_at = told[0] if told else ended
    return (text_at - began) * 1000, (ended - text_at) * 1000


def main(arguments: Sequence[str] = ()) -> bool:
    parser = argparse.ArgumentParser(prog="python -m benchmarks words_known", description=__doc__)
    parser.add_argument(
        "--collect", action="store_true", help="judge pieces of 96 ms in speech, however the voice falls"
    )
    parser.add_argument("--every", type=int, default=EVERY, help="one sentence in so many")
    parser.add_argument("--repeat", type=int, default=3, help="how often each is recognised")
    parser.add_argument("--quick", action="store_true", help="eight sentences")
    options = parser.parse_args(arguments)
    spoken = [clip for clip in recordings() if clip.is_sentence and clip.seconds <= MAX_SEC][:: options.every]
    model = WhisperModel(whisper_folder(DEFAULT_MODEL))
    random = np.random.default_rng(1)
    rows: list[tuple[float, float, float]] = []
    for clip in spoken[: 8 if options.quick else None]:
        end = loud_part(frame_levels(clip.samples, _CHUNK))[1] * _CHUNK
        room = random.normal(0, 3e-4, _BEHIND).astype(np.float32)
        said = np.concatenate((clip.samples[:end], room))
        work: np.ndarray | None = None
        for lead in LEADS:
            quiet = random.normal(0, 3e-4, SAMPLE_RATE // 2 + lead).astype(np.float32)
            pause = last_pause(np.concatenate((quiet, said)), falling=not options.collect)
            if pause is None:
                continue
            if work is None:
                work = np.median([work_of(model, pause[1]) for _ in range(options.repeat)], axis=0)
            noticed = pause[0] - (len(quiet) + end) * 1000 / SAMPLE_RATE
            rows.append((noticed, work[0], work[1]))
    names = ("end of speech → the recogniser is asked", "… → the text, CPU time", "… → the times of words, CPU time")
    print(f"### {len(spoken)} sentences of at most {MAX_SEC} s\n\n| | median | p90 |\n|---|---|---|")
    for name, found in zip(names, np.asarray(rows).T, strict=True):
        median, most = np.quantile(found, [0.5, 0.9])
        print(f"| {name} | {median:.0f} ms | {most:.0f} ms |")
    return True
