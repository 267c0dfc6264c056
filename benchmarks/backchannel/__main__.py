"""``python -m benchmarks.backchannel``: speaks, trains and judges the classifier of short sounds.

``render`` has voices speak, which takes a second of CPU time a sound; ``train`` needs PyTorch, and writes the weights;
``report`` prints the confusion table, for voices and words that were not trained on, and what a decision costs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.backchannel.rooms import as_heard
from benchmarks.backchannel.sounds import (
    ACKNOWLEDGEMENT,
    HIBARI,
    HUM,
    SENTENCES,
    WORDLESS,
    WORDS,
    Saying,
    Speakers,
    made,
    parts,
    trimmed,
)
from benchmarks.speech.corpus import telephone_prompts
from omni_ws.audio import smart_turn
from omni_ws.audio.pcm import Samples
from omni_ws.audio.smart_turn import Class, backchannel_probability, spectrogram
from omni_ws.audio.vad import SAMPLE_RATE
from omni_ws.service.conversation.onsets import (
    SURE_BACKCHANNEL,
    SURE_WORDS,
    is_acknowledgement,
)

WEIGHTS: Final = Path(smart_turn.__file__).with_name("backchannel.npz")
#: How many sounds are made for training, for choosing and for judging, and how often each sound is heard.
_MADE: Final = {"training": 700, "choosing": 60, "judging": 100}
#: How often a sound is heard, each time otherwise; of Kokoro, which sounds more like people, more often.
_TIMES: Final = 2
_TIMES_OF_PEOPLE: Final = 10
#: The languages of the recordings of people in a part.
_PEOPLE: Final = {"training": ("es", "fr", "it"), "choosing": (), "judging": ("en",)}
PEOPLE: Final = "people"
_CLASSES: Final = {
    HUM: Class.WORDLESS,
    WORDLESS: Class.WORDLESS,
    ACKNOWLEDGEMENT: Class.ACKNOWLEDGEMENT,
    WORDS: Class.WORDS,
}


@dataclass(frozen=True, slots=True)
class Sound:
    kind: str
    by: str
    samples: Samples


def sounds(name: str, speakers: Speakers, *, seed: int, rendered_only: bool = False) -> Iterator[Sound]:
    """Yield the clean sounds of a part."""
    random = np.random.default_rng(seed + 100)
    for _ in range(_MADE[name]):
        yield Sound(WORDLESS, "made", made(random))
    for language in _PEOPLE[name]:
        yield from _by_people(language, random)
    for saying in parts(speakers.voices)[name].sayings(seed):
        if not rendered_only or speakers.has(saying):
            yield Sound(saying.kind, saying.voice, _cut(saying, speakers.said(saying), random))


def _by_people(language: str, random: np.random.Generator) -> Iterator[Sound]:
    """Yield recorded words, or the beginnings of sentences, without names of letters, some of which are hums."""
    for clip in telephone_prompts(language):
        samples = trimmed(clip.samples)
        if len(samples) > SAMPLE_RATE:
            samples = samples[: int(SAMPLE_RATE * random.uniform(0.3, 1.0))]
        kind = ACKNOWLEDGEMENT if is_acknowledgement(clip.words, language) else WORDS
        if len(clip.words) > 2 and not clip.source.startswith("letters"):
            yield Sound(kind, PEOPLE, samples)


def _cut(saying: Saying, samples: Samples, random: np.random.Generator) -> Samples:
    """Return what is said; of a sentence its beginning, and of other words sometimes."""
    if saying.kind == WORDS and (saying.text in SENTENCES or random.random() < 0.1):
        return samples[: int(SAMPLE_RATE * random.uniform(0.3, 1.0))]
    return samples


def _render(speakers: Speakers, _: argparse.Namespace) -> None:
    for seed, part in enumerate(parts(speakers.voices).values()):
        for saying in part.sayings(seed):
            speakers.said(saying)


def _train(speakers: Speakers, options: argparse.Namespace) -> None:
    from benchmarks.backchannel.training import Sounds, train

    heard = dict[str, Sounds]()
    for seed, name in enumerate(("training", "choosing")):
        clean = list(sounds(name, speakers, seed=seed, rendered_only=options.rendered_only))
        babble = [each.samples for each in clean if each.kind == WORDS][-100:]
        hear = partial(_spectrograms, babble=babble, voices=speakers.voices)
        with ProcessPoolExecutor(options.processes) as pool:
            found = list(pool.map(hear, clean, range(len(clean)), chunksize=50))
        times = [len(each) for each in found]
        print(f"{name}: {len(clean)} sounds, heard {sum(times)} times", flush=True)
        weight = np.asarray([3 if each.by in (*speakers.voices, HIBARI) else 1 for each in clean], np.float32)
        classes = np.asarray([_CLASSES[each.kind] for each in clean], np.int64)
        heard[name] = Sounds(np.concatenate(found), np.repeat(classes, times), np.repeat(weight, times))
    train(heard["training"], heard["choosing"], options.weights)


def _spectrograms(sound: Sound, seed: int, *, babble: Sequence[Samples], voices: Sequence[str]) -> NDArray[np.float16]:
    random, times = np.random.default_rng(seed), _TIMES_OF_PEOPLE if sound.by in voices else _TIMES
    return np.stack([spectrogram(as_heard(sound.samples, babble, random)) for _ in range(times)]).astype(np.float16)


def _report(speakers: Speakers, options: argparse.Namespace) -> None:
    clean = list(
        sounds(
            options.part,
            speakers,
            seed=list(parts(speakers.voices)).index(options.part),
            rendered_only=options.rendered_only,
        )
    )
    babble = [each.samples for each in clean if each.kind == WORDS]
    random = np.random.default_rng(300)
    judged, seconds = defaultdict[str, list[float]](list), list[float]()
    for each in clean:
        heard = as_heard(each.samples, babble, random)
        begun = time.thread_time()
        judged[f"{each.kind}, of people" if each.by == PEOPLE else each.kind].append(backchannel_probability(heard))
        seconds.append(time.thread_time() - begun)
    print(f"| {options.part} | sounds | backchannel | unsure | words |\n|---|---|---|---|---|")
    for kind, found in judged.items():
        sure = sum(each >= SURE_BACKCHANNEL for each in found)
        words = sum(each <= SURE_WORDS for each in found)
        print(f"| {kind} | {len(found)} | {sure} | {len(found) - sure - words} | {words} |")
    print(f"a decision: {1000 * np.median(seconds):.1f} ms, p95 {1000 * np.quantile(seconds, 0.95):.1f} ms of CPU time")
    print(f"weights: {WEIGHTS.stat().st_size} bytes")


def main(arguments: Sequence[str]) -> int:
    commands = {"render": _render, "train": _train, "report": _report}
    parser = argparse.ArgumentParser(prog="python -m benchmarks.backchannel", description=__doc__)
    parser.add_argument("command", choices=commands)
    parser.add_argument("--sounds", type=Path, required=True, help="the folder in which what is spoken is kept")
    parser.add_argument("--rendered-only", action="store_true", help="leave out what voices have not yet spoken")
    parser.add_argument("--weights", type=Path, default=WEIGHTS, help="where training writes them (the package's own)")
    parser.add_argument("--processes", type=int, default=1, help="that make spectrograms for training")
    parser.add_argument("--part", default="judging", choices=("choosing", "judging"), help="what to report on")
    options = parser.parse_args(arguments)
    commands[options.command](Speakers(options.sounds), options)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
