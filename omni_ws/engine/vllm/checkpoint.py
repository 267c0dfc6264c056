"""What a loaded checkpoint says about itself: what it takes, how its prompts look, how it wants to be sampled."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from omni_ws.core.chunks import Modality
from omni_ws.engine.vllm.language_model import LanguageModel
from omni_ws.engine.vllm.prompt import PromptContext, PromptForm
from omni_ws.errors import EngineFailed, InvalidValue

#: What audio encoders of chat models take, where one does not say.
_SAMPLE_RATE: Final = 16_000
_MEDIA: Final = (Modality.AUDIO, Modality.IMAGE, Modality.VIDEO)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    form: PromptForm
    #: Besides text.
    media: frozenset[Modality]
    sample_rate: int
    #: How many pieces of audio one prompt may have.
    most_audio: int
    context: int
    sampling: Mapping[str, Any]
    #: Whether it has a chat template. Without one it takes prompts as they stand alone.
    chats: bool


def read_checkpoint(model: LanguageModel, *, chat_template: str | None = None) -> Checkpoint:
    """Blocks for a moment. ``chat_template`` stands in for the checkpoint's own.

    Raises EngineFailed where the template cannot be used.
    """
    config = model.llm.model_config
    renderer = _Renderer(model, chat_template)
    media, sample_rate, most_audio = _media(model, renderer)
    sampling = dict(config.get_diff_sampling_param())
    # The checkpoint's own longest answer, under the name that a request has for it.
    if (longest := sampling.pop("max_new_tokens", None)) is not None:
        sampling.setdefault("max_tokens", longest)
    form = PromptForm(copy.deepcopy(model.llm.get_tokenizer()), renderer.text, renderer.placeholder, media)
    return Checkpoint(
        form=form,
        media=media,
        sample_rate=sample_rate,
        most_audio=most_audio,
        context=config.max_model_len,
        sampling=sampling,
        chats=_chats(form),
    )


def _chats(form: PromptForm) -> bool:
    from vllm.renderers.chat_utils import ChatTemplateResolutionError

    try:
        form.frame(PromptContext())
    except InvalidValue as error:
        if isinstance(error.__cause__, ChatTemplateResolutionError):
            return False
        raise EngineFailed(f"the checkpoint cannot chat: {error.message}", fatal=True) from error
    return True


def _media(model: LanguageModel, renderer: _Renderer) -> tuple[frozenset[Modality], int, int]:
    """What it takes besides text; of audio the sample rate, and how many pieces."""
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
    """vLLM's own knowledge of templates and placeholders.

    It asks the model anew each time, because what belongs to a process that died is closed.
    """

    def __init__(self, model: LanguageModel, template: str | None) -> None:
        self._model = model
        self._template = template

    def text(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
        """A last message of the assistant is left open. Raises InvalidValue for what the template does not take."""
        from vllm.renderers import ChatParams

        goes_on = bool(messages) and messages[-1]["role"] == "assistant"
        wanted: dict[str, Any] = {
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
            raise InvalidValue(f"the model's chat template refuses this: {error}") from error
        text = prompt.get("prompt")
        if not isinstance(text, str):
            raise InvalidValue("the model's chat template gives no text")
        return text

    def placeholder(self, modality: Modality, number: int) -> str:
        from vllm.model_executor.model_loader import get_model_cls

        text: str = get_model_cls(self._model.llm.model_config).get_placeholder_str(modality.value, number)
        return text

    def knows(self, modality: Modality) -> bool:
        try:
            return bool(self.placeholder(modality, 1))
        except (AttributeError, ValueError):
            return False
