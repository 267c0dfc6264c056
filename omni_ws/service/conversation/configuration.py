"""The configuration of a session, resolved and checked against its engine."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
from msgspec import UNSET, UnsetType

from omni_ws.audio.container import parse_audio_format
from omni_ws.core.chunks import InputChunk, InputMode, Modality, OutputModality, Task
from omni_ws.core.json_values import MAX_MESSAGE_VALUES, check_values, language_name
from omni_ws.core.quota import ByteBudget, beyond_ordinary, memory_of
from omni_ws.core.request_input import InputSettings
from omni_ws.engine.base import AnswerOptions, EngineCapabilities
from omni_ws.errors import (
    InvalidFrame,
    InvalidRequest,
    InvalidValue,
    ModelNotFound,
    OmniError,
    UnsupportedFormat,
    UnsupportedModality,
    UnsupportedParameter,
)
from omni_ws.installing import install_command
from omni_ws.service.listening import ListeningSettings
from omni_ws.service.mcp import ToolServers
from omni_ws.wire.openai_fields import check_tools
from omni_ws.wire.session_config import (
    DEFAULT_MAX_LEAD_MS,
    FIELDS,
    MAX_ECHO_LEAD_MS,
    InputAudioConfig,
    SamplingConfig,
    SessionConfig,
    TurnDetectionType,
    converted,
    effective,
    is_mcp,
    merge,
    spoken_language,
    spoken_languages,
    start_policy,
)

#: Names of OpenAI's voices, which stock clients send; an engine without them uses its default voice.
STOCK_VOICES: Final = frozenset(
    {"alloy", "ash", "ballad", "cedar", "coral", "echo", "fable"}
    | {"marin", "nova", "onyx", "sage", "shimmer", "verse", "default"}
)
#: Bytes of JSON of one client's configuration, which is kept as long as its session.
MAX_CONFIGURATION_BYTES: Final = 1 << 20
#: Stop strings are searched for in every piece of an answer.
MAX_STOPS: Final = 16
MAX_STOP_CHARACTERS: Final = 256
#: A name that always means the served model.
LOCAL_MODEL: Final = "local-model"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The one model that is served, under all its names and aliases; clients are told ``names[0]``.

    If ``stand_in`` is set, the model also serves every other name, and ``stand_in`` is called with that name. If it is
    None, other names are refused.
    """

    names: tuple[str, ...]
    aliases: frozenset[str] = frozenset()
    stand_in: Callable[[str], None] | None = None

    def check(self, name: str | None) -> None:
        """Raise ModelNotFound for a name that is not served."""
        if name is None or name in self.names or name in self.aliases or name == LOCAL_MODEL:
            return
        if self.stand_in is not None:
            self.stand_in(name)
            return
        raise ModelNotFound(f"the model {name[:128]!r} is not served here; {self.names[0]!r} is", param="model")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigurationRules:
    """The engine's capabilities and the operator's choices, by which a client's configuration is checked and completed.

    There is one for each kind of session. ``defaults`` are fields of ``session_config`` set by the operator;
    ``forced_start_policy`` overrides every client. ``output_formats`` are the audio encodings that this kind of session
    can deliver.
    """

    capabilities: EngineCapabilities
    model: ServedModel
    output_formats: frozenset[str]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    forced_start_policy: str | None = None
    #: The kinds of turn detection that this kind of session has.
    turn_detection_types: Sequence[TurnDetectionType] = ()
    #: Whether echo and noise can be taken out of input audio.
    cleans_audio: bool = False
    #: Whether this kind of session can begin with a greeting, and ask whether the user is still there.
    greeting: bool = False
    #: The operator's own sentence while a tool works; empty: nothing is said then; None: see ``Remarks``.
    tool_filler: str | None = None
    #: The default of ``instructions`` if answers are spoken.
    spoken_instructions: str = ""
    #: The same if there are tools.
    spoken_instructions_with_tools: str = ""


