"""The table of settings: names, types, bounds, defaults, descriptions, short flags, and the engines that use each.

The configuration file, the flags, the variables, ``--help`` and docs/configuration.md are derived from it
(``settings``). ``ServerConfig`` is the whole configuration; its groups come first, since their defaults are part of it.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, get_args

import msgspec
from pydantic import BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from omni_ws.config.parts import (
    AUTO,
    ENGINES,
    FRONTS,
    OWN,
    VLLM_PARTS,
    AsrConfig,
    LlmConfig,
    TtsConfig,
    registered,
)
from omni_ws.config.values import (
    MEMORY,
    MIB,
    Address,
    Count,
    Key,
    Network,
    Port,
    Seconds,
    SecondsOrOff,
    Section,
    Size,
    StoreAddress,
    Text,
    Whole,
    literal_address,
    setting,
)

# What clients send and get

# Without on_modality, which needs the name of a modality.
StartPolicyName = Literal["on_first_chunk", "on_end_only", "on_min_length"]

_Minimum = Annotated[int, Field(ge=1)]
_Language = Annotated[str, Field(pattern=r"^[A-Za-z]{2,3}(-[A-Za-z0-9]{1,8})*$")]
_MODALITY_MISSING: Final = 'on_modality needs a modality, in an object: {type = "on_modality", modality = "audio"}'


class _StartPolicyObject(Section):
    """A start policy with its minimums, as in ``session_config``."""

    model_config = ConfigDict(strict=True)

    type: Literal["on_first_chunk", "on_end_only", "on_min_length", "on_modality"]
    min_audio_ms: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    min_text_chars: _Minimum | None = None
    min_bytes: _Minimum | None = None
    min_chunks: _Minimum | None = None
    min_video_frames: _Minimum | None = None
    modality: Literal["audio", "text", "video", "image"] | None = None


def _checked_policy(policy: object) -> object:
    """Validate a start policy: a name, or an object, which may be written as JSON. Raises ValueError."""
    if isinstance(policy, str) and policy.lstrip().startswith("{"):
        policy = msgspec.json.decode(policy)
    names = get_args(StartPolicyName)
    if not isinstance(policy, dict):
        if policy == "on_modality":
            raise ValueError(_MODALITY_MISSING)
        if policy not in names:
            raise ValueError(f"is neither an object nor one of {', '.join(names)}")
        return policy
    try:
        checked = _StartPolicyObject.model_validate(policy)
    except ValidationError as error:
        reasons = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors(include_url=False)]
        raise ValueError("; ".join(reasons)) from None
    if checked.type == "on_modality" and checked.modality is None:
        raise ValueError(_MODALITY_MISSING)
    return checked.model_dump(exclude_none=True)


#: A start policy by name, or as an object as in ``session_config``.
StartPolicySetting = Annotated[StartPolicyName | dict[str, Any], BeforeValidator(_checked_policy)]
AfterStart = Literal["extend", "snapshot"]


class StreamingInputConfig(Section):
    """Streaming input: the native WebSocket, and Mode A and Mode B over HTTP."""

    enabled: bool = setting("Serve streaming input; if off, its routes answer 404.", True)
    session_timeout_sec: Seconds = setting("Close a session whose client has been silent for this long.", 300)
    max_payload_per_session: Size = setting(
        "Input held for one request (WebSocket) or one session (Mode A, Mode B); and the output log of a Mode B "
        "session. All that a session holds: twice this and max_output_bytes.",
        64 * MIB,
    )
    max_total_payload_per_session: Size | None = setting(
        "All input of one session (Mode B) or one request (Mode A, WebSocket), including what the engine has "
        "consumed; unset: no limit."
    )
    max_chunk_bytes: Size = setting("Largest decoded payload of one input chunk.", 4 * MIB)
    start_policy: StartPolicySetting = setting(
        "When a request starts, unless the client names a policy; or a whole object (a table, or JSON) such as "
        '`{"type": "on_min_length", "min_audio_ms": 800}` or `{"type": "on_modality", "modality": "audio"}`, into '
        "which an object of the client is merged.",
        "on_min_length",
    )
    force_start_policy: StartPolicyName | None = setting("Start policy of every request, overriding the client's.")
    after_start: AfterStart | None = setting(
        "Effect of chunks after the start; unset: extend if the engine supports it."
    )
    alignment_window_ms: SecondsOrOff = setting(
        "With `alignment: timestamp`, how long a chunk after the start waits for input of other modalities whose "
        "times are further back than this, unless the client says; 0: not at all.",
        200,
        le=2000,
    )
    reorder_window_chunks: Count = setting("Chunks kept ahead of a gap.", 256)
    reorder_timeout_sec: Seconds = setting("Time that a gap may stay open.", 10)
    resume_grace_sec: SecondsOrOff = setting(
        "Grace period in which a session without a connection can be resumed; 0: none.", 30
    )
    write_timeout_sec: Seconds = setting(
        "Close a session whose client reads nothing for this long while max_output_bytes are waiting.", 30
    )
    max_lead_ms: Whole | None = setting("Lead of audio over its playback; unset: not paced (with turn detection: 400).")
    idle_prompt_sec: SecondsOrOff = setting(
        "Silence after which a session over the native WebSocket or by telephone asks once whether the user is still "
        "there, unless the client says (`idle_prompt`); 0: never.",
        0,
        le=3600,
    )
    idle_close_sec: SecondsOrOff = setting("Further silence after which it ends the session; 0: never.", 0, le=3600)
    max_pending_requests: Count = setting("Requests of a session that may wait for the engine.", 4)
    max_output_bytes: Size = setting(
        "Size of a session's outbox, for a client that reads slowly; and of its journal, for a resume.", 8 * MIB
    )
    permessage_deflate: bool = setting("Offer WebSocket compression, which gains nothing for audio.", False)
    ping_interval_sec: SecondsOrOff = setting("Interval of pings, also to satellites of Wyoming; 0: none.", 20)
    ping_timeout_sec: SecondsOrOff = setting("Time in which a pong has to arrive; 0: unlimited.", 20)


class SessionsConfig(Section):
    """Where sessions are kept, so that another process can go on with them."""

    store: Text = setting(
        "Store of sessions: `memory` (they end with the process); `sqlite:PATH`, a file for the processes of one "
        "machine (`?fsync=1`: what is acknowledged survives a crash of the machine, too); or a server for many "
        "machines, `redis://`, `rediss://`, `valkey://` or `valkeys://` with `user:password@host:port/0`, and "
        "`?cluster=1` or `?sentinel=NAME`.",
        MEMORY,
        often=True,
    )
    store_key: Key | None = setting(
        "Key that encrypts what is stored: 32 bytes in base64 (`openssl rand -base64 32`), or a file with such keys, a "
        "line each, of which the first encrypts. Unset: nothing is encrypted."
    )
    store_max_bytes: Size = setting(
        "Size of the store: of the file with sqlite; on a server, of sessions that no living process has. The oldest "
        "of these are deleted first.",
        1024 * MIB,
    )
    store_max_age_sec: Seconds = setting(
        "Age at which a session that no living process has is deleted from the store.", 24 * 3600
    )
    store_slow_sec: Seconds = setting(
        "Without a commit for this long, nothing waits for the store, and sessions are not kept until it is faster.",
        0.25,
    )

    @field_validator("store")
    @classmethod
    def _store_is_known(cls, store: str) -> str:
        StoreAddress.parse(store)
        return store

    @property
    def address(self) -> StoreAddress:
        """The store, parsed."""
        return StoreAddress.parse(self.store)


class LimitsConfig(Section):
    """Limits of the server as a whole."""

    max_sessions: Count = setting("Live sessions; another one is refused with engine_overloaded.", 1000, often=True)
    max_connections: Count = setting(
        "Open connections, including WebSockets; another one is answered 503 and closed.", 4096
    )
    max_held_bytes: Size = setting(
        "Budget of input, decoded media, output, settings and history held for all sessions together.", 1024 * MIB
    )
    max_history_tokens: Whole = setting(
        "History that is context of the next request: a word counts 1 (in scripts without blanks, a character; at "
        "least 1 for every 16 characters), a second of audio 25.",
        4096,
    )


# HTTP, and the hosts from which media may be fetched

DEFAULT_PORTS: Final = {"https": 443, "http": 80}

_HOST_NAME: Final = re.compile(r"[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*")
_HOST_AND_PORT: Final = re.compile(r"(?P<host>\[[^\]]*\]|[^:\[\]]*)(?::(?P<port>\d{1,5}))?")
#: The well-known prefix of NAT64 (RFC 6052).
_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")
#: What ``is_global`` takes for public, in some versions of Python or in all: NAT64 within a network (RFC 8215), IPv4 in
#: IPv6 (RFC 4291, 2.5.5.1; RFC 2765), and site-local addresses (RFC 3879).
_NOT_PUBLIC: Final = tuple(
    ipaddress.IPv6Network(text) for text in ("64:ff9b:1::/48", "::/96", "::ffff:0:0:0/96", "fec0::/10")
)


@dataclass(frozen=True, slots=True)
class MediaDomain:
    """An entry of ``http.media_domains``: a host name or a network.

    ``port`` is None for the default port of the scheme.
    """

    name: str | None
    network: Network | None
    port: int | None
    plain_http: bool

    @classmethod
    def parse(cls, entry: str) -> MediaDomain:
        """Parse ``example.org``, ``example.org:8443``, ``192.0.2.7``, ``10.0.0.0/8`` or ``[::1]:80``.

        A prefix ``http://`` allows plain HTTP as well; ``https://`` is the default. Raises ValueError.
        """
        scheme, separator, host = entry.strip().lower().rpartition("://")
        if separator and scheme not in DEFAULT_PORTS:
            raise ValueError(f"{entry!r}: the scheme must be https or http")
        match = _HOST_AND_PORT.fullmatch(host)
        # An IPv6 address without brackets has colons, and no port.
        name, port = (match["host"], match["port"]) if match is not None else (host, None)
        network, name = _network(name), name.rstrip(".")
        if (network is None and not _HOST_NAME.fullmatch(name)) or (port and not 0 < int(port) < 65536):
            raise ValueError(f"{entry!r} is not a host such as example.org, example.org:8443 or 10.0.0.0/8")
        return cls(name if network is None else None, network, int(port) if port else None, scheme == "http")

    def lists(self, scheme: str, host: str, port: int) -> bool:
        """Return whether the entry covers this scheme, host and port."""
        if (scheme == "http" and not self.plain_http) or port != (self.port or DEFAULT_PORTS.get(scheme)):
            return False
        if self.name is not None:
            return host == self.name
        address = literal_address(host)
        return address is not None and self.holds(address)

    def holds(self, address: Address) -> bool:
        """Return whether the entry is a network that contains this address."""
        return self.network is not None and address in self.network


class MediaDomains:
    """The entries of ``http.media_domains``: the hosts that media may be fetched from; without entries, none."""

    def __init__(self, entries: Iterable[str]) -> None:
        """Parse the entries. Raises ValueError for an invalid one."""
        self._domains = tuple(MediaDomain.parse(entry) for entry in entries)

    def __bool__(self) -> bool:
        return bool(self._domains)

    def allow_url(self, scheme: str, host: str, port: int) -> bool:
        """Return whether a URL with this scheme, host and port may be fetched."""
        host = host.lower().rstrip(".")
        return any(domain.lists(scheme, host, port) for domain in self._domains)

    def allow_address(self, address: str) -> bool:
        """Return whether a listed host may resolve to ``address``.

        The address must be public, or in a listed network; otherwise a name could lead into the private network (SSRF).
        """
        parsed = literal_address(address)
        if parsed is None:
            return False
        if any(domain.holds(parsed) for domain in self._domains):
            return True
        if any(parsed in network for network in _NOT_PUBLIC):
            return False
        return all(one.is_global and not one.is_multicast for one in (parsed, _embedded(parsed)))


def _network(text: str) -> Network | None:
    try:
        return ipaddress.ip_network(text.strip("[]"), strict=False)
    except ValueError:
        return None


def _embedded(address: Address) -> Address:
    """Return the IPv4 address that is embedded in a NAT64, 6to4 or Teredo address; else ``address`` itself."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.sixtofour or (address.teredo[1] if address.teredo else address)


