"""Structs of OpenAI's Live sessions: the object ``session`` of ``session.start``, and its ``session_config``.

The structs are strict: as in OpenAI's API, an unknown field is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Final, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta, Struct

from omni_ws.core.chunks import AudioEncoding, AudioFormat
from omni_ws.core.history import Message, estimate_tokens
from omni_ws.errors import InvalidValue, UnsupportedParameter
from omni_ws.wire.realtime_events import RealtimeRefusal, read
from omni_ws.wire.session_config import DEFAULT_MAX_LEAD_MS, place_and_text

#: Entries of a list of permissions, and characters of each.
MAX_PERMITTED: Final = 64
_Kind: TypeAlias = Annotated[str, Meta(min_length=1, max_length=128)]
_RESPONSE_EVENT: Final = "response.event"


class ServerEventSelector(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A type of server events that the page may receive.

    ``response_event`` is set for the type ``response.event`` only: it selects the events that contain this event of the
    Responses API.
    """

    type: _Kind
    response_event: _Kind | None = None


class DataChannel(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The object ``client.data_channel`` of a session over WebRTC: which events the page may send and receive.

    Each field is ``all``, the default, or a list.
    """

    allowed_client_events: Literal["all"] | Annotated[list[_Kind], Meta(max_length=MAX_PERMITTED)] | None = None
    allowed_server_events: (
        Literal["all"] | Annotated[list[ServerEventSelector], Meta(max_length=MAX_PERMITTED)] | None
    ) = None

    def check(self) -> None:
        """Raise InvalidValue for an event selector that lacks a ``response_event``, or must not have one."""
        for selector in self._selectors or ():
            if (selector.type == _RESPONSE_EVENT) is (selector.response_event is None):
                place = "session.client.data_channel.allowed_server_events"
                raise InvalidValue(f"{_RESPONSE_EVENT}, and it alone, needs a response_event", param=place)

    @property
    def _selectors(self) -> list[ServerEventSelector] | None:
        return self.allowed_server_events if isinstance(self.allowed_server_events, list) else None

    @property
    def restricted(self) -> bool:
        """Whether there are events that the page must not send, or does not receive."""
        return self._selectors is not None or isinstance(self.allowed_client_events, list)

    def may_send(self, kind: str) -> bool:
        """Return whether the page may send events of this type."""
        return not isinstance(self.allowed_client_events, list) or kind in self.allowed_client_events

    def may_get(self, event: Mapping[str, Any]) -> bool:
        """Return whether the page may receive this event of the server."""
        selectors = self._selectors
        if selectors is None:
            return True
        nested = event["event"].get("type") if event["type"] == _RESPONSE_EVENT else None
        return any(one.type == event["type"] and one.response_event == nested for one in selectors)


class ClientConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The object ``client`` of a session over WebRTC."""

    data_channel: DataChannel


Kind = TypeVar("Kind")

#: OpenAI's limits, in tokens of ``estimate_tokens``: of instructions, of all of ``input``, and of one append.
MAX_INSTRUCTIONS_TOKENS: Final = 16_384
MAX_INPUT_TOKENS: Final = 8192
MAX_APPEND_TOKENS: Final = 500
MAX_INPUT_MESSAGES: Final = 128

_Name: TypeAlias = Annotated[str, Meta(min_length=1, max_length=256)]
_Delay: TypeAlias = Annotated[int, Meta(ge=0, le=60_000)]


class _Strict(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    pass


# The audio.


class Pcm(_Strict, frozen=True, kw_only=True, tag="audio/pcm"):
    """16-bit samples."""

    rate: Literal[16_000, 24_000]


class Pcmu(_Strict, frozen=True, kw_only=True, tag="audio/pcmu"):
    """µ-law (G.711)."""

    rate: Literal[8000]


class Pcma(_Strict, frozen=True, kw_only=True, tag="audio/pcma"):
    """A-law (G.711)."""

    rate: Literal[8000]


class CustomVoice(_Strict, frozen=True, kw_only=True):
    """A voice by its id."""

    id: _Name


class LiveOutput(_Strict, frozen=True, kw_only=True):
    """The object ``audio.output``."""

    voice: _Name | CustomVoice | None = None


class LiveAudio(_Strict, frozen=True, kw_only=True):
    """The object ``audio``. ``format`` applies to both directions; only a session over WebSocket may set it."""

    format: Pcm | Pcmu | Pcma | None = None
    output: LiveOutput | None = None


# What the model knows.


class InputText(_Strict, frozen=True, kw_only=True):
    """The text of a message of the user or the developer."""

    text: str
    type: Literal["input_text"] | None = None


class OutputText(_Strict, frozen=True, kw_only=True):
    """The text of a message of the assistant."""

    text: str
    type: Literal["text", "output_text"] | None = None


class _InitialItem(_Strict, frozen=True, kw_only=True, tag_field="role"):
    id: str | None = None
    status: Literal["incomplete", "completed"] | None = None
    type: Literal["message"] | None = None


class DeveloperItem(_InitialItem, frozen=True, kw_only=True, tag="developer"):
    """A message that the application has written for the model."""

    content: Annotated[list[InputText], Meta(min_length=1, max_length=1)]


class UserItem(_InitialItem, frozen=True, kw_only=True, tag="user"):
    """A message of the user."""

    content: Annotated[list[InputText], Meta(min_length=1, max_length=1)]


class AssistantItem(_InitialItem, frozen=True, kw_only=True, tag="assistant"):
    """A message of the assistant."""

    content: Annotated[list[OutputText], Meta(min_length=1, max_length=1)]


InitialItem: TypeAlias = DeveloperItem | UserItem | AssistantItem
_ROLES: Final[Mapping[type[InitialItem], str]] = {DeveloperItem: "system", UserItem: "user", AssistantItem: "assistant"}


# Who does the work.


class ClientDelegation(_Strict, frozen=True, kw_only=True, tag="client"):
    """A ``delegation`` to the client: the application does the work that the voice model hands over."""

    acknowledgement_delay_ms: _Delay | None = None


class ResponsesConfig(_Strict, frozen=True, kw_only=True):
    """The object ``responses``: the settings of the second model. An update has only the fields that change."""

    model: _Name | None = None
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    service_tier: str | None = None
    max_output_tokens: Annotated[int, Meta(ge=16, lt=1 << 31)] | None = None


class ResponsesDelegation(_Strict, frozen=True, kw_only=True, tag="responses"):
    """A ``delegation`` to a second model in this server, which does the work that the voice model hands over."""

    responses: ResponsesConfig | None = None
    acknowledgement_delay_ms: _Delay | None = None


class DecisionsDelegation(_Strict, frozen=True, kw_only=True, tag="decisions"):
    """A ``delegation`` to a decision model, which answers questions about the conversation. Not offered here."""

    decisions: dict[str, Any] | None = None
    acknowledgement_delay_ms: _Delay | None = None


Delegation: TypeAlias = ClientDelegation | ResponsesDelegation | DecisionsDelegation


class LiveUpdate(_Strict, frozen=True, kw_only=True):
    """The object ``session`` of a ``session.update``: the fields that may change."""

    delegation: Delegation | None = None
    triggers: list[dict[str, Any]] | None = None


class MediaStart(LiveUpdate, frozen=True, kw_only=True):
    """The object ``session`` of a ``session.start``, or of a session over WebRTC, where the format is negotiated."""

    model: _Name
    instructions: str | None = None
    input: Annotated[list[InitialItem], Meta(max_length=MAX_INPUT_MESSAGES)] | None = None
    audio: LiveAudio | None = None
    client: ClientConfig | None = None
    store: bool | None = None
    safety_identifier: Annotated[str, Meta(max_length=512)] | None = None
    idle_timeout_s: Annotated[int, Meta(ge=0)] | None = None
    wake_policy: dict[str, Any] | None = None

    @property
    def voice(self) -> str | None:
        """The name of the voice; None for the server's default voice."""
        voice = self.audio.output.voice if self.audio and self.audio.output else None
        return voice.id if isinstance(voice, CustomVoice) else voice

    @property
    def format(self) -> Pcm | Pcmu | Pcma:
        """The format of the audio, in both directions."""
        return (self.audio and self.audio.format) or Pcm(rate=24_000)

    def messages(self) -> Iterator[Message]:
        """Yield ``input`` as messages for the history."""
        for item in self.input or ():
            yield Message(_ROLES[type(item)], item.content[0].text)


class ForkStart(_Strict, frozen=True, kw_only=True):
    """The object ``session`` of a fork: fields that replace those of the stored session."""

    audio: LiveAudio | None = None
    delegation: Delegation | None = None
    client: ClientConfig | None = None
    store: bool | None = None


#: Fields that no ``session.update`` changes. The last two belong to media sessions, and are unknown on a WebSocket.
_MEDIA_ONLY: Final = ("idle_timeout_s", "wake_policy")
_FIXED: Final = frozenset(MediaStart.__struct_fields__) - frozenset(LiveUpdate.__struct_fields__)


def read_start(fields: Mapping[str, Any], *, media: bool = False) -> MediaStart:
    """Parse and check the object ``session`` of a ``session.start`` or, with ``media``, of a session over WebRTC.

    Raises an InvalidRequest that names the field, for invalid values and for features that are not offered here.
    """
    for name in () if media else _MEDIA_ONLY:
        if name in fields:
            raise _unknown(f"session.{name}")
    start = strict(fields, MediaStart, "session")
    if media and start.audio is not None and start.audio.format is not None:
        raise _unknown("session.audio.format")
    if not media and start.client is not None:
        raise UnsupportedParameter("session.client is for sessions over WebRTC", param="session.client")
    if start.client is not None:
        start.client.data_channel.check()
    if media and (start.idle_timeout_s is not None or start.wake_policy is not None):
        name = "idle_timeout_s" if start.idle_timeout_s is not None else "wake_policy"
        raise UnsupportedParameter("a session is never paused here", param=f"session.{name}")
    _check_tokens(start.instructions or "", MAX_INSTRUCTIONS_TOKENS, "session.instructions")
    texts = (item.content[0].text for item in start.input or ())
    if sum(map(estimate_tokens, texts)) > MAX_INPUT_TOKENS:
        raise InvalidValue(f"session.input must not exceed {MAX_INPUT_TOKENS} tokens", param="session.input")
    _check_delegation(start)
    if isinstance(start.delegation, ResponsesDelegation):
        responses = start.delegation.responses
        if responses is None or responses.model is None:
            missing = "session.delegation.responses" + ("" if responses is None else ".model")
            raise _missing(missing)
    return start


def read_fork(fields: Mapping[str, Any], stored: MediaStart, *, media: bool = False) -> MediaStart:
    """Return the session ``stored`` with the fields that a fork replaces. ``media``: the fork is over WebRTC.

    The format of the stored audio is not kept, nor, unless ``media``, the stored ``client``. Raises as ``read_start``
    does.
    """
    fork = strict(fields, ForkStart, "session")
    if fork.audio is not None and fork.audio.output is not None:
        raise _unknown("session.audio.output")
    given = {name: value for name in ForkStart.__struct_fields__ if (value := getattr(fork, name)) is not None}
    audio = LiveAudio(
        format=None if media or fork.audio is None else fork.audio.format,
        output=None if stored.audio is None else stored.audio.output,
    )
    if media and fork.audio is not None:
        raise _unknown("session.audio")
    delegation, before = fork.delegation, stored.delegation
    if isinstance(delegation, ResponsesDelegation) and isinstance(before, ResponsesDelegation):
        given["delegation"] = _merged_responses(before, delegation)
    client = None if fork.client is None and not media else fork.client or stored.client
    begun = msgspec.structs.replace(stored, **{**given, "audio": audio, "client": client})
    return read_start(msgspec.to_builtins(begun), media=media)


def _merged_responses(before: ResponsesDelegation, override: ResponsesDelegation) -> ResponsesDelegation:
    """Return ``before`` with the fields that ``override`` sets."""
    old, new = before.responses or ResponsesConfig(), override.responses or ResponsesConfig()
    changed = {name: value for name in new.__struct_fields__ if (value := getattr(new, name)) is not None}
    delay = override.acknowledgement_delay_ms
    return ResponsesDelegation(
        responses=msgspec.structs.replace(old, **changed),
        acknowledgement_delay_ms=before.acknowledgement_delay_ms if delay is None else delay,
    )


def read_update(fields: Mapping[str, Any]) -> LiveUpdate:
    """Parse and check the object ``session`` of a ``session.update``. Raises as ``read_start`` does."""
    for name in fields:
        if name in _FIXED:
            raise immutable(f"session.{name}")
    update = strict(fields, LiveUpdate, "session")
    _check_delegation(update)
    return update


def immutable(param: str) -> RealtimeRefusal:
    """Return the error for a field that a ``session.update`` must not change."""
    return RealtimeRefusal("immutable_field_update", f"'{param}' cannot change after the start.", param=param)


def _check_delegation(session: LiveUpdate) -> None:
    if isinstance(session.delegation, DecisionsDelegation):
        raise UnsupportedParameter("decisions are not offered here", param="session.delegation.type")
    if session.triggers:
        raise UnsupportedParameter("triggers are not offered here", param="session.triggers")


def _check_tokens(text: str, most: int, place: str) -> None:
    if estimate_tokens(text) > most:
        raise InvalidValue(f"{place} must not exceed {most} tokens", param=place)


def checked_append(fields: Mapping[str, Any]) -> tuple[str, str | None]:
    """Return the text of a context append and the id of its delegation, if it has one. Raises an InvalidRequest."""
    for name in ("content", "delegation_id"):
        if name not in fields:
            raise _missing(name)
    content = strict(fields["content"], str, "content")
    if not content.strip():
        raise InvalidValue("content must not be empty", param="content")
    if estimate_tokens(content) > MAX_APPEND_TOKENS:
        message = f"Context append text must not exceed {MAX_APPEND_TOKENS} tokens."
        raise InvalidValue(message, param="content")
    delegation_id = fields["delegation_id"]
    return content, None if delegation_id is None else strict(delegation_id, str, "delegation_id")


def read_audio(fields: Mapping[str, Any]) -> bytes:
    """Return the audio of an event. Raises an InvalidRequest for anything but base64."""
    try:
        return read(fields.get("audio"), bytes, "audio")
    except InvalidValue as error:
        raise invalid_audio(error.message) from None


def invalid_audio(message: str) -> RealtimeRefusal:
    """Return the error for audio that cannot be used."""
    return RealtimeRefusal("invalid_audio", message, param="audio")


def audio_of(given: Pcm | Pcmu | Pcma) -> AudioFormat:
    """Convert a format of the Live API to an AudioFormat."""
    if isinstance(given, Pcm):
        return AudioFormat(AudioEncoding.PCM16, given.rate)
    return AudioFormat(AudioEncoding.PCMU if isinstance(given, Pcmu) else AudioEncoding.PCMA, given.rate)


def live_config(start: MediaStart, *, turn_detection: str, tools: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the ``session_config`` of a session, without its instructions. ``turn_detection`` is its ``type``."""
    audio = audio_of(start.format)
    given = {"format": audio.encoding.value, "sample_rate": audio.sample_rate}
    ducks = audio.encoding is not AudioEncoding.PCMA  # which the server lowers for no client
    return {
        "model": start.model,
        "voice": start.voice,
        "modalities": ["text", "audio"],
        "input_audio": given,
        "output_audio": given,
        "turn_detection": {"type": turn_detection, "interrupt_response": True, "interrupt_resume": True, "duck": ducks},
        "max_lead_ms": DEFAULT_MAX_LEAD_MS,
        "tools": list(tools),
    }


def session_resource(start: MediaStart, *, session_id: str, expires_at: int, voice: str | None) -> dict[str, Any]:
    """Return the session object that the client sees, with the values in effect; ``voice`` is the voice in use."""
    shown: dict[str, Any] = msgspec.to_builtins(start)
    output = {"voice": voice or "default"}
    return {
        "id": session_id,
        "expires_at": expires_at,
        "status": "active",
        **shown,
        "audio": {"format": msgspec.to_builtins(start.format), "output": output},
        "delegation": msgspec.to_builtins(start.delegation or ClientDelegation()),
        "store": bool(start.store),
    }


# Strict reading.

_UNKNOWN: Final = re.compile("Object contains unknown field `(?P<field>[^`]+)`")
_MISSING: Final = "Object missing required field"


def strict(value: Any, kind: type[Kind], place: str) -> Kind:
    """Convert ``value`` to the struct ``kind``; ``place`` is the path of the value, for errors.

    Raises RealtimeRefusal with OpenAI's code unknown_parameter or missing_required_parameter, or InvalidValue.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        path, text = place_and_text(error)
        param = ".".join(filter(None, (place, path))).replace(".[", "[")
        if (unknown := _UNKNOWN.match(text)) is not None:
            raise _unknown(f"{param}.{unknown['field']}") from None
        if text.startswith(_MISSING):
            raise _missing(param) from None
        raise InvalidValue(f"Invalid '{param}': {text[:1].lower()}{text[1:]}.", param=param) from None


def _unknown(param: str) -> RealtimeRefusal:
    return RealtimeRefusal("unknown_parameter", f"Unknown parameter: '{param}'.", param=param)


def _missing(param: str) -> RealtimeRefusal:
    return RealtimeRefusal("missing_required_parameter", f"Missing required parameter: '{param}'.", param=param)
