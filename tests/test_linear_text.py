"""What reads a text of a client or of a model does work in proportion to it, whatever the text is.

Work in Python is counted by the lines that run, which a busy machine leaves as they are. Regular expressions, and what
copies text, run none: they are seen by processor time alone, at lengths where quadratic work takes four times as much
as is allowed.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime
from types import FrameType
from typing import Any

import pytest
from support.parts_of_sessions import make_request
from support.word_prompts import form

from omni_ws.core.chunks import InputChunk, InputMode, Modality, ToolCall, ToolCallFragment, Word
from omni_ws.core.history import Message, in_order
from omni_ws.core.ledger import Ledger
from omni_ws.core.ledger_entry import MAX_KEPT_TEXT
from omni_ws.core.quota import ByteBudget
from omni_ws.engine.answer_limit import AnswerText, WordCounter
from omni_ws.engine.clauses import ClauseSplitter, pieces_of
from omni_ws.engine.llm.computed import (
    NotArithmetic,
    evaluate,
    parse_number,
)
from omni_ws.engine.llm.rules_engine import answer
from omni_ws.engine.remote.event_stream import EventReader
from omni_ws.engine.remote.settings import with_results
from omni_ws.engine.spoken.speakable_text import SpeakableText
from omni_ws.engine.vllm.prompt import PromptContext, PromptDraft
from omni_ws.errors import OmniError
from omni_ws.transport.http.exchange import FormReader
from omni_ws.transport.realtime.items import ConversationItems
from omni_ws.wire.frames import decode_frame
from omni_ws.wire.realtime_events import Item
from omni_ws.wire.recording import without_content
from omni_ws.wire.streaming_body import NdjsonDecoder, body_reader

#: How many times as long as the shorter text the longer one is.
TIMES = 8
#: Characters of the shorter text where lines are counted, and where time is taken.
COUNTED = 250
TIMED = 4_000
#: Lines of the longer text for each line of the shorter one: quadratic work has 64.
MAX_MORE_LINES = 10
#: Twice what a text of eight times the length should take; quadratic work takes four times as much as this.
MAX_GROWTH = 2 * TIMES
#: Processor time that is too short to compare.
NOISE_SEC = 0.004
TRIALS = 6

REPEATED = {
    "words": "word ",
    "one word": "w",
    "full stops": ".",
    "mixed marks": ".,!?;",
    "marks and quotes": '."',
    "quotes": '"',
    "curly quotes": "”",
    "commas": ",",
    "commas and spaces": ", ",
    "digits": "1",
    "grouped digits": ",123",
    "decimals": "1.",
    "brackets": "(",
    "pairs of brackets": "[]",
    "braces": "{",
    "spaces": " ",
    "tabs": "\t",
    "line ends": "\n",
    "carriage returns": "\r",
    "combining characters": "\u0301",
    "ideographs": "好。",
    "abbreviations": "Dr. ",
    "numbers or not": "no. ",
    "initials": "a.",
    "courtesies": "please ",
    "thanks": " thank you,",
    "hyphens": "-",
    "hyphened numbers": "twenty-",
    "backslashes": "\\",
    "angles": "<",
    "escapes": "\\u0000",
    "NUL": "\0",
}
BEGINNINGS = ("", "Wait", "what is 1", "count from one ", "say ", "spell ", "please ", "no. ", "a, ")


def fed_to_splitter(text: str) -> None:
    splitter = ClauseSplitter()
    splitter.feed(text)
    splitter.rest()


def fed_to_splitter_by_character(text: str) -> None:
    splitter = ClauseSplitter()
    for character in text:
        splitter.feed(character)
        assert splitter.looks_complete in (True, False)
    splitter.rest()


def made_speakable(text: str) -> None:
    speakable = SpeakableText()
    for piece in pieces_of(text):
        speakable.feed(piece)
    speakable.rest()


def made_speakable_by_character(text: str) -> None:
    speakable = SpeakableText()
    for character in text:
        speakable.feed(character)
        assert speakable.looks_complete in (True, False)
    speakable.rest()


def made_speakable_with_a_lexicon(text: str) -> None:
    """With entries that begin as the text does and never match, and one that matches."""
    near = {text[:length] + "#?": "x" for length in range(1, 60, 7)}
    speakable = SpeakableText(lexicon={**near, "full": "fool"})
    for piece in pieces_of(text):
        speakable.feed(piece)
    speakable.rest()


def answered(text: str) -> None:
    for sentence in answer(text, (), datetime(2031, 3, 4)):
        assert sentence


def calculated(text: str) -> None:
    parse_number(text)
    with suppress(NotArithmetic, ZeroDivisionError):
        evaluate(text)


def limited(text: str) -> None:
    """With stop strings of the greatest length that nearly match."""
    stops = [text[:4] * 60 + "!?" + str(number) for number in range(4)]
    limit = AnswerText({"stop": stops, "max_tokens": 10**6})
    for piece in pieces_of(text):
        limit.feed(piece)
    limit.finish()


def limited_by_character(text: str) -> None:
    limit = AnswerText({"stop": [text[:4] * 60 + "!?"], "max_tokens": 10**6})
    counter = WordCounter()
    for character in text:
        limit.feed(character)
        counter.feed(character)
    limit.finish()


def said_in_tool_calls(text: str) -> None:
    request = make_request(mode=InputMode.SNAPSHOT)
    for piece in cut(text, 50):
        request.entry.call(ToolCallFragment(0, "call", "name", piece))
    assert request.tool_calls[0].arguments == text[:MAX_KEPT_TEXT]


def answered_by_tools(text: str) -> None:
    """Each piece is the result of another call."""
    request = make_request(mode=InputMode.SNAPSHOT)
    for number, piece in enumerate(cut(text, 50)):
        request.append(InputChunk(Modality.TEXT, piece.encode("ascii", "replace"), tool_call_id=str(number)))
    assert sum(map(len, request.entry.results.values())) == min(len(text), MAX_KEPT_TEXT)


def prompted_by_tools(text: str) -> None:
    """One result, in pieces."""
    made = Message("assistant", "", tool_calls=(ToolCall("call", "name", "{}"),))
    draft = PromptDraft(form(), PromptContext(history=(made,)))
    for piece in cut(text, 10):
        draft.add_tool_result("call", piece)
    assert sum(map(len, draft.tool_results["call"])) == len(text)


def heard_word_by_word(text: str) -> None:
    ledger = Ledger(len(text), ByteBudget(1 << 24))
    entry = ledger.open("req", speaks=True)
    pieces = list(cut(text, 20))
    for number, piece in enumerate(pieces):
        entry.say(piece)
        ledger.send(entry, number, 10 * number, 10 * number + 10, number / 100)
        entry.pronounce((Word(piece, 10 * number, 10 * number + 9),))
    ledger.cut(entry, len(pieces), at_ms=5 * len(pieces))
    assert ledger.heard_text(entry)


def items_taken_for_an_answer(text: str) -> None:
    """Each piece is an item of the client's, of the user or the system in turn, and all are the input of one answer."""
    ledger = Ledger(len(text) // 40, ByteBudget(1 << 24))  # of what is kept, an answer sees half
    items = ConversationItems(ledger, ByteBudget(1 << 24), max_bytes=1 << 24)
    for number, piece in enumerate(cut(text, 20)):
        role = ("user", "system")[number % 2]
        chunk = InputChunk(Modality.TEXT, b"x")
        items.create(Item(item_id=str(number), role=role, content=[{"text": piece}], chunks=[chunk]))
    asked, _ = items.take_pending()
    assert [item.role for item in asked] == ["user"] * len(asked)
    items.asked(asked, "req")
    assert not items.pending()


def messages_of_one_speaker(text: str) -> None:
    messages = [Message("user", piece) for piece in cut(text, 20)]
    joined = in_order(messages)
    assert [one.text for one in joined] == [" ".join(one.text for one in messages if one.says_something)][: len(joined)]


def calls_put_in_order(text: str) -> None:
    """As many calls as fit, each with its result."""
    calls = [{"id": str(number), "type": "function"} for number in range(len(text) // 10)]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": ""} for call in calls]
    said = {"role": "assistant", "content": "", "tool_calls": calls}
    assert len(list(with_results([said, *results]))) == 1 + len(calls)


def read_by_line(text: str) -> None:
    lines = NdjsonDecoder(max_line_bytes=len(text) * 4)
    assert sum(map(len, (line for piece in cut(text, 100) for line in lines.feed(piece.encode())))) <= len(text) * 4


def read_as_events(text: str) -> None:
    reader = EventReader()
    for piece in cut(text, 100):
        reader.feed(b"data:" + piece.encode())


def read_as_form(text: str) -> None:
    reader = FormReader('multipart/form-data; boundary="--.--"')
    head = b'----.--\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    for piece in (head, *(piece.encode() for piece in cut(text, 100)), b"\r\n----.----\r\n"):
        reader.feed(piece)
    assert bytes(reader.finish()[0].data) == text.encode()


def read_as_frame(text: str) -> None:
    for frame in (text, f'{{"type":"{text}"}}', f'{{"type":"input_chunk","sequence_id":0,"text":"{text}'):
        with suppress(OmniError):
            decode_frame(frame.encode())
        without_content(frame.encode())


def read_as_content_type(text: str) -> None:
    for content_type in (f"multipart/form-data; boundary={text}", f"application/x-multipart-streaming{text}"):
        with suppress(OmniError):
            FormReader(content_type.encode("latin-1", "replace").decode("latin-1"))
        with suppress(OmniError):
            body_reader(content_type, max_chunk_bytes=1000)


def cut(text: str, size: int) -> Iterator[str]:
    return (text[start : start + size] for start in range(0, len(text), size))


READERS: tuple[Callable[[str], object], ...] = (
    fed_to_splitter,
    made_speakable,
    made_speakable_with_a_lexicon,
    answered,
    calculated,
    limited,
    read_by_line,
    read_as_events,
    read_as_form,
    read_as_frame,
    read_as_content_type,
)
READERS_BY_CHARACTER = (fed_to_splitter_by_character, made_speakable_by_character, limited_by_character)
#: What counts is how many pieces there are, whatever is in them.
COUNTERS = (
    said_in_tool_calls,
    answered_by_tools,
    prompted_by_tools,
    heard_word_by_word,
    items_taken_for_an_answer,
    messages_of_one_speaker,
    calls_put_in_order,
    read_by_line,
)


def name_of(read: Callable[[str], object]) -> str:
    return read.__name__


def lines_run(read: Callable[[str], object], text: str) -> int:
    """How many lines of Python ``read`` runs."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    tracing = sys.gettrace()  # where the coverage is measured
    sys.settrace(trace)
    try:
        read(text)
    finally:
        sys.settrace(tracing)
    return count


def processor_sec(read: Callable[[str], object], text: str) -> float:
    """Time of this thread."""
    before = time.thread_time()
    read(text)
    return time.thread_time() - before


def assert_counted(read: Callable[[str], object], make: Callable[[int], str]) -> None:
    read(make(COUNTED))  # what is made once is made
    short, long = lines_run(read, make(COUNTED)), lines_run(read, make(TIMES * COUNTED))
    assert long <= MAX_MORE_LINES * short, make(20)


def assert_linear(read: Callable[[str], object], make: Callable[[int], str], length: int) -> None:
    """Reads texts of ``length`` and of eight times as many characters, in turns: the machine's speed changes."""
    text = make(TIMES * length)
    times: list[tuple[float, float]] = []
    while len(times) < TRIALS:
        short = min(processor_sec(read, make(length)) for _ in range(1 + 2 * bool(times)))
        times.append((short, processor_sec(read, text)))
        if times[-1][1] < MAX_GROWTH * max(short, NOISE_SEC / TIMES):
            return
    pytest.fail(f"{length} characters of {make(20)!r}, and {TIMES} times as many, took {times} s")


def made(beginning: str, repeated: str) -> Callable[[int], str]:
    return lambda length: (beginning + repeated * (length // len(repeated) + 1))[:length]


@pytest.mark.parametrize("read", READERS + READERS_BY_CHARACTER, ids=name_of)
def test_lines_grow_with_the_text(read: Callable[[str], object]) -> None:
    for repeated in REPEATED.values():
        assert_counted(read, made("Wait", repeated))


@pytest.mark.parametrize("read", READERS, ids=name_of)
def test_time_grows_with_the_text(read: Callable[[str], object]) -> None:
    for repeated in REPEATED.values():
        assert_linear(read, made("Wait", repeated), TIMED)


def test_time_of_the_rules_grows_with_the_text() -> None:
    for beginning in BEGINNINGS:
        for repeated in (",", " ", "1", "a", ".", " to", " please"):
            assert_linear(answered, made(beginning, repeated), TIMED)


@pytest.mark.parametrize("read", COUNTERS, ids=name_of)
def test_time_grows_with_the_number_of_pieces(read: Callable[[str], object]) -> None:
    assert_linear(read, made("", "word "), 10 * TIMED)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("read", "size"),
    [
        # Where each character is read alone it takes long.
        *((read, 1 << 17) for read in READERS_BY_CHARACTER),
        *((read, 1 << 20) for read in (fed_to_splitter, limited, read_by_line, read_as_events, read_as_form)),
        (read_as_frame, 1 << 20),
    ],
)
def test_time_grows_with_a_long_text(read: Callable[[str], object], size: int) -> None:
    """Copies of what was read before are quick, and seen only if there are many."""
    assert_linear(read, made("", "w"), size // TIMES)