class HttpConfig(Section):
    """HTTP on the same port."""

    header_timeout_sec: Seconds = setting("Time in which a request head has to arrive.", 10)
    body_timeout_sec: Seconds = setting(
        "Time between two reads of a request body (for Mode A: session_timeout_sec).", 30
    )
    min_body_bytes_per_sec: Whole = setting(
        "Minimum average rate of a request body, after body_timeout_sec; does not apply to streamed input, which is "
        "as slow as speech; 0: none.",
        500,
    )
    keepalive_timeout_sec: Seconds = setting("Time after which an idle connection is closed.", 75)
    max_header_bytes: Size = setting("Largest request head.", 32 * 1024)
    max_body_bytes: Size = setting("Largest request body, except streamed input.", 64 * MIB)
    media_root: Path | None = setting(
        "Folder whose files chat requests may use as images, audio or video; unset: none."
    )
    media_domains: tuple[Text, ...] = setting(
        "Hosts from which images, audio and video of chat requests and Realtime sessions may be fetched, by https "
        "unless the entry begins with http://; private addresses only if listed as such or by network (10.0.0.0/8).",
        (),
    )
    media_timeout_sec: Seconds = setting("Time in which all media of a request have to be fetched.", 20)

    phone_url: Text | None = setting(
        "Address by which phones open the page, which shows it as a QR code, to clients with a key if there are keys; "
        "--lan sets it. Unset: no code."
    )

    @field_validator("phone_url")
    @classmethod
    def _check_phone_url(cls, url: str | None) -> str | None:
        if url is not None and (not url.startswith(("https://", "http://")) or "#" in url or len(url) > 1000):
            raise ValueError("must be an address such as https://192.168.1.20:8443/, at most 1,000 characters, no #")
        return url

    @field_validator("media_domains")
    @classmethod
    def _check_media_domains(cls, entries: tuple[str, ...]) -> tuple[str, ...]:
        MediaDomains(entries)
        return entries


