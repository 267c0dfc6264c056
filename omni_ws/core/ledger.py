"""Ledger: the record of what was said and what was heard in one session, and the only place that computes either.

**Entries.** A LedgerEntry is one request with its answer: what the user typed and said, the results of tools, the
answer's text as the engine said it, its tool calls, and its audio as it was made, sent and played. ``Ledger.open``
begins an entry, ``finish`` puts it into the history, and later facts (a late transcript, a cut, a playback report)
revise it there.

**Playback.** The client plays answers one after the other, in the order in which their first audio was sent. ``_line``,
the playback line, has the answers in this order, and ``_at`` is the index of the answer that plays now, or played last.
The position in this answer advances with ``now`` from ``_origin`` on, up to the audio that was sent; a report of the
client sets the position. The next answer starts when the one before ends.

**Heard.** An answer that is never cut counts as heard whole. ``cut`` determines how much of an answer was heard: up to
the latest report; without a report, up to the position on the playback line, if the client reports at all or is
``clocked``; otherwise all that was sent. Until a request has read the history, a later report may still correct this.
``heard_text`` maps the position to the text.

**Bounds.** Text is kept up to MAX_KEPT_TEXT characters an entry; words and clauses up to MAX_MARKS, older ones being
merged into one position; entries with these details up to MAX_ENTRIES and MAX_DETAIL. After that the history, which has
bounds of its own, keeps only the messages.

Times are seconds on the caller's clock. ``to_bytes`` serialises the ledger, and ``restore`` reads it again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from omni_ws.core.chunks import AudioFormat, OutputChunk
from omni_ws.core.history import ALL_ROLES, WORDS_UNKNOWN, HistoryItems, HistoryState, Message, Speech, speech_bytes
from omni_ws.core.ledger_entry import (
    Clause,
    LedgerEntry,
    Read,
    SentAudio,
    Unheard,
    audible,
    end_of_clauses,
    end_of_words,
    read_all,
)
from omni_ws.core.quota import ByteBudget, beyond_ordinary

#: The number of entries that are over and played, and of which more is kept than the history has.
MAX_ENTRIES: Final = 16
#: The size of what such entries may hold together, in characters; a word or a clause counts MARK_SIZE.
MAX_DETAIL: Final = 1 << 20
#: The audio of one answer that is kept to be sent again: five seconds at 24 kHz.
MAX_UNHEARD_BYTES: Final = 256 * 1024
#: The least sound from which a voice's pace is measured, and the length beyond which older sound counts half.
_LEAST_PACE_MS: Final = 1000
_MOST_PACE_MS: Final = 600_000
_PLAYED_KEPT: Final = 8


class _State(msgspec.Struct, kw_only=True):
    """The contents of a Ledger, for serialisation. Only the first ``known`` entries can be found by their ids."""

    history: HistoryState
    entries: list[LedgerEntry]
    known: int
    line: list[str]
    at: int
    origin: float
    clocked: bool
    reporting: bool
    pace_characters: float
    pace_ms: float
    language: str | None = None


_STATE: Final = msgspec.msgpack.Decoder(_State)


class Ledger:
    """The record of what was said and heard in one session: see the module.

    ``max_tokens`` and ``budget`` bound the history, see HistoryItems. ``read`` returns the pieces of a text that a
    voice reads aloud; the ledger needs it for voices that do not report when each word is spoken.
    """

    __slots__ = (
        "_at",
        "_budget",
        "_closed",
        "_entries",
        "_line",
        "_origin",
        "_pace_characters",
        "_pace_ms",
        "_read",
        "_weighed",
        "clocked",
        "history",
        "language",
        "reporting",
        "sound",
    )

    def __init__(self, max_tokens: int, budget: ByteBudget, *, read: Read = read_all) -> None:
        self.history = HistoryItems(max_tokens, budget)
        #: Whether a client that sends no reports is assumed to play audio as soon as it is sent, without a pause.
        self.clocked = False
        #: Whether the client has ever reported its playback.
        self.reporting = False
        #: The language in which the user spoke last (primary subtag of RFC 5646); None if it is not known.
        self.language: str | None = None
        #: Keeps audio that was sent until the echo canceller has taken it; None without an echo canceller.
        self.sound: SentSound | None = None
        self._budget = budget
        #: The bytes that are charged for texts and marks.
        self._weighed = 0
        self._closed = False
        self._read = read
        self._entries: dict[str, LedgerEntry] = {}
        self._line: list[LedgerEntry] = []
        self._at = 0
        #: When the answer at ``_at`` began to play, moved on by every pause since.
        self._origin = 0.0
        #: The length of the texts that were spoken completely, in characters, and of their sound.
        self._pace_characters = 0.0
        self._pace_ms = 0.0

    # entries

    def open(
        self, request_id: str, *, speaks: bool = False, writes: bool = True, resumable: bool = False
    ) -> LedgerEntry:
        """Open the entry of a request. The history orders requests as they were opened, whichever ends first.

        ``speaks``: the answer is to be spoken. ``writes``: its text is sent. ``resumable``: audio that was sent and not
        heard is kept, to be sent again. A restored request already has an entry, which is returned as it is.
        """
        kept = Unheard() if resumable else None
        if (known := self._entries.get(request_id)) is not None:  # restored, for a request that continues
            return known
        entry = LedgerEntry(request_id=request_id, speaks=speaks, writes=writes, kept=kept)
        self._entries[request_id] = entry
        self.history.open(request_id)
        return entry

    def find(self, request_id: str) -> LedgerEntry | None:
        """Return the entry of a request; None if the history alone remembers the request."""
        return self._entries.get(request_id)

    def finish(
        self,
        entry: LedgerEntry,
        *,
        whole: bool,
        cancelled: bool = False,
        remembered: bool = True,
        speech: Speech | None = None,
        words_unknown: bool = False,
    ) -> None:
        """End an entry after its final output, and add it to the history if it is to be ``remembered``.

        ``whole``: the engine completed the answer. ``cancelled``: it ends because the client or speech cancelled it.
        ``speech`` is the user's audio, already charged to the budget, if its words are not known. ``words_unknown``:
        its words are not known, and the audio could not be kept.

        Audio that was kept to be sent again is dropped, and so are the details of old entries beyond the bounds.
        """
        entry.end(whole=whole, cancelled=cancelled, speech=speech, words_unknown=words_unknown)
        self._budget.give(entry.keep_no_audio())
        if remembered:
            self.history.add(self._messages(entry), request_id=entry.request_id)
        else:
            entry.leave_out(ALL_ROLES)
        if whole and entry.made_ms >= _LEAST_PACE_MS:
            self._measure(entry)
        self._drop_details()

    def withdraw(self, request_id: str) -> None:
        """Take back a request that had no answer, as if it had never opened."""
        entry = self._entries.pop(request_id, None)
        if entry is not None:
            self._budget.give(entry.keep_no_audio())
        self.history.withdraw(request_id)

    def at_play(self, now: float) -> LedgerEntry | None:
        """Return the answer that plays now or played last, by the playback line; None before the first."""
        self._advance(now)
        return self._line[self._at] if self._line else None

    def hear(self, entry: LedgerEntry, text: str, *, language: str | None = None) -> None:
        """Add a settled transcript to an entry, in ``language`` (primary subtag of RFC 5646) if that is known."""
        entry.hear(text, language=language)
        self.language = language or self.language

    def last_said(self) -> str:
        """Return the text that was heard of the latest answer with text; empty if no entry has one any more."""
        said = (entry for entry in reversed(self._entries.values()) if entry.said.length)
        return next(map(self.heard_text, said), "")

    def late_transcript(self, request_id: str, text: str) -> bool:
        """Add a transcript that arrives after the final of its request. Return whether the history has it now.

        The history lacks it if the request is not over, is forgotten, or has no input in the history.
        """
        entry = self._entries.get(request_id)
        if entry is None or not entry.finished or not entry.input_kept:
            return False
        entry.hear_late(text)
        return self.history.revise(request_id, self.question(entry))

    def _messages(self, entry: LedgerEntry, answer: Message | None = None) -> Iterator[Message]:
        if entry.input_kept:
            yield from _results(entry)
            yield self.question(entry)
        if entry.answer_kept:
            yield answer or self.answer(entry)

    def question(self, entry: LedgerEntry) -> Message:
        """Return the user's message of an entry, as far as its words are known."""
        typed = entry.typed.decode("utf-8", "replace")
        if entry.speech is not None:
            return Message("user", typed, speech=entry.speech)
        if entry.words_unknown:
            return Message("user", " ".join(filter(None, [typed, WORDS_UNKNOWN])))
        return Message("user", entry.user_text, language=entry.language)

    def answer(self, entry: LedgerEntry) -> Message:
        """Return the answer as a message for the history: if it was cut, only the part that was heard.

        Of a cancelled answer, a call that was cut off is left out.
        """
        text = self.heard_text(entry)
        # A cancelled answer may end within a call: no client can answer such a call, and no engine accepts it.
        calls = tuple(call for call in entry.tool_calls if call.is_whole or not entry.cancelled)
        return Message("assistant", text, tool_calls=calls)

    def heard_text(self, entry: LedgerEntry) -> str:
        """Return the part of the answer's text that was heard or, if it is not cut, will be heard."""
        return self._heard_text(entry, entry.cut_ms)

    def _heard_text(self, entry: LedgerEntry, cut_ms: float | None) -> str:
        text = entry.said.joined()
        if cut_ms is None:
            return text if entry.writes or audible(text) else ""
        if not entry.sent_ms:  # text without sound counts as heard when it is sent
            return "" if entry.unheard else text[: entry.shown].rstrip()
        if entry.whole and cut_ms >= entry.made_ms:
            return text
        if cut_ms <= 0:
            return ""
        if entry.words or entry.base_ms:
            return self._heard_words(entry, text, cut_ms)
        clauses = entry.clauses or [Clause(0, entry.made_ms, 0, len(text))]
        pace = self._pace(entry)
        end = end_of_clauses(text, clauses, cut_ms, whole=entry.whole, pace=pace, read=self._read)
        return audible(text[:end])

    def _heard_words(self, entry: LedgerEntry, text: str, cut_ms: float) -> str:
        if cut_ms < entry.base_ms:  # the words before ``base_ms`` are no longer known one by one
            clause = [Clause(0, entry.base_ms, 0, entry.base_end)]
            end = end_of_clauses(text, clause, cut_ms, whole=True, pace=None, read=self._read)
        elif entry.words:
            begun = (word for word in entry.words if word.start_ms < cut_ms)
            end = end_of_words(text, begun, begin=entry.base_end)
        else:
            summed = Clause(0, entry.base_ms, 0, entry.base_end)
            clauses = [summed, *entry.clauses]
            pace = self._pace(entry)
            end = end_of_clauses(text, clauses, cut_ms, whole=entry.whole, pace=pace, read=self._read)
        return audible(text[:end])

    def _pace(self, entry: LedgerEntry) -> float | None:
        """The pace of the answer's voice in characters a second; None if it is not known."""
        known = entry.clauses[:-1]
        lasted = sum(clause.end_ms - clause.start_ms for clause in known)
        if lasted >= _LEAST_PACE_MS:
            return sum(clause.end - clause.start for clause in known) * 1000 / lasted
        return self._pace_characters * 1000 / self._pace_ms if self._pace_ms else None

    def _measure(self, entry: LedgerEntry) -> None:
        self._pace_characters += entry.said.length
        self._pace_ms += entry.made_ms
        if self._pace_ms > _MOST_PACE_MS:
            self._pace_characters /= 2
            self._pace_ms /= 2

    # the loudspeaker

    def send(self, entry: LedgerEntry, number: int, start_ms: float, end_ms: float, now: float) -> None:
        """Record that audio from ``start_ms`` to ``end_ms`` was made and sent, as output ``number``.

        After an underrun the position continues from ``start_ms``.
        """
        if self._at + 1 < len(self._line):
            self._advance(now)
        if entry.first_number is None:
            entry.begin_to_play(number, now)
            self._line.append(entry)
            if len(self._line) == 1:
                self._at, self._origin = 0, now
            self._advance(now)
        entry.send_to(end_ms)
        if self._line[self._at] is entry:
            late_sec = now - self._origin - start_ms / 1000
            if late_sec > 0:
                entry.run_dry(late_sec)
                self._origin = now - start_ms / 1000

    def position_ms(self, entry: LedgerEntry, now: float) -> float:
        """Return the client's position in the answer according to the playback line, in milliseconds.

        Of a held or cut answer, return where it was held or cut.
        """
        if entry.held_ms is not None:
            return entry.held_ms
        if entry.cut_ms is not None:
            return entry.cut_ms
        self._advance(now)
        if entry.first_number is None:
            return 0
        if self._line[self._at] is entry:
            # Clocks count binary fractions of seconds: without rounding, the position could be just before a word's
            # start.
            return min(entry.sent_ms, round(max(0.0, now - self._origin) * 1000, 3))
        return 0 if entry in self._line[self._at :] else entry.sent_ms

    def due_ms(self, entry: LedgerEntry, start_ms: float, now: float) -> float:
        """Return the milliseconds until the client plays the audio at ``start_ms`` of the answer.

        Answers before it are played to their end first. What follows of a cut answer is not played, and so is due now.
        """
        if entry.cut_ms is not None:
            return 0
        position = self.position_ms(entry, now)
        before = 0.0
        for other in self._line[self._at :]:
            if other is entry:
                break
            if other.cut_ms is None:
                before += other.sent_ms - self.position_ms(other, now)
        return start_ms - position + before

    def keep_sound(self, wanted: bool) -> None:
        """Set whether audio that is sent from now on is kept for the echo canceller.

        The memory of the audio and of the canceller is charged.
        """
        if wanted and self.sound is None and not self._closed:
            self.sound = SentSound(self._budget)
        elif not wanted and self.sound is not None:
            self.sound.close()
            self.sound = None

    def what_plays(self, now: float, *, ago_ms: float) -> Playing:
        """Return the client's playback ``ago_ms`` ago, with the audio that was sent since the last call."""
        sent = () if self.sound is None else self.sound.take()
        at_ms = now * 1000 - ago_ms
        self._advance(now)
        if not self._line:
            return Playing(at_ms, None, 0, sounds=False, moves=False, sent=sent)
        entry = self._line[self._at]
        position_ms = self.position_ms(entry, now)
        sounds = entry.cut_ms is None and entry.held_ms is None
        moves = position_ms < entry.sent_ms
        return Playing(at_ms, entry.request_id, position_ms - ago_ms, sounds, moves, sent)

    def playing(self, now: float) -> bool:
        """Return whether any audio that was sent is not played yet."""
        self._advance(now)
        return any(self._unplayed(entry, now) for entry in self._line[self._at :])

    def played_by(self, now: float) -> float:
        """Return when all audio that was sent will have been played, by the playback line; ``now`` if it has been."""
        self._advance(now)
        unplayed = (one for one in self._line[self._at :] if self._unplayed(one, now))
        return now + sum(one.sent_ms - self.position_ms(one, now) for one in unplayed) / 1000

    def resume_ms(self, entry: LedgerEntry, now: float) -> float:
        """Return the position in ms at which a held answer resumes: as last reported, or else by the playback line."""
        if entry.reported_ms is None:
            return self.position_ms(entry, now)
        return min(entry.reported_ms, entry.sent_ms)

    def report(
        self, played_ms: float, *, now: float, request_id: str | None = None, sequence_id: int | None = None
    ) -> str | None:
        """Process a playback report: the client has played ``played_ms`` of an answer.

        Returns the id of the answer's request if this is the first report that the client has played some of it.

        Without ``request_id`` the report is about the answer that plays now or played last, by the playback line, or
        about an earlier one: the latest whose first audio has no number above ``sequence_id``. All answers before the
        reported answer then count as heard, unless they were cut, and all after it as not begun. Of a cut answer, the
        report corrects how much was heard, unless a request has read the history since. A report of less than before,
        about an unknown answer, or about one before an answer that was reported, changes nothing.
        """
        self._advance(now)
        index = self._reported_index(request_id, sequence_id)
        if index is None:
            return None
        entry = self._line[index]
        if any(one.reported_ms is not None for one in self._line[index + 1 :]):
            return None
        played_ms = min(played_ms, entry.sent_ms)
        if entry.reported_ms is not None and played_ms < entry.reported_ms:
            return None
        self.reporting = True
        for earlier in self._line[:index]:
            earlier.report_whole()
        if entry.cut_ms is not None:
            if not entry.read:
                entry.report_cut(played_ms)
                self._revise(entry)
            self._at, self._origin = index, now  # the following answers begin now
            self._advance(now)
            return None
        begins = played_ms > 0 and not entry.reported_ms
        entry.report(played_ms)
        if entry.held_ms is None:
            self._at, self._origin = index, now - played_ms / 1000
        return entry.request_id if begins else None

    def _reported_index(self, request_id: str | None, sequence_id: int | None) -> int | None:
        if request_id is not None:
            places = (index for index, one in enumerate(self._line) if one.request_id == request_id)
            return next(places, None)
        for index in range(min(self._at, len(self._line) - 1), -1, -1):
            first = self._line[index].first_number
            if sequence_id is None or (first is not None and first <= sequence_id):
                return index
        return None

    def cut(self, entry: LedgerEntry, now: float, *, unheard: bool = False, at_ms: float | None = None) -> None:
        """Cut an answer: the client plays nothing more of it. ``at_ms`` is where playback stopped, if that is known.

        ``unheard``: the user went on speaking, so the answer counts as not heard if none of its audio was sent. A
        second call changes nothing unless it has ``at_ms``, which then replaces the position of the cut.
        """
        self._advance(now)
        if entry.cut_ms is not None:
            if at_ms is not None:
                entry.cut(at_ms)
                self._revise(entry)
            return
        entry.cut_first(self._heard_ms(entry, now) if at_ms is None else at_ms, unheard=unheard)
        if entry.first_number is not None and self._line[self._at] is entry:
            self._origin = now  # the next answer begins now
            self._advance(now)
        self._revise(entry)

    def stop(self, request_id: str, now: float) -> bool:
        """Cut the answer of a request if the client has not played all its sent audio. Return whether it was cut."""
        entry = self._entries.get(request_id)
        if entry is None or not self._unplayed(entry, now):
            return False
        self.cut(entry, now)
        return True

    def play_at_once(self) -> None:
        """Assume, until the client sends a report, that it plays audio as soon as it is sent, without a pause."""
        self.clocked = True

    def silence(self, now: float, *, spared: LedgerEntry | None = None) -> None:
        """Cut all answers whose sent audio is not yet played to the end, except ``spared`` and held ones."""
        self._advance(now)
        for entry in [one for one in self._line[self._at :] if one is not spared and self._unplayed(one, now)]:
            self.cut(entry, now)

    def _unplayed(self, entry: LedgerEntry, now: float) -> bool:
        if entry.cut_ms is not None or entry.held_ms is not None:
            return False
        return self.position_ms(entry, now) < entry.sent_ms

    def _heard_ms(self, entry: LedgerEntry, now: float) -> float:
        if entry.reported_ms is not None:
            return entry.reported_ms
        if self.clocked or self.reporting:
            return self.position_ms(entry, now)
        return entry.sent_ms

    def _advance(self, now: float) -> None:
        """Move the playback line's index past the answers whose playback has ended by ``now``."""
        line = self._line
        while self._at + 1 < len(line):
            playing, following = line[self._at], line[self._at + 1]
            if playing.held_ms is not None:
                return
            ends = self._origin if playing.cut_ms is not None else self._origin + playing.sent_ms / 1000
            if now < ends:
                return
            self._at += 1
            self._origin = max(following.first_sent, min(ends, now))
        if self._at > 2 * _PLAYED_KEPT:
            del line[: self._at - _PLAYED_KEPT]
            self._at = _PLAYED_KEPT

    def _revise(self, entry: LedgerEntry) -> None:
        if entry.finished and entry.answer_kept and entry.request_id in self._entries:
            self.history.revise(entry.request_id, self.answer(entry))

    # Answers that are held

    def keep_unheard(self, entry: LedgerEntry, audio: SentAudio, now: float) -> None:
        """Keep audio that is sent now, to send it again if speech without words interrupts the answer.

        Does nothing for an entry that was not opened as ``resumable``, nor held since. Audio that was heard is dropped,
        and so is the oldest beyond the bounds of Unheard: the answer can then resume only behind it.
        """
        unheard = entry.kept
        if unheard is None:
            return
        heard_ms = self.resume_ms(entry, now)
        while unheard.kept and unheard.kept[0].end_ms <= heard_ms:
            self._budget.give(unheard.drop_oldest())
        unheard.keep(audio)
        self._budget.charge(audio.cost)
        scarce = self._budget.over_half()
        while unheard.kept and (scarce or unheard.charged > MAX_UNHEARD_BYTES):
            self._budget.give(unheard.drop_oldest(missing=True))

    def can_resume(self, entry: LedgerEntry, now: float) -> bool:
        """Return whether a held answer can resume: all its audio that was sent and not heard is kept."""
        return entry.kept is not None and self.resume_ms(entry, now) >= entry.kept.missing_ms

    def hold(self, entry: LedgerEntry, withdrawn: Sequence[OutputChunk], *, cost: int, now: float) -> None:
        """Hold an answer that speech interrupts, so that it may resume later; cut all others that still play.

        ``withdrawn`` are outputs of the answer that were queued and not sent; ``cost`` is their size in bytes, which is
        charged.
        """
        self.silence(now, spared=entry)
        unheard = entry.hold(self.position_ms(entry, now))
        entry.withdraw(withdrawn)
        unheard.set_aside(withdrawn, cost)
        self._budget.charge(cost)

    def go_on(self, entry: LedgerEntry, now: float) -> list[OutputChunk]:
        """Resume a held answer: the speech had no words. Return the outputs to send first, with their old numbers."""
        unheard = entry.resumable()
        resume_ms = self.resume_ms(entry, now)
        outputs = unheard.behind(resume_ms)
        self._budget.give(unheard.set_aside())
        entry.go_on(outputs)
        if entry.first_number is not None:
            self._at = self._line.index(entry)
            self._origin = now - resume_ms / 1000
        return outputs

    def answer_if_cut(self, entry: LedgerEntry, now: float) -> Message:
        """Return the answer as a message for the history, as if it were cut now."""
        unheard = entry.speaks and not entry.sent_ms
        text = "" if unheard else self._heard_text(entry, self._heard_ms(entry, now))
        return Message("assistant", text, tool_calls=tuple(one for one in entry.tool_calls if one.is_whole))

    def has_heard(self, entry: LedgerEntry, now: float) -> bool:
        """Return whether any part of an answer was heard by ``now``."""
        if not entry.said.length:  # a model may speak without text
            return self.position_ms(entry, now) > 0
        return bool((self.answer_if_cut(entry, now) if entry.cut_ms is None else self.answer(entry)).text)

    def leaves_answer(self, entry: LedgerEntry, now: float) -> bool:
        """Return whether an entry whose answer is cut or held adds more to the history than the user's message."""
        answer = self.answer_if_cut(entry, now) if entry.held_ms is not None else self.answer(entry)
        return bool(entry.results) or answer.says_something

    # the history

    def messages(
        self, answering: Collection[str] = (), *, now: float, held: LedgerEntry | None = None
    ) -> tuple[Message, ...]:
        """Return the messages that a request sees. ``answering`` are the calls whose results are in its input.

        The request also sees the heard part of ``held``, a held answer. From now on, playback reports do not correct
        earlier cuts.
        """
        for entry in self._entries.values():
            entry.settle_cut()
        more = () if held is None else self._messages(held, self.answer_if_cut(held, now))
        return self.history.messages(answering, more=more)

    def knows_call(self, call_id: str) -> bool:
        """Return whether a call is known: the result of a call is of use only to a model that sees the call.

        The call is in the part of the history that requests see, or in a running answer.
        """
        return self.history.sees_call(call_id) or any(
            one.id == call_id for entry in self._entries.values() if not entry.finished for one in entry.calls.values()
        )

    def calls_beside(self, call_id: str) -> tuple[str, ...]:
        """Return the ids of all calls in the answer that has the call ``call_id``; empty if the call is unknown."""
        for entry in self._entries.values():
            calls = [one.id for one in entry.calls.values()]
            if call_id in calls and not entry.finished:
                return tuple(calls)
        return self.history.calls_beside(call_id)

    def knows_result(self, call_id: str) -> bool:
        """Return whether the result of the call has arrived."""
        return self.history.sees_result(call_id) or any(
            call_id in entry.results for entry in self._entries.values() if not entry.finished
        )

    def place(
        self, messages: Iterable[Message], *, item_id: str | None = None, before: tuple[str, bool] | None = None
    ) -> None:
        """Add messages that belong to no request: an item that a client sent, or an earlier history.

        An item, which has an ``item_id``, comes after all requests so far, or before one: ``before`` is the id of that
        request, and whether the item goes between its input and its answer. An earlier history, without an
        ``item_id``, precedes all requests; its speech is charged to the budget.
        """
        if item_id is not None and before is not None:
            self.history.insert(messages, item_id=item_id, before=before[0], answer=before[1])
            return
        if item_id is not None:
            self.history.open(item_id)
        found = list(messages)
        self._budget.charge(sum(map(speech_bytes, found)))
        self.history.add(found, request_id=item_id)

    def remove(self, *request_ids: str, roles: Container[str] = ALL_ROLES) -> None:
        """Drop from the history the messages in ``roles`` of these requests.

        An id may also be that of an item that a client sent.
        """
        self.history.remove(*request_ids, roles=roles)
        for entry in filter(None, map(self._entries.get, request_ids)):
            entry.leave_out(roles)

    def weigh(self) -> None:
        """Charge the memory of texts, marks (words and clauses with times) and ids.

        To be called after a request or an item was added, and after a request has ended. These data have bounds of
        their own, so the charge is never refused.
        """
        size = beyond_ordinary(self.history.memory + sum(entry.memory for entry in self._entries.values()))
        if not self._closed:
            self._budget.charge(size - self._weighed)
            self._weighed = size

    def close(self) -> None:
        """Drop everything, and keep nothing that is added later. Idempotent."""
        self.keep_sound(False)
        self._budget.give(self._weighed)
        self._weighed, self._closed = 0, True
        for entry in self._entries.values():
            self._budget.give(entry.keep_no_audio())
        self._entries.clear()
        self._line.clear()
        self._at = 0
        self.history.close()

    def _drop_details(self) -> None:
        """Drop the texts and marks of the oldest finished entries, as far as they exceed the limits.

        An answer that is not yet played to its end goes only if the texts are too long.
        """
        over = [entry for entry in self._entries.values() if entry.finished]
        waiting = {one.request_id for one in self._line[self._at :] if one.cut_ms is None}
        size = sum(entry.size for entry in over)
        played = sum(entry.request_id not in waiting for entry in over)
        for entry in over:
            waits = entry.request_id in waiting
            if size > MAX_DETAIL or (played > MAX_ENTRIES and not waits):
                played -= not waits
                size -= entry.size
                del self._entries[entry.request_id]
                entry.forget()

    # bytes

    def to_bytes(self) -> bytes:
        """Serialise the whole ledger, with the speech and audio that it keeps, for ``restore``."""
        dropped = [one for one in self._line if one.request_id not in self._entries]
        return msgspec.msgpack.encode(
            _State(
                history=self.history.state(),
                entries=[*self._entries.values(), *dropped],
                known=len(self._entries),
                line=[entry.request_id for entry in self._line],
                at=self._at,
                origin=self._origin,
                clocked=self.clocked,
                reporting=self.reporting,
                pace_characters=self._pace_characters,
                pace_ms=self._pace_ms,
                language=self.language,
            )
        )

    def restore(self, data: bytes, *, later: float = 0) -> None:
        """Restore what ``to_bytes`` serialised into this ledger, which must be new.

        ``later`` are the seconds by which this ledger's clock is ahead of the clock of the serialised ledger.
        """
        state = _STATE.decode(data)
        self.history = HistoryItems.restored(state.history, self._budget)
        by_id = {entry.request_id: entry for entry in state.entries}
        self._entries = {one.request_id: one for one in state.entries[: state.known]}
        self._line = [by_id[request_id] for request_id in state.line]
        self._at, self._origin = state.at, state.origin + later
        self.clocked, self.reporting, self.language = state.clocked, state.reporting, state.language
        self._pace_characters, self._pace_ms = state.pace_characters, state.pace_ms
        for entry in state.entries:
            entry.move(later)
            if entry.kept is not None:
                self._budget.charge(entry.kept.charged + entry.kept.aside_cost)


