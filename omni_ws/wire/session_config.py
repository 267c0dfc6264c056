"""SessionConfig: the configuration of a session, its validation, the merging of changes, and its MCP servers."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Container, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType
from msgspec.structs import force_setattr

from omni_ws.core.chunks import (
    MAX_CHANNELS,
    MAX_SAMPLE_RATE,
    MIN_SAMPLE_RATE,
    AudioEncoding,
    AudioFormat,
    InputMode,
    Modality,
    StartTrigger,
    Task,
)
from omni_ws.core.json_values import check_values, primary_subtag
from omni_ws.core.request_input import ALIGNMENT_WINDOW_MS, MAX_ALIGNMENT_WINDOW_MS, Alignment
from omni_ws.core.start_policy import DEFAULT_MIN_LENGTH, ON_END_ONLY, ON_FIRST_CHUNK, StartPolicy
from omni_ws.errors import InvalidFrame, InvalidValue, UnsupportedParameter

SampleRate: TypeAlias = Annotated[int, Meta(ge=MIN_SAMPLE_RATE, le=MAX_SAMPLE_RATE)]
Positive: TypeAlias = Annotated[int, Meta(ge=1)]
#: The speed of a voice, as a factor of its usual speed.
Speed: TypeAlias = Annotated[float, Meta(ge=0.5, le=2)]
NonNegative: TypeAlias = Annotated[float, Meta(ge=0)]
#: The form of a language tag (RFC 5646); the engine checks whether it knows the language.
Language: TypeAlias = Annotated[str, Meta(pattern=r"^[A-Za-z]{2,8}(-[A-Za-z0-9]{1,8})*$", max_length=64)]
#: A name or term that is expected in the speech.
Keyword: TypeAlias = Annotated[str, Meta(pattern=r"\S", max_length=64)]
#: A word or a name, and how it is said.
LexiconWord: TypeAlias = Annotated[str, Meta(pattern=r"\S", max_length=64)]
Pronunciation: TypeAlias = Annotated[str, Meta(pattern=r"\S", max_length=128)]
#: Maps token IDs, in decimal, to values that are added to the logits of these tokens.
LogitBias: TypeAlias = Annotated[
    dict[Annotated[str, Meta(pattern=r"^[0-9]{1,10}$")], Annotated[float, Meta(ge=-100, le=100)]],
    Meta(max_length=1024),
]

#: Turn detection buffers this much audio, so the limit bounds the memory of a session.
MAX_PREFIX_PADDING_MS = 2_000
MAX_SILENCE_DURATION_MS = 10_000
#: The default of ``max_lead_ms`` with turn detection.
DEFAULT_MAX_LEAD_MS = 400
#: The upper limit of ``max_lead_ms`` where the server takes out the echo of what it has sent.
MAX_ECHO_LEAD_MS = 5_000
#: A page of text, some five minutes of speech.
MAX_GREETING_CHARACTERS = 4096
#: The longest silence before the server asks, and after it: an hour.
MAX_IDLE_SEC = 3600
MAX_KEYWORDS = 100
#: About as many languages as Whisper knows.
MAX_LANGUAGES = 100
#: In place of a language: it is to be detected. Eight letters at most could be a tag, but none is registered so.
DETECT_LANGUAGE = "auto"
#: More than any model reads before it transcribes.
MAX_PROMPT_CHARACTERS = 4096
MAX_LEXICON_WORDS = 500
#: The deepest nesting of objects in a configuration; deeper ones could exhaust the stack.
MAX_DEPTH = 32


class InputAudioConfig(Struct, frozen=True, kw_only=True):
    """The default format of input audio, the language spoken in it (RFC 5646), and what is expected in it.

    With ``language`` "auto", or without one, the language is detected, among ``languages`` if there are any. ``prompt``
    is a text that could precede the speech. ``echo`` says who removes the echo of the answers from it: unset, the
    server does not. ``noise_reduction`` applies to turn detection: for a microphone at the mouth or in the room.
    """

    format: AudioEncoding = AudioEncoding.PCM16
    sample_rate: SampleRate = 16_000
    channels: Annotated[int, Meta(ge=1, le=MAX_CHANNELS)] = 1
    language: Language | UnsetType = UNSET
    languages: Annotated[list[Language], Meta(min_length=1, max_length=MAX_LANGUAGES)] | UnsetType = UNSET
    keywords: Annotated[list[Keyword], Meta(max_length=MAX_KEYWORDS)] | UnsetType = UNSET
    prompt: Annotated[str, Meta(max_length=MAX_PROMPT_CHARACTERS)] | UnsetType = UNSET
    echo: Literal["client", "server"] | UnsetType = UNSET
    noise_reduction: Literal["near_field", "far_field"] | UnsetType = UNSET

    @property
    def encoded(self) -> AudioFormat:
        """The format of chunks without a ``format`` of their own."""
        return AudioFormat(self.format, self.sample_rate, self.channels)


class OutputAudioConfig(Struct, frozen=True, kw_only=True):
    """The format of output audio."""

    format: AudioEncoding = AudioEncoding.PCM16
    sample_rate: SampleRate = 24_000

    @property
    def encoded(self) -> AudioFormat:
        """The format in which audio is sent."""
        return AudioFormat(self.format, self.sample_rate)


class SpeechConfig(Struct, frozen=True, kw_only=True):
    """How answers are read aloud. ``lexicon`` maps words to texts that are read in their place."""

    lexicon: Annotated[dict[LexiconWord, Pronunciation], Meta(max_length=MAX_LEXICON_WORDS)] = msgspec.field(
        default_factory=dict
    )


def spoken_language(audio: InputAudioConfig) -> str | None:
    """Return the primary subtag of the input's language; None if the language is to be detected."""
    if isinstance(audio.language, UnsetType) or audio.language.lower() == DETECT_LANGUAGE:
        return None
    return primary_subtag(audio.language)


