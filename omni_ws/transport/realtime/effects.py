"""The effects of a Realtime session's fields: what the engine is able to, what acts beside ``session_config``, and what
has no effect.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any, Final

import msgspec

from omni_ws.core.chunks import Modality, OutputModality
from omni_ws.core.history import STRIDE
from omni_ws.core.json_values import primary_subtag
from omni_ws.engine.base import AnswerOptions
from omni_ws.errors import InvalidRequest
from omni_ws.service.conversation.conversation import Conversation
from omni_ws.service.sessions.factory import SessionFactory
from omni_ws.transport.realtime.items import Event
from omni_ws.wire.realtime_events import RealtimeRefusal, items_in
from omni_ws.wire.realtime_parity import verdict_of, with_fields
from omni_ws.wire.realtime_session import (
    WITHOUT_TURNS,
    CommonFields,
    RealtimeAbilities,
    RetentionRatio,
    SessionFields,
    current_names,
)

#: The path of each field of ``session_config`` in OpenAI's session object, for errors.
_FIELDS: Final = {
    "voice": "audio.output.voice",
    "speed": "audio.output.speed",
    "modalities": "output_modalities",
    "sampling.max_tokens": "max_output_tokens",
    "sampling.temperature": "temperature",
    "input_audio.sample_rate": "audio.input.format.rate",
    "input_audio.prompt": "audio.input.transcription.prompt",
    "input_audio.keywords": "audio.input.transcription.keywords",
    "input_audio.languages": "audio.input.transcription.languages",
    "input_audio.echo": "audio.input.echo",
    "input_audio.noise_reduction": "audio.input.noise_reduction.type",
    "output_audio.sample_rate": "audio.output.format.rate",
    "idle_prompt": "audio.input.turn_detection.idle_timeout_ms",
    "output_audio.format": "audio.output.format.type",
    "task": "audio.input.turn_detection.create_response",
    **{
        f"turn_detection.{name}": f"audio.input.turn_detection.{name}"
        for name in (
            "threshold",
            "prefix_padding_ms",
            "silence_duration_ms",
            "interrupt_response",
            "eagerness",
            "duck",
            "backchannel",
        )
    },
}


@contextmanager
def naming(place: str) -> Iterator[None]:
    """Inside the block, let errors name the field as OpenAI does, in ``place``: ``session`` or ``response``."""
    try:
        yield
    except InvalidRequest as error:
        if error.param is not None and not error.param.startswith(f"{place}."):
            name, bracket, rest = error.param.partition("[")
            error.about(param=f"{place}.{_FIELDS.get(name, name)}{bracket}{rest}")
        raise


#: The warnings of one event; a client learns of further fields when it has left out these.
MAX_WARNINGS: Final = 32
#: Fields of every event, and the objects in events that are named for themselves.
_NAMED_APART: Final = ("type", "event_id", "session", "response", "item")
#: The fields of a session and of a response that a transport decides with fields of ``session_config``.
_OF_MEDIA: Final = {"input_audio": "audio.input.format", "output_audio": "audio.output.format"}


def abilities_of(factory: SessionFactory) -> RealtimeAbilities:
    """Return what the engine of this server can do in a Realtime session."""
    able = factory.engine.capabilities
    hears = Modality.AUDIO in able.input_modalities
    sampling = able.sampling | able.sampling_no_ops
    return RealtimeAbilities(
        audio_output=OutputModality.AUDIO in able.output_modalities,
        text_output=OutputModality.TEXT in able.output_modalities,
        turn_detection_types=tuple(factory.speech_workers.turn_detection_types) if hears else (),
        languages=frozenset(able.languages),
        keywords=able.keywords,
        cleans_audio=factory.speech_workers.cleans_audio,
        temperature="temperature" in sampling,
        max_tokens="max_tokens" in sampling,
    )


class Effects:
    """The effects of one session's fields that are not in ``session_config``: on its history and its answers."""

    def __init__(self, conversation: Conversation, media: Collection[str]) -> None:
        """``media`` are the names of the fields of ``session_config`` that the transport decides."""
        self._conversation = conversation
        self._decided = [path for name, path in _OF_MEDIA.items() if name in media]
        self._max_tokens = conversation.limits.max_history_tokens
        self._session = SessionFields()

    def apply(self, session: SessionFields) -> None:
        """Let the fields of ``session`` take effect on what comes from now on."""
        self._session = session
        self._conversation.answer_with(self._options(session))
        wanted, tokens, stride = session.truncation, self._max_tokens, STRIDE
        if isinstance(wanted, RetentionRatio):
            limit = None if wanted.token_limits is None else wanted.token_limits.post_instructions
            tokens, stride = min(tokens, limit or tokens), 1 - wanted.retention_ratio
        elif wanted == "disabled":
            stride = 0
        self._conversation.ledger.history.keep_within(tokens, stride=stride)

    @contextmanager
    def answering(self, response: CommonFields) -> Iterator[None]:
        """Inside the block, open requests with the options of ``response`` where it has any."""
        conversation = self._conversation
        before = conversation.options
        conversation.answer_with(self._options(response, self._session))
        try:
            yield
        finally:
            conversation.answer_with(before)

    def _options(self, *wanted: CommonFields) -> AnswerOptions:
        """Return the options by the first of ``wanted`` that says something, without those that the engine lacks."""
        able = self._conversation.engine.capabilities
        parallel = next((one.parallel_tool_calls for one in wanted if one.parallel_tool_calls is not None), True)
        efforts = (one.reasoning.effort for one in wanted if one.reasoning is not None)
        effort = next(filter(None, efforts), None)
        upstream = {} if effort is None or "reasoning_effort" not in able.upstream else {"reasoning_effort": effort}
        return replace(self._conversation.options, parallel_tool_calls=parallel, upstream=upstream)

    @property
    def overflow(self) -> RealtimeRefusal | None:
        """The error of a response that would not see the whole conversation; None if it may, or sees it all."""
        history = self._conversation.ledger.history
        if self._session.truncation != "disabled" or not history.is_cut:
            return None
        return RealtimeRefusal(
            "context_length_exceeded",
            f"the conversation exceeds {history.max_tokens} tokens, and session.truncation is disabled",
            param="session.truncation",
        )

    # warnings

    def warnings(self, event: Mapping[str, Any], session: SessionFields) -> dict[str, list[Event]]:
        """Return the field ``warnings`` of the event that answers ``event``; nothing if there are none.

        It names the fields of ``event`` that have no effect in a session with the fields ``session``, with the reason,
        and those that the API does not have.
        """
        found = islice(self._found(event, session), MAX_WARNINGS)
        warnings = [{"code": code, "message": message, "param": param} for code, message, param in found]
        return {"warnings": warnings} if warnings else {}

    def session_warnings(self, session: SessionFields) -> dict[str, list[Event]]:
        """Return ``warnings`` for a session that begins with fields."""
        return self.warnings({"type": "session.update", "session": msgspec.to_builtins(session)}, session)

    def _found(self, event: Mapping[str, Any], session: SessionFields) -> Iterator[tuple[str, str, str]]:
        own = {name: value for name, value in event.items() if name not in _NAMED_APART}
        kind = event["type"].removeprefix("transcription_")
        yield from _walk(own, f"client.{kind}", "", frozenset())
        for place in ("session", "response"):
            if isinstance(sent := event.get(place), Mapping):
                given = current_names(sent)
                yield from _walk(given, place, place, self._lacking(given, place))
        for path, item in items_in(event):
            if isinstance(item, Mapping):
                yield from _walk(item, f"item.{item.get('type')}", path, _lacking_of_item(item), without=("type",))

    def _lacking(self, given: Mapping[str, Any], place: str) -> frozenset[str]:
        """Return the names of the fields that are not in effect here and now, though they may be elsewhere."""
        conversation = self._conversation
        able, config = conversation.engine.capabilities, conversation.configuration.effective
        audio = _inner(given, "audio")
        heard, spoken = _inner(audio, "input"), _inner(audio, "output")
        detection, transcription = _inner(heard, "turn_detection"), _inner(heard, "transcription")
        language, voice = transcription.get("language"), spoken.get("voice")
        voice = voice.get("id") if isinstance(voice, Mapping) else voice
        limit = _inner(_inner(given, "truncation"), "token_limits").get("post_instructions")
        found = {
            "model": given.get("model") != config.model,
            "parallel_tool_calls": not able.tools,
            "reasoning.effort": "reasoning_effort" not in able.upstream,
            "max_output_tokens": "max_tokens" not in able.sampling | able.sampling_no_ops,
            "temperature": "temperature" not in able.sampling | able.sampling_no_ops,
            "output_modalities": given.get("output_modalities") == ["audio"]
            and OutputModality.AUDIO not in able.output_modalities,
            "audio.input.noise_reduction": config.input_audio.noise_reduction is msgspec.UNSET,
            "audio.input.transcription.language": config.input_audio.language != language,
            "audio.input.transcription.prompt": not able.keywords,
            "audio.input.transcription.keywords": not able.keywords,
            "audio.input.transcription.languages": not able.languages.issuperset(
                map(primary_subtag, transcription.get("languages") or ())
            ),
            "audio.input.transcription.model": not str(transcription.get("model")).startswith(WITHOUT_TURNS),
            "audio.input.turn_detection": config.turn_detection is None,
            "audio.input.turn_detection.type": config.turn_detection is not None
            and config.turn_detection.type != detection.get("type"),
            "audio.input.turn_detection.eagerness": detection.get("type") != "semantic_vad",
            "audio.output.voice": place == "session" and voice != config.voice,
            "audio.output.speed": spoken.get("speed") != config.speed,
            "truncation.token_limits.post_instructions": isinstance(limit, int) and limit > self._max_tokens,
        }
        names = {name for name, is_lacking in found.items() if is_lacking} | set(self._decided)
        return frozenset(f"{place}.{name}" for name in names)


