"""What transformers makes of a Qwen omni model: ``generate(return_audio=True)``, without its faults.

Version 5.19 computes other codes than the models were trained for, or fails, in the cases that ``Fault`` names. A
repair is a patch of the loaded model for as long as a case runs; ``unrepaired`` leaves some out, to show the fault.

``Driven`` runs a Talker of ours as its process does. ``NothingWaits`` fails where a computation on a device makes the
host wait, which CUDA graphs forbid.
"""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from support.tiny_models import MEDIA_TOKENS, Family, omni_checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoProcessor,
    Qwen2_5OmniForConditionalGeneration,
    Qwen3OmniMoeForConditionalGeneration,
)

from omni_ws.engine.omni.slot_talker import SlotTalker, load_talker
from omni_ws.engine.omni.step_process import AnswerEnd, AnswerRows, Codes, CodesEnd, PromptRows, TalkerItem

TEXT_TOKENS: Final = 24
CODEC_FRAMES: Final = 32
#: The earliest token and frame at which an answer that ends by itself ends: some rows and frames come before.
_FIRST_TEXT_END, _FIRST_CODEC_END = 10, 12
#: The cases whose answers are also made to end by themselves.
ENDING: Final = ("text", "mixed")
SPEAKER: Final[Mapping[Family, str]] = {Family.QWEN25: "Chelsie", Family.QWEN3: "ethan"}


class Fault(StrEnum):
    """Of generate(return_audio=True) in transformers 5.19."""

    #: Qwen2.5: generate() drops a mask of ones, and the Talker then neither adds the embeddings of codec_pad and
    #: codec_bos nor counts positions as in training.
    LOST_MASK = "lost_mask"
    #: Qwen2.5: pixels are passed on to the Talker, which refuses them.
    PIXELS_FOR_TALKER = "pixels_for_talker"
    #: Qwen3: the positions of sound beside a picture ask for a setting that the Talker's configuration lacks.
    NO_AUDIO_CONFIG = "no_audio_config"
    #: Both: an answer of one token has no row, Qwen3's first code may be the end: nothing to stack. Here it is silence.
    NOTHING_TO_SAY = "nothing_to_say"
    #: Qwen3: an answer that is cut lacks its last frame, whose other 15 codes would be made in the step after.
    LAST_FRAME = "last_frame"


@dataclass(frozen=True)
class Spoken:
    """An answer and what it was made of.

    ``tokens`` (p,) of the prompt and their ``positions`` (3, p); ``answer`` (g,) with the token that ends it, if one
    does; ``states`` (p + g - 1, hidden size) that the Talker reads, of all but the last token; ``codes`` (n,
    codebooks). ``text_end`` and ``codec_end`` are the ids that were to end the answer and its codes.
    """

    family: Family
    inputs: Mapping[str, Any]
    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    answer: NDArray[np.int64]
    states: NDArray[np.float32]
    codes: NDArray[np.int64]
    text_end: int
    codec_end: int

    def prompt_rows(self, begin: int = 0, end: int | None = None) -> PromptRows:
        part = slice(begin, len(self.tokens) if end is None else end)
        marked = self._read_states()[part]
        return PromptRows(
            self.tokens[part], self.positions[:, part], marked, self.states[: len(self.tokens)][part][marked]
        )

    def answer_rows(self, begin: int = 0, end: int | None = None) -> AnswerRows:
        """All but the last token: the reference never speaks that of an answer that is cut either."""
        spoken = slice(begin, len(self.answer) - 1 if end is None else end)
        states = self.states[len(self.tokens) :][spoken]
        return AnswerRows(self.answer[:-1][spoken], states if self.family is Family.QWEN25 else states[:0])

    def items(self) -> tuple[PromptRows, AnswerRows, AnswerEnd]:
        """All that a Talker reads, in three pieces."""
        return self.prompt_rows(), self.answer_rows(), AnswerEnd()

    def _read_states(self) -> NDArray[np.bool_]:
        if self.family is Family.QWEN25:
            return np.ones(len(self.tokens), np.bool_)
        config = reference(self.family).model.config.thinker_config
        return np.isin(self.tokens, [config.audio_token_id, config.image_token_id, config.video_token_id])


