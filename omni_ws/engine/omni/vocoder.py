"""Vocoder: the base class of both vocoders, a StepModel that decodes the codes of many sessions in batches.

A DecodedStream is the state of one session. StepGraphs are CUDA graphs of a model's steps. Qwen25Token2Wav is the
vocoder of Qwen2.5-Omni.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import pi, prod
from typing import Any, Final, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniToken2WavConfig
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniToken2WavModel

from omni_ws.config.values import ConfigurationError
from omni_ws.engine.omni.step_process import StepResult, VocoderInput, known_voice
from omni_ws.engine.omni.talker_network import normal_at
from omni_ws.engine.omni.transformer import (
    OmniSpeaker,
    default_speaker,
)
from omni_ws.errors import EngineOverloaded, InvalidValue

#: The settings that sessions of vocoders may have.
_SETTINGS: Final = frozenset({"voice", "seed"})


class DecodedStream(ABC):
    """The state of one session: its unfinished inputs, and the samples made so far for the oldest input.

    ``done`` is the number of decoded units, which are frames or windows, as the vocoder decides. An input is finished,
    and its samples are sent, when ``done`` reaches the number that ``goal`` returned for this input.
    """

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.done = 0
        #: Whether the last codes have come.
        self.ended = False
        self._goals: deque[int] = deque()
        self._samples: list[NDArray[np.float32]] = []

    @property
    def has_inputs(self) -> bool:
        """Whether there are unfinished inputs."""
        return bool(self._goals)

    @property
    @abstractmethod
    def waiting(self) -> int:
        """The number of frames that wait to be decoded."""

    @abstractmethod
    def next_work(self) -> tuple[bool, int]:
        """Return a key of the session's next work; sessions with equal keys form a batch. May start this work."""

    @abstractmethod
    def goal(self, codes: NDArray[np.int64]) -> int:
        """Keep the ``codes`` of an input, and return the value of ``done`` at which this input is finished."""

    def add(self, item: VocoderInput) -> None:
        """Queue an input."""
        self.ended = item.last
        self._goals.append(self.goal(np.asarray(item.codes, np.int64)))

    def take(self, samples: NDArray[np.float32], done: int) -> None:
        """Add the ``samples`` of the next ``done`` units, which were decoded now."""
        self._samples.append(samples)
        self.done += done

    def finished_inputs(self) -> Iterator[NDArray[np.float32]]:
        """Remove the finished inputs, and yield their samples."""
        while self._goals and self._goals[0] <= self.done:
            self._goals.popleft()
            samples, self._samples = self._samples, []
            yield np.concatenate(samples) if samples else np.zeros(0, np.float32)


Stream = TypeVar("Stream", bound=DecodedStream)


