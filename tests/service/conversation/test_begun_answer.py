"""Where a voice begins again in an answer that another server had begun, and where its sound is then."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.engine_answers import Answer, heard

from omni_ws.audio.codec import AudioDecoder
from omni_ws.core.chunks import AudioEncoding, AudioFormat, FinishReason, Usage, Word
from omni_ws.core.ledger_entry import LedgerEntry
from omni_ws.engine.base import AudioOutput, Finished, TextOutput, TranscriptOutput
from omni_ws.service.conversation.answer_writer import SpeechOutput
from omni_ws.service.conversation.begun_answer import RestOfAnswer, VoiceRestart, restart_of

TEXT = "Dr. Smith came. He saw it, and left. Then it rained."
RATE = 1000
END = Finished(FinishReason.STOP, Usage())


def entry_of(text: str = TEXT, *, made_ms: float, word_ms: int = 100, ends: bool = True) -> LedgerEntry:
    """An answer of which so much audio was made, by a voice that takes so long for each word, with a gap of 10 ms."""
    entry = LedgerEntry(request_id="req_1", speaks=True)
    entry.say(text)
    end = 0
    for number, word in enumerate(text.split()):
        end = text.index(word, end) + len(word)
        start = number * word_ms
        if start - word_ms < made_ms:  # a voice tells the words of a clause before all of them sound
            entry.pronounce([Word(word.strip(".,"), start, start + word_ms - 10, end if ends else None)])
    entry.send_to(made_ms)
    return entry


@pytest.mark.parametrize("ends", [True, False], ids=["told", "looked for"])
@pytest.mark.parametrize(
    ("made_ms", "said", "number"),
    [
        (10, TEXT, 0),
        (250, TEXT, 2),  # the dot behind Dr. ends no sentence
        (300, TEXT, 2),
        (301, " He saw it, and left. Then it rained.", 0),
        (650, " He saw it, and left. Then it rained.", 3),
        (799, " He saw it, and left. Then it rained.", 4),
        (850, " Then it rained.", 0),
        (1090, " Then it rained.", 2),
    ],
)
def test_it_begins_again_at_the_sentence_of_the_last_word(made_ms: float, said: str, number: int, ends: bool) -> None:
    entry = entry_of(made_ms=made_ms, ends=ends)
    found = restart_of(entry, from_start=False)
    assert TEXT[found.position :] == said
    first = len(TEXT[: found.position].split())
    assert found.number == number
    assert found.word == entry.words[first + number]
    assert found.told == len(entry.words) - first
    assert found.ms == (entry.words[first - 1].end_ms if first else 0)


def test_without_audio_it_begins_at_the_start() -> None:
    assert restart_of(entry_of(made_ms=0), from_start=False) == VoiceRestart()
    assert restart_of(LedgerEntry(request_id="req_1"), from_start=False) == VoiceRestart()


def test_an_engine_that_reads_all_again_begins_at_the_start() -> None:
    found = restart_of(entry_of(made_ms=650), from_start=True)
    assert (found.position, found.ms, found.number, found.told) == (0, 0, 6, 8)


def test_clauses_of_a_voice_without_times_of_words() -> None:
    entry = LedgerEntry(request_id="req_1", speaks=True)
    entry.say(TEXT)
    entry.send_to(900)
    for start, end, text_end in ((0, 400, 15), (400, 700, 35), (700, 900, 35)):
        entry.read_to(text_end, start, end)
    assert restart_of(entry, from_start=False) == VoiceRestart(15, 400)
    assert restart_of(entry, from_start=True) == VoiceRestart()


def test_a_long_text_without_sentences_is_read_again() -> None:
    text = "word " * 2000
    assert restart_of(entry_of(text, made_ms=150_000), from_start=False).position == 0


def rest_of(entry: LedgerEntry, *outputs: Any, from_start: bool = False) -> tuple[Answer, list[float]]:
    answer, begun = Answer(), list[float]()
    rest = RestOfAnswer(answer, entry, restart_of(entry, from_start=from_start), begin_at=begun.append)
    for output in outputs:
        rest.write(output)
    return answer, begun


def sound(length_ms: int, *words: Word) -> AudioOutput:
    return AudioOutput(np.zeros(length_ms, np.float32), RATE, words)


def test_the_word_that_was_spoken_stays_at_its_place() -> None:
    """The voice says the sentence again, with a longer pause before it, and with its words in two pieces."""
    entry = entry_of(made_ms=550)
    again = [Word("He", 40, 130, 18), Word("saw", 140, 230, 22), Word("it", 240, 330, 26)]
    late = [Word("and", 350, 430, 30), Word("left", 440, 530, 36)]
    answer, begun = rest_of(entry, sound(250, *again[:2]), sound(100, again[2]), sound(200, *late), END)
    assert begun == [500 - 240]
    assert [word.text for one in heard(answer.outputs) for word in one.words] == ["left"]
    (left,) = (word for one in heard(answer.outputs) for word in one.words)
    assert (left.start_ms, left.text_end) == (700, 36)
    assert [len(one.samples) for one in heard(answer.outputs)] == [250, 100, 200]


def test_words_that_are_new_keep_their_sound() -> None:
    """Also if the client has that: AnswerWriter tells them with the next."""
    entry = entry_of(made_ms=450)
    words = [
        Word(word, 100 * number, 100 * number + 90) for number, word in enumerate(["He", "saw", "it", "and", "left"])
    ]
    answer, begun = rest_of(entry, sound(100, *words), sound(60), sound(340), END)
    assert begun == [300]
    pieces = [[word.text for word in one.words] for one in heard(answer.outputs)]
    assert pieces == [["and", "left"], [], []]


def test_words_that_had_not_ended_when_the_sound_ended_are_told() -> None:
    """A voice that tells a word once it has ended had told none."""
    entry = LedgerEntry(request_id="req_1", speaks=True)
    entry.say(TEXT)
    entry.send_to(80)
    words = [Word(word, 100 * number, 100 * number + 90) for number, word in enumerate(["Dr", "Smith"])]
    answer, begun = rest_of(entry, sound(60), sound(60, words[0]), sound(80, words[1]), END)
    assert begun == [0]
    assert answer.words == words


@pytest.mark.parametrize("from_start", [True, False])
def test_words_that_were_told_before_they_sound_are_not_told_again(from_start: bool) -> None:
    entry = LedgerEntry(request_id="req_1", speaks=True)
    entry.say(TEXT)
    entry.send_to(30)
    words = [Word(word, 40 + 100 * number, 130 + 100 * number) for number, word in enumerate(["Dr", "Smith", "came"])]
    entry.pronounce(words[:2])
    answer, begun = rest_of(entry, sound(200, *words[:2]), sound(140, words[2]), END, from_start=from_start)
    assert begun == [0]
    assert answer.words == words[2:]


def test_sound_that_has_fewer_words_is_not_lost() -> None:
    entry = entry_of(made_ms=650)
    answer, begun = rest_of(entry, TextOutput(" More"), sound(250), TranscriptOutput("Hm"), END)
    assert begun == [290.0]
    assert [type(one) for one in answer.outputs] == [TextOutput, TranscriptOutput, AudioOutput, Finished]


def test_what_was_heard_is_not_told_again() -> None:
    entry = entry_of(made_ms=0)
    entry.hear("What is it?")
    told = [TranscriptOutput("What", interim=True), TranscriptOutput("What is it?"), TranscriptOutput(" And?")]
    answer, begun = rest_of(entry, *told, sound(10), END)
    assert [one.text for one in answer.transcripts] == [" And?"]
    assert begun == []


@pytest.mark.parametrize("encoding", [AudioEncoding.OPUS, AudioEncoding.MP3, AudioEncoding.WAV, AudioEncoding.PCM16])
async def test_sound_in_every_format_goes_on_behind_what_was_sent(encoding: AudioEncoding) -> None:
    target = AudioFormat(encoding, 24_000)
    whole = (np.sin(np.arange(3 * 24_000) / 20) / 2).astype(np.float32)

    async def released() -> None:
        pass

    def speech() -> SpeechOutput:
        return SpeechOutput(target, lambda start_ms: 0, max_lead_ms=None, released=released)

    before, made_ms = speech(), 0.0
    sent: list[bytes] = []
    for begin in range(0, 36_000, 2400):
        if payload := await before.encode(whole[begin : begin + 2400], 24_000):
            sent.append(payload)
            made_ms = before.end_ms
    after = speech()
    after.begin_at(1000, sent_ms=made_ms)
    for begin in range(24_000, len(whole), 2400):
        payload = await after.encode(whole[begin : begin + 2400], 24_000)
        if after.start_ms < made_ms:
            payload = after.behind(made_ms, payload)
        sent.append(payload)
    sent.append(await after.flush())
    assert after.end_ms == pytest.approx(3000, abs=1)
    with AudioDecoder(target, sample_rate=24_000) as decoder:
        samples = np.concatenate([*decoder.pieces(b"".join(sent)), decoder.flush()])
    within_ms = {AudioEncoding.OPUS: 250, AudioEncoding.MP3: 100}.get(encoding, 1)  # what an encoder keeps and adds
    assert len(samples) == pytest.approx(len(whole), abs=24 * within_ms)