class OmniReference:
    """A checkpoint in transformers."""

    def __init__(self, family: Family, folder: Path) -> None:
        self.family = family
        qwen25 = family is Family.QWEN25
        kind: Any = Qwen2_5OmniForConditionalGeneration if qwen25 else Qwen3OmniMoeForConditionalGeneration
        self.model = kind.from_pretrained(folder, dtype=torch.float32).eval()
        self.processor = AutoProcessor.from_pretrained(folder)

    def speak(
        self,
        case: OmniCase,
        *,
        text_end: int | None = None,
        codec_end: int | None = None,
        text_tokens: int = TEXT_TOKENS,
        codec_frames: int = CODEC_FRAMES,
        unrepaired: Collection[Fault] = (),
    ) -> Spoken:
        """Greedily, without making the sound. The ends are the model's own, unless others are given."""
        inputs = dict(self.processor(text=case.prompt(self.family), return_tensors="pt", **case.media))
        own_text_end, own_codec_end = self._ends()
        text_end = own_text_end if text_end is None else text_end
        codec_end = own_codec_end if codec_end is None else codec_end
        with ExitStack() as patches, warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            thinking = patches.enter_context(_recorded(self.model.thinker, "generate"))
            for fault, repair in _REPAIRS[self.family].items():
                if fault not in unrepaired:
                    patches.enter_context(repair(self.model))
            codes = patches.enter_context(self._codes())
            more = 1 if self.family is Family.QWEN3 and Fault.LAST_FRAME not in unrepaired else 0
            try:
                self._generate(inputs, text_end, codec_end, text_tokens, codec_frames + more, patches)
            except _NothingToSay:
                groups = 1 if self.family is Family.QWEN25 else self.model.config.talker_config.num_code_groups
                codes.append(torch.zeros(1, groups, 0, dtype=torch.int64))
        (thought,) = thinking
        return self._spoken(inputs, thought, codes[0], text_end, codec_end)

    def code2wav(self, codes: NDArray[np.int64]) -> NDArray[np.float32]:
        """The sound (n,) of Qwen3's codes (frames, 16), in one piece: chunked_decode() loses the end of each chunk."""
        with torch.no_grad():
            sound: NDArray[np.float32] = self.model.code2wav(torch.from_numpy(codes.T[None]))[0, 0].numpy()
        return sound

    def token2wav(
        self, codes: NDArray[np.int64], noise: torch.Tensor, *, speaker: str, **settings: Any
    ) -> NDArray[np.float32]:
        """The sound (n,) of Qwen2.5's codes (frames, 1), in one piece, from ``noise`` (1, mel frames, 80)."""
        voice = self.model.speaker_map[speaker]
        with patch("torch.randn", lambda *_, **__: noise), torch.no_grad():
            sound = self.model.token2wav(
                torch.from_numpy(codes.T), conditioning=voice["cond"], reference_mel=voice["ref_mel"], **settings
            )
        made: NDArray[np.float32] = sound.numpy()
        return made

    def _ends(self) -> tuple[int, int]:
        config = self.model.config
        if self.family is Family.QWEN25:
            return config.thinker_config.text_config.eos_token_id, config.talker_config.tts_codec_end_token_id
        return config.im_end_token_id, config.talker_config.codec_eos_token_id

    def _generate(
        self, inputs: Mapping[str, Any], text_end: int, codec_end: int, text: int, frames: int, patches: ExitStack
    ) -> None:
        settings = {
            "speaker": SPEAKER[self.family],
            "thinker_max_new_tokens": text,
            "thinker_do_sample": False,
            "thinker_eos_token_id": [text_end],
            "talker_max_new_tokens": frames,
            "talker_do_sample": False,
        }
        talker = self.model.config.talker_config
        if self.family is Family.QWEN25:
            # The padding ends an answer too, as the released default has it.
            settings["talker_eos_token_id"] = [talker.tts_codec_pad_token_id, codec_end]
        else:
            patches.enter_context(patch.object(talker, "codec_eos_token_id", codec_end))
        self.model.generate(**inputs, return_audio=True, **settings)

    @contextmanager
    def _codes(self) -> Iterator[list[torch.Tensor]]:
        """What reaches the vocoder, (1, codebooks, frames); the sound is not made."""
        codes: list[torch.Tensor] = []

        def take(given: torch.Tensor, **_: Any) -> torch.Tensor:
            codes.append(given[:, None] if given.ndim == 2 else given)
            return torch.zeros(1, 1, 1)

        qwen25 = self.family is Family.QWEN25
        vocoder = self.model.token2wav if qwen25 else self.model.code2wav
        with patch.object(vocoder, "forward" if qwen25 else "chunked_decode", take):
            yield codes

    def _spoken(
        self, inputs: Mapping[str, Any], thought: Any, codes: torch.Tensor, text_end: int, codec_end: int
    ) -> Spoken:
        ids = inputs["input_ids"]
        config = self.model.config
        layer = -1 if self.family is Family.QWEN25 else config.talker_config.accept_hidden_layer
        states = torch.cat([each[layer] for each in thought.hidden_states], 1)[0]
        sounds = inputs.get("feature_attention_mask")
        positions, _ = self.model.thinker.get_rope_index(
            ids,
            inputs.get("image_grid_thw"),
            inputs.get("video_grid_thw"),
            torch.ones_like(ids),
            False,
            None if sounds is None else sounds.sum(1),
            inputs.get("video_second_per_grid"),
        )
        return Spoken(
            self.family,
            inputs,
            tokens=ids[0].numpy(),
            positions=positions[:, 0].long().numpy(),
            answer=thought.sequences[0, ids.shape[1] :].numpy(),
            states=states.numpy(),
            codes=codes[0].T.contiguous().numpy(),
            text_end=text_end,
            codec_end=codec_end,
        )


