"""Settings of what clients send and get: streaming input, HTTP, and the limits of the server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError, field_validator

from omni_ws.config.media_domains import MediaDomains
from omni_ws.config.section import Section
from omni_ws.config.values import MIB, Count, Seconds, SecondsOrOff, Size, Text, Whole

# on_modality is left out: it needs the name of a modality.
StartPolicyName = Literal["on_first_chunk", "on_end_only", "on_min_length"]
_Minimum = Annotated[int, Field(ge=1)]
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
    """A name, or an object, which may be written as JSON. Raises ValueError with what is wrong."""
    if isinstance(policy, str) and policy.lstrip().startswith("{"):
        policy = json.loads(policy)
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


#: A start policy by its name, or as the whole object of ``session_config``.
StartPolicySetting = Annotated[StartPolicyName | dict[str, Any], BeforeValidator(_checked_policy)]
AfterStart = Literal["extend", "snapshot"]


class StreamingInputConfig(Section):
    """Streaming input: the native WebSocket, and Mode A and Mode B over HTTP."""

    enabled: bool = Field(default=True, description="Serve streaming input; if off, its routes answer 404.")
    session_timeout_sec: Seconds = Field(
        default=300, description="Close a session whose client has been silent for this long."
    )
    max_payload_per_session: Size = Field(
        default=64 * MIB,
        description="Input held for one request (WebSocket) or one session (Mode A, Mode B); "
        "and the output log of a Mode B session. All that a session holds: twice this and max_output_bytes.",
    )
    max_total_payload_per_session: Size | None = Field(
        default=None,
        description="All input of one session (Mode B) or one request (Mode A, WebSocket), including what the engine "
        "has consumed; unset: no limit.",
    )
    max_chunk_bytes: Size = Field(default=4 * MIB, description="Largest decoded payload of one input chunk.")
    start_policy: StartPolicySetting = Field(
        default="on_min_length",
        description="When a request starts, unless the client names a policy; or a whole object (a table, or JSON) "
        'such as `{"type": "on_min_length", "min_audio_ms": 800}` or `{"type": "on_modality", "modality": "audio"}`, '
        "into which an object of the client is merged.",
    )
    force_start_policy: StartPolicyName | None = Field(
        default=None, description="Start policy of every request, overriding the client's."
    )
    after_start: AfterStart | None = Field(
        default=None, description="Effect of chunks after the start; unset: extend if the engine supports it."
    )
    alignment_window_ms: SecondsOrOff = Field(
        default=200,
        le=2000,
        description="With `alignment: timestamp`, how long a chunk after the start waits for input of other modalities "
        "whose times are further back than this, unless the client says; 0: not at all.",
    )
    reorder_window_chunks: Count = Field(default=256, description="Chunks kept ahead of a gap.")
    reorder_timeout_sec: Seconds = Field(default=10, description="Time that a gap may stay open.")
    resume_grace_sec: SecondsOrOff = Field(
        default=30, description="Grace period in which a session without a connection can be resumed; 0: none."
    )
    write_timeout_sec: Seconds = Field(
        default=30,
        description="Close a session whose client reads nothing for this long while max_output_bytes are waiting.",
    )
    max_lead_ms: Whole | None = Field(
        default=None,
        description="Lead of audio over its playback; unset: not paced (with turn detection: 400).",
    )
    max_pending_requests: Count = Field(default=4, description="Requests of a session that may wait for the engine.")
    max_output_bytes: Size = Field(
        default=8 * MIB,
        description="Size of a session's outbox, for a client that reads slowly; and of its journal, for a resume.",
    )
    permessage_deflate: bool = Field(
        default=False, description="Offer WebSocket compression, which gains nothing for audio."
    )
    ping_interval_sec: SecondsOrOff = Field(default=20, description="Interval of WebSocket pings; 0: none.")
    ping_timeout_sec: SecondsOrOff = Field(default=20, description="Time in which a pong has to arrive; 0: unlimited.")


class LimitsConfig(Section):
    """Limits of the server as a whole."""

    max_sessions: Count = Field(
        default=1000, description="Live sessions; another one is refused with engine_overloaded."
    )
    max_connections: Count = Field(
        default=4096, description="Open connections, including WebSockets; another one is answered 503 and closed."
    )
    max_held_bytes: Size = Field(
        default=1024 * MIB,
        description="Budget of input, decoded media, output, settings and history held for all sessions together.",
    )
    max_history_tokens: Whole = Field(
        default=4096,
        description="History that is context of the next request: a word counts 1 (in scripts without blanks, a "
        "character; at least 1 for every 16 characters), a second of audio 25.",
    )


class HttpConfig(Section):
    """HTTP on the same port."""

    header_timeout_sec: Seconds = Field(default=10, description="Time in which a request head has to arrive.")
    body_timeout_sec: Seconds = Field(
        default=30, description="Time between two reads of a request body (for Mode A: session_timeout_sec)."
    )
    min_body_bytes_per_sec: Whole = Field(
        default=500,
        description="Minimum average rate of a request body, after body_timeout_sec; does not apply to streamed "
        "input, which is as slow as speech; 0: none.",
    )
    keepalive_timeout_sec: Seconds = Field(default=75, description="Time after which an idle connection is closed.")
    max_header_bytes: Size = Field(default=32 * 1024, description="Largest request head.")
    max_body_bytes: Size = Field(default=64 * MIB, description="Largest request body, except streamed input.")
    media_root: Path | None = Field(
        default=None, description="Folder whose files chat requests may use as images, audio or video; unset: none."
    )
    media_domains: tuple[Text, ...] = Field(
        default=(),
        description="Hosts from which images, audio and video of chat requests may be fetched, by https unless the "
        "entry begins with http://; private addresses only if listed as such or by network (10.0.0.0/8).",
    )
    media_timeout_sec: Seconds = Field(
        default=20, description="Time in which all media of a request have to be fetched."
    )

    @field_validator("media_domains")
    @classmethod
    def _check_media_domains(cls, entries: tuple[str, ...]) -> tuple[str, ...]:
        MediaDomains(entries)
        return entries
