"""Playback: how much of an answer the client has played, and which part of its text that is."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from omni_ws.core.chunks import Word
from omni_ws.engine.spoken.speakable_text import spoken_form
from omni_ws.service.observing.timeline import PlayerStatistics

#: Characters that may lie between two words that a voice pronounced: it skips what it cannot pronounce.
MAX_SKIPPED_CHARACTERS = 200
#: A longer text is cut by its own length: to measure what is read of it would take too long.
MAX_MEASURED_CHARACTERS = 1 << 15


class Playback:
    """The playback position of one answer, in milliseconds on its audio's time line.

    Clients may report how much they have played. From one report to the next, and from the first audio where there are
    none, the position advances with the clock ``now``, up to the audio that was sent.
    """

    def __init__(self, now: Callable[[], float], *, assumed: bool = False) -> None:
        """``assumed``: a client that reports nothing plays what it is sent, without a pause."""
        #: ``sequence_id`` of the first audio; None before it.
        self.first_sequence_id: int | None = None
        self.sent_ms: float = 0
        #: The latest report; None without any.
        self.reported_ms: float | None = None
        self.assumed = assumed
        self._now = now
        #: When the answer began to play, shifted by every pause since.
        self._origin: float | None = None
        #: Whether the answer was interrupted: the client plays nothing more of it.
        self.stopped = False
        #: Where it stands while the answer is held; None while it is not.
        self._held_ms: float | None = None
        self._sent_before_hold_ms: float = 0
        #: How often a client that reports had played everything before more audio was sent, and for how long together.
        self.underruns = 0
        self.underrun_sec: float = 0
        #: The smallest lead at any report: audio that was sent and not played. None without reports.
        self.least_lead_ms: float | None = None

    @property
    def position_ms(self) -> float:
        """The estimated position."""
        if self._held_ms is not None:
            return self._held_ms
        return 0 if self._origin is None else min(self.sent_ms, (self._now() - self._origin) * 1000)

    @property
    def playing(self) -> bool:
        """Whether audio that was sent is not played yet."""
        return not self.stopped and self._held_ms is None and self.position_ms < self.sent_ms

    @property
    def heard_ms(self) -> float:
        """What was heard: by the latest report; without reports, all that was sent.

        Where playback is assumed, ``stop`` makes a report.
        """
        return self.sent_ms if self.reported_ms is None else min(self.reported_ms, self.sent_ms)

    @property
    def resume_ms(self) -> float:
        """Where an answer that is held goes on: at the latest report, or, without reports, where the clock was."""
        return self.position_ms if self.reported_ms is None else min(self.reported_ms, self.sent_ms)

    @property
    def statistics(self) -> PlayerStatistics:
        """How the player kept up."""
        return PlayerStatistics(self.underruns, self.underrun_sec, self.least_lead_ms)

    def sending(self, sequence_id: int, start_ms: float, end_ms: float) -> None:
        """Audio from ``start_ms`` to ``end_ms`` is sent. After an underrun the position continues from there."""
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
        """The client reports its position, which is clamped to the audio that was sent."""
        self.reported_ms = min(played_ms, self.sent_ms)
        lead_ms = self.sent_ms - self.reported_ms
        self.least_lead_ms = lead_ms if self.least_lead_ms is None else min(lead_ms, self.least_lead_ms)
        self._origin = self._now() - self.reported_ms / 1000

    def withdraw(self, start_ms: float) -> None:
        """Audio from here on was taken back before it was sent."""
        self.sent_ms = min(self.sent_ms, start_ms)

    def hold(self) -> None:
        """The client has stopped playing, until ``go_on``; it may still report what it had heard by then."""
        self._held_ms = self.position_ms
        self._sent_before_hold_ms = self.sent_ms

    def go_on(self) -> None:
        """What was not heard, and what was withdrawn meanwhile, is sent now, and plays from where it was heard to."""
        if self._origin is not None:
            self._origin = self._now() - self.resume_ms / 1000
        self.sent_ms = self._sent_before_hold_ms
        self._held_ms = None

    def stop(self) -> None:
        """The answer is interrupted: the client plays nothing more of it."""
        if self.assumed and self.reported_ms is None and self.playing:
            self.reported_ms = self.position_ms
        self.stopped = True


def heard_part(text: str, words: Sequence[Word], playback: Playback) -> str:
    """The part of an answer's ``text`` that was heard.

    ``words`` are those of the audio that was sent, where the engine reports them: the text is cut behind the last one
    that began to play. Without them it is cut in proportion to the audio: where the same share of what a voice reads of
    the text ends. Without reports of the client, or without audio, all of it counts as heard.
    """
    heard_ms = playback.heard_ms
    if words:
        return text[: _end_of_words(text, [word for word in words if word.start_ms < heard_ms])].rstrip()
    if playback.reported_ms is None or not playback.sent_ms:
        return text
    if heard_ms >= playback.sent_ms:
        return text
    kept = text[: _end_of_share(text, heard_ms / playback.sent_ms)]
    # A word that was cut was not heard.
    return kept.rstrip() if text[len(kept) :][:1].isspace() else kept.rpartition(" ")[0].rstrip()


def _end_of_share(text: str, share: float) -> int:
    """The index in ``text`` up to which ``share`` of what is read of it stands. Code and addresses take no time."""
    if len(text) > MAX_MEASURED_CHARACTERS:
        return int(len(text) * share)
    pieces = spoken_form(text, language="")
    left = int(sum(len(piece.text) for piece in pieces) * share)
    for piece in pieces:
        left -= len(piece.text)
        if left < 0:
            return max(piece.start, piece.end + left)
    return len(text)


def _end_of_words(text: str, words: Sequence[Word]) -> int:
    """The index in ``text`` where the last of ``words`` ends. Words that are not found are skipped."""
    lowered, end, exact = _lowered(text), 0, False
    for word in words:
        if word.text_end is not None:
            end, exact = min(word.text_end, len(text)), True
            continue
        spoken = _lowered(word.text.strip())
        found = lowered.find(spoken, end, end + MAX_SKIPPED_CHARACTERS + len(spoken)) if spoken else -1
        if found >= 0:
            end, exact = found + len(spoken), False
    while not exact and end < len(text) and not text[end].isspace() and not text[end].isalnum():
        end += 1  # closing punctuation
    return end


def _lowered(text: str) -> str:
    """The text in lower case, character for character: "İ" is the only one whose lower case has another length."""
    return text.replace("İ", "i").lower()
