"""Qwen25Token2Wav: the vocoder of Qwen2.5-Omni as a StepModel.

An answer is made in the windows of a WindowPlan, from noise that depends on its seed and on the place in the answer
alone, so its sound is the same whenever the codes come. The mel frames of a window are the solution of a differential
equation: the DiT of a Token2WavNetwork gives the derivative, a RungeKutta takes the steps. BigVGAN turns mel frames
into sound 20 frames late, as the samples of a frame depend on so many after it. Only the first window does not wait
for the next: it takes the frames of its own future block.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import pi, prod
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniToken2WavConfig
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniToken2WavModel

from omni_ws.config.values import ConfigurationError
from omni_ws.engine.omni.checkpoint import OmniSpeaker, default_speaker
from omni_ws.engine.omni.step_graphs import StepGraphs
from omni_ws.engine.omni.step_model import NoSlot, RefusedInput, StepResult, VocoderInput, VocoderOutput
from omni_ws.engine.omni.talker_network import normal_at


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowPlan:
    """In blocks: what the ``first`` window makes final, what each later one does, and what they read on either side.

    The network looks one block ahead in some layers and is evaluated many times, so no code's sound is final before the
    whole answer is known. What is computed from a window with some blocks on either side is as good as final; windows
    that begin at blocks of the whole answer, and never depend on when codes came, make the same sound each time.
    """

    past: int = 2
    first: int = 1
    chunk: int = 3
    future: int = 1

    def unlocked(self, blocks: int) -> int:
        """Return how many windows can be computed from so many whole blocks, of an answer that goes on."""
        later = blocks - self.first - self.future
        return 0 if later < 0 else 1 + later // self.chunk

    def count(self, blocks: int) -> int:
        """Return how many windows an answer of so many blocks has, a part of one included."""
        return 0 if not blocks else 1 + max(0, -(-(blocks - self.first) // self.chunk))

    def blocks(self, index: int) -> tuple[int, int]:
        """Return where the blocks begin and end that window ``index`` makes final."""
        begin = self.first + (index - 1) * self.chunk if index else 0
        return begin, self.first + index * self.chunk


#: As the authors of the model stream it; the first window is shorter, for an early first sound.
STREAMING = WindowPlan()


@dataclass(frozen=True, slots=True)
class MelWindow:
    """A window's place in the answer, in codes: it reads ``left`` to ``right`` and makes ``begin`` to ``end`` final."""

    left: int
    begin: int
    end: int
    right: int
    last: bool

    @classmethod
    def of(cls, plan: WindowPlan, index: int, *, block: int, total: int | None) -> MelWindow:
        """Return window ``index`` for blocks of ``block`` codes; ``total`` codes make the answer, if that is known."""
        begin, end = plan.blocks(index)
        left, right = max(0, begin - plan.past) * block, (end + plan.future) * block
        begin, end = begin * block, end * block
        if total is None:
            return cls(left, begin, end, right, last=False)
        return cls(left, begin, min(end, total), min(right, total), last=end >= total)


#: Mel frames on either side that the samples of a frame depend on.
CONTEXT: Final = 20
#: The limit on codes of a session that wait to be decoded: 82 s of sound.
MOST_WAITING: Final = 4096
#: The authors' number of time points.
ODE_STEPS: Final = 10


