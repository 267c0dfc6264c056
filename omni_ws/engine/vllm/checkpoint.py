"""Checkpoint: the properties of a loaded model's checkpoint, such as its chat template and its input modalities.

Further functions work before a model is loaded: they test chat templates, recognise omni models by their config.json,
and divide the memory of a GPU among models by the sizes of their weights.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import orjson

from omni_ws.config.values import ConfigurationError
from omni_ws.core.chunks import Modality
from omni_ws.engine.vllm.language_model import LanguageModel
from omni_ws.engine.vllm.prompt import PromptContext, PromptForm
from omni_ws.errors import EngineFailed, InvalidValue


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The properties of a model's checkpoint, read after the model was loaded."""

    form: PromptForm
    #: The input modalities besides text.
    media: frozenset[Modality]
    #: The sample rate of input audio, in Hz.
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


#: The sample rate of audio encoders that do not specify one, in Hz.
_SAMPLE_RATE: Final = 16_000
_SAMPLE_TOOL: Final[Mapping[str, Any]] = {
    "type": "function",
    "function": {"name": "sample", "description": "A sample.", "parameters": {"type": "object", "properties": {}}},
}
_MEDIA: Final = (Modality.AUDIO, Modality.IMAGE, Modality.VIDEO)
#: Placeholders by the type of a model, if the model was trained with other placeholders than vLLM's: for Qwen2.5-Omni
#: vLLM numbers the audio, and puts tokens around images that only another model has.
_PLACEHOLDERS: Final[Mapping[str, Mapping[Modality, str]]] = {
    "qwen2_5_omni": {
        Modality.AUDIO: "<|audio_bos|><|AUDIO|><|audio_eos|>",
        Modality.IMAGE: "<|vision_bos|><|IMAGE|><|vision_eos|>",
        Modality.VIDEO: "<|vision_bos|><|VIDEO|><|vision_eos|>",
    }
}


def read_checkpoint(
    model: LanguageModel, *, chat_template: str | None = None, arguments: Mapping[str, Any] | None = None
) -> Checkpoint:
    """Return the properties of the model's checkpoint. Blocks.

    ``model`` must be running. ``chat_template`` replaces the checkpoint's own template; ``arguments`` are passed to the
    template. Raises EngineFailed for a template that cannot be used.
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
        return True  # the template reads tools, and expects further fields
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
    """Return the input modalities besides text, the sample rate of audio in Hz, and the limit on audio segments."""
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
    """A renderer of prompts, by vLLM's own implementation of templates and placeholders.

    Each call gets vLLM's renderer from the model, since the model's process may be replaced, and the renderer with it.
    """

    def __init__(self, model: LanguageModel, template: str | None) -> None:
        self._model = model
        self._template = template

    def text(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], arguments: Mapping[str, Any]) -> str:
        """Return the prompt for ``messages``. If the last message is the assistant's, the answer continues it.

        Raises InvalidValue for messages that the template rejects, and without a template.
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


#: The limit on the size of a chat template; models' own templates have about 10 KiB.
MAX_BYTES: Final = 1 << 20
#: Where checkpoints keep templates besides ``tokenizer_config.json``.
_TEMPLATE_FILES: Final = ("chat_template.jinja", "chat_template.json", "processor_config.json")
_WORD: Final = "Hello"
#: Some templates expect content as text, others as a list of parts. A template has to render one of them.
_CONTENTS: Final[tuple[Any, ...]] = (_WORD, [{"type": "text", "text": _WORD}])
#: Placeholders for the checkpoint's special tokens, which are not known yet.
_NO_SPECIAL_TOKENS: Final = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), "")


