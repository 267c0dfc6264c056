"""An AnswerSource whose messages a test provides, and the messages."""

from __future__ import annotations

import asyncio

from omni_ws.core.chunks import FinalChunk, FinishReason, OutputChunk, OutputModality, Usage
from omni_ws.errors import OmniError
from omni_ws.service.conversation.output_log import ServerMessage
from omni_ws.transport.routes.sole_request import EventBatch


class GivenAnswer:
    """An AnswerSource of the messages that were put into it; errors are raised."""

    def __init__(self) -> None:
        self._messages: asyncio.Queue[ServerMessage | OmniError] = asyncio.Queue()
        self._arrived: list[ServerMessage | OmniError] = []
        self.writes = 0

    def put(self, *messages: ServerMessage | OmniError) -> None:
        for message in messages:
            self._messages.put_nowait(message)

    def take(self) -> ServerMessage | None:
        if not self._arrived:
            return None
        message = self._arrived.pop(0)
        if isinstance(message, OmniError):
            raise message
        return message

    async def wait(self, *, idle_sec: float | None = None, meanwhile: EventBatch | None = None) -> bool:
        while True:
            try:
                async with asyncio.timeout(idle_sec):
                    self._arrived.append(await self._messages.get())
            except TimeoutError:
                return False
            while not self._messages.empty():
                self._arrived.append(self._messages.get_nowait())
            if meanwhile is None or not meanwhile.write_available():
                return True

    def written(self) -> None:
        self.writes += 1


def text(content: str, *, choice: int = 0) -> OutputChunk:
    return OutputChunk(request_id="r", sequence_id=0, modality=OutputModality.TEXT, text=content, choice=choice)


def final(*reasons: FinishReason, tokens: int = 1) -> FinalChunk:
    return FinalChunk(
        request_id="r",
        sequence_id=0,
        finish_reason=reasons[0],
        usage=Usage(input_tokens=tokens, output_tokens=10 * tokens),
        finish_reasons=reasons,
    )