def spoken_languages(audio: InputAudioConfig) -> frozenset[str]:
    """Return the primary subtags of the languages among which the spoken language is detected; empty for all."""
    return frozenset(() if isinstance(audio.languages, UnsetType) else map(primary_subtag, audio.languages))


def expected_text(audio: InputAudioConfig) -> str:
    """Return the prompt with the keywords as a sentence after it; empty if the client gave neither."""
    keywords = ", ".join(() if isinstance(audio.keywords, UnsetType) else audio.keywords)
    prompt = "" if isinstance(audio.prompt, UnsetType) else audio.prompt
    return f"{prompt} {keywords}.".strip() if keywords else prompt.strip()


StartPolicyName: TypeAlias = Literal["on_first_chunk", "on_end_only", "on_min_length", "on_modality"]


class StartPolicyConfig(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """When a request starts; ``on_min_length`` without a minimum uses its default ones."""

    type: StartPolicyName
    min_audio_ms: NonNegative | None = None
    min_text_chars: Positive | None = None
    min_bytes: Positive | None = None
    min_chunks: Positive | None = None
    min_video_frames: Positive | None = None
    modality: Modality | None = None


TurnDetectionType: TypeAlias = Literal["server_vad", "semantic_vad"]
Eagerness: TypeAlias = Literal["low", "medium", "high", "auto"]
#: The default silence that ends a turn: with ``server_vad``, and the longest with ``semantic_vad``.
VAD_SILENCE_MS = 500
LONGEST_SILENCE_MS: Mapping[Eagerness, float] = {"low": 4000, "medium": 1500, "high": 700, "auto": 1500}
#: The longest silence if the words are a whole sentence, and the voice does not sound finished.
WHOLE_SILENCE_MS: Mapping[Eagerness, float] = {"low": 2000, "medium": 1100, "high": 700, "auto": 1100}
#: The probability that the speaker has finished at which a turn ends soonest (docs/decisions/015).
SURE: Mapping[Eagerness, float] = {"low": 0.95, "medium": 0.9, "high": 0.5, "auto": 0.9}


class TurnDetectionConfig(Struct, frozen=True, kw_only=True):
    """Voice activity detection on the input audio; with ``semantic_vad`` a model tells who has finished."""

    type: TurnDetectionType
    threshold: Annotated[float, Meta(ge=0, le=1)] = 0.5
    prefix_padding_ms: Annotated[float, Meta(ge=0, le=MAX_PREFIX_PADDING_MS)] = 300
    silence_duration_ms: Annotated[float, Meta(ge=0, le=MAX_SILENCE_DURATION_MS)] | UnsetType = UNSET
    eagerness: Eagerness | UnsetType = UNSET
    interrupt_response: bool = True
    interrupt_resume: bool = False
    duck: bool = False
    backchannel: bool = False

    def __post_init__(self) -> None:
        """Set the default silence and, if it applies, the default eagerness."""
        semantic = self.type == "semantic_vad"
        eagerness = self._eagerness
        force_setattr(self, "eagerness", eagerness if semantic else UNSET)
        if self.silence_duration_ms is UNSET:
            force_setattr(self, "silence_duration_ms", LONGEST_SILENCE_MS[eagerness] if semantic else VAD_SILENCE_MS)

    @property
    def silence_ms(self) -> float:
        """The longest silence before a turn ends."""
        assert not isinstance(self.silence_duration_ms, UnsetType)
        return self.silence_duration_ms

    @property
    def whole_silence_ms(self) -> float:
        """The longest silence before the end of a turn whose words are a whole sentence."""
        return WHOLE_SILENCE_MS[self._eagerness]

    @property
    def sure(self) -> float:
        """The probability that the speaker has finished at which the turn ends soonest."""
        return SURE[self._eagerness]

    @property
    def _eagerness(self) -> Eagerness:
        return "auto" if isinstance(self.eagerness, UnsetType) else self.eagerness


class IdlePromptConfig(Struct, frozen=True, kw_only=True):
    """When the server asks whether the user is still there, and when it ends the session; 0 seconds: never.

    ``text`` is what it asks; empty: a sentence in the language of the talk.
    """

    after_sec: Annotated[float, Meta(ge=0, le=MAX_IDLE_SEC)] = 0
    closes_after_sec: Annotated[float, Meta(ge=1, le=MAX_IDLE_SEC)] | None = None
    text: Annotated[str, Meta(max_length=MAX_GREETING_CHARACTERS)] = ""


class SamplingConfig(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The sampling parameters; null is the engine's default."""

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=1 << 31)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    max_tokens: Annotated[int, Meta(ge=1, lt=1 << 31)] | None = None
    stop: str | list[str] | None = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None
    logit_bias: LogitBias | None = None


class SessionConfig(Struct, frozen=True, kw_only=True, weakref=True):
    """The effective configuration of a session, by the names of the wire."""

    model: str | None = None
    voice: str | None = None
    speed: Speed = 1.0
    instructions: str = ""
    greeting: Annotated[str, Meta(max_length=MAX_GREETING_CHARACTERS)] = ""
    modalities: list[Literal["text", "audio"]] = msgspec.field(default_factory=lambda: ["text", "audio"])
    input_audio: InputAudioConfig = InputAudioConfig()
    output_audio: OutputAudioConfig = OutputAudioConfig()
    tts: SpeechConfig = SpeechConfig()
    start_policy: StartPolicyName | StartPolicyConfig = "on_min_length"
    after_start: InputMode = InputMode.EXTEND
    out_of_order: Literal["buffer", "reject"] = "buffer"
    alignment: Alignment = Alignment.ARRIVAL
    alignment_window_ms: Annotated[float, Meta(ge=0, le=MAX_ALIGNMENT_WINDOW_MS)] = ALIGNMENT_WINDOW_MS
    turn_detection: TurnDetectionConfig | None = None
    sampling: SamplingConfig = SamplingConfig()
    stage_sampling: dict[str, dict[str, Any]] = msgspec.field(default_factory=dict)
    stage_params: dict[str, dict[str, Any]] = msgspec.field(default_factory=dict)
    history: bool = True
    history_summary: bool = True
    overlap: Literal["wait", "interrupt"] = "wait"
    task: Task = Task.CHAT
    tools: list[dict[str, Any]] = msgspec.field(default_factory=list)
    tool_choice: str | dict[str, Any] | None = None
    tool_filler: bool = True
    idle_prompt: IdlePromptConfig | None = None
    max_lead_ms: NonNegative | None = None


Fields = TypeVar("Fields", bound=Struct)

FIELDS = frozenset(SessionConfig.__struct_fields__)
_ERROR_PATH = re.compile(r" - at (?:`key` in )?`\$\.?(?P<path>[^`]*)`$")
_MAX_ERROR_TEXT = 200
_MISSING_FIELD = re.compile(r"Object missing required field `(?P<field>[^`]+)`")


def merge(base: Mapping[str, Any], patch: Mapping[str, Any], *, depth: int = MAX_DEPTH) -> dict[str, Any]:
    """Merge ``patch`` into ``base`` recursively, and return the result; null removes a key, which restores its default.

    Raises InvalidValue for objects nested more than ``depth`` deep.
    """
    if not depth:
        raise InvalidValue(f"objects must not be nested more than {MAX_DEPTH} levels deep")
    merged = dict(base)
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, Mapping):
            below = merged.get(key)
            merged[key] = merge(below if isinstance(below, Mapping) else {}, value, depth=depth - 1)
        else:
            merged[key] = value
    return merged


