"""WholeCharacters: moves the boundaries of text chunks to the boundaries of characters."""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from omni_ws.core.chunks import InputChunk, Modality
from omni_ws.core.stream_events import StreamEvent, TextRefused
from omni_ws.errors import InvalidValue


@dataclass(frozen=True, slots=True)
class PartialCharacter:
    """The leading bytes of a character that the next chunk completes.

    ``sequence_id`` and ``ref`` are those of the chunk in which the character begins.
    """

    data: bytes = b""
    sequence_id: int | None = None
    ref: str | None = None
    #: That of the chunk: results of different tools are different texts.
    tool_call_id: str | None = None


_NOTHING = PartialCharacter()


class WholeCharacters:
    """An incremental UTF-8 check for a stream of chunks in order.

    A character may be spread over consecutive chunks of the same text; the chunks passed on hold whole characters.
    Anything else that is not UTF-8 becomes a TextRefused event: of such a chunk nothing is used, and of a text that
    breaks off within a character everything but that character.
    """

    def __init__(self) -> None:
        self._partial = _NOTHING
        #: Whether the text so far ends within a character. Read for each chunk.
        self.pending = False

    def deliver(
        self, chunk: InputChunk, take_in: Callable[[InputChunk], Sequence[StreamEvent]]
    ) -> Sequence[StreamEvent]:
        """Pass the chunk, with whole characters, to ``take_in`` and return its events behind those for invalid text.

        When ``take_in`` raises, the state is unchanged and the client may send the chunk again.
        """
        try:
            chunk, partial, problem = self._check(chunk)
        except InvalidValue as error:
            return [TextRefused(error)]
        events = take_in(chunk)
        self._partial, self.pending = partial, partial is not _NOTHING
        problems = [] if problem is None else [TextRefused(problem)]
        return [*problems, *(self.end() if chunk.end_of_input else ()), *events]

    def end(self) -> list[TextRefused]:
        """End the text; returns a TextRefused if it breaks off within a character."""
        problem = _broken(self._partial)
        self._partial, self.pending = _NOTHING, False
        return [] if problem is None else [TextRefused(problem)]

    def _check(self, chunk: InputChunk) -> tuple[InputChunk, PartialCharacter, InvalidValue | None]:
        """Return the chunk with whole characters, the bytes left over, and the error of the text before it, if any.

        Raises InvalidValue when the chunk's own bytes are not UTF-8; none of it is used then.
        """
        before = self._partial
        if not chunk.has_content:
            return chunk, before, None
        if chunk.modality is not Modality.TEXT:
            return chunk, _NOTHING, _broken(before)
        if before is _NOTHING and chunk.payload.isascii():
            return chunk, _NOTHING, None
        problem = None
        if before.tool_call_id != chunk.tool_call_id:
            before, problem = _NOTHING, _broken(before)
        data = before.data + chunk.payload
        try:
            _, used = utf_8_decode(data, "strict", False)
        except UnicodeDecodeError as error:
            data, problem = chunk.payload, _broken(before)
            try:
                _, used = utf_8_decode(data, "strict", False)
            except UnicodeDecodeError:
                raise _not_text(chunk.sequence_id, chunk.ref, error.reason) from None
        left = _NOTHING
        if used < len(data):
            began_here = len(data) - used <= len(chunk.payload)
            begun = chunk if began_here else before
            left = PartialCharacter(data[used:], begun.sequence_id, begun.ref, chunk.tool_call_id)
        return replace(chunk, payload=data[:used]), left, problem


def _broken(partial: PartialCharacter) -> InvalidValue | None:
    if partial is _NOTHING:
        return None
    return _not_text(partial.sequence_id, partial.ref, "it ends inside a character, which was dropped")


def _not_text(sequence_id: int | None, ref: str | None, reason: str) -> InvalidValue:
    whose = "" if sequence_id is None else f" of chunk {sequence_id}"
    message = f"the text{whose} is not valid UTF-8: {reason}"
    return InvalidValue(message, param="payload", sequence_id=sequence_id, ref=ref)
