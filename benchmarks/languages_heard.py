"""Languages that are heard: words that Whisper base mishears in six languages, and the languages that it detects.

Twenty sentences of each language. Of English, Spanish, French and Italian people read them, out of packages
(speech/corpus.lock); of Portuguese and German a voice does. Whisper recognises each twice: with the language given,
and with the language to be detected among the six, in one conversation that changes its language every four sentences.
Then single words, each after a sentence of another language, which must not change it.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import tomllib
import unicodedata
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Final

import numpy as np
from support.engine_answers import streamed

from benchmarks.asr import new_engine
from benchmarks.speech.corpus import Clip, telephone_prompts
from benchmarks.speech.hearing import Heard, hear, whole_request
from omni_ws.audio.pcm import as_samples, resampled
from omni_ws.config.model import VoiceChoice
from omni_ws.core.chunks import InputChunk, Modality, Task
from omni_ws.core.json_values import language_name
from omni_ws.engine.asr.recogniser import SAMPLE_RATE
from omni_ws.engine.asr.recogniser_engine import RecogniserEngine
from omni_ws.engine.base import AudioOutput, HeardLanguage
from omni_ws.engine.tts.speech_engine import SpeechEngine
from omni_ws.engine.tts.voice_process import VoiceProcess
from omni_ws.scenarios.speech import (
    WordErrors,
    compared,
    total,
)
from omni_ws.weights import fetched_folder

MODEL: Final = "base"
LANGUAGES: Final = ("en", "es", "fr", "it", "pt", "de")
READ: Final = ("en", "es", "fr", "it")
#: The targets: of words that are heard wrong, and of sentences whose language is found.
MAX_RATE: Final = 0.12
SENTENCES: Final = 20
#: How many sentences of a language follow one another.
RUN: Final = 4
_VOICES: Final = {"pt": "pt-br", "de": "de"}
_FEWEST_WORDS, _MOST_WORDS = 7, 20
#: Digits, as recognisers write small numbers, in words.
_SMALL: Final = {
    "en": "zero one two three four five six seven eight nine ten",
    "es": "cero uno dos tres cuatro cinco seis siete ocho nueve diez",
    "fr": "zero un deux trois quatre cinq six sept huit neuf dix",
    "it": "zero uno due tre quattro cinque sei sette otto nove dieci",
    "pt": "zero um dois tres quatro cinco seis sete oito nove dez",
    "de": "null eins zwei drei vier funf sechs sieben acht neun zehn",
}


@dataclass
class Sentence:
    """A recording with its language, and what was heard in it: with that language named, and with it detected."""

    language: str
    clip: Clip
    named: Heard | None = None
    detected: Heard | None = None


def plain_words(text: str, language: str) -> list[str]:
    """The words of a text in small letters without accents, since the texts of some recordings have none."""
    letters = unicodedata.normalize("NFKD", text.lower().replace("ß", "ss"))
    small = _SMALL[language].split()
    words = re.findall(r"[^\W_]+", "".join(one for one in letters if not unicodedata.combining(one)))
    return [small[int(word)] if word.isdecimal() and int(word) < len(small) else word for word in words]


def errors(sentence: Sentence, heard: Heard) -> WordErrors:
    said = plain_words(sentence.clip.words, sentence.language)
    return compared(said, plain_words(heard.text, sentence.language))


def read_sentences(language: str) -> Iterator[Sentence]:
    """Sentences that a person reads, each text once, without numbers in digits and broken letters."""
    texts: set[str] = set()
    for clip in telephone_prompts(language):
        words = plain_words(clip.words, language)
        fits = _FEWEST_WORDS <= len(words) <= _MOST_WORDS and not re.search(r"\d|\?(?! |$)|^\.\.\.", clip.words)
        if fits and "/" not in clip.name and " ".join(words) not in texts:
            texts.add(" ".join(words))
            yield Sentence(language, clip)


def read_words(language: str) -> Iterator[Sentence]:
    """Single words that a person reads, most of them names of technology, which are the hardest to tell."""
    for clip in telephone_prompts(language):
        if len(plain_words(clip.words, language)) == 1 and "/" not in clip.name and not re.search(r"\d", clip.words):
            yield Sentence(language, clip)


@asynccontextmanager
async def voices() -> AsyncIterator[list[SpeechEngine]]:
    """Kokoro, where its weights are here, and espeak-ng: a language is spoken by the first that knows it."""
    kinds = [VoiceChoice.KOKORO] if fetched_folder("kokoro") is not None else []
    engines = [SpeechEngine(VoiceProcess(kind)) for kind in (*kinds, VoiceChoice.ESPEAK)]
    try:
        for engine in engines:
            await engine.start()
        yield engines
    finally:
        for engine in engines:
            await engine.stop()


async def spoken(engines: Sequence[SpeechEngine], text: str, language: str) -> Clip:
    """What a voice says, at the recognisers' rate."""
    engine = next(one for one in engines if _VOICES[language] in one.capabilities.voice_aliases)
    request = whole_request(Task.SPEECH, [InputChunk(Modality.TEXT, text.encode())])
    pieces, rate = [], SAMPLE_RATE
    async for output in streamed(engine, replace(request, voice=engine.capabilities.voice_aliases[_VOICES[language]])):
        if isinstance(output, AudioOutput):
            rate = output.sample_rate
            pieces.append(as_samples(output.samples))
    return Clip(text, engine.voice.name, text, resampled(np.concatenate(pieces), rate, SAMPLE_RATE))


