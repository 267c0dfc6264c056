"""Builds a prompt for a chat model: the chat template with the input inserted, while that is still arriving.

PromptDraft is one prompt in progress. A *stable* part of it is one whose tokens no further input can change.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from omni_ws.core.chunks import Modality
from omni_ws.core.history import Message
from omni_ws.engine.vllm.excerpt import Excerpt, Given, Media, StableExcerpt
from omni_ws.engine.vllm.history_trim import HistoryTrim, PromptLimit
from omni_ws.engine.vllm.prompt_form import PromptContext, PromptForm
from omni_ws.errors import InvalidValue

#: Beyond this length, the stable part of open text is searched again only when the text has grown by an eighth, which
#: keeps the total work linear.
FREE_SEARCH_CHARACTERS: Final = 4096


@dataclass(slots=True)
class PromptDraft:
    """A prompt in progress. ``stable`` and ``whole`` run in the tokenizer's thread.

    Which part of it a model has received is not its concern; see Given.
    """

    form: PromptForm
    #: What precedes the input; without the turns that were left out.
    context: PromptContext
    #: None for any length.
    limit: PromptLimit | None = None
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
    #: The text of the current part. Control tokens are marked in the whole text, as they may span pieces.
    _open_pieces: list[str] = field(default_factory=list)
    _open_characters: int = 0
    #: The length that the open text must have before its stable part is searched again: each search reads all of it.
    _search_from: int = 0
    _searched_media: int = 0
    #: The IDs of the tool calls in the whole history.
    _calls: frozenset[str] = frozenset()
    _trim: HistoryTrim = field(init=False)
    #: The tool calls whose turns are not left out.
    _pinned: Collection[str] = ()
    #: The complete tool results; empty while the input is open.
    _results: tuple[Message, ...] = ()

    def __post_init__(self) -> None:
        history, limit = self.context.history, self.limit
        self._calls = frozenset(call.id for message in history for call in message.tool_calls)
        stride = 1 if limit is None else limit.stride
        self._trim = HistoryTrim(history, stride, partial(self.form.size, speech=self.context.speech))
        self._frame()
        self._pinned = self._trim.open_calls
        if limit is not None and history:
            room = limit.prompt - limit.input_reserve
            if len(self.text.encode()) + self._media_tokens > room:  # a token has at least a byte
                self._fit(room)

    def _frame(self) -> None:
        """Render the template around the input. Media of the input are numbered behind those of the history."""
        begun = [place for place in self._places if place[0] >= 0]
        media = self.media[len(self.media) - len(begun) :]
        context = replace(self.context, history=(*self.context.history, *self._results))
        self.head, self.tail = self.form.frame(context, user=not (self._results and self.empty))
        self.media, self._places, self._counts = [], [], {}
        end = 0
        for item in self.context.media:
            mark = self._next_placeholder(item)
            begin = self.head.find(mark, end)
            if begin < 0:
                raise InvalidValue("the model's chat template does not render speech of earlier requests")
            end = begin + len(mark)
            self.media.append(item)
            self._places.append((begin - len(self.head), end - len(self.head)))
        body, self._body = self._body, ""
        end = 0
        for (begins, ends), item in zip(begun, media, strict=True):
            self._body += body[end:begins]
            self._place(item)
            end = ends
        self._body += body[end:]

    def _place(self, media: Media) -> None:
        """Add the placeholder of a media item to the body."""
        begins = len(self._body)
        self._body += self._next_placeholder(media)
        self.media.append(media)
        self._places.append((begins, len(self._body)))

    def _next_placeholder(self, media: Media) -> str:
        number = self._counts.get(media.modality, 0) + 1
        self._counts[media.modality] = number
        return self.form.placeholder(media.modality, number)

    def _fit(self, room: int) -> list[int]:
        """Leave out turns of the history until the prompt has ``room`` tokens, or none is left; returns its tokens."""
        while True:
            tokens = self.form.tokens(self.text)
            excess = len(tokens) + self._media_tokens - room
            if excess <= 0 or not self._leave_out(excess):
                return tokens

    @property
    def _media_tokens(self) -> int:
        return sum(map(self.form.media_sizes.of, self.media))

    def _leave_out(self, tokens: int) -> bool:
        if not self._trim.leave_out(tokens):
            return False
        self.context = replace(self.context, history=self._trim.kept(self._pinned))
        self._frame()
        return True

    def costs_history(self, tokens: int) -> bool:
        """Whether history would have to be left out of a prompt of so many tokens, besides its media."""
        if self.limit is None or not self.context.history:
            return False
        return tokens + self._media_tokens > self.limit.prompt

    def shorten(self) -> bool:
        """Leave out more of the history, as the prompt turned out to be too long; returns False if nothing is left."""
        return self._leave_out(1)

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
        self._place(media)

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
            self._pinned = self.tool_results
            self._results = tuple(
                Message("tool", "".join(pieces), tool_call_id=call_id) for call_id, pieces in self.tool_results.items()
            )
            self.context = replace(self.context, history=self._trim.kept(self._pinned))
            self._frame()
        tokens = self.form.tokens(self.text) if self.limit is None else self._fit(self.limit.prompt)
        return Excerpt(tokens, tuple(self.media))

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
