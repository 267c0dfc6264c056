"""Playout: renders the answers of a call as media, marks and clears, and follows what the caller has heard."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from omni_ws.core.chunks import FinalChunk, FinishReason, OutputChunk, OutputModality
from omni_ws.service.conversation.messages import ServerMessage
from omni_ws.transport.telephony.messages import encode_clear, encode_mark, encode_media
from omni_ws.wire.server_frames import SpeechStartedFrame

#: µ-law has one byte a sample: 8 bytes a millisecond.
BYTES_PER_MS: Final = 8
#: The packet of the telephone network, 20 ms. Every media message holds whole ones.
FRAME_BYTES: Final = 20 * BYTES_PER_MS
#: The longest media message, and the audio between two marks: 200 ms.
PIECE_BYTES: Final = 10 * FRAME_BYTES
#: The silence that completes the last packet of an answer.
SILENCE: Final = b"\xff"
#: Marks that are remembered, of a gateway that returns none.
MAX_MARKS: Final = 256


@dataclass(slots=True)
class _PlayedAnswer:
    """The answer that is being sent. Positions are bytes on its time line."""

    request_id: str
    #: The beginning of the next packet.
    rest: bytearray = field(default_factory=bytearray)
    sent: int = 0
    #: Position of the last mark.
    marked: int = 0


class Playout:
    """Turns the messages of one outbox into those of the stream. Has no socket and no clock.

    A mark goes out before the first audio of an answer, after every 200 ms of it, and after its end. When it returns,
    ``report`` is called with what was played: the request, and milliseconds on its time line.
    Marks that return after a ``clear`` were not played, and are ignored.
    """

    def __init__(self, stream_sid: str, report: Callable[[str, float], None]) -> None:
        self._stream_sid = stream_sid
        self._report = report
        self._answer: _PlayedAnswer | None = None
        #: Marks that have not returned, oldest first, with what they report.
        self._marks: dict[str, tuple[str, float]] = {}

    @property
    def unplayed(self) -> bool:
        """Whether the gateway may still be playing."""
        answer = self._answer
        return bool(self._marks) or (answer is not None and answer.sent > answer.marked)

    def render(self, message: ServerMessage) -> list[bytes]:
        """The stream's messages for one of the session's: none for text, transcripts and errors."""
        match message:
            case OutputChunk(modality=OutputModality.AUDIO):
                return self._send_audio(message)
            case FinalChunk():
                return self._finish(message)
            case SpeechStartedFrame():  # the caller interrupts
                return self.clear()
        return []

    def mark_returned(self, name: str) -> None:
        """The gateway has returned a mark. Unknown names are ignored."""
        if name not in self._marks:
            return
        while self._marks:
            earlier = next(iter(self._marks))
            request_id, played_ms = self._marks.pop(earlier)
            if earlier == name:
                self._report(request_id, played_ms)
                return

    def _send_audio(self, chunk: OutputChunk) -> list[bytes]:
        messages = []
        answer = self._answer
        if answer is None or answer.request_id != chunk.request_id:
            answer = self._answer = _PlayedAnswer(chunk.request_id)
            messages.append(self._mark(answer))
        answer.rest += chunk.payload
        while size := min(len(answer.rest) // FRAME_BYTES * FRAME_BYTES, PIECE_BYTES):
            messages.append(encode_media(self._stream_sid, bytes(answer.rest[:size])))
            del answer.rest[:size]
            answer.sent += size
            if answer.sent - answer.marked >= PIECE_BYTES:
                messages.append(self._mark(answer))
        return messages

    def _finish(self, final: FinalChunk) -> list[bytes]:
        answer = self._answer
        if answer is None or answer.request_id != final.request_id:
            return []
        if final.finish_reason is FinishReason.CANCELLED:
            return self.clear()
        messages = []
        if answer.rest:
            messages.append(encode_media(self._stream_sid, bytes(answer.rest.ljust(FRAME_BYTES, SILENCE))))
            answer.sent += len(answer.rest)
        messages.append(self._mark(answer, name="end"))
        self._answer = None
        return messages

    def clear(self) -> list[bytes]:
        """What is not played is not to be heard any more. Returns nothing where everything was played."""
        unplayed, self._answer = self.unplayed, None
        self._marks.clear()
        return [encode_clear(self._stream_sid)] if unplayed else []

    def _mark(self, answer: _PlayedAnswer, *, name: str | None = None) -> bytes:
        answer.marked = answer.sent
        position_ms = answer.sent / BYTES_PER_MS
        name = f"{answer.request_id}:{name or round(position_ms)}"
        self._marks[name] = (answer.request_id, position_ms)
        if len(self._marks) > MAX_MARKS:
            del self._marks[next(iter(self._marks))]
        return encode_mark(self._stream_sid, name)
