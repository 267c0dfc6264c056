"""Continues an answer that another server began to send: what the store has of it, and how the engine makes the rest.

The client has the audio up to some point in a sentence. ``restart_of`` finds the beginning of that sentence, where the
voice begins again. RestOfAnswer aligns the new audio with the old one, so that the same word is at the same position in
both. AnswerWriter drops the part of the new audio that the client has, by its position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from omni_ws.audio.container import wav_header
from omni_ws.core.chunks import AudioEncoding, OutputChunk, OutputModality, Word
from omni_ws.core.ledger_entry import LedgerEntry, ends_of_words
from omni_ws.engine.base import AudioOutput, EngineOutput, Finished, OutputFilter, OutputWriter, TranscriptOutput
from omni_ws.engine.clauses import ClauseSplitter

if TYPE_CHECKING:
    from omni_ws.service.conversation.conversation import Conversation
    from omni_ws.service.conversation.request import Request


#: How far back the beginning of a sentence is looked for, in characters. A longer one is read again from the start.
_MOST_BACK: Final = 4096
_SENTENCE_MARKS: Final = frozenset(".!?…\n。！？")
_CLOSERS: Final = "\"'”’)]"
#: The audio that is held until the word is found that was spoken last, in bytes: about a minute and a half.
_MOST_HELD: Final = 4 << 20
#: Times of words are rounded: places in the audio that differ by less are the same.
_SAME_MS: Final = 2.0


@dataclass(frozen=True, slots=True)
class VoiceRestart:
    """Where a voice begins again: at character ``position`` of the text, about ``ms`` milliseconds into the audio.

    The client has the first ``told`` words after ``position``. Its audio ends within ``word``, which is the word
    ``number`` (from 0) after ``position``. ``word`` is None if no word times are known for that audio.
    """

    position: int = 0
    ms: float = 0
    told: int = 0
    word: Word | None = None
    number: int = 0


def restart_of(entry: LedgerEntry, *, from_start: bool) -> VoiceRestart:
    """Return where the voice begins again: at the start of the sentence, or clause, in which the sent audio ends.

    ``from_start``: the engine reads all of the answer again.
    """
    words, text = entry.words, entry.said.joined()
    last = sum(1 for word in words if word.start_ms < entry.made_ms) - 1
    if last < 0 or (from_start and entry.base_ms):
        clauses = [one for one in entry.clauses if one.start_ms < entry.made_ms]
        if from_start or not entry.made_ms:
            return VoiceRestart(told=len(words) if entry.made_ms else 0)
        if clauses:
            return VoiceRestart(clauses[-1].start, clauses[-1].start_ms)
        return VoiceRestart(entry.base_end, entry.base_ms, len(words))
    position, first = entry.base_end, 0
    if not from_start:
        ends = [end for end, _ in ends_of_words(text, words, begin=entry.base_end)]
        position = _sentence_start(
            text, entry.base_end, max(ends[last - 1] if last else entry.base_end, ends[last] - 1)
        )
        first = next((number for number, end in enumerate(ends[:last]) if end > position), last)
    ms = words[first - 1].end_ms if first else entry.base_ms
    return VoiceRestart(position, ms, len(words) - first, words[last], last - first)


def _sentence_start(text: str, begin: int, limit: int) -> int:
    """Return the end of the last sentence in ``text`` that ends at or before ``limit``; ``begin`` if there is none."""
    start = max(begin, limit - _MOST_BACK)
    found = begin
    for clause in ClauseSplitter().feed(text[start : limit + 2]):
        end = start + clause.end
        ended = clause.text.rstrip(_CLOSERS)[-1:] in _SENTENCE_MARKS or text[end : end + 1] == "\n"
        if ended and end <= limit:
            found = end
    return found


class RestOfAnswer(OutputFilter):
    """An OutputFilter for an answer that another server has begun and that this engine continues.

    Drops the first transcripts and the first words, as many as the client has, and moves word times from the new audio
    to the whole answer. ``begin_at`` is called once, before the first audio, with the position in the answer, in
    milliseconds, at which the new audio begins. A word that the client lacks may come with audio that the client has:
    AnswerWriter sends such a word with the next audio.
    """

    def __init__(
        self, out: OutputWriter, entry: LedgerEntry, restart: VoiceRestart, *, begin_at: Callable[[float], None]
    ) -> None:
        super().__init__(out)
        self._heard = len(entry.heard.pieces)
        self._made_ms = entry.made_ms
        self._restart = restart
        self._begin_at = begin_at
        #: Where the new audio begins; None until that is known. Audio waits until then.
        self._begin_ms: float | None = None
        self._held: list[AudioOutput] = []
        self._held_bytes = 0
        self._held_words: list[Word] = []
        #: The number of words that are still to come from the engine, and that the client has already.
        self._told = restart.told

    def write(self, output: EngineOutput) -> None:
        match output:
            case TranscriptOutput(interim=interim) if self._heard:
                self._heard -= not interim
            case AudioOutput() if self._made_ms:
                self._take(output)
            case Finished():
                if self._held:
                    self._begin(self._restart.ms)
                self._out.write(output)
            case _:
                self._out.write(output)

    def _take(self, audio: AudioOutput) -> None:
        if self._begin_ms is not None:
            self._pass(audio, self._begin_ms)
            return
        self._held.append(audio)
        self._held_bytes += audio.samples.nbytes
        self._held_words += audio.words
        restart = self._restart
        if restart.word is not None and len(self._held_words) > restart.number:
            self._begin(restart.word.start_ms - self._held_words[restart.number].start_ms)
        elif restart.word is None or self._held_bytes > _MOST_HELD:
            self._begin(restart.ms)

    def _begin(self, begin_ms: float) -> None:
        if abs(begin_ms - self._restart.ms) <= _SAME_MS and not self._restart.position:
            begin_ms = self._restart.ms
        self._begin_ms = max(0.0, begin_ms)
        self._begin_at(self._begin_ms)
        held, self._held, self._held_words = self._held, [], []
        for audio in held:
            self._pass(audio, self._begin_ms)

    def _pass(self, audio: AudioOutput, begin_ms: float) -> None:
        words = tuple(
            Word(one.text, round(one.start_ms + begin_ms), round(one.end_ms + begin_ms), one.text_end)
            for one in audio.words[self._told :]
        )
        self._told -= min(self._told, len(audio.words))
        self._out.write(AudioOutput(audio.samples, audio.sample_rate, words, audio.text_end))


# The outputs of a running answer as a store keeps them, and how a restored conversation goes on behind them.
#
# A record of a session in a store is a snapshot, a SavedSession, and a log of what happened since. Everything that a
# session tells makes another snapshot, except what it tells many times in an answer: text, fragments of tool calls,
# audio and interim transcripts. These are in the log, audio as its place and its words.


#: The header of audio in WAV, which its first piece begins with.
WAV_HEADER_BYTES: Final = len(wav_header(sample_rate=24_000, channels=1, data_bytes=None))
#: Audio outputs that a client may have received although the log lacks them: the log is written after audio is sent.
MOST_UNKNOWN: Final = 256


class ToldOutput(msgspec.Struct, frozen=True, array_like=True):
    """An output of a running answer in the store's log: text, audio (only its interval and words), or a ``chunk``.

    A ToldOutput with neither text, interval nor chunk is an interim transcript.
    """

    #: The number of the output; None for text of an answer that is only spoken, which is no output.
    number: int | None
    request_id: str
    text: str = ""
    #: The interval of audio on the time line of the answer.
    start_ms: float = 0
    end_ms: float = 0
    chunk: OutputChunk | None = None
    #: The words that the audio tells.
    words: tuple[Word, ...] = ()

    @classmethod
    def of(cls, output: OutputChunk, sent_ms: float = 0) -> ToldOutput | None:
        """Return the form of an output for the log; None if the output requires a new snapshot instead.

        ``sent_ms`` is the length of the answer's audio that was sent before this output.
        """
        number, request_id = output.sequence_id, output.request_id
        match output.modality:
            case OutputModality.TEXT:
                if output.logprobs or output.choice or output.refusal:
                    return cls(number, request_id, chunk=output)
                return cls(number, request_id, output.text)
            case OutputModality.AUDIO:
                start_ms, end_ms = _interval(output, sent_ms)
                return cls(number, request_id, start_ms=start_ms, end_ms=end_ms, words=output.words)
            case OutputModality.TRANSCRIPT:
                return cls(number, request_id) if output.interim else None
            case OutputModality.TOOL_CALL:
                return cls(number, request_id, chunk=output)
        return None


def _interval(output: OutputChunk, sent_ms: float) -> tuple[float, float]:
    """Return where a piece of audio begins and ends in its answer, in milliseconds."""
    assert output.format is not None
    assert output.start_ms is not None
    # Which is rounded: usually, the piece begins exactly where the one before ended.
    start_ms = sent_ms if round(sent_ms) == output.start_ms else output.start_ms
    size = len(output.payload)
    if output.format.encoding is AudioEncoding.WAV and not output.start_ms:
        size = max(0, size - WAV_HEADER_BYTES)
    return start_ms, start_ms + output.format.duration_ms(size)


def tell_again(conversation: Conversation, told: Sequence[ToldOutput], last_output: int) -> None:
    """Bring a conversation that was restored from a snapshot up to date by replaying ``told``, the outputs sent since.

    The client has received the outputs up to ``last_output``, -1 for none. Text that it lacks is queued again, with new
    numbers if audio before it is lost. Audio that it lacks is made again.

    Raises ValueError if the client claims outputs that cannot have been sent, or ``told`` does not fit the
    conversation.
    """
    queue, ledger = conversation.queue, conversation.ledger
    number = queue.next_output
    unsent: list[OutputChunk] = []
    for one in told:
        request = queue.find(one.request_id)
        if request is None:
            raise ValueError("the log of a session has an output of a request that is not open")
        received = one.number is not None and one.number <= last_output
        chunk = _said_again(request, one)
        if one.end_ms and received and one.number is not None:
            ledger.send(request.entry, one.number, one.start_ms, one.end_ms, request.timeline.now())
            request.entry.pronounce(one.words)
        if received and one.number is not None:
            number = one.number + 1
        elif chunk is not None:
            unsent.append(msgspec.structs.replace(chunk, sequence_id=number))
            number += 1
    if last_output >= number:
        # Audio of the running answer, which the log is written behind.
        speaking = next((one for one in queue.requests if one.entry.speaks and one.announced), None)
        if speaking is None or last_output - number >= MOST_UNKNOWN:
            raise ValueError("the client has received more outputs than there were")
        speaking.await_unknown(range(number, last_output + 1))
        number = last_output + 1
    queue.number_from(number)
    conversation.outbox.receive(last_output, unsent)


def _said_again(request: Request, one: ToldOutput) -> OutputChunk | None:
    """Note the text or tool call of an output in the ledger. Return the output if it can be sent again, else None."""
    if one.text:
        request.entry.say(one.text)
        if one.number is not None:
            return OutputChunk(request.request_id, one.number, OutputModality.TEXT, one.text)
    if one.chunk is None:
        return None
    if one.chunk.tool_call is not None:
        request.entry.call(one.chunk.tool_call)
    else:
        request.entry.say(one.chunk.text)
    return one.chunk
