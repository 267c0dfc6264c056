"""Translator: the messages of a conversation as the server events of the Realtime API."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from omni_ws.core.chunks import FinalChunk, FinishReason, OutputChunk, OutputModality, WordsKnown
from omni_ws.errors import EngineFailed, OmniError
from omni_ws.service.conversation.conversation import Conversation
from omni_ws.service.conversation.messages import ServerMessage
from omni_ws.service.failure import new_id
from omni_ws.transport.realtime.conversation_items import ConversationItems
from omni_ws.transport.realtime.response import Event, RealtimeResponse
from omni_ws.transport.realtime.turns import Turn, Turns
from omni_ws.wire.realtime_events import error_fields
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
