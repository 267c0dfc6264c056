"""The contract between listening and recognition: utterances in, words out."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from omni_ws.audio.samples import Pcm16
from omni_ws.core.chunks import Hearing, Word
from omni_ws.engine.asr.utterance import Utterance, UtteranceLimits


@dataclass(frozen=True, slots=True)
class Recognised:
    """What was understood of an utterance; ``text`` is empty if nothing was. Times count from its first sample."""

    text: str = ""
    words: tuple[Word, ...] = ()
    hearing: Hearing | None = None


class LiveText(Protocol):
    """Reads the utterances of one request while they are spoken. Used by one thread at a time."""

    def read(self, utterance: Utterance) -> str | None:
        """Return what ``utterance``, which has grown, seems to say so far; later audio may change it. May block.

        None if it cannot be read yet; it is offered again as soon as it has grown.
        """
        ...

    def end(self) -> None:
        """Release what was held for the utterance; the next one may follow. Idempotent."""
        ...


class Recogniser(Protocol):
    """Writes utterances down for any number of requests.

    Its own threads do the work: what has been spoken to its end goes before what is still being spoken.
    """

    limits: UtteranceLimits

    def start(self) -> None:
        """Load the model. Blocks; raises EngineFailed where recognition cannot work."""
        ...

    def close(self) -> None:
        """Wait for the utterances under way, drop the waiting ones, and free all. Blocks. Idempotent."""
        ...

    def expect(self, talkers: int) -> None:
        """Prepare for so many requests with speech at the same time. Does not block."""
        ...

    def live_text(self) -> LiveText:
        """Return the reader for a new request."""
        ...

    def transcribe(self, pcm: Pcm16, *, waited_for: bool = True) -> Future[Recognised]:
        """Write a whole utterance down; equal samples give equal words.

        ``waited_for``: a speaker waits for the words, as opposed to whoever sends a recording. Cancelling works until
        the work has begun; after that, the result may be ignored.
        """
        ...