# Engines


class FakeConfig(Section):
    """The fake engine, which echoes its input: for tests of clients."""

    first_chunk_delay_ms: Whole = setting("Delay of the first output of a request.", 0)
    chunk_interval_ms: Whole = setting("Interval of outputs.", 0)
    chunk_ms: Count = setting("Length of audio in an output chunk.", 100)
    fail_after_chunks: Whole | None = setting("Fail each request after this many outputs; unset: never.")
    reply: str | None = setting("Answer with this text instead of an echo.")


class VoiceChoice(StrEnum):
    """Synthesisers of the embedded engine."""

    AUTO = "auto"
    HIBARI = "hibari"
    KOKORO = "kokoro"
    ESPEAK = "espeak"
    NONE = "none"


class EmbeddedSettings(Section):
    """The embedded parts: the best ears and the best voice that start on this machine, without a GPU."""

    max_recognisers: Count | None = setting("Requests with speech at once; unset: what the cores carry.")
    voice: VoiceChoice = setting("Synthesiser; auto: hibari, else espeak, else none.", VoiceChoice.AUTO, often=True)
    default_voice: Text | None = setting("Voice unless the client names one; unset: the synthesiser's default.")
    turn_path: Path | None = setting(
        "Network of Smart Turn v3 (ONNX file) for `semantic_vad`, with every engine; unset: that of `omni-ws weights "
        "fetch smart-turn`, if it is there."
    )


