"""UnheardOutput: what the client has not heard of an answer, to be sent where its playback goes on."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

from msgspec.structs import replace

from omni_ws.core.audio_format import SAMPLE_BYTES
from omni_ws.core.output import OutputChunk
from omni_ws.core.quota import ByteBudget
from omni_ws.service.conversation.messages import message_cost

#: What is kept of one answer: five seconds at 24 kHz. With the default ``max_lead_ms`` far less is unheard.
MAX_UNHEARD_BYTES: Final = 256 * 1024


class _SentAudio(NamedTuple):
    """A chunk, its place on the answer's time line and what it is charged with."""

    chunk: OutputChunk
    start_ms: float
    end_ms: float
    cost: int


class UnheardOutput:
    """Keeps the newest audio of one answer that was sent, and what is set aside unsent while the answer is held.

    It is charged to ``budget``. Of the audio, the oldest beyond MAX_UNHEARD_BYTES is dropped, and all of it while the
    server holds more than half of what it may.
    """

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self._kept: deque[_SentAudio] = deque()
        self._charged = 0
        #: The end of the newest audio that was dropped unheard.
        self._missing_ms: float = 0
        self._aside: Sequence[OutputChunk] = ()
        self._aside_cost = 0

    def append(self, chunk: OutputChunk, *, start_ms: float, end_ms: float, heard_ms: float) -> None:
        """Keep audio that is sent now; the client has heard the answer up to ``heard_ms``."""
        while self._kept and self._kept[0].end_ms <= heard_ms:
            self._drop()
        cost = message_cost(chunk)
        self._kept.append(_SentAudio(chunk, start_ms, end_ms, cost))
        self._charged += cost
        self._budget.used += cost
        scarce = self._budget.held > self._budget.capacity // 2
        while self._kept and (scarce or self._charged > MAX_UNHEARD_BYTES):
            self._missing_ms = self._kept[0].end_ms
            self._drop()

    def reaches(self, position_ms: float) -> bool:
        """Whether all that was sent behind this position is kept."""
        return position_ms >= self._missing_ms

    def set_aside(self, withdrawn: Sequence[OutputChunk]) -> None:
        """Keep outputs, the latest of the answer, that were withdrawn before they were sent."""
        self._aside = withdrawn
        self._aside_cost = sum(message_cost(chunk) for chunk in withdrawn)
        self._budget.used += self._aside_cost

    def take(self, position_ms: float) -> list[OutputChunk]:
        """The audio behind this position, the first chunk of raw samples cut there, and what was set aside."""
        # What was withdrawn was never sent, wherever the clock says that playback was, and is kept, too.
        places = [chunk.start_ms for chunk in self._aside if chunk.start_ms is not None]
        unsent_ms = min(places, default=math.inf)
        unheard = [one for one in self._kept if one.end_ms > position_ms]
        sent = [one for one in unheard if round(max(one.start_ms, position_ms)) < unsent_ms]
        outputs = [*(_cut(one, position_ms) for one in sent), *self._aside]
        self.drop_aside()
        return outputs

    def drop_aside(self) -> None:
        """Keep nothing more of what was set aside. Idempotent."""
        self._budget.give(self._aside_cost)
        self._aside, self._aside_cost = (), 0

    def release(self) -> None:
        """Nothing is kept any more. Idempotent."""
        self.drop_aside()
        while self._kept:
            self._drop()

    def _drop(self) -> None:
        cost = self._kept.popleft().cost
        self._charged -= cost
        self._budget.give(cost)


def _cut(sent: _SentAudio, position_ms: float) -> OutputChunk:
    chunk, audio = sent.chunk, sent.chunk.format
    if position_ms <= sent.start_ms or audio is None or not audio.is_raw:
        return chunk
    samples = int((position_ms - sent.start_ms) * audio.sample_rate / 1000)
    return replace(
        chunk,
        payload=chunk.payload[samples * SAMPLE_BYTES[audio.encoding] :],
        start_ms=round(sent.start_ms + samples * 1000 / audio.sample_rate),
        words=tuple(word for word in chunk.words if word.end_ms > position_ms),
    )