class Vocoder(ABC, Generic[Stream]):
    """A StepModel whose items are VocoderInputs; the result for each is an array of samples (n,) float32, n may be 0.

    Samples are returned as soon as no later code can change them.

    A step does one kind of work for several sessions: the next work of the session that has waited longest. Frames have
    ``codebooks`` codes, each below ``codebook_size``. At most ``most_waiting`` frames of a session may wait to be
    decoded. The settings of a session are ``voice`` and ``seed``.
    """

    def __init__(self, *, slots: int, codebooks: int, codebook_size: int, most_waiting: int) -> None:
        self.slots = slots
        self._codebooks = codebooks
        self._codebook_size = codebook_size
        self._most_waiting = most_waiting
        self._free = list(range(slots))
        self._streams: dict[int, Stream] = {}
        #: The sessions with unfinished inputs; the one that has waited longest is first.
        self._queue: dict[int, Stream] = {}

    @property
    @abstractmethod
    def memory_bytes(self) -> int:
        """The bytes that weights, slots and buffers take on the device."""

    @property
    @abstractmethod
    def samples_per_frame(self) -> int:
        """The number of samples of a codec frame."""

    @abstractmethod
    def warm_up(self) -> None:
        """Run, compile or capture every shape that occurs, so that the first session is as fast as the others."""

    @abstractmethod
    def _begun(self, slot: int, settings: Mapping[str, Any]) -> Stream:
        """Return the stream of a new session in ``slot``. Raises InvalidValue for settings."""

    @abstractmethod
    def _most(self, work: tuple[bool, int]) -> int:
        """Return the limit on sessions for which one step may do ``work``, a key that ``next_work`` returned."""

    @abstractmethod
    def _decode(self, work: tuple[bool, int], streams: Sequence[Stream]) -> None:
        """Do ``work``, a key that ``next_work`` returned, for these streams."""

    @property
    def busy(self) -> bool:
        """Whether a step has work to do."""
        return bool(self._queue)

    def open(self, session: int, settings: Mapping[str, Any]) -> None:
        """Open a session. Raises EngineOverloaded without a free slot, or InvalidValue for settings."""
        if unknown := settings.keys() - _SETTINGS:
            raise InvalidValue(f"unknown setting of the vocoder: {min(unknown)}")
        if not self._free:
            raise EngineOverloaded("all slots are taken")
        self._streams[session] = self._begun(self._free[-1], settings)
        self._free.pop()

    def feed(self, session: int, item: VocoderInput) -> None:
        """Queue codes of an open session for later steps. For invalid codes, closes it and raises InvalidValue."""
        stream = self._streams[session]
        try:
            self._check(stream, item)
        except InvalidValue:
            self.close(session)
            raise
        stream.add(item)
        self._queue.setdefault(session, stream)

    def grant(self, session: int, frames: int) -> None:
        """Do nothing: only a Talker needs grants."""

    def close(self, session: int) -> None:
        """Free the session's slot and other resources; unknown sessions are ignored."""
        self._queue.pop(session, None)
        stream = self._streams.pop(session, None)
        if stream is not None:
            self._free.append(stream.slot)

    def step(self) -> Sequence[StepResult]:
        """Decode the next codes of a batch of sessions, and return the samples of finished inputs."""
        results: list[StepResult] = []
        chosen: dict[int, Stream] = {}
        work: tuple[bool, int] | None = None
        for session, stream in list(self._queue.items()):
            results += self._settled(session, stream)
            if not stream.has_inputs:
                continue
            here = stream.next_work()
            work = work or here
            if here == work:
                chosen[session] = stream
                if len(chosen) == self._most(work):
                    break
        if work is not None:
            self._decode(work, list(chosen.values()))
        for session, stream in chosen.items():
            self._queue[session] = self._queue.pop(session)  # to the end
            results += self._settled(session, stream)
        return results

    def _settled(self, session: int, stream: Stream) -> list[StepResult]:
        """Return the results of a session's finished inputs; remove the session from the queue if no input is left."""
        results = [(session, samples) for samples in stream.finished_inputs()]
        if not stream.has_inputs:
            del self._queue[session]
        return results

    def _check(self, stream: Stream, item: VocoderInput) -> None:
        """Raise InvalidValue for an item that cannot be decoded."""
        codes, size = item.codes, self._codebook_size
        if stream.ended:
            raise InvalidValue("codes after the last ones of the answer")
        if codes.ndim != 2 or codes.shape[1] != self._codebooks or not np.issubdtype(codes.dtype, np.integer):
            raise InvalidValue(f"codes must be integers of the shape (frames, {self._codebooks})")
        if stream.waiting + len(codes) > self._most_waiting:
            raise InvalidValue(f"more than {self._most_waiting} codec frames wait to be decoded")
        if len(codes) and not 0 <= codes.min() <= codes.max() < size:
            wrong = codes.max() if codes.min() >= 0 else codes.min()
            raise InvalidValue(f"code {wrong} is not one of the {size} of a codebook")


# CUDA graphs of a vocoder's and a Talker's steps.

#: A step of one shape, such as (batch size, window of positions); returns a tensor that the next step may overwrite.
Step = Callable[[int, int], torch.Tensor]


class StepGraphs:
    """A runner of ``step(batch, window)``: from a CUDA graph if one was captured for this shape, else directly.

    The step must read its inputs from fixed buffers and must not synchronise with the device. All graphs share one
    memory pool, since only one graph runs at a time. On a CPU there are no graphs.
    """

    def __init__(self, step: Step, device: str) -> None:
        self._step = step
        self._captures = torch.device(device).type == "cuda"
        self._graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}

    def __contains__(self, shape: object) -> bool:
        """Whether a graph of this shape was captured."""
        return shape in self._graphs

    def run(self, batch: int, window: int) -> torch.Tensor:
        captured = self._graphs.get((batch, window))
        if captured is None:
            return self._step(batch, window)
        graph, output = captured
        graph.replay()
        return output

    def warm_up(self, shapes: Iterable[tuple[int, int]]) -> None:
        """Capture a graph for each shape, the largest first, so that the others fit into its memory.

        On a CPU, run the step once for each shape.
        """
        ordered = sorted(shapes, reverse=True)
        if not self._captures:
            for shape in ordered:
                self._step(*shape)
            return
        pool = torch.cuda.graph_pool_handle()
        for shape in ordered:
            # In the first runs libraries choose algorithms and allocate workspaces, which cannot be captured.
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(2):
                    self._step(*shape)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                output = self._step(*shape)
            self._graphs[shape] = graph, output


