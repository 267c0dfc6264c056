"""The ledger: one loudspeaker, reports, cuts, and what of it the history has. Each rule of the protocol has a test."""

from __future__ import annotations

import pytest

from omni_ws.core.chunks import AudioEncoding, AudioFormat, OutputChunk, OutputModality, ToolCallFragment, Word
from omni_ws.core.history import WORDS_UNKNOWN, Message
from omni_ws.core.ledger import MAX_DETAIL, MAX_ENTRIES, MAX_UNHEARD_BYTES, Ledger
from omni_ws.core.ledger_entry import MAX_KEPT_TEXT, MAX_MARKS, LedgerEntry, SentAudio
from omni_ws.core.quota import ByteBudget
from omni_ws.errors import InvalidValue

PCM = AudioFormat(sample_rate=8000)


def new_ledger(max_tokens: int = 10_000, *, clocked: bool = False) -> Ledger:
    ledger = Ledger(max_tokens, ByteBudget(1 << 24))
    ledger.clocked = clocked
    return ledger


def words(text: str) -> tuple[Word, ...]:
    """Each takes a second, of which 900 ms sound."""
    return tuple(Word(word, 1000 * index, 1000 * index + 900) for index, word in enumerate(text.split()))


class Talk:
    """A ledger and its numbers. ``answer`` says and sends a whole answer at once, a second a word."""

    def __init__(self, *, clocked: bool = False) -> None:
        self.ledger = new_ledger(clocked=clocked)
        self.number = 0

    def open(self, request_id: str, asked: str = "") -> LedgerEntry:
        entry = self.ledger.open(request_id, speaks=True)
        entry.take_text(asked.encode())
        return entry

    def say(self, entry: LedgerEntry, text: str, *, now: float, timed: bool = True) -> None:
        entry.say(text)
        count = len(text.split())
        begin = entry.made_ms
        self.ledger.send(entry, self.number + 1, begin, begin + 1000 * count, now)
        self.number += 2
        moved = tuple(Word(one.text, one.start_ms + int(begin), one.end_ms + int(begin)) for one in words(text))
        entry.pronounce(moved if timed else ())

    def answer(self, request_id: str, text: str, *, now: float, asked: str = "ask", timed: bool = True) -> LedgerEntry:
        entry = self.open(request_id, asked)
        if text:
            self.say(entry, text, now=now, timed=timed)
        self.ledger.finish(entry, whole=True)
        return entry

    def answers(self, *, now: float = 1e6) -> list[str]:
        return [one.text for one in self.ledger.messages(now=now) if one.role == "assistant"]


def test_segments_of_what_was_heard_are_a_blank_apart() -> None:
    talk = Talk()
    entry = talk.open("one", "Listen:")
    for segment in ("hello", "", " big", " world"):  # as recognisers write them
        talk.ledger.hear(entry, segment)
    talk.ledger.finish(entry, whole=True)
    assert talk.ledger.messages(now=0)[0].text == "Listen: hello big world"


# the line


def test_answers_are_played_one_after_the_other() -> None:
    talk = Talk(clocked=True)
    first, second = talk.answer("a", "one two", now=10), talk.answer("b", "three four", now=10.5)
    places = [(talk.ledger.position_ms(first, now), talk.ledger.position_ms(second, now)) for now in (11, 12, 12.5, 20)]
    assert places == [(1000, 0), (2000, 0), (2000, 500), (2000, 2000)]


def test_it_plays_until_all_of_it_was_played() -> None:
    talk = Talk(clocked=True)
    talk.answer("a", "one two", now=10)
    talk.answer("b", "three four", now=10.5)
    assert [talk.ledger.playing(now) for now in (10.5, 13.9, 14)] == [True, True, False]


def test_an_answer_that_comes_behind_a_pause_begins_when_it_is_sent() -> None:
    talk = Talk(clocked=True)
    talk.answer("a", "one", now=0)
    second = talk.answer("b", "two", now=5)
    assert talk.ledger.position_ms(second, 5.4) == pytest.approx(400)


def test_the_position_stands_still_in_an_underrun() -> None:
    talk = Talk(clocked=True)
    entry = talk.open("a")
    talk.say(entry, "one", now=0)
    assert talk.ledger.position_ms(entry, 4) == 1000
    talk.say(entry, "two", now=4)
    assert talk.ledger.position_ms(entry, 4.25) == 1250


