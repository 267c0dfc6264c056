"""The answers of several sessions, merged into the choices of one response."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from msgspec.structs import replace

from omni_ws.core.chunks import FinalChunk, FinishReason, OutputChunk, Usage
from omni_ws.service.conversation.messages import ServerMessage
from omni_ws.transport.routes.response_stream import AnswerSource, PromptWriter, next_message


class MergedAnswers:
    """An AnswerSource over several others.

    Each session has ``choices`` choices, which are renumbered in the order of the sessions: the first choice of the
    second session is number ``choices``. Outputs arrive in any order. One final, with the sum of the usage, follows
    the last final of the sessions.
    """

    def __init__(self, sessions: Sequence[AnswerSource], *, choices: int) -> None:
        self._sessions = sessions
        self._choices = choices
        self._finals: dict[int, FinalChunk] = {}
        #: One task for the next message of each session without a final, by the index of the session.
        self._receiving: dict[int, asyncio.Task[ServerMessage]] = {}

    @asynccontextmanager
    async def receiving(self) -> AsyncIterator[None]:
        """Own the tasks of ``wait``, which may be called while the block lasts."""
        try:
            yield
        finally:
            for task in self._receiving.values():
                task.cancel()
            await asyncio.gather(*self._receiving.values(), return_exceptions=True)

    def take(self) -> ServerMessage | None:
        """Return the next message of any session. Raises the error of any."""
        for index, task in tuple(self._receiving.items()):
            if task.done() and (message := self._received(index)) is not None:
                return message
        return None

    async def wait(self, *, idle_sec: float | None = None, meanwhile: PromptWriter | None = None) -> bool:
        """Wait for a message of any session; see ``AnswerSource``."""
        for index, session in enumerate(self._sessions):
            if index not in self._finals and index not in self._receiving:
                self._receiving[index] = asyncio.create_task(next_message(session), name=f"prompt {index}")
        done, _ = await asyncio.wait(self._receiving.values(), timeout=idle_sec, return_when=asyncio.FIRST_COMPLETED)
        return bool(done)

    def _received(self, index: int) -> ServerMessage | None:
        """The message of a session as one of the merged answer; None for a final that is not the last."""
        message = self._receiving.pop(index).result()
        if isinstance(message, OutputChunk):
            return replace(message, choice=index * self._choices + message.choice)
        if not isinstance(message, FinalChunk):
            return message
        if message.finish_reason in (FinishReason.CANCELLED, FinishReason.ERROR):
            return message
        self._finals[index] = message
        return self._final(message) if len(self._finals) == len(self._sessions) else None

    def written(self) -> None:
        """Mark the messages of all sessions as written."""
        for session in self._sessions:
            session.written()

    def _final(self, last: FinalChunk) -> FinalChunk:
        """The merged final: all finish reasons, and the sum of the usage."""
        finals = [self._finals[index] for index in range(len(self._sessions))]
        reasons = [reason for final in finals for reason in self._reasons(final)]
        usage = Usage(
            input_tokens=sum(final.usage.input_tokens for final in finals),
            output_tokens=sum(final.usage.output_tokens for final in finals),
        )
        foreign = [reason for final in finals for reason in final.foreign_reasons or (None,) * self._choices]
        return dataclasses.replace(
            last,
            finish_reasons=tuple(reasons),
            foreign_reasons=tuple(foreign),
            warnings=tuple(warning for final in finals for warning in final.warnings),
            usage=usage,
        )

    def _reasons(self, final: FinalChunk) -> Sequence[FinishReason]:
        """The finish reason of each choice."""
        reasons = final.finish_reasons
        return reasons if len(reasons) == self._choices else (final.finish_reason,) * self._choices
