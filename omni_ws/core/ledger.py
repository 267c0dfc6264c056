"""Ledger: what was said and what was heard in one session. Nobody else computes either.

**Entries.** A LedgerEntry is one request with its answer: what the user typed and said, results of tools, the answer's
text as the engine said it, its tool calls, and its audio as it was made, sent and played. ``Ledger.open`` begins one,
``finish`` puts it into the history, and later facts (a late transcript, a cut, a report) revise it there.

**One loudspeaker.** The client plays answers one after the other, in the order in which their first audio was sent.
``_line`` has them in this order, and ``_at`` is the one that plays now, or played last. Its position moves with ``now``
from ``_origin`` on, up to the audio that was sent; a report sets it. The next answer starts where the one before ends.

**Heard.** An answer that is never cut counts as heard whole. ``cut`` fixes where one was: at its latest report; without
one by the line, where the client reports at all or is ``clocked``, and else at the end of what was sent. Until a
request has read the history, a report may still say where that was. ``heard_text`` maps the position to the text.

**Bounds.** Text is kept up to MAX_KEPT_TEXT characters an entry; words and clauses up to MAX_MARKS, of which older
ones are summed up; entries with all of this up to MAX_ENTRIES and MAX_DETAIL. What is dropped stays in the history,
which has bounds of its own, as it stands there.

Times are seconds on the caller's clock. ``to_bytes`` writes all of it, and ``from_bytes`` restores it.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from typing import Final

import msgspec

from omni_ws.core.chunks import OutputChunk
from omni_ws.core.history import ALL_ROLES, WORDS_UNKNOWN, HistoryItems, HistoryState, Message, Speech
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

#: Entries that are over and played, of which more is known than the history has.
MAX_ENTRIES: Final = 16
#: What entries that are over may hold together, in characters: a word or a clause counts MARK_SIZE.
MAX_DETAIL: Final = 1 << 20
#: Audio of one answer that is kept to be sent again: five seconds at 24 kHz.
MAX_UNHEARD_BYTES: Final = 256 * 1024
#: The least sound from which a voice's pace is measured, and the sound beyond which older sound counts half.
_LEAST_PACE_MS: Final = 1000
_MOST_PACE_MS: Final = 600_000
_PLAYED_KEPT: Final = 8


class _State(msgspec.Struct, kw_only=True):
    """A ledger in a form that can be written to bytes; behind the ``known`` entries are those on the line alone."""

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


_STATE: Final = msgspec.msgpack.Decoder(_State)


class Ledger:
    """What was said and heard in one session: see above.

    ``max_tokens`` and ``budget`` bound the history, see HistoryItems. ``read`` tells which pieces of a text a voice
    reads, where a voice tells neither times of words nor clauses.
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
        "reporting",
    )

    def __init__(self, max_tokens: int, budget: ByteBudget, *, read: Read = read_all) -> None:
        self.history = HistoryItems(max_tokens, budget)
        #: Whether a client that reports nothing plays what it is sent, without a pause.
        self.clocked = False
        #: Whether the client has ever reported its playback.
        self.reporting = False
        self._budget = budget
        #: What texts and marks are charged with.
        self._weighed = 0
        self._closed = False
        self._read = read
        self._entries: dict[str, LedgerEntry] = {}
        self._line: list[LedgerEntry] = []
        self._at = 0
        #: When the answer at ``_at`` began to play, shifted by every pause since.
        self._origin = 0.0
        #: Characters of text whose sound was whole, and the length of that.
        self._pace_characters = 0.0
        self._pace_ms = 0.0

    # entries

    def open(
        self, request_id: str, *, speaks: bool = False, writes: bool = True, resumable: bool = False
    ) -> LedgerEntry:
        """Open the entry of a request. The history has it behind those of earlier requests, whichever ends first.

        ``speaks``: its answer is to be spoken; ``writes``: its text is sent; ``resumable``: what was not heard of it is
        kept, to be sent again.
        """
        kept = Unheard() if resumable else None
        if (known := self._entries.get(request_id)) is not None:  # restored, with a request that goes on
            return known
        entry = LedgerEntry(request_id=request_id, speaks=speaks, writes=writes, kept=kept)
        self._entries[request_id] = entry
        self.history.open(request_id)
        return entry

    def find(self, request_id: str) -> LedgerEntry | None:
        """Return the entry of a request; None where no more is known of it than the history has."""
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
        """End an entry, whose final is out, and add it to the history if it is to be ``remembered``.

        ``whole``: the engine came to its own end. ``speech`` is what was said where its words are not known, charged to
        the budget, and ``words_unknown`` says that it could not be kept.
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

    def late_transcript(self, request_id: str, text: str) -> bool:
        """Add a transcript that comes after the final of its request. Returns False if that is not kept any more."""
        entry = self._entries.get(request_id)
        if entry is None or not entry.finished or not entry.input_kept:
            return False
        entry.hear_late(text)
        return self.history.revise(request_id, self.question(entry))

    def _messages(self, entry: LedgerEntry) -> Iterator[Message]:
        if entry.input_kept:
            yield from _results(entry)
            yield self.question(entry)
        if entry.answer_kept:
            yield self.answer(entry)

    def question(self, entry: LedgerEntry) -> Message:
        """The user's message of an entry, as far as its words are known."""
        typed = entry.typed.decode("utf-8", "replace")
        if entry.speech is not None:
            return Message("user", typed, speech=entry.speech)
        if entry.words_unknown:
            return Message("user", " ".join(filter(None, [typed, WORDS_UNKNOWN])))
        return Message("user", entry.user_text)

    def answer(self, entry: LedgerEntry) -> Message:
        """The answer for the history: where it was cut, only the part that was heard."""
        text = self.heard_text(entry)
        # A cancelled answer may end within a call: no client can answer that, and no engine takes it.
        calls = tuple(call for call in entry.tool_calls if call.is_whole or not entry.cancelled)
        return Message("assistant", text, tool_calls=calls)

    def heard_text(self, entry: LedgerEntry) -> str:
        """The part of the answer's text that was heard, or will be where it was not cut."""
        return self._heard_text(entry, entry.cut_ms)

    def _heard_text(self, entry: LedgerEntry, cut_ms: float | None) -> str:
        text = entry.said.joined()
        if cut_ms is None:
            return text if entry.writes or audible(text) else ""
        if not entry.sent_ms:  # text without sound is heard when it is sent
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
        if cut_ms < entry.base_ms:  # before the words that are known one by one
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
        """Characters a second of the answer's voice; None where that is not known."""
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
        """Count audio from ``start_ms`` to ``end_ms`` as made and sent, as output ``number``.

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
        """The position of the client in the answer, by the line, in milliseconds."""
        if entry.held_ms is not None:
            return entry.held_ms
        if entry.cut_ms is not None:
            return entry.cut_ms
        self._advance(now)
        if entry.first_number is None:
            return 0
        if self._line[self._at] is entry:
            # Clocks count binary fractions of seconds: without rounding, a word would have begun at its first instant.
            return min(entry.sent_ms, round(max(0.0, now - self._origin) * 1000, 3))
        return 0 if entry in self._line[self._at :] else entry.sent_ms

    def due_ms(self, entry: LedgerEntry, start_ms: float, now: float) -> float:
        """Milliseconds until the audio at ``start_ms`` of the answer is played, behind all that is before it."""
        position = self.position_ms(entry, now)
        before = 0.0
        for other in self._line[self._at :]:
            if other is entry:
                break
            if other.cut_ms is None:
                before += other.sent_ms - self.position_ms(other, now)
        return start_ms - position + before

    def playing(self, now: float) -> bool:
        """Whether any audio that was sent is not played yet."""
        self._advance(now)
        return any(self._unplayed(entry, now) for entry in self._line[self._at :])

    def resume_ms(self, entry: LedgerEntry, now: float) -> float:
        """The position at which a held answer goes on: its latest report, or without one its position by the line."""
        if entry.reported_ms is None:
            return self.position_ms(entry, now)
        return min(entry.reported_ms, entry.sent_ms)

    def report(
        self, played_ms: float, *, now: float, request_id: str | None = None, sequence_id: int | None = None
    ) -> None:
        """Take a report of the client: it has played ``played_ms`` of an answer.

        Without ``request_id`` that is the answer that plays by the line, or played last, whose first audio is not
        numbered above ``sequence_id``. All answers before it were heard as far as they were not cut, and those behind
        it not at all. A report of less than before, or about an unknown answer, changes nothing.
        """
        self._advance(now)
        index = self._reported_index(request_id, sequence_id)
        if index is None:
            return
        entry = self._line[index]
        if any(one.reported_ms is not None for one in self._line[index + 1 :]):
            return
        played_ms = min(played_ms, entry.sent_ms)
        if entry.reported_ms is not None and played_ms < entry.reported_ms:
            return
        self.reporting = True
        for earlier in self._line[:index]:
            earlier.report_whole()
        if entry.cut_ms is not None:
            if not entry.read:
                entry.report_cut(played_ms)
                self._revise(entry)
            self._at, self._origin = index, now  # what is behind it begins now
            self._advance(now)
            return
        entry.report(played_ms)
        if entry.held_ms is None:
            self._at, self._origin = index, now - played_ms / 1000

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
        """Cut an answer: the client plays nothing more of it. ``at_ms`` is where the client stopped, if that is known.

        ``unheard``: the speaker went on, as for an answer that is held; if no audio was sent, nothing was heard.
        Idempotent.
        """
        self._advance(now)
        if entry.cut_ms is not None:
            if at_ms is not None:
                entry.cut(at_ms)
                self._revise(entry)
            return
        entry.cut_first(self._heard_ms(entry, now) if at_ms is None else at_ms, unheard=unheard)
        if entry.first_number is not None and self._line[self._at] is entry:
            self._origin = now  # when the next one begins
            self._advance(now)
        self._revise(entry)

    def stop(self, request_id: str, now: float) -> None:
        """Cut the answer of a request, unless all that was sent of it is played."""
        entry = self._entries.get(request_id)
        if entry is not None and self._unplayed(entry, now):
            self.cut(entry, now)

    def play_at_once(self) -> None:
        """The client plays what it is sent at once, without a pause, until it reports anything else."""
        self.clocked = True

    def silence(self, now: float, *, spared: LedgerEntry | None = None) -> None:
        """Cut all answers with audio that is not played, but for ``spared``."""
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
        """Move the line on, past the answers that were played through by ``now``."""
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

    # withdrawn, held

    def keep_unheard(self, entry: LedgerEntry, audio: SentAudio, now: float) -> None:
        """Keep audio that is sent now, to be sent again where speech without words interrupts the answer."""
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
        """Whether all that was sent and not heard is kept."""
        return entry.kept is not None and self.resume_ms(entry, now) >= entry.kept.missing_ms

    def hold(self, entry: LedgerEntry, withdrawn: Sequence[OutputChunk], *, cost: int, now: float) -> None:
        """Hold an answer that speech interrupts, and that may go on. All others are cut.

        ``withdrawn`` are outputs of it that were taken back; they are charged with ``cost``.
        """
        self.silence(now, spared=entry)
        unheard = entry.hold(self.position_ms(entry, now))
        entry.withdraw(withdrawn)
        unheard.set_aside(withdrawn, cost)
        self._budget.charge(cost)

    def go_on(self, entry: LedgerEntry, now: float) -> list[OutputChunk]:
        """Resume an answer, as the speech had no words. Returns what has to be sent first, numbered as it was."""
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
        """The message that the history would get of a held answer if it ended where it was interrupted."""
        unheard = entry.speaks and not entry.sent_ms
        text = "" if unheard else self._heard_text(entry, self._heard_ms(entry, now))
        return Message("assistant", text, tool_calls=tuple(one for one in entry.tool_calls if one.is_whole))

    def leaves_answer(self, entry: LedgerEntry, now: float) -> bool:
        """Whether the history keeps more of an entry than the user's message, now that its answer is cut or held."""
        answer = self.answer_if_cut(entry, now) if entry.held_ms is not None else self.answer(entry)
        return bool(entry.results) or answer.says_something

    # the history

    def messages(
        self, answering: Collection[str] = (), *, now: float, held: LedgerEntry | None = None
    ) -> tuple[Message, ...]:
        """The messages that a request sees. ``answering`` are the calls whose results are in its input.

        Of the answer that is ``held`` the request sees what was heard. No later report moves the cut of any answer.
        """
        for entry in self._entries.values():
            entry.settle_cut()
        more = () if held is None else (*_results(held), self.question(held), self.answer_if_cut(held, now))
        return self.history.messages(answering, more=more)

    def knows_call(self, call_id: str) -> bool:
        """Whether a model can be given the result of this call: it is in the history, or in an answer under way."""
        return self.history.sees_call(call_id) or any(
            one.id == call_id for entry in self._entries.values() if not entry.finished for one in entry.calls.values()
        )

    def calls_beside(self, call_id: str) -> tuple[str, ...]:
        """The calls of the answer that has this one."""
        for entry in self._entries.values():
            calls = [one.id for one in entry.calls.values()]
            if call_id in calls and not entry.finished:
                return tuple(calls)
        return self.history.calls_beside(call_id)

    def knows_result(self, call_id: str) -> bool:
        """Whether the result of this call has come."""
        return self.history.sees_result(call_id) or any(
            call_id in entry.results for entry in self._entries.values() if not entry.finished
        )

    def place(self, messages: Iterable[Message], *, item_id: str | None = None) -> None:
        """Add messages of no request: an item of the client's, behind all requests so far, or an earlier history."""
        if item_id is not None:
            self.history.open(item_id)
        self.history.add(messages, request_id=item_id)

    def remove(self, *request_ids: str, roles: Container[str] = ALL_ROLES) -> None:
        """Drop from the history what requests, or items of the client's, have left in these roles."""
        self.history.remove(*request_ids, roles=roles)
        for entry in filter(None, map(self._entries.get, request_ids)):
            entry.leave_out(roles)

    def weigh(self) -> None:
        """Charge the memory of texts, marks and ids. Called when a request, or an item, has come or is over.

        Texts, marks and ids have bounds of their own, so the charge is never refused.
        """
        size = beyond_ordinary(self.history.memory + sum(entry.memory for entry in self._entries.values()))
        if not self._closed:
            self._budget.charge(size - self._weighed)
            self._weighed = size

    def close(self) -> None:
        """Drop everything, and keep nothing of what comes later. Idempotent."""
        self._budget.give(self._weighed)
        self._weighed, self._closed = 0, True
        for entry in self._entries.values():
            self._budget.give(entry.keep_no_audio())
        self._entries.clear()
        self._line.clear()
        self._at = 0
        self.history.close()

    def _drop_details(self) -> None:
        """Keep little more than the history of entries that are over and played."""
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
        """The whole ledger, with speech and audio that are held, for ``from_bytes``."""
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
            )
        )

    @classmethod
    def from_bytes(cls, data: bytes, budget: ByteBudget, *, read: Read = read_all) -> Ledger:
        """The ledger that ``to_bytes`` wrote, which charges ``budget`` from now on."""
        new = cls(0, budget, read=read)
        new.restore(data)
        return new

    def restore(self, data: bytes, *, later: float = 0) -> None:
        """Go on with what ``to_bytes`` wrote, by a clock that shows so many seconds more. Nothing may have come yet."""
        state = _STATE.decode(data)
        self.history = HistoryItems.restored(state.history, self._budget)
        by_id = {entry.request_id: entry for entry in state.entries}
        self._entries = {one.request_id: one for one in state.entries[: state.known]}
        self._line = [by_id[request_id] for request_id in state.line]
        self._at, self._origin = state.at, state.origin + later
        self.clocked, self.reporting = state.clocked, state.reporting
        self._pace_characters, self._pace_ms = state.pace_characters, state.pace_ms
        for entry in state.entries:
            entry.first_sent += later
            if entry.kept is not None:
                self._budget.charge(entry.kept.charged + entry.kept.aside_cost)


def _results(entry: LedgerEntry) -> Iterator[Message]:
    for call, text in entry.results.items():
        yield Message("tool", text.decode("utf-8", "replace"), tool_call_id=call)
