"""What a chat model reads: its template, with the parts of the input in their places."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from omni_ws.core.chunks import Modality
from omni_ws.engine.base import Message

#: Stands where the input goes while the template is rendered; from a range of characters that no text uses.
_MARKER: Final = "\U000f0a11\U000f0a12"
#: Breaks what would be read as a control token without being seen.
_ZERO_WIDTH_SPACE: Final = "\u200b"
#: Between two words: a tokenizer that reads bytewise pairs never joins anything across it.
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


class PromptForm:
    """How the prompts of one model look. Methods run in the tokenizer's thread; one at a time.

    ``render`` turns messages into the template's text, with the opening of the answer at its end. ``placeholder`` is
    the text that stands for the n-th (from 1) item of a modality.
    """

    def __init__(
        self,
        tokenizer: Any,
        render: Callable[[list[dict[str, str]]], str],
        placeholder: Callable[[Modality, int], str],
        media: frozenset[Modality] = frozenset(),
    ) -> None:
        self._tokenizer = tokenizer
        self._render = render
        self.placeholder = placeholder
        marks = "".join(placeholder(modality, 1) for modality in media)
        added = tokenizer.added_tokens_decoder.values()
        control = {str(token) for token in added if token.special or str(token) in marks}
        # The longest first: one may begin with another.
        ordered = sorted(control | {*tokenizer.all_special_tokens}, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, ordered)) or r"(?!)")
        #: Whether a text may be given to the tokenizer in pieces, cut between words.
        self.divisible = self.tokens("".join(_SAMPLE)) == self.tokens(_SAMPLE[0]) + self.tokens(_SAMPLE[1])

    def tokens(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

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

    def frame(self, instructions: str, history: Sequence[Message]) -> tuple[str, str]:
        """The template's text before and after the input. Raises InvalidValue where it takes no such turns."""
        messages = [{"role": "system", "content": self.plain(instructions)}] if instructions else []
        messages += [{"role": message.role, "content": self.plain(message.text)} for message in history]
        head, _, tail = self._render([*messages, {"role": "user", "content": _MARKER}]).rpartition(_MARKER)
        return head, tail


@dataclass(slots=True)
class PromptDraft:
    """A prompt that is still being written. ``take_stable`` and ``whole`` run in the tokenizer's thread."""

    form: PromptForm
    head: str
    tail: str
    media: list[Media] = field(default_factory=list)
    #: The input so far, as it stands in the prompt.
    _body: str = ""
    #: Where in the body the placeholder of each item begins and ends.
    _places: list[tuple[int, int]] = field(default_factory=list)
    _counts: dict[Modality, int] = field(default_factory=dict)
    _part: int | None = None
    #: Text of the part under way. It is made plain as a whole: a piece may end within what spells a control token.
    _open_text: str = ""
    #: How much was taken early: characters of head and body, items, and the tokens of both.
    _taken_chars: int = 0
    _taken_media: int = 0
    taken: list[int] = field(default_factory=list)

    def add_text(self, text: str, part: int) -> None:
        self._begin(part)
        self._open_text += text

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
        return not (self._body or self._open_text)

    def take_stable(self, least: int) -> Excerpt | None:
        """What further input cannot change and was not taken before; None where that is less than ``least`` tokens.

        Media are always worth it.
        """
        body_begins = len(self.head)
        text = self.head + self._body + self.form.plain(self._open_text)
        end = self.form.last_border(text, self._taken_chars)
        closed = 0
        for begins, ends in self._places:
            if body_begins + begins < end < body_begins + ends:
                end = body_begins + begins
            closed += body_begins + ends <= end
        media = tuple(self.media[self._taken_media : closed])
        tokens = self.form.tokens(text[self._taken_chars : end]) if end > self._taken_chars else []
        if not tokens or (not media and len(tokens) < least):
            return None
        self._taken_chars = end
        self._taken_media = closed
        self.taken += tokens
        return Excerpt(tokens, media)

    def so_far(self) -> Excerpt:
        """Everything that was taken, as one prompt."""
        return Excerpt(self.taken, tuple(self.media[: self._taken_media]))

    def whole(self) -> Excerpt:
        """The finished prompt."""
        return Excerpt(self.form.tokens(self._text()), tuple(self.media))

    def rest(self, whole: Excerpt) -> Excerpt | None:
        """What of the finished prompt was not taken; None where the early tokens are not those of the whole."""
        count = len(self.taken)
        if count >= len(whole.tokens) or whole.tokens[:count] != self.taken:
            return None
        return Excerpt(whole.tokens[count:], whole.media[self._taken_media :])

    def _text(self) -> str:
        return self.head + self._body + self.form.plain(self._open_text) + self.tail

    def _begin(self, part: int, *, always: bool = False) -> None:
        """Parts stand on lines of their own."""
        if part == self._part and not always:
            return
        self._body += self.form.plain(self._open_text)
        self._open_text = ""
        if self._body:
            self._body += "\n"
        self._part = part
