"""Profiles of speech language models: how the Talker prompts a model and reads its tokens.

A profile is one of those below, recognised by the model's name or selected, or a TOML file:

    prefix = [128259, 128000]                        # token IDs before the text
    suffix = [128009, 128260, 128261, 128257]        # and after it
    text = "{voice}: {text}"                         # the template of the text
    stop = [128258]                                  # token IDs that end the speech
    first_token = 128266                             # the first codec token
    codebook_size = 4096
    slots = [0, 1, 2, 2, 1, 2, 2]                    # the codebook of each token of a frame
    codec = "hubertsiuzdak/snac_24khz"               # a name, or a folder next to this file
    [voices]                                         # name = replacement of {voice}; the first is the default
    tara = "tara"
    [sampling]                                       # defaults
    temperature = 0.6
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from omni_ws.engine.vllm.codec_frames import FrameLayout
from omni_ws.errors import EngineFailed, InvalidValue


@dataclass(frozen=True, slots=True, kw_only=True)
class TalkerProfile:
    """The prompt format, token layout, voices and default sampling of a family of models."""

    name: str
    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    text: str
    stop: tuple[int, ...]
    layout: FrameLayout
    codec: str
    voices: Mapping[str, str] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    #: A clause is cut off after ``spare_frames`` plus this many frames for each of its characters, in case the model
    #: does not stop. Slow speech takes about one frame per character.
    frames_per_character: float = 3.0
    spare_frames: int = 36

    def __post_init__(self) -> None:
        if not self.stop:
            raise ValueError("stop must have at least one token id")
        if any(self.layout.first_token <= token < self.layout.end_token for token in self.stop):
            raise ValueError("stop must not contain a codec token")
        self.text.format(voice="", text="")

    def spoken_text(self, clause: str, voice: str | None) -> str:
        """Return the text of the prompt, with the voice inserted. Raises InvalidValue for an unknown voice."""
        if voice is None:
            return self.text.format(voice=next(iter(self.voices.values()), ""), text=clause)
        if voice not in self.voices:
            raise InvalidValue(f"unknown voice {voice!r}; available: {', '.join(self.voices) or 'none'}", param="voice")
        return self.text.format(voice=self.voices[voice], text=clause)

    def prompt(self, text_tokens: list[int]) -> list[int]:
        """Return the token IDs of the prompt. Control and codec tokens that the text spells are dropped."""
        control = {*self.prefix, *self.suffix, *self.stop}
        plain = [
            token
            for token in text_tokens
            if token not in control and not self.layout.first_token <= token < self.layout.end_token
        ]
        return [*self.prefix, *plain, *self.suffix]

    def most_frames(self, clause: str) -> int:
        """Return the limit on the frames of a clause."""
        return self.spare_frames + round(self.frames_per_character * len(clause))


# Both are based on Llama 3, in which 128000 begins a text and 128009 ends a message; IDs from 128256 are their own.
_LLAMA: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "prefix": (128259, 128000),
        "suffix": (128009, 128260, 128261, 128257),
        "stop": (128258,),
        "layout": FrameLayout(first_token=128266),
        "codec": "hubertsiuzdak/snac_24khz",
    }
)

ORPHEUS: Final = TalkerProfile(
    name="orpheus",
    text="{voice}: {text}",
    voices={name: name for name in ("tara", "leah", "jess", "leo", "dan", "mia", "zac", "zoe")},
    sampling={"temperature": 0.6, "top_p": 0.8, "repetition_penalty": 1.3},
    **_LLAMA,
)

#: Its voices are descriptions; a profile in a file can define others.
MAYA1: Final = TalkerProfile(
    name="maya1",
    text='<description="{voice}"> {text}',
    voices={
        "woman": "Realistic female voice in the 30s with american accent. Normal pitch, warm timbre, natural pacing.",
        "man": "Realistic male voice in the 30s with american accent. Normal pitch, warm timbre, natural pacing.",
    },
    sampling={"temperature": 0.4, "top_p": 0.9, "repetition_penalty": 1.1},
    **_LLAMA,
)

_KNOWN: Final = {profile.name: profile for profile in (ORPHEUS, MAYA1)}


def find_profile(wanted: str | None, model: str) -> TalkerProfile:
    """Return the profile with the name or file ``wanted``, or the one that fits ``model`` by its name.

    Raises EngineFailed, with a message for the operator.
    """
    if wanted is None:
        for name, profile in _KNOWN.items():
            if name in Path(model).name.lower():
                return profile
        raise EngineFailed(
            f"no profile known for the Talker {model}; set one with --vllm.talker-profile: "
            f"{', '.join(_KNOWN)}, or a TOML file"
        )
    if wanted in _KNOWN:
        return _KNOWN[wanted]
    return read_profile(Path(wanted))


def read_profile(path: Path) -> TalkerProfile:
    """Raises EngineFailed."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise EngineFailed(f"Talker profile {path} not found; built-in: {', '.join(_KNOWN)}") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise EngineFailed(f"cannot read the Talker profile {path}: {error}") from error
    try:
        return _profile(path, values)
    except (TypeError, ValueError, KeyError, IndexError) as error:
        raise EngineFailed(f"invalid Talker profile {path}: {error!r}") from error


def _profile(path: Path, values: dict[str, Any]) -> TalkerProfile:
    of_layout: dict[str, Any] = {key: values.pop(key) for key in ("first_token", "codebook_size") if key in values}
    if "slots" in values:
        of_layout["slots"] = _numbers(values.pop("slots"))
    known = {entry.name for entry in fields(TalkerProfile)} - {"name", "layout"}
    if unknown := values.keys() - known:
        raise ValueError(f"unknown keys: {', '.join(sorted(unknown))}")
    for key in ("prefix", "suffix", "stop"):
        values[key] = _numbers(values.get(key, []))
    if not isinstance(values["text"], str) or "{text}" not in values["text"]:
        raise ValueError("text must contain {text}")
    folder = path.parent / str(values["codec"])
    if folder.is_dir():
        values["codec"] = str(folder)
    return TalkerProfile(name=path.stem, layout=FrameLayout(**of_layout), **values)


def _numbers(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or any(type(value) is not int or value < 0 for value in values):
        raise ValueError(f"expected a list of non-negative integers, got {values!r}")
    return tuple(values)
