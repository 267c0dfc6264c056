"""Responses and spoken turns as the Realtime API shows them, and vLLM's dialect of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from sys import getsizeof
from typing import Any, Final, TypeAlias

from omni_ws.core.chunks import (
    CONTENT_FILTER,
    FinalChunk,
    FinishReason,
    InputChunk,
    Modality,
    OutputChunk,
    OutputModality,
    ToolCallFragment,
)
from omni_ws.core.quota import ByteBudget, Share
from omni_ws.errors import OmniError, UnknownType
from omni_ws.service.conversation.conversation import Conversation
from omni_ws.service.conversation.messages import ServerMessage
from omni_ws.service.failure import new_id
from omni_ws.wire.realtime_events import Item, base64_field, error_fields, text_field, usage_fields
from omni_ws.wire.realtime_session import shown_audio_output
from omni_ws.wire.session_config import SessionConfig

#: A server event, without its id.
Event: TypeAlias = dict[str, Any]
#: Adds an item to the conversation, and returns the id of the one before it.
AddItem: TypeAlias = Callable[[Item], str | None]

_STATUS: Final = {
    FinishReason.STOP: "completed",
    FinishReason.TOOL_CALLS: "completed",
    FinishReason.LENGTH: "incomplete",
    FinishReason.CANCELLED: "cancelled",
    FinishReason.ERROR: "failed",
}


@dataclass(slots=True)
class _Output:
    """One item of the response, with its place in it."""

    item: Item
    index: int
    #: The item before it, once it is in the conversation.
    previous_item_id: str | None = None
    text: list[str] = field(default_factory=list)


class RealtimeResponse:
    """Renders one answer, from ``response.created`` to ``response.done``. Its message and its calls are items."""

    def __init__(
        self,
        request_id: str,
        config: SessionConfig,
        *,
        conversation_id: str | None,
        account: ByteBudget,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self.response_id = new_id("resp_")
        self.request_id = request_id
        self.conversation_id = conversation_id
        #: Why it is cancelled, where that is known before its end.
        self.cancel_reason = "turn_detected"
        #: Its error, until the final that follows it.
        self.error: OmniError | None = None
        self._config = config
        self._metadata = metadata
        self._speaks = "audio" in config.modalities
        self._outputs: list[_Output] = []
        self._message: _Output | None = None
        self._calls: dict[int, _Output] = {}
        #: Of what was said so far.
        self._share = Share(account)

    @property
    def in_conversation(self) -> bool:
        """Whether it is part of the conversation, or stands beside it."""
        return self.conversation_id is not None

    @property
    def items(self) -> list[Item]:
        """What it has made."""
        return [output.item for output in self._outputs]

    def begin(self) -> Iterator[Event]:
        yield {"type": "response.created", "response": self._shown("in_progress")}
        yield {"type": "rate_limits.updated", "rate_limits": []}  # limits of a key are not those of tokens

    # outputs

    def render(self, chunk: OutputChunk, add: AddItem) -> Iterator[Event]:
        """The events of one output. ``add`` is called with each new item, where that is part of the conversation."""
        match chunk.modality:
            case OutputModality.TEXT:
                yield from self._text(chunk.text, add)
            case OutputModality.AUDIO:
                yield from self._audio(chunk.payload, add)
            case OutputModality.TOOL_CALL if chunk.tool_call is not None:
                yield from self._call(chunk.tool_call, add)

    def _text(self, text: str, add: AddItem) -> Iterator[Event]:
        yield from self._open_message(add)
        assert self._message is not None
        self._say(self._message, text)
        kind = "response.output_audio_transcript.delta" if self._speaks else "response.output_text.delta"
        yield {"type": kind, **self._place(self._message), "content_index": 0, "delta": text}

    def _audio(self, payload: bytes, add: AddItem) -> Iterator[Event]:
        yield from self._open_message(add)
        assert self._message is not None
        yield {
            "type": "response.output_audio.delta",
            **self._place(self._message),
            "content_index": 0,
            "delta": payload,
        }

    def _call(self, fragment: ToolCallFragment, add: AddItem) -> Iterator[Event]:
        output = self._calls.get(fragment.index)
        if output is None:
            item = Item(
                item_id=new_id("item_"),
                kind="function_call",
                status="in_progress",
                call_id=fragment.id or new_id("call_"),
                name=fragment.name or "",
                request_id=self.request_id,
            )
            output = self._calls[fragment.index] = self._open(item)
            yield from self._added(output, add)
        if fragment.arguments:
            self._say(output, fragment.arguments)
            yield {
                "type": "response.function_call_arguments.delta",
                **self._place(output),
                "call_id": output.item.call_id,
                "delta": fragment.arguments,
            }

    def _say(self, output: _Output, text: str) -> None:
        output.text.append(text)
        self._share.force(self._share.size + getsizeof(text))

    def close(self) -> None:
        """Release what is held."""
        self._share.resize(0)

    def _open_message(self, add: AddItem) -> Iterator[Event]:
        if self._message is None:
            item = Item(item_id=new_id("item_"), role="assistant", status="in_progress", request_id=self.request_id)
            self._message = self._open(item)
            yield from self._added(self._message, add)
            yield {
                "type": "response.content_part.added",
                **self._place(self._message),
                "content_index": 0,
                "part": self._part(""),
            }

    def _open(self, item: Item) -> _Output:
        output = _Output(item, len(self._outputs))
        self._outputs.append(output)
        return output

    def _added(self, output: _Output, add: AddItem) -> Iterator[Event]:
        yield {
            "type": "response.output_item.added",
            "response_id": self.response_id,
            "output_index": output.index,
            "item": output.item.shown(),
        }
        if self.in_conversation:
            output.previous_item_id = add(output.item)
            yield {"type": "conversation.item.added", **self._as_item(output)}

    # the end

    def finish(self, final: FinalChunk) -> Iterator[Event]:
        """The events with which it ends: those of its open items, then ``response.done``."""
        status, reason = _STATUS[final.finish_reason], "max_output_tokens"
        if CONTENT_FILTER in final.foreign_reasons:
            status, reason = "incomplete", CONTENT_FILTER
        for output in self._outputs:
            output.item.status = "completed" if status == "completed" else "incomplete"
            yield from self._end_message(output) if output is self._message else self._end_call(output)
            yield {
                "type": "response.output_item.done",
                "response_id": self.response_id,
                "output_index": output.index,
                "item": output.item.shown(),
            }
            if self.in_conversation:
                yield {"type": "conversation.item.done", **self._as_item(output)}
        yield {
            "type": "response.done",
            "response": {
                **self._shown(status),
                "status_details": self._details(status, reason),
                "usage": usage_fields(final.usage),
            },
        }
        self.close()  # the items are charged with what they say

    def _end_message(self, output: _Output) -> Iterator[Event]:
        text, place = "".join(output.text), {**self._place(output), "content_index": 0}
        part = self._part(text)
        output.item.content = [{**part, "type": f"output_{part['type']}"}]  # as the API names it there
        if self._speaks:
            yield {"type": "response.output_audio.done", **place}
            yield {"type": "response.output_audio_transcript.done", **place, "transcript": text}
        else:
            yield {"type": "response.output_text.done", **place, "text": text}
        yield {"type": "response.content_part.done", **place, "part": part}

    def _end_call(self, output: _Output) -> Iterator[Event]:
        item = output.item
        item.text = "".join(output.text)
        yield {
            "type": "response.function_call_arguments.done",
            **self._place(output),
            "call_id": item.call_id,
            "name": item.name,
            "arguments": item.text,
        }

    def _details(self, status: str, reason: str) -> dict[str, Any] | None:
        match status:
            case "cancelled":
                return {"type": "cancelled", "reason": self.cancel_reason}
            case "incomplete":
                return {"type": "incomplete", "reason": reason}
            case "failed" if self.error is not None:
                fields = error_fields(self.error)
                return {"type": "failed", "error": {name: fields[name] for name in ("type", "code", "message")}}
            case "failed":
                return {"type": "failed"}
        return None

    def _as_item(self, output: _Output) -> dict[str, Any]:
        return {"previous_item_id": output.previous_item_id, "item": output.item.shown()}

    def _place(self, output: _Output) -> dict[str, Any]:
        return {"response_id": self.response_id, "item_id": output.item.item_id, "output_index": output.index}

    def _part(self, text: str) -> dict[str, Any]:
        """A content part of the response."""
        return {"type": "audio", "transcript": text} if self._speaks else {"type": "text", "text": text}

    def _shown(self, status: str) -> dict[str, Any]:
        limit = self._config.sampling.max_tokens
        return {
            "object": "realtime.response",
            "id": self.response_id,
            "status": status,
            "status_details": None,
            "output": [output.item.shown() for output in self._outputs],
            "conversation_id": self.conversation_id,
            "output_modalities": ["audio"] if self._speaks else ["text"],
            "max_output_tokens": "inf" if limit is None else limit,
            "audio": {"output": shown_audio_output(self._config)},
            "usage": None,
            "metadata": self._metadata,
        }


# Spoken turns.


@dataclass(slots=True, eq=False)
class Turn:
    """What was spoken between ``speech_started`` and ``speech_stopped``, or committed by the client.

    It is an item, and the request that its audio became.
    """

    item: Item
    #: Whether the request is answered. Otherwise it is transcribed, and the item waits for a response.
    answered: bool
    start_ms: int = 0
    end_ms: int = 0
    #: Whether it is an item of the conversation.
    committed: bool = False
    #: Whether the client took back what was spoken.
    cleared: bool = False
    #: Whether the engine works on it.
    started: bool = False
    #: Whether its transcript is complete, or failed.
    transcribed: bool = False
    #: Its settled pieces, each with the white space before it.
    transcript: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.transcript)


class Turns:
    """The turns of requests that have not ended."""

    def __init__(self) -> None:
        self._by_request: dict[str, Turn] = {}
        #: The turn that is being spoken.
        self.speaking: Turn | None = None

    def begin(self, *, answered: bool, start_ms: int, request_id: str | None) -> Turn:
        """Speech has begun, and is the input of this request, or of none."""
        item = Item(item_id=new_id("item_"), role="user", content=[{"type": "input_audio", "transcript": None}])
        turn = self.speaking = Turn(item, answered, start_ms)
        if request_id is not None:
            self.bind(turn, request_id)
        return turn

    def bind(self, turn: Turn, request_id: str) -> None:
        """This turn is the input of this request."""
        self._by_request[request_id] = turn
        turn.item.request_id = request_id

    def find(self, request_id: str) -> Turn | None:
        """The turn of a request; None where it has none."""
        return self._by_request.get(request_id)

    def end(self, request_id: str) -> None:
        """The request has ended."""
        self._by_request.pop(request_id, None)

    @property
    def transcribing(self) -> bool:
        """Whether a turn that waits for a response is still being transcribed."""
        return any(turn.committed and not turn.answered for turn in self._by_request.values())


# The dialect of vLLM.

_VLLM_CONFIGURATION: Final = {
    "task": "transcribe",
    "modalities": ["text"],
    "input_audio": {"format": "pcm16", "sample_rate": 16_000},  # its one format
    "turn_detection": None,
    "history": False,
}
#: The codes of vLLM where they differ.
_VLLM_CODES: Final = {
    "unknown_type": "unknown_event",
    "invalid_frame": "invalid_json",
    "invalid_value": "invalid_event",
}


def begins_vllm_dialect(event: Mapping[str, Any]) -> bool:
    """Whether a client whose first event this is speaks the dialect. OpenAI's API refuses each of these events."""
    if event["type"] == "session.update":
        return "session" not in event and "model" in event
    return event["type"] == "input_audio_buffer.commit" and ("final" in event or event.keys() == {"type"})