class VllmConfig(Section):
    """The vLLM engine."""

    model: Text | None = setting("Model of the Thinker: a name or a folder.", short="--model", often=True)
    args: dict[str, Any] = setting("vLLM's engine arguments for the Thinker.", {}, often=True)
    tool_parser: Text | None = setting(
        "vLLM's parser for tool calls of this model (hermes, llama3_json …); unset: no tools.", often=True
    )
    reasoning_parser: Text | None = setting(
        "vLLM's parser for what the model thinks (qwen3, deepseek_r1 …); unset: it is part of the text."
    )
    chat_template: Path | None = setting("Chat template (Jinja file); unset: that of the checkpoint.")
    chat_template_kwargs: dict[str, Any] = setting(
        "Arguments of the chat template, such as enable_thinking; requests may set others.", {}
    )
    audio_segment_ms: Count = setting(
        "Length of segments in which ongoing speech reaches the model; each ends at the next pause.", 3000
    )
    talker: Text | None = setting("Model of the Talker, which synthesises speech.", often=True)
    talker_profile: Text | None = setting("Profile that connects Thinker and Talker.")
    talker_args: dict[str, Any] = setting("vLLM's engine arguments for the Talker.", {})
    omni_speech: bool = setting(
        "Whether an omni model (Qwen3-Omni, Qwen2.5-Omni) speaks with its own voice; else it writes alone, which "
        "saves the memory of its Talker.",
        True,
    )
    omni_sessions: Count = setting("Number of answers that an omni model's own voice can speak at the same time.", 16)
    omni_positions: Count = setting(
        "Length of prompt and speech of such an answer together, in tokens and codec frames; each place takes memory "
        "on the GPU.",
        8192,
    )
    omni_kept_bytes: Size = setting(
        "Memory for what an omni model's voice has read of conversations that go on; the oldest is dropped first, and "
        "computed again when its conversation goes on.",
        1024 * MIB,
    )


#: The engine that uses some settings of ``RemoteConfig``: a part on a server has settings of its own for them.
_REMOTE_ENGINE: Final = ("remote",)
_SAMPLING: Final = (
    *("temperature", "top_p", "max_tokens", "stop", "seed", "presence_penalty", "frequency_penalty"),
    *("top_k", "min_p", "repetition_penalty"),
)


