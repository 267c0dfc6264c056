"""Recordings of people with their words, and of music and typing: from packages (corpus.lock), and from tests/data."""

from __future__ import annotations

import gzip
import io
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import av
import numpy as np

from benchmarks.speech.debian import DebianSource, files_of
from omni_ws.audio.pcm import Samples
from omni_ws.config.values import user_cache_folder
from omni_ws.weights import (
    PackageSource,
    WeightsCache,
    read_lock,
)

LOCK: Final = Path(__file__).with_name("corpus.lock")
_TEST_DATA: Final = Path(__file__).parents[2] / "tests" / "data"
_RATE: Final = 16_000
_PROMPTS: Final = re.compile(r"usr/share/asterisk/sounds/\w+/(.+)\.g722")
_PROMPT_TEXTS: Final = "usr/share/doc/asterisk-core-sounds-{0}/core-sounds-{0}.txt.gz"
#: In the texts of prompts: signs as they are said, and misprints.
_AS_SAID: Final = {
    "*": "star",
    "#": "pound",
    "umute": "unmute",
    "represenatives": "representatives",
    "fourtieth": "fortieth",
    "Un-indentified": "Unidentified",
    "witheld": "withheld",
}
#: What has so many words counts as a sentence.
SENTENCE_WORDS: Final = 6

#: tests/data/README.md
_OF_TESTS: Final = {
    "goforward": "go forward ten meters",
    "cards_001": "ten of clubs",
    "cards_005": "eight of spades four of clubs seven of hearts",
    "librivox_ss_0870": (
        "and mister john dashwood had then leisure to consider how much there might be prudently in his power to do "
        "for them"
    ),
}
_READ_ALOUD: Final = {
    "two_cities": (
        "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness, "
        "it was the epoch of belief, it was the epoch of incredulity, it was the season of Light, it was the season of "
        "Darkness, it was the spring of hope, it was the winter of despair, we had everything before us, we had "
        "nothing before us, we were all going direct to Heaven, we were all going direct the other way—in short, the "
        "period was so far like the present period, that some of its noisiest authorities insisted on its being "
        "received, for good or for evil, in the superlative degree of comparison only."
    ),
    "beckett": "Ever tried. Ever failed. No matter. Try again. Fail again. Fail better.",
}


@dataclass(frozen=True, slots=True)
class Clip:
    """A recording at 16 kHz, and what is said in it."""

    name: str
    source: str
    words: str
    samples: Samples

    @property
    def seconds(self) -> float:
        return len(self.samples) / _RATE

    @property
    def length(self) -> int:
        """How many words are said."""
        return len(self.words.split())

    @property
    def is_sentence(self) -> bool:
        return self.length >= SENTENCE_WORDS

    def changed(self, kind: str, change: Callable[[Samples], Samples]) -> Clip:
        """This recording made worse."""
        return replace(self, name=f"{self.name}, {kind}", samples=change(self.samples))


def fetched(name: str) -> Path:
    """The folder of recordings of the lock. Raises WeightsError where they cannot be fetched."""
    store = WeightsCache(user_cache_folder() / "recordings", [PackageSource(), DebianSource()])
    return store.fetch(read_lock(LOCK.read_text(encoding="utf-8"))[name])


def recordings() -> list[Clip]:
    """All recordings of speech, always in the same order."""
    return [*clips_of_tests(), *read_aloud(), *telephone_prompts()]


def clips_of_tests() -> Iterator[Clip]:
    """What the tests recognise: three speakers of the tests of another recogniser, and one of LibriVox."""
    for name, words in _OF_TESTS.items():
        yield Clip(name, "the clips of the tests", words, decoded((_TEST_DATA / f"{name}.wav").read_bytes()))


def read_aloud() -> Iterator[Clip]:
    """Two speakers, with pauses and with expression."""
    folder = fetched("read-aloud")
    for name, words in _READ_ALOUD.items():
        yield Clip(name, "lines read aloud", words, decoded((folder / f"{name}.wav").read_bytes()))


def telephone_prompts(language: str = "en") -> Iterator[Clip]:
    """One speaker of a language; sentences, phrases and single words."""
    folder = fetched("telephone-prompts" if language == "en" else f"telephone-prompts-{language}")
    sounds, about = sorted(folder.glob("*.deb"))
    texts = prompt_texts(dict(files_of(about))[_PROMPT_TEXTS.format(language)])
    for path, content in sorted(files_of(sounds)):
        found = _PROMPTS.fullmatch(path)
        if found is not None and (words := texts.get(name := found[1], "")):
            yield Clip(name, _kind_of_prompt(name, words), words, decoded(content, "g722"))


def prompt_texts(packed: bytes) -> dict[str, str]:
    """The texts of prompts by their names, without those of tones and the like."""
    whole = gzip.decompress(packed).decode("utf-8")
    for written, said in _AS_SAID.items():
        whole = whole.replace(written, said)
    lines = (line.partition(":") for line in whole.splitlines())
    return {
        name.strip(): text.strip()
        for name, colon, text in lines
        if colon and not name.startswith(";") and not re.search(r"[\[(<]", text) and re.search("[A-Za-z0-9]", text)
    }


def _kind_of_prompt(name: str, words: str) -> str:
    folder, slash, _ = name.rpartition("/")
    if slash and folder in ("letters", "phonetic"):
        return "letters of the alphabet, and their telephone names"
    return "sentences of prompts" if len(words.split()) >= SENTENCE_WORDS else "words and phrases of prompts"


def typing(seconds: float) -> Samples:
    """Recorded keyboards, one after the other and again."""
    folder = fetched("keyboards")
    return _repeated(
        [decoded((folder / f"{name}.ogg").read_bytes()) for name in ("keyboard-typing", "keyboard-typing2")], seconds
    )


def played_music(seconds: float) -> Samples:
    """Recorded music without words."""
    (package,) = fetched("music").glob("*.deb")
    pieces = [decoded(content, "g722") for path, content in sorted(files_of(package)) if path.endswith(".g722")]
    return _repeated(pieces, seconds)


def _repeated(pieces: list[Samples], seconds: float) -> Samples:
    return np.resize(np.concatenate(pieces), int(seconds * _RATE))


def decoded(content: bytes, container: str | None = None) -> Samples:
    """The samples of a file, mono at 16 kHz."""
    resampler = av.AudioResampler("flt", "mono", _RATE)
    with av.open(io.BytesIO(content), mode="r", format=container) as opened:
        frames = [piece for frame in opened.decode(audio=0) for piece in resampler.resample(frame)]
        frames += resampler.resample(None)
    return np.concatenate([frame.to_ndarray().reshape(-1) for frame in frames]).astype(np.float32)
