"""What of the answers has been heard: where playing stands, and what text that makes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from omni_ws.core.chunks import Word
from omni_ws.service.observing.timeline import PlayerStatistics

#: A word that the voice pronounced is looked for so far behind the one before it; voices skip what they cannot say.
MAX_SKIPPED_CHARACTERS = 200


class Playback:
    """How far the client has played an answer: as it reports, and between two reports as the clock says.

    Without any report the clock runs from the first audio that was sent. Milliseconds on the answer's time line.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        #: Number of the answer's first audio; None before there is any.
        self.first_sequence_id: int | None = None
        self.sent_ms: float = 0
        #: What the client said last; None where it never did.
        self.reported_ms: float | None = None
        self._now = now
        #: When the beginning of the answer was played, or would have been, had it been played without a break.
        self._origin: float | None = None
        #: Whether the answer was interrupted: the client plays nothing more of it.
        self.stopped = False
        #: How often, and how long together, a player that reports had played all there was before more came.
        self.underruns = 0
        self.underrun_sec: float = 0
        #: The least that it had left, of what was there, when it reported; None where it never did. When the answer is
        #: complete, this is of interest no more.
        self.least_lead_ms: float | None = None

    @property
    def position_ms(self) -> float:
        return 0 if self._origin is None else min(self.sent_ms, (self._now() - self._origin) * 1000)

    @property
    def playing(self) -> bool:
        return not self.stopped and self.position_ms < self.sent_ms

    @property
    def heard_ms(self) -> float:
        """What is known to have been heard; where nobody tells, what was sent."""
        return self.sent_ms if self.reported_ms is None else min(self.reported_ms, self.sent_ms)

    @property
    def statistics(self) -> PlayerStatistics:
        """How the player kept up."""
        return PlayerStatistics(self.underruns, self.underrun_sec, self.least_lead_ms)

    def sending(self, sequence_id: int, start_ms: float, end_ms: float) -> None:
        """The next audio goes out. Where the player has run dry, its clock has stood still."""
        if self.first_sequence_id is None:
            self.first_sequence_id = sequence_id
        now = self._now()
        if self._origin is None or (now - self._origin) * 1000 > start_ms:
            if self._origin is not None and self.reported_ms is not None:
                self.underruns += 1
                self.underrun_sec += now - self._origin - start_ms / 1000
            self._origin = now - start_ms / 1000
        self.sent_ms = end_ms

    def report(self, played_ms: float) -> None:
        self.reported_ms = min(played_ms, self.sent_ms)
        lead_ms = self.sent_ms - self.reported_ms
        self.least_lead_ms = lead_ms if self.least_lead_ms is None else min(lead_ms, self.least_lead_ms)
        self._origin = self._now() - self.reported_ms / 1000

    def withdraw(self, start_ms: float) -> None:
        """What was to go out from here on did not."""
        self.sent_ms = min(self.sent_ms, start_ms)

    def stop(self) -> None:
        """The answer was interrupted: a client plays nothing of it any more."""
        self.stopped = True


def heard_part(text: str, words: Sequence[Word], playback: Playback) -> str:
    """What of ``text`` was heard.

    ``words`` are those of the audio that was sent, where the engine tells them. Where it does not, the text is cut in
    proportion to the audio; without a report of the client, or without audio, what was sent counts as heard.
    """
    heard_ms = playback.heard_ms
    if words:
        return text[: _end_of_words(text, [word for word in words if word.start_ms < heard_ms])].rstrip()
    if playback.reported_ms is None or not playback.sent_ms:
        return text
    if heard_ms >= playback.sent_ms:
        return text
    kept = text[: int(len(text) * heard_ms / playback.sent_ms)]
    # A word that was not heard whole was not heard.
    return kept.rstrip() if text[len(kept) :][:1].isspace() else kept.rpartition(" ")[0].rstrip()


def _end_of_words(text: str, words: Sequence[Word]) -> int:
    """Where in ``text`` the last of ``words`` ends. Words that are not found, being spelled out, are passed over."""
    lowered, end = text.lower(), 0
    for word in words:
        spoken = word.text.strip().lower()
        found = lowered.find(spoken, end, end + MAX_SKIPPED_CHARACTERS + len(spoken)) if spoken else -1
        if found >= 0:
            end = found + len(spoken)
    while end < len(text) and not text[end].isspace() and not text[end].isalnum():
        end += 1  # the punctuation that closes what was said
    return end
