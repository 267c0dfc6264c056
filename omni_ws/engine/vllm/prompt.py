"""What a chat model reads: its template, with the parts of the input in their places."""

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

#: Stands where the input goes while the template is rendered; from a range of characters that no text uses.
_MARKER: Final = "\U000f0a11\U000f0a12"
#: Breaks what would be read as a control token without being seen.
_ZERO_WIDTH_SPACE: Final = "\u200b"
#: Between two words: a tokenizer that reads bytewise pairs never joins anything across it.
#: In a longer text what is stable is sought only when it has become longer by an eighth.
FREE_SEARCH_CHARACTERS: Final = 4096
_WORD_BORDER: Final = re.compile(r"(?<=\S) (?=\S)")
_SAMPLE: Final = ("One, two and three: some words", " that stand for all others.")


@dataclass(frozen=True, slots=True)
class Media:
    """``data`` is what vLLM takes for ``modality``."""

    modality: Modality
    data: Any


@dataclass(frozen=True, slots=True)
class Excerpt:
    """A run of the prompt: its tokens, and the media whose placeholders are among them, in order."""

    tokens: list[int]
    media: tuple[Media, ...] = ()

    def for_vllm(self, cache_salt: str | None) -> dict[str, Any]:
        # A list of its own: vLLM lengthens the one that it was given.
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
        """What was not given; None where this does not begin with what was."""
        count = len(given.tokens)
        if count >= len(self.tokens) or self.tokens[:count] != given.tokens:
            return None
        return Excerpt(self.tokens[count:], self.media[len(given.media) :])


@dataclass(frozen=True, slots=True)
class StableExcerpt(Excerpt):
    """What later input cannot change. ``end`` is where it ends, in characters of the template's head and the input."""

    end: int = 0


