"""Requests whose input is whole: a conversation answers them on request, beside the stream of its input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from omni_ws.core.chunks import CHUNK_OVERHEAD_BYTES, InputChunk, InputMode
from omni_ws.core.history import Message, message_bytes
from omni_ws.core.request_input import GenerationStarted, InputEnded, InputSettings, RequestInput
from omni_ws.core.start_policy import OnEndOnly
from omni_ws.service.conversation.conversation import Conversation
from omni_ws.service.conversation.request_state import RequestState
from omni_ws.wire.session_config import SessionConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeRequest:
    """Input that is to be answered as it is, by a configuration of its own.

    ``input_kept`` and ``answer_kept`` say what of it enters the history. ``context`` is what the engine sees in place
    of the history; None for the history.
    """

    chunks: Sequence[InputChunk]
    config: SessionConfig
    input_kept: bool = True
    answer_kept: bool = True
    context: tuple[Message, ...] | None = None


def respond(conversation: Conversation, asked: WholeRequest) -> str:
    """Queue a request behind those that are open, which it does not interrupt. Returns its id.

    Its outputs and its final follow as those of any request do, also where it is refused or has no input.
    """
    audio = conversation.configuration.input_settings().audio
    session = RequestInput(InputSettings(start_policy=OnEndOnly(), mode=InputMode.SNAPSHOT, audio=audio))
    conversation.given = conversation.given or bool(asked.chunks)
    for chunk in asked.chunks:
        session.receive_chunk(chunk)
    events = session.finish()
    request = conversation.new_request(session, asked.config, by_speech=False)
    request.input_kept, request.answer_kept, request.context = asked.input_kept, asked.answer_kept, asked.context
    held = sum(CHUNK_OVERHEAD_BYTES + len(chunk.payload) for chunk in asked.chunks)
    held += sum(map(message_bytes, asked.context or ()))
    if asked.input_kept:
        request.keep_speech(supported=conversation.engine.capabilities.speech_in_history)
    conversation.admit_request(request, interrupts=False, held=held)
    if request.state is RequestState.FINISHED:  # refused
        return request.request_id
    for event in events:
        match event:
            case GenerationStarted():
                request.timeline.mark_policy_fired(event)
                request.start(event)
            case InputEnded(error=error):
                conversation.input_ended(request, error)
    return request.request_id