def test_audio_is_due_behind_all_that_is_before_it() -> None:
    talk = Talk()
    first, second = talk.open("a"), talk.open("b")
    assert talk.ledger.due_ms(first, 0, 0) == 0
    talk.say(first, "one two", now=0)
    assert talk.ledger.due_ms(first, 2000, 0.5) == 1500
    assert talk.ledger.due_ms(second, 0, 0.5) == 1500
    talk.say(second, "three", now=0.5)
    assert talk.ledger.due_ms(second, 1000, 1) == 2000
    talk.ledger.cut(first, 1)
    assert talk.ledger.due_ms(second, 1000, 1) == 1000
    assert talk.ledger.due_ms(first, 5000, 1) == 0  # nobody plays that


# reports


def test_a_report_means_that_all_before_was_heard_and_nothing_behind() -> None:
    talk = Talk()
    talk.answer("a", "one two", now=0)
    talk.answer("b", "three four", now=0)
    talk.answer("c", "five six", now=0)
    talk.ledger.report(1000, now=0.5, request_id="b")
    talk.ledger.silence(0.5)
    assert talk.answers() == ["one two", "three"]


def test_a_report_by_number_is_about_what_plays_by_the_line() -> None:
    talk = Talk()
    first = talk.answer("a", "one two three", now=0)
    second = talk.answer("b", "four five", now=0)
    talk.ledger.report(1000, now=1, sequence_id=99)  # the newest output, but the first answer plays
    assert (first.reported_ms, second.reported_ms) == (1000, None)
    talk.ledger.report(500, now=3.6, sequence_id=99)
    assert (first.reported_ms, second.reported_ms) == (3000, 500)


def test_a_report_by_number_is_about_what_played_last() -> None:
    talk = Talk()
    only = talk.answer("a", "one two", now=0)
    talk.ledger.report(1700, now=60, sequence_id=1)
    assert only.reported_ms == 1700


def test_a_report_is_never_about_an_answer_numbered_above_it() -> None:
    talk = Talk()
    first, second = talk.answer("a", "one", now=0), talk.answer("b", "two", now=0)
    talk.ledger.report(900, now=1.5, sequence_id=2)  # the line is at b, whose first audio is 3
    assert (first.reported_ms, second.reported_ms) == (900, None)
    talk.ledger.report(900, now=1.5, sequence_id=0)
    assert second.reported_ms is None


def test_a_report_sets_the_line_back() -> None:
    talk = Talk()
    first, second = talk.answer("a", "one two", now=0), talk.answer("b", "three", now=0)
    talk.ledger.report(500, now=2.5, request_id="a")
    assert talk.ledger.position_ms(first, 2.5) == 500
    assert talk.ledger.position_ms(second, 2.5) == 0
    assert talk.ledger.position_ms(second, 4.2) == pytest.approx(200)


def test_reports_never_go_back() -> None:
    talk = Talk()
    first, second = talk.answer("a", "one two", now=0), talk.answer("b", "three four", now=0)
    talk.ledger.report(1500, now=1, request_id="a")
    talk.ledger.report(900, now=1, request_id="a")
    assert first.reported_ms == 1500
    talk.ledger.report(100, now=1, request_id="b")
    talk.ledger.report(2000, now=1, request_id="a")
    assert (first.reported_ms, second.reported_ms) == (2000, 100)  # a was heard whole, as b was reported
    assert talk.ledger.position_ms(second, 1) == pytest.approx(100)


def test_reports_never_pass_what_was_sent() -> None:
    talk = Talk()
    entry = talk.answer("a", "one two", now=0)
    talk.ledger.report(1e9, now=1, request_id="a")
    assert entry.reported_ms == 2000


def test_a_report_about_an_unknown_request_is_ignored() -> None:
    talk = Talk()
    entry = talk.answer("a", "one two", now=0)
    talk.open("silent")
    for request_id in ("x", "silent"):
        talk.ledger.report(100, now=1, request_id=request_id)
    assert not talk.ledger.reporting
    assert entry.reported_ms is None


def test_a_report_without_any_audio_is_ignored() -> None:
    ledger = new_ledger()
    ledger.report(100, now=1, sequence_id=5)
    assert not ledger.reporting


def test_a_report_behind_the_cut_says_where_it_was() -> None:
    talk = Talk()
    talk.answer("a", "one two three", now=0)
    talk.ledger.report(1000, now=1, request_id="a")
    talk.ledger.silence(1.4)
    assert talk.ledger.history.items[-1].message.text == "one"
    talk.ledger.report(1400, now=1.5, request_id="a")
    assert talk.answers(now=2) == ["one two"]
    talk.ledger.report(2400, now=3, request_id="a")  # a request has read the history
    assert talk.answers() == ["one two"]