class Configuration:
    """The configuration of one session: the client's fields merged over the defaults. ``effective`` is the result.

    The bytes that the client's fields take are charged to ``account`` while a SessionConfig that contains them is
    referenced.
    """

    def __init__(self, rules: ConfigurationRules, account: ByteBudget | None = None) -> None:
        self.rules = rules
        #: The MCP servers of the session; None if the operator allows none, or it is no session.
        self.mcp: ToolServers | None = None
        #: Whether the operator allows MCP servers, if only elsewhere.
        self.mcp_elsewhere = False
        self._account = account
        #: By ``id()`` of each configuration in use: a weak reference to it, and the bytes that it is charged with.
        self._charged: dict[int, tuple[weakref.ref[SessionConfig], int]] = {}
        self._wanted: dict[str, Any] = {}
        self.effective = self._resolve({}, first=True)

    def apply(self, patch: Mapping[str, Any]) -> SessionConfig:
        """Merge a partial configuration, and return the effective one. Unknown fields are ignored.

        MCP servers that are new in ``tools`` are connected to; their tools follow later (``offer``).

        Raises InvalidValue, UnsupportedParameter, UnsupportedFormat or ModelNotFound; PayloadTooLarge or
        EngineOverloaded if there is no memory for it. In case of an error, nothing is changed.
        """
        change, given = None, patch.get("tools")
        self._check_mcp(given)
        if self.mcp is not None and "tools" in patch and (change := self.mcp.change(given)) is not None:
            patch = {**patch, "tools": change.tools}
        resolved = self.offer(patch)
        if self.mcp is not None and change is not None:
            self.mcp.commit(change)
        return resolved

    def offer(self, patch: Mapping[str, Any]) -> SessionConfig:
        """Merge a patch as ``apply`` does. Its ``tools`` may only be functions, not MCP servers."""
        wanted = self._merged(patch)
        resolved = self._resolve(wanted)
        self._charge(resolved, _memory(resolved, wanted))
        self._wanted, self.effective = wanted, resolved
        return resolved

    def _check_mcp(self, tools: Any) -> None:
        """Raise UnsupportedParameter if ``tools`` names an MCP server and the session may have none."""
        index = next((at for at, one in enumerate(tools) if is_mcp(one)), None) if isinstance(tools, list) else None
        if index is None:
            return
        if self.mcp is None:
            how = "" if self.mcp_elsewhere else " (the operator can allow hosts with realtime.mcp_servers)"
            message = f"MCP servers may not be used here{how}"
            raise UnsupportedParameter(message, param=f"tools[{index}].type")
        if not self.rules.capabilities.tools:
            raise UnsupportedParameter("tools are not supported by this engine", param="tools")

    def follow(self, rules: ConfigurationRules) -> SessionConfig:
        """Replace the rules, since the engine has been replaced, and return the effective configuration.

        Fields of ``session_config`` that the client set and the new engine refuses are forgotten, each as a whole.
        Raises PayloadTooLarge or EngineOverloaded if there is no memory for the new configuration; then nothing is
        changed.
        """
        before, self.rules = self.rules, rules
        try:
            resolved, wanted = self._accepted(self._wanted)
            self._charge(resolved, _memory(resolved, wanted))
        except OmniError:
            self.rules = before
            raise
        self._wanted, self.effective = wanted, resolved
        return resolved

    def _accepted(self, wanted: dict[str, Any]) -> tuple[SessionConfig, dict[str, Any]]:
        """Return the configuration without the fields of ``wanted`` that are refused, and the fields that are left."""
        while True:
            try:
                return self._resolve(wanted), wanted
            except InvalidRequest as error:
                refused = (error.param or "").partition(".")[0]
                if not wanted:
                    raise
                # An error that names none of them is about what several of them make together.
                wanted = {name: value for name, value in wanted.items() if name != refused} if refused in wanted else {}

    def with_patch(self, patch: Mapping[str, Any]) -> SessionConfig:
        """Return the configuration that ``apply`` would return, without applying it. Raises what ``apply`` raises.

        MCP servers in ``tools`` must be named by labels that the session has; see ``ToolServers.expanded``.
        """
        self._check_mcp(patch.get("tools"))
        if self.mcp is not None and "tools" in patch:
            patch = {**patch, "tools": self.mcp.expanded(patch["tools"])}
        config = self._resolve(self._merged(patch))
        changed = {
            name: value for name in FIELDS if (value := getattr(config, name)) is not getattr(self.effective, name)
        }
        self._charge(config, memory_of(changed))
        return config

    @property
    def wanted(self) -> Mapping[str, Any]:
        """All fields that the client has set, except its MCP servers.

        Applied to a new Configuration, they give the same result.
        """
        if self.mcp is None or "tools" not in self._wanted:
            return self._wanted
        return {**self._wanted, "tools": self.mcp.without(self._wanted["tools"])}

    def names_voice(self, config: SessionConfig) -> bool:
        """Whether the client chose the voice of ``config``; False if it named none, or one that this engine lacks."""
        if config.voice != self.effective.voice:  # a configuration with a patch
            return True
        wanted = self._wanted.get("voice")
        return wanted is not None and self.rules.capabilities.voice_aliases.get(wanted, wanted) == config.voice

    def close(self) -> None:
        """Close the MCP servers, refund all bytes that are charged, and charge nothing from now on. Idempotent."""
        if self.mcp is not None:
            self.mcp.close()
        charged, self._charged, account, self._account = self._charged, {}, self._account, None
        if account is not None:
            account.give(sum(size for _, size in charged.values()))

    def _charge(self, config: SessionConfig, size: int) -> None:
        size = beyond_ordinary(size)
        if self._account is None or not size:
            return
        key = id(config)
        self._account.take(size)
        self._charged[key] = weakref.ref(config, lambda _: self._let_go(key)), size

    def _let_go(self, key: int) -> None:
        _, size = self._charged.pop(key)
        if self._account is not None:
            self._account.give(size)

    def _merged(self, patch: Mapping[str, Any]) -> dict[str, Any]:
        wanted = merge(self._wanted, {sys.intern(key): value for key, value in patch.items() if key in FIELDS})
        encoded = msgspec.json.encode(wanted)
        if len(encoded) > MAX_CONFIGURATION_BYTES:
            raise InvalidValue(f"the configuration must not exceed {MAX_CONFIGURATION_BYTES} bytes")
        try:
            check_values(encoded)  # all of it is read again with each change
        except InvalidFrame:
            raise InvalidValue(f"the configuration must not have more than {MAX_MESSAGE_VALUES} values") from None
        return wanted

    def input_settings(self) -> InputSettings:
        """Return the input settings of a request that opens now."""
        return input_settings(self.effective)

    def makes_call(self, call_id: str) -> bool:
        """Return whether the server itself makes the tool call ``call_id`` (MCP), or waits for its approval."""
        return self.mcp is not None and self.mcp.has(call_id)

    @property
    def listening(self) -> ListeningSettings:
        """The settings of turn detection, with the format of the input audio."""
        audio = self.effective.input_audio
        return ListeningSettings(
            self.effective.turn_detection,
            audio.encoded,
            echo=audio.echo == "server",
            noise=None if isinstance(audio.noise_reduction, UnsetType) else audio.noise_reduction,
        )

    def check_chunk(self, chunk: InputChunk) -> None:
        """Check that the engine and the configuration support an input chunk.

        Raises UnsupportedModality, UnsupportedParameter, UnsupportedFormat or InvalidValue.
        """
        # A bare end of input has the modality audio for lack of a better one, and every engine takes it.
        if chunk.modality not in self.rules.capabilities.input_modalities and chunk.payload:
            raise UnsupportedModality(
                f"{chunk.modality} input is not supported by this engine",
                param="modality",
                sequence_id=chunk.sequence_id,
            )
        if chunk.tool_call_id is not None and not self.rules.capabilities.tools:
            raise UnsupportedParameter(
                "tools are not supported by this engine", param="role", sequence_id=chunk.sequence_id
            )
        if chunk.format is not None:
            _check_chunk_format(chunk, self.effective)

    def check_options(self, options: AnswerOptions) -> None:
        """Raise UnsupportedParameter for an option that this engine lacks; ``param`` is the field of OpenAI's body.

        With a ``chat_refusal`` the engine takes no chat but a raw prompt; ``param`` is "task" then.
        """
        capabilities = self.rules.capabilities
        if capabilities.chat_refusal and self.effective.task is Task.CHAT and not options.raw_prompt:
            raise UnsupportedParameter(capabilities.chat_refusal, param="task")
        asked = {
            "logprobs": (options.logprobs is not None, capabilities.logprobs),
            "response_format": (options.structure is not None, capabilities.structured_output),
            "n": (options.choices > 1, capabilities.choices),
            "priority": (options.priority != 0, capabilities.priority),
            "prompt": (options.raw_prompt, capabilities.raw_prompts),
            "echo": (options.echo, capabilities.echo),
            "chat_template_kwargs": (bool(options.template_arguments), capabilities.template_arguments),
        }
        for name, (wanted, able) in asked.items():
            if wanted and not able:
                raise UnsupportedParameter(f"{name} is not supported by this engine", param=name)
        if options.token_prompt and not capabilities.token_prompts:
            raise UnsupportedParameter("token ids as a prompt are not supported by this engine", param="prompt")
        lacking = (options.media_limits.keys() - capabilities.media_limits) | (
            options.upstream.keys() - capabilities.upstream
        )
        for name in sorted(lacking):
            raise UnsupportedParameter(f"{name} is not supported by this engine", param=name)

    def _resolve(self, wanted: Mapping[str, Any], *, first: bool = False) -> SessionConfig:
        rules = self.rules
        capabilities = rules.capabilities
        fields = merge(rules.defaults, wanted)
        # A merge keeps the objects that it does not change. A megabyte of tools takes long to read and check again.
        same_tools = not first and all(wanted.get(name) is self._wanted.get(name) for name in ("tools", "tool_choice"))
        if same_tools:
            fields.pop("tools", None)
        config = effective(fields)
        changes: dict[str, Any] = {"model": rules.model.names[0], "voice": _voice(config, capabilities)}
        if same_tools:
            changes["tools"] = self.effective.tools
        rules.model.check(config.model)
        if "after_start" not in wanted and not capabilities.extend:
            changes["after_start"] = InputMode.SNAPSHOT
        if "history_summary" not in wanted:
            changes["history_summary"] = capabilities.sums_up
        if rules.forced_start_policy is not None:
            changes["start_policy"] = rules.forced_start_policy
        elif "start_policy" not in wanted and not capabilities.extend:
            changes["start_policy"] = "on_end_only"
        if "modalities" not in wanted:
            changes["modalities"] = [name for name in ("text", "audio") if name in capabilities.output_modalities]
        spoken = config.task is Task.CHAT and "audio" in changes.get("modalities", config.modalities)
        if spoken and "instructions" not in wanted:
            # Tools that did not change were left out of ``config`` above.
            with_tools = bool(changes.get("tools", config.tools))
            own = rules.spoken_instructions_with_tools if with_tools else rules.spoken_instructions
            changes["instructions"] = config.instructions or own
        _check_remarks(config, rules)
        if config.turn_detection is not None:
            changes |= _for_turns(config, rules, given=frozenset(rules.defaults) | frozenset(wanted))
        config = msgspec.structs.replace(config, **changes)
        _check(config, capabilities)
        _check_cleaning(config.input_audio, cleans_audio=rules.cleans_audio)
        if not same_tools:
            check_tools(config.tools, config.tool_choice)
        if config.output_audio.format not in rules.output_formats:
            raise UnsupportedFormat(
                f"output in {config.output_audio.format} is not supported here; "
                f"supported: {', '.join(sorted(rules.output_formats))}",
                param="output_audio.format",
            )
        return config


