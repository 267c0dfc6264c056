"""Builds prompts for a chat model: the chat template with the input inserted, while that is still arriving.

PromptForm knows the format of one model's prompts; PromptDraft is one prompt in progress. A *stable* part of a draft is
one whose tokens no further input can change.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from omni_ws.core.chunks import Modality
from omni_ws.engine.base import WORDS_UNKNOWN, Message, Speech
from omni_ws.errors import InvalidValue, UnsupportedModality

#: Marks the position of the input in the rendered template; private-use characters that do not occur in text.
_MARKER: Final = "\U000f0a11\U000f0a12"
#: Inserted into text that spells a control token, to break it up invisibly.
_ZERO_WIDTH_SPACE: Final = "\u200b"
#: Beyond this length, the stable part of open text is searched again only when the text has grown by an eighth, which
#: keeps the total work linear.
FREE_SEARCH_CHARACTERS: Final = 4096
#: A position between words, across which byte-pair tokenizers do not merge.
_WORD_BORDER: Final = re.compile(r"(?<=\S) (?=\S)")
#: Text to test whether a tokenizer really does not merge there.
_SAMPLE: Final = ("One, two and three: some words", " that stand for all others.")


@dataclass(frozen=True, slots=True)
class Media:
    """A media item, with ``data`` in the form that vLLM expects for ``modality``."""

    modality: Modality
    data: Any


@dataclass(frozen=True, slots=True)
class Excerpt:
    """A contiguous part of a prompt: its tokens, and the media whose placeholders are among them, in order."""

    tokens: list[int]
    media: tuple[Media, ...] = ()

    def for_vllm(self, cache_salt: str | None) -> dict[str, Any]:
        """Return the excerpt as a prompt of vLLM."""
        # A copy, because vLLM appends to the list.
        prompt: dict[str, Any] = {"prompt_token_ids": list(self.tokens)}
        if self.media:
            data: dict[str, list[Any]] = {}
            for item in self.media:
                data.setdefault(item.modality.value, []).append(item.data)
            prompt["multi_modal_data"] = data
        if cache_salt is not None:
            prompt["cache_salt"] = cache_salt
        return prompt

    def after(self, given: Given) -> Excerpt | None:
        """Return what follows ``given``; None if this excerpt does not start with it."""
        count = len(given.tokens)
        if count >= len(self.tokens) or self.tokens[:count] != given.tokens:
            return None
        return Excerpt(self.tokens[count:], self.media[len(given.media) :])


@dataclass(frozen=True, slots=True)
class StableExcerpt(Excerpt):
    """An excerpt that further input cannot change.

    ``end`` is its end, in characters of the template's head and the input.
    """

    end: int = 0


@dataclass(slots=True)
class Given:
    """The part of a draft, from its beginning, that a model has received. Owned by the code that submits it."""

    #: Its length, in characters of the template's head and the input.
    chars: int = 0
    tokens: list[int] = field(default_factory=list)
    media: list[Media] = field(default_factory=list)

    def add(self, excerpt: StableExcerpt) -> None:
        self.chars = excerpt.end
        self.tokens += excerpt.tokens
        self.media += excerpt.media

    @property
    def whole(self) -> Excerpt:
        """All of it, as one prompt."""
        return Excerpt(self.tokens, tuple(self.media))


@dataclass(frozen=True, slots=True)
class PromptContext:
    """What precedes the input: instructions, tools, history; and the role of the input's message."""

    instructions: str = ""
    history: tuple[Message, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    #: The audio for the speech in ``history``; speech without an entry is represented by ``WORDS_UNKNOWN``.
    speech: Mapping[Speech, tuple[Media, ...]] = field(default_factory=dict)
    role: str = "user"

    @property
    def media(self) -> tuple[Media, ...]:
        """The media of the history, in order."""
        return tuple(item for message in self.history if message.speech for item in self.speech.get(message.speech, ()))


class PromptForm:
    """The format of one model's prompts. Its methods run in the tokenizer's thread.

    ``render`` applies the chat template to messages and tools, and ends with the header of the answer. ``placeholder``
    returns the text that stands for the n-th item of a modality (from 1).
    """

    def __init__(
        self,
        tokenizer: Any,
        render: Callable[[list[dict[str, Any]], list[dict[str, Any]]], str],
        placeholder: Callable[[Modality, int], str],
        media: frozenset[Modality] = frozenset(),
    ) -> None:
        self.tokenizer = tokenizer
        self._render = render
        self._placeholder = placeholder
        marks = "".join(placeholder(modality, 1) for modality in media)
        added = tokenizer.added_tokens_decoder.values()
        control = {str(token) for token in added if token.special or str(token) in marks}
        # Longest first, because some start with others.
        ordered = sorted(control | {*tokenizer.all_special_tokens}, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, ordered)) or r"(?!)")
        #: Whether text may be tokenised in pieces that are cut between words.
        self.divisible = self.tokens("".join(_SAMPLE)) == self.tokens(_SAMPLE[0]) + self.tokens(_SAMPLE[1])

    def placeholder(self, modality: Modality, number: int) -> str:
        """Return the text that stands for the ``number``-th item of ``modality``, from 1."""
        return self._placeholder(modality, number)

    def tokens(self, text: str) -> list[int]:
        """Return the tokens of ``text``, without special tokens around it."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def plain(self, text: str) -> str:
        """Return ``text`` with control tokens broken up, so that clients cannot inject them."""
        return self._control.sub(lambda token: token[0][:1] + _ZERO_WIDTH_SPACE + token[0][1:], text)

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
        if not user:
            return self._rendered(messages, tools), ""
        text = self._rendered([*messages, {"role": context.role, "content": _MARKER}], tools)
        head, found, tail = text.rpartition(_MARKER)
        if not found:
            raise InvalidValue(f"the model's chat template does not render a last message of role {context.role}")
        return head, tail

    def _rendered(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
        """Render ``messages``; an answer that opens them follows an empty message of the user where it has to.

        Some templates demand that the user begins, but a greeting is an answer without a question.
        """
        try:
            return self._render(messages, tools)
        except InvalidValue:
            opening = next((index for index, message in enumerate(messages) if message["role"] != "system"), None)
            if opening is None or messages[opening]["role"] != "assistant":
                raise
            return self._render([*messages[:opening], {"role": "user", "content": ""}, *messages[opening:]], tools)

    def _message(self, message: Message, context: PromptContext, numbers: Counter[Modality]) -> dict[str, Any]:
        """Return a message of the history in the form of chat templates."""
        content = [self.plain(message.text)] if message.text else []
        if message.speech is not None:
            spoken = context.speech.get(message.speech, ())
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
        """Return a tool description with control tokens broken up in all its strings."""
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


@dataclass(slots=True)
class PromptDraft:
    """A prompt in progress. ``stable`` and ``whole`` run in the tokenizer's thread.

    Which part of it a model has received is not its concern; see Given.
    """

    form: PromptForm
    context: PromptContext
    #: The template's text before and after the input.
    head: str = field(init=False)
    tail: str = field(init=False)
    #: The pieces of tool results, by the ID of the call.
    tool_results: dict[str, list[str]] = field(default_factory=dict)
    media: list[Media] = field(default_factory=list)
    #: The completed parts of the input, as text of the prompt.
    _body: str = ""
    #: Start and end of each placeholder in the body; negative for those of the history, which are in the head.
    _places: list[tuple[int, int]] = field(default_factory=list)
    _counts: dict[Modality, int] = field(default_factory=dict)
    _part: int | None = None
    #: The text of the current part. Control tokens are broken up in the whole text, as they may span pieces.
    _open_pieces: list[str] = field(default_factory=list)
    _open_characters: int = 0
    #: The length that the open text must have before its stable part is searched again: each search reads all of it.
    _search_from: int = 0
    _searched_media: int = 0
    #: The IDs of the tool calls in the history.
    _calls: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        self._calls = frozenset(call.id for message in self.context.history for call in message.tool_calls)
        self.head, self.tail = self.form.frame(self.context)
        end = 0
        for item in self.context.media:
            number = self._counts.get(item.modality, 0) + 1
            self._counts[item.modality] = number
            mark = self.form.placeholder(item.modality, number)
            begin = self.head.find(mark, end)
            if begin < 0:
                raise InvalidValue("the model's chat template does not render speech of earlier requests")
            end = begin + len(mark)
            self.media.append(item)
            self._places.append((begin - len(self.head), end - len(self.head)))

    def add_tool_result(self, call_id: str, text: str) -> None:
        """Add a piece of a tool result, a message of its own before the user's.

        Raises InvalidValue for an unknown call.
        """
        if call_id not in self._calls:
            raise InvalidValue(
                f"no earlier answer of this conversation has the tool call {call_id[:64]!r}", param="tool_call_id"
            )
        self.tool_results.setdefault(call_id, []).append(text)

    def add_text(self, text: str, part: int) -> None:
        """Add a piece of text to ``part``."""
        self._begin(part)
        self._open_pieces.append(text)
        self._open_characters += len(text)

    def add_media(self, media: Media, part: int) -> None:
        """Add a media item, as a placeholder on a line of its own."""
        self._begin(part, always=True)
        number = self._counts.get(media.modality, 0) + 1
        self._counts[media.modality] = number
        begins = len(self._body)
        self._body += self.form.placeholder(media.modality, number)
        self.media.append(media)
        self._places.append((begins, len(self._body)))

    @property
    def empty(self) -> bool:
        """Whether there is no input, besides tool results."""
        return not (self._body or self._open_characters)

    @property
    def _open_text(self) -> str:
        return "".join(self._open_pieces)

    def stable(self, given: Given, least: int) -> StableExcerpt | None:
        """Return the part after ``given`` that further input cannot change, or None.

        It has at least ``least`` tokens, unless it contains media, which are always worth computing ahead.
        """
        if self.tool_results:
            return None  # more may follow, and they precede everything else
        if self._open_characters < self._search_from and len(self.media) == self._searched_media:
            return None
        self._searched_media = len(self.media)
        if self._open_characters > FREE_SEARCH_CHARACTERS:
            self._search_from = self._open_characters + self._open_characters // 8
        body_begins = len(self.head)
        text = self.head + self._body + self.form.plain(self._open_text)
        end = self.form.last_border(text, given.chars)
        closed = 0
        for begins, ends in self._places:
            if body_begins + begins < end < body_begins + ends:
                end = body_begins + begins
            closed += body_begins + ends <= end
        media = tuple(self.media[len(given.media) : closed])
        tokens = self.form.tokens(text[given.chars : end]) if end > given.chars else []
        if not tokens or (not media and len(tokens) < least):
            return None
        return StableExcerpt(tokens, media, end)

    def whole(self) -> Excerpt:
        """Return the complete prompt."""
        if self.tool_results:
            self._insert_results()
        return Excerpt(self.form.tokens(self.text), tuple(self.media))

    def _insert_results(self) -> None:
        """Insert the tool results into the template."""
        results = (
            Message("tool", "".join(pieces), tool_call_id=call_id) for call_id, pieces in self.tool_results.items()
        )
        context = replace(self.context, history=(*self.context.history, *results))
        self.head, self.tail = self.form.frame(context, user=not self.empty)

    @property
    def text(self) -> str:
        """The complete prompt as text."""
        return self.head + self._body + self.form.plain(self._open_text) + self.tail

    def _begin(self, part: int, *, always: bool = False) -> None:
        """Complete the open text if a new part begins; each part starts on a new line."""
        if part == self._part and not always:
            return
        self._body += self.form.plain(self._open_text)
        self._open_pieces, self._open_characters, self._search_from = [], 0, 0
        if self._body:
            self._body += "\n"
        self._part = part
