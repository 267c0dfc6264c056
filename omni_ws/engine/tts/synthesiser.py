"""What a speech synthesiser is to the voice worker. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol


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


class SynthesisListener(Protocol):
    """Takes what is being spoken."""

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