class Qwen25Token2Wav:
    """A StepModel: VocoderInput in, VocoderOutput out. Settings are ``voice`` and ``seed``, 0 if none is given.

    A step evaluates the network once, or makes mel frames sound, for sessions whose windows are equally long, up to
    ``batch``; the session that has waited longest decides. Four windows keep a GPU busy: more make a step longer, not
    more sound.
    """

    def __init__(
        self,
        network: Token2WavNetwork,
        *,
        slots: int = 32,
        batch: int = 4,
        plan: WindowPlan = STREAMING,
    ) -> None:
        self._network = network
        self._slots = slots
        self._batch = min(batch, slots)
        self._plan = plan
        self._answers: dict[int, _Answer] = {}
        #: The sessions that have inputs; the one that has waited longest is first.
        self._queue: dict[int, _Answer] = {}

    @property
    def samples_per_code(self) -> int:
        samples: int = self._network.mel_per_code * self._network.samples_per_mel
        return samples

    @property
    def memory_bytes(self) -> int:
        """See StepModel. Windows take little beside weights and graphs."""
        return self._network.memory_bytes

    @property
    def slots(self) -> int:
        """See StepModel."""
        return self._slots

    @property
    def busy(self) -> bool:
        """See StepModel."""
        return bool(self._queue)

    def warm_up(self) -> None:
        """See StepModel: capture the usual windows, and decode an answer that has all of them."""
        plan, block = self._plan, self._network.codes_per_block
        blocks = plan.first + 2 * plan.chunk + plan.future
        windows = [MelWindow.of(plan, index, block=block, total=None) for index in range(plan.unlocked(blocks))]
        frames = sorted({(window.right - window.left) * self._network.mel_per_code for window in windows})
        self._network.warm_up(frames, batch=self._batch)
        codes = np.zeros((blocks * block, 1), np.int64)
        self.open(-1, {})
        self.feed(-1, VocoderInput(codes, last=True))
        while self.busy:
            self.step()
        self.close(-1)

    def open(self, session: int, settings: Mapping[str, Any]) -> None:
        """See StepModel. The voice is known by its name in any case; without one it is the default."""
        voice, seed = settings.get("voice"), settings.get("seed")
        if unknown := settings.keys() - {"voice", "seed"}:
            raise RefusedInput(f"unknown setting of the vocoder: {min(unknown)}")
        if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool)):
            raise RefusedInput(f"seed must be a whole number, got {seed!r}")
        name = self._voice(voice)
        if len(self._answers) >= self._slots:
            raise NoSlot
        self._answers[session] = _Answer(name, seed or 0)

    def feed(self, session: int, item: VocoderInput) -> None:
        """See StepModel. Codes that are refused end the session."""
        answer = self._answers[session]
        try:
            self._check(answer, item)
        except RefusedInput:
            self.close(session)
            raise
        answer.codes = np.concatenate([answer.codes, item.codes[:, 0].astype(np.int64)])
        answer.ended = item.last
        whole, part = divmod(answer.received, self._network.codes_per_block)
        windows = self._plan.count(whole + bool(part)) if item.last else self._plan.unlocked(whole)
        answer.inputs.append(_Pending(windows))
        self._queue.setdefault(session, answer)

    def grant(self, session: int, frames: int) -> None:
        """Do nothing: a vocoder makes nothing that it was not given codes for."""

    def close(self, session: int) -> None:
        """See StepModel."""
        self._queue.pop(session, None)
        self._answers.pop(session, None)

    def step(self) -> Sequence[StepResult]:
        """See StepModel."""
        results: list[StepResult] = []
        chosen = self._choose(results)
        if not chosen:
            return results
        if chosen[0][1].vocoding is None:
            self._solve([answer for _, answer in chosen])
        else:
            self._make_sound([answer for _, answer in chosen])
        for session, answer in chosen:
            # To the end of the queue.
            self._queue[session] = self._queue.pop(session)
            self._settle(session, answer, results)
        return results

    def _voice(self, asked: Any) -> str:
        voices = self._network.voices
        if asked is None:
            return default_speaker(voices)
        for name in voices:
            if isinstance(asked, str) and asked.lower() == name.lower():
                return name
        raise RefusedInput(f"unknown voice {asked!r}; the model has {', '.join(voices)}")

    def _check(self, answer: _Answer, item: VocoderInput) -> None:
        """Raise RefusedInput for an item that cannot be decoded."""
        codes = item.codes
        if answer.ended:
            raise RefusedInput("codes after the last ones of the answer")
        if codes.ndim != 2 or codes.shape[1] != 1 or not np.issubdtype(codes.dtype, np.integer):
            raise RefusedInput("codes must be integers of the shape (frames, 1)")
        begun = answer.solving.window.end if answer.solving else self._window(answer).begin
        if answer.received - begun + len(codes) > MOST_WAITING:
            raise RefusedInput(f"more than {MOST_WAITING} codes wait to be decoded")
        if len(codes) and not 0 <= codes.min() <= codes.max() < self._network.codes:
            wrong = codes.max() if codes.min() >= 0 else codes.min()
            raise RefusedInput(f"code {wrong} is not one of the {self._network.codes} of the codebook")

    def _window(self, answer: _Answer) -> MelWindow:
        """The window that comes next."""
        total = answer.received if answer.ended else None
        return MelWindow.of(self._plan, answer.windows, block=self._network.codes_per_block, total=total)

    def _choose(self, results: list[StepResult]) -> list[tuple[int, _Answer]]:
        """Return the sessions of the next batch; adds results for inputs that no window waited for."""
        chosen: list[tuple[int, _Answer]] = []
        kind: tuple[bool, int] | None = None
        for session, answer in list(self._queue.items()):
            self._settle(session, answer, results)
            if session not in self._queue:
                continue
            here = self._begun(answer)
            kind = kind or here
            if here == kind:
                chosen.append((session, answer))
                if len(chosen) == self._batch:
                    break
        return chosen

    def _begun(self, answer: _Answer) -> tuple[bool, int]:
        """Begin the next window if none is in work; return whether it is solved, and its mel frames."""
        if answer.vocoding is not None:
            return True, len(answer.vocoding)
        if answer.solving is None:
            window, per_code = self._window(answer), self._network.mel_per_code
            codes = answer.codes[window.left - answer.dropped : window.right - answer.dropped]
            answer.solving = _Solving(
                window,
                RungeKutta(
                    self._network.noise(answer.seed, window.left * per_code, window.right * per_code),
                    self._network.times,
                ),
                self._network.conditions(answer.voice, torch.from_numpy(codes).to(self._network.device)),
            )
        return False, len(answer.solving.mels.value)

    def _solve(self, answers: Sequence[_Answer]) -> None:
        """Do one evaluation."""
        solving = [answer.solving for answer in answers if answer.solving is not None]
        slopes = self._network.derivative(
            [each.mels.time for each in solving],
            [each.mels.point for each in solving],
            [each.conditions for each in solving],
        )
        for answer, each, slope in zip(answers, solving, slopes, strict=True):
            each.mels.take(slope)
            if each.mels.done:
                self._solved(answer, each.window, each.mels.value)

    def _solved(self, answer: _Answer, window: MelWindow, mels: Tensor) -> None:
        """Keep the final mel frames of the window, and say what is to become sound of them."""
        per_code = self._network.mel_per_code
        left, begin, end = (code * per_code for code in (window.left, window.begin, window.end))
        final = mels[begin - left : end - left]
        kept = final if answer.mels is None else torch.cat([answer.mels, final])
        if window.last:
            until, read = end, kept
        elif answer.mels is None:
            until, read = end, mels[: end + CONTEXT]
        else:
            until, read = end - CONTEXT, kept
        answer.vocoding = read
        answer.sent = slice(answer.sounded - answer.mel_begin, until - answer.mel_begin)
        keep = max(answer.mel_begin, until - CONTEXT)
        answer.mels, answer.mel_begin, answer.sounded = kept[keep - answer.mel_begin :], keep, until
        answer.solving = None

    def _make_sound(self, answers: Sequence[_Answer]) -> None:
        """Turn solved mel frames into samples."""
        mels = [answer.vocoding for answer in answers if answer.vocoding is not None]
        sounds = self._network.sound(torch.stack(mels)).cpu().numpy()
        per_mel = self._network.samples_per_mel
        for answer, sound in zip(answers, sounds, strict=True):
            samples = sound[answer.sent.start * per_mel : answer.sent.stop * per_mel].copy()
            answer.windows += 1
            answer.vocoding = None
            drop = self._window(answer).left - answer.dropped
            answer.codes, answer.dropped = answer.codes[drop:], answer.dropped + min(drop, len(answer.codes))
            waiting = next(pending for pending in answer.inputs if pending.windows >= answer.windows)
            waiting.samples.append(samples)

    def _settle(self, session: int, answer: _Answer, results: list[StepResult]) -> None:
        """Add results for the inputs that are complete."""
        while answer.inputs and answer.inputs[0].windows <= answer.windows:
            pending = answer.inputs.popleft()
            samples = np.concatenate(pending.samples) if pending.samples else np.zeros(0, np.float32)
            results.append(StepResult(session, VocoderOutput(samples, len(samples) // self.samples_per_code)))
        if not answer.inputs:
            self._queue.pop(session, None)


@dataclass(slots=True)
class _Answer:
    voice: str
    seed: int
    #: The codes from ``dropped`` on: those that later windows read.
    codes: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    dropped: int = 0
    ended: bool = False
    inputs: deque[_Pending] = field(default_factory=deque)
    #: How many windows are sound already.
    windows: int = 0
    solving: _Solving | None = None
    #: The final mel frames from ``mel_begin`` on, (frames, bins), and how many have become sound.
    mels: Tensor | None = None
    mel_begin: int = 0
    sounded: int = 0
    #: What BigVGAN reads next, and which of its frames are sent on.
    vocoding: Tensor | None = None
    sent: slice = field(default_factory=lambda: slice(0))

    @property
    def received(self) -> int:
        return self.dropped + len(self.codes)


@dataclass(slots=True)
class _Pending:
    """An input: how many windows can be computed once it is there, and the samples of those that waited for it."""

    windows: int
    samples: list[NDArray[np.float32]] = field(default_factory=list)


@dataclass(slots=True)
class _Solving:
    """A window between evaluations: its mel frames (frames, bins), and its conditions (2, frames, values)."""

    window: MelWindow
    mels: RungeKutta
    conditions: Tensor


#: The authors' values: how far the solution follows the codes, and how times gather at the begin.
_GUIDANCE: Final = 0.5
_SWAY: Final = -1.0
#: Graphs are for so many windows, and for the largest number of a batch.
_BATCHES: Final = (1, 2, 4, 8, 16)


class Token2WavNetwork:
    """The network over batches of windows: transformers' modules, and each constant computed once.

    transformers' own ``sample`` draws the noise for the length at hand and runs the speaker encoder in each of the 36
    evaluations; nothing else differs here.

    ``weights`` are the tensors of the module ``token2wav``, ``config`` is ``token2wav_config`` of the checkpoint.
    Equations are solved in ``ode_steps`` - 1 steps. Raises ConfigurationError for weights that do not fit.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        weights: Mapping[str, Tensor],
        speakers: Mapping[str, OmniSpeaker],
        *,
        ode_steps: int,
        device: torch.device,
    ) -> None:
        if ode_steps < 2:
            raise ConfigurationError([f"ode_steps must be at least 2, got {ode_steps}"])
        settings = Qwen2_5OmniToken2WavConfig(**config)
        try:
            with torch.device(device):
                model = Qwen2_5OmniToken2WavModel._from_config(settings, attn_implementation="sdpa")
            # Released checkpoints may have constants besides, which the model computes itself.
            loaded = model.load_state_dict({name: tensor.float() for name, tensor in weights.items()}, strict=False)
        except (RuntimeError, ValueError, TypeError) as error:
            raise ConfigurationError([f"token2wav: {error}"]) from error
        if loaded.missing_keys:
            raise ConfigurationError([f"token2wav: the checkpoint has no tensor {loaded.missing_keys[0]}"])
        self.device = device
        self._dit, self._vocoder = model.eval().code2wav_dit_model, model.code2wav_bigvgan_model
        dit = settings.dit_config
        self.bins: int = dit.mel_dim
        #: The number of codes, the mel frames of each, and the codes of a block.
        self.codes: int = self._dit.text_embed.codec_embed.num_embeddings
        self.mel_per_code: int = dit.repeats
        self.codes_per_block: int = dit.block_size // dit.repeats
        self.samples_per_mel = prod(settings.bigvgan_config.upsample_rates)
        self._weight_bytes: int = sum(tensor.nbytes for tensor in model.state_dict().values())
        #: The ends of the solver's steps, the begin first.
        self.times: Sequence[float] = _times(ode_steps).tolist()
        self._batches: list[int] = []
        self._graphs = StepGraphs(lambda batch, frames: self._evaluate(*self._inputs(batch, frames)), str(device))
        #: The longest window so far, of which others are parts.
        self._longest = 0
        self.voices: Sequence[str] = tuple(speakers)
        with torch.inference_mode():
            self._voices = {name: self._voice(name, speaker) for name, speaker in speakers.items()}

    @property
    def memory_bytes(self) -> int:
        """What the weights take; on a GPU all that PyTorch has reserved there, graphs included."""
        if self.device.type == "cuda":
            return int(torch.cuda.memory_reserved(self.device))
        return self._weight_bytes

    def warm_up(self, frames: Sequence[int], *, batch: int) -> None:
        """Run windows of so many mel frames, and on a GPU capture them in batches of up to ``batch``."""
        longest, width = max(frames), self._dit.hidden_size
        self._shape(longest)
        with torch.inference_mode(), self.device:
            self._buffers = (
                torch.zeros(batch),
                torch.zeros(batch, longest, self.bins),
                torch.zeros(2, batch, longest, width),
            )
            self._batches = [size for size in _BATCHES if size < batch] + [batch]
            self._graphs.warm_up((size, length) for size in self._batches for length in frames)

    def noise(self, seed: int, begin: int, end: int) -> Tensor:
        """Return what the mel frames from ``begin`` to ``end`` of an answer begin as, (frames, bins)."""
        positions = torch.arange(begin * self.bins, end * self.bins, device=self.device)
        return normal_at(positions, seed).view(-1, self.bins)

    def conditions(self, voice: str, codes: Tensor) -> Tensor:
        """Return what stays the same in each evaluation of a window, for its codes (n,): (2, mel frames, values)."""
        with torch.inference_mode():
            dit, known = self._dit, self._voices[voice]
            said = dit.text_embed(torch.stack([codes, torch.zeros_like(codes)]))
            heard, embedding = (each[:, None].expand(-1, said.shape[1], -1) for each in (known.heard, known.embedding))
            projection = dit.input_embed.proj
            constant = torch.cat([heard, said, embedding], -1)
            return functional.linear(constant, projection.weight[:, self.bins :], projection.bias)

    def derivative(self, times: Sequence[float], mels: Sequence[Tensor], conditions: Sequence[Tensor]) -> Tensor:
        """Return the derivatives of windows at ``times``: of mel frames (frames, bins), (batch, frames, bins).

        All windows are equally long; each has ``conditions``.
        """
        batch, frames = len(mels), len(mels[0])
        size = next((size for size in self._batches if size >= batch), batch)
        with torch.inference_mode():
            given = torch.tensor(times, device=self.device), torch.stack([*mels]), torch.stack([*conditions], 1)
            if (size, frames) not in self._graphs:
                return self._evaluate(*given)
            to_times, to_mels, to_conditions = self._inputs(batch, frames)
            for target, source in zip((to_times, to_mels, to_conditions), given, strict=True):
                target.copy_(source)
            # The next run writes over what this one returns.
            return self._graphs.run(size, frames)[:batch].clone()

    def sound(self, mels: Tensor) -> Tensor:
        """Return the samples of mel frames (batch, frames, bins): (batch, frames * samples_per_mel)."""
        with torch.inference_mode():
            samples: Tensor = self._vocoder(mels.transpose(1, 2))
            # It drops the dimension of a batch of one.
            return samples.view(len(mels), -1)

    def _voice(self, name: str, speaker: OmniSpeaker) -> _Voice:
        encoder, expected = self._dit.input_embed.spk_encoder, self._dit.config.enc_emb_dim
        mel, embedding = speaker.reference_mel.to(self.device), speaker.condition.to(self.device)
        if embedding.shape[1] != expected or mel.shape[2] != self.bins:
            raise ConfigurationError([f"speaker {name}: {expected} values and {self.bins} mel bins are needed"])
        heard = torch.cat([encoder(mel), encoder(torch.zeros_like(mel))])
        return _Voice(heard, torch.cat([embedding, torch.zeros_like(embedding)]))

    def _inputs(self, batch: int, frames: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the parts of the buffers that graphs read: times, mel frames and conditions."""
        times, mels, conditions = self._buffers
        return times[:batch], mels[:batch, :frames], conditions[:, :batch, :frames]

    def _evaluate(self, times: Tensor, mels: Tensor, conditions: Tensor) -> Tensor:
        """Return the derivative at ``times`` (batch,); ``conditions`` (2, batch, frames, values)."""
        dit, batch = self._dit, len(mels)
        rotary, distance = self._shape(mels.shape[1])
        emb = dit.time_embed(times).repeat(2, 1)
        projected = functional.linear(mels, dit.input_embed.proj.weight[:, : self.bins])
        x = (projected + conditions).flatten(0, 1)
        for block in dit.transformer_blocks:
            x = block(x, emb, position_embeddings=rotary, block_diff=distance)
        guided, free = dit.proj_out(dit.norm_out(x, emb)).split(batch)
        result: Tensor = guided + (guided - free) * _GUIDANCE
        return result

    def _shape(self, frames: int) -> tuple[Any, Tensor]:
        """Return rotations and distances in blocks, (1, 1, frames, frames), for windows of so many mel frames."""
        if self._longest < frames:
            positions = torch.arange(frames, device=self.device)
            blocks = positions // self._dit.block_size
            self._rotary = self._dit.rotary_embed(torch.empty(0, device=self.device), positions[None])
            self._distances = (blocks[None] - blocks[:, None])[None, None]
            self._longest = frames
        rotary = tuple(each[:, :frames] for each in self._rotary)
        return rotary, self._distances[..., :frames, :frames]


@dataclass(frozen=True, slots=True)
class _Voice:
    """What the DiT is told of a speaker, in row 0, and where it is to be told nothing, in row 1: each (2, values)."""

    heard: Tensor
    embedding: Tensor


def _times(steps: int) -> Tensor:
    times = torch.linspace(0, 1, steps)
    return times + _SWAY * (torch.cos(pi / 2 * times) - 1 + times)


_THIRD = 1 / 3


class RungeKutta:
    """Solves a differential equation by one evaluation at a time, by the 3/8 rule of fourth order.

    Between evaluations, the derivative is asked for at ``time`` and ``point``, and given to ``take``.

    ``times`` are the ends of the steps, the first one the begin. ``value`` is the solution as far as it is known.
    """

    def __init__(self, begin: Tensor, times: Sequence[float]) -> None:
        self.value = self.point = begin
        self.time = times[0]
        self._steps = list(pairwise(times))[::-1]
        self._slopes: list[Tensor] = []

    @property
    def done(self) -> bool:
        """Whether ``value`` is the solution at the last of ``times``."""
        return not self._steps

    def take(self, slope: Tensor) -> None:
        """Go on with the derivative that was asked for."""
        begin, end = self._steps[-1]
        step = end - begin
        self._slopes.append(slope)
        match self._slopes:
            case [k1]:
                self.time, self.point = begin + step * _THIRD, self.value + k1 * (step * _THIRD)
            case [k1, k2]:
                self.time, self.point = begin + step * 2 * _THIRD, self.value + (k2 - k1 * _THIRD) * step
            case [k1, k2, k3]:
                self.time, self.point = end, self.value + (k1 - k2 + k3) * step
            case [k1, k2, k3, k4]:
                self.value = self.point = self.value + (k1 + 3 * (k2 + k3) + k4) * (step / 8)
                self.time = end
                self._steps.pop()
                self._slopes = []
