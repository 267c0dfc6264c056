"""Summaries: sums up long talks in the background, by the model that answers in them or by rules."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from functools import partial
from typing import Final
from weakref import WeakKeyDictionary, WeakSet

from omni_ws.core.chunks import (
    AudioFormat,
    FinalChunk,
    FinishReason,
    InputChunk,
    InputMode,
    Modality,
    OutputModality,
    Task,
)
from omni_ws.core.history import HistoryItem
from omni_ws.engine.base import NOTHING_SAID, GenerationRequest, HeardLanguage, Unread
from omni_ws.errors import EngineFailed, OmniError
from omni_ws.metrics import Metrics
from omni_ws.service.conversation import summing
from omni_ws.service.conversation.conversation import Conversation
from omni_ws.service.conversation.messages import ServerMessage, SumsUp
from omni_ws.service.conversation.request import as_engines_know_it
from omni_ws.service.conversation.request_queue import text_input
from omni_ws.service.conversation.summing import Sizes
from omni_ws.service.failure import new_id, unexpected
from omni_ws.service.sessions.factory import Chat, Chats

logger = logging.getLogger(__name__)

#: How long after a failure a talk is left alone, in seconds.
RETRY_SEC: Final = 60.0
#: How many talks are summed up at a time by an engine that answers many at once.
MAX_AT_ONCE: Final = 4


@dataclass(slots=True)
class _Draft:
    """Notes that have not taken the place of their items yet."""

    items: list[HistoryItem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class Summaries(SumsUp):
    """Sums up the talks of a server. A conversation tells it when nobody speaks.

    **When.** A talk is summed up once its history has outgrown its share of the model's context (``summing.sizes``),
    while nobody speaks in it and no answer is due. As soon as that changes, the model's work is dropped, and begins
    again in the next pause; notes on portions that were finished are kept meanwhile. Where the model shares a machine's
    cores (``EngineCapabilities.shares_cores``), one talk at a time is summed up, while no session waits for the model,
    and any answer ends it.

    **How.** Where the model shares a machine's cores it is taken for a small one: rules select what the user said, if
    they know the language (``summing.selected``). Any other model is asked for notes, in a chat of its own, without
    history. When all that is due is noted, the notes take the place of these messages at once, in what requests see
    from then on: that moves the beginning of the prompt, which engines have computed already, as seldom as dropping the
    oldest turns would. A model that shares the cores then computes the new beginning in the same pause, since it takes
    seconds for it.

    What fails is not told to the client. It is tried again after the next answer; until then the oldest turns are
    dropped as without summaries.
    """

    def __init__(self, chats: Chats, metrics: Metrics) -> None:
        self._chats = chats
        self._metrics = metrics
        #: The conversations in which somebody speaks, or an answer is due.
        self._busy: WeakSet[Conversation] = WeakSet()
        #: Those that are to be summed up, in the order in which they came to that.
        self._waiting: dict[Conversation, None] = {}
        self._running: dict[Conversation, asyncio.Task[bool]] = {}
        self._drafts: WeakKeyDictionary[Conversation, _Draft] = WeakKeyDictionary()
        #: Until when talks are left alone, as the model has failed.
        self._not_before: WeakKeyDictionary[Conversation, float] = WeakKeyDictionary()
        #: The conversations in which a model sums up.
        self._own: WeakSet[Conversation] = WeakSet()

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self._running and not self._waiting

    # what conversations tell

    def disturb(self, conversation: Conversation) -> None:
        """Give way: in this conversation somebody speaks, or an answer is due."""
        if conversation in self._own:
            return
        self._busy.add(conversation)
        self._waiting.pop(conversation, None)
        if self._running:
            self._give_way(conversation)

    def _give_way(self, conversation: Conversation) -> None:
        shares = conversation.engine.capabilities.shares_cores
        for other, task in self._running.items():
            if other is conversation or (shares and other.engine is conversation.engine):
                task.cancel()

    def note_quiet(self, conversation: Conversation) -> None:
        """Note that in this conversation nobody speaks, and no answer is due."""
        if conversation in self._own:
            return
        self._busy.discard(conversation)
        if conversation not in self._running and self._is_due(conversation):
            self._waiting[conversation] = None
        if self._waiting:
            self._begin()

    def forget(self, conversation: Conversation) -> None:
        """Do nothing more for a conversation, which ends."""
        self._waiting.pop(conversation, None)
        self._busy.discard(conversation)
        self._drafts.pop(conversation, None)
        if (task := self._running.get(conversation)) is not None:
            task.cancel()
        if self._waiting:
            self._begin()

    async def close(self) -> None:
        """Stop all work. The sessions must have ended."""
        self._waiting.clear()
        tasks = [*self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # work

    def _sizes(self, conversation: Conversation) -> Sizes | None:
        config = conversation.configuration.effective
        if not config.history_summary or config.task is not Task.CHAT or conversation.limits.single_request:
            return None
        context = conversation.engine.capabilities.context
        return summing.sizes(conversation.ledger.history, context=context, instructions=config.instructions)

    def _is_due(self, conversation: Conversation) -> bool:
        size = self._sizes(conversation)
        if size is None or not conversation.ledger.history.is_longer_than(size.longest):
            return False
        return asyncio.get_running_loop().time() >= self._not_before.get(conversation, 0.0)

    def _begin(self) -> None:
        for conversation in [*self._waiting]:
            shares = conversation.engine.capabilities.shares_cores
            if len(self._running) >= (1 if shares else MAX_AT_ONCE):
                return
            if conversation in self._running or (shares and self._busy):
                continue
            del self._waiting[conversation]
            if (size := self._sizes(conversation)) is not None:
                task = asyncio.create_task(self._sum_up(conversation, size), name="summary of a talk")
                self._running[conversation] = task
                task.add_done_callback(partial(self._over, conversation))

    def _over(self, conversation: Conversation, task: asyncio.Task[bool]) -> None:
        del self._running[conversation]
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._not_before[conversation] = asyncio.get_running_loop().time() + RETRY_SEC
        if isinstance(error, OmniError):
            logger.info("a talk was not summed up: %s", error.message)
        elif isinstance(error, Exception):
            unexpected(error, where="the summary of a talk")
        outcome = "failed" if error is not None else "dropped" if task.cancelled() or not task.result() else "written"
        self._metrics.summaries.labels(outcome).inc()
        if task.cancelled() and conversation not in self._busy and self._is_due(conversation):
            self._waiting[conversation] = None  # it gave way to another
        if self._waiting:
            self._begin()

    async def _sum_up(self, conversation: Conversation, size: Sizes) -> bool:
        """Sum up what is due. Returns whether requests see it from now on."""
        history, draft = conversation.ledger.history, self._draft(conversation)
        asking = _Asking(self._chats, conversation, self._own)
        shares = conversation.engine.capabilities.shares_cores
        of_both = not shares
        instructions = summing.INSTRUCTIONS + (summing.OF_BOTH if of_both else "")
        try:
            while items := summing.next_portion(history, size, behind=len(draft.items)):
                if shares and summing.may_select(items):
                    notes = summing.selected(items)
                else:
                    answer = await asking.ask(summing.question(items, of_both=of_both), instructions)
                    notes = summing.read_notes(answer)
                draft.items.extend(items)
                draft.notes.append(notes)
            self._drafts.pop(conversation, None)
            if not history.sum_up(draft.items, summing.merged(draft.notes)):
                return False  # the history has changed meanwhile
            history.shorten(size.room)
            conversation.ledger.weigh()
            if history.notes_tokens > size.notes:
                history.condense(summing.merged([history.notes]))
            if history.notes_tokens > size.notes:
                notes = history.notes
                if shares:
                    history.condense(summing.lightened(notes, size))
                else:
                    answer = await asking.ask(summing.shorter(notes, size), summing.CONDENSING)
                    if history.notes == notes:
                        history.condense(summing.fitted(notes, answer, size))
            conversation.ledger.weigh()
        finally:
            asking.close()
        if shares:
            await _compute_ahead(conversation)
        return True

    def _draft(self, conversation: Conversation) -> _Draft:
        """Return the notes so far, if their items are still the next ones."""
        draft = self._drafts.get(conversation)
        if draft is None or not conversation.ledger.history.is_next(draft.items):
            draft = self._drafts[conversation] = _Draft()
        return draft


async def _compute_ahead(conversation: Conversation) -> None:
    """Let the model compute what the next request begins with, and write one token, which nobody sees.

    What was computed until somebody speaks is not lost: engines keep it for the conversation.
    """
    config = conversation.configuration.effective
    request = GenerationRequest(
        request_id=new_id("req_"),
        task=config.task,
        input=text_input(NOTHING_SAID),
        input_mode=InputMode.SNAPSHOT,
        input_audio=AudioFormat(),
        modalities=frozenset({OutputModality.TEXT}),
        instructions=config.instructions,
        history=conversation.ledger.history.messages(),
        sampling={"max_tokens": 1},
        tools=tuple(map(as_engines_know_it, config.tools)),
        owner=conversation.observed.identity.owner,
        conversation=conversation.observed.identity.session_id,
        computes_only=True,
        heard_language=HeardLanguage(conversation.ledger.language),
    )
    try:
        await conversation.engine.generate(request, Unread())
    except asyncio.CancelledError:
        pass  # the task ends here: it gives way, and the notes are written
    except Exception as error:
        failure = error if isinstance(error, OmniError) else unexpected(error, where="computing a summary ahead")
        logger.debug("the notes on a talk were not computed ahead: %s", failure.message)


class _Asking:
    """A chat in which a model is asked for notes on one talk. It opens with the first question."""

    def __init__(self, chats: Chats, of: Conversation, own: WeakSet[Conversation]) -> None:
        self._chats = chats
        self._of = of
        self._own = own
        self._chat: Chat | None = None
        self._answer: asyncio.Future[str] | None = None
        self._error: OmniError | None = None

    async def ask(self, question: str, instructions: str) -> str:
        """Return what the model answers. Raises an OmniError."""
        chat = self._chat or self._open()
        able = chat.conversation.engine.capabilities.sampling
        # Notes begin alike: a penalty on repetitions would end them early.
        sampling = {"temperature": 0, "repetition_penalty": 1, "max_tokens": summing.MAX_TOKENS}
        chat.configure(
            instructions=instructions,
            history=False,
            sampling={name: value for name, value in sampling.items() if name in able},
        )
        self._answer, self._error = asyncio.get_running_loop().create_future(), None
        chunk = InputChunk(Modality.TEXT, question.encode())
        chat.conversation.respond([chunk], chat.conversation.configuration.effective)
        return await self._answer

    def _open(self) -> Chat:
        self._chat = self._chats.open(self._of, self._receive, in_background=True)
        self._own.add(self._chat.conversation)
        return self._chat

    def _receive(self, message: ServerMessage) -> None:
        if isinstance(message, OmniError):
            self._error = message
        if not isinstance(message, FinalChunk) or self._answer is None or self._answer.done():
            return
        assert self._chat is not None
        entry = self._chat.conversation.ledger.find(message.request_id)
        if self._error is not None:
            self._answer.set_exception(self._error)
        elif entry is None or message.finish_reason in (FinishReason.ERROR, FinishReason.CANCELLED):
            self._answer.set_exception(EngineFailed("the model did not answer"))
        else:
            self._answer.set_result(entry.answer_text)

    def close(self) -> None:
        if self._chat is not None:
            self._chat.close()