def test_such_a_report_may_be_less_than_the_clock_said() -> None:
    talk = Talk(clocked=True)
    talk.answer("a", "one two three", now=0)
    talk.ledger.silence(2.5)
    assert talk.ledger.history.items[-1].message.text == "one two three"
    talk.ledger.report(500, now=2.6, request_id="a")
    assert talk.answers() == ["one"]


@pytest.mark.parametrize("read", [False, True])
def test_a_report_for_a_cut_answer_means_that_nothing_behind_it_was_heard(read: bool) -> None:
    """The client lost its connection, and comes back: what was made meanwhile is only now sent to it."""
    talk = Talk()
    first = talk.answer("a", "one two three", now=0)
    talk.ledger.report(900, now=0.9, request_id="a")
    talk.ledger.cut(first, 0.9)
    if read:
        talk.ledger.messages(now=1)
    second = talk.answer("b", "four five six", now=2)
    talk.ledger.report(950, now=4.5, request_id="a")
    assert talk.ledger.position_ms(second, 5.5) == 1000
    talk.ledger.cut(second, 4.5)
    assert talk.answers() == ["one"]


def test_reports_count_underruns_and_the_least_lead() -> None:
    talk = Talk()
    entry = talk.open("a")
    talk.say(entry, "one", now=0)
    talk.ledger.report(900, now=0.9, sequence_id=1)
    talk.say(entry, "two", now=1.2)
    talk.ledger.report(1100, now=1.3, sequence_id=1)
    assert (entry.underruns, entry.least_lead_ms) == (1, 100)
    assert entry.underrun_sec == pytest.approx(0.2)
    silent = Talk()
    entry = silent.open("a")
    silent.say(entry, "one", now=0)
    silent.say(entry, "two", now=9)
    assert (entry.underruns, entry.least_lead_ms) == (0, None)


# cuts


def test_an_answer_that_waits_behind_another_was_not_heard() -> None:
    talk = Talk()
    talk.answer("a", "let me look that up", now=0)
    talk.answer("b", "it leaves at nine", now=0)
    talk.ledger.report(1000, now=1, sequence_id=1)
    talk.ledger.silence(1)
    assert talk.answers() == ["let"]


def test_the_third_answer_in_a_row_does_not_spare_the_first() -> None:
    talk = Talk()
    talk.answer("a", "let me look that up", now=0)
    for request_id in ("b", "c"):
        talk.answer(request_id, "", now=0)
    talk.ledger.report(1500, now=1.5, sequence_id=1)
    talk.ledger.silence(1.5)
    assert talk.answers() == ["let me"]


def test_without_any_report_all_that_was_sent_counts() -> None:
    talk = Talk()
    talk.answer("a", "one two three", now=0)
    talk.ledger.silence(0.1)
    assert talk.answers() == ["one two three"]


def test_by_the_clock_it_is_what_was_played() -> None:
    talk = Talk(clocked=True)
    talk.answer("a", "one two three", now=0)
    talk.answer("b", "four", now=0.5)
    talk.ledger.silence(1.5)
    assert talk.answers() == ["one two"]


def test_a_client_that_reports_is_on_the_clock_between_answers() -> None:
    talk = Talk()
    talk.answer("a", "one", now=0)
    talk.ledger.report(1000, now=1, request_id="a")
    talk.answer("b", "two three four", now=2)
    talk.ledger.silence(3.5)
    assert talk.answers() == ["one", "two three"]


def test_an_answer_that_was_played_is_not_cut() -> None:
    talk = Talk(clocked=True)
    entry = talk.answer("a", "one two", now=0)
    talk.ledger.silence(2)
    assert entry.cut_ms is None


def test_what_follows_an_answer_that_is_cut_by_name_plays_at_once() -> None:
    talk = Talk(clocked=True)
    first, second = talk.answer("a", "one two three", now=0), talk.answer("b", "four five", now=0)
    talk.ledger.cut(first, 1.5)
    talk.ledger.cut(first, 9)  # idempotent
    assert talk.ledger.position_ms(second, 2) == 500
    assert talk.answers() == ["one two", "four five"]


def test_an_answer_that_is_cut_while_it_waits_is_passed_over() -> None:
    talk = Talk(clocked=True)
    talk.answer("a", "one two", now=0)
    waits, last = talk.answer("b", "three four", now=0), talk.answer("c", "five", now=0)
    talk.ledger.cut(waits, 1)
    assert talk.ledger.position_ms(last, 2.5) == 500
    assert talk.answers() == ["one two", "five"]