@cache
def reference(family: Family) -> OmniReference:
    """Of the tiny checkpoint; loaded once for all tests."""
    return OmniReference(family, omni_checkpoint(family))


@cache
def spoken(family: Family, case: str, *, ends: bool = False) -> Spoken:
    """The answer to a case, cut at TEXT_TOKENS and CODEC_FRAMES; or, with ``ends``, one that ends before by itself.

    Random weights know no end: there, a token and a code that the answer comes to are declared to be the ends.
    """
    if not ends:
        return reference(family).speak(CASE[case])
    text_end = _new_after(spoken(family, case).answer, _FIRST_TEXT_END)
    longer = reference(family).speak(CASE[case], text_end=text_end)
    codec_end = _new_after(longer.codes[:, 0], _FIRST_CODEC_END)
    # What generate() would make with that end: it comes to a stop there, after the same codes.
    codes = longer.codes[: longer.codes[:, 0].tolist().index(codec_end)]
    return replace(longer, codes=codes, codec_end=codec_end)


def _new_after(values: NDArray[np.int64], first: int) -> int:
    """The first value from index ``first`` on that does not occur before."""
    return next(int(value) for index, value in enumerate(values) if index >= first and value not in values[:index])


class _NothingToSay(Exception):
    """The Talker would have nothing to read, or made no frame."""


@contextmanager
def _recorded(owner: Any, method: str) -> Iterator[list[Any]]:
    results: list[Any] = []
    original = getattr(owner, method)

    def call(*arguments: Any, **named: Any) -> Any:
        results.append(original(*arguments, **named))
        return results[-1]

    with patch.object(owner, method, call):
        yield results


@contextmanager
def _mask_restored(model: Any) -> Iterator[None]:
    prepare = model.talker.prepare_inputs_for_generation

    @functools.wraps(prepare)  # generate() looks at the signature
    def prepare_with_mask(*arguments: Any, **named: Any) -> Any:
        inputs = prepare(*arguments, **named)
        if inputs.get("attention_mask") is None:
            new = inputs["input_ids"] if inputs.get("inputs_embeds") is None else inputs["inputs_embeds"]
            past = inputs.get("past_key_values")
            inputs["attention_mask"] = torch.ones(
                1, new.shape[1] + (past.get_seq_length() if past else 0), dtype=torch.int64
            )
        return inputs

    with patch.object(model.talker, "prepare_inputs_for_generation", prepare_with_mask):
        yield


@contextmanager
def _pixels_dropped(model: Any) -> Iterator[None]:
    original = model.talker.generate

    def generate(*arguments: Any, pixel_values: Any = None, pixel_values_videos: Any = None, **named: Any) -> Any:
        return original(*arguments, **named)

    with patch.object(model.talker, "generate", generate):
        yield


