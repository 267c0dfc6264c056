"""``python -m support.token2wav_errors`` measures what windows cost Qwen2.5's Token2Wav in exactness.

Random weights in the released depth (22 layers, with its looks ahead and back), narrow; 16 blocks of random codes, one
noise. Errors are root mean squares, in terms of that of the answer made in one window.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from support.tiny_omni import level
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniToken2WavConfig
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniToken2WavModel

from omni_ws.engine.omni.items import VocoderInput
from omni_ws.engine.omni.qwen25_token2wav import CONTEXT, MOST_WAITING, ODE_STEPS, Qwen25Token2Wav
from omni_ws.engine.omni.runge_kutta import RungeKutta
from omni_ws.engine.omni.speakers import OmniSpeaker
from omni_ws.engine.omni.token2wav_network import Token2WavNetwork
from omni_ws.engine.omni.token2wav_windows import STREAMING, MelWindow, WindowPlan

BLOCKS: Final = 16
SEED: Final = 5
ONE_SHOT: Final = WindowPlan(first=MOST_WAITING)
PLANS: Final = (
    WindowPlan(past=0, first=3, future=0),
    WindowPlan(past=2, first=3, future=0),
    WindowPlan(past=0, first=3, future=1),
    WindowPlan(past=2, first=3, future=1),
    STREAMING,
    WindowPlan(past=4, first=3, future=2),
    WindowPlan(past=8, first=3, future=4),
)


def network(gain: float, *, ode_steps: int = ODE_STEPS) -> Token2WavNetwork:
    """Weights as large as their inputs are many, those of the DiT ``gain`` times that."""
    torch.manual_seed(0)
    narrow = {
        "hidden_size": 128,
        "num_hidden_layers": 22,
        "num_attention_heads": 4,
        "head_dim": 32,
        "emb_dim": 64,
        "num_embeds": 128,
        "enc_emb_dim": 16,
        "enc_dim": 16,
        "enc_channels": [16, 16, 16, 16, 48],
        "enc_attention_channels": 8,
        "enc_se_channels": 8,
    }
    config = Qwen2_5OmniToken2WavConfig(dit_config=narrow, bigvgan_config={"upsample_initial_channel": 64})
    model = Qwen2_5OmniToken2WavModel(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 3:
                fan_in = weight.shape[0] * 2 if ".ups." in name else weight.shape[1] * weight.shape[2]
                residual = 0.25 if ".convs2." in name else 0.7
                weight.normal_(0, (residual if "bigvgan" in name else 1.0) * fan_in**-0.5)
            elif weight.ndim == 2:
                weight.normal_(0, (0.5 if "attn_norm" in name else gain) * weight.shape[1] ** -0.5)
    vocoder = model.code2wav_bigvgan_model
    level(vocoder.conv_post, lambda: vocoder(torch.randn(1, 80, 40)))
    speaker = OmniSpeaker(0, torch.randn(1, 16), torch.randn(1, 60, 80) - 4)
    return Token2WavNetwork(
        config.to_dict(), model.state_dict(), {"Ada": speaker}, ode_steps=ode_steps, device=torch.device("cpu")
    )


def windows(model: Token2WavNetwork, codes: torch.Tensor, plan: WindowPlan) -> list[tuple[MelWindow, torch.Tensor]]:
    """Each window with all mel frames that were solved for it."""
    made = []
    for index in range(plan.count(BLOCKS)):
        window = MelWindow.of(plan, index, block=model.codes_per_block, total=len(codes))
        mels = RungeKutta(model.noise(SEED, window.left * 2, window.right * 2), model.times)
        conditions = model.conditions("Ada", codes[window.left : window.right])
        while not mels.done:
            mels.take(model.derivative([mels.time], [mels.point], [conditions])[0])
        made.append((window, mels.value))
    return made


def final(made: list[tuple[MelWindow, torch.Tensor]]) -> torch.Tensor:
    return torch.cat([mels[(each.begin - each.left) * 2 : (each.end - each.left) * 2] for each, mels in made])


def sound(model: Token2WavNetwork, codes: torch.Tensor, plan: WindowPlan) -> torch.Tensor:
    """As it is served."""
    vocoder = Qwen25Token2Wav(model, plan=plan)
    vocoder.open(0, {"seed": SEED})
    vocoder.feed(0, VocoderInput(codes[:, None].numpy(), last=True))
    made = []
    while vocoder.busy:
        made += [result.item.samples for result in vocoder.step()]
    return torch.from_numpy(np.concatenate(made))


def sound_with_own_future(model: Token2WavNetwork, made: list[tuple[MelWindow, torch.Tensor]]) -> torch.Tensor:
    """As it would be if no window waited for the next, but each took the mel frames of its own future block."""
    mels, pieces = final(made), []
    for window, solved in made:
        begin, end = window.begin * 2, window.end * 2
        past = mels[max(0, begin - CONTEXT) : begin]
        read = torch.cat([past, solved[begin - window.left * 2 : end - window.left * 2 + CONTEXT]])
        pieces.append(model.sound(read[None])[0, len(past) * 240 : (len(past) + end - begin) * 240])
    return torch.cat(pieces)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).square().mean().sqrt() / expected.square().mean().sqrt())


def main() -> None:
    torch.set_num_threads(1)
    codes = torch.randint(0, 128, (BLOCKS * 12,), generator=torch.Generator().manual_seed(1))
    for gain in (1.0, 2.0):
        model = network(gain)
        whole = windows(model, codes, ONE_SHOT)[0][1]
        whole_sound = sound(model, codes, ONE_SHOT)
        print(f"weights x{gain:g}: mel frames {whole.square().mean().sqrt():.2f}, sound {whole_sound.abs().max():.2f}")
        for plan in PLANS:
            made = windows(model, codes, plan)
            served = sound(model, codes, plan)
            work = sum(window.right - window.left for window, _ in made) / len(codes)
            together = model.sound(final(made)[None])[0]
            print(
                f"  {plan.past}+{plan.first}, then {plan.chunk}+{plan.future}: mel {error(final(made), whole):.1e},"
                f" sound {error(served, whole_sound):.1e}, BigVGAN alone {error(served, together):.1e},"
                f" with its own future {error(sound_with_own_future(model, made), together):.1e},"
                f" work {work:.1f}, first sound after {(plan.first + plan.future) * 12} codes"
            )
        for steps in (4, 6):
            fewer = windows(network(gain, ode_steps=steps), codes, ONE_SHOT)[0][1]
            print(f"  {steps} time points: mel {error(fewer, whole):.1e}")


if __name__ == "__main__":
    main()
