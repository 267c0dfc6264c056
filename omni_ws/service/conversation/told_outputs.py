"""The outputs of a running answer as a store keeps them, and how a restored conversation goes on behind them.

A record of a session in a store is a snapshot, a SavedSession, and a log of what happened since. Everything that a
session tells makes another snapshot, except what it tells many times in an answer: text, fragments of tool calls,
audio and interim transcripts. These are in the log, audio as its place and its words.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from omni_ws.audio.container import wav_header
from omni_ws.core.chunks import AudioEncoding, OutputChunk, OutputModality, Word

if TYPE_CHECKING:
    from omni_ws.service.conversation.conversation import Conversation
    from omni_ws.service.conversation.request import Request

#: The header of audio in WAV, which its first piece begins with.
WAV_HEADER_BYTES: Final = len(wav_header(sample_rate=24_000, channels=1, data_bytes=None))
#: Outputs of audio that a client may have received, and of which the log knows nothing: it is written behind them.
MOST_UNKNOWN: Final = 256


class ToldOutput(msgspec.Struct, frozen=True, array_like=True):
    """An output of a running answer, in the log of a record: text, audio, or ``chunk`` as it is.

    One with none of them is an interim transcript.
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
        """Return an output as the log has it; None if it is to be in a snapshot.

        ``sent_ms`` is the length of the audio of the answer that was sent before.
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
    """Bring a conversation that was restored from a snapshot to where its server was, behind the outputs ``told``.

    The client has received the outputs up to ``last_output``, -1 for none. Text that it lacks waits to be sent, under
    new numbers where audio before it is lost. Audio that it lacks is made again.

    Raises ValueError if the client has received more than there can have been, or ``told`` does not fit.
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
    """Note in the ledger what an output has said. Return the output if it can be sent again."""
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