def effective(overrides: Mapping[str, Any]) -> SessionConfig:
    """Return the configuration with defaults for all fields that ``overrides`` does not set.

    Unknown fields are ignored. Raises InvalidValue, naming the field.
    """
    config = converted(overrides, SessionConfig)
    start_policy(config)
    return config


def outline(config: SessionConfig) -> SessionConfig:
    """Return the configuration without fields that may be long, for a request that has ended."""
    audio = msgspec.structs.replace(config.input_audio, keywords=UNSET, prompt=UNSET)
    return msgspec.structs.replace(
        config,
        instructions="",
        greeting="",
        idle_prompt=None,
        input_audio=audio,
        tts=SpeechConfig(),
        tools=[],
        tool_choice=None,
        stage_params={},
        stage_sampling={},
    )


def has_field(path: str) -> bool:
    """Return whether ``session_config`` has the field ``path``, such as ``sampling.max_tokens``.

    Clients use the function to detect typos. Any path below a field without fixed fields (``stage_params.talker``)
    counts as a field.
    """
    kinds: list[msgspec.inspect.Type] = [msgspec.inspect.type_info(SessionConfig)]
    for name in path.split("."):
        groups = [kind for kind in kinds if isinstance(kind, msgspec.inspect.StructType)]
        if not groups:
            return any(isinstance(kind, msgspec.inspect.DictType) for kind in kinds)
        found = [field.type for group in groups for field in group.fields if field.encode_name == name]
        if not found:
            return False
        kinds = []
        for kind in found:
            kinds += kind.types if isinstance(kind, msgspec.inspect.UnionType) else (kind,)
    return True


