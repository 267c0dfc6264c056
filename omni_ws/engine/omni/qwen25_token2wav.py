"""Qwen25Token2Wav: the vocoder of Qwen2.5-Omni as a StepModel.

An answer is made in the windows of a WindowPlan, from noise that depends on its seed and on the place in the answer
alone, so its sound is the same whenever the codes come. The mel frames of a window that is solved become sound 20
frames late, as the samples of a frame depend on so many after it. Only the first window does not wait for the next: it
takes the frames of its own future block.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from omni_ws.engine.omni.items import VocoderInput, VocoderOutput
from omni_ws.engine.omni.runge_kutta import RungeKutta
from omni_ws.engine.omni.speakers import default_speaker
from omni_ws.engine.omni.step_model import NoSlot, RefusedInput, StepResult
from omni_ws.engine.omni.token2wav_network import Token2WavNetwork
from omni_ws.engine.omni.token2wav_windows import STREAMING, MelWindow, WindowPlan

#: Mel frames on either side that the samples of a frame depend on.
CONTEXT: Final = 20
#: The limit on codes of a session that wait to be decoded: 82 s of sound.
MOST_WAITING: Final = 4096
#: The authors' number of time points.
ODE_STEPS: Final = 10


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
