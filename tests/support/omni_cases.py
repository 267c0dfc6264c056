"""What the omni models are asked in tests: text, sound, a picture, a film, and two of them after an earlier turn."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from support.tiny_omni import MEDIA_TOKENS, Family

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