def test_the_client_may_say_where_it_cut() -> None:
    talk = Talk(clocked=True)
    entry = talk.answer("a", "one two three", now=0)
    talk.ledger.cut(entry, 60, at_ms=1200)
    assert talk.answers() == ["one two"]
    talk.ledger.cut(entry, 61, at_ms=100)
    assert talk.answers() == ["one"]


def test_text_without_sound_is_heard_when_it_is_sent() -> None:
    ledger = new_ledger()
    entry = ledger.open("a", speaks=True)
    entry.say("written ")
    entry.say("unsent")
    ledger.cut(entry, 1)
    entry.withdraw([OutputChunk("a", 1, OutputModality.TEXT, "unsent")])
    ledger.finish(entry, whole=False, cancelled=True)
    assert ledger.messages(now=1) == (Message("assistant", "written"),)


@pytest.mark.parametrize("held", [True, False])
def test_nothing_was_heard_where_the_speaker_went_on_before_any_sound(held: bool) -> None:
    ledger = new_ledger()
    entry = ledger.open("a", speaks=True)
    entry.take_text(b"My name is Robert.")
    entry.say("Hello Robert")
    if held:  # by speech, and cut by a text that was typed afterwards
        ledger.hold(entry, [], cost=0, now=1)
        ledger.cut(entry, 2)
    else:
        ledger.cut(entry, 1, unheard=True)
    ledger.finish(entry, whole=False, cancelled=True)
    assert ledger.messages(now=1) == (Message("user", "My name is Robert."),)


def test_the_text_is_in_the_history_whatever_was_sent() -> None:
    ledger = new_ledger()
    entry = ledger.open("a", speaks=True, writes=False)
    entry.say("Blue is my favourite.")
    ledger.send(entry, 0, 0, 1000, 0)
    ledger.finish(entry, whole=True)
    assert ledger.messages(now=9) == (Message("assistant", "Blue is my favourite."),)


@pytest.mark.parametrize("text", ["…", " - ", "!"])
def test_spoken_punctuation_is_no_message(text: str) -> None:
    ledger = new_ledger()
    entry = ledger.open("a", speaks=True, writes=False)
    entry.say(text)
    ledger.send(entry, 0, 0, 1000, 0)
    ledger.finish(entry, whole=True)
    assert ledger.messages(now=9) == ()


def test_a_cancelled_call_that_is_not_whole_is_left_out() -> None:
    ledger = new_ledger()
    entry = ledger.open("a")
    for index, arguments in enumerate(("{}", '{"a":')):
        entry.call(ToolCallFragment(index, id=f"call_{index}", name="f"))
        entry.call(ToolCallFragment(index, arguments=arguments))
    ledger.finish(entry, whole=False, cancelled=True)
    ((call,),) = (message.tool_calls for message in ledger.messages(now=1))
    assert call.id == "call_0"


def test_a_withdrawn_call_is_none() -> None:
    ledger = new_ledger()
    entry = ledger.open("a")
    fragments = [ToolCallFragment(0, id="call_0", name="f"), ToolCallFragment(0, arguments="{}")]
    for fragment in fragments:
        entry.call(fragment)
    outputs = [OutputChunk("a", n, OutputModality.TOOL_CALL, tool_call=one) for n, one in enumerate(fragments)]
    entry.withdraw(outputs[1:])
    assert entry.tool_calls[0].arguments == ""
    entry.withdraw(outputs[:1])
    entry.withdraw(outputs[:1])
    assert entry.tool_calls == ()


def test_withdrawn_audio_was_not_sent() -> None:
    talk = Talk()
    entry = talk.open("a")
    talk.say(entry, "one two three", now=0)
    talk.ledger.report(2500, now=1, sequence_id=1)
    talk.ledger.cut(entry, 1)
    chunk = OutputChunk("a", 1, OutputModality.AUDIO, payload=b"x", start_ms=1000)
    entry.withdraw([chunk])
    talk.ledger.finish(entry, whole=False, cancelled=True)
    assert entry.cut_ms == 1000
    assert talk.answers() == ["one"]


# held