def _results(entry: LedgerEntry) -> Iterator[Message]:
    for call, text in entry.results.items():
        yield Message("tool", text.decode("utf-8", "replace"), tool_call_id=call)


# SentSound: the audio that was sent to a client, kept until the echo canceller has taken it.


#: The memory of the echo canceller of one session: 0.4 MB of a library, and samples.
HELD_BYTES: Final = 1 << 20
#: The most audio that is kept while no audio of the microphone arrives: five seconds of 16-bit samples at 48 kHz.
MAX_SENT_BYTES: Final = 480_000


@dataclass(frozen=True, slots=True)
class SentPiece:
    """Raw audio of an answer, which begins at ``start_ms`` of the answer."""

    answer_id: str
    start_ms: float
    audio: AudioFormat
    payload: bytes


@dataclass(frozen=True, slots=True)
class Playing:
    """The client's playback at the time ``at_ms``, at which a piece of the microphone's audio ends.

    The client is at ``position_ms`` of the answer ``answer_id``; None: it has played nothing yet. ``sounds``: the
    answer is neither cut nor held. ``moves``: some audio that was sent is not yet played. ``sent`` is the audio that
    was sent to the client since the previous piece of the microphone's audio.
    """

    at_ms: float
    answer_id: str | None
    position_ms: float
    sounds: bool
    moves: bool
    sent: tuple[SentPiece, ...]


class SentSound:
    """A queue of the audio that was sent, for the echo canceller; beyond MAX_SENT_BYTES the oldest pieces are dropped.

    Its bytes are charged, and HELD_BYTES for the memory of the echo canceller.
    """

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self._pieces: deque[SentPiece] = deque()
        self._held = 0
        budget.charge(HELD_BYTES)

    def close(self) -> None:
        """Drop everything, and refund the charged bytes."""
        self.take()
        self._budget.give(HELD_BYTES)

    def add(self, piece: SentPiece) -> None:
        """Add a piece of audio, which is sent now."""
        self._pieces.append(piece)
        self._hold(len(piece.payload))
        while self._held > MAX_SENT_BYTES:
            self._hold(-len(self._pieces.popleft().payload))

    def take(self) -> tuple[SentPiece, ...]:
        """Remove and return all pieces, in the order in which they were sent."""
        pieces = tuple(self._pieces)
        self._pieces.clear()
        self._hold(-self._held)
        return pieces

    def _hold(self, size: int) -> None:
        self._held += size
        self._budget.charge(size)