# Qwen25Token2Wav: the vocoder of Qwen2.5-Omni as a StepModel.
#
# An answer is decoded in the windows of a WindowPlan. The noise depends on the seed and the position in the answer
# only, so the audio does not depend on when the codes arrive. The mel frames of a window are the solution of a
# differential equation (flow matching): the DiT of Token2WavNetwork computes the derivative, RungeKutta takes the
# steps. BigVGAN converts mel frames to samples, 20 frames late, because the samples of a frame depend on the next 20
# frames. The first window does not wait for them: it uses the frames of its own future block.


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowPlan:
    """The division of an answer into windows; all sizes are in blocks of codes.

    The first window makes the audio of ``first`` blocks final, each later window that of ``chunk`` blocks. A window
    also reads ``past`` blocks before these blocks and ``future`` blocks after them, as context. The DiT looks one block
    ahead in some layers and is evaluated many times, so the exact audio of a code depends on the whole answer; with
    this context the audio is as good as exact. Windows begin at fixed blocks, so the audio does not depend on when
    codes arrive.
    """

    past: int = 2
    first: int = 1
    chunk: int = 3
    future: int = 1

    def unlocked(self, blocks: int) -> int:
        """Return how many windows of an unfinished answer can be computed once ``blocks`` whole blocks have arrived."""
        later = blocks - self.first - self.future
        return 0 if later < 0 else 1 + later // self.chunk

    def count(self, blocks: int) -> int:
        """Return how many windows a complete answer of ``blocks`` blocks has; a partial last block counts as one."""
        return 0 if not blocks else 1 + max(0, -(-(blocks - self.first) // self.chunk))

    def blocks(self, index: int) -> tuple[int, int]:
        """Return the range of blocks that window ``index`` makes final: the first block and the end, exclusive."""
        begin = self.first + (index - 1) * self.chunk if index else 0
        return begin, self.first + index * self.chunk


#: The windows of the model's authors, but with a shorter first window, for low latency to first audio.
STREAMING = WindowPlan()


@dataclass(frozen=True, slots=True)
class MelWindow:
    """A window of an answer: it reads the codes ``left`` to ``right``, and makes audio of ``begin`` to ``end`` final.

    All four are indices of codes in the answer, the ends exclusive. ``last`` marks the last window of the answer.
    """

    left: int
    begin: int
    end: int
    right: int
    last: bool

    @classmethod
    def of(cls, plan: WindowPlan, index: int, *, block: int, total: int | None) -> MelWindow:
        """Return window ``index`` of ``plan``; ``block`` is the number of codes in a block.

        ``total`` is the number of codes of the answer; None while it is not known.
        """
        begin, end = plan.blocks(index)
        left, right = max(0, begin - plan.past) * block, (end + plan.future) * block
        begin, end = begin * block, end * block
        if total is None:
            return cls(left, begin, end, right, last=False)
        return cls(left, begin, min(end, total), min(right, total), last=end >= total)


#: The samples of a mel frame depend on so many mel frames on either side.
CONTEXT: Final = 20
#: The limit on codes of a session that wait to be decoded: 82 s of audio.
MOST_WAITING: Final = 4096
#: The number of time points of the differential equation, as the model's authors set it.
ODE_STEPS: Final = 10


class Qwen25Token2Wav(Vocoder["_Answer"]):
    """The Vocoder of Qwen2.5-Omni. The seed defaults to 0; the case of the voice's name does not matter.

    A step either evaluates the DiT once or converts mel frames to samples, for up to ``batch`` sessions whose windows
    have the same length. Four windows keep a GPU busy: with more, a step only takes longer.
    """

    def __init__(
        self,
        network: Token2WavNetwork,
        *,
        slots: int = 32,
        batch: int = 4,
        plan: WindowPlan = STREAMING,
    ) -> None:
        super().__init__(slots=slots, codebooks=1, codebook_size=network.codes, most_waiting=MOST_WAITING)
        self._network = network
        self._batch = min(batch, slots)
        self._plan = plan

    @property
    def samples_per_frame(self) -> int:
        samples: int = self._network.mel_per_code * self._network.samples_per_mel
        return samples

    @property
    def memory_bytes(self) -> int:
        """The bytes of the network on the device. Windows are not counted: they are small beside weights and graphs."""
        return self._network.memory_bytes

    def warm_up(self) -> None:
        """Capture graphs for windows of all usual lengths, and decode an answer with windows of all these lengths.

        A slot must be free.
        """
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

    def _begun(self, slot: int, settings: Mapping[str, Any]) -> _Answer:
        voice, seed = settings.get("voice"), settings.get("seed")
        if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool)):
            raise InvalidValue(f"seed must be a whole number, got {seed!r}")
        name = default_speaker(self._network.voices) if voice is None else known_voice(voice, self._network.voices)
        return _Answer(slot, self._network, self._plan, voice=name, seed=seed or 0)

    def _most(self, work: tuple[bool, int]) -> int:
        return self._batch

    def _decode(self, work: tuple[bool, int], streams: Sequence[_Answer]) -> None:
        """Convert the solved mel frames of these sessions to samples if ``work[0]``; else evaluate the DiT once."""
        if work[0]:
            mels = [answer.vocoding for answer in streams if answer.vocoding is not None]
            sounds = self._network.sound(torch.stack(mels)).cpu().numpy()
            for answer, sound in zip(streams, sounds, strict=True):
                answer.take_sound(sound)
            return
        solvers = [answer.solver for answer in streams if answer.solver is not None]
        slopes = self._network.derivative(
            [solver.time for solver in solvers],
            [solver.point for solver in solvers],
            [answer.conditions for answer in streams],
        )
        for answer, slope in zip(streams, slopes, strict=True):
            answer.take_slope(slope)