class RemoteConfig(Section):
    """The remote engine: upstream servers with the OpenAI API."""

    upstreams: tuple[Text, ...] = setting(
        "Base URLs (`http://host:8000/v1`) of the upstream servers, which serve the same model.",
        (),
        often=True,
        of=_REMOTE_ENGINE,
    )
    model: Text | None = setting(
        "Model name at the upstreams; unset: the first that the first upstream lists.", of=_REMOTE_ENGINE
    )
    api_key: Key | None = setting("API key for the upstreams.", often=True, of=_REMOTE_ENGINE)
    input_modalities: tuple[Text, ...] = setting(
        "Input of the model: text, audio, image, video. No upstream reports it.",
        ("text",),
        often=True,
        words=("text", "audio", "image", "video"),
    )
    modalities: tuple[Text, ...] = setting(
        "Output of the model: text, or text and audio.", ("text",), of=_REMOTE_ENGINE, words=("text", "audio")
    )
    options: tuple[Text, ...] = setting(
        "Further features of the upstreams: tools, logprobs, response_format, n, priority, reasoning_effort, "
        "verbosity, service_tier, and limits of images and videos by their names (video_max_frames …).",
        (),
        words=(
            *("tools", "logprobs", "response_format", "n", "priority", "reasoning_effort", "verbosity", "service_tier"),
            *("image_min_pixels", "image_max_pixels", "video_min_pixels", "video_max_pixels", "video_fps"),
            *("video_min_frames", "video_max_frames", "video_total_pixels"),
        ),
    )
    audio_format: Literal["pcm16", "pcm", "wav"] = setting("Audio format requested from a model that speaks.", "pcm16")
    audio_sample_rate: Count = setting("Sample rate in Hz of raw audio that arrives without its rate.", 24_000)
    speech_upstream: Text | None = setting(
        "Base URL of the server whose /v1/audio/speech synthesises text, and answers of a model that does not speak; "
        "it may be one of the upstreams.",
        often=True,
        of=_REMOTE_ENGINE,
    )
    speech_model: Text | None = setting(
        "Model name at the speech upstream; unset: the first that it lists.", of=_REMOTE_ENGINE
    )
    speech_api_key: Key | None = setting(
        "API key for the speech upstream; unset: none, or api_key if it is one of the upstreams.", of=_REMOTE_ENGINE
    )
    voices: tuple[Text, ...] = setting("Voices that clients may choose, the default first.", ())
    sampling: tuple[Text, ...] = setting(
        "Sampling parameters that are forwarded; the upstreams must support them.",
        _SAMPLING,
        words=_SAMPLING,
    )
    stage_params: tuple[Text, ...] = setting(
        "Names (stage.parameter) that clients may set in stage_params; forwarded unchanged.", ()
    )
    stage_sampling: tuple[Text, ...] = setting(
        "Names (stage.parameter) that clients may set in stage_sampling; forwarded unchanged.", ()
    )
    retries: Whole = setting("Retries, at any upstream, of a request that none has started to answer.", 2)
    connect_timeout_sec: Seconds = setting("Time-out of a connection attempt, and of a health check.", 5)
    first_byte_timeout_sec: Seconds = setting("Time until an answer has begun; signs of life are no beginning.", 120)
    idle_timeout_sec: Seconds = setting("Time between two reads of an answer.", 60)
    health_interval_sec: Seconds = setting("Interval of health checks of a healthy upstream.", 10)
    start_timeout_sec: SecondsOrOff = setting("Time that startup waits for an upstream to become healthy; 0: none.", 60)
    max_request_bytes: Size = setting("Largest request to an upstream, including audio and images in base64.", 64 * MIB)
    ca_file: Path | None = setting("CA certificates (PEM) for https upstreams; unset: those of the system.")


# Telephony, WebRTC and gRPC


class TelephonyConfig(Section):
    """Telephone calls: the media streams of a telephony gateway, and Asterisk's AudioSocket."""

    enabled: bool = setting("Serve `/v1/telephony/media-stream`; if off, it answers 404.", False)
    cancel_echo: bool = setting(
        "Remove the echo of the answers from the callers' audio: a caller's loudspeaker may have no canceller.",
        False,
    )
    audiosocket_port: Port | None = setting("TCP port for calls over AudioSocket; 0: any free one; unset: none.")
    audiosocket_host: Text = setting(
        "Address to listen on for AudioSocket, which is not encrypted. Beyond this machine it needs keys: the UUID of "
        "a call must be one.",
        "127.0.0.1",
    )
    audiosocket_instructions: Text | None = setting("`instructions` of the calls over AudioSocket.")
    audiosocket_greeting: Text | None = setting("`greeting` of the calls over AudioSocket.")
    backchannel: bool = setting(
        'Say a soft "mm-hm" in the pauses of callers\' long turns, whose ends are then judged by voice and words '
        "(`semantic_vad`); not with `cancel_echo`.",
        False,
    )
    thinking_sound: bool = setting(
        "Play callers a soft sound while they wait for an answer for more than two seconds.", True
    )