def unheard_talk(*, raw: bool = True) -> tuple[Talk, LedgerEntry]:
    """An answer of ten pieces of 100 ms, a word each."""
    talk = Talk()
    entry = talk.ledger.open("a", speaks=True, resumable=True)
    for number in range(10):
        entry.say(f"w{number} ")
        word = Word(f"w{number}", number * 100, number * 100 + 50)
        audio = PCM if raw else AudioFormat(AudioEncoding.OPUS, 8000)
        payload = bytes([number, 0]) * 800
        chunk = OutputChunk(
            "a", number, OutputModality.AUDIO, payload=payload, format=audio, start_ms=number * 100, words=(word,)
        )
        talk.ledger.send(entry, number, number * 100, number * 100 + 100, 0)
        entry.pronounce((word,))
        talk.ledger.keep_unheard(entry, SentAudio(chunk, number * 100, number * 100 + 100, 1600), 0)
    return talk, entry


@pytest.mark.parametrize("reports", [True, False])
def test_a_held_answer_goes_on_where_it_was_heard_to(reports: bool) -> None:
    talk, entry = unheard_talk()
    ledger = talk.ledger
    if reports:
        ledger.report(350, now=0.4, request_id="a")
    withdrawn = [chunk.chunk for chunk in (entry.kept.kept if entry.kept else ())][-2:]
    assert ledger.can_resume(entry, 0.4)
    ledger.hold(entry, withdrawn, cost=100, now=0.4)
    assert not ledger.playing(0.4)
    assert entry.sent_ms == 800
    if reports:
        ledger.report(380, now=3, request_id="a")  # what had been heard when it was held
    outputs = ledger.go_on(entry, 5)
    where = 380 if reports else 400
    assert [one.start_ms for one in outputs] == [where, *range(400 if reports else 500, 1000, 100)]
    assert entry.sent_ms == 1000
    assert ledger.position_ms(entry, 5) == pytest.approx(where)
    assert ledger.position_ms(entry, 5.1) == pytest.approx(where + 100)
    ledger.finish(entry, whole=True)
    assert ledger._budget.used == 0


def test_what_has_a_header_is_not_cut() -> None:
    talk, entry = unheard_talk(raw=False)
    talk.ledger.hold(entry, [], cost=0, now=0.25)
    assert talk.ledger.go_on(entry, 1)[0].start_ms == 200


def test_raw_samples_are_cut_where_they_were_heard_to() -> None:
    talk, entry = unheard_talk()
    talk.ledger.hold(entry, [], cost=0, now=0.22525)
    first = talk.ledger.go_on(entry, 1)[0]
    assert first.payload == bytes([2, 0]) * (800 - 202)
    assert [word.text for word in first.words] == ["w2"]


def test_text_and_calls_that_were_set_aside_follow_once() -> None:
    ledger = new_ledger()
    entry = ledger.open("a", speaks=True, resumable=True)
    entry.say("unsent")
    fragment = ToolCallFragment(0, id="c", name="f", arguments="{}")
    entry.call(fragment)
    aside = [
        OutputChunk("a", 0, OutputModality.TEXT, "unsent"),
        OutputChunk("a", 1, OutputModality.TOOL_CALL, tool_call=fragment),
    ]
    ledger.hold(entry, aside, cost=100, now=0)
    assert (entry.answer_text, entry.tool_calls, ledger._budget.used) == ("", (), 100)
    assert ledger.go_on(entry, 1) == aside
    assert (entry.shown, len(entry.tool_calls), ledger._budget.used) == (6, 1, 0)


def test_a_request_beside_a_held_answer_sees_what_was_heard_of_it() -> None:
    talk, entry = unheard_talk()
    entry.take_text(b"tell me")
    talk.ledger.report(250, now=0.3, request_id="a")
    talk.ledger.hold(entry, [], cost=0, now=0.3)
    seen = talk.ledger.messages(now=0.4, held=entry)
    assert seen == (Message("user", "tell me"), Message("assistant", "w0 w1 w2"))


def test_a_held_answer_that_is_cut_ends_where_it_was_held() -> None:
    talk, entry = unheard_talk()
    talk.ledger.clocked = True
    talk.ledger.hold(entry, [], cost=0, now=0.25)
    talk.ledger.cut(entry, 5)
    talk.ledger.finish(entry, whole=False, cancelled=True)
    assert talk.answers() == ["w0 w1 w2"]


