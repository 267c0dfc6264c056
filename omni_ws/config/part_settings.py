"""Settings of the three parts of an engine that is composed: ASR, LLM, TTS."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from pydantic import Field, field_validator

from omni_ws.config.parts import FORMS, PartChoice, parse_part
from omni_ws.config.section import Section
from omni_ws.config.values import Key, Seconds, Text


def _forms(part: str, server: str = "") -> str:
    """Returns the forms of a part's ``use``, for its description."""
    forms = [f"`{form}`" for form in FORMS[part].values()]
    return ", ".join(forms) + (f", or the base URL of {server}" if server else "")


class PartConfig(Section):
    """Base of the settings of a part."""

    #: The name of the section.
    part: ClassVar[str]

    use: Text | None = None
    model: Text | None = Field(
        default=None, description="Model, unless `use` names it; unset: the first that the server lists."
    )
    api_key: Key | None = Field(default=None, description="API key for the server.")

    @property
    def choice(self) -> PartChoice:
        """What ``use`` says, with the model wherever that was given."""
        if self.use is None:
            return PartChoice("embedded", implied=True)
        choice = parse_part(self.part, self.use)
        return choice if choice.model is not None else replace(choice, model=self.model)

    @field_validator("use")
    @classmethod
    def _check_use(cls, text: str | None) -> str | None:
        if text is not None:
            parse_part(cls.part, text)
        return text


class AsrConfig(PartConfig):
    """ASR, the part that hears. Naming one of the three parts composes an engine of them (docs/compose.md)."""

    part = "asr"

    use: Text | None = Field(
        default=None,
        description=_forms("asr", "a server with /v1/audio/transcriptions") + "; unset: embedded, beside another part.",
    )
    languages: tuple[Text, ...] | None = Field(
        default=None,
        description="Languages that clients of a server's recognition may name (RFC 5646); unset: those of Whisper.",
    )


class LlmConfig(PartConfig):
    """LLM, the part that answers. One on vLLM also has the settings of `vllm`, a server those of `remote`."""

    part = "llm"

    use: Text | None = Field(
        default=None,
        description=_forms("llm", "a server with /v1/chat/completions") + "; unset: embedded, beside another part.",
    )
    first_byte_timeout_sec: Seconds = Field(
        default=120,
        description="Time-out of the first output of an answer; `remote.first_byte_timeout_sec` is an older name.",
    )


class TtsConfig(PartConfig):
    """TTS, the part that speaks. A Talker also has `vllm.talker_profile` and `vllm.talker_args`."""

    part = "tts"

    use: Text | None = Field(
        default=None,
        description=_forms("tts", "a server with /v1/audio/speech") + "; unset: embedded, beside another part.",
    )
    voice: Text | None = Field(default=None, description="Voice unless the client names one; unset: the part's own.")