class WyomingConfig(Section):
    """Wyoming, the protocol of Home Assistant's voice services and satellites, which has no keys and no encryption."""

    port: Port | None = setting(
        "TCP port for Wyoming, by custom 10300; 0: any free one; unset: none.", short="--wyoming-port", often=True
    )
    host: Text = setting(
        "Address to listen on for Wyoming. Beyond this machine it needs `auth.insecure_no_auth`, also with keys.",
        "127.0.0.1",
    )
    satellites: tuple[Text, ...] = setting(
        "Satellites to connect to, as `host:port`, whose users talk with this server.", ()
    )
    instructions: Text | None = setting(
        "`instructions` of answers over Wyoming; unset: those of spoken answers, since they are read aloud."
    )
    key: Text | None = setting("Name of the API key by whose limits Wyoming's sessions are counted; unset: none.")

    @field_validator("satellites")
    @classmethod
    def _satellites_have_ports(cls, satellites: tuple[str, ...]) -> tuple[str, ...]:
        for satellite in satellites:
            host, _, port = satellite.rpartition(":")
            if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
                raise ValueError(f"{satellite!r} is not an address such as kitchen.local:10700")
        return satellites


class LiveConfig(Section):
    """Sessions of OpenAI's Live API (`/v1/live/sessions`), which are served as `streaming_input.enabled` says."""

    silence: bool = setting("Send silence between answers, as OpenAI does; if off, nothing is sent there.", True)
    max_session_sec: Seconds = setting("Longest session; it then ends as expired.", 7200)
    backend: Text | None = setting(
        "Base URL (`http://host:8000/v1`) of the server whose model does the work that a session delegates to "
        "`responses`; unset: the model that talks does it.",
        often=True,
    )
    backend_model: Text | None = setting("Model name at the backend; unset: the first that it lists.")
    backend_api_key: Key | None = setting("API key for the backend.")


class WebrtcConfig(Section):
    """The Realtime API over WebRTC, which needs the extra `webrtc`."""

    enabled: bool = setting("Serve `/v1/realtime/calls`; if off, or without the extra, it answers 501.", True)
    ice_servers: tuple[Text, ...] = setting(
        "URLs of one STUN and one TURN server (`stun:HOST:PORT`, `turn:HOST:PORT?transport=udp`) by which this server "
        "finds ways through a NAT; unset: none is asked.",
        (),
    )
    ice_username: Text | None = setting("User name at the TURN server.")
    ice_credential: Key | None = setting("Password at the TURN server.")
    announce: Text | None = setting(
        "Public address of this server behind a NAT that forwards UDP ports unchanged; callers are told it in place "
        "of the machine's own addresses."
    )

    @field_validator("ice_servers")
    @classmethod
    def _servers_are_urls(cls, servers: tuple[str, ...]) -> tuple[str, ...]:
        host = r"[^\s:/?]+(:\d+)?"
        for server in servers:
            if not re.fullmatch(
                rf"stun:{host}|turn:{host}(\?transport=(udp|tcp))?|turns:{host}(\?transport=tcp)?", server
            ):
                raise ValueError(f"{server!r} is not a URL such as stun:HOST:PORT or turn:HOST:PORT?transport=udp")
        if len({server.startswith("stun:") for server in servers}) < len(servers):
            raise ValueError("at most one STUN and one TURN server are asked")
        return servers


class RealtimeConfig(Section):
    """MCP servers, whose tools this server calls for the model: over the Realtime API, natively, and in chats."""

    mcp_servers: tuple[Text, ...] = setting(
        "Hosts of MCP servers that clients may name, by https unless the entry begins with http://; private addresses "
        "only if listed as such or by network (10.0.0.0/8). Needs the extra `mcp`; unset: none.",
        (),
    )
    mcp_timeout_sec: Seconds = setting("Time that an MCP server has to list its tools, and for each call.", 30)

    @field_validator("mcp_servers")
    @classmethod
    def _check_mcp_servers(cls, entries: tuple[str, ...]) -> tuple[str, ...]:
        MediaDomains(entries)
        return entries


class GrpcConfig(Section):
    """The gRPC token service."""

    port: Port | None = setting(
        "Port of the service; 0: any free one; unset: 50051 if the engine has token sessions (any free one if `port` "
        "is 0), else none.",
        short="--grpc-port",
        often=True,
    )
    session_ttl_sec: Seconds = setting("Time after which an unused token session is deleted.", 1800)
    max_message_bytes: Size = setting(
        "Largest message accepted; images arrive in one message with the tokens around them.", 64 * MIB
    )
    message_timeout_sec: Seconds = setting("Time in which the message of a call has to arrive.", 60)
    readout_vectors: Path | None = setting("File of readout vectors.")
    readout_manifest: Path | None = setting("Manifest of the readout vectors.")


# The server


class AuthConfig(Section):
    """Authentication."""

    keys_file: Path | None = setting(
        "TOML file of API keys, each with a name and limits.", short="--keys-file", often=True
    )
    usage_file: Path | None = setting(
        "File that keeps what keys with daily limits have used; unset: omni_ws/usage.json in the user's cache folder."
    )
    insecure_no_auth: bool = setting(
        "Allow listening beyond this machine without a key.", False, short="--insecure-no-auth", often=True
    )