@contextmanager
def _audio_config_lent(model: Any) -> Iterator[None]:
    audio = model.thinker.config.audio_config
    with patch.object(model.talker.config, "audio_config", audio, create=True):
        yield


@contextmanager
def _silence_allowed(model: Any) -> Iterator[None]:
    think, talk = model.thinker.generate, model.talker.generate

    def answer(*arguments: Any, **named: Any) -> Any:
        result = think(*arguments, **named)
        if len(result.hidden_states) == 1:
            raise _NothingToSay
        return result

    def say(*arguments: Any, **named: Any) -> Any:
        result = talk(*arguments, **named)
        if not torch.is_tensor(result) and all(each[-1] is None for each in result.hidden_states):
            raise _NothingToSay
        return result

    with patch.object(model.thinker, "generate", answer), patch.object(model.talker, "generate", say):
        yield


_REPAIRS: Final[Mapping[Family, Mapping[Fault, Callable[[Any], Any]]]] = {
    Family.QWEN25: {
        Fault.LOST_MASK: _mask_restored,
        Fault.PIXELS_FOR_TALKER: _pixels_dropped,
        Fault.NOTHING_TO_SAY: _silence_allowed,
    },
    Family.QWEN3: {
        Fault.NO_AUDIO_CONFIG: _audio_config_lent,
        Fault.NOTHING_TO_SAY: _silence_allowed,
    },
}


SAMPLE_RATE: Final = 16_000


def _place(family: Family, medium: str) -> str:
    """What stands for sound, a picture or a film in a text."""
    named, around = MEDIA_TOKENS[family], "audio" if medium == "audio" else "vision"
    return named[f"{around}_bos_token"] + named[f"{medium}_token"] + named[f"{around}_eos_token"]


@dataclass(frozen=True)
class OmniCase:
    """The user's last turn, with ``{audio}``, ``{image}`` and ``{video}`` where media are, and turns before it."""

    name: str
    user: str
    history: tuple[tuple[str, str], ...] = ()

    def prompt(self, family: Family) -> str:
        places = {medium: _place(family, medium) for medium in ("audio", "image", "video")}
        turns = [("system", "You are kind."), *self.history, ("user", self.user.format_map(places))]
        return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns) + "<|im_start|>assistant\n"

    @property
    def media(self) -> dict[str, Any]:
        """As transformers' processors take them: sound of 16 kHz, pictures (rows, columns, 3), films of such."""
        named = {"audio": ("audio", sound), "image": ("images", picture), "video": ("videos", film)}
        return {name: [make()] for place, (name, make) in named.items() if f"{{{place}}}" in self.user}


CASES: Final = (
    OmniCase("text", "Say something."),
    OmniCase("audio", "{audio}What is it?"),
    OmniCase("image", "{image}Who?"),
    OmniCase("video", "{video}Why?"),
    OmniCase("mixed", "two {audio}{image}and", history=(("user", "Hi"), ("assistant", "Hello."))),
)
#: By name.
CASE: Final = {case.name: case for case in CASES}


@cache
def sound() -> NDArray[np.float32]:
    """Two seconds of a tone with some noise."""
    noise = np.random.default_rng(0).standard_normal(2 * SAMPLE_RATE)
    tone: NDArray[np.float32] = (0.3 * np.sin(np.arange(2 * SAMPLE_RATE) / 9) + 0.05 * noise).astype(np.float32)
    return tone


@cache
def picture() -> NDArray[np.uint8]:
    return np.random.default_rng(1).integers(0, 255, (96, 128, 3), dtype=np.uint8)


@cache
def film() -> NDArray[np.uint8]:
    """Four frames."""
    return np.random.default_rng(2).integers(0, 255, (4, 64, 96, 3), dtype=np.uint8)


LONGEST = 768
SLOTS = 8
#: As the reference computes, on a machine with a GPU too: codes are compared exactly.
PRECISE: Final[Mapping[str, Any]] = {"device": "cpu", "dtype": "float32"}
_END_OF_CODES: Final = {Family.QWEN25: "tts_codec_end_token_id", Family.QWEN3: "codec_eos_token_id"}


