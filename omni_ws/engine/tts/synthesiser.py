"""What a speech synthesiser is to the voice worker, and the messages between that and the server.

Imports little: the worker starts fast.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeAlias

import msgspec


class NoVoice(Exception):
    """The synthesiser is not installed, or does not work on this machine."""


class SpokenWord(NamedTuple):
    """A word and its place in milliseconds from the start of the audio."""

    text: str
    start_ms: int
    end_ms: int


@dataclass(frozen=True, slots=True)
class VoiceFacts:
    """``synthesiser`` and ``source`` are for people, ``voices`` for requests, the default first."""

    synthesiser: str
    source: str
    voices: tuple[str, ...] = field(default=())
    #: The language of each voice (RFC 5646).
    languages: Mapping[str, str] = field(default_factory=dict)
    #: Whether it speaks only what is written in Latin letters.
    latin_only: bool = False
    #: The CPU time that a second of speech took on this machine; 0 where it is so little that nobody measured.
    pace: float = 0.0


class SynthesisListener(Protocol):
    """Gets the audio and the words of a text while it is being spoken."""

    def audio(self, sample_rate: int, pcm16: bytes) -> bool:
        """The next samples, little-endian; says whether to go on."""
        ...

    def words(self, words: list[SpokenWord]) -> None:
        """Words of the audio so far or to come, in order."""
        ...


class Synthesiser(Protocol):
    """One process has one, and speaks one text at a time: the libraries keep global state."""

    @property
    def facts(self) -> VoiceFacts: ...

    def speak(self, text: str, voice: str, listener: SynthesisListener, *, speed: float) -> None: ...

    def interrupt(self) -> None:
        """End the text that is being spoken soon, where that would take long; nobody listens. From another thread."""
        ...


# Messages between the server and the voice worker. The job is the number of a text; 0 is none.


class Speak(msgspec.Struct, frozen=True, tag=True):
    """Speak ``text``; what was made and Done follow."""

    job: int
    voice: str
    speed: float
    text: str


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Speak no more of the job; Done follows all the same."""

    job: int


class VoiceReady(msgspec.Struct, frozen=True, tag=True):
    """The first message of the worker; without ``facts`` it is the only one: there is no voice, for this ``reason``."""

    facts: VoiceFacts | None
    reason: str = ""


class SpokenPcm(msgspec.Struct, frozen=True, tag=True):
    """The next samples of the job; the body is pcm16, little-endian."""

    job: int
    sample_rate: int


class SpokenWords(msgspec.Struct, frozen=True, tag=True):
    """Words of the job, with their places from the start of its audio."""

    job: int
    words: list[SpokenWord]


class Done(msgspec.Struct, frozen=True, tag=True):
    """The job has ended, by itself or after Cancel; before the end of its text where there was a ``failure``."""

    job: int
    failure: str = ""


ToWorker: TypeAlias = Speak | Cancel
FromWorker: TypeAlias = VoiceReady | SpokenPcm | SpokenWords | Done