class _Answer(DecodedStream):
    """The state of one session: the codes that later windows read, the current window, and mel frames.

    The mel frames of a window are computed by solving an equation (``solver``), and then converted to samples
    (``vocoding``). ``done`` counts windows.
    """

    def __init__(self, slot: int, network: Token2WavNetwork, plan: WindowPlan, *, voice: str, seed: int) -> None:
        super().__init__(slot)
        self._network = network
        self._plan = plan
        self._voice = voice
        self._seed = seed
        #: The codes from the position ``_dropped`` on, which later windows read.
        self.codes: NDArray[np.int64] = np.zeros(0, np.int64)
        self._dropped = 0
        #: The solver of the current window, (frames, bins); None before the window has begun, and once it is solved.
        self.solver: RungeKutta | None = None
        #: The input of the DiT from the window's voice and codes, (2, frames, values).
        self.conditions: Tensor = torch.empty(0)
        #: The final mel frames from the position ``_mel_begin`` on, (frames, bins), and how many have become samples.
        self.mels: Tensor | None = None
        self._mel_begin = 0
        self._sounded = 0
        #: The mel frames that BigVGAN reads next, and the part of them whose samples are sent.
        self.vocoding: Tensor | None = None
        self._sent = slice(0)

    @property
    def waiting(self) -> int:
        """The number of codes after those that are final or that the current window, once begun, makes final."""
        window = self._next_window()
        return self._received - (window.end if self.solver else window.begin)

    @property
    def _received(self) -> int:
        return self._dropped + len(self.codes)

    def goal(self, codes: NDArray[np.int64]) -> int:
        self.codes = np.concatenate([self.codes, codes[:, 0]])
        whole, part = divmod(self._received, self._network.codes_per_block)
        return self._plan.count(whole + bool(part)) if self.ended else self._plan.unlocked(whole)

    def next_work(self) -> tuple[bool, int]:
        """Return the kind of the next work, and the number of its mel frames.

        The kind is True for the conversion of mel frames to samples, and False for a step of solving.
        """
        if self.vocoding is not None:
            return True, len(self.vocoding)
        if self.solver is None:
            network, window = self._network, self._next_window()
            codes = self.codes[window.left - self._dropped : window.right - self._dropped]
            left, right = window.left * network.mel_per_code, window.right * network.mel_per_code
            self.solver = RungeKutta(network.noise(self._seed, left, right), network.times)
            self.conditions = network.conditions(self._voice, torch.from_numpy(codes).to(network.device))
        return False, len(self.solver.value)

    def take_slope(self, slope: Tensor) -> None:
        """Take ``slope``, the derivative that the DiT has computed, and go on with solving the window."""
        assert self.solver is not None
        self.solver.take(slope)
        if self.solver.done:
            self._keep_solved(self._next_window(), self.solver.value)
            self.solver = None

    def take_sound(self, sound: NDArray[np.float32]) -> None:
        """Take the samples made from ``vocoding``, which end the window; drop codes that no later window reads."""
        per_mel = self._network.samples_per_mel
        self.take(sound[self._sent.start * per_mel : self._sent.stop * per_mel].copy(), 1)
        self.vocoding = None
        drop = min(self._next_window().left - self._dropped, len(self.codes))
        self.codes, self._dropped = self.codes[drop:], self._dropped + drop

    def _next_window(self) -> MelWindow:
        total = self._received if self.ended else None
        return MelWindow.of(self._plan, self.done, block=self._network.codes_per_block, total=total)

    def _keep_solved(self, window: MelWindow, mels: Tensor) -> None:
        """Keep the final mel frames of a solved window, and set ``vocoding`` to the frames to convert."""
        per_code = self._network.mel_per_code
        left, begin, end = (code * per_code for code in (window.left, window.begin, window.end))
        final = mels[begin - left : end - left]
        kept = final if self.mels is None else torch.cat([self.mels, final])
        if window.last:
            until, read = end, kept
        elif self.mels is None:
            until, read = end, mels[: end + CONTEXT]
        else:
            until, read = end - CONTEXT, kept
        self.vocoding = read
        self._sent = slice(self._sounded - self._mel_begin, until - self._mel_begin)
        keep = max(self._mel_begin, until - CONTEXT)
        self.mels, self._mel_begin, self._sounded = kept[keep - self._mel_begin :], keep, until


