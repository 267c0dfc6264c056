"""What a load test asks, and how often."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, repeat
from ssl import SSLContext
from typing import Any, Final, Self, TypeAlias

import numpy as np

from omni_ws.client.audio import Pcm16, pieces

PIECE_MS: Final = 20
PIECE_SEC: Final = PIECE_MS / 1000
#: Half a second of silence, with which an open microphone begins each turn.
LEAD_PIECES: Final = 25
#: The level of speech, relative to the loudest piece; what is softer counts as the noise of a recording.
SPEECH_LEVEL: Final = 10 ** (-26 / 20)


@dataclass(frozen=True, slots=True)
class TypedQuestion:
    """A text, sent at once."""

    text: str

    @property
    def seconds(self) -> float:
        return 0.0


@dataclass(frozen=True, slots=True)
class SpokenQuestion:
    """A recording, sent in real time.

    ``turn_detection`` is the type with which the server listens to an open microphone; None where the client ends its
    input itself. The speech ends with the last piece within 26 dB of the loudest, the ``spoken_pieces``-th.
    """

    file: str
    audio: Pcm16
    turn_detection: str | None
    spoken_pieces: int

    @classmethod
    def of(cls, file: str, audio: Pcm16, *, turn_detection: str | None) -> Self:
        """Raises ValueError for a recording without any sound."""
        levels = [_level(piece) for piece in pieces(audio, piece_ms=PIECE_MS)]
        loudest = max(levels, default=0.0)
        if loudest == 0:
            raise ValueError("the recording has no sound")
        last = max(place for place, level in enumerate(levels) if level > SPEECH_LEVEL * loudest)
        return cls(file, audio, turn_detection, last + 1)

    @property
    def seconds(self) -> float:
        """How long it takes to send it, up to the moment from which answers are timed."""
        return self.last_spoken * PIECE_SEC if self.turn_detection else self.audio.duration_ms / 1000

    @property
    def opened_microphone(self) -> Iterator[bytes]:
        """Pieces of silence, of the recording, and of silence without an end."""
        silence = bytes(2 * self.audio.channels * (self.audio.sample_rate * PIECE_MS // 1000))
        return chain(repeat(silence, LEAD_PIECES), pieces(self.audio, piece_ms=PIECE_MS), repeat(silence))

    @property
    def last_spoken(self) -> int:
        """Which piece of ``opened_microphone`` has the end of the speech, from 1."""
        return LEAD_PIECES + self.spoken_pieces


Question: TypeAlias = TypedQuestion | SpokenQuestion


def _level(piece: bytes) -> float:
    return float(np.sqrt(np.mean(np.frombuffer(piece, "<i2").astype(np.float64) ** 2)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What all talkers do. Times are seconds.

    Each asks ``turns`` times or, with None, begins no turn after ``run_sec``. ``patience_sec`` is how long an answer
    may take from the end of the input; ``pause_sec`` passes between an answer and the next question.
    """

    url: str
    question: Question
    api_key: str | None = field(default=None, repr=False)
    tls: SSLContext | None = None
    sessions: int = 4
    turns: int | None = 5
    run_sec: float | None = None
    stagger_sec: float = 0.2
    pause_sec: float = 0.0
    patience_sec: float = 30.0
    modalities: tuple[str, ...] | None = None

    @property
    def session_config(self) -> dict[str, Any]:
        """The configuration of each session. Answers are pcm16, whose length says how long it plays."""
        config: dict[str, Any] = {"output_audio": {"format": "pcm16"}}
        if self.modalities is not None:
            config["modalities"] = list(self.modalities)
        if isinstance(self.question, SpokenQuestion):
            audio = self.question.audio
            config["input_audio"] = {"format": "pcm16", "sample_rate": audio.sample_rate, "channels": audio.channels}
            if self.question.turn_detection is not None:
                config["turn_detection"] = {"type": self.question.turn_detection}
        return config
