"""SessionLog: one line of the log for each session, and one for each request."""

from __future__ import annotations

import logging
from typing import Final

from omni_ws.core.chunks import OutputModality
from omni_ws.service.observing.log_lines import level_of, write_line
from omni_ws.service.observing.observer import InputAcknowledged, Origin, SessionIdentity
from omni_ws.service.observing.timeline import RequestEnded

logger = logging.getLogger("omni_ws.session")

#: A text that is logged is cut here.
MAX_CONTENT_CHARACTERS: Final = 2000


class SessionLog:
    """Writes a line for each request and session that ended.

    Only with ``content`` do the lines contain anything that a client or an engine wrote.
    """

    def __init__(self, *, content: bool = False) -> None:
        self._content = content

    def request_ended(self, session: SessionIdentity, ended: RequestEnded) -> None:
        """Write the line of a request; its level is that of its error."""
        timeline, outcome = ended.timeline, ended.outcome
        final, error = outcome.final, outcome.error
        usage = final.usage
        write_line(
            logger,
            logging.INFO if error is None else level_of(error),
            "request",
            request_id=timeline.request_id,
            session_id=session.session_id,
            key_name=session.owner,
            origin=session.origin,
            task=timeline.task,
            finish_reason=final.finish_reason,
            code=None if error is None else error.code,
            chunks=outcome.received_chunks,
            received_bytes=outcome.received_bytes,
            input_audio_ms=usage.input_audio_ms,
            output_audio_ms=usage.output_audio_ms,
            input_tokens=usage.input_tokens,
            output_tokens=usage.output_tokens,
            first_output_seconds=_rounded(timeline.first_output_sec(timeline.first_answer_modality)),
            first_audio_seconds=_rounded(timeline.first_output_sec(OutputModality.AUDIO)),
            seconds=_rounded(outcome.at - timeline.opened),
            input_text=ended.content.user_text[:MAX_CONTENT_CHARACTERS] if self._content else None,
            output_text=ended.content.answer_text[:MAX_CONTENT_CHARACTERS] if self._content else None,
        )

    def session_ended(
        self, session: SessionIdentity, received: InputAcknowledged, *, seconds: float, requests: int
    ) -> None:
        """Write the line of a session."""
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
