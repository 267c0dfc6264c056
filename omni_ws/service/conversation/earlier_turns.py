"""EarlierTurns: what a message begins with that was said before, in turns to which nothing was heard as an answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec.structs import replace

from omni_ws.audio.mime import media_type
from omni_ws.core.chunks import InputChunk, Modality
from omni_ws.core.history import Message
from omni_ws.engine.continued_input import apart
from omni_ws.service.conversation.request import Request


class EarlierTurns:
    """EarlierParts: a message of the history, and what is said in requests that may still be written down."""

    def __init__(self, said: Message | None, requests: Iterable[Request]) -> None:
        self._said = said
        self._requests = tuple(requests)

    @property
    def known(self) -> bool:
        return all(request.question_known for request in self._requests)

    async def chunks(self) -> tuple[InputChunk, ...]:
        for request in self._requests:
            await request.until_question_known()
        messages = [*([self._said] if self._said is not None else ()), *(one.question for one in self._requests)]
        chunks: list[InputChunk] = []
        for chunk in (chunk for message in messages for part in message.parts for chunk in _chunks_of(part)):
            chunks.append(apart(chunks[-1], chunk) if chunks else chunk)
        return tuple(chunks)


def _chunks_of(message: Message) -> Iterator[InputChunk]:
    if message.text.strip():
        yield InputChunk(Modality.TEXT, message.text.encode())
    if message.picture is not None:
        yield message.picture
    if (speech := message.speech) is not None:
        for chunk in speech.chunks:
            yield chunk if chunk.format is not None else replace(chunk, format=media_type(speech.format))
