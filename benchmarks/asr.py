"""Word errors of the recognisers, and the words that they hear where nobody speaks.

Recordings of people, from packages (speech/corpus.lock), and some of them made worse: as from across a room, and in
noise. Each goes through the whole engine, as if a client had sent it at once. CPU time is that of the process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from benchmarks.speech.corpus import Clip, played_music, recordings, typing
from benchmarks.speech.degraded import far, noisy, telephone
from benchmarks.speech.hearing import Heard, hear
from benchmarks.speech.wordless import SOUNDS
from omni_ws.audio.pcm import Samples
from omni_ws.engine.asr.recogniser_engine import RecogniserEngine
from omni_ws.engine.asr.whisper import PINNED, WhisperRecogniser
from omni_ws.scenarios.speech import (
    WordErrors,
    spoken_words,
    total,
    word_errors,
)
from omni_ws.weights import pinned_weights, weights_cache

#: Targets: of the default recogniser on clean speech that is read, and of all where nobody speaks.
MAX_CLEAN_RATE: Final = 0.06
DEFAULT: Final = "tiny.en"
WORDLESS: Final[Mapping[str, Callable[[float], Samples]]] = {
    **SOUNDS,
    "keyboards, recorded": typing,
    "music, recorded": played_music,
}
WORSE: Final[Mapping[str, Callable[[Samples], Samples]]] = {"far": far, "noisy": noisy, "telephone": telephone}
QUICK_CLIPS: Final = 3
#: The longest recordings have a row of their own.
LISTED_WORDS: Final = 25


def new_engine(name: str) -> RecogniserEngine:
    """The engine of a recogniser, whose weights are fetched if they are not here."""
    weights_cache().fetch(pinned_weights()[PINNED[name]])
    return RecogniserEngine(WhisperRecogniser(name, max_recognisers=1))


RECOGNISERS: Final = tuple(PINNED)


@dataclass
class Tally:
    """What one recogniser made of some recordings, by their names."""

    heard: dict[str, Heard] = field(default_factory=dict)
    errors: dict[str, WordErrors] = field(default_factory=dict)

    async def add(self, engine: RecogniserEngine, clip: Clip) -> None:
        heard = await hear(engine, clip.samples)
        self.heard[clip.name] = heard
        self.errors[clip.name] = word_errors(clip.words, heard.text)

    def of(self, clips: Sequence[Clip]) -> WordErrors:
        return total(self.errors[clip.name] for clip in clips)


@asynccontextmanager
async def running(name: str) -> AsyncIterator[RecogniserEngine]:
    engine = new_engine(name)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


async def measure(options: argparse.Namespace) -> bool:
    clips = recordings()
    if options.quick:
        clips = [clip for source in sources(clips) for clip in of_source(clips, source)[:QUICK_CLIPS]]
    read = [clip for clip in clips if clip.is_sentence]
    base = read[:: 1 if options.quick else options.worse_every]
    worse = {kind: [clip.changed(kind, change) for clip in base] for kind, change in WORSE.items()}
    everything = [*clips, *(clip for changed in worse.values() for clip in changed)]
    tallies: dict[str, Tally] = {}
    wordless: dict[str, dict[str, Heard]] = {}
    for name in options.recogniser or RECOGNISERS:
        tallies[name] = Tally()
        async with running(name) as engine:
            await hear(engine, clips[0].samples)  # what is loaded on first use
            for clip in everything:
                await tallies[name].add(engine, clip)
            wordless[name] = {
                sound: await hear(engine, make(options.minutes * 60))
                for sound, make in WORDLESS.items()
                if options.minutes
            }
    if options.details is not None:
        write_details(options.details, everything, tallies)
    print_groups(clips, worse, tallies)
    print_clips([clip for clip in everything if clip.length >= LISTED_WORDS], tallies)
    met = print_wordless(wordless, options.minutes)
    if DEFAULT in tallies:
        rate = tallies[DEFAULT].of(read).rate
        print(f"\nClean read speech, {DEFAULT}: {rate:.1%}; target ≤ {MAX_CLEAN_RATE:.0%}: ", end="")
        print("met" if rate <= MAX_CLEAN_RATE else "MISSED")
        met = met and rate <= MAX_CLEAN_RATE
    return met


def sources(clips: Sequence[Clip]) -> list[str]:
    return list(dict.fromkeys(clip.source for clip in clips))


def of_source(clips: Sequence[Clip], source: str) -> list[Clip]:
    return [clip for clip in clips if clip.source == source]


def print_groups(clips: Sequence[Clip], worse: Mapping[str, Sequence[Clip]], tallies: Mapping[str, Tally]) -> None:
    groups = {source: of_source(clips, source) for source in sources(clips)}
    groups["all as they are"] = list(clips)
    groups["of these, sentences: clean read speech"] = [clip for clip in clips if clip.is_sentence]
    groups |= {f"some of the sentences, made {kind}": list(changed) for kind, changed in worse.items()}
    print("### Words that were heard wrong\n")
    print(f"| recordings | clips | minutes | words | {' | '.join(tallies)} |\n|---|---|---|---|{'---|' * len(tallies)}")
    for group, members in groups.items():
        errors = {name: tally.of(members) for name, tally in tallies.items()}
        words = next(iter(errors.values())).words
        rates = " | ".join(f"{each.wrong} ({each.rate:.1%})" for each in errors.values())
        print(f"| {group} | {len(members)} | {minutes(members):.1f} | {words} | {rates} |")
    shares = " | ".join(
        f"{sum(heard.cpu_sec for heard in tally.heard.values()) / sum(h.seconds for h in tally.heard.values()):.3f} s"
        for tally in tallies.values()
    )
    print(f"| CPU time for a second of sound | | | | {shares} |", flush=True)


def minutes(clips: Sequence[Clip]) -> float:
    return sum(clip.seconds for clip in clips) / 60


def print_clips(clips: Sequence[Clip], tallies: Mapping[str, Tally]) -> None:
    print("\n### The longest recordings, one by one\n")
    print(f"| recording | seconds | words | {' | '.join(tallies)} |\n|---|---|---|{'---|' * len(tallies)}")
    for clip in clips:
        errors = [tally.errors[clip.name] for tally in tallies.values()]
        wrong = " | ".join(str(each.wrong) for each in errors)
        print(f"| {clip.name} | {clip.seconds:.0f} | {errors[0].words} | {wrong} |")


def print_wordless(wordless: Mapping[str, Mapping[str, Heard]], length: float) -> bool:
    """Whether the recognisers hear nothing."""
    if not length:
        return True
    print(f"\n### Words heard where nobody speaks, in {length:g} minutes of each\n")
    print(f"| sound | {' | '.join(wordless)} |\n|---|{'---|' * len(wordless)}")
    met = True
    for sound in WORDLESS:
        cells = []
        for heard in wordless.values():
            words = spoken_words(heard[sound].text)
            met = met and not words
            cells.append(f"{len(words)}" + (f" ({' '.join(words[:4])} …)" if words else ""))
        print(f"| {sound} | {' | '.join(cells)} |")
    print(f"\nNo words: {'met' if met else 'MISSED'}", flush=True)
    return met


def write_details(file: Path, clips: Sequence[Clip], tallies: Mapping[str, Tally]) -> None:
    """Every recording with what was said and heard, a line of JSON each."""
    lines = [
        {
            "name": clip.name,
            "said": clip.words,
            **{
                name: [tally.heard[clip.name].text, *tally.errors[clip.name].differences]
                for name, tally in tallies.items()
            },
        }
        for clip in clips
    ]
    file.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")


def main(arguments: Sequence[str] = ()) -> bool:
    parser = argparse.ArgumentParser(prog="python -m benchmarks asr", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few recordings of each source, a minute of each sound")
    parser.add_argument("--recogniser", action="append", choices=RECOGNISERS, help="one of them; may be repeated")
    parser.add_argument("--worse-every", type=int, default=6, help="how many sentences there are to one made worse")
    parser.add_argument("--minutes", type=float, default=10, help="of each sound without words; 0 leaves them out")
    parser.add_argument("--details", type=Path, help="a file for what was said and heard, by recording (JSON lines)")
    options = parser.parse_args(arguments)
    if options.quick:
        options.minutes = min(options.minutes, 1)
    return asyncio.run(measure(options))


if __name__ == "__main__":
    sys.exit(not main(sys.argv[1:]))
