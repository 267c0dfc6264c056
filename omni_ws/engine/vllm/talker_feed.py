"""TalkerFeed: turns the prompt and the answer of one request into TalkerItems, as soon as tokens and rows are there."""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from omni_ws.engine.channel import Channel
from omni_ws.engine.omni.step_model import AnswerEnd, AnswerRows, PromptReset, PromptRows, TalkerItem
from omni_ws.engine.vllm.row_table import shared_prefix
from omni_ws.engine.vllm.rows_channel import Rows
from omni_ws.engine.vllm.thinker_rows import ThinkerRows
from omni_ws.errors import EngineFailed

if TYPE_CHECKING:
    from vllm import SamplingParams

#: The states that are handed on in one pass of the event loop: some milliseconds.
_STATES_AT_ONCE: Final = 512
#: How long a row may take to arrive after vLLM has reported its step, in seconds.
_ARRIVAL_SEC: Final = 10.0


class TalkerFeed:
    """Feeds ``sink`` with one request's items. A context manager, which ends all that the request holds.

    What the prompt consists of is told by ``append`` and ``replace``, what is spoken of the answer by ``say``. Rows
    come by themselves, to requests with the parameters of ``asking``. What the request leaves is kept for the next one
    of its ``conversation``. ``salt`` is the cache salt of prompts whose states nobody reads.
    """

    def __init__(
        self, rows: ThinkerRows, sink: Channel[TalkerItem], *, conversation: str | None, salt: str | None
    ) -> None:
        #: Whether rows that are not kept were found in the cache. Then the prompt has to be computed without that.
        self.skips_cache = False
        self._rows = rows
        self._sink = sink
        self._conversation = conversation
        self._text_salt = salt
        self._prompt = rows.kept.take(conversation)
        self._tokens: NDArray[np.int64] = np.zeros(0, np.int64)
        #: Which tokens of the prompt the Talker reads the state of.
        self._wanted: NDArray[np.bool_] = np.zeros(0, np.bool_)
        #: The length of the prompt that was handed on, and the position that follows it.
        self._handed_on = 0
        self._next_position = 0
        #: Tokens that are spoken, with their places in the answer.
        self._said: deque[tuple[int, int]] = deque()
        self._answer: list[int] = []
        self._changed = asyncio.Event()
        #: Whether the worker has ended, which owes rows.
        self._left = False
        self._key = ""
        self._renew_key()

    def __enter__(self) -> TalkerFeed:
        return self

    def __exit__(self, *error: object) -> None:
        del self._rows.channel.receivers[self._key]
        if self._conversation is not None and self._prompt.table.nbytes:
            answer = np.asarray(self._answer, np.int64)
            self._prompt.identity = np.concatenate([self._prompt.identity, answer])
            self._rows.kept.keep(self._conversation, self._prompt)

    def salt(self, *, media: bool) -> str | None:
        """Return the cache salt of a prompt, with or without ``media``."""
        return self._prompt.salt if media or self._rows.every_state else self._text_salt

    def asking(self, parameters: SamplingParams) -> SamplingParams:
        """Return ``parameters`` for the prompt that was last told, so that its rows come."""
        if not self._wanted.any():
            return parameters
        asking = parameters.clone()
        asking.extra_args = {**(parameters.extra_args or {}), "rows": self._key}
        if self.skips_cache:
            asking.skip_reading_prefix_cache = True
        return asking

    def append(self, rendered: Mapping[str, Any]) -> None:
        """Go on with a piece of the prompt, as vLLM's renderer made it."""
        self._take_prompt(
            np.concatenate([self._tokens, np.asarray(rendered["prompt_token_ids"], np.int64)]),
            np.concatenate([self._prompt.identity[: len(self._tokens)], self._identity(rendered)]),
        )

    def replace(self, rendered: Mapping[str, Any]) -> None:
        """Take ``rendered`` as the prompt from its beginning, which may be what was told already."""
        self._take_prompt(np.asarray(rendered["prompt_token_ids"], np.int64), self._identity(rendered))

    async def computed(self, cached: int | None) -> bool:
        """Wait until the rows of the prompt have arrived, which vLLM has computed.

        ``cached`` is the number of places at its beginning that vLLM found in its cache. Returns False if rows of these
        are not kept: the prompt has to be submitted again.
        """
        if self._known() < min(cached or 0, len(self._tokens)):
            self.skips_cache = True
            return False
        await self.all_handed_on()
        return True

    def say(self, tokens: Iterable[tuple[int, int]]) -> None:
        """Speak ``tokens``, with their places in the answer, behind those before."""
        self._said.extend(tokens)
        self._hand_on_answer()

    def note(self, tokens: Sequence[int]) -> None:
        """Note the tokens that the model has generated, spoken or not."""
        if self._rows.every_state:
            self._answer += tokens

    def take_rows(self, places: NDArray[np.int64], positions: NDArray[np.int64], rows: Rows) -> None:
        """See RowsReceiver."""
        self._prompt.table.add(places, positions, rows)
        self._hand_on_prompt()

    def worker_left(self) -> None:
        """See RowsReceiver."""
        self._left = True
        self._changed.set()

    async def finish(self) -> None:
        """End the answer, once all of it was handed on."""
        await self.all_handed_on()
        self._put(AnswerEnd())

    async def all_handed_on(self) -> None:
        """Wait until all of the prompt and of what is spoken was handed on. Raises EngineFailed if rows do not come."""
        try:
            async with asyncio.timeout(_ARRIVAL_SEC):
                while self._handed_on < len(self._tokens) or self._said:
                    if self._left:
                        raise EngineFailed("the Thinker died", fatal=True)
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise EngineFailed("the Thinker's states did not arrive") from None

    def _renew_key(self) -> None:
        """Take no rows any more of what was asked for so far."""
        self._rows.channel.receivers.pop(self._key, None)
        self._key = uuid.uuid4().hex
        self._rows.channel.receivers[self._key] = self

    def _identity(self, rendered: Mapping[str, Any]) -> NDArray[np.int64]:
        """Return the tokens, with numbers below zero for the places of media, by their content."""
        identity = np.array(rendered["prompt_token_ids"], np.int64)
        places = np.isin(identity, self._rows.media_tokens)
        for modality, items in (rendered.get("mm_placeholders") or {}).items():
            for content, item in zip(rendered["mm_hashes"][modality], items, strict=True):
                inside = slice(item.offset, item.offset + item.length)
                identity[inside][places[inside]] = -1 - abs(hash((modality, content)))
        return identity

    def _take_prompt(self, tokens: NDArray[np.int64], identity: NDArray[np.int64]) -> None:
        if shared_prefix(self._prompt.identity, identity) < self._handed_on:
            self._put(PromptReset())
            self._handed_on = self._next_position = 0
        before = len(self._prompt.identity)
        if self._prompt.follow(identity) < before:
            self._renew_key()
        self._tokens = tokens
        self._wanted = (
            np.ones(len(tokens), np.bool_) if self._rows.every_state else np.isin(tokens, self._rows.media_tokens)
        )
        self._prompt.table.expect(int(self._wanted.sum()))
        self._hand_on_prompt()

    def _hand_on_prompt(self) -> None:
        """Hand on what follows in the prompt, up to the first token whose state is wanted and missing.

        Of many states only some are handed on in one pass of the event loop.
        """
        begin, end = self._handed_on, self._known()
        wanted = begin + np.flatnonzero(self._wanted[begin:end])
        if later := len(wanted) > _STATES_AT_ONCE:
            end = int(wanted[_STATES_AT_ONCE])
            wanted = wanted[:_STATES_AT_ONCE]
        if end > begin:
            positions = np.concatenate([*self._positions(begin, end)], axis=1)
            states = self._prompt.table.states(wanted).reshape(-1, self._rows.width)
            self._handed_on = end
            self._put(PromptRows(self._tokens[begin:end], positions, self._wanted[begin:end], states))
            self._changed.set()
        if later:
            asyncio.get_running_loop().call_soon(self._hand_on_prompt)
        self._hand_on_answer()

    def _known(self) -> int:
        """Return the place up to which nothing is missing of the prompt."""
        wanted = self._handed_on + np.flatnonzero(self._wanted[self._handed_on :])
        missing = wanted[~self._prompt.table.has(wanted)]
        return int(missing[0]) if len(missing) else len(self._tokens)

    def _positions(self, begin: int, end: int) -> Iterable[NDArray[np.int64]]:
        """Yield the M-RoPE positions (3, n) of the places of the prompt, in pieces.

        Those of media come with their rows; those of text go on from the largest before.
        """
        wanted = self._wanted[begin:end]
        borders = [begin, *(begin + 1 + np.flatnonzero(wanted[1:] != wanted[:-1])).tolist(), end]
        for first, last in pairwise(borders):
            if self._wanted[first]:
                piece = self._prompt.table.positions(np.arange(first, last))
            else:
                piece = np.tile(np.arange(self._next_position, self._next_position + last - first), (3, 1))
            # A picture may come in pieces, of which the last does not reach its full width.
            self._next_position = max(self._next_position, int(piece.max()) + 1)
            yield piece

    def _hand_on_answer(self) -> None:
        """Hand on what may be spoken, up to the first token whose state is missing."""
        if self._handed_on < len(self._tokens) or not self._said:
            return
        count = len(self._said)
        places = len(self._tokens) + np.array([place for place, _ in self._said])
        states = np.zeros((0, self._rows.width), np.float32)
        if self._rows.every_state:
            missing = np.flatnonzero(~self._prompt.table.has(places))
            count = int(missing[0]) if len(missing) else count
            if not count:
                return
            states = self._prompt.table.states(places[:count])
        tokens = np.array([self._said.popleft()[1] for _ in range(count)], np.int64)
        self._put(AnswerRows(tokens, states))
        self._changed.set()

    def _put(self, item: TalkerItem) -> None:
        if not self._sink.closed:  # the Talker may have ended, or the request
            self._sink.put_nowait(item)
