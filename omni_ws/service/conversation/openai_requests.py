"""Configures a conversation by the body of a request to OpenAI's API.

A route reads the body, opens a conversation for it, and calls ``configure`` and ``prepare_answer`` before the
conversation runs.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from omni_ws.audio.codec import AudioEncoder
from omni_ws.audio.container import parse_audio_format
from omni_ws.core.chunks import DEFAULT_INPUT_AUDIO, AudioEncoding, AudioFormat, InputChunk, InputMode, Modality
from omni_ws.core.history import WORDS_UNKNOWN, Message, Speech, estimate_tokens
from omni_ws.engine.base import AnswerOptions, StructuredOutput
from omni_ws.errors import InvalidRequest, InvalidValue, OmniError, UnsupportedFormat, UnsupportedParameter
from omni_ws.service import new_id
from omni_ws.wire.openai_fields import UPSTREAM_FIELDS, AnswerFields, ConfigurationPatch
from omni_ws.wire.openai_requests import (
    FIELD,
    ChatRequest,
    HistoryMessage,
    placed,
    read_history_items,
    told_items,
)
from omni_ws.wire.openai_responses import ResponseOptions
from omni_ws.wire.server_frames import HistoryItemsFrame

if TYPE_CHECKING:
    from omni_ws.service.conversation.conversation import Conversation


def configure(
    conversation: Conversation, patch: ConfigurationPatch, *, samples: bool = False, whole_input: bool = False
) -> AudioFormat:
    """Apply the body's fields to the conversation, and return the audio format of the response.

    ``samples``: the response encodes the audio itself, as a file, so that the conversation must produce pcm16.
    ``whole_input``: the input arrives all at once. Raises an InvalidRequest whose ``param`` is the field of the body;
    so do later errors of the conversation.
    """
    with _client_names(conversation):
        config = conversation.configure(patch.fields, field_names=patch.name_in_body)
        target = config.output_audio.encoded
        _check_encodable(target)
    if samples:
        conversation.configure({"output_audio": {"format": AudioEncoding.PCM16.value}})
    if whole_input and config.after_start is InputMode.SNAPSHOT:
        # A start in the middle of input that is already here would lose the rest.
        conversation.configure({"start_policy": "on_end_only"})
    return target


@contextmanager
def ended_on_error(conversation: Conversation) -> Iterator[None]:
    """If the block raises, end the conversation, which will never run, and report that to its observers."""
    try:
        yield
    except BaseException:
        conversation.end()
        conversation.observed.ended()
        raise


def prepare_answer(
    conversation: Conversation, request: ChatRequest, history: Iterable[Message], *, read_whole: bool = False
) -> None:
    """Add the earlier messages to the history, and set the options of the answer.

    ``read_whole``: the answer is sent only at its end, in one piece. Raises an InvalidRequest for what the engine does
    not support.
    """
    capabilities = conversation.engine.capabilities
    if request.tools_at is not None and not capabilities.tools:
        raise UnsupportedParameter("tools are not supported by this engine", param=request.tools_at)
    if request.role not in capabilities.input_roles:
        raise InvalidValue("the last message must have role user or tool", param=request.role_at)
    if conversation.configuration.mcp and request.answer.choices > 1:
        raise UnsupportedParameter("several answers are not supported with MCP servers", param="n")
    options = checked_options(conversation, request.answer)
    conversation.answer_with(replace(options, input_role=request.role, thought=True, read_whole=read_whole))
    conversation.ledger.place(history)
    conversation.ledger.weigh()


def earlier_texts(history: Iterable[HistoryMessage]) -> list[Message]:
    """Return the messages of a history that has only text.

    Raises UnsupportedParameter if a message has anything else.
    """
    messages: list[Message] = []
    for one in history:
        if one.parts or one.audio_id is not None:
            raise UnsupportedParameter("earlier messages may contain nothing other than text here", param=one.place)
        messages.append(earlier_message(one, ()))
    return messages


def earlier_message(one: HistoryMessage, parts: Sequence[InputChunk]) -> Message:
    """Return a message of the history with the content ``parts``, in their order.

    A Message has at most one text, one piece of speech and one picture: further parts become its ``more`` messages.
    """
    bare = Message(one.role, one.text, tool_calls=one.tool_calls, tool_call_id=one.tool_call_id)
    found: list[Message] = []
    for part in parts:
        last = found[-1] if found else Message(one.role, "")
        if last.speech is not None or last.picture is not None:
            last = Message(one.role, "")
            found.append(last)
        elif not found:
            found.append(last)
        match part.modality:
            case Modality.TEXT:
                found[-1] = replace(last, text=last.text + part.payload.decode())
            case Modality.AUDIO:
                found[-1] = replace(last, speech=Speech((part,), DEFAULT_INPUT_AUDIO, audio_ms=_estimated_ms(part)))
            case _:
                found[-1] = replace(last, picture=part)
    if not found:
        return bare
    return replace(bare, text=found[0].text, speech=found[0].speech, picture=found[0].picture, more=tuple(found[1:]))


def _estimated_ms(part: InputChunk) -> float:
    format = DEFAULT_INPUT_AUDIO if part.format is None else parse_audio_format(part.format, DEFAULT_INPUT_AUDIO)
    return format.duration_ms(len(part.payload))


def checked_options(
    conversation: Conversation, answer: AnswerFields, asked: AnswerOptions | None = None
) -> AnswerOptions:
    """Return ``asked`` with the fields of ``answer`` set. Raises UnsupportedParameter if the engine lacks an option."""
    options = replace(
        asked or AnswerOptions(),
        logprobs=answer.logprobs,
        structure=None if answer.form is None else StructuredOutput(schema=answer.form.schema),
        choices=answer.choices,
        priority=conversation.counted_priority(answer.priority),
        parallel_tool_calls=answer.parallel_tool_calls,
        template_arguments=answer.template_arguments,
        media_limits=answer.media_limits,
        upstream={
            name: value
            for name, value in answer.upstream.items()
            if name in conversation.engine.capabilities.upstream or value not in UPSTREAM_FIELDS[name]
        },
    )
    with _client_names(conversation):
        conversation.configuration.check_options(options)
    return options


def chat_options(request: ChatRequest, *, model: str) -> ResponseOptions:
    """Return how to render the response: its id, its model, and the parts that the client asked for."""
    return ResponseOptions(
        completion_id="chatcmpl-" + (request.request_id or new_id("")),
        created=int(time.time()),
        model=model,
        wants_text=request.wants_text,
        wants_audio=request.wants_audio,
        include_usage=request.include_usage,
        usage_on_final_chunk=request.usage_on_final_chunk,
        include_times=request.include_times,
        input_transcript=request.input_transcript,
        choices=request.answer.choices,
        logprobs=request.answer.logprobs is not None,
    )


@contextmanager
def _client_names(conversation: Conversation) -> Iterator[None]:
    """Change the ``param`` of an error that the block raises to the name of that field in the body."""
    try:
        yield
    except OmniError as error:
        error.param = conversation.field_names(error.param)
        raise


@lru_cache(maxsize=64)
def _check_encodable(target: AudioFormat) -> None:
    """Raise UnsupportedFormat now, before the request runs, if the encoder would raise it at the first audio."""
    if target.is_raw or target.encoding is AudioEncoding.WAV:
        return
    try:
        AudioEncoder(target, source_rate=target.sample_rate).flush()
    except UnsupportedFormat as error:
        error.about(param="output_audio.sample_rate" if error.param == "sample_rate" else "output_audio.format")
        raise


# The history of a conversation as its client gives and gets it: earlier turns before all requests, and a copy.


#: The part of the history that a given summary may take.
_SUMMARY_SHARE = 0.5


class GivenHistory(NamedTuple):
    """The checked messages that a client gave as history, and its summary of what came before; "" without one."""

    messages: Sequence[Message] = ()
    summary: str = ""


def check_history(conversation: Conversation, items: Any) -> GivenHistory:
    """Check and return ``history_items``, for ``give_history``.

    Raises InvalidValue unless they are the first input of the session, and if the summary is too long; what
    ``read_history_items`` raises; and UnsupportedParameter for media, and for tool calls if the engine has no tools.
    """
    ledger, stream = conversation.ledger, conversation.stream
    if stream.reorder.next_sequence_id or conversation.queue.opened or conversation.given or ledger.history.items:
        raise InvalidValue("history_items must come before all else in a session, and once", param=FIELD)
    found, summary = read_history_items(items)
    if found.tools_at is not None and not conversation.engine.capabilities.tools:
        raise UnsupportedParameter("tools are not supported by this engine", param=placed(found.tools_at))
    most = int(ledger.history.max_tokens * _SUMMARY_SHARE)
    if estimate_tokens(summary) > most:
        raise InvalidValue(f"the summary must not have more than {most} words", param=f"{FIELD}[0].content")
    try:
        return GivenHistory(earlier_texts(found.history), summary)
    except InvalidRequest as error:
        error.param = placed(error.param)
        raise


def give_history(conversation: Conversation, given: GivenHistory) -> None:
    """Put checked messages into the history before all requests, and charge their memory to the session."""
    if given.summary:
        conversation.ledger.history.condense(given.summary)
    conversation.ledger.place(given.messages)
    conversation.ledger.weigh()
    if not conversation.busy:
        conversation.limits.summaries.note_quiet(conversation)


def told_history(conversation: Conversation, *, original: bool) -> HistoryItemsFrame:
    """Return the history: as requests see it, with notes for its older part; if ``original``, all kept messages.

    System messages and media are left out; of speech, the words are returned.
    """
    history = conversation.ledger.history
    first = 0 if original else max(history.summed, history.first_seen)
    messages = [_told(item.message) for item in history.items[first:] if item.role != "system"]
    return told_items(messages, "" if original else history.notes)


def _told(message: Message) -> Message:
    """Return a message with its content as text only."""
    text = " ".join(filter(None, (part.text or (WORDS_UNKNOWN if part.speech else "") for part in message.parts)))
    return Message(message.role, text, tool_calls=message.tool_calls, tool_call_id=message.tool_call_id)