#: The values of the model's authors: the strength of classifier-free guidance, and of sway sampling, which puts more
#: time points near 0.
_GUIDANCE: Final = 0.5
_SWAY: Final = -1.0
#: The batch sizes of graphs below the limit, which is the largest batch size.
_BATCHES: Final = (1, 2, 4, 8, 16)


class Token2WavNetwork:
    """The network of the vocoder, for batches of windows: DiT and BigVGAN, with modules of the package transformers.

    It differs from the method ``sample`` in transformers in two ways: the noise is a function of the position, not of
    the length of the input; and the speaker encoder runs once, not in each of the 36 evaluations of the DiT.

    ``weights`` are the tensors of the module ``token2wav``, ``config`` is ``token2wav_config`` of the checkpoint. The
    differential equation is solved in ``ode_steps`` - 1 steps. Raises ConfigurationError for weights that do not fit.
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
            # Not strict: released checkpoints may also contain constants that the model computes itself.
            loaded = model.load_state_dict({name: tensor.float() for name, tensor in weights.items()}, strict=False)
        except (RuntimeError, ValueError, TypeError) as error:
            raise ConfigurationError([f"token2wav: {error}"]) from error
        if loaded.missing_keys:
            raise ConfigurationError([f"token2wav: the checkpoint has no tensor {loaded.missing_keys[0]}"])
        self.device = device
        self._dit, self._vocoder = model.eval().code2wav_dit_model, model.code2wav_bigvgan_model
        dit = settings.dit_config
        self.bins: int = dit.mel_dim
        #: The size of the codebook, the mel frames of a code, and the codes of a block.
        self.codes: int = self._dit.text_embed.codec_embed.num_embeddings
        self.mel_per_code: int = dit.repeats
        self.codes_per_block: int = dit.block_size // dit.repeats
        self.samples_per_mel = prod(settings.bigvgan_config.upsample_rates)
        self._weight_bytes: int = sum(tensor.nbytes for tensor in model.state_dict().values())
        #: The time points of the solver.
        self.times: Sequence[float] = _times(ode_steps).tolist()
        self._batches: list[int] = []
        self._graphs = StepGraphs(lambda batch, frames: self._evaluate(*self._inputs(batch, frames)), str(device))
        #: The length for which ``_shape`` has computed its tensors; shorter windows use parts of them.
        self._longest = 0
        self.voices: Sequence[str] = tuple(speakers)
        #: For each voice the output of the speaker encoder and the embedding, (2, values) each. Row 1 is for the half
        #: of the batch without conditions (classifier-free guidance).
        with torch.inference_mode():
            self._voices = {name: self._voice(name, speaker) for name, speaker in speakers.items()}

    @property
    def memory_bytes(self) -> int:
        """The bytes of the weights; on a GPU, all memory that PyTorch has reserved, with the graphs."""
        if self.device.type == "cuda":
            return int(torch.cuda.memory_reserved(self.device))
        return self._weight_bytes

    def warm_up(self, frames: Sequence[int], *, batch: int) -> None:
        """Run batches of up to ``batch`` windows of each length in ``frames`` (mel frames); on a GPU, capture them."""
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
        """Return the initial noise (frames, bins) of the mel frames ``begin`` to ``end`` of an answer."""
        positions = torch.arange(begin * self.bins, end * self.bins, device=self.device)
        return normal_at(positions, seed).view(-1, self.bins)

    def conditions(self, voice: str, codes: Tensor) -> Tensor:
        """Return the DiT's input for a voice and codes (n,), equal in all evaluations: (2, mel frames, values)."""
        with torch.inference_mode():
            dit, voice_rows = self._dit, self._voices[voice]
            said = dit.text_embed(torch.stack([codes, torch.zeros_like(codes)]))
            heard, embedding = (rows[:, None].expand(-1, said.shape[1], -1) for rows in voice_rows)
            projection = dit.input_embed.proj
            constant = torch.cat([heard, said, embedding], -1)
            return functional.linear(constant, projection.weight[:, self.bins :], projection.bias)

    def derivative(self, times: Sequence[float], mels: Sequence[Tensor], conditions: Sequence[Tensor]) -> Tensor:
        """Return the derivatives (batch, frames, bins) of windows of the same length.

        Each window has its time, its mel frames (frames, bins) and its ``conditions``.
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
            # A copy, because the next run overwrites the graph's output.
            return self._graphs.run(size, frames)[:batch].clone()

    def sound(self, mels: Tensor) -> Tensor:
        """Return the samples of mel frames (batch, frames, bins): (batch, frames * samples_per_mel)."""
        with torch.inference_mode():
            samples: Tensor = self._vocoder(mels.transpose(1, 2))
            # It drops the dimension of a batch of one.
            return samples.view(len(mels), -1)

    def _voice(self, name: str, speaker: OmniSpeaker) -> tuple[Tensor, Tensor]:
        encoder, expected = self._dit.input_embed.spk_encoder, self._dit.config.enc_emb_dim
        mel, embedding = speaker.reference_mel.to(self.device), speaker.condition.to(self.device)
        if embedding.shape[1] != expected or mel.shape[2] != self.bins:
            raise ConfigurationError([f"speaker {name}: {expected} values and {self.bins} mel bins are needed"])
        heard = torch.cat([encoder(mel), encoder(torch.zeros_like(mel))])
        return heard, torch.cat([embedding, torch.zeros_like(embedding)])

    def _inputs(self, batch: int, frames: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the parts of the graphs' input buffers for this shape: times, mel frames and conditions."""
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
        """Return the rotary embedding of ``frames`` mel frames, and the distances between frames in blocks.

        The distances have the shape (1, 1, frames, frames).
        """
        if self._longest < frames:
            positions = torch.arange(frames, device=self.device)
            blocks = positions // self._dit.block_size
            self._rotary = self._dit.rotary_embed(torch.empty(0, device=self.device), positions[None])
            self._distances = (blocks[None] - blocks[:, None])[None, None]
            self._longest = frames
        rotary = tuple(each[:, :frames] for each in self._rotary)
        return rotary, self._distances[..., :frames, :frames]


def _times(steps: int) -> Tensor:
    times = torch.linspace(0, 1, steps)
    return times + _SWAY * (torch.cos(pi / 2 * times) - 1 + times)


_THIRD = 1 / 3


class RungeKutta:
    """A solver of a differential equation, by the 3/8 rule of fourth order; the caller computes the derivatives.

    Until ``done``, the caller evaluates the derivative at ``time`` and ``point``, and passes it to ``take``. ``times``
    are the borders of the steps, ``begin`` is the value at the first of them. ``value`` is the solution after the
    latest complete step.
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
        """Take ``slope``, the derivative at ``time`` and ``point``, and set the next ``time`` and ``point``."""
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
