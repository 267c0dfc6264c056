"""Reads and tests the operator's chat template, before a model is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from omni_ws.config.values import ConfigurationError

#: The size limit; models' own templates have about 10 KiB.
MAX_BYTES: Final = 1 << 20
#: Where checkpoints keep templates besides ``tokenizer_config.json``.
_TEMPLATE_FILES: Final = ("chat_template.jinja", "chat_template.json", "processor_config.json")
_WORD: Final = "Hello"
#: Some templates expect content as text, others as a list of parts. A template has to render one of them.
_CONTENTS: Final[tuple[Any, ...]] = (_WORD, [{"type": "text", "text": _WORD}])
#: Placeholders for the checkpoint's special tokens, which are not known yet.
_TOKENS: Final = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), "")


def read_chat_template(path: Path) -> str:
    """Return the template in a file. Blocks. Raises ConfigurationError for anything but a chat template."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise _problem(path, f"must not exceed {MAX_BYTES} bytes")
        template = data.decode()
    except OSError as error:
        raise _problem(path, f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise _problem(path, "is not valid UTF-8") from error
    if not any(_WORD in _rendered(template, content, path) for content in _CONTENTS):
        raise _problem(path, "is not a chat template: it does not render the user's message")
    return template


def lacks_chat_template(model: str) -> bool:
    """Whether a checkpoint on this machine has no chat template; False if that is only known when it has loaded.

    ``model`` is a folder, or the name of a checkpoint that was downloaded before. Blocks.
    """
    settings = _file(model, "tokenizer_config.json")
    if settings is None or any(_file(model, name) is not None for name in _TEMPLATE_FILES):
        return False
    try:
        return not json.loads(settings.read_bytes()).get("chat_template")
    except (OSError, ValueError, AttributeError):
        return False


def _file(model: str, name: str) -> Path | None:
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


def _rendered(template: str, content: Any, path: Path) -> str:
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    conversation = [{"role": "user", "content": content}]
    try:
        (text,), _ = render_jinja_template(
            [conversation], chat_template=template, add_generation_prompt=True, **_TOKENS
        )
    except TemplateSyntaxError as error:
        raise _problem(path, f"is not a valid chat template: line {error.lineno}: {error.message}") from error
    except Exception as error:  # expressions in a template can raise anything
        if content is not _CONTENTS[-1]:
            return ""
        raise _problem(path, f"is not a valid chat template: {error}") from error
    return str(text)


def _problem(path: Path, what: str) -> ConfigurationError:
    return ConfigurationError([f"vllm.chat_template: {path} {what}"])
