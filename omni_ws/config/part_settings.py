"""Settings of the three parts of an engine that is composed: ASR, LLM, TTS."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Final

from pydantic import Field, field_validator

from omni_ws.config.parts import FORMS, PartChoice, parse_part
from omni_ws.config.section import Section
from omni_ws.config.values import Count, Key, Seconds, Text, Whole

#: What an LLM is told where its answers are spoken, unless the operator or the client says something else.
SPOKEN_INSTRUCTIONS: Final = (
    "You are talking with the user: they speak, and a voice reads your answers aloud. Answer in one to three short, "
    "plain sentences, as in a conversation, the most important thing first, in the user's language. Write no lists, "
    "headings, tables, Markdown, emoji, links or code: nobody sees them. If there is much to say, say the essence and "
    "offer to go on. The user's words come from speech recognition: if a word makes no sense, think of one that sounds "
    "like it, and ask if you are unsure."
)

#: What else a small model is told, which would rather say yes.
_OF_SMALL_MODELS: Final = (
    " You cannot see, browse the internet, know the weather or the news, play music, call anybody or control devices: "
    "if you are asked to, say that you cannot. If you do not know something, say so."
)


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
    word_times: bool = Field(
        default=False,
        description="Ask a server for the times of words; most then stream no interim texts.",
    )
    speculate: bool | None = Field(
        default=None,
        description="Have a server transcribe at each pause what was said so far, for nothing if the speaker goes on; "
        "unset: unless it is beyond this machine.",
    )
    timeout_sec: Seconds = Field(
        default=30,
        description="How long a turn may be written down whose speaker went on, or that was cancelled; after that its "
        "interim text has to do.",
    )
    args: dict[str, Any] = Field(default={}, description="vLLM's engine arguments, beside `vllm:MODEL`.")


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
    speculate: bool | None = Field(
        default=None,
        description="Begin an answer at the first pause, and throw it away if the speaker goes on; unset: unless the "
        "LLM or the TTS is a server beyond this machine.",
    )
    instructions: str | None = Field(
        default=None,
        description="Instructions for spoken answers, unless the client gives its own; unset: to write for the ear "
        "(docs/speech.md); empty: none.",
    )
    max_spoken_tokens: Whole = Field(
        default=300,
        description="About how many tokens a spoken answer has, unless the client names a limit: it ends with a whole "
        "sentence, `finish_reason` `length`. 300 are about a minute and a half; 0: no limit.",
    )
    tool_filler: Text | None = Field(
        default=None,
        description="Sentence, such as `One moment.`, that a spoken answer says where the LLM calls a tool without "
        "a word; unset: none.",
    )
    context: Count = Field(
        default=4096,
        ge=256,
        description="Tokens of context of a GGUF model for each conversation; at most its own.",
    )
    threads: Count | None = Field(default=None, description="Threads of a GGUF model; unset: half of the cores.")
    parallel: Count | None = Field(
        default=None,
        description="Conversations that a GGUF model answers at a time; unset: half of the cores, but 2 to 4.",
    )
    reasoning_effort: Text | None = Field(
        default=None,
        description="How much a model on a server thinks before it answers, as that server calls it (`none`, `low` …; "
        "OpenAI, Ollama), unless the client says: speech begins late then; unset: as the server does.",
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default={},
        description="Arguments of the chat template of a model on a server, such as `enable_thinking false` (vLLM, "
        "llama.cpp, SGLang).",
    )
    think: bool = Field(
        default=False,
        description="Whether a GGUF model that can think does so before it answers: speech begins late then.",
    )
    opens_thoughts: bool | None = Field(
        default=None,
        description="Whether the chat template of a server's model opens a thought that its answers only close: "
        "streams are then held back until it is closed; unset: as llama.cpp tells, or an answer has shown.",
    )
    chat_template: Path | None = Field(
        default=None, description="Chat template (Jinja file) of a GGUF model; unset: that of the file."
    )

    @property
    def spoken_instructions(self) -> str:
        """What an LLM is told where its answers are spoken; empty for nothing. Only one that was named is told."""
        if self.use is None:
            return ""
        if self.instructions is not None:
            return self.instructions
        return SPOKEN_INSTRUCTIONS + (_OF_SMALL_MODELS if self.choice.name == "qwen" else "")


class TtsConfig(PartConfig):
    """TTS, the part that speaks. A Talker also has `vllm.talker_profile` and `vllm.talker_args`."""

    part = "tts"

    use: Text | None = Field(
        default=None,
        description=_forms("tts", "a server with /v1/audio/speech") + "; unset: embedded, beside another part.",
    )
    voice: Text | None = Field(default=None, description="Voice unless the client names one; unset: the part's own.")