def created_fields(session_id: str) -> dict[str, Any]:
    """What vLLM's clients read from ``session.created``, which is sent before a client has said anything."""
    return {"id": session_id, "created": int(time.time())}


class VllmDialect:
    """Takes the place of Commands for clients of vLLM's ``/v1/realtime``, which transcribes utterance after utterance.

    An utterance begins with its first audio and ends with a commit that is ``final``. Any other commit changes nothing,
    because audio is transcribed as it arrives.
    """

    def __init__(self, conversation: Conversation, send: Callable[[Iterable[Event]], None]) -> None:
        self.send = send
        self._conversation = conversation
        self._transcribes = False
        self._hears = False
        self._text: list[str] = []
        self._reported: OmniError | None = None

    def receive(self, event: Mapping[str, Any], *, now: float) -> None:
        """One event of the client, which arrived at the time ``now``. Raises OmniError."""
        if not self._transcribes:  # an engine that cannot refuses each event
            self._conversation.configure(_VLLM_CONFIGURATION)
            self._transcribes = True
        match event["type"]:
            case "session.update":
                self._conversation.configure({"model": text_field(event, "model")})
            case "input_audio_buffer.append":
                chunk = InputChunk(Modality.AUDIO, base64_field(event, "audio"))
                self._conversation.receive_chunk(chunk, now=now)
                self._hears = True
            case "input_audio_buffer.commit":
                if event.get("final") is True:
                    self._end_utterance(now)
            case unknown:
                raise UnknownType(f"unknown event type {str(unknown)[:64]!r}", param="type")

    def _end_utterance(self, now: float) -> None:
        if not self._hears:
            self.send([_transcription_done("", 0, 0)])
            return
        self._hears = False
        self._conversation.receive_chunk(InputChunk(Modality.AUDIO, b"", end_of_input=True), now=now)

    def render(self, message: ServerMessage) -> Iterator[Event]:
        """The events of what the conversation sends: none for what the dialect does not have."""
        match message:
            case OutputChunk(modality=OutputModality.TEXT, text=text):
                self._text.append(text)
                yield {"type": "transcription.delta", "delta": text}
            case FinalChunk(finish_reason=reason, usage=usage):
                text, self._text = "".join(self._text), []
                if reason is not FinishReason.ERROR:
                    yield _transcription_done(text, usage.input_tokens, usage.output_tokens)
            case OmniError():
                self._reported = message
                yield self.error(message)

    def error(self, error: OmniError, *, event_id: str | None = None) -> Event:
        """vLLM's error event, whose ``error`` is a text."""
        code = "invalid_audio" if error.param == "audio" else _VLLM_CODES.get(error.code, error.code)
        return {"type": "error", "error": error.message, "code": code}

    def reported(self, error: OmniError) -> bool:
        """Whether the client has been sent this error."""
        return self._reported is error

    def close(self) -> None:
        """Release what is held, which is nothing."""


def _transcription_done(text: str, prompt_tokens: int, completion_tokens: int) -> Event:
    usage = {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
    }
    return {"type": "transcription.done", "text": text, "usage": usage}
