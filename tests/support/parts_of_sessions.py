"""Parts of sessions without a server: requests, the sources of their answers, and sessions over several requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from omni_ws.config.keys import ApiKey
from omni_ws.config.model import ServerConfig
from omni_ws.core.chunks import (
    AudioFormat,
    FinalChunk,
    FinishReason,
    InputChunk,
    InputMode,
    Modality,
    OutputChunk,
    OutputModality,
    Usage,
)
from omni_ws.core.ledger import Ledger
from omni_ws.core.quota import ByteBudget, beyond_ordinary
from omni_ws.core.request_input import GenerationStarted, InputSettings, InputState, RequestInput
from omni_ws.core.start_policy import ON_END_ONLY
from omni_ws.engine.base import Engine
from omni_ws.engine.fake import EchoEngine
from omni_ws.engine.threads import MediaRoom
from omni_ws.errors import OmniError, ShuttingDown
from omni_ws.service.conversation.output_log import ServerMessage
from omni_ws.service.conversation.request import Request
from omni_ws.service.observing.observer import ObservedSession
from omni_ws.service.sessions.factory import SessionFactory
from omni_ws.transport.mode_b.session import ModeBRegistry, ModeBSession, ResultForm
from omni_ws.transport.routes.sole_request import EventBatch
from omni_ws.wire.openai_responses import ResponseOptions
from omni_ws.wire.session_config import SessionConfig
from omni_ws.wire.streaming_body import BodyChunk


def make_request(
    request_id: str = "req_1",
    *,
    mode: InputMode = InputMode.EXTEND,
    by_speech: bool = False,
    observed: ObservedSession | None = None,
    config: SessionConfig | None = None,
    now: Callable[[], float] = time.monotonic,
    ledger: Ledger | None = None,
) -> Request:
    """A request that has just opened, and whose policy fires at the end of its input."""
    config = config or SessionConfig()
    ledger = ledger or Ledger(4096, ByteBudget(1 << 24))
    session = RequestInput(InputSettings(start_policy=ON_END_ONLY, mode=mode))
    timeline = (observed or ObservedSession.unobserved(now)).open_request(
        request_id, task=config.task, input_mode=mode, by_speech=by_speech
    )
    return Request(request_id, session, config, timeline, lambda request, size: None, ledger, MediaRoom())


def give_input(request: Request, text: str) -> None:
    """Give the request its whole input, as a conversation does."""
    for event in request.session.receive_chunk(InputChunk(Modality.TEXT, text.encode(), 0, end_of_input=True)):
        if isinstance(event, GenerationStarted):
            request.timeline.mark_policy_fired(event)
            request.start(event)
    end_input(request)


def end_input(request: Request) -> None:
    """The end of input, after ``request.start``."""
    request.timeline.mark_input_ended()
    request.input.close()
    request.input_ended.set()


def weighed(ledger: Ledger) -> int:
    """What texts, marks and ids take now, beyond what any session has: computed anew, not what is charged."""
    return beyond_ordinary(ledger.history.memory + sum(entry.memory for entry in ledger._entries.values()))


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
