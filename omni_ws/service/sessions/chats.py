"""Chats that sessions hold beside their own conversation: with other instructions and tools, and a history apart."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final

from omni_ws.engine.base import Engine
from omni_ws.errors import OmniError
from omni_ws.service.conversation.conversation import Conversation
from omni_ws.service.conversation.messages import ServerMessage
from omni_ws.service.conversation.output_log import Attachment
from omni_ws.service.sessions.factory import STREAM_FORMATS, SessionFactory

logger = logging.getLogger(__name__)

#: Labels chats, and those in which talks are summed up, in metrics and logs.
CHAT_ORIGIN: Final = "chat"
SUMMARY_ORIGIN: Final = "summary"
#: What a chat has in common, whatever its session asks for: text alone, and nothing that is said unasked.
_OF_ALL: Final[dict[str, Any]] = {"task": "chat", "modalities": ["text"], "idle_prompt": None, "greeting": ""}


class Chats:
    """Opens the chats of a server. ``engine`` answers in them; None for the engine that answers all."""

    def __init__(self, factory: SessionFactory, engine: Engine | None = None) -> None:
        self._factory = factory
        self._engine = engine
        self._lives: set[asyncio.Task[None]] = set()

    def open(self, of: Conversation, receive: Callable[[ServerMessage], None], *, in_background: bool = False) -> Chat:
        """Open a chat of the session of ``of``, until its ``close``. Its requests count like those of the session.

        ``receive`` is called with each message, and must not raise. ``in_background``: the server asks by itself, the
        engine of the session; the requests count in daily limits alone.
        """
        own = None if of.engine is self._factory.engine else of.engine
        conversation = self._factory.open(
            output_formats=STREAM_FORMATS,
            any_model=True,
            origin=SUMMARY_ORIGIN if in_background else CHAT_ORIGIN,
            owner=of.observed.identity.owner,
            engine=own if in_background else self._engine,
        )
        if not in_background:
            conversation.admit = of.admit
        chat = Chat(conversation, receive)
        life = asyncio.create_task(chat.run(), name=f"chat {conversation.observed.identity.session_id}")
        self._lives.add(life)
        life.add_done_callback(self._lives.discard)
        return chat

    async def close(self) -> None:
        """Wait until no chat is left. The sessions must have ended."""
        if self._lives:
            await asyncio.wait(self._lives)
        if self._engine is not None:
            await self._engine.stop()


class Chat(Attachment):
    """One chat: a conversation, and what carries it. Its requests come whole (``Conversation.respond``)."""

    def __init__(self, conversation: Conversation, receive: Callable[[ServerMessage], None]) -> None:
        self.conversation = conversation
        self._receive = receive
        self._closed = asyncio.Event()
        #: Whether it answers no more: it was closed, or its engine has failed for good.
        self.has_ended = False
        conversation.attach(self)
        conversation.suspend_time(True)

    def configure(self, **patch: Any) -> None:
        """Configure the requests from now on. Raises an InvalidRequest, and changes nothing then."""
        self.conversation.configure({**_OF_ALL, **patch})

    def output_ready(self) -> None:
        asyncio.get_running_loop().call_soon(self._deliver)

    def _deliver(self) -> None:
        while not self._closed.is_set() and (message := self.conversation.outbox.take()) is not None:
            self._receive(message)

    def close(self) -> None:
        """Stop the answers, and release everything at the next opportunity. Nothing is received after that."""
        self.has_ended = True
        self._closed.set()

    async def run(self) -> None:
        """Answer requests until the end."""
        answers = asyncio.create_task(self.conversation.run())
        closed = asyncio.create_task(self._closed.wait())
        try:
            await asyncio.wait([answers, closed], return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.has_ended = True
            answers.cancel()
            closed.cancel()
            found, _ = await asyncio.gather(answers, closed, return_exceptions=True)
            if isinstance(found, OmniError):
                logger.warning("a chat of a session has ended: %s", found.message)
            self.conversation.end()
            self._deliver()
            self.conversation.detach()
            self.conversation.outbox.close()
            self.conversation.observed.ended()
