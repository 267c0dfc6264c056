"""Prompts for a chat model, built while their input arrives.

A PromptDraft is one prompt in progress: the chat template with the input inserted. A PromptForm is the format of a
model's prompts. A part of the prompt is *stable* if no further input can change its tokens. An Excerpt is a part that
is submitted to the model. HistoryTrim decides which turns of a long history are left out, by the sizes of messages and
media (MediaSizes).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Final, Self

import msgspec

from omni_ws.core.chunks import Modality
from omni_ws.core.history import WORDS_UNKNOWN, Message, Speech
from omni_ws.engine.clauses import whole_turns
from omni_ws.errors import InvalidValue, UnsupportedModality

#: Beyond this length, the stable part of open text is searched again only when the text has grown by an eighth, which
#: keeps the total work linear.
FREE_SEARCH_CHARACTERS: Final = 4096


@dataclass(slots=True)
class PromptDraft:
    """A prompt in progress.

    The constructor, ``stable``, ``whole`` and ``shorten`` run in the tokenizer's thread, unless the text is short. A
    history that is too long for ``limit`` is shortened in the constructor. The draft does not record which part of the
    prompt a model has received already; Given does. Raises InvalidValue if the template rejects the context.
    """

    form: PromptForm
    #: Instructions, tools and history before the input; without the turns that were left out.
    context: PromptContext
    #: None for no limit.
    limit: PromptLimit | None = None
    #: The template's text before and after the input.
    head: str = field(init=False)
    tail: str = field(init=False)
    #: The pieces of tool results, by the ID of the call.
    tool_results: dict[str, list[str]] = field(default_factory=dict)
    media: list[Media] = field(default_factory=list)
    #: The completed parts of the input, as text of the prompt.
    _body: str = ""
    #: Start and end of each placeholder, counted from the beginning of the body; negative for placeholders of the
    #: history, which are in the head.
    _places: list[tuple[int, int]] = field(default_factory=list)
    _counts: dict[Modality, int] = field(default_factory=dict)
    _part: int | None = None
    #: The text of the current part. Control tokens are marked in the whole text, as they may span pieces.
    _open_pieces: list[str] = field(default_factory=list)
    _open_characters: int = 0
    #: The length that the open text must have before its stable part is searched again: each search reads all the text.
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
            most = limit.prompt - limit.input_reserve
            if len(self.text.encode()) + self._media_tokens > most:  # a token has at least a byte
                self._shorten_to(most)

    def _frame(self) -> None:
        """Render the template around the input, and number the media: first those of the history, then the input's."""
        begun = [place for place in self._places if place[0] >= 0]
        media = self.media[len(self.media) - len(begun) :]
        context = replace(self.context, history=(*self.context.history, *self._results))
        self.head, self.tail = self.form.frame(context, user=not (self._results and self.empty))
        self.tail += self.form.plain(context.begun)
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
        """Add the placeholder of a media item to the text of the input (``_body``)."""
        begins = len(self._body)
        self._body += self._next_placeholder(media)
        self.media.append(media)
        self._places.append((begins, len(self._body)))

    def _next_placeholder(self, media: Media) -> str:
        number = self._counts.get(media.modality, 0) + 1
        self._counts[media.modality] = number
        return self.form.placeholder(media.modality, number)

    def _shorten_to(self, most: int) -> list[int]:
        """Leave out turns of the history until the prompt has at most ``most`` tokens, or no turn is left.

        Returns the tokens of the prompt.
        """
        while True:
            tokens = self.form.tokens(self.text)
            excess = len(tokens) + self._media_tokens - most
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
        """Whether a prompt with ``tokens`` tokens, and the media, is so long that turns of history must be left out."""
        if self.limit is None or not self.context.history:
            return False
        return tokens + self._media_tokens > self.limit.prompt

    def shorten(self) -> bool:
        """Leave out more turns, because the prompt turned out to be too long; return False if none was left to omit."""
        return self._leave_out(1)

    def add_tool_result(self, call_id: str, text: str) -> None:
        """Add a piece of a tool result; each result becomes a message before the user's message.

        Raises InvalidValue for an unknown call.
        """
        if call_id not in self._calls:
            raise InvalidValue(
                f"no earlier answer of this conversation has the tool call {call_id[:64]!r}", param="tool_call_id"
            )
        self.tool_results.setdefault(call_id, []).append(text)

    def add_text(self, text: str, part: int) -> None:
        """Add a piece of text to the part of the input with the number ``part``."""
        self._begin(part)
        self._open_pieces.append(text)
        self._open_characters += len(text)

    def add_media(self, media: Media, part: int) -> None:
        """Add a media item, as a placeholder on a new line. Raises UnsupportedModality in a raw prompt."""
        self._begin(part, always=True)
        self._place(media)

    @property
    def empty(self) -> bool:
        """Whether there is no input, besides tool results."""
        return not (self._body or self._open_characters)

    @property
    def _open_text(self) -> str:
        return "".join(self._open_pieces)

    def stable(self, given: Given, least: int) -> Excerpt | None:
        """Return the part of the prompt after ``given`` that further input cannot change; None if there is none yet.

        With tool results there is none. A part without media must have at least ``least`` tokens; a part with media is
        always worth an early computation. Long open text is searched only now and then, see FREE_SEARCH_CHARACTERS.
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
        return Excerpt(tokens, media, end)

    def whole(self) -> Excerpt:
        """Return the complete prompt, at the end of the input, with the tool results.

        Turns of the history are left out as far as ``limit`` demands it. If no turn is left, the prompt may still
        exceed it. Raises InvalidValue if the template rejects the tool results.
        """
        if self.tool_results:
            self._pinned = self.tool_results
            self._results = tuple(
                Message("tool", "".join(pieces), tool_call_id=call_id) for call_id, pieces in self.tool_results.items()
            )
            self.context = replace(self.context, history=self._trim.kept(self._pinned))
            self._frame()
        tokens = self.form.tokens(self.text) if self.limit is None else self._shorten_to(self.limit.prompt)
        return Excerpt(tokens, tuple(self.media))

    @property
    def text(self) -> str:
        """The complete prompt as text; the tool results are in it once ``whole`` was called."""
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


#: Marks the position of the input in the rendered template; private-use characters that do not occur in text.
_MARKER: Final = "\U000f0a11\U000f0a12"
#: Marks a control token as text: it is inserted after the token's first character, and removed when the text is
#: tokenised. Unicode reserves this code point for internal use.
_ONLY_TEXT: Final = "\ufdd0"
#: A position between words, across which byte-pair tokenizers do not merge.
_WORD_BORDER: Final = re.compile(r"(?<=\S) (?=\S)")
#: Text to test whether a tokenizer really does not merge across such a position.
_SAMPLE: Final = ("One, two and three: some words", " that stand for all others.")


@dataclass(frozen=True, slots=True)
class PromptContext:
    """Everything in a prompt except the input. ``role`` is the role of the input's message."""

    instructions: str = ""
    history: tuple[Message, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    #: Arguments of the template.
    arguments: Mapping[str, Any] = field(default_factory=dict)
    #: The audio for the speech in ``history``; speech without an entry is represented by ``WORDS_UNKNOWN``.
    speech: Mapping[Speech, tuple[Media, ...]] = field(default_factory=dict)
    role: str = "user"
    #: The beginning of the answer, which the model goes on with.
    begun: str = ""

    @property
    def media(self) -> tuple[Media, ...]:
        """The media of the history, in order."""
        parts = (part for message in self.history for part in message.parts)
        return tuple(item for part in parts if part.speech for item in self.speech.get(part.speech, ()))


class PromptForm:
    """The format of one model's prompts. Its methods run in the tokenizer's thread, unless the text is short.

    ``render`` applies the chat template to messages, tools and further arguments. The result ends with the header of
    the answer or, if the last message is the assistant's, with this message. ``placeholder`` returns the text that
    stands for the n-th item of a modality (from 1). ``media`` are the modalities that the model reads: the tokens of
    their placeholders count as control tokens.
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
        """Return the token IDs of ``text``, without special tokens around them.

        Control tokens that ``plain`` has marked are tokenised as text. Real control tokens separate the text into
        pieces, as every tokenizer looks for them first.
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
        # The tokenizer still finds a placeholder that is not a special token, unless it gets the text in two halves.
        return [token for piece in marked.split(_ONLY_TEXT) for token in self._encoded(piece)]

    def size(self, message: Message, speech: Mapping[Speech, tuple[Media, ...]]) -> int:
        """Return an estimate of the tokens of a message of the history; ``speech`` has the history's audio."""
        texts = [part.text for part in message.parts]
        texts += [part for call in message.tool_calls for part in (call.name, call.arguments)]
        spoken = (part.speech for part in message.parts if part.speech is not None)
        heard = [item for one in spoken for item in speech.get(one, ())]
        return self._template_tokens + len(self.tokens(" ".join(texts))) + sum(map(self.media_sizes.of, heard))

    @cached_property
    def _template_tokens(self) -> int:
        """The number of tokens that the template adds to a message of the history."""
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
        """Return the last position in ``text`` such that the text after it cannot affect the tokens before it.

        Returns ``start`` if there is no such position after ``start``.
        """
        border = start
        for token in self._control.finditer(text, start):
            border = token.end()
        if self.divisible:
            for space in _WORD_BORDER.finditer(text, border):
                border = space.start()
        return border

    def frame(self, context: PromptContext, *, user: bool = True) -> tuple[str, str]:
        """Return the template's text before the input, and the template's text after the input.

        With ``user`` False, the prompt has no message for the input. If the input's message is the assistant's, the
        text after it is empty, because the answer continues the message. Raises InvalidValue if the template rejects
        the messages.
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
        """Return the prompt for ``messages``, rendered by the template.

        Some templates demand that the user begins, but a conversation may begin with the assistant's greeting. Then an
        empty message of the user is put first.
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


class BareForm(PromptForm):
    """The format of raw prompts: no template and no media; control tokens in the text are effective.

    The tokenizer adds its special tokens, such as one for the beginning of the text. With ``of_tokens``, prompts are
    JSON arrays of token IDs.
    """

    def __init__(self, form: PromptForm, *, of_tokens: bool = False) -> None:
        self._of_tokens = of_tokens
        self.tokenizer = form.tokenizer
        self.media_sizes = form.media_sizes

    def placeholder(self, modality: Modality, number: int) -> str:
        raise UnsupportedModality("a raw prompt must be text", param="modality")

    def frame(self, context: PromptContext, *, user: bool = True) -> tuple[str, str]:
        return "", ""

    def tokens(self, text: str) -> list[int]:
        return msgspec.json.decode(text, type=list[int]) if self._of_tokens else list(self.tokenizer.encode(text))

    def plain(self, text: str) -> str:
        return text

    def last_border(self, text: str, start: int) -> int:
        return start  # no part is stable, as the tokenizer adds special tokens to the prompt as a whole


def _without_broken_calls(history: Sequence[Message]) -> Iterator[Message]:
    """Yield the messages of ``history`` without incomplete tool calls and their results, which templates reject.

    The arguments of an incomplete call were cut off.
    """
    broken: set[str] = set()
    for message in history:
        whole = tuple(call for call in message.tool_calls if call.is_whole)
        broken.update(call.id for call in message.tool_calls if not call.is_whole)
        if message.tool_call_id not in broken and (whole or message.text or not message.tool_calls):
            yield replace(message, tool_calls=whole)


@dataclass(frozen=True, slots=True)
class Media:
    """A media item, with ``data`` in the form that vLLM expects for ``modality``."""

    modality: Modality
    data: Any


@dataclass(frozen=True, slots=True)
class Excerpt:
    """A contiguous part of a prompt: its tokens, and the media of the placeholders in it, in order.

    ``end`` is the position in the prompt's text, in characters, at which a stable excerpt ends; 0 for the complete
    prompt.
    """

    tokens: list[int]
    media: tuple[Media, ...] = ()
    end: int = 0

    def for_vllm(self, cache_salt: str | None) -> dict[str, Any]:
        """Return the excerpt in the form of a prompt for vLLM."""
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
        """Return the rest of this excerpt after ``given``; None if it does not start with ``given``, or has no rest."""
        count = len(given.tokens)
        if count >= len(self.tokens) or self.tokens[:count] != given.tokens:
            return None
        return Excerpt(self.tokens[count:], self.media[len(given.media) :])


@dataclass(slots=True)
class Given:
    """The beginning of a draft that a model has received. Owned by the code that submits the draft to the model."""

    #: The length of this part, in characters of the template's head and the input.
    chars: int = 0
    tokens: list[int] = field(default_factory=list)
    media: list[Media] = field(default_factory=list)

    def add(self, excerpt: Excerpt) -> None:
        self.chars = excerpt.end
        self.tokens += excerpt.tokens
        self.media += excerpt.media

    @property
    def whole(self) -> Excerpt:
        """The part that the model has received, as one prompt."""
        return Excerpt(self.tokens, tuple(self.media))


#: The tokens of the context that are reserved for the input, and for an answer without ``max_tokens``.
INPUT_RESERVE: Final = 1024
ANSWER_RESERVE: Final = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLimit:
    """The limits on a prompt with history, in tokens."""

    #: The limit on the whole prompt: the context, less a reserve for the answer.
    prompt: int
    #: The part of the prompt that is reserved for the input before the input has arrived.
    input_reserve: int
    #: The step in which history is shortened, see HistoryTrim.
    stride: int

    @classmethod
    def of(cls, context: int, max_tokens: int | None) -> Self:
        """Return the limits for a model's ``context`` in tokens and an answer of at most ``max_tokens`` (None: any)."""
        answer = min(max_tokens or ANSWER_RESERVE, context // 4)
        return cls(prompt=context - answer, input_reserve=min(INPUT_RESERVE, context // 8), stride=max(1, context // 4))


@dataclass(slots=True)
class HistoryTrim:
    """A shortening of ``history`` for a prompt: the oldest turns are left out, and only whole turns.

    ``size`` returns the tokens of a message. Messages of the role ``system`` are instructions, and are kept.

    The history is cut at multiples of ``stride`` tokens, counted from its beginning. vLLM's prefix cache only helps
    prompts that begin alike: if each new turn pushed out an old one, every prompt of a long conversation would begin
    differently and be computed anew. With cuts at multiples of ``stride``, the prompts begin alike until the
    conversation has grown by ``stride`` tokens. As the cut depends on the history alone, no state has to be kept
    between requests.
    """

    history: Sequence[Message]
    stride: int
    size: Callable[[Message], int]
    #: The number of each message's turn.
    _turns: list[int] = field(init=False)
    #: Where each turn begins, in tokens, and where the last turn ends. Counted when first needed: most histories fit.
    _begins: list[int] = field(default_factory=list)
    _cut: int = 0
    #: The first turn that is not left out.
    _first: int = 0

    def __post_init__(self) -> None:
        self._turns = [number for number, turn in enumerate(whole_turns(self.history)) for _ in turn]

    def leave_out(self, tokens: int) -> bool:
        """Leave out at least one further turn; return False if none was left.

        Turns with at least ``tokens`` tokens are left out if there are so many, and all up to the next cut.
        """
        begins = self._positions()
        first, wanted = self._first, begins[self._first] + tokens
        while self._first < len(begins) - 1 and (begins[self._first] < wanted or self._first == first):
            self._cut += self.stride
            while self._first < len(begins) - 1 and begins[self._first] < self._cut:
                self._first += 1
        return self._first > first

    def kept(self, calls: Collection[str] = ()) -> tuple[Message, ...]:
        """Return the messages that are not left out, and those of the turns with the tool calls ``calls``."""
        if not self._first:
            return tuple(self.history)
        numbered = list(zip(self._turns, self.history, strict=True))
        pinned = {turn for turn, message in numbered if any(call.id in calls for call in message.tool_calls)}
        return tuple(
            message for turn, message in numbered if turn >= self._first or turn in pinned or message.role == "system"
        )

    @property
    def open_calls(self) -> tuple[str, ...]:
        """The IDs of the tool calls in the last turn if it has no answer yet: the input may be their results."""
        if not self.history or not (self.history[-1].tool_calls or self.history[-1].role == "tool"):
            return ()
        numbered = zip(self._turns, self.history, strict=True)
        return tuple(call.id for turn, message in numbered if turn == self._turns[-1] for call in message.tool_calls)

    def _positions(self) -> list[int]:
        if not self._begins:
            sizes = [0] * (self._turns[-1] + 1 if self._turns else 0)
            for turn, message in zip(self._turns, self.history, strict=True):
                if message.role != "system":
                    sizes[turn] += self.size(message)
            position = 0
            for size in sizes:
                self._begins.append(position)
                position += size
            self._begins.append(position)
        return self._begins


#: The tokens of a second of audio, until vLLM has processed any: Qwen2-Audio and Qwen2.5-Omni read one for 40 ms.
_AUDIO_TOKENS_PER_SEC: Final = 25


class MediaSizes:
    """An estimate of how many tokens media take, from the averages of the media that vLLM has processed.

    vLLM expands placeholders when it processes a prompt, so the length of a prompt with media is only known afterwards.
    Images are estimated as 0 tokens until the first one was processed, and so are videos. Methods may be called from
    any thread.
    """

    def __init__(self) -> None:
        #: For each modality, the tokens of all media processed, and their samples or pixels.
        self._seen: dict[Modality, tuple[int, int]] = {}

    def of(self, media: Media) -> int:
        """Return the estimated number of tokens of ``media``."""
        if (seen := self._seen.get(media.modality)) is not None:
            return math.ceil(_amount(media) * seen[0] / seen[1])
        if media.modality is Modality.AUDIO:
            samples, sample_rate = media.data
            return math.ceil(len(samples) * _AUDIO_TOKENS_PER_SEC / float(sample_rate))
        return 0

    def learn(self, media: Iterable[Media], placeholders: Mapping[str, Sequence[Any]]) -> None:
        """Learn the sizes of ``media`` from a processed prompt; ``placeholders`` is vLLM's ``mm_placeholders``."""
        taken: dict[Modality, list[int]] = {
            Modality(name): [place.length for place in places] for name, places in placeholders.items()
        }
        for item in media:
            if lengths := taken.get(item.modality):
                tokens, amount = self._seen.get(item.modality, (0, 0))
                self._seen[item.modality] = tokens + lengths.pop(0), amount + _amount(item)


def _amount(media: Media) -> int:
    match media.modality:
        case Modality.IMAGE:
            width, height = media.data.size
            return max(1, int(width * height))
        case _:
            samples, _ = media.data
            return max(1, int(samples.size))