@dataclass(slots=True)
class Given:
    """The part of a draft that a model has: its beginning, without a gap. What gives it to the model owns this."""

    #: In head and input.
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
    """What stands before the input: instructions, the tools that there are, earlier turns; and whose message it is."""

    instructions: str = ""
    history: tuple[Message, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    #: What stands for the speech in ``history``; where it has nothing, the words count as unknown.
    speech: Mapping[Speech, tuple[Media, ...]] = field(default_factory=dict)
    role: str = "user"

    @property
    def media(self) -> tuple[Media, ...]:
        """Of all earlier turns, in order."""
        return tuple(item for message in self.history if message.speech for item in self.speech.get(message.speech, ()))


class PromptForm:
    """How the prompts of one model look. Methods run in the tokenizer's thread; one at a time.

    ``render`` turns messages and tools into the template's text, with the opening of the answer at its end.
    ``placeholder`` is the text that stands for the n-th (from 1) item of a modality.
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
        # The longest first: one may begin with another.
        ordered = sorted(control | {*tokenizer.all_special_tokens}, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, ordered)) or r"(?!)")
        #: Whether a text may be given to the tokenizer in pieces, cut between words.
        self.divisible = self.tokens("".join(_SAMPLE)) == self.tokens(_SAMPLE[0]) + self.tokens(_SAMPLE[1])

    def placeholder(self, modality: Modality, number: int) -> str:
        return self._placeholder(modality, number)

    def tokens(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def plain(self, text: str) -> str:
        """``text`` without control tokens: what a user writes is never an instruction to the template."""
        return self._control.sub(lambda token: token[0][:1] + _ZERO_WIDTH_SPACE + token[0][1:], text)

    def last_border(self, text: str, start: int) -> int:
        """The last place after ``start`` where what follows cannot change the tokens before it; or ``start``."""
        border = start
        for token in self._control.finditer(text, start):
            border = token.end()
        if self.divisible:
            for space in _WORD_BORDER.finditer(text, border):
                border = space.start()
        return border

    def frame(self, context: PromptContext, *, user: bool = True) -> tuple[str, str]:
        """The template's text before and after the input, which is no message of its own where there is no ``user``.

        After a message of the assistant nothing stands: the answer goes on with it. Raises InvalidValue where the
        template takes no such turns.
        """
        messages: list[dict[str, Any]] = []
        if context.instructions:
            messages.append({"role": "system", "content": self.plain(context.instructions)})
        numbers = Counter[Modality]()
        messages += [self._message(message, context, numbers) for message in _without_broken_calls(context.history)]
        tools = [self._plain_within(tool) for tool in context.tools]
        if not user:
            return self._render(messages, tools), ""
        text = self._render([*messages, {"role": context.role, "content": _MARKER}], tools)
        head, found, tail = text.rpartition(_MARKER)
        if not found:
            raise InvalidValue(f"the model's chat template leaves out a last message of the {context.role}")
        return head, tail

    def _message(self, message: Message, context: PromptContext, numbers: Counter[Modality]) -> dict[str, Any]:
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
        """A description of a tool, its texts without control tokens."""
        if isinstance(value, str):
            return self.plain(value)
        if isinstance(value, Mapping):
            return {self.plain(str(key)): self._plain_within(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self._plain_within(inner) for inner in value]
        return value

    def bare(self, *, tokens: bool = False) -> BareForm:
        """The form of prompts that are taken as they stand: texts, or ``tokens``."""
        return TokenForm(self) if tokens else BareForm(self)


class BareForm(PromptForm):
    """No template, no media: the text is the prompt, and control tokens in it are what they look like.

    The tokenizer adds what it adds to any text, such as a mark of its beginning.
    """

    def __init__(self, form: PromptForm) -> None:
        self.tokenizer = form.tokenizer

    def placeholder(self, modality: Modality, number: int) -> str:
        raise UnsupportedModality("a prompt that is taken as it stands is text", param="modality")

    def frame(self, context: PromptContext, *, user: bool = True) -> tuple[str, str]:
        return "", ""

    def tokens(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text))

    def plain(self, text: str) -> str:
        return text

    def last_border(self, text: str, start: int) -> int:
        return start  # what stands at its beginning is added to it as a whole


class TokenForm(BareForm):
    """For prompts of token ids, which come as a JSON list."""

    def tokens(self, text: str) -> list[int]:
        tokens: list[int] = json.loads(text)
        return tokens


def _without_broken_calls(history: Sequence[Message]) -> Iterator[Message]:
    """No template takes a call whose arguments were cut off when the answer was, nor a result of such a call."""
    broken: set[str] = set()
    for message in history:
        whole = tuple(call for call in message.tool_calls if call.is_whole)
        broken.update(call.id for call in message.tool_calls if not call.is_whole)
        if message.tool_call_id not in broken and (whole or message.text or not message.tool_calls):
            yield replace(message, tool_calls=whole)


@dataclass(slots=True)
class PromptDraft:
    """A prompt that is still being written. ``stable`` and ``whole`` run in the tokenizer's thread.

    It does not know what a model was given of it: that is for the ``Given`` alone.
    """

    form: PromptForm
    context: PromptContext
    #: The template's text around the input.
    head: str = field(init=False)
    tail: str = field(init=False)
    #: In pieces, by the call that they answer.
    tool_results: dict[str, list[str]] = field(default_factory=dict)
    media: list[Media] = field(default_factory=list)
    #: The input so far, as it stands in the prompt.
    _body: str = ""
    #: Where in the body the placeholder of each item begins and ends; those of earlier turns stand before it.
    _places: list[tuple[int, int]] = field(default_factory=list)
    _counts: dict[Modality, int] = field(default_factory=dict)
    _part: int | None = None
    #: Text of the part under way, in pieces. It is made plain as a whole: one may end within what spells a control
    #: token.
    _open_pieces: list[str] = field(default_factory=list)
    _open_characters: int = 0
    #: How long the open text must be before what is stable is sought again: each search reads all of it.
    _search_from: int = 0
    _searched_media: int = 0
    #: The ids of the calls in earlier turns.
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
                raise InvalidValue("the model's chat template has no place for earlier speech")
            end = begin + len(mark)
            self.media.append(item)
            self._places.append((begin - len(self.head), end - len(self.head)))

    def add_tool_result(self, call_id: str, text: str) -> None:
        """Results are messages of their own, before that of the user. Raises InvalidValue for an unknown call."""
        if call_id not in self._calls:
            raise InvalidValue(
                f"no earlier answer of this conversation called a tool as {call_id[:64]!r}", param="tool_call_id"
            )
        self.tool_results.setdefault(call_id, []).append(text)

    def add_text(self, text: str, part: int) -> None:
        self._begin(part)
        self._open_pieces.append(text)
        self._open_characters += len(text)

    def add_media(self, media: Media, part: int) -> None:
        self._begin(part, always=True)
        number = self._counts.get(media.modality, 0) + 1
        self._counts[media.modality] = number
        begins = len(self._body)
        self._body += self.form.placeholder(media.modality, number)
        self.media.append(media)
        self._places.append((begins, len(self._body)))

    @property
    def empty(self) -> bool:
        return not (self._body or self._open_characters)

    @property
    def _open_text(self) -> str:
        return "".join(self._open_pieces)

    def stable(self, given: Given, least: int) -> StableExcerpt | None:
        """What further input cannot change, after what was given; None where that is less than ``least`` tokens.

        Media are always worth it.
        """
        if self.tool_results:
            return None  # there may be more of them, and they stand before everything else
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
        """The finished prompt."""
        if self.tool_results:
            self._tell_results()
        return Excerpt(self.form.tokens(self.text), tuple(self.media))

    def _tell_results(self) -> None:
        results = (
            Message("tool", "".join(pieces), tool_call_id=call_id) for call_id, pieces in self.tool_results.items()
        )
        context = replace(self.context, history=(*self.context.history, *results))
        self.head, self.tail = self.form.frame(context, user=not self.empty)

    @property
    def text(self) -> str:
        """The finished prompt, before it becomes tokens."""
        return self.head + self._body + self.form.plain(self._open_text) + self.tail

    def _begin(self, part: int, *, always: bool = False) -> None:
        """Parts stand on lines of their own."""
        if part == self._part and not always:
            return
        self._body += self.form.plain(self._open_text)
        self._open_pieces, self._open_characters, self._search_from = [], 0, 0
        if self._body:
            self._body += "\n"
        self._part = part