def _memory(resolved: SessionConfig, wanted: Mapping[str, Any]) -> int:
    """Return the bytes that a configuration takes, without the names of its fields, which all sessions share."""
    return sys.getsizeof(wanted) + memory_of((resolved, *wanted.values()))


def input_settings(config: SessionConfig) -> InputSettings:
    """Return the input settings of a request with this configuration."""
    return InputSettings(
        start_policy=start_policy(config),
        mode=config.after_start,
        audio=config.input_audio.encoded,
        parse_format=parse_audio_format,
        alignment=config.alignment,
        alignment_window_ms=config.alignment_window_ms,
    )


def _voice(config: SessionConfig, capabilities: EngineCapabilities) -> str | None:
    default = capabilities.voices[0] if capabilities.voices else None
    if config.voice is None:
        return default
    voice = capabilities.voice_aliases.get(config.voice, config.voice)
    if voice not in capabilities.voices:
        if voice in STOCK_VOICES:
            return default
        known = ", ".join(capabilities.voices) or "none"
        raise InvalidValue(f"unknown voice {config.voice[:64]!r}; available: {known}", param="voice")
    return voice


def _for_turns(config: SessionConfig, rules: ConfigurationRules, *, given: frozenset[str]) -> dict[str, Any]:
    """Return the defaults that turn detection changes.

    Raises UnsupportedParameter if turn detection is not possible here. ``given`` are the fields that the client or the
    operator has set.
    """
    if not rules.turn_detection_types:
        raise UnsupportedParameter("turn detection is not supported here", param="turn_detection")
    if Modality.AUDIO not in rules.capabilities.input_modalities:
        raise UnsupportedParameter(
            "turn detection requires audio input, which this engine does not support", param="turn_detection"
        )
    assert config.turn_detection is not None
    if config.turn_detection.type not in rules.turn_detection_types:
        raise UnsupportedParameter(
            f"{config.turn_detection.type} needs a model that is not here; "
            f"supported: {', '.join(rules.turn_detection_types)}",
            param="turn_detection.type",
        )
    changes: dict[str, Any] = {}
    if "overlap" not in given:
        changes["overlap"] = "interrupt" if config.turn_detection.interrupt_response else "wait"
    if "max_lead_ms" not in given:
        changes["max_lead_ms"] = DEFAULT_MAX_LEAD_MS
    if config.input_audio.echo == "server":
        changes |= _for_echo(config)
    return changes


