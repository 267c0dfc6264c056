"""One line of the log for each session, and for each request."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final

from omni_ws.service.observing.log_lines import level_of, write_line
from omni_ws.service.observing.observer import InputAcknowledged, Origin, RequestEnded, SessionIdentity

logger = logging.getLogger("omni_ws.session")

#: Of a text that is logged on request.
MAX_CONTENT_CHARACTERS: Final = 2000


@dataclass(slots=True)
class RequestTimes:
    """On the loop's clock; the seconds of outputs are counted from the end of the input."""

    opened: float
    input_ended: float | None = None
    first_output_sec: float | None = None
    first_audio_sec: float | None = None


class SessionLog:
    """``content``: what was said is logged, too. Otherwise no line has anything in it that a client wrote."""

    def __init__(self, *, content: bool = False) -> None:
        self._content = content

    def request_ended(
        self, session: SessionIdentity, ended: RequestEnded, times: RequestTimes, *, seconds: float
    ) -> None:
        request, final, error = ended.request, ended.final, ended.error
        usage = final.usage
        write_line(
            logger,
            logging.INFO if error is None else level_of(error),
            "request",
            request_id=request.request_id,
            session_id=session.session_id,
            key_name=session.owner,
            origin=session.origin,
            task=request.config.task,
            finish_reason=final.finish_reason,
            code=None if error is None else error.code,
            chunks=request.session.received.chunks,
            received_bytes=request.session.received.bytes,
            input_audio_ms=usage.input_audio_ms,
            output_audio_ms=usage.output_audio_ms,
            input_tokens=usage.input_tokens,
            output_tokens=usage.output_tokens,
            first_output_seconds=_rounded(times.first_output_sec),
            first_audio_seconds=_rounded(times.first_audio_sec),
            seconds=_rounded(seconds),
            input_text=request.user_text[:MAX_CONTENT_CHARACTERS] if self._content else None,
            output_text=request.said.joined()[:MAX_CONTENT_CHARACTERS] if self._content else None,
        )

    def session_ended(
        self, session: SessionIdentity, received: InputAcknowledged, *, seconds: float, requests: int
    ) -> None:
        write_line(
            logger,
            # A session of one request over HTTP has a line as that request, and as an HTTP request.
            logging.DEBUG if session.origin is Origin.HTTP else logging.INFO,
            "session",
            session_id=session.session_id,
            key_name=session.owner,
            origin=session.origin,
            requests=requests,
            chunks=received.next_sequence_id,
            received_bytes=received.received_bytes,
            duplicates=received.duplicates,
            reordered=received.reordering.items,
            seconds=_rounded(seconds),
        )


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)
