"""Every setting of the server: its name, default, unit and meaning.

The names are those of the configuration file, and flags and environment variables are derived from them. A field's
description ends up in ``--help`` and in docs/configuration.md.
"""

from __future__ import annotations

from enum import StrEnum
from ipaddress import ip_network
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from omni_ws.config.media_domains import MediaDomains
from omni_ws.config.values import Count, Key, Port, Seconds, SecondsOrOff, Size, Text, Whole

MIB = 1024**2


class EngineName(StrEnum):
    EMBEDDED = "embedded"
    VLLM = "vllm"
    REMOTE = "remote"
    FAKE = "fake"


class LogFormat(StrEnum):
    TEXT = "text"
    JSON = "json"


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class VoiceChoice(StrEnum):
    AUTO = "auto"
    FLITE = "flite"
    ESPEAK = "espeak"
    NONE = "none"


# Without on_modality, which only a client can mean: it needs the name of a modality.
StartPolicyName = Literal["on_first_chunk", "on_end_only", "on_min_length"]
AfterStart = Literal["extend", "snapshot"]


class Section(BaseModel):
    """A named group of settings."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, hide_input_in_errors=True)


class StreamingInputConfig(Section):
    """Streaming input: the native WebSocket, and Mode A and Mode B over HTTP."""

    enabled: bool = Field(default=True, description="Serve streaming input at all; off, its routes answer 404.")
    session_timeout_sec: Seconds = Field(default=300, description="Close a session after this much client silence.")
    max_payload_per_session: Size = Field(
        default=64 * MIB,
        description="Input held for one open request (WebSocket) or one session (Mode A, Mode B), "
        "and the answer kept of a session of Mode B.",
    )
    max_total_payload_per_session: Size | None = Field(
        default=None,
        description="All the input that a session (Mode B) or a request (Mode A) may bring, taken over by the "
        "engine or not; unset: no limit.",
    )
    max_chunk_bytes: Size = Field(default=4 * MIB, description="Largest payload of one input chunk, decoded.")
    start_policy: StartPolicyName = Field(
        default="on_min_length", description="When work on a request starts, where the client names no policy."
    )
    force_start_policy: StartPolicyName | None = Field(
        default=None, description="The start policy of every request, whatever the client asks for."
    )
    after_start: AfterStart | None = Field(
        default=None, description="What chunks after the start do; unset: extend where the engine can."
    )
    reorder_window_chunks: Count = Field(default=256, description="How far ahead of a gap chunks are kept.")
    reorder_timeout_sec: Seconds = Field(default=10, description="How long a gap may stay open.")
    resume_grace_sec: SecondsOrOff = Field(
        default=30, description="How long a dropped WebSocket connection keeps its session; 0: not at all."
    )
    write_timeout_sec: Seconds = Field(
        default=30, description="Close a session whose client has not read for this long while its output cap was full."
    )
    max_lead_ms: Whole | None = Field(
        default=None,
        description="How far audio is sent ahead of its playing; unset: not paced (turn detection: 400).",
    )
    max_pending_requests: Count = Field(default=4, description="Requests of a session that may wait for an answer.")
    max_output_bytes: Size = Field(
        default=8 * MIB,
        description="Output of a session held for a client that reads slowly; and as much again for its resume.",
    )
    permessage_deflate: bool = Field(default=False, description="Offer WebSocket compression; audio gains nothing.")
    ping_interval_sec: SecondsOrOff = Field(default=20, description="Time between WebSocket pings; 0: none.")
    ping_timeout_sec: SecondsOrOff = Field(default=20, description="How long a pong may take; 0: for ever.")


class LimitsConfig(Section):
    """What the whole server holds at most."""

    max_sessions: Count = Field(default=1000, description="Live sessions; one more is answered engine_overloaded.")
    max_connections: Count = Field(
        default=4096, description="Open connections, WebSockets among them; one more is answered 503 and closed."
    )
    max_held_bytes: Size = Field(
        default=1024 * MIB, description="Input, decoded media and output held for all sessions together."
    )
    max_history_tokens: Whole = Field(
        default=4096,
        description="Earlier turns of a connection that are context of the next: words, and 25 for a second of audio.",
    )


class HttpConfig(Section):
    """The HTTP side of the port."""

    header_timeout_sec: Seconds = Field(default=10, description="Time for a request head to arrive.")
    body_timeout_sec: Seconds = Field(
        default=30, description="Time between two reads of a request body (Mode A has session_timeout_sec instead)."
    )
    min_body_bytes_per_sec: Whole = Field(
        default=500,
        description="Rate that a request body must have on the whole, once body_timeout_sec has passed; streamed "
        "input, which is slow where it is live, apart; 0: any.",
    )
    keepalive_timeout_sec: Seconds = Field(default=75, description="How long an idle connection is kept.")
    max_header_bytes: Size = Field(default=32 * 1024, description="Largest request head.")
    max_body_bytes: Size = Field(default=64 * MIB, description="Largest request body, streamed input apart.")
    media_root: Path | None = Field(
        default=None, description="Folder that images, audios and videos of chat may name files of; unset: no files."
    )
    media_domains: tuple[Text, ...] = Field(
        default=(),
        description="Hosts that images, audio and video of chat may be fetched from, by https unless an entry begins "
        "with http://; private addresses only where they are listed themselves, alone or as a network (10.0.0.0/8).",
    )
    media_timeout_sec: Seconds = Field(default=20, description="Time to fetch all media of one request.")

    @field_validator("media_domains")
    @classmethod
    def _check_media_domains(cls, entries: tuple[str, ...]) -> tuple[str, ...]:
        MediaDomains(entries)
        return entries


class AuthConfig(Section):
    """Who may use the server."""

    keys_file: Path | None = Field(default=None, description="TOML file of keys, each with a name and limits.")
    insecure_no_auth: bool = Field(default=False, description="Allow listening beyond this machine without any key.")


class FakeConfig(Section):
    """The fake engine, which echoes: for tests of clients."""

    first_chunk_delay_ms: Whole = Field(default=0, description="Wait before the first output of a request.")
    chunk_interval_ms: Whole = Field(default=0, description="Wait between two outputs.")
    chunk_ms: Count = Field(default=100, description="Audio in one output chunk.")
    fail_after_chunks: Whole | None = Field(default=None, description="Fail each request after this many outputs.")
    reply: str | None = Field(default=None, description="Answer with this text instead of an echo.")


class EmbeddedSettings(Section):
    """The embedded engine: recognition and a voice without a GPU or a model download."""

    max_recognisers: Count | None = Field(
        default=None, description="Utterances recognised at a time (about 90 MB each); unset: from the number of cores."
    )
    voice: VoiceChoice = Field(
        default=VoiceChoice.AUTO, description="Which synthesiser speaks; auto: flite, else espeak, else none."
    )
    default_voice: Text | None = Field(
        default=None, description="Voice of clients that name none; unset: the synthesiser's own."
    )


class VllmConfig(Section):
    """The vLLM engine."""

    model: Text | None = Field(default=None, description="Model of the Thinker: a name or a folder.")
    args: dict[str, Any] = Field(default={}, description="vLLM's own engine arguments for the Thinker.")
    tool_parser: Text | None = Field(
        default=None,
        description="vLLM's parser for the tool calls of this model (hermes, llama3_json …); unset: no tools.",
    )
    chat_template: Path | None = Field(
        default=None, description="File of the chat template (Jinja); unset: the checkpoint's own."
    )
    audio_segment_ms: Count = Field(
        default=3000,
        description="Speech goes to the model while it lasts, in segments that end at the first pause after this long.",
    )
    talker: Text | None = Field(default=None, description="Model of the Talker, which speaks.")
    talker_profile: Text | None = Field(default=None, description="Profile that joins Thinker and Talker.")
    talker_args: dict[str, Any] = Field(default={}, description="vLLM's own engine arguments for the Talker.")


class RemoteConfig(Section):
    """The remote engine: other servers that speak the OpenAI API."""

    upstreams: tuple[Text, ...] = Field(
        default=(),
        description="Base URLs (`http://host:8000/v1`) of the servers behind this one, which serve one model.",
    )
    model: Text | None = Field(
        default=None, description="The upstreams' name of the model; unset: the first that the first of them lists."
    )
    api_key: Key | None = Field(default=None, description="Key for the upstreams.")
    input_modalities: tuple[Text, ...] = Field(
        default=("text",), description="What the model takes, of text, audio, image and video: no server says it."
    )
    modalities: tuple[Text, ...] = Field(
        default=("text",),
        description="What a chat answer of the upstreams holds: text, or text and audio, where their model speaks.",
    )
    options: tuple[Text, ...] = Field(
        default=(),
        description="What else a chat body may ask of them: tools, logprobs, response_format, n, priority, and "
        "limits of images and videos by their names (video_max_frames …).",
    )
    audio_format: Literal["pcm16", "pcm", "wav"] = Field(
        default="pcm16", description="Name of the audio format that is asked for where the model speaks."
    )
    audio_sample_rate: Count = Field(
        default=24_000, description="Rate in Hz of bare samples that come without their rate."
    )
    speech_upstream: Text | None = Field(
        default=None,
        description="Base URL of the server whose /v1/audio/speech reads answers aloud where the model does not speak, "
        "and texts in any case; it may be one of the upstreams.",
    )
    speech_model: Text | None = Field(
        default=None, description="Name of the model of the speech upstream; unset: the first that it lists."
    )
    speech_api_key: Key | None = Field(
        default=None,
        description="Key for the speech upstream; unset: none, or api_key where it is one of the upstreams.",
    )
    voices: tuple[Text, ...] = Field(
        default=(), description="Names of voices that clients may ask for, the default first."
    )
    sampling: tuple[Text, ...] = Field(
        default=(
            *("temperature", "top_p", "max_tokens", "stop", "seed", "presence_penalty", "frequency_penalty"),
            *("top_k", "min_p", "repetition_penalty"),
        ),
        description="Sampling parameters that are passed on; the upstreams must know them.",
    )
    stage_params: tuple[Text, ...] = Field(
        default=(), description="Names (stage.parameter) that clients may set in stage_params; passed on as they are."
    )
    stage_sampling: tuple[Text, ...] = Field(
        default=(), description="Names (stage.parameter) that clients may set in stage_sampling; passed on as they are."
    )
    retries: Whole = Field(
        default=2, description="Further tries, here or there, of a request that no upstream has begun to work on."
    )
    connect_timeout_sec: Seconds = Field(default=5, description="Time for a connection, or a health check, to succeed.")
    first_byte_timeout_sec: Seconds = Field(default=120, description="Time until the first byte of an answer.")
    idle_timeout_sec: Seconds = Field(default=60, description="Time between two reads of an answer under way.")
    health_interval_sec: Seconds = Field(default=10, description="Time between two looks at an upstream that is well.")
    start_timeout_sec: SecondsOrOff = Field(
        default=60, description="How long the start waits for an upstream that is not there yet; 0: not at all."
    )
    max_request_bytes: Size = Field(
        default=64 * MIB, description="Largest request to an upstream, audio and pictures in base64."
    )
    ca_file: Path | None = Field(
        default=None, description="Certificates (PEM) that https upstreams are checked against; unset: the system's."
    )


class GrpcConfig(Section):
    """The gRPC token service."""

    port: Port | None = Field(
        default=None,
        description="Port of the service; 0: any free one; unset: 50051, or any free one where `port` is 0, if the "
        "engine has token sessions, else none.",
    )
    session_ttl_sec: Seconds = Field(default=1800, description="How long an unused token session is remembered.")
    max_message_bytes: Size = Field(
        default=64 * MIB, description="Largest message taken: images come in one with the tokens around them."
    )
    message_timeout_sec: Seconds = Field(default=60, description="Time for the message of a call to arrive.")
    readout_vectors: Path | None = Field(default=None, description="File of the readout vectors.")
    readout_manifest: Path | None = Field(default=None, description="Manifest that describes the readout vectors.")


class ProfilerConfig(Section):
    """Profiles of requests, and of the engine."""

    root: Path | None = Field(
        default=None,
        description="Folder that profiles are written below; unset: omni_ws/profiles in the user's cache folder.",
    )


class ServerConfig(Section):
    """The server itself. Immutable; made by ``load``, or directly in code from keyword arguments alone."""

    host: Text = Field(default="127.0.0.1", description="Address to listen on.")
    port: Port = Field(default=8080, description="Port for WebSocket and HTTP; 0: any free one.")
    engine: EngineName = Field(default=EngineName.EMBEDDED, description="What answers.")
    served_model_name: tuple[Text, ...] = Field(
        default=(), description="Names of the model, the announced one first; unset: the engine's own name for it."
    )
    served_model_alias: tuple[Text, ...] = Field(
        default=("whisper-1", "tts-1", "gpt-4o-mini-tts", "gpt-4o-mini-transcribe", "gpt-realtime"),
        description="Stock model names that mean the served model too, besides local-model.",
    )
    strict_model_names: bool = Field(
        default=False,
        description="Answer 404 to other names of models than these, instead of serving the model that there is.",
    )
    api_key: Key | None = Field(default=None, description="The one key that clients must present.")
    allow_origin: tuple[Text, ...] = Field(
        default=(), description="Origins besides the server's own whose pages may connect; * for all."
    )
    allow_host: tuple[Text, ...] = Field(
        default=(),
        description="Names besides localhost and addresses that a server without keys answers to in Host; * for all.",
    )
    trusted_proxies: tuple[Text, ...] = Field(
        default=(),
        description="Networks (CIDR) or addresses of proxies whose X-Forwarded-For tells the address of a client; they "
        "themselves are not counted as one.",
    )
    drain_timeout_sec: SecondsOrOff = Field(default=30, description="How long answers may finish after SIGTERM.")
    log_format: LogFormat = Field(default=LogFormat.TEXT, description="Form of the log lines.")
    log_level: LogLevel = Field(default=LogLevel.INFO, description="The least important lines that are logged.")
    log_content: bool = Field(
        default=False, description="Log the texts that clients send and get, too; keys and audio never are."
    )
    tracing: bool = Field(
        default=False,
        description="Send a span of each request by OTLP over HTTP; where to, OTEL_EXPORTER_OTLP_ENDPOINT says.",
    )
    record: Path | None = Field(default=None, description="Folder to record sessions to, for omni-ws replay.")
    record_fraction: float = Field(default=1.0, ge=0, le=1, description="Part of the sessions that is recorded.")
    record_keys: tuple[Text, ...] = Field(
        default=(), description="Names of the keys whose sessions are recorded; empty: all sessions."
    )
    record_payloads: bool = Field(
        default=True, description="Record what was said; off: sizes and hashes of it, which cannot be replayed."
    )
    record_max_bytes: Size = Field(
        default=1024 * MIB, description="Size of all recordings together; the oldest make room for new ones."
    )
    record_max_age_sec: SecondsOrOff = Field(
        default=7 * 24 * 3600, description="Age at which recordings are removed; 0: never."
    )
    replica_id: str = Field(
        default="",
        description="Begins every Mode B session id, so that a load balancer finds the replica.",
        pattern=r"^[A-Za-z0-9-]{0,32}$",
    )
    ssl_certfile: Path | None = Field(default=None, description="Certificate chain (PEM): wss and https on the port.")
    ssl_keyfile: Path | None = Field(
        default=None, description="Private key (PEM), where the certificate file does not hold it."
    )
    sse_heartbeat_sec: SecondsOrOff = Field(
        default=15, description="Idle time after which an event stream gets a comment; 0: never."
    )

    streaming_input: StreamingInputConfig = StreamingInputConfig()
    limits: LimitsConfig = LimitsConfig()
    http: HttpConfig = HttpConfig()
    auth: AuthConfig = AuthConfig()
    fake: FakeConfig = FakeConfig()
    embedded: EmbeddedSettings = EmbeddedSettings()
    vllm: VllmConfig = VllmConfig()
    remote: RemoteConfig = RemoteConfig()
    grpc: GrpcConfig = GrpcConfig()
    profiler: ProfilerConfig = ProfilerConfig()

    @field_validator("allow_origin")
    @classmethod
    def _origins_are_origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in origins:
            scheme, separator, rest = origin.partition("://")
            if origin not in ("*", "null") and not (scheme and separator and rest and "/" not in rest):
                raise ValueError(f"{origin!r} is not an origin such as https://example.org, nor *")
        return origins

    @field_validator("trusted_proxies")
    @classmethod
    def _proxies_are_networks(cls, networks: tuple[str, ...]) -> tuple[str, ...]:
        for network in networks:
            try:
                ip_network(network, strict=False)
            except ValueError:
                raise ValueError(f"{network!r} is no address, nor a network such as 10.0.0.0/8") from None
        return networks

    @model_validator(mode="after")
    def _key_needs_certificate(self) -> Self:
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ValueError("ssl_keyfile is given without ssl_certfile")
        return self