def converted(fields: Any, kind: type[Fields], *, place: str = "", strict: bool = True) -> Fields:
    """Convert ``fields``, found at the path ``place``, to the struct ``kind``. Raises InvalidValue, naming the field.

    Unless ``strict``, numbers and booleans may be strings, as in an HTML form.
    """
    try:
        return msgspec.convert(fields, kind, strict=strict)
    except msgspec.ValidationError as error:
        refusal = invalid_value(error)
        if place:
            refusal.about(param=place if refusal.param is None else f"{place}.{refusal.param}")
        raise refusal from None


def invalid_value(error: msgspec.ValidationError) -> InvalidValue:
    """Convert a msgspec error to an InvalidValue."""
    path, text = place_and_text(error)
    if len(text) > _MAX_ERROR_TEXT:  # it may quote a long value
        text = text[:_MAX_ERROR_TEXT] + "…"
    return InvalidValue(f"{path}: {text}" if path else text, param=path or None)


def place_and_text(error: msgspec.ValidationError) -> tuple[str, str]:
    """Return the path of the field of a msgspec error, "" for the whole value, and the message without the path."""
    path, text = "", str(error)
    if (found := _ERROR_PATH.search(text)) is not None:
        path = found["path"].replace("[...]", "")
        text = text[: found.start()]
    if (missing := _MISSING_FIELD.match(text)) is not None:
        path = f"{path}.{missing['field']}".lstrip(".")
    return path, text