def _for_echo(config: SessionConfig) -> dict[str, Any]:
    """Return the fields that change if the server removes its echo: the lead is limited, as audio sent ahead is kept.

    Raises UnsupportedFormat if the output audio is compressed.
    """
    audio = config.output_audio
    if not audio.encoded.is_raw:
        raise UnsupportedFormat(
            f"the server cannot take out the echo of answers in {audio.format}: output audio must be raw samples",
            param="input_audio.echo",
        )
    lead_ms = config.max_lead_ms
    return {"max_lead_ms": MAX_ECHO_LEAD_MS} if lead_ms is not None and lead_ms > MAX_ECHO_LEAD_MS else {}


def _check_cleaning(audio: InputAudioConfig, *, cleans_audio: bool) -> None:
    """Raise UnsupportedParameter if echo or noise is to be removed and the library for that is not installed."""
    wanted = {"echo": audio.echo == "server", "noise_reduction": audio.noise_reduction is not UNSET}
    for name, asked in wanted.items():
        if asked and not cleans_audio:
            raise UnsupportedParameter(
                f"{name} needs a library that is not installed: {install_command()}", param=f"input_audio.{name}"
            )


def _check_remarks(config: SessionConfig, rules: ConfigurationRules) -> None:
    """Raise UnsupportedParameter if a greeting or idle prompt is configured that the session or engine cannot say."""
    asks = config.idle_prompt is not None and config.idle_prompt.after_sec > 0
    can_say = "text" in config.modalities or Task.SPEECH in rules.capabilities.tasks
    for name in [name for name, wanted in (("greeting", bool(config.greeting)), ("idle_prompt", asks)) if wanted]:
        if not rules.greeting:
            raise UnsupportedParameter(f"{name} is not supported in a session of one request", param=name)
        if not can_say:
            raise UnsupportedParameter(f"{name} without text output is not supported by this engine", param=name)