def read_chat_template(path: Path) -> str:
    """Return the template in a file. Blocks. Raises ConfigurationError if the file has no valid chat template."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise _template_problem(path, f"must not exceed {MAX_BYTES} bytes")
        template = data.decode()
    except OSError as error:
        raise _template_problem(path, f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise _template_problem(path, "is not valid UTF-8") from error
    if not any(_WORD in _rendered_sample(template, content, path) for content in _CONTENTS):
        raise _template_problem(path, "is not a chat template: it does not render the user's message")
    return template


def lacks_chat_template(model: str) -> bool:
    """Whether a checkpoint on this machine has no chat template; False if this is only known after loading it.

    ``model`` is a folder, or the name of a checkpoint that was downloaded before. Blocks.
    """
    settings = _local_file(model, "tokenizer_config.json")
    if settings is None or any(_local_file(model, name) is not None for name in _TEMPLATE_FILES):
        return False
    try:
        return not orjson.loads(settings.read_bytes()).get("chat_template")
    except (OSError, ValueError, AttributeError):
        return False


def _local_file(model: str, name: str) -> Path | None:
    """Return the path of a file of a checkpoint, in its folder or the download cache; None if there is no such file."""
    if Path(model).is_dir():
        path = Path(model, name)
    else:
        from huggingface_hub import try_to_load_from_cache

        try:
            cached = try_to_load_from_cache(model, name)
        except ValueError:  # neither a folder nor a name: loading it will say so
            return None
        if not isinstance(cached, str):
            return None
        path = Path(cached)
    return path if path.is_file() else None


def _rendered_sample(template: str, content: Any, path: Path) -> str:
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    conversation = [{"role": "user", "content": content}]
    try:
        (text,), _ = render_jinja_template(
            [conversation], chat_template=template, add_generation_prompt=True, **_NO_SPECIAL_TOKENS
        )
    except TemplateSyntaxError as error:
        raise _template_problem(path, f"is not a valid chat template: line {error.lineno}: {error.message}") from error
    except Exception as error:  # expressions in a template can raise anything
        if content is not _CONTENTS[-1]:
            return ""
        raise _template_problem(path, f"is not a valid chat template: {error}") from error
    return str(text)


def _template_problem(path: Path, what: str) -> ConfigurationError:
    return ConfigurationError([f"vllm.chat_template: {path} {what}"])


class OmniFamily(StrEnum):
    """A family of omni models whose own voice is supported; the value is the ``model_type`` in config.json."""

    QWEN25 = "qwen2_5_omni"
    QWEN3 = "qwen3_omni_moe"


#: vLLM's arguments for the version of a model and its download folder, with the names of huggingface_hub for both.
_PLACE_ARGS: Final = {"revision": "revision", "download_dir": "cache_dir"}
#: The name of the vocoder's module in the checkpoint.
_VOCODERS: Final[Mapping[OmniFamily, str]] = {OmniFamily.QWEN25: "token2wav", OmniFamily.QWEN3: "code2wav"}
#: Vocoders run in float32, whatever their weights are stored in.
_VOCODER_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class OmniModel:
    """An omni model: its name or folder (``model``), the content of its config.json, and vLLM's engine arguments."""

    model: str
    family: OmniFamily
    config: Mapping[str, Any]
    args: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The name of the model, as clients see it."""
        return Path(self.model).name if Path(self.model).is_dir() else self.model

    @property
    def speaks(self) -> bool:
        """Whether the checkpoint has a Talker; Thinking variants have none."""
        return self.config.get("enable_audio_output") is not False and "talker_config" in self.config

    @property
    def vocoder(self) -> str:
        """The name of the vocoder's module in the checkpoint."""
        return _VOCODERS[self.family]

    def folder(self) -> Path:
        """Return the folder with the model's files. Blocks.

        If ``model`` is a name, missing files are downloaded. Raises ConfigurationError if that fails.
        """
        if Path(self.model).is_dir():
            return Path(self.model)
        from huggingface_hub import snapshot_download

        try:
            return Path(snapshot_download(self.model, **_place(self.args)))
        except Exception as error:
            raise ConfigurationError([f"{self.model} cannot be downloaded: {error}"]) from error


