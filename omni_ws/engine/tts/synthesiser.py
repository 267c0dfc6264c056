"""Synthesiser, the interface of speech synthesisers in the voice worker; and the messages of worker and server.

This module imports little, so that the worker starts fast.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeAlias

import msgspec


class NoVoice(Exception):
    """Raised if a synthesiser is not installed, or does not work on this machine."""


class SpokenWord(NamedTuple):
    """A word and its times, in milliseconds from the start of the audio."""

    text: str
    start_ms: int
    end_ms: int


class PronouncedWord(NamedTuple):
    """A word as espeak-ng pronounces it: the index in the text at which the word begins, and its phonemes in IPA."""

    position: int
    phonemes: list[str]


@dataclass(frozen=True, slots=True)
class VoiceFacts:
    """A description of a synthesiser.

    ``synthesiser`` (its name and version) and ``source`` (where it was found) are texts for the operator; ``voices``
    are names for requests, the default first.
    """

    synthesiser: str
    source: str
    voices: tuple[str, ...] = field(default=())
    #: The language of each voice (RFC 5646).
    languages: Mapping[str, str] = field(default_factory=dict)
    #: Whether it can only speak text in Latin letters.
    latin_only: bool = False
    #: The CPU time that a second of speech took on this machine; 0 where it is so little that nobody measured.
    pace: float = 0.0


class SynthesisListener(Protocol):
    """A receiver of the audio and the words of a text while the text is being spoken."""

    def audio(self, sample_rate: int, pcm16: bytes) -> bool:
        """Take the next samples, little-endian 16-bit mono; return whether the synthesiser is to go on."""
        ...

    def words(self, words: list[SpokenWord]) -> None:
        """Take the next words, in order; their audio may come before or after this call."""
        ...


class Synthesiser(Protocol):
    """A speech synthesiser. A process has only one, which speaks one text at a time: libraries keep global state."""

    @property
    def facts(self) -> VoiceFacts: ...

    def speak(self, asked: Speak, listener: SynthesisListener) -> None:
        """Speak the text of ``asked``, and pass its audio and words to ``listener``. Blocks."""
        ...

    def interrupt(self) -> None:
        """Have ``speak`` end soon, if it would take long, because nobody listens. Called from another thread."""
        ...


# Messages between the server and the voice worker. A job is the number of a text; 0 means none.


class Speak(msgspec.Struct, frozen=True, tag=True):
    """An order to speak ``text``; the worker answers with SpokenPcm and SpokenWords, and then Done.

    ``pronounced`` are the words of the text, for a voice that cannot read the language of the text itself.
    """

    job: int
    voice: str
    speed: float
    text: str
    pronounced: list[PronouncedWord] = []


class Pronounce(msgspec.Struct, frozen=True, tag=True):
    """An order to return how ``voice`` of espeak-ng pronounces ``text``; the worker answers Pronounced, then Done."""

    job: int
    voice: str
    text: str


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """An order to stop speaking a job; the worker still answers with Done."""

    job: int


class VoiceReady(msgspec.Struct, frozen=True, tag=True):
    """The first message of the worker. ``facts`` is None if there is no voice: then the worker ends, for ``reason``."""

    facts: VoiceFacts | None
    reason: str = ""


class SpokenPcm(msgspec.Struct, frozen=True, tag=True):
    """The next samples of a job; the body of the message is pcm16, little-endian."""

    job: int
    sample_rate: int


class SpokenWords(msgspec.Struct, frozen=True, tag=True):
    """The next words of a job, with their times from the start of its audio."""

    job: int
    words: list[SpokenWord]


class Pronounced(msgspec.Struct, frozen=True, tag=True):
    """The answer to Pronounce: the words of the text, as espeak-ng pronounces them."""

    job: int
    words: list[PronouncedWord]


class Done(msgspec.Struct, frozen=True, tag=True):
    """A report that a job has ended: normally, after Cancel or, if ``failure`` is set, with an error."""

    job: int
    failure: str = ""


ToWorker: TypeAlias = Speak | Pronounce | Cancel
FromWorker: TypeAlias = VoiceReady | SpokenPcm | SpokenWords | Pronounced | Done
