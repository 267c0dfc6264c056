"""Counts what requests use against the daily limits of their keys."""

from __future__ import annotations

from omni_ws.service.observing.observer import Observation, RequestEnded, SessionIdentity
from omni_ws.service.sessions.admission import Admission


class DailyUseObserver:
    """Tells admission what each request has used. Register it without ``every_chunk`` and ``every_output``."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission

    def observe(self, session: SessionIdentity, observation: Observation) -> None:
        """Count a request that has ended, however it ended."""
        if isinstance(observation, RequestEnded):
            usage = observation.outcome.final.usage
            self._admission.spent(
                session.owner,
                tokens=usage.input_tokens + usage.output_tokens,
                audio_ms=usage.input_audio_ms + usage.output_audio_ms,
                reserved=observation.timeline.admitted,
            )