@cache
def talker(family: Family, codec_end: int | None = None) -> SlotTalker:
    """The Talker of the tiny checkpoint, with ``codec_end`` as the code that ends an answer; loaded once."""
    folder = omni_checkpoint(family).resolve()
    if codec_end is None:
        return load_talker(folder, slots=SLOTS, longest=LONGEST, **PRECISE)
    config = json.loads((folder / "config.json").read_text())
    config["talker_config"][_END_OF_CODES[family]] = codec_end
    with TemporaryDirectory() as other:
        for path in folder.iterdir():
            if path.name != "config.json":
                (Path(other) / path.name).symlink_to(path)
        (Path(other) / "config.json").write_text(json.dumps(config))
        return load_talker(other, slots=SLOTS, longest=LONGEST, **PRECISE)


def new_talker(family: Family, **options: Any) -> SlotTalker:
    """Another Talker of the tiny checkpoint."""
    return load_talker(omni_checkpoint(family), slots=SLOTS, longest=LONGEST, **{**PRECISE, **options})


def greedy(family: Family, **settings: Any) -> dict[str, Any]:
    return {"voice": SPEAKER[family], "temperature": 0, **settings}


class Driven:
    """Sessions of a Talker and what they have made."""

    def __init__(self, model: SlotTalker) -> None:
        self.model = model
        self.codes: dict[int, list[NDArray[np.int64]]] = {}
        self.ends: dict[int, CodesEnd] = {}
        self.items: dict[int, list[Codes]] = {}

    def open(self, session: int, settings: dict[str, Any], *, frames: int = 1000) -> None:
        self.model.open(session, settings)
        self.model.grant(session, frames)
        self.codes[session], self.items[session] = [], []

    def step(self) -> None:
        for session, item in self.model.step():
            assert session not in self.ends
            self.items[session].append(item)
            self.codes[session] += list(item.codes)
            if item.end is not None:
                self.ends[session] = item.end

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Step until there is nothing to do."""
        while self.model.busy and not until():
            self.step()

    def made(self, session: int) -> NDArray[np.int64]:
        return np.array(self.codes[session]).reshape(-1, self.model.codebooks)


def speak(
    model: SlotTalker, items: Iterable[TalkerItem], settings: dict[str, Any]
) -> tuple[NDArray[np.int64], CodesEnd | None]:
    """Run one session alone, working on each item before the next; returns its codes and its end."""
    driven = Driven(model)
    driven.open(0, settings)
    for item in items:
        model.feed(0, item)
        driven.run()
    model.close(0)
    return driven.made(0), driven.ends.get(0)


def of(answer: Spoken, *, ends: bool) -> SlotTalker:
    """The Talker that an answer of the reference is compared with."""
    return talker(answer.family, answer.codec_end if ends else None)


def long_prompt(family: Family, rows: int) -> PromptRows:
    """A user's turn of ``rows`` rows, and the beginning of the assistant's."""
    prompt = spoken(family, "text").prompt_rows()
    begin = int(np.flatnonzero(prompt.tokens == prompt.tokens[0])[1])
    size = prompt.hidden.shape[1]
    head, tail = prompt.tokens[begin : begin + 3], prompt.tokens[-3:]
    letters = np.full(rows - 3, 97, np.int64)
    tokens = np.concatenate((head, letters, tail if family is Family.QWEN3 else tail[:0]))
    states = np.full(len(tokens), family is Family.QWEN25)
    hidden = np.zeros((int(states.sum()), size), np.float32)
    return PromptRows(tokens, np.tile(np.arange(len(tokens)), (3, 1)), states, hidden)


_ATEN = torch.ops.aten
_WAITING = {
    _ATEN._local_scalar_dense,
    _ATEN.nonzero,
    _ATEN.is_nonzero,
    _ATEN.masked_select,
    _ATEN.equal,
    _ATEN.bincount,
}
_INDEXING = {_ATEN.index, _ATEN.index_put, _ATEN.index_put_}


class NothingWaits(TorchDispatchMode):  # type: ignore[misc]
    """Fails on what would make the host wait for a device, or size a tensor by another's values."""

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        assert operator.overloadpacket not in _WAITING, operator
        indices = arguments[1] if operator.overloadpacket in _INDEXING else ()
        assert all(index is None or index.dtype != torch.bool for index in indices), operator
        return operator(*arguments, **(named or {}))