def _check(config: SessionConfig, capabilities: EngineCapabilities) -> None:
    """Raise an error that names the first field that the engine or this server does not support."""
    if not config.modalities:
        raise InvalidValue("modalities must have at least one of text and audio", param="modalities")
    for modality in config.modalities:
        if OutputModality(modality) not in capabilities.output_modalities:
            raise UnsupportedParameter(f"{modality} output is not supported by this engine", param="modalities")
    if config.speed != 1 and not capabilities.speed:
        raise UnsupportedParameter("speech at another speed is not supported by this engine", param="speed")
    if config.task not in capabilities.tasks:
        raise UnsupportedParameter(f"task {config.task} is not supported by this engine", param="task")
    if config.after_start is InputMode.EXTEND and not capabilities.extend:
        raise UnsupportedParameter(
            "input after the start of the answer is not supported by this engine", param="after_start"
        )
    if config.history_summary and not capabilities.sums_up:
        raise UnsupportedParameter("this engine has no model that sums up a talk", param="history_summary")
    if (config.tools or config.tool_choice not in (None, "none", "auto")) and not capabilities.tools:
        raise UnsupportedParameter(
            "tools are not supported by this engine", param="tools" if config.tools else "tool_choice"
        )
    for name in SamplingConfig.__struct_fields__:
        known = name in capabilities.sampling or name in capabilities.sampling_no_ops
        if getattr(config.sampling, name) is not None and not known:
            raise UnsupportedParameter(f"{name} is not supported by this engine", param=f"sampling.{name}")
    _check_words(config, capabilities)
    _check_language(config.input_audio, capabilities.languages)
    _check_stops(config.sampling.stop)
    _check_stages("stage_params", config.stage_params, capabilities.stage_params)
    _check_stages("stage_sampling", config.stage_sampling, capabilities.stage_sampling)
    for stage, values in config.stage_sampling.items():
        converted(values, SamplingConfig, place=f"stage_sampling.{stage}")