def start_policy(config: SessionConfig) -> StartPolicy:
    """Return the start policy of a configuration. Raises InvalidValue for ``on_modality`` without a modality.

    Minimums that do not apply to the policy are ignored, since merging keeps them when the type changes.
    """
    wanted = config.start_policy
    if isinstance(wanted, str):
        wanted = StartPolicyConfig(type=wanted)
    match wanted.type:
        case "on_first_chunk":
            return ON_FIRST_CHUNK
        case "on_end_only":
            return ON_END_ONLY
        case "on_modality":
            if wanted.modality is None:
                raise InvalidValue("on_modality needs a modality", param="start_policy.modality")
            return StartPolicy(
                trigger=StartTrigger.MODALITY, modality=wanted.modality, min_audio_ms=wanted.min_audio_ms
            )
    minimums = StartPolicy(
        min_audio_ms=wanted.min_audio_ms,
        min_text_chars=wanted.min_text_chars,
        min_bytes=wanted.min_bytes,
        min_chunks=wanted.min_chunks,
        min_video_frames=wanted.min_video_frames,
    )
    return DEFAULT_MIN_LENGTH if minimums == StartPolicy() else minimums


# MCP servers as clients name them: entries ``{"type": "mcp", …}`` of ``tools``, and the names of their tools.


#: Servers of one session.
MAX_SERVERS: Final = 8
MAX_HEADERS: Final = 32
MAX_CREDENTIAL_CHARACTERS: Final = 8192
#: The longest name that models may call.
MAX_NAME_CHARACTERS: Final = 64
_TOOL_CHOICES: Final = 1024

_Name: TypeAlias = Annotated[str, Meta(max_length=256)]
_Names: TypeAlias = Annotated[list[_Name], Meta(max_length=_TOOL_CHOICES)]
_Credential: TypeAlias = Annotated[str, Meta(max_length=MAX_CREDENTIAL_CHARACTERS)]
_FOREIGN: Final = re.compile(r"[^a-zA-Z0-9_-]")
_HEADER_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,128}")
#: Header fields that the connection itself sets.
_OWN_HEADERS: Final = frozenset(
    {"host", "content-length", "transfer-encoding", "connection", "upgrade", "te", "trailer", "accept-encoding"}
    | {"content-type", "accept", "mcp-session-id", "mcp-protocol-version", "last-event-id", "proxy-authorization"}
)