@pytest.mark.parametrize("past", [False, True])
def test_unheard_audio_is_bounded(past: bool) -> None:
    ledger = new_ledger()
    entry = ledger.open("a", speaks=True, resumable=True)
    for number in range(4):
        chunk = OutputChunk("a", number, OutputModality.AUDIO, start_ms=number * 100)
        ledger.send(entry, number, number * 100, number * 100 + 100, 0)
        cost = MAX_UNHEARD_BYTES // 4 + (past and number == 3)
        ledger.keep_unheard(entry, SentAudio(chunk, number * 100, number * 100 + 100, cost), 0)
    assert ledger.can_resume(entry, 0) is not past
    assert ledger.can_resume(entry, 0.1)


@pytest.mark.parametrize("past", [False, True])
def test_nothing_unheard_is_kept_while_memory_is_scarce(past: bool) -> None:
    ledger = Ledger(100, ByteBudget(800))
    ledger._budget.used = 300 + past
    entry = ledger.open("a", speaks=True, resumable=True)
    ledger.send(entry, 0, 0, 100, 0)
    ledger.keep_unheard(entry, SentAudio(OutputChunk("a", 0, OutputModality.AUDIO), 0, 100, 100), 0)
    assert ledger.can_resume(entry, 0) is not past


def test_only_resumable_answers_keep_audio() -> None:
    ledger = new_ledger()
    entry = ledger.open("a", speaks=True)
    ledger.send(entry, 0, 0, 100, 0)
    ledger.keep_unheard(entry, SentAudio(OutputChunk("a", 0, OutputModality.AUDIO), 0, 100, 100), 0)
    assert not ledger.can_resume(entry, 0)
    assert ledger._budget.used == 0


# transcripts


def test_a_late_transcript_enters_the_message_of_its_turn() -> None:
    talk = Talk()
    entry = talk.open("a", "first")
    talk.ledger.cut(entry, 0)
    talk.ledger.finish(entry, whole=False, cancelled=True)
    talk.answer("b", "answer", now=0, asked="second")
    assert talk.ledger.late_transcript("a", "words")
    seen = talk.ledger.messages(now=1)
    assert seen == (Message("user", "first words second"), Message("assistant", "answer"))


def test_a_late_transcript_makes_the_message_that_there_was_not() -> None:
    talk = Talk()
    entry = talk.open("a")
    talk.say(entry, "heard part", now=0)
    talk.ledger.finish(entry, whole=False, cancelled=True)
    talk.ledger.late_transcript("a", "words")
    assert talk.ledger.messages(now=1) == (Message("user", "words"), Message("assistant", "heard part"))


def test_a_late_transcript_replaces_words_that_were_not_known() -> None:
    talk = Talk()
    entry = talk.open("a")
    talk.ledger.finish(entry, whole=False, cancelled=True, words_unknown=True)
    assert talk.ledger.messages(now=1) == (Message("user", WORDS_UNKNOWN),)
    talk.ledger.late_transcript("a", "words")
    assert talk.ledger.messages(now=1) == (Message("user", "words"),)


def test_a_late_transcript_of_nobody_is_ignored() -> None:
    talk = Talk()
    assert not talk.ledger.late_transcript("x", "words")
    entry = talk.open("a")
    assert not talk.ledger.late_transcript("a", "words")  # it is not late
    talk.ledger.finish(entry, whole=False, remembered=False)
    assert not talk.ledger.late_transcript("a", "words")
    talk.answer("b", "answer", now=0, asked="")
    talk.ledger.history.truncate("b")
    assert not talk.ledger.late_transcript("b", "words")
    assert talk.ledger.messages(now=1) == ()


# bounds


@pytest.mark.parametrize("past", [0, 1])
def test_text_is_bounded(past: int) -> None:
    ledger = new_ledger(max_tokens=1 << 20)
    entry = ledger.open("a")
    entry.take_text(b"x" * MAX_KEPT_TEXT + b"y" * past)
    entry.hear("h" * MAX_KEPT_TEXT + "y" * past)
    entry.say("a" * MAX_KEPT_TEXT)
    entry.say("b" * past)
    assert entry.user_text == f"{'x' * MAX_KEPT_TEXT} {'h' * MAX_KEPT_TEXT}"
    assert entry.answer_text == "a" * MAX_KEPT_TEXT


