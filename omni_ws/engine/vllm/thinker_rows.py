"""ThinkerRows: the hidden states of an omni model's Thinker, from which its own Talker speaks the answers.

A *row* is the hidden state of one token; its *place* is the index of the token in prompt and answer. vLLM's worker
sends the rows that a request asks for; a TalkerFeed hands the rows of one request on to the Talker. A RowTable stores
rows by their places. KeptRows keeps the tables of conversations for their next requests.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from omni_ws.config.values import ConfigurationError
from omni_ws.engine.channel import Channel
from omni_ws.engine.omni.step_process import AnswerEnd, AnswerRows, PromptReset, PromptRows, TalkerItem
from omni_ws.engine.vllm.readouts import ONE_WORKER, refused_args
from omni_ws.engine.vllm.worker_channel import Rows, SentRows, WorkerChannel, as_float32
from omni_ws.errors import EngineFailed

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM


#: The modalities whose tokens the configurations of both families name, such as ``audio_token_id``.
_MEDIA: Final = ("audio", "image", "video")


class ThinkerRows:
    """The rows of one omni model, which vLLM sends through ``channel``, and which are kept in ``kept``.

    ``config`` is the content of the checkpoint's config.json. ``every_state`` is True for Qwen2.5, whose Talker reads
    the hidden state of every token; the Talker of Qwen3 reads only the states of audio, images and video in the prompt.
    ``kept_bytes`` limits the memory of the rows kept for conversations. ``positions`` limits prompt and speech
    together, in positions of the Talker; None for no limit.
    """

    #: RowsWorker is also a ReadoutWorker, so readouts work as well.
    engine_args: Mapping[str, Any] = {"worker_extension_cls": "omni_ws.engine.vllm.workers.RowsWorker"}

    def __init__(self, config: Mapping[str, Any], *, kept_bytes: int, positions: int | None = None) -> None:
        thinker = config["thinker_config"]
        ids = [thinker.get(f"{name}_token_id", thinker.get(f"{name}_token_index")) for name in _MEDIA]
        self.media_tokens: tuple[int, ...] = tuple(token for token in ids if token is not None)
        self.every_state = "accept_hidden_layer" not in config["talker_config"]
        self.width: int = thinker["text_config"]["hidden_size"]
        self.positions = positions
        self.channel = WorkerChannel(SentRows)
        self.kept = KeptRows(kept_bytes)

    @staticmethod
    def check_args(args: Mapping[str, Any]) -> None:
        """Raise ConfigurationError for engine arguments that are incompatible with rows."""
        required = {**ONE_WORKER, **ThinkerRows.engine_args}
        if problems := refused_args(args, required, purpose="a model that speaks itself"):
            raise ConfigurationError(problems)

    async def install(self, llm: AsyncLLM) -> None:
        """Tell the workers of an engine that has started where to send rows. ``channel`` must be open."""
        tokens = None if self.every_state else list(self.media_tokens)
        await llm.collective_rpc("install_rows", args=(self.channel.address, tokens))


#: How many states of a prompt are handed on in one pass of the event loop, which takes some milliseconds.
_STATES_AT_ONCE: Final = 512
#: How long a row may take to arrive after vLLM has reported its step, in seconds.
_ARRIVAL_SEC: Final = 10.0


class TalkerFeed:
    """A feed of one request's TalkerItems into ``sink``; an item is put as soon as its tokens and rows have arrived.

    The caller passes the prompt to ``append`` and ``replace``, and the spoken tokens of the answer to ``say``. The
    rows arrive from vLLM's worker, for requests with the sampling parameters that ``with_rows`` returns. At the end of
    the context manager, the rows are kept for the next request of ``conversation``, unless that is None. ``salt`` is
    the cache salt for prompts whose states the Talker does not read.
    """

    def __init__(
        self, rows: ThinkerRows, sink: Channel[TalkerItem], *, conversation: str | None, salt: str | None
    ) -> None:
        #: Whether vLLM has to compute the prompt without its prefix cache, which had tokens whose rows are not kept.
        self.skips_cache = False
        self._rows = rows
        self._sink = sink
        self._conversation = conversation
        self._text_salt = salt
        self._prompt = rows.kept.take(conversation)
        self._tokens: NDArray[np.int64] = np.zeros(0, np.int64)
        #: For each token of the prompt, whether the Talker reads its state.
        self._wanted: NDArray[np.bool_] = np.zeros(0, np.bool_)
        #: How many tokens of the prompt were handed on, and the M-RoPE position after them.
        self._handed_on = 0
        self._next_position = 0
        #: Spoken tokens that were not handed on, as (place in the answer, token).
        self._said: deque[tuple[int, int]] = deque()
        self._answer: list[int] = []
        self._changed = asyncio.Event()
        #: Whether the worker has ended, so that no more rows arrive.
        self._left = False
        self._key = ""
        self._renew_key()

    def __enter__(self) -> TalkerFeed:
        return self

    def __exit__(self, *error: object) -> None:
        del self._rows.channel.receivers[self._key]
        if self._conversation is not None and self._prompt.table.nbytes:
            self._prompt.append(self._answer)
            self._rows.kept.keep(self._conversation, self._prompt)

    def salt(self, *, media: bool) -> str | None:
        """Return the cache salt for a prompt; ``media``: the prompt has media.

        A prompt whose states the Talker reads gets the salt of the conversation's kept prompt, see KeptRows.
        """
        return self._prompt.salt if media or self._rows.every_state else self._text_salt

    def with_rows(self, parameters: SamplingParams) -> SamplingParams:
        """Return ``parameters``, extended so that the worker sends the rows of the current prompt and its answer.

        Returns ``parameters`` itself if the Talker reads none of their states.
        """
        if not self._wanted.any():
            return parameters
        extended = parameters.clone()
        extended.extra_args = {**(parameters.extra_args or {}), "rows": self._key}
        if self.skips_cache:
            extended.skip_reading_prefix_cache = True
        return extended

    def append(self, rendered: Mapping[str, Any]) -> None:
        """Add a piece, rendered by vLLM, to the end of the prompt."""
        self._take_prompt(
            np.concatenate([self._tokens, np.asarray(rendered["prompt_token_ids"], np.int64)]),
            np.concatenate([self._prompt.identity[: len(self._tokens)], self._identity(rendered)]),
        )

    def replace(self, rendered: Mapping[str, Any]) -> None:
        """Set the whole prompt, rendered by vLLM.

        If it begins with all tokens that were handed on, only the others follow. If not, a PromptReset and the whole
        prompt follow.
        """
        self._take_prompt(np.asarray(rendered["prompt_token_ids"], np.int64), self._identity(rendered))

    async def computed(self, cached: int | None) -> bool:
        """Wait until the rows of a prompt that vLLM has computed have arrived.

        ``cached`` is the number of tokens at the beginning of the prompt that vLLM found in its prefix cache. Returns
        False if rows of these tokens are not kept, so that the prompt has to be submitted again, with the parameters of
        a new call of ``with_rows``. Raises EngineFailed if rows do not arrive.
        """
        if self._known() < min(cached or 0, len(self._tokens)):
            self.skips_cache = True
            return False
        await self.all_handed_on()
        return True

    def say(self, tokens: Iterable[tuple[int, int]]) -> None:
        """Add spoken tokens, each as (place in the answer, token)."""
        self._said.extend(tokens)
        self._hand_on_answer()

    def note(self, tokens: Sequence[int]) -> None:
        """Note the tokens that the model has generated, whether spoken or not."""
        if self._rows.every_state:
            self._answer += tokens

    def receive(self, header: SentRows, body: bytes) -> None:
        """Receive a message with rows from the worker."""
        count = header.count
        places = np.frombuffer(body, np.int64, count)
        positions = np.frombuffer(body, np.int64, 3 * count, 8 * count).reshape(3, count)
        kind: Any = np.uint16 if header.bfloat16 else np.float32
        rows: Rows = np.frombuffer(body, kind, offset=4 * 8 * count).reshape(count, header.width)
        self.take_rows(places, positions, rows)

    def take_rows(self, places: NDArray[np.int64], positions: NDArray[np.int64], rows: Rows) -> None:
        """Store rows, see ``RowTable.add``, and hand on the tokens that waited for them."""
        self._prompt.table.add(places, positions, rows)
        self._hand_on_prompt()

    def worker_left(self) -> None:
        """Note that the worker has ended, so that no more rows arrive."""
        self._left = True
        self._changed.set()

    async def finish(self) -> None:
        """Wait until the whole answer was put into the sink; then put an AnswerEnd. Raises as ``all_handed_on``."""
        await self.all_handed_on()
        self._put(AnswerEnd())

    async def all_handed_on(self) -> None:
        """Wait until the prompt and all spoken tokens are in the sink. Raises EngineFailed if rows do not arrive."""
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
        """Receive rows under a new key from now on, so that rows of earlier prompts are ignored."""
        self._rows.channel.receivers.pop(self._key, None)
        self._key = uuid.uuid4().hex
        self._rows.channel.receivers[self._key] = self

    def _identity(self, rendered: Mapping[str, Any]) -> NDArray[np.int64]:
        """Return a number for each place of a rendered prompt: the token ID or, in media, minus a hash of the item."""
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
        """Put the next tokens of the prompt into the sink, up to the first token whose wanted state has not arrived.

        At most _STATES_AT_ONCE states are put in one pass of the event loop. Spoken tokens follow the whole prompt.
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
        """Return the first place of the prompt whose wanted state has not arrived; else the prompt's length."""
        wanted = self._handed_on + np.flatnonzero(self._wanted[self._handed_on :])
        missing = wanted[~self._prompt.table.has(wanted)]
        return int(missing[0]) if len(missing) else len(self._tokens)

    def _positions(self, begin: int, end: int) -> Iterable[NDArray[np.int64]]:
        """Yield the M-RoPE positions (3, n) of the places ``begin`` to ``end`` of the prompt, in pieces.

        Positions of wanted tokens arrive with their rows. The others count on from the largest earlier position, in
        ``_next_position``, which the iteration moves on.
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
        """Put spoken tokens into the sink, up to the first token whose state is needed but has not arrived."""
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
        if not self._sink.closed:  # closed once the Talker or the request has ended
            self._sink.put_nowait(item)


#: About how many bytes a KeptPrompt takes besides its arrays.
_OVERHEAD_BYTES: Final = 4096


class RowTable:
    """The hidden states and M-RoPE positions of tokens, by place.

    A state that is added again for the same place is ignored: after a preemption the model sends the same state again.
    """

    def __init__(self) -> None:
        #: For each place, the row that holds its state; -1 for none.
        self._row_of: NDArray[np.int64] = np.full(0, -1)
        self._positions: NDArray[np.int64] = np.zeros((3, 0), np.int64)
        self._rows: NDArray[Any] = np.zeros((0, 0), np.float32)
        self._count = 0
        self._expected = 0

    def expect(self, rows: int) -> None:
        """Set the number of rows for which memory is reserved when the table grows next, to avoid repeated copies."""
        self._expected = rows

    @property
    def nbytes(self) -> int:
        """The size of the table in bytes."""
        return self._row_of.nbytes + self._positions.nbytes + self._rows.nbytes

    def add(
        self,
        places: NDArray[np.int64],
        positions: NDArray[np.int64],
        rows: Rows,
    ) -> None:
        """Store ``rows`` (n, width) with their ``places`` (n,), in ascending order, and M-RoPE ``positions`` (3, n).

        There must be at least one row.
        """
        if places[-1] >= len(self._row_of):
            more = max(int(places[-1]) + 1, 2 * len(self._row_of)) - len(self._row_of)
            self._row_of = np.concatenate([self._row_of, np.full(more, -1)])
        new = self._row_of[places] < 0
        begin, end = self._count, self._count + int(new.sum())
        if end > len(self._rows):
            capacity = max(end, self._expected, len(self._rows) + len(self._rows) // 4)
            self._rows = _grown(self._rows, (capacity, rows.shape[1]), rows.dtype)
            self._positions = _grown(self._positions.T, (capacity, 3), np.dtype(np.int64)).T
        self._row_of[places[new]] = np.arange(begin, end)
        self._rows[begin:end] = rows[new]
        self._positions[:, begin:end] = positions[:, new]
        self._count = end

    def has(self, places: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return, for each of ``places``, whether its state is stored."""
        known = places < len(self._row_of)
        known[known] = self._row_of[places[known]] >= 0
        return known

    def positions(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the M-RoPE positions (3, n) of ``places``, which must be stored."""
        return self._positions[:, self._row_of[places]]

    def states(self, places: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the states (n, width) of ``places``, which must be stored."""
        return as_float32(self._rows[self._row_of[places]])

    def cut(self, length: int) -> None:
        """Forget the places from ``length`` on, and release their memory."""
        places = np.flatnonzero(self._row_of[:length] >= 0)
        if len(places) == self._count and self._count >= len(self._rows) * 3 // 4:
            return
        rows = self._row_of[places]
        self._row_of = np.full(int(places[-1]) + 1 if len(places) else 0, -1)
        self._row_of[places] = np.arange(len(places))
        self._rows, self._positions = self._rows[rows], self._positions[:, rows]
        self._count = len(places)


def _grown(old: NDArray[Any], shape: tuple[int, int], kind: np.dtype[Any]) -> NDArray[Any]:
    new = np.empty(shape, kind)
    if len(old):
        new[: len(old)] = old
    return new


@dataclass(slots=True)
class KeptPrompt:
    """The hidden states of one prompt (``table``), and a number for each of its tokens (``identity``).

    Two prompts have the same number at a position only if they have the same token, or the same image, video or audio,
    at this position. Prompts with the same ``salt`` share prefixes in vLLM's cache.
    """

    salt: str = field(default_factory=lambda: uuid.uuid4().hex)
    identity: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    table: RowTable = field(default_factory=RowTable)

    @property
    def nbytes(self) -> int:
        """The size in bytes, with an estimate for what is not in arrays."""
        return self.identity.nbytes + self.table.nbytes + _OVERHEAD_BYTES

    def follow(self, identity: NDArray[np.int64]) -> int:
        """Replace the prompt by the one with ``identity``; return the length of the prefix that both prompts share.

        Rows of the old prompt after this prefix are dropped.
        """
        same = shared_prefix(self.identity, identity)
        if same < len(self.identity):
            self.table.cut(same)
        self.identity = identity
        return same

    def append(self, tokens: Sequence[int]) -> None:
        """Add the tokens of the answer to the end of ``identity``; their rows are in ``table`` already."""
        self.identity = np.concatenate([self.identity, np.asarray(tokens, np.int64)])


def shared_prefix(one: NDArray[np.int64], other: NDArray[np.int64]) -> int:
    """Return the length of the prefix that both identities share."""
    length = min(len(one), len(other))
    different = np.flatnonzero(one[:length] != other[:length])
    return int(different[0]) if len(different) else length


class KeptRows:
    """The prompts kept for the next requests of conversations, up to ``capacity`` bytes; the oldest are dropped first.

    vLLM does not compute tokens again that are in its prefix cache, so their rows have to be kept. Each kept prompt has
    a salt of its own. A request that finds no kept prompt gets a new salt, and so finds no prefix in the cache.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.nbytes = 0
        self._kept: OrderedDict[str, KeptPrompt] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def take(self, conversation: str | None) -> KeptPrompt:
        """Remove and return the prompt of ``conversation``; an empty prompt with a new salt if none is kept."""
        kept = None if conversation is None else self._kept.pop(conversation, None)
        if kept is None:
            return KeptPrompt()
        self.nbytes -= kept.nbytes
        return kept

    def keep(self, conversation: str, prompt: KeptPrompt) -> None:
        """Keep ``prompt`` for the next request of the conversation, and drop the oldest prompts beyond ``capacity``."""
        prompt.table.cut(len(prompt.identity))
        self.take(conversation)
        self._kept[conversation] = prompt
        self.nbytes += prompt.nbytes
        while self.nbytes > self.capacity:
            self.take(next(iter(self._kept)))
