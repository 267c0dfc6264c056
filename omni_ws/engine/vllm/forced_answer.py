"""ForcedAnswer: gives a text to an omni model's Talker as if the Thinker had answered it, with the Thinker's states."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, Final

from omni_ws.engine.base import EngineOutput, GenerationRequest
from omni_ws.engine.channel import Channel
from omni_ws.engine.clauses import BEGIN_AFTER, is_being_written, last_border, with_pauses
from omni_ws.engine.threads import run_in_thread
from omni_ws.engine.vllm.early_input import EarlyOrigin
from omni_ws.engine.vllm.excerpt import Excerpt
from omni_ws.engine.vllm.prompt_form import PromptContext
from omni_ws.engine.vllm.sampling import prefill_parameters
from omni_ws.engine.vllm.talker_feed import TalkerFeed
from omni_ws.engine.vllm.thinker import LEAST_EARLY_TOKENS, ThinkerParts
from omni_ws.engine.vllm.thinker_rows import ThinkerRows

#: Where a text may be cut so that its tokens are those of the whole: before white space that a word follows.
_BORDER: Final = re.compile(r"(?<=\S)\s+(?=\S)")
_CLAUSE_END: Final = re.compile(r"[.!?;:,]\s|\n")
#: How much text without any white space is held back, in characters.
_LONGEST_WORD: Final = 200


class ForcedAnswer:
    """A Stage: pieces of text in, TalkerItems out.

    The Thinker computes the text as its answer to an empty message, in steps of at least LEAST_EARLY_TOKENS tokens
    while the text still arrives, and at the end of a clause and at a pause where a client is writing it. A Talker that
    reads no states of the answer needs no step. A text without words has no items. Raises ContextLengthExceeded for a
    text that is too long for the Thinker.
    """

    name = "spoken text"

    def __init__(self, parts: ThinkerParts, rows: ThinkerRows, request: GenerationRequest) -> None:
        self._parts = parts
        self._rows = rows
        self._request = request
        self._prompt: list[int] = []
        #: The text so far, and of it what was not computed.
        self._said: list[int] = []
        self._new: list[int] = []
        self._steps = 0

    async def run(self, source: AsyncIterator[str], sink: Channel[Any] | None, outputs: Channel[EngineOutput]) -> None:
        """Hand on the text's tokens and states, behind those of a prompt without content."""
        assert sink is not None, "this stage requires a Talker after it"
        form = self._parts.form
        head, tail = await self._in_thread(form.frame, PromptContext())
        self._prompt = await self._in_thread(form.tokens, head + tail)
        with TalkerFeed(self._rows, sink, conversation=None, salt=None) as feed:
            held = ""
            # One that is being written is computed clause by clause, and at pauses: nothing is left to say meanwhile.
            being_written = is_being_written(self._request.input)
            async with aclosing(with_pauses(source, lambda: BEGIN_AFTER if being_written else None)) as pieces:
                async for piece in pieces:
                    held += piece or ""
                    ended = piece is None or (being_written and _CLAUSE_END.search(held) is not None)
                    whole, held = whole_words(held, ended=ended)
                    await self._say(whole)
                    if len(self._new) >= LEAST_EARLY_TOKENS or (ended and self._new):
                        await self._compute(feed)
            await self._say(held)
            if self._new:
                await self._compute(feed)
            if self._said:
                await feed.finish()

    async def _say(self, text: str) -> None:
        form = self._parts.form
        self._new += await self._in_thread(form.tokens, form.plain(text))

    async def _compute(self, feed: TalkerFeed) -> None:
        if not self._said:
            feed.replace({"prompt_token_ids": self._prompt})
        feed.say(enumerate(self._new, len(self._said)))
        self._said += self._new
        self._new = []
        if not self._rows.every_state:
            return
        self._steps += 1
        origin = EarlyOrigin(
            model=self._parts.model,
            request_id=self._request.request_id,
            cache_salt=feed.salt(media=False),
            priority=self._request.options.priority,
        )
        parameters = feed.asking(prefill_parameters())
        step = await origin.at_once(Excerpt([*self._prompt, *self._said]), parameters, f"-text-{self._steps}")
        async with aclosing(step) as outputs:
            async for _ in outputs:
                pass
        await feed.all_handed_on()

    async def _in_thread(self, call: Callable[..., Any], *arguments: object) -> Any:
        return await run_in_thread(self._parts.thread, call, *arguments)


def whole_words(text: str, *, ended: bool = False) -> tuple[str, str]:
    """Cut ``text`` before its last word, which may go on; a word without end is cut anywhere.

    ``ended``: a last word that white space follows belongs to the text before.
    """
    borders = [found.start() for found in _BORDER.finditer(text)]
    cut = last_border(text) if ended else borders[-1] if borders else 0
    if len(text) - cut > _LONGEST_WORD:
        cut = len(text)
    return text[:cut], text[cut:]
