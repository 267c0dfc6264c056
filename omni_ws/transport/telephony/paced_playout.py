"""PacedPlayout: the answers of a call, 20 ms at a time, as fast as they are heard."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from omni_ws.core.chunks import FinalChunk, FinishReason, OutputChunk, OutputModality
from omni_ws.service.conversation.messages import ServerMessage
from omni_ws.wire.server_frames import SpeechStartedFrame

#: pcm16 at 8 kHz has 16 bytes a millisecond.
BYTES_PER_MS: Final = 16
FRAME_SEC: Final = 0.02
#: 20 ms.
FRAME_BYTES: Final = 20 * BYTES_PER_MS
#: With more audio than this in it, a playout takes no more: 2 s. One output may go beyond.
ROOM_BYTES: Final = 2000 * BYTES_PER_MS
#: Playback this far behind the clock goes on from now, instead of catching up.
MAX_LATE_SEC: Final = 0.1


@dataclass(slots=True)
class _WaitingAnswer:
    """An answer until its last frame was heard, with the audio that was not sent yet."""

    request_id: str
    audio: bytearray = field(default_factory=bytearray)
    #: Bytes that were sent.
    sent: int = 0
    ended: bool = False


class PacedPlayout:
    """Sends what there is to say, and nothing in between: the other side takes pauses for silence.

    ``send`` is called with each frame of pcm16, and returns whether more may be sent; if not, ``resume`` goes on.
    ``report`` is called with what was played: the request, and milliseconds on its time line.
    ``progressed`` is called when a frame, or an answer, is over.
    """

    def __init__(
        self, send: Callable[[bytes], bool], report: Callable[[str, float], None], progressed: Callable[[], None]
    ) -> None:
        self._send = send
        self._report = report
        self._progressed = progressed
        self._loop = asyncio.get_running_loop()
        self._answers: deque[_WaitingAnswer] = deque()
        self._waiting = 0
        self._held = False
        #: When the next frame is due. It is never before the last one was heard.
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def unplayed(self) -> bool:
        """Whether the caller may still be hearing something."""
        return bool(self._answers)

    @property
    def full(self) -> bool:
        """Whether it takes no more for now."""
        return self._waiting >= ROOM_BYTES

    def take(self, message: ServerMessage) -> None:
        """One of the session's messages: text, transcripts and errors are not heard."""
        match message:
            case OutputChunk(modality=OutputModality.AUDIO):
                self._say(message)
            case FinalChunk(finish_reason=FinishReason.CANCELLED):
                if any(answer.request_id == message.request_id for answer in self._answers):
                    self.clear()
            case FinalChunk():
                for answer in self._answers:
                    if answer.request_id == message.request_id:
                        answer.ended = True
                self._arm()
            case SpeechStartedFrame():  # the caller interrupts
                self.clear()

    def clear(self) -> None:
        """What was not sent is not to be heard any more."""
        self._answers.clear()
        self._waiting = 0

    def resume(self) -> None:
        """More may be sent again."""
        self._held = False
        self._arm()

    def close(self) -> None:
        self.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _say(self, chunk: OutputChunk) -> None:
        if not self._answers or self._answers[-1].request_id != chunk.request_id:
            if self._answers:
                self._answers[-1].ended = True
            self._answers.append(_WaitingAnswer(chunk.request_id))
        self._answers[-1].audio += chunk.payload
        self._waiting += len(chunk.payload)
        self._arm()

    @property
    def _ready(self) -> bool:
        """Whether there is a frame to send, or an end to pass."""
        return bool(self._answers) and (self._answers[0].ended or len(self._answers[0].audio) >= FRAME_BYTES)

    def _arm(self) -> None:
        if self._timer is not None or self._held or not self._ready:
            return
        now = self._loop.time()
        if now - self._due > MAX_LATE_SEC:
            self._due = now
        self._timer = self._loop.call_at(self._due, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if self._ready:
            answer = self._answers[0]
            self._report(answer.request_id, answer.sent / BYTES_PER_MS)
            if answer.audio:
                self._send_frame(answer)
            else:
                self._answers.popleft()
        self._arm()
        self._progressed()

    def _send_frame(self, answer: _WaitingAnswer) -> None:
        frame = bytes(answer.audio[:FRAME_BYTES])
        del answer.audio[:FRAME_BYTES]
        self._waiting -= len(frame)
        answer.sent += len(frame)
        self._due += FRAME_SEC
        self._held = not self._send(frame.ljust(FRAME_BYTES, b"\0"))
