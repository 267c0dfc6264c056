"""What reads a text of a client or of a model takes time in proportion to it, whatever the text is."""

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime

import pytest
from support.made_requests import make_request
from support.word_prompts import form

from omni_ws.core.chunks import InputChunk, InputMode, Modality, OutputModality, ToolCall, ToolCallFragment, Word
from omni_ws.core.output import OutputChunk
from omni_ws.engine.answer_limit import AnswerLimit, WordCounter
from omni_ws.engine.base import Message
from omni_ws.engine.clauses import ClauseSplitter
from omni_ws.engine.llm.arithmetic import NotArithmetic, evaluate, parse_number
from omni_ws.engine.llm.rules import answer
from omni_ws.engine.remote.call_order import with_results
from omni_ws.engine.remote.server_sent_events import EventReader
from omni_ws.engine.spoken.speakable_text import SpeakableText
from omni_ws.engine.text_pieces import pieces_of
from omni_ws.engine.tts.flite import speakable
from omni_ws.engine.vllm.prompt import PromptDraft
from omni_ws.engine.vllm.prompt_form import PromptContext
from omni_ws.errors import OmniError
from omni_ws.service.conversation.kept_text import MAX_KEPT_TEXT
from omni_ws.transport.http.multipart_form import FormReader
from omni_ws.wire.body_stream import NdjsonDecoder
from omni_ws.wire.frames import decode_frame
from omni_ws.wire.redaction import without_content
from omni_ws.wire.streaming_body import body_reader

#: Characters of the shorter text; the longer one has eight times as many.
SHORT = 4_000
TIMES = 8
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
    limit = AnswerLimit({"stop": stops, "max_tokens": 10**6})
    for piece in pieces_of(text):
        limit.feed(piece)
    limit.finish()


def limited_by_character(text: str) -> None:
    limit = AnswerLimit({"stop": [text[:4] * 60 + "!?"], "max_tokens": 10**6})
    counter = WordCounter()
    for character in text:
        limit.feed(character)
        counter.feed(character)
    limit.finish()


def said_in_tool_calls(text: str) -> None:
    request = make_request(mode=InputMode.SNAPSHOT)
    for piece in cut(text, 50):
        request.called(ToolCallFragment(0, "call", "name", piece))
    assert request.tool_calls[0].arguments == text[:MAX_KEPT_TEXT]


def answered_by_tools(text: str) -> None:
    """Each piece is the result of another call."""
    request = make_request(mode=InputMode.SNAPSHOT)
    for number, piece in enumerate(cut(text, 50)):
        request.append(InputChunk(Modality.TEXT, piece.encode("ascii", "replace"), tool_call_id=str(number)))
    assert sum(map(len, request.tool_results.values())) == min(len(text), MAX_KEPT_TEXT)


def prompted_by_tools(text: str) -> None:
    """One result, in pieces."""
    made = Message("assistant", "", tool_calls=(ToolCall("call", "name", "{}"),))
    draft = PromptDraft(form(), PromptContext(history=(made,)))
    for piece in cut(text, 10):
        draft.add_tool_result("call", piece)
    assert sum(map(len, draft.tool_results["call"])) == len(text)


def withdrawn_word_by_word(text: str) -> None:
    request = make_request(mode=InputMode.SNAPSHOT)
    request.spoken = [Word(piece, 10 * number, 10 * number + 9) for number, piece in enumerate(cut(text, 20))]
    count = len(request.spoken)
    chunks = [
        OutputChunk(request_id="req", sequence_id=number, modality=OutputModality.AUDIO, start_ms=10 * number)
        for number in range(count // 2, count)
    ]
    request.withdrawn(chunks)
    assert len(request.spoken) == count // 2


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
    fed_to_splitter_by_character,
    made_speakable,
    made_speakable_by_character,
    answered,
    calculated,
    limited,
    limited_by_character,
    speakable,
    read_by_line,
    read_as_events,
    read_as_form,
    read_as_frame,
    read_as_content_type,
)
#: What counts is how many pieces there are, whatever is in them.
COUNTERS = (
    said_in_tool_calls,
    answered_by_tools,
    prompted_by_tools,
    withdrawn_word_by_word,
    calls_put_in_order,
    read_by_line,
)
NAMES = tuple(reader.__name__ for reader in READERS)


def processor_sec(read: Callable[[str], object], text: str) -> float:
    """Time of this thread."""
    before = time.thread_time()
    read(text)
    return time.thread_time() - before


def assert_linear(read: Callable[[str], object], make: Callable[[int], str], length: int) -> None:
    """Reads texts of ``length`` and of eight times as many characters, in turns: the machine's speed changes."""
    text = make(TIMES * length)
    times: list[tuple[float, float]] = []
    while len(times) < TRIALS:
        short = min(processor_sec(read, make(length)) for _ in range(3))
        times.append((short, processor_sec(read, text)))
        if times[-1][1] < MAX_GROWTH * max(short, NOISE_SEC / TIMES):
            return
    pytest.fail(f"{length} characters, and {TIMES} times as many, took {times} s")


def made(beginning: str, repeated: str) -> Callable[[int], str]:
    return lambda length: (beginning + repeated * (length // len(repeated) + 1))[:length]


@pytest.mark.parametrize("repeated", REPEATED.values(), ids=REPEATED)
@pytest.mark.parametrize("read", READERS, ids=NAMES)
def test_time_grows_with_the_text(read: Callable[[str], object], repeated: str) -> None:
    assert_linear(read, made("Wait", repeated), SHORT)


@pytest.mark.parametrize("beginning", BEGINNINGS)
@pytest.mark.parametrize("repeated", [",", " ", "1", "a", ".", " to", " please"])
def test_time_of_the_rules_grows_with_the_text(beginning: str, repeated: str) -> None:
    assert_linear(answered, made(beginning, repeated), SHORT)


@pytest.mark.parametrize("read", COUNTERS)
def test_time_grows_with_the_number_of_pieces(read: Callable[[str], object]) -> None:
    assert_linear(read, made("", "word "), 10 * SHORT)


@pytest.mark.slow
@pytest.mark.parametrize("repeated", ["w", "."])
@pytest.mark.parametrize("read", READERS, ids=NAMES)
def test_time_grows_with_a_text_of_a_megabyte(read: Callable[[str], object], repeated: str) -> None:
    """A quarter where each character is read alone, which takes long."""
    size = 1 << 18 if read.__name__.endswith("_by_character") else 1 << 20
    assert_linear(read, made("", repeated), size // TIMES)