def find_omni_model(model: str, args: Mapping[str, Any]) -> OmniModel | None:
    """Return the omni model with the name or folder ``model``; None if it is not an omni model, or is not found.

    ``args`` are vLLM's engine arguments. Reads config.json in the folder or the download cache, into which it is
    downloaded from the model hub if missing. Blocks, for seconds if the hub is asked.
    """
    path = Path(model) / "config.json" if Path(model).is_dir() else _fetched_config(model, args)
    try:
        config = orjson.loads(path.read_bytes()) if path is not None else None
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict) or config.get("model_type") not in tuple(OmniFamily):
        return None
    return OmniModel(model, OmniFamily(config["model_type"]), config, args)


def omni_sizes(model: OmniModel, folder: Path, *, sessions: int, positions: int) -> dict[str, int]:
    """Return the bytes that each part takes once loaded, read from the headers of the files in ``folder``.

    The parts are ``thinker``, ``talker`` and ``vocoder``; the talker's slots are included, one of ``positions``
    positions for each of ``sessions``. Raises ConfigurationError for files that cannot be read.
    """
    from omni_ws.engine.omni.slot_talker import talker_memory
    from omni_ws.engine.omni.transformer import CheckpointTensors

    tensors = CheckpointTensors(folder)
    return {
        "thinker": tensors.bytes_of("thinker."),
        "talker": talker_memory(folder, slots=sessions, longest=positions),
        "vocoder": tensors.bytes_of(f"{model.vocoder}.", _VOCODER_BYTES),
    }


def _fetched_config(model: str, args: Mapping[str, Any]) -> Path | None:
    try:
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(model, "config.json", **_place(args), etag_timeout=5))
    except Exception:  # missing, private, no valid name, no network, or no vLLM with its packages
        return None


def _place(args: Mapping[str, Any]) -> dict[str, Any]:
    return {ours: args[name] for name, ours in _PLACE_ARGS.items() if args.get(name) is not None}


# How a GPU's memory is divided: between Thinker and Talker by their weights, or among the parts of an omni model.

#: vLLM's argument for the share of a GPU's memory that a model may use.
SHARE: Final = "gpu_memory_utilization"
#: The share of Thinker and Talker together. The rest is for the codec and the CUDA contexts.
_BOTH: Final = 0.9
#: The minimum share of a model.
_LEAST: Final = 0.1
#: The Thinker's share when the sizes are unknown.
_UNKNOWN: Final = 0.65
#: The formats of weights. vLLM loads the first format in this order that a checkpoint has.
_WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".gguf")


def memory_shares(
    thinker: int | None, talker: int | None, thinker_args: Mapping[str, Any], talker_args: Mapping[str, Any]
) -> tuple[float, float]:
    """Return the shares of a GPU's memory, from 0 to 1, for the Thinker and the Talker.

    ``thinker`` and ``talker`` are the bytes of their checkpoints, None if unknown. A share that the operator set in the
    arguments is kept, and the other model gets the rest of _BOTH, at least _LEAST. Raises ConfigurationError if a share
    is not a number.
    """
    first_given, second_given = _given(thinker_args, "vllm.args"), _given(talker_args, "vllm.talker_args")
    if first_given is not None:
        return (first_given, _rounded(_BOTH - first_given) if second_given is None else second_given)
    if second_given is not None:
        return (_rounded(_BOTH - second_given), second_given)
    if not thinker or not talker:
        return (_UNKNOWN, _rounded(_BOTH - _UNKNOWN))
    first, second = thinker / _gpus(thinker_args), talker / _gpus(talker_args)
    share = min(_BOTH - _LEAST, max(_LEAST, _BOTH * first / (first + second)))
    return (_rounded(share), _rounded(_BOTH - share))


def weights_bytes(model: str) -> int | None:
    """Return the size of a model's weights, from its folder, the download cache or the model hub; None if unknown.

    Blocks, for seconds if the hub is asked.
    """
    config = _local_file(model, "config.json")
    folder = Path(model) if Path(model).is_dir() else config and config.parent
    if folder is not None:
        return _weights((path.name, path.stat().st_size) for path in folder.iterdir() if path.is_file())
    return _weights(_at_the_hub(model))


