"""Reads the properties of a loaded checkpoint: its modalities, prompt format and default sampling."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from omni_ws.core.chunks import Modality
from omni_ws.engine.vllm.language_model import LanguageModel
from omni_ws.engine.vllm.prompt_form import PromptContext, PromptForm
from omni_ws.errors import EngineFailed, InvalidValue

#: The sample rate of audio encoders that do not specify one, in Hz.
_SAMPLE_RATE: Final = 16_000
_SAMPLE_TOOL: Final[Mapping[str, Any]] = {
    "type": "function",
    "function": {"name": "sample", "description": "A sample.", "parameters": {"type": "object", "properties": {}}},
}
_MEDIA: Final = (Modality.AUDIO, Modality.IMAGE, Modality.VIDEO)
#: Placeholders by the type of a model, where vLLM's are not those that it was trained with: vLLM numbers the sounds of
#: Qwen2.5-Omni, and puts around images tokens of another model, which are no tokens of this one.
_PLACEHOLDERS: Final[Mapping[str, Mapping[Modality, str]]] = {
    "qwen2_5_omni": {
        Modality.AUDIO: "<|audio_bos|><|AUDIO|><|audio_eos|>",
        Modality.IMAGE: "<|vision_bos|><|IMAGE|><|vision_eos|>",
        Modality.VIDEO: "<|vision_bos|><|VIDEO|><|vision_eos|>",
    }
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The properties of a checkpoint."""

    form: PromptForm
    #: The input modalities besides text.
    media: frozenset[Modality]
    #: Of input audio, in Hz.
    sample_rate: int
    #: The maximum number of audio segments in a prompt.
    most_audio: int
    #: The context length, in tokens.
    context: int
    #: The default sampling parameters, by vLLM's names.
    sampling: Mapping[str, Any]
    #: Whether there is a chat template. Without one the model only accepts raw prompts.
    chats: bool
    #: Whether the template describes tools to the model.
    describes_tools: bool


def read_checkpoint(
    model: LanguageModel, *, chat_template: str | None = None, arguments: Mapping[str, Any] | None = None
) -> Checkpoint:
    """Return the properties of the model's checkpoint. Blocks.

    ``chat_template`` replaces the checkpoint's own; ``arguments`` are those of the template. Raises EngineFailed for a
    template that cannot be used.
    """
    config = model.llm.model_config
    renderer = _Renderer(model, chat_template)
    media, sample_rate, most_audio = _media(model, renderer)
    sampling = dict(config.get_diff_sampling_param())
    # The checkpoint's limit on the length of answers, under the name that requests have for it.
    if (longest := sampling.pop("max_new_tokens", None)) is not None:
        sampling.setdefault("max_tokens", longest)
    form = PromptForm(copy.deepcopy(model.llm.get_tokenizer()), renderer.text, renderer.placeholder, media)
    chats = _chats(form, arguments or {})
    return Checkpoint(
        form=form,
        media=media,
        sample_rate=sample_rate,
        most_audio=most_audio,
        context=config.max_model_len,
        sampling=sampling,
        chats=chats,
        describes_tools=chats and _describes_tools(form, arguments or {}),
    )


def _describes_tools(form: PromptForm, arguments: Mapping[str, Any]) -> bool:
    try:
        with_tool = form.frame(PromptContext(tools=(_SAMPLE_TOOL,), arguments=arguments))
    except InvalidValue:
        return True  # it reads them, and expects more of them
    return with_tool != form.frame(PromptContext(arguments=arguments))


def _chats(form: PromptForm, arguments: Mapping[str, Any]) -> bool:
    from vllm.renderers.chat_utils import ChatTemplateResolutionError

    try:
        form.frame(PromptContext(arguments=arguments))
    except InvalidValue as error:
        if isinstance(error.__cause__, ChatTemplateResolutionError):
            return False
        raise EngineFailed(f"the chat template of the checkpoint does not work: {error.message}", fatal=True) from error
    return True


def _media(model: LanguageModel, renderer: _Renderer) -> tuple[frozenset[Modality], int, int]:
    """Return the input modalities besides text, the sample rate of audio, and the limit on audio segments."""
    llm = model.llm
    if not llm.model_config.is_multimodal_model:
        return frozenset(), _SAMPLE_RATE, 0
    information = llm.renderer.get_mm_processor().info
    limits = information.allowed_mm_limits
    media = frozenset(modality for modality in _MEDIA if limits.get(modality.value, 0) > 0 and renderer.knows(modality))
    resampler = getattr(information.data_parser, "audio_resampler", None)
    sample_rate = int(getattr(resampler, "target_sr", None) or _SAMPLE_RATE)
    return media, sample_rate, limits.get(Modality.AUDIO.value, 0)


class _Renderer:
    """Renders prompts with vLLM's own implementation of templates and placeholders.

    It asks the model for vLLM's renderer each time, since the model's process, and the renderer with it, may be
    replaced.
    """

    def __init__(self, model: LanguageModel, template: str | None) -> None:
        self._model = model
        self._template = template

    def text(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], arguments: Mapping[str, Any]) -> str:
        """Return the prompt for ``messages``; a last message of the assistant is left open to be continued.

        Raises InvalidValue for messages that the template rejects.
        """
        from vllm.renderers import ChatParams

        goes_on = bool(messages) and messages[-1]["role"] == "assistant"
        wanted: dict[str, Any] = {
            **arguments,
            "add_generation_prompt": not goes_on,
            "continue_final_message": goes_on,
            "tokenize": False,
        }
        if tools:
            wanted["tools"] = tools
        parameters = ChatParams(chat_template=self._template, chat_template_kwargs=wanted)
        renderer = self._model.llm.renderer
        try:
            _, prompt = renderer.render_messages(messages, parameters)
        except Exception as error:
            raise InvalidValue(f"the model's chat template rejected the messages: {error}") from error
        text = prompt.get("prompt")
        if not isinstance(text, str):
            raise InvalidValue("the model's chat template did not return text")
        return text

    def placeholder(self, modality: Modality, number: int) -> str:
        """Return the text that stands for the ``number``-th item of ``modality``, from 1."""
        from vllm.model_executor.model_loader import get_model_cls

        config = self._model.llm.model_config
        own = _PLACEHOLDERS.get(config.hf_config.model_type, {}).get(modality)
        text: str = own or get_model_cls(config).get_placeholder_str(modality.value, number)
        return text

    def knows(self, modality: Modality) -> bool:
        """Whether the model has a placeholder for ``modality``."""
        try:
            return bool(self.placeholder(modality, 1))
        except (AttributeError, ValueError):
            return False
