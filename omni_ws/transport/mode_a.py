"""Mode A: one request whose body is a stream, answered while it is still on its way."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from omni_ws.audio.mime import parse_audio_mime
from omni_ws.core.chunks import InputChunk
from omni_ws.errors import InvalidFrame
from omni_ws.transport.http1 import HttpExchange, HttpRequest
from omni_ws.transport.http_session import HttpSession
from omni_ws.wire.streaming_body import CONTENT_TYPE, BodyItem, Parameters, RawAudioBody, body_reader, query_parameters


def is_streaming_input(request: HttpRequest) -> bool:
    """Whether a request's body is a stream of input, by its header or its content type."""
    if (request.headers.get("x-streaming-input") or "").strip().lower() in ("true", "1"):
        return True
    content_type = request.headers.get("content-type") or ""
    return content_type.partition(";")[0].strip().lower() == CONTENT_TYPE


class StreamingBody:
    """The body of a Mode A request: its parameters first, then its chunks."""

    def __init__(self, exchange: HttpExchange, *, max_chunk_bytes: int) -> None:
        request = exchange.request
        self._exchange = exchange
        self._reader = body_reader(request.headers.get("content-type") or "", max_chunk_bytes=max_chunk_bytes)
        self._items = self._read()
        self._first: InputChunk | None = None

    async def parameters(self) -> dict[str, Any]:
        """The parameters, as soon as they can be known: from the query, or from the first object of the body."""
        if isinstance(self._reader, RawAudioBody):
            audio = parse_audio_mime(self._reader.media_type)
            return query_parameters(self._exchange.request.query.items()) | {
                "input_audio": {
                    "format": audio.encoding.value,
                    "sample_rate": audio.sample_rate,
                    "channels": audio.channels,
                }
            }
        async for item in self._items:
            if isinstance(item, Parameters):
                return item.fields
            self._first = item
            break
        return {}

    async def feed(self, session: HttpSession) -> None:
        """Everything else into the session, to the end of the body."""
        if self._first is not None:
            await session.feed(self._first)
            self._first = None
        async for item in self._items:
            if isinstance(item, Parameters):
                raise InvalidFrame("only the first object of a body may be its parameters")
            await session.feed(item)
        session.end_input()

    async def _read(self) -> AsyncIterator[BodyItem]:
        async for data in self._exchange.body():
            for item in self._reader.feed(data):
                yield item
        for item in self._reader.finish():
            yield item
