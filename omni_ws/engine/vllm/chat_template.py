"""The operator's chat template, tried before a model is loaded for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from omni_ws.config.error import ConfigurationError

#: Those of models have some ten KiB.
MAX_BYTES: Final = 1 << 20
_WORD: Final = "Hello"
#: Content is a text to some templates, and a list of parts to others; vLLM finds out which.
_CONTENTS: Final[tuple[Any, ...]] = (_WORD, [{"type": "text", "text": _WORD}])
#: The checkpoint's own are not known yet.
_TOKENS: Final = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), "")


def read_chat_template(path: Path) -> str:
    """Blocks for a moment. Raises ConfigurationError for a file that is no chat template."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise _problem(path, f"a chat template has at most {MAX_BYTES} bytes")
        template = data.decode()
    except OSError as error:
        raise _problem(path, f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise _problem(path, "is no text in UTF-8") from error
    if not any(_WORD in _rendered(template, content, path) for content in _CONTENTS):
        raise _problem(path, "is no chat template: it leaves out what the user says")
    return template


def _rendered(template: str, content: Any, path: Path) -> str:
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    conversation = [{"role": "user", "content": content}]
    try:
        (text,), _ = render_jinja_template(
            [conversation], chat_template=template, add_generation_prompt=True, **_TOKENS
        )
    except TemplateSyntaxError as error:
        raise _problem(path, f"is no chat template: line {error.lineno}: {error.message}") from error
    except Exception as error:  # whatever its expressions raise
        if content is not _CONTENTS[-1]:
            return ""
        raise _problem(path, f"is no chat template: {error}") from error
    return str(text)


def _problem(path: Path, what: str) -> ConfigurationError:
    return ConfigurationError([f"vllm.chat_template: {path} {what}"])
