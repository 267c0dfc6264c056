"""Mode B sessions over a fake engine, without HTTP."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from omni_ws.config.keys import ApiKey
from omni_ws.config.model import ServerConfig
from omni_ws.core.chunks import AudioFormat, InputChunk, Modality
from omni_ws.core.request_input import InputState
from omni_ws.engine.base import Engine
from omni_ws.engine.fake import EchoEngine
from omni_ws.errors import ShuttingDown
from omni_ws.service.sessions.factory import SessionFactory
from omni_ws.transport.mode_b.session import ModeBRegistry, ModeBSession, ResultForm
from omni_ws.wire.openai_responses import ResponseOptions
from omni_ws.wire.streaming_body import BodyChunk

FORM = ResultForm(ResponseOptions(completion_id="chatcmpl-1", created=0, model="fake"), AudioFormat(), events=False)
GOING = ShuttingDown("the server is shutting down")


def factory(engine: Engine | None = None, **fields: Any) -> SessionFactory:
    return SessionFactory(engine or EchoEngine(), ServerConfig(**{"engine": "fake", **fields}))


class Slots:
    """Counts the slots taken."""

    def __init__(self) -> None:
        self.taken = 0

    def take(self) -> ExitStack:
        self.taken += 1
        stack = ExitStack()
        stack.callback(self._give)
        return stack

    def _give(self) -> None:
        self.taken -= 1


def opener(registry: ModeBRegistry) -> Callable[..., ModeBSession]:
    """A function that opens a session, for a key and with a slot where it is given them."""

    def opened(key: ApiKey | None = None, slot: ExitStack | None = None) -> ModeBSession:
        conversation = registry.open(key)
        conversation.configure({"modalities": ["text"]})
        return registry.add(conversation, FORM, key=key, slot=slot or ExitStack())

    return opened


def chunk(content: str, number: int | None = 0, *, end: bool = False) -> BodyChunk:
    return BodyChunk("", InputChunk(Modality.TEXT, content.encode(), number, end_of_input=end))


async def answered(session: ModeBSession, content: str = "x") -> None:
    """Feed a whole input, and wait until the answer is complete."""
    await session.feed([chunk(content, end=True)])
    await session.ended.wait()
    assert session.state is InputState.FINISHED
