"""PromptForm: the format of one model's prompts: the chat template, placeholders of media, and the tokenizer."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final

from omni_ws.core.chunks import Modality
from omni_ws.core.history import WORDS_UNKNOWN, Message, Speech
from omni_ws.engine.vllm.excerpt import Media
from omni_ws.engine.vllm.media_sizes import MediaSizes
from omni_ws.errors import InvalidValue, UnsupportedModality

#: Marks the position of the input in the rendered template; private-use characters that do not occur in text.
_MARKER: Final = "\U000f0a11\U000f0a12"
#: Marks a control token that is only text, behind its first character; removed when that is tokenised. Unicode reserves
#: this code point for such use.
_ONLY_TEXT: Final = "\ufdd0"
#: A position between words, across which byte-pair tokenizers do not merge.
_WORD_BORDER: Final = re.compile(r"(?<=\S) (?=\S)")
#: Text to test whether a tokenizer really does not merge there.
_SAMPLE: Final = ("One, two and three: some words", " that stand for all others.")


@dataclass(frozen=True, slots=True)
class PromptContext:
    """What precedes the input: instructions, tools, history; and the role of the input's message."""

    instructions: str = ""
    history: tuple[Message, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    #: Arguments of the template.
    arguments: Mapping[str, Any] = field(default_factory=dict)
    #: The audio for the speech in ``history``; speech without an entry is represented by ``WORDS_UNKNOWN``.
    speech: Mapping[Speech, tuple[Media, ...]] = field(default_factory=dict)
    role: str = "user"

    @property
    def media(self) -> tuple[Media, ...]:
        """The media of the history, in order."""
        parts = (part for message in self.history for part in message.parts)
        return tuple(item for part in parts if part.speech for item in self.speech.get(part.speech, ()))


class PromptForm:
    """The format of one model's prompts. Its methods run in the tokenizer's thread.

    ``render`` applies the chat template to messages, tools and further arguments, and ends with the header of the
    answer. ``placeholder`` returns the text that stands for the n-th item of a modality (from 1).
    """

    def __init__(
        self,
        tokenizer: Any,
        render: Callable[[list[dict[str, Any]], list[dict[str, Any]], Mapping[str, Any]], str],
        placeholder: Callable[[Modality, int], str],
        media: frozenset[Modality] = frozenset(),
    ) -> None:
        self.tokenizer = tokenizer
        self.media_sizes = MediaSizes()
        self._render = render
        self._placeholder = placeholder
        marks = "".join(placeholder(modality, 1) for modality in media)
        added = tokenizer.added_tokens_decoder.values()
        control = {str(token) for token in added if token.special or str(token) in marks}
        # Longest first, because some start with others.
        ordered = sorted(control | {*tokenizer.all_special_tokens}, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, ordered)) or r"(?!)")
        self._control_ids = {
            number for number, token in tokenizer.added_tokens_decoder.items() if str(token) in control
        }
        #: Whether text may be tokenised in pieces that are cut between words.
        self.divisible = self.tokens("".join(_SAMPLE)) == self.tokens(_SAMPLE[0]) + self.tokens(_SAMPLE[1])

    def placeholder(self, modality: Modality, number: int) -> str:
        """Return the text that stands for the ``number``-th item of ``modality``, from 1."""
        return self._placeholder(modality, number)

    def tokens(self, text: str) -> list[int]:
        """Return the tokens of ``text``, without special tokens around it.

        Control tokens that ``plain`` has marked are tokenised as text. They cannot share a piece with real ones, which
        every tokenizer looks for first.
        """
        if _ONLY_TEXT not in text:
            return self._encoded(text)
        tokens: list[int] = []
        done = begin = 0
        for border in [*self._control.finditer(text), None]:
            end = len(text) if border is None else border.start()
            if _ONLY_TEXT in text[begin:end]:
                tokens += self._encoded(text[done:begin]) + self._tokens_of_text(text[begin:end])
                done = end
            begin = len(text) if border is None else border.end()
        return tokens + self._encoded(text[done:])

    def _encoded(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False)) if text else []

    def _tokens_of_text(self, marked: str) -> list[int]:
        text = marked.replace(_ONLY_TEXT, "")
        tokens = list(self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))
        if self._control_ids.isdisjoint(tokens):
            return tokens
        # A placeholder that the tokenizer does not regard as special is still found; not so in two halves.
        return [token for piece in marked.split(_ONLY_TEXT) for token in self._encoded(piece)]

    def size(self, message: Message, speech: Mapping[Speech, tuple[Media, ...]]) -> int:
        """Return about how many tokens a message of the history takes; ``speech`` is the audio of the history."""
        texts = [part.text for part in message.parts]
        texts += [part for call in message.tool_calls for part in (call.name, call.arguments)]
        spoken = (part.speech for part in message.parts if part.speech is not None)
        heard = [item for one in spoken for item in speech.get(one, ())]
        return self._template_tokens + len(self.tokens(" ".join(texts))) + sum(map(self.media_sizes.of, heard))

    @cached_property
    def _template_tokens(self) -> int:
        """What the template adds to a message of the history, in tokens."""
        try:
            alone, _ = self.frame(PromptContext())
            after, _ = self.frame(PromptContext(history=(Message("user", "a"), Message("assistant", "b"))))
        except InvalidValue:
            return 0
        return max(0, (len(self.tokens(after)) - len(self.tokens(alone))) // 2 - 1)

    def plain(self, text: str) -> str:
        """Return ``text`` with control tokens marked as text, so that clients cannot inject them."""
        text = text.replace(_ONLY_TEXT, "")
        return self._control.sub(lambda token: token[0][:1] + _ONLY_TEXT + token[0][1:], text)

    def last_border(self, text: str, start: int) -> int:
        """Return the last position from which text cannot affect the tokens before it, or ``start``."""
        border = start
        for token in self._control.finditer(text, start):
            border = token.end()
        if self.divisible:
            for space in _WORD_BORDER.finditer(text, border):
                border = space.start()
        return border

    def frame(self, context: PromptContext, *, user: bool = True) -> tuple[str, str]:
        """Return the template's text before and after the input; without ``user`` there is no message of the input.

        The text after a message of the assistant is empty: the answer continues it. Raises InvalidValue when the
        template rejects the messages.
        """
        messages: list[dict[str, Any]] = []
        if context.instructions:
            messages.append({"role": "system", "content": self.plain(context.instructions)})
        numbers = Counter[Modality]()
        messages += [self._message(message, context, numbers) for message in _without_broken_calls(context.history)]
        tools = [self._plain_within(tool) for tool in context.tools]
        arguments = self._plain_within(context.arguments)
        if not user:
            return self._rendered(messages, tools, arguments), ""
        text = self._rendered([*messages, {"role": context.role, "content": _MARKER}], tools, arguments)
        head, found, tail = text.rpartition(_MARKER)
        if not found:
            raise InvalidValue(f"the model's chat template does not render a last message of role {context.role}")
        return head, tail

    def _rendered(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], arguments: Mapping[str, Any]
    ) -> str:
        """Render ``messages``; an answer that opens them follows an empty message of the user where it has to.

        Some templates demand that the user begins, but a greeting is an answer without a question.
        """
        try:
            return self._render(messages, tools, arguments)
        except InvalidValue:
            opening = next((index for index, message in enumerate(messages) if message["role"] != "system"), None)
            if opening is None or messages[opening]["role"] != "assistant":
                raise
            opened = [*messages[:opening], {"role": "user", "content": ""}, *messages[opening:]]
            return self._render(opened, tools, arguments)

    def _message(self, message: Message, context: PromptContext, numbers: Counter[Modality]) -> dict[str, Any]:
        """Return a message of the history in the form of chat templates."""
        content: list[str] = []
        for part in message.parts:
            content += [self.plain(part.text)] if part.text else []
            if part.speech is None:
                continue
            spoken = context.speech.get(part.speech, ())
            for item in spoken:
                numbers[item.modality] += 1
                content.append(self.placeholder(item.modality, numbers[item.modality]))
            content += [] if spoken else [WORDS_UNKNOWN]
        fields: dict[str, Any] = {"role": message.role, "content": "\n".join(content)}
        if message.tool_calls:
            fields["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": self.plain(call.name), "arguments": self.plain(call.arguments)},
                }
                for call in message.tool_calls
            ]
        if message.tool_call_id is not None:
            fields["tool_call_id"] = message.tool_call_id
        return fields

    def _plain_within(self, value: Any) -> Any:
        """Return a value with control tokens marked as text in all its strings."""
        if isinstance(value, str):
            return self.plain(value)
        if isinstance(value, Mapping):
            return {self.plain(str(key)): self._plain_within(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self._plain_within(inner) for inner in value]
        return value

    def bare(self, *, tokens: bool = False) -> BareForm:
        """Return the form of raw prompts, given as text or, with ``tokens``, as token IDs."""
        return TokenForm(self) if tokens else BareForm(self)


class BareForm(PromptForm):
    """The form of raw prompts: no template, no media; control tokens in the text are effective.

    The tokenizer adds what it adds to any text, such as a token that marks the beginning.
    """

    def __init__(self, form: PromptForm) -> None:
        self.tokenizer = form.tokenizer
        self.media_sizes = form.media_sizes

    def placeholder(self, modality: Modality, number: int) -> str:
        raise UnsupportedModality("a raw prompt must be text", param="modality")

    def frame(self, context: PromptContext, *, user: bool = True) -> tuple[str, str]:
        return "", ""

    def tokens(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text))

    def plain(self, text: str) -> str:
        return text

    def last_border(self, text: str, start: int) -> int:
        return start  # the tokenizer adds tokens to the prompt as a whole, so no part of it is stable


class TokenForm(BareForm):
    """The form of raw prompts that are JSON arrays of token IDs."""

    def tokens(self, text: str) -> list[int]:
        tokens: list[int] = json.loads(text)
        return tokens


def _without_broken_calls(history: Sequence[Message]) -> Iterator[Message]:
    """Drop tool calls whose arguments were cut off, and their results: templates reject them."""
    broken: set[str] = set()
    for message in history:
        whole = tuple(call for call in message.tool_calls if call.is_whole)
        broken.update(call.id for call in message.tool_calls if not call.is_whole)
        if message.tool_call_id not in broken and (whole or message.text or not message.tool_calls):
            yield replace(message, tool_calls=whole)