def _check_words(config: SessionConfig, capabilities: EngineCapabilities) -> None:
    if config.tts.lexicon and not capabilities.lexicon:
        raise UnsupportedParameter("a lexicon is not supported by this engine", param="tts.lexicon")
    for name in ("keywords", "prompt"):
        if getattr(config.input_audio, name) and not capabilities.keywords:
            raise UnsupportedParameter(
                f"speech recognition with {name} is not supported by this engine", param=f"input_audio.{name}"
            )


def _check_language(audio: InputAudioConfig, known: frozenset[str]) -> None:
    named = spoken_language(audio)
    wanted = {"language": {named} if named is not None else set(), "languages": spoken_languages(audio)}
    for name, languages in wanted.items():
        for language in sorted(languages - known):
            english = language_name(language)
            called = repr(language) if english == language else f"{language!r} ({english})"
            raise UnsupportedParameter(
                f"language {called} is not supported by this engine; supported: {', '.join(sorted(known)) or 'none'}",
                param=f"input_audio.{name}",
            )


def _check_stops(stop: str | list[str] | None) -> None:
    stops = [stop] if isinstance(stop, str) else stop or []
    if len(stops) > MAX_STOPS or any(len(text) > MAX_STOP_CHARACTERS for text in stops):
        raise InvalidValue(
            f"at most {MAX_STOPS} stop strings of at most {MAX_STOP_CHARACTERS} characters", param="sampling.stop"
        )


def _check_stages(param: str, stages: Mapping[str, Mapping[str, Any]], known: frozenset[str]) -> None:
    for stage, parameters in stages.items():
        for name in parameters:
            if f"{stage}.{name}" not in known:
                stage, name = stage[:64], name[:64]
                raise UnsupportedParameter(
                    f"parameter {name!r} of stage {stage!r} is not supported by this engine",
                    param=f"{param}.{stage}.{name}",
                )


def _check_chunk_format(chunk: InputChunk, config: SessionConfig) -> None:
    """Check a chunk's ``format``: an audio format, or the MIME type of an image or video. Text must have none."""
    assert chunk.format is not None
    if chunk.modality is Modality.AUDIO:
        try:
            parse_audio_format(chunk.format, config.input_audio.encoded)
        except (InvalidValue, UnsupportedFormat) as error:
            error.about(param="format", sequence_id=chunk.sequence_id)
            raise
    elif chunk.modality in (Modality.IMAGE, Modality.VIDEO):
        if not chunk.format.lower().startswith(f"{chunk.modality}/") and not (
            chunk.modality is Modality.VIDEO and chunk.format.lower().startswith("image/")
        ):
            raise UnsupportedFormat(
                f"expected a {chunk.modality} media type, got {chunk.format[:64]!r}",
                param="format",
                sequence_id=chunk.sequence_id,
            )
    else:
        raise InvalidValue("format is not supported for text", param="format", sequence_id=chunk.sequence_id)