class ProfilerConfig(Section):
    """Profiles of requests and of the engine."""

    root: Path | None = setting("Folder for profiles; unset: omni_ws/profiles in the user's cache folder.")


class EngineName(StrEnum):
    """The names of the engines of this package."""

    EMBEDDED = "embedded"
    VLLM = "vllm"
    REMOTE = "remote"
    FAKE = "fake"


LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]


class ServerConfig(Section):
    """The server itself. Immutable; made by ``load``, or in code from keyword arguments.

    Only ``load`` reads the environment.
    """

    host: Text = setting("Address to listen on.", "127.0.0.1", often=True)
    port: Port = setting("Port for WebSocket and HTTP; 0: any free one.", 8080, often=True)
    workers: Count = setting("Processes that serve the port together; each has an engine of its own.", 1, le=64)
    engine: EngineName | str | None = setting(
        "Engine that answers requests; plug-ins may add others. Unset: composed of parts if one is named (`asr.use`, "
        "`llm.use`, `tts.use`), else embedded.",
        often=True,
    )
    languages: tuple[_Language, ...] = setting(
        "Languages that are spoken here (RFC 5646), such as `en,es,de`: speech is recognised in these alone. With one "
        "that is not English, and no ASR named, Whisper base recognises it. Unset: all that the ASR knows; tiny.en, "
        "the default, knows English.",
        (),
        often=True,
    )
    fronts: tuple[Text, ...] = setting("Front ends that plug-ins add; the server's own need not be named.", ())
    served_model_name: tuple[Text, ...] = setting(
        "Names of the model; the first one is announced. Unset: the engine's name for it.", (), often=True
    )
    served_model_alias: tuple[Text, ...] = setting(
        "Well-known model names that also mean the served model, as local-model does.",
        ("whisper-1", "tts-1", "gpt-4o-mini-tts", "gpt-4o-mini-transcribe", "gpt-realtime"),
    )
    strict_model_names: bool = setting(
        "Answer 404 to any other model name, instead of serving the model anyway.", False
    )
    api_key: Key | None = setting("Key that clients must present.", often=True)
    allow_origin: tuple[Text, ...] = setting(
        "Origins, besides the server's own, whose pages may connect; *: any.", (), often=True
    )
    allow_host: tuple[Text, ...] = setting(
        "Host names, besides localhost and addresses, that a server without keys accepts in Host; *: any.", ()
    )
    trusted_proxies: tuple[Text, ...] = setting(
        "Networks (CIDR) or addresses of proxies whose X-Forwarded-For header is trusted; limits by address apply to "
        "their clients, not to them.",
        (),
    )
    worker_hang_timeout_sec: Seconds = setting(
        "A worker that does not answer for so long is replaced; /health tells after a third of it.", 30
    )
    drain_timeout_sec: SecondsOrOff = setting("Time that answers have to finish after SIGTERM.", 30, often=True)
    log_format: LogFormat = setting("Format of log lines.", "text", often=True)
    log_level: LogLevel = setting("Lowest level that is logged.", "info", often=True)
    log_content: bool = setting("Log texts that clients send and receive, too; never keys or audio.", False)
    tracing: bool = setting("Export a span of each request by OTLP over HTTP, to OTEL_EXPORTER_OTLP_ENDPOINT.", False)
    otlp_metrics: bool = setting("Export the metrics by OTLP over HTTP, too, as tracing does the spans.", False)
    record: Path | None = setting("Folder to record sessions to, for omni-ws replay.", often=True)
    record_fraction: float = setting("Fraction of sessions that are recorded.", 1.0, ge=0, le=1)
    record_keys: tuple[Text, ...] = setting("Names of keys whose sessions are recorded; empty: all sessions.", ())
    record_payloads: bool = setting("Record payloads; if off: their sizes and hashes, which cannot be replayed.", True)
    record_max_bytes: Size = setting("Total size of recordings; the oldest are deleted first.", 1024 * MIB)
    record_max_age_sec: SecondsOrOff = setting("Age at which recordings are deleted; 0: never.", 7 * 24 * 3600)
    replica_id: str = setting(
        "Prefix of session ids, by which a load balancer finds the replica of a Mode B or resumed session.",
        "",
        pattern=r"^[A-Za-z0-9-]{0,32}$",
    )
    ssl_certfile: Path | None = setting("Certificate chain (PEM); enables wss and https on the port.", often=True)
    ssl_keyfile: Path | None = setting("Private key (PEM), unless ssl_certfile contains it.", often=True)
    sse_heartbeat_sec: SecondsOrOff = setting(
        "Idle time after which a heartbeat comment is sent on an event stream; 0: never.", 15
    )

    streaming_input: StreamingInputConfig = StreamingInputConfig()
    sessions: SessionsConfig = SessionsConfig()
    limits: LimitsConfig = LimitsConfig()
    http: HttpConfig = HttpConfig()
    auth: AuthConfig = AuthConfig()
    fake: FakeConfig = FakeConfig()
    asr: AsrConfig = AsrConfig()
    llm: LlmConfig = LlmConfig()
    tts: TtsConfig = TtsConfig()
    embedded: EmbeddedSettings = EmbeddedSettings()
    vllm: VllmConfig = VllmConfig()
    remote: RemoteConfig = RemoteConfig()
    telephony: TelephonyConfig = TelephonyConfig()
    wyoming: WyomingConfig = WyomingConfig()
    live: LiveConfig = LiveConfig()
    webrtc: WebrtcConfig = WebrtcConfig()
    realtime: RealtimeConfig = RealtimeConfig()
    grpc: GrpcConfig = GrpcConfig()
    profiler: ProfilerConfig = ProfilerConfig()
    plugins: dict[str, dict[str, Any]] = setting(
        "Settings of plug-ins: a table each, such as [plugins.shout], which is read by the plug-in alone.", {}
    )

    @field_validator("engine", mode="plain")
    @classmethod
    def _engine_is_registered(cls, name: object) -> str | None:
        if name is None:
            return None
        found = registered(ENGINES, name).name
        return EngineName(found) if found in OWN[ENGINES] else found

    @field_validator("languages")
    @classmethod
    def _languages_are_primary_subtags(cls, languages: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(tag.lower().partition("-")[0] for tag in languages))

    @field_validator("fronts")
    @classmethod
    def _fronts_are_registered(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            try:
                registered(FRONTS, name)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        return names

    @field_validator("allow_origin")
    @classmethod
    def _origins_are_origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in origins:
            scheme, separator, rest = origin.partition("://")
            if origin not in ("*", "null") and not (scheme and separator and rest and "/" not in rest):
                raise ValueError(f"{origin!r} is neither an origin such as https://example.org nor *")
        return origins

    @field_validator("trusted_proxies")
    @classmethod
    def _proxies_are_networks(cls, networks: tuple[str, ...]) -> tuple[str, ...]:
        for network in networks:
            try:
                ipaddress.ip_network(network, strict=False)
            except ValueError:
                raise ValueError(f"{network!r} is neither an address nor a network such as 10.0.0.0/8") from None
        return networks

    @property
    def composed(self) -> bool:
        """Whether parts are configured, so that the engine is composed of them."""
        return any(part.use is not None for part in (self.asr, self.llm, self.tts))

    @property
    def whisper_model(self) -> str:
        """The model of Whisper: as configured, or the one for the ``languages``."""
        return self.asr.choice.model or ("base" if set(self.languages) - {"en"} else "tiny.en")

    @property
    def chooses_llm(self) -> bool:
        """Whether the server chooses its LLM by itself: ``--llm auto``, or neither an LLM nor an engine is named."""
        return self.llm.choice.name == AUTO or (self.engine is None and self.llm.use is None)

    @property
    def spoken_instructions(self) -> str:
        """The instructions for spoken answers; "" for none, and if an engine was chosen instead of an LLM."""
        return self.llm.spoken_instructions if self._instructs else ""

    @property
    def spoken_instructions_with_tools(self) -> str:
        """The instructions for spoken answers in sessions with tools; "" for none."""
        return self.llm.spoken_instructions_with_tools if self._instructs else ""

    @property
    def _instructs(self) -> bool:
        return self.llm.use is not None or self.chooses_llm

    @property
    def on_vllm(self) -> bool:
        """Whether the engine, or a part of it, runs on vLLM in this process."""
        parts = (self.asr, self.llm, self.tts)
        return self.engine is EngineName.VLLM or any(part.choice.name in VLLM_PARTS for part in parts)

    @property
    def engine_name(self) -> str:
        """The name of the engine: as configured, or ``composed``."""
        return "composed" if self.composed else self.engine or EngineName.EMBEDDED

    @model_validator(mode="after")
    def _whole_or_parts(self) -> Self:
        if self.composed and self.engine is not None:
            named = [f"--{part.part}" for part in (self.asr, self.llm, self.tts) if part.use is not None]
            raise ValueError(
                f"--engine names the whole engine, and {' and '.join(named)} a part of one: remove --engine, "
                "or what names a part"
            )
        return self

    @model_validator(mode="after")
    def _key_needs_certificate(self) -> Self:
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ValueError("ssl_keyfile is given without ssl_certfile")
        return self
