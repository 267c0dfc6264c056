"""What is kept of an answer until it was heard."""

from __future__ import annotations

import pytest

from omni_ws.core.audio_format import AudioEncoding, AudioFormat
from omni_ws.core.chunks import OutputModality, Word
from omni_ws.core.output import OutputChunk
from omni_ws.core.quota import ByteBudget
from omni_ws.service.conversation import unheard_output
from omni_ws.service.conversation.messages import message_cost
from omni_ws.service.conversation.unheard_output import UnheardOutput

PCM = AudioFormat(sample_rate=8000)
PIECE = bytes(range(200)) * 8  # 100 ms


def audio(number: int, *, audio_format: AudioFormat = PCM) -> OutputChunk:
    word = Word(f"word{number}", number * 100, number * 100 + 50)
    return OutputChunk(
        "r", number, OutputModality.AUDIO, payload=PIECE, format=audio_format, start_ms=number * 100, words=(word,)
    )


def text(number: int, content: str) -> OutputChunk:
    return OutputChunk("r", number, OutputModality.TEXT, content)


def sent(count: int, *, budget: ByteBudget, heard_ms: float = 0, audio_format: AudioFormat = PCM) -> UnheardOutput:
    unheard = UnheardOutput(budget)
    for number in range(count):
        chunk = audio(number, audio_format=audio_format)
        unheard.append(chunk, start_ms=number * 100, end_ms=number * 100 + 100, heard_ms=heard_ms)
    return unheard


def places(chunks: list[OutputChunk]) -> list[int | None]:
    return [chunk.start_ms for chunk in chunks]


def test_raw_samples_are_cut_where_they_were_heard_to() -> None:
    unheard = sent(3, budget=ByteBudget(1 << 20))
    first, second = unheard.take(125.2)
    assert (first.start_ms, second.start_ms) == (125, 200)
    assert first.payload == PIECE[2 * 201 :]
    assert [word.text for word in first.words] == ["word1"]
    assert unheard.take(150)[0].words == ()
    assert unheard.take(300) == []


@pytest.mark.parametrize("encoding", [AudioEncoding.WAV, AudioEncoding.OPUS])
def test_what_has_a_header_is_not_cut(encoding: AudioEncoding) -> None:
    unheard = sent(3, budget=ByteBudget(1 << 20), audio_format=AudioFormat(encoding, 8000))
    assert places(unheard.take(125)) == [100, 200]


def test_what_was_heard_is_not_kept() -> None:
    budget = ByteBudget(1 << 20)
    unheard = sent(5, budget=budget, heard_ms=200)
    assert places(unheard.take(0)) == [200, 300, 400]
    assert budget.used == 3 * message_cost(audio(0))
    unheard.release()
    unheard.release()
    assert budget.used == 0


@pytest.mark.parametrize("past", [False, True])
def test_the_oldest_is_dropped_beyond_the_limit(past: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unheard_output, "MAX_UNHEARD_BYTES", 4 * message_cost(audio(0)) - past)
    unheard = sent(4, budget=ByteBudget(1 << 20))
    assert unheard.reaches(0) is not past
    assert unheard.reaches(100)
    unheard.release()


@pytest.mark.parametrize("past", [False, True])
def test_nothing_is_kept_while_memory_is_scarce(past: bool) -> None:
    budget = ByteBudget(8 * message_cost(audio(0)))
    budget.used = 2 * message_cost(audio(0)) + past
    unheard = sent(2, budget=budget)
    assert (unheard.reaches(0), unheard.reaches(200)) == (not past, True)
    assert len(unheard.take(0)) == (0 if past else 2)


def test_what_was_set_aside_follows_and_comes_once() -> None:
    budget = ByteBudget(1 << 20)
    unheard = sent(4, budget=budget)
    kept = budget.used
    withdrawn = [text(2, "more"), audio(2), audio(3), text(5, "words")]
    unheard.set_aside(withdrawn)
    assert budget.used > kept
    outputs = unheard.take(150)
    assert places(outputs) == [150, None, 200, 300, None]
    assert outputs[1:] == withdrawn
    assert budget.used == kept
    # Withdrawn again before it was sent, the cut piece stands for the whole.
    unheard.set_aside(outputs)
    assert places(unheard.take(150)) == [150, None, 200, 300, None]
    # What was never sent is not cut, wherever the clock says that playback was.
    unheard.set_aside([audio(3)])
    assert places(unheard.take(350)) == [300]
    unheard.set_aside([audio(3)])
    unheard.release()
    assert budget.used == 0
