"""The messages of a conversation as the server events of the Realtime API, and the items that these are about."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from omni_ws.core.chunks import (
    FinalChunk,
    FinishReason,
    InputChunk,
    Modality,
    OutputChunk,
    OutputModality,
    ToolCall,
    WordsKnown,
)
from omni_ws.core.history import ALL_ROLES, Message
from omni_ws.core.ledger import Ledger
from omni_ws.core.quota import ByteBudget, Share
from omni_ws.errors import EngineFailed, OmniError, PayloadTooLarge
from omni_ws.service.conversation.conversation import Conversation
from omni_ws.service.conversation.messages import ServerMessage
from omni_ws.service.failure import new_id
from omni_ws.transport.realtime.response import Event, RealtimeResponse, Turn, Turns
from omni_ws.wire.realtime_events import Item, error_fields
from omni_ws.wire.realtime_session import answers_turns, interrupts_answers, wants_transcripts
from omni_ws.wire.server_frames import ResponseStartedFrame, SpeechStartedFrame, SpeechStoppedFrame
from omni_ws.wire.session_config import SessionConfig


class Translator:
    """Renders what a conversation sends, in its order. Has no socket and no clock.

    ``session`` is the session object as the client has set it.
    """

    def __init__(self, conversation: Conversation, items: ConversationItems, session: dict[str, Any]) -> None:
        self.session = session
        self.turns = Turns()
        self.conversation_id = new_id("conv_")
        #: Called when the last turn that waits for a response is transcribed.
        self.on_transcribed: Callable[[], None] = lambda: None
        #: Called when a turn has begun that is answered at its end.
        self.on_speech: Callable[[], None] = lambda: None
        self._conversation = conversation
        self._items = items
        #: By request, the responses that are not done.
        self._responses: dict[str, RealtimeResponse] = {}
        #: By request that has had its final, the turn of which not all is written down yet.
        self._late: dict[str, Turn] = {}
        #: Errors of requests that have no response, until their finals.
        self._errors: dict[str, OmniError] = {}

    def find_response(self, response_id: str | None = None) -> RealtimeResponse | None:
        """The response of this id that is not done; with None the one of the conversation."""
        for response in self._responses.values():
            if response.response_id == response_id or (response_id is None and response.in_conversation):
                return response
        return None

    @property
    def transcribing(self) -> bool:
        """Whether a turn that waits for a response is still being transcribed."""
        return self.turns.transcribing or any(not turn.answered for turn in self._late.values())

    def close(self) -> None:
        """Release what is held."""
        for response in self._responses.values():
            response.close()

    # what the client does

    def respond(
        self,
        request_id: str,
        config: SessionConfig,
        *,
        metadata: Mapping[str, str] | None = None,
        in_conversation: bool = True,
    ) -> Iterator[Event]:
        """A request is to be answered: its response begins."""
        response = self._responses[request_id] = RealtimeResponse(
            request_id,
            config,
            conversation_id=self.conversation_id if in_conversation else None,
            metadata=metadata,
            account=self._conversation.account,
        )
        yield from response.begin()

    def commit(self, turn: Turn) -> Iterator[Event]:
        """What was spoken becomes an item, and is answered where the engine has begun with it."""
        if turn.committed or turn.cleared:
            return
        turn.committed = True
        previous = self._items.add(turn.item)
        shown = turn.item.shown()
        yield {"type": "input_audio_buffer.committed", "item_id": turn.item.item_id, "previous_item_id": previous}
        yield {"type": "conversation.item.added", "item": shown, "previous_item_id": previous}
        yield {"type": "conversation.item.done", "item": shown, "previous_item_id": previous}
        if turn.started and turn.answered and turn.item.request_id is not None:
            yield from self._begin(turn, turn.item.request_id)

    # what the conversation sends

    def render(self, message: ServerMessage) -> Iterator[Event]:
        """The events of one message: none for what the Realtime API does not have."""
        match message:
            case OutputChunk():
                yield from self._output(message)
            case FinalChunk():
                yield from self._final(message)
            case ResponseStartedFrame(request_id=request_id):
                yield from self._started(request_id)
            case SpeechStartedFrame(audio_ms=audio_ms, request_id=request_id):
                yield from self._speech_started(audio_ms, request_id)
            case SpeechStoppedFrame(audio_ms=audio_ms):
                yield from self._speech_stopped(audio_ms)
            case OmniError(request_id=None):
                yield {"type": "error", "error": error_fields(message)}
            case OmniError(request_id=str(request_id)):
                self._errors[request_id] = message

    def _speech_started(self, audio_ms: int, request_id: str | None) -> Iterator[Event]:
        session = self.session
        turn = self.turns.begin(answered=answers_turns(session), start_ms=audio_ms, request_id=request_id)
        yield {
            "type": "input_audio_buffer.speech_started",
            "audio_start_ms": audio_ms,
            "item_id": turn.item.item_id,
        }
        if turn.answered:
            self.on_speech()
        elif interrupts_answers(session) and (response := self.find_response()) is not None:
            self._conversation.cancel(response.request_id)

    def _speech_stopped(self, audio_ms: int) -> Iterator[Event]:
        turn, self.turns.speaking = self.turns.speaking, None
        if turn is None:
            return
        turn.end_ms = audio_ms
        yield {"type": "input_audio_buffer.speech_stopped", "audio_end_ms": audio_ms, "item_id": turn.item.item_id}
        yield from self.commit(turn)
        if turn.item.request_id is None:  # nobody will write it down
            yield from self._transcribed(turn)

    def _started(self, request_id: str) -> Iterator[Event]:
        if request_id in self._responses or (turn := self.turns.find(request_id)) is None:
            return
        turn.started = True
        if turn.committed and turn.answered:
            yield from self._begin(turn, request_id)

    def _begin(self, turn: Turn, request_id: str) -> Iterator[Event]:
        self._items.seen()
        turn.item.request_id = request_id
        yield from self.respond(request_id, self._conversation.configuration_of(request_id))

    def _output(self, chunk: OutputChunk) -> Iterator[Event]:
        request_id = chunk.request_id
        if chunk.late:
            yield from self._late_words(chunk)
            return
        response = self._responses.get(request_id)
        turn = self.turns.find(request_id)
        if chunk.modality is OutputModality.TRANSCRIPT:
            if turn is not None and not chunk.interim:
                yield from self._transcript(turn, chunk.text)
            return
        if turn is not None:
            if not turn.answered:
                return  # the transcript again, as the answer
            if response is None:  # an engine that answers while it listens
                yield from self._begin(turn, request_id)
                response = self._responses[request_id]
            able = self._conversation.engine.capabilities
            if able.transcribes_first or not able.transcripts:
                yield from self._transcribed(turn)
        if response is not None:
            yield from response.render(chunk, self._items.add)

    def _final(self, final: FinalChunk) -> Iterator[Event]:
        request_id = final.request_id
        response = self._responses.get(request_id)
        error = self._errors.pop(request_id, None)
        turn = self.turns.find(request_id)
        follows = turn is not None and final.words is WordsKnown.NOT_YET
        if turn is not None:
            if follows:
                self._late[request_id] = turn
            else:
                yield from self._transcribed(turn, error, failed=final.words is WordsKnown.NEVER)
            if response is None and turn.answered and not turn.cleared and error is not None:
                yield from self._begin(turn, request_id)
                response = self._responses[request_id]
            if not turn.answered and not follows:
                self._wait_for_response(turn, request_id)
        self.turns.end(request_id)
        if response is not None:
            response.error = error
            yield from response.finish(final)
            del self._responses[request_id]
            self._items.have_grown(response.items)
        self._items.answered(request_id, failed=final.finish_reason is FinishReason.ERROR)
        if turn is not None and not turn.answered and not self.transcribing:
            self.on_transcribed()

    def _late_words(self, chunk: OutputChunk) -> Iterator[Event]:
        """What had not been written down of a turn that was cut off."""
        turn = self._late.pop(chunk.request_id, None)
        if turn is None:
            return
        if chunk.text:
            yield from self._transcript(turn, chunk.text)
        yield from self._transcribed(turn, failed=chunk.failed)
        if not turn.answered:
            self._wait_for_response(turn, chunk.request_id)
            if not self.transcribing:
                self.on_transcribed()

    def _wait_for_response(self, turn: Turn, request_id: str) -> None:
        """A turn was transcribed: its item is in the place of its request in the history."""
        self._conversation.ledger.remove(request_id)
        if turn.committed:
            self._items.heard(turn.item, turn.text)

    # transcripts

    def _transcript(self, turn: Turn, text: str) -> Iterator[Event]:
        turn.transcript.append(text)
        if wants_transcripts(self.session) and text and not turn.cleared:
            yield self._transcription(turn, "delta", delta=text)

    def _transcribed(self, turn: Turn, error: OmniError | None = None, *, failed: bool = False) -> Iterator[Event]:
        """All of a turn is transcribed, or the engine has failed on it; ``failed`` says that recognition has."""
        if turn.transcribed or turn.cleared:
            return
        turn.transcribed = True
        turn.item.content[0]["transcript"] = turn.text
        if not wants_transcripts(self.session):
            return
        if error is None and (failed or not self._conversation.engine.capabilities.transcripts):
            error = EngineFailed("what was said could not be transcribed", param="asr")
        if error is not None and not turn.transcript:
            fields = error_fields(error)
            shown = {name: fields[name] for name in ("type", "code", "message", "param")}
            yield self._transcription(turn, "failed", error=shown)
        else:
            seconds = max(0, turn.end_ms - turn.start_ms) / 1000
            usage = {"type": "duration", "seconds": seconds}
            yield self._transcription(turn, "completed", transcript=turn.text, usage=usage)

    def _transcription(self, turn: Turn, kind: str, **fields: Any) -> Event:
        return {
            "type": f"conversation.item.input_audio_transcription.{kind}",
            "item_id": turn.item.item_id,
            "content_index": 0,
            **fields,
        }


# The items.

#: Items that a client may name. The oldest that wait for nothing make room.
MAX_ITEMS: Final = 1024


class ConversationItems:
    """The items of one session in their order, and the history behind them.

    An item of a client is in the history from its creation on, as far as it is text. One that no response has answered
    is *pending*: ``take_pending`` takes it out of the history again, and returns it as the input of a request, which
    brings it back into the history with its answer.
    """

    def __init__(self, ledger: Ledger, budget: ByteBudget, *, max_bytes: int) -> None:
        self._ledger = ledger
        self._items: dict[str, Item] = {}
        #: Those that no response has answered, in order.
        self._pending: dict[str, Item] = {}
        self._share = Share(budget)
        #: The bytes that each is charged with.
        self._charged: dict[str, int] = {}
        self._max_bytes = max_bytes
        #: Items that were taken as the input of a request, until its end.
        self._asked: dict[str, list[tuple[Item, list[InputChunk]]]] = {}

    def get(self, item_id: str) -> Item | None:
        return self._items.get(item_id)

    def add(self, item: Item) -> str | None:
        """Append an item that is in the history already, or will be. Returns the id of the one before it.

        Raises PayloadTooLarge and EngineOverloaded.
        """
        previous = next(reversed(self._items), None)
        if self._share.size + item.size > self._max_bytes:
            raise PayloadTooLarge(f"the items of a session may hold {self._max_bytes} bytes")
        self._charge(item)
        self._items[item.item_id] = item
        if item.chunks:
            self._pending[item.item_id] = item
        while len(self._items) > MAX_ITEMS:
            self._forget(next(iter(self._items)))
        return previous

    def create(self, item: Item) -> str | None:
        """Append an item of the client's. Returns and raises as ``add`` does."""
        previous = self.add(item)
        if item.role == "assistant" or item.kind == "function_call":
            self.seen()
        self._remember(item)
        return previous

    def pending(self) -> list[Item]:
        """The items that no response has answered, in order."""
        return list(self._pending.values())

    def take_pending(self) -> tuple[list[Item], list[InputChunk]]:
        """What is to be answered now, and its input.

        A system message is context, unless nothing else is pending.
        """
        pending = self.pending()
        asked = [item for item in pending if item.role != "system"] or pending[-1:]
        self._ledger.remove(*(item.item_id for item in asked))
        chunks = list(as_input(asked))
        return asked, chunks

    def asked(self, items: Iterable[Item], request_id: str) -> None:
        """These items are the input of this request, to which all others that are pending are context."""
        self._asked[request_id] = [(item, item.chunks) for item in items]
        for item in items:
            item.request_id, item.chunks = request_id, []
            self._pending.pop(item.item_id, None)
        self.seen()

    def seen(self) -> None:
        """A request has what is pending as context: none of it is pending any more."""
        for item in self.pending():
            item.chunks = []
            self._charge(item)
        self._pending.clear()

    def answered(self, request_id: str, *, failed: bool) -> None:
        """A request has ended. Where it failed, its input is pending as before, since the history has it not."""
        for item, chunks in self._asked.pop(request_id, ()):
            if item.item_id not in self._items:
                continue
            if failed:
                item.chunks, item.request_id = chunks, None
                self._remember(item)
            self._charge(item)
        if failed:
            self._find_pending()

    def heard(self, item: Item, transcript: str) -> None:
        """The words of a spoken turn that waits for a response are known."""
        item.request_id = None
        if transcript:
            item.chunks = [InputChunk(Modality.TEXT, transcript.encode())]
            self._remember(item)
        self._charge(item)
        self._find_pending()

    def feed(self) -> Iterator[InputChunk]:
        """The input that pending items with images are: it joins the turn that is being spoken."""
        shown = [item for item in self.pending() if any(one.modality is Modality.IMAGE for one in item.chunks)]
        self._ledger.remove(*(item.item_id for item in shown))
        for item in shown:
            chunks, item.chunks = item.chunks, []
            del self._pending[item.item_id]
            self._charge(item)
            yield from chunks

    def cut(self, item: Item, heard: str) -> None:
        """Of what the assistant said, only this was heard."""
        for part in item.content:
            part["transcript" if "transcript" in part else "text"] = heard
        self._charge(item)

    def have_grown(self, items: Iterable[Item]) -> None:
        """Charge the budget for what has been said since these items were added."""
        for item in items:
            if item.item_id in self._items:
                self._charge(item)

    def delete(self, item: Item) -> None:
        """Drop an item, and what the history has of it."""
        answer = {"assistant"}
        if item.request_id is None:
            self._ledger.remove(item.item_id)
        elif item.role == "assistant" or item.kind == "function_call":
            self._ledger.remove(item.request_id, roles=answer)
        else:
            self._ledger.remove(item.request_id, roles=ALL_ROLES - answer)
        self._forget(item.item_id)

    def close(self) -> None:
        """Release everything."""
        self._items.clear()
        self._pending.clear()
        self._charged.clear()
        self._asked.clear()
        self._share.resize(0)

    def _charge(self, item: Item) -> None:
        """Charge the budget for an item as it is now."""
        size = item.size
        self._share.resize(self._share.size - self._charged.get(item.item_id, 0) + size)
        self._charged[item.item_id] = size

    def _find_pending(self) -> None:
        """An item that is not the last may be pending again."""
        self._pending = {item_id: item for item_id, item in self._items.items() if item.chunks}

    def _forget(self, item_id: str) -> None:
        del self._items[item_id]
        self._pending.pop(item_id, None)
        self._share.resize(self._share.size - self._charged.pop(item_id))

    def _remember(self, item: Item) -> None:
        self._ledger.place(messages_of([item]), item_id=item.item_id)
        self._ledger.weigh()


def as_new(item: Item) -> Item:
    """The item as if it were created again: with input, where it is a message of the user or the system."""
    if item.chunks or item.role not in ("user", "system") or not item.message_text:
        return item
    return replace(item, chunks=[InputChunk(Modality.TEXT, item.message_text.encode())])


def as_input(items: Iterable[Item]) -> Iterator[InputChunk]:
    """The input that these items are, one behind the other."""
    for index, item in enumerate(items):
        if index and item.chunks[0].modality is Modality.TEXT and item.chunks[0].tool_call_id is None:
            yield InputChunk(Modality.TEXT, b"\n")
        yield from item.chunks


def messages_of(items: Iterable[Item]) -> Iterator[Message]:
    """The messages that these items are in a history."""
    for item in items:
        match item.kind:
            case "message":
                yield Message(item.role, item.message_text)
            case "function_call":
                yield Message("assistant", "", tool_calls=(ToolCall(item.call_id, item.name, item.text),))
            case "function_call_output":
                yield Message("tool", item.text, tool_call_id=item.call_id)