async def sentences(languages: Sequence[str], count: int) -> dict[str, list[Sentence]]:
    texts = tomllib.loads(Path(__file__).with_name("speech").joinpath("conversation.toml").read_text("utf-8"))
    found: dict[str, list[Sentence]] = {}
    async with voices() as engines:
        for language in languages:
            if language in READ:
                found[language] = list(islice(read_sentences(language), count))
            else:
                lines = texts[language][:count]
                found[language] = [Sentence(language, await spoken(engines, line, language)) for line in lines]
    return found


async def measure(options: argparse.Namespace) -> bool:
    languages = options.language or LANGUAGES
    found = await sentences(languages, options.sentences)
    engine = new_engine(MODEL)
    await engine.start()
    try:
        for one in (one for each in found.values() for one in each):
            one.named = await hear(engine, one.clip.samples, language=one.language)
        changes = await converse(engine, found)
        kept, words = await single_words(engine, options.words)
    finally:
        await engine.stop()
    met = print_sentences(found)
    for by, is_read in (("people", True), ("voices", False)):
        these = [one for one in changes if (one.language in READ) == is_read]
        noticed = sum(one.detected is not None and one.detected.language == one.language for one in these)
        print(f"\nChanges of language that were noticed in the first sentence, said by {by}: {noticed} of {len(these)}")
    print(f"Single words after a sentence of another language that left the language as it was: {kept} of {words}")
    for one in (one for each in found.values() for one in each) if options.details else ():
        assert one.named is not None
        assert one.detected is not None
        print(f"\n{one.language} {one.clip.words}\n  {one.named.text}\n  {one.detected.language} {one.detected.text}")
    return met


async def converse(engine: RecogniserEngine, found: dict[str, list[Sentence]]) -> list[Sentence]:
    """Have all sentences recognised as one conversation, and return those with which the language changed."""
    before: str | None = None
    changes = []
    runs = {
        language: [each[start : start + RUN] for start in range(0, len(each), RUN)] for language, each in found.items()
    }
    for number in range(max(map(len, runs.values()))):
        for language in found:
            for place, one in enumerate(runs[language][number] if number < len(runs[language]) else ()):
                if place == 0 and before is not None:
                    changes.append(one)
                one.detected = await hear(
                    engine, one.clip.samples, languages=frozenset(LANGUAGES), heard_language=HeardLanguage(before)
                )
                before = one.detected.language or before
    return changes


async def single_words(engine: RecogniserEngine, count: int) -> tuple[int, int]:
    """How many single words left the language as it was, of how many in which words were heard."""
    kept = heard_words = 0
    for place, language in enumerate(READ):
        before = READ[place - 1]
        for one in islice(read_words(language), count):
            heard = await hear(
                engine, one.clip.samples, languages=frozenset(LANGUAGES), heard_language=HeardLanguage(before)
            )
            heard_words += bool(heard.text)
            kept += heard.language == before
    return kept, heard_words


def print_sentences(found: dict[str, list[Sentence]]) -> bool:
    print("### Languages heard by Whisper base\n")
    columns = ("language", "said by", "sentences", "words", "wrong, named", "wrong, detected", "found", "CPU time")
    print(f"| {' | '.join(columns)} |")
    print("|---|---|---|---|---|---|---|---|")
    met = True
    for language, each in found.items():
        named = total(errors(one, one.named) for one in each if one.named is not None)
        detected = [one.detected for one in each if one.detected is not None]
        wrong = total(errors(one, one.detected) for one in each if one.detected is not None)
        right = sum(heard.language == language for heard in detected)
        share = sum(heard.cpu_sec for heard in detected) / sum(heard.seconds for heard in detected)
        met = met and named.rate <= MAX_RATE
        by = "a person" if language in READ else each[0].clip.source
        print(
            f"| {language_name(language).title()} | {by} | {len(each)} | {named.words} | {named.rate:.1%} | "
            f"{wrong.rate:.1%} | {right} of {len(detected)} | {share:.3f} s |"
        )
    print(f"\nWords wrong, with the language named, ≤ {MAX_RATE:.0%} in each: {'met' if met else 'MISSED'}")
    return met


def main(arguments: Sequence[str] = ()) -> bool:
    parser = argparse.ArgumentParser(prog="python -m benchmarks languages_heard", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="four sentences and two words of each language")
    parser.add_argument("--language", action="append", choices=LANGUAGES, help="one of them; may be repeated")
    parser.add_argument("--sentences", type=int, default=SENTENCES, help="of each language")
    parser.add_argument("--words", type=int, default=10, help="single ones, of each language that people read")
    parser.add_argument("--details", action="store_true", help="also print what was said and heard")
    options = parser.parse_args(arguments)
    if options.quick:
        options.sentences, options.words = RUN, 2
    return asyncio.run(measure(options))


if __name__ == "__main__":
    sys.exit(not main(sys.argv[1:]))