def _given(args: Mapping[str, Any], setting: str) -> float | None:
    share = args.get(SHARE)
    if share is None or (isinstance(share, int | float) and not isinstance(share, bool)):
        return share
    raise ConfigurationError([f"{setting}.{SHARE}: must be a number greater than 0 and at most 1"])


def _rounded(share: float) -> float:
    return round(max(_LEAST, share), 3)


def _gpus(args: Mapping[str, Any]) -> int:
    """Return the number of GPUs over which vLLM, with these arguments, distributes the weights."""
    return int(args.get("tensor_parallel_size") or 1) * int(args.get("pipeline_parallel_size") or 1)


def _weights(files: Iterable[tuple[str, int]]) -> int | None:
    sizes = dict(files)
    for ending in _WEIGHTS:
        names = [name for name in sizes if name.endswith(ending)]
        # Some checkpoints contain their weights twice, the second time in their author's format.
        names = [name for name in names if not name.startswith("consolidated")] or names
        if names:
            return sum(sizes[name] for name in names)
    return None


def _at_the_hub(model: str) -> list[tuple[str, int]]:
    from huggingface_hub import HfApi

    try:
        files = HfApi().model_info(model, files_metadata=True, timeout=5).siblings or ()
    except Exception:  # missing, private, or no network: vLLM reports it when it loads the model
        return []
    return [(file.rfilename, file.size or 0) for file in files]


#: The share of a GPU's memory that all parts of an omni model together may take.
_ALL: Final = 0.92
#: The GPU memory of a process besides its tensors, in bytes: CUDA's context and libraries.
_CONTEXT_BYTES: Final = 700_000_000
#: The least memory that the Thinker needs besides its weights, in bytes: activations, graphs and a KV cache.
_LEAST_CACHE_BYTES: Final = 8_000_000_000


def check_omni_fits(model: str, *, thinker: int, talker: int, vocoder: int, total: int, gpus: int) -> None:
    """Check that a model with parts of these sizes, in bytes, fits into GPUs of ``total`` bytes each.

    The Thinker's weights are distributed over ``gpus`` GPUs; the other parts are on the first GPU. Raises
    ConfigurationError if the model does not fit.
    """
    thinker //= gpus
    needed = thinker + talker + vocoder + 3 * _CONTEXT_BYTES + _LEAST_CACHE_BYTES
    if needed <= _ALL * total:
        return
    raise ConfigurationError(
        [
            f"{model} does not fit into a GPU of {_gb(total)}: the Thinker's weights take {_gb(thinker)}, and to "
            f"compute and to remember at least {_gb(_LEAST_CACHE_BYTES)}; the Talker takes {_gb(talker)}, the "
            f"vocoder {_gb(vocoder)}, the processes {_gb(3 * _CONTEXT_BYTES)}. Take quantised weights, "
            "vllm.args.tensor_parallel_size, smaller vllm.omni_sessions or vllm.omni_positions, or text alone: "
            "--vllm.omni-speech false"
        ]
    )


def thinker_share(voice_bytes: int, *, total: int) -> float:
    """Return the Thinker's share (0 to 1) of a GPU of ``total`` bytes, beside a voice that takes ``voice_bytes``.

    Raises ConfigurationError if the voice leaves nothing.
    """
    share = round(_ALL - (voice_bytes + 2 * _CONTEXT_BYTES) / total, 3)
    if share <= 0:
        raise ConfigurationError(
            [
                f"the model's own voice takes {_gb(voice_bytes)} of a GPU of {_gb(total)}, and leaves nothing for the "
                "Thinker: take smaller vllm.omni_sessions or vllm.omni_positions, or text alone "
                "(--vllm.omni-speech false)"
            ]
        )
    return share


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