@pytest.mark.parametrize("past", [0, 1])
def test_words_are_bounded_and_still_cut_where_they_are_known(past: int) -> None:
    ledger = new_ledger(max_tokens=1 << 20)
    entry = ledger.open("a", speaks=True)
    count = MAX_MARKS + past
    entry.say(" ".join(f"w{number}" for number in range(count)))
    ledger.send(entry, 0, 0, 100 * count, 0)
    entry.pronounce(tuple(Word(f"w{number}", 100 * number, 100 * number + 90) for number in range(count)))
    assert len(entry.words) == (MAX_MARKS // 2 + 1 if past else MAX_MARKS)
    for heard in (MAX_MARKS, MAX_MARKS // 2 + 1):
        entry.cut_ms = 100.0 * heard
        assert ledger.heard_text(entry).split()[-1] == f"w{heard - 1}"
    entry.cut_ms = 1000 * 100  # among words that are summed up, where there are any
    assert ledger.heard_text(entry).split()[-1] == "w999" if not past else ledger.heard_text(entry)


def test_clauses_are_bounded() -> None:
    ledger = new_ledger(max_tokens=1 << 20)
    entry = ledger.open("a", speaks=True)
    entry.say("one two. " * (MAX_MARKS + 1))
    for number in range(MAX_MARKS + 1):
        ledger.send(entry, number, 100 * number, 100 * number + 100, 0)
        entry.read_to(9 * number + 8, 100.0 * number, 100.0 * number + 100)
    assert len(entry.clauses) == MAX_MARKS // 2 + 1
    entry.cut_ms = 100.0 * (MAX_MARKS - 1)
    assert ledger.heard_text(entry) == ("one two. " * (MAX_MARKS - 1)).rstrip()


def test_an_answer_of_an_hour_and_a_hundred_thousand_words() -> None:
    ledger = new_ledger(max_tokens=1 << 20)
    entry = ledger.open("a", speaks=True)
    for number in range(100_000):
        entry.say("w ")
        ledger.send(entry, number, 36.0 * number, 36.0 * number + 36, number * 0.036)
        entry.pronounce((Word("w", round(36 * number), round(36 * number) + 30),))
    assert len(entry.words) <= MAX_MARKS
    ledger.report(60_000 * 36, now=3600, request_id="a")
    ledger.cut(entry, 3600)
    assert len(ledger.heard_text(entry).split()) == 60_000
    assert len(ledger.to_bytes()) < 4 << 20


def test_the_language_of_what_was_heard_is_kept() -> None:
    ledger = new_ledger()
    for request_id, heard in (("a", ("es", "de")), ("b", (None,)), ("c", ("en",))):
        entry = ledger.open(request_id)
        for language in heard:
            ledger.hear(entry, "word", language=language)
        ledger.finish(entry, whole=True)
    restored = Ledger(0, ByteBudget(1 << 24))
    restored.restore(ledger.to_bytes())
    assert restored.language == "en"
    messages = [restored.question(one) for one in map(restored.find, "abc") if one is not None]
    assert [message.language for message in messages] == ["de", None, "en"]
    assert restored.history.messages()[-1].language == "en"  # all of them are one message


@pytest.mark.parametrize("past", [0, 1])
def test_entries_that_are_over_are_bounded(past: int) -> None:
    talk = Talk(clocked=True)
    for number in range(MAX_ENTRIES + 1 + past):
        talk.answer(f"r{number}", "one two", now=number * 10)
    assert (talk.ledger.find("r0") is None) is bool(past)  # the last one is still being played
    assert len(talk.answers()) == MAX_ENTRIES + 1 + past


@pytest.mark.parametrize("past", [0, 1])
def test_what_entries_hold_is_bounded_even_while_they_wait(past: int) -> None:
    talk = Talk(clocked=True)
    for number in range(5):
        entry = talk.open(f"r{number}")
        entry.say("x" * (MAX_DETAIL // 4 if number < 4 else past))
        talk.ledger.send(entry, number, 0, 1e6, 0)
        talk.ledger.finish(entry, whole=True)
    assert (talk.ledger.find("r0") is None) is bool(past)
    talk.ledger.report(500, now=1, request_id="r0")  # it still plays
    talk.ledger.silence(1)
    assert len(talk.ledger._line) == 5


def test_many_answers_leave_little() -> None:
    talk = Talk(clocked=True)
    for number in range(2000):
        talk.answer(f"r{number}", "one two", now=number * 10)
    assert len(talk.ledger._entries) <= MAX_ENTRIES + 1
    assert len(talk.ledger._line) <= 2 * MAX_ENTRIES


def test_nothing_is_left_of_a_closed_ledger() -> None:
    talk, entry = unheard_talk()
    talk.ledger.close()
    talk.ledger.close()
    assert talk.ledger._budget.used == 0
    talk.ledger.finish(entry, whole=True)
    assert talk.ledger.messages(now=1) == ()


# the history


def test_both_parts_of_a_turn_are_one_message_and_truncated_as_one() -> None:
    talk = Talk()
    first = talk.open("a", "My name is Robert.")
    talk.ledger.cut(first, 0, unheard=True)
    talk.ledger.finish(first, whole=False, cancelled=True)
    talk.answer("b", "Robert", now=0, asked="What is my name?")
    asked = Message("user", "My name is Robert. What is my name?")
    assert talk.ledger.messages(now=1) == (asked, Message("assistant", "Robert"))
    assert talk.ledger.history.truncate("b") == 2
    assert talk.ledger.messages(now=1) == ()
    assert talk.ledger.history.truncate("a") == 0
    with pytest.raises(InvalidValue):
        talk.ledger.history.truncate("x")


def test_what_a_client_places_stands_behind_earlier_requests() -> None:
    talk = Talk()
    talk.ledger.place([Message("system", "be brief")])
    talk.answer("a", "one", now=0)
    talk.ledger.place([Message("user", "item")], item_id="item_x")
    talk.answer("b", "two", now=0)
    assert [one.text for one in talk.ledger.messages(now=1)] == ["be brief", "ask", "one", "item ask", "two"]
    talk.ledger.remove("item_x")
    talk.ledger.remove("b", roles={"assistant"})
    talk.ledger.cut(talk.ledger.find("b") or talk.open("none"), 1, at_ms=0)
    assert [one.text for one in talk.ledger.messages(now=1)] == ["be brief", "ask", "one", "ask"]


def test_calls_and_results_are_known_from_the_moment_they_are_sent() -> None:
    ledger = new_ledger()
    asked = ledger.open("a")
    asked.call(ToolCallFragment(0, id="call_1", name="f", arguments="{}"))
    assert (ledger.knows_call("call_1"), ledger.knows_call("call_2")) == (True, False)
    ledger.finish(asked, whole=True)
    assert (ledger.knows_call("call_1"), ledger.knows_result("call_1")) == (True, False)
    answered = ledger.open("b")
    answered.take_text(b"42", "call_1")
    assert ledger.knows_result("call_1")
    ledger.finish(answered, whole=True)
    assert ledger.knows_result("call_1")
    again = ledger.open("c")
    again.call(ToolCallFragment(0, id="call_1", name="f", arguments="{}"))
    ledger.finish(again, whole=True)
    assert not ledger.knows_result("call_1")  # some engines give the same ids again
    ledger.history.truncate("a")
    assert not ledger.knows_call("call_1")


def test_an_answer_before_the_result_keeps_the_call_for_it() -> None:
    ledger = new_ledger()
    asked = ledger.open("a")
    asked.take_text(b"search")
    asked.say("I will tell you.")
    asked.call(ToolCallFragment(0, id="call_1", name="f", arguments="{}"))
    ledger.finish(asked, whole=True)
    chat = ledger.open("b")
    chat.take_text(b"how are you")
    chat.say("Fine.")
    ledger.finish(chat, whole=True)
    seen = ledger.messages(["call_1"], now=0)
    assert [(one.text, len(one.tool_calls)) for one in seen][1::2] == [("I will tell you.", 0), ("Fine.", 1)]


def test_an_answer_is_stopped_by_name_while_it_sounds() -> None:
    talk = Talk(clocked=True)
    played, playing = talk.answer("a", "one", now=0), talk.answer("b", "two three", now=0)
    for name in ("a", "b", "nobody"):
        talk.ledger.stop(name, 1.5)
    assert (played.cut_ms, playing.cut_ms) == (None, 500)


def test_calls_of_one_answer_are_known_together() -> None:
    ledger = new_ledger()
    entry = ledger.open("a")
    for index in range(2):
        entry.call(ToolCallFragment(index, id=f"call_{index}", name="f", arguments="{}"))
    assert ledger.calls_beside("call_1") == ("call_0", "call_1")
    ledger.finish(entry, whole=True)
    assert ledger.calls_beside("call_0") == ("call_0", "call_1")
    assert ledger.calls_beside("call_2") == ()


# what was said last


def test_what_was_heard_of_the_latest_answer_that_said_anything() -> None:
    talk = Talk()
    assert talk.ledger.last_said() == ""
    talk.answer("a", "one two", now=0)
    second = talk.answer("b", "three four five", now=2)
    talk.open("c", "typed")
    assert talk.ledger.last_said() == "three four five"
    talk.ledger.cut(second, 3.5, at_ms=1500)
    assert talk.ledger.last_said() == "three four"