def _lacking_of_item(item: Mapping[str, Any]) -> frozenset[str]:
    place, found = f"item.{item.get('type')}", set()
    if item.get("status") != "completed":
        found.add(f"{place}.status")
    if item.get("object") != "realtime.item":
        found.add(f"{place}.object")
    if item.get("role") == "assistant":
        found.add(f"{place}.content.audio")
    return frozenset(found)


def _walk(
    given: Any, name: str, path: str, lacking: Collection[str], *, without: Collection[str] = ()
) -> Iterator[tuple[str, str, str]]:
    """Yield a code, a message and the path of each field below ``given`` that has no effect, or is unknown."""
    if isinstance(given, list):
        for index, one in enumerate(given):
            yield from _walk(one, name, f"{path}[{index}]", lacking)
        return
    if not isinstance(given, Mapping):
        return
    for key, value in given.items():
        if key in without or value is None or value == [] or value == {}:
            continue
        inner, where = f"{name}.{key}", f"{path}.{key}".removeprefix(".")
        verdict = None if "." in key else verdict_of(inner)  # with dots it might be long, and name another field
        if verdict is None:
            yield "unknown_parameter", f"unknown parameter: {where[:128]}", where[:128]
        elif verdict.not_in_effect or (verdict.otherwise and inner in lacking):
            yield "not_in_effect", f"{where} has no effect: {verdict.reason}", where
        elif with_fields(inner):
            yield from _walk(value, inner, where, lacking)


def _inner(fields: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    inner = fields.get(name)
    return inner if isinstance(inner, Mapping) else {}