class ToolFilter(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A filter on the tools of an MCP server, by name and by whether a tool declares that it only reads.

    A field that is None matches every tool.
    """

    tool_names: _Names | None = None
    read_only: bool | None = None

    def has(self, name: str, *, reads_only: bool) -> bool:
        """Return whether the filter matches a tool. ``reads_only``: the tool declares that it only reads."""
        named = self.tool_names is None or name in self.tool_names
        return named and (self.read_only is None or self.read_only == reads_only)


class ApprovalFilter(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The tools whose calls always need approval, and those whose calls never need it."""

    always: ToolFilter | None = None
    never: ToolFilter | None = None


class McpServer(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An entry ``{"type": "mcp"}`` of ``tools``. Its ``repr`` has no credentials.

    ``require_approval`` is "always" unless the client says otherwise.
    """

    type: Literal["mcp"]
    server_label: Annotated[str, Meta(pattern=r"^[a-zA-Z][a-zA-Z0-9_-]{0,63}$")]
    server_url: Annotated[str, Meta(max_length=2048)] | None = None
    authorization: _Credential | None = None
    headers: Annotated[dict[str, _Credential], Meta(max_length=MAX_HEADERS)] | None = None
    allowed_tools: _Names | ToolFilter | None = None
    require_approval: Literal["always", "never"] | ApprovalFilter | None = None
    server_description: Annotated[str, Meta(max_length=4096)] | None = None
    connector_id: Any = None
    tunnel_id: Any = None
    defer_loading: bool | None = None

    def __repr__(self) -> str:
        return f"McpServer({self.server_label!r})"

    @property
    def request_headers(self) -> dict[str, str]:
        """The client's header fields for each HTTP request to the MCP server, with the credentials."""
        sent = dict(self.headers or {})
        if self.authorization is not None:
            sent["Authorization"] = f"Bearer {self.authorization}"
        return sent

    def allows(self, name: str, *, reads_only: bool) -> bool:
        """Return whether the model may call a tool. ``reads_only``: see ``ToolFilter.has``."""
        allowed = self.allowed_tools
        if isinstance(allowed, ToolFilter):
            return allowed.has(name, reads_only=reads_only)
        return allowed is None or name in allowed

    def asks(self, name: str, *, reads_only: bool) -> bool:
        """Return whether calls of a tool need approval. They do if both filters match the tool, or neither does.

        ``reads_only``: see ``ToolFilter.has``.
        """
        wanted = self.require_approval
        if isinstance(wanted, ApprovalFilter):
            if wanted.always is not None and wanted.always.has(name, reads_only=reads_only):
                return True
            return wanted.never is None or not wanted.never.has(name, reads_only=reads_only)
        return wanted != "never"


#: The fields of an entry that are never shown, recorded or stored.
CREDENTIALS: Final = ("authorization", "headers")

#: What is recorded in place of a message whose credentials cannot be told from the rest.
REPLACED: Final = b"null"
#: A key of JSON whose value may hold credentials, as it stands or in a form; any key with escapes may be one.
_CREDENTIAL_KEY: Final = re.compile(
    rb'(?:"|%22)(?:authorization|headers|server_url|[a-z_]*\\u00[0-9A-Za-z_\\]*)(?:"|%22)\s*(?::|%3[Aa]|$)'
)


def has_credential_key(data: bytes | bytearray) -> bool:
    """Return whether ``data``, perhaps incomplete JSON, has a key whose value may be credentials of an MCP server."""
    return _CREDENTIAL_KEY.search(data) is not None


def is_mcp(tool: Any) -> bool:
    """Return whether an entry of ``tools`` names an MCP server."""
    return isinstance(tool, Mapping) and tool.get("type") == "mcp"


def without_credentials(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return an MCP entry of ``tools`` without credentials, to be shown or stored; the URL loses its query."""
    shown = {name: value for name, value in tool.items() if name not in CREDENTIALS}
    if isinstance(url := shown.get("server_url"), str):
        shown["server_url"] = url.partition("?")[0].partition("#")[0]
    return shown


def scrubbed(message: bytes) -> bytes:
    """Return a JSON message for a recording, without the credentials of MCP servers.

    A message with a key of credentials is encoded anew, which drops all but the last value of a repeated key; a message
    that is not JSON is replaced as a whole.
    """
    if not has_credential_key(message):
        return message
    try:
        check_values(message)
        content = msgspec.json.decode(message)
    except (InvalidFrame, msgspec.DecodeError, UnicodeError, RecursionError):
        return REPLACED
    waiting = [content]
    while waiting:
        inside = waiting.pop()
        if isinstance(inside, dict):
            if is_mcp(inside) or not inside.keys().isdisjoint(("server_label", "server_url")):
                kept = without_credentials(inside)
                inside.clear()
                inside.update(kept)
            waiting += inside.values()
        elif isinstance(inside, list):
            waiting += inside
    return msgspec.json.encode(content)


def read_servers(tools: Sequence[Any], *, known: Container[str]) -> list[McpServer]:
    """Return the MCP servers among ``tools``. An entry whose label is ``known`` may omit the URL.

    Raises InvalidValue and UnsupportedParameter, naming the field, never its value.
    """
    found: dict[str, McpServer] = {}
    for index, tool in enumerate(tools):
        if not is_mcp(tool):
            continue
        place = f"tools[{index}]"
        _refuse_unsupported(tool, place)
        try:
            server = converted(tool, McpServer, place=place)
        except InvalidValue as error:  # whose text may quote a value
            path = error.param or place
            raise InvalidValue(f"{path} is not valid for an MCP server", param=path) from None
        label = server.server_label
        if label in found:
            raise InvalidValue(f"duplicate server_label {label!r}", param=f"{place}.server_label")
        if server.server_url is None and label not in known:
            raise InvalidValue("an MCP server needs a server_url", param=f"{place}.server_url")
        _check_headers(server, place)
        found[label] = server
        if len(found) > MAX_SERVERS:
            raise InvalidValue(f"at most {MAX_SERVERS} MCP servers per session", param="tools")
    return list(found.values())


def _refuse_unsupported(tool: Mapping[str, Any], place: str) -> None:
    if tool.get("server_url") is not None and tool.get("connector_id") is not None:
        raise InvalidValue("server_url and connector_id exclude each other", param=f"{place}.connector_id")
    for name in ("connector_id", "tunnel_id"):
        if tool.get(name) is not None:
            raise UnsupportedParameter(
                f"{name} is not supported on this server; name the MCP server by server_url", param=f"{place}.{name}"
            )
    if tool.get("allowed_callers") is not None:
        raise UnsupportedParameter("allowed_callers is not supported", param=f"{place}.allowed_callers")
    if tool.get("defer_loading"):
        raise UnsupportedParameter(
            "defer_loading is not supported: the tools of all servers are offered", param=f"{place}.defer_loading"
        )


def _check_headers(server: McpServer, place: str) -> None:
    for name, value in server.request_headers.items():
        field = "authorization" if server.authorization is not None and name == "Authorization" else "headers"
        printable = value.isascii() and value.isprintable()
        if not _HEADER_NAME.fullmatch(name) or not printable or name.lower() in _OWN_HEADERS:
            raise InvalidValue("a header field has an invalid name or value", param=f"{place}.{field}")
    given = [name.lower() for name in server.headers or ()]
    if server.authorization is not None and "authorization" in given:
        message = "authorization and headers.Authorization exclude each other"
        raise InvalidValue(message, param=f"{place}.authorization")
    if len(set(given)) < len(given):
        raise InvalidValue("a header field is given twice", param=f"{place}.headers")


def offered_name(label: str, tool: str, taken: Container[str]) -> str:
    """Return the name under which the tool of an MCP server is offered to the model; it is not in ``taken``."""
    plain = name = _FOREIGN.sub("_", f"{label}__{tool}")
    tries = 0
    while len(name) > MAX_NAME_CHARACTERS or name in taken or (not tries and plain != f"{label}__{tool}"):
        digest = hashlib.sha256(f"{label}\0{tool}\0{tries}".encode()).hexdigest()[:8]
        name = f"{plain[: MAX_NAME_CHARACTERS - 9]}_{digest}"
        tries += 1
    return name
