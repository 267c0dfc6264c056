"""Voices read back: how many words of what they say a recogniser hears wrong, and what they take of the CPU.

With --language, twenty sentences of that language (speech/languages.jsonl) are spoken by the voice that the server has
for it, and heard by Whisper base.

Fifty sentences with numbers, dates, names and abbreviations (speech/sentences.jsonl) are spoken as the server speaks
an answer, and heard by the default recogniser as it hears a client. CPU time is that of the voice's process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import soxr
from support.engine_answers import streamed

from benchmarks.asr import DEFAULT, RECOGNISERS
from benchmarks.asr import running as running_recogniser
from benchmarks.server_process import scheduled_seconds
from benchmarks.speech.hearing import hear, whole_request
from omni_ws.audio.pcm import Samples, as_samples
from omni_ws.config.model import VoiceChoice
from omni_ws.core.chunks import InputChunk, Modality, Task
from omni_ws.engine.asr.recogniser import SAMPLE_RATE
from omni_ws.engine.asr.recogniser_engine import RecogniserEngine
from omni_ws.engine.base import AudioOutput
from omni_ws.engine.spoken.speakable_text import spoken_form
from omni_ws.engine.tts.speech_engine import SpeechEngine
from omni_ws.engine.tts.voice_process import VoiceProcess
from omni_ws.errors import EngineFailed
from omni_ws.scenarios.speech import (
    WordErrors,
    total,
    word_errors,
)
from omni_ws.weights import (
    WeightsError,
    pinned_weights,
    weights_cache,
)

LANGUAGES: Final = Path(__file__).with_name("speech") / "languages.jsonl"
#: The target for Kokoro in each language.
MAX_RATE_OF_LANGUAGES: Final = 0.06
SENTENCES: Final = Path(__file__).with_name("speech") / "sentences.jsonl"
#: The target for hibari.
MAX_RATE: Final = 0.03
#: Those of the languages in LANGUAGES that Kokoro speaks.
KOKORO_LANGUAGES: Final = ("en", "es", "fr", "it", "pt")
VOICES: Final = tuple(choice.value for choice in VoiceChoice if choice not in (VoiceChoice.AUTO, VoiceChoice.NONE))
QUICK_SENTENCES: Final = 8


@dataclass(frozen=True, slots=True)
class Sentence:
    """What is written, and how it is read aloud."""

    written: str
    spoken: str
    language: str = "en"


@dataclass(frozen=True, slots=True)
class Spoken:
    """A sentence as a voice said it, at 16 kHz, and the CPU time of that: to the first sound, and to its end."""

    samples: Samples
    first_sec: float
    cpu_sec: float

    @property
    def seconds(self) -> float:
        return len(self.samples) / SAMPLE_RATE


def sentences() -> list[Sentence]:
    return [Sentence(**json.loads(line)) for line in SENTENCES.read_text(encoding="utf-8").splitlines()]


def sentences_by_language() -> dict[str, list[Sentence]]:
    """The sentences of each language; of those without numbers the spoken form is the written one."""
    found: dict[str, list[Sentence]] = {}
    for line in LANGUAGES.read_text(encoding="utf-8").splitlines():
        told = json.loads(line)
        found.setdefault(told["language"], []).append(Sentence(**{"spoken": told["written"], **told}))
    return found


async def speak(engine: SpeechEngine, sentence: Sentence) -> Spoken:
    """Let an engine read a sentence aloud, as it reads an answer."""
    assert isinstance(engine.voice, VoiceProcess)
    pid = engine.voice.worker_pid
    assert pid is not None
    text = "".join(piece.text for piece in spoken_form(sentence.written, sentence.language))
    request = whole_request(Task.SPEECH, [InputChunk(Modality.TEXT, text.encode())])
    request = replace(request, speech_language=None if sentence.language == "en" else sentence.language)
    before, first, rate = scheduled_seconds(pid), 0.0, 0
    pieces = []
    async with aclosing(streamed(engine, request)) as outputs:
        async for output in outputs:
            if isinstance(output, AudioOutput) and len(output.samples):
                first = first or scheduled_seconds(pid) - before
                rate = output.sample_rate
                pieces.append(as_samples(output.samples))
    cpu = scheduled_seconds(pid) - before
    return Spoken(soxr.resample(np.concatenate(pieces), rate, SAMPLE_RATE), first, cpu)


async def read_back(
    choice: VoiceChoice, ears: RecogniserEngine, read: Sequence[Sentence]
) -> tuple[list[Spoken], list[WordErrors]]:
    """What a voice says, and what is heard of it. Raises EngineFailed or WeightsError without it."""
    if choice is VoiceChoice.HIBARI:
        weights_cache().fetch(pinned_weights()["hibari"])
    engine = SpeechEngine(VoiceProcess(choice))
    await engine.start()
    try:
        await speak(engine, read[0])  # what is loaded on first use
        said = [await speak(engine, sentence) for sentence in read]
    finally:
        await engine.stop()
    language = read[0].language
    asked = None if language == "en" else language
    heard = [await hear(ears, spoken.samples, language=asked) for spoken in said]
    pairs = zip(read, heard, strict=True)
    return said, [word_errors(sentence.spoken, each.text, language=language) for sentence, each in pairs]


async def measure_languages(options: argparse.Namespace) -> bool:
    print("### Sentences of each language, heard by Whisper base\n")
    print("| language | voice | words | wrong | CPU time for a second of speech | target |")
    print("|---|---|---|---|---|---|")
    met, found, written = True, list[str](), sentences_by_language()
    async with running_recogniser("base") as ears:
        for language in options.language:
            for name in options.voice or ("kokoro", "espeak"):
                if name == "kokoro" and language not in KOKORO_LANGUAGES:
                    continue
                read = written[language][:: 5 if options.quick else 1]
                said, errors = await read_back(VoiceChoice(name), ears, read)
                summed = total(errors)
                share = sum(spoken.cpu_sec for spoken in said) / sum(spoken.seconds for spoken in said)
                verdict = ""
                if name == "kokoro":
                    fits = summed.rate <= MAX_RATE_OF_LANGUAGES
                    met = met and fits
                    verdict = f"≤ {MAX_RATE_OF_LANGUAGES:.0%}: {'met' if fits else 'MISSED'}"
                print(
                    f"| {language} | {name} | {summed.words} | {summed.wrong} ({summed.rate:.1%}) | {share:.4f} s "
                    f"| {verdict} |",
                    flush=True,
                )
                found.append(f"Heard otherwise of {name} in {language}: {'; '.join(summed.differences) or 'nothing'}.")
    print("\n" + "\n\n".join(found))
    return met


async def measure(options: argparse.Namespace) -> bool:
    if options.language:
        return await measure_languages(options)
    read = sentences()[:: len(sentences()) // QUICK_SENTENCES] if options.quick else sentences()
    print(f"### {len(read)} sentences, heard by {options.recogniser}\n")
    print("| voice | words | wrong | CPU time for a second of speech | to the first sound: p50 | p90 | target |")
    print("|---|---|---|---|---|---|---|")
    met = True
    differences: dict[str, tuple[str, ...]] = {}
    async with running_recogniser(options.recogniser) as ears:
        for name in options.voice or VOICES:
            try:
                said, errors = await read_back(VoiceChoice(name), ears, read)
            except (EngineFailed, WeightsError) as error:
                print(f"| {name} | not here: {error} | | | | | |", flush=True)
                continue
            summed = total(errors)
            verdict = ""
            if name == "hibari":
                met = summed.rate <= MAX_RATE
                verdict = f"≤ {MAX_RATE:.0%} wrong: {'met' if met else 'MISSED'}"
            share = sum(spoken.cpu_sec for spoken in said) / sum(spoken.seconds for spoken in said)
            first = sorted(spoken.first_sec * 1000 for spoken in said)
            print(
                f"| {name} | {summed.words} | {summed.wrong} ({summed.rate:.1%}) | {share:.4f} s "
                f"| {statistics.median(first):.0f} ms | {first[len(first) * 9 // 10]:.0f} ms | {verdict} |",
                flush=True,
            )
            differences[name] = summed.differences
    for name, found in differences.items():
        print(f"\nHeard otherwise of {name}: {'; '.join(found) or 'nothing'}.")
    return met


def main(arguments: Sequence[str] = ()) -> bool:
    parser = argparse.ArgumentParser(prog="python -m benchmarks voices", description=__doc__)
    parser.add_argument("--quick", action="store_true", help=f"about {QUICK_SENTENCES} of the sentences")
    parser.add_argument("--voice", action="append", choices=VOICES, help="one of them; may be repeated")
    languages = [*sentences_by_language()]
    parser.add_argument("--language", action="append", choices=languages, help="of it instead; may be repeated")
    parser.add_argument(
        "--recogniser", default=DEFAULT, choices=RECOGNISERS, help="what listens; with --language always base"
    )
    return asyncio.run(measure(parser.parse_args(arguments)))


if __name__ == "__main__":
    sys.exit(not main(sys.argv[1:]))
