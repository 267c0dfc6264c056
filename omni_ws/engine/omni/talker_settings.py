"""TalkerSettings: what a session asks of a Talker, checked."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final

from omni_ws.engine.omni.step_model import RefusedInput


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


#: What a value must be, in words and as a test.
_RULES: Final[Mapping[str, tuple[str, Callable[[Any], bool]]]] = {
    "temperature": ("a number from 0 to 100", lambda value: _is_number(value) and 0 <= value <= 100),
    "top_p": ("a number above 0, at most 1", lambda value: _is_number(value) and 0 < value <= 1),
    "top_k": ("a whole number from 1, or 0 or -1 for all", lambda value: _is_whole(value) and value >= -1),
    "repetition_penalty": ("a number above 0, at most 100", lambda value: _is_number(value) and 0 < value <= 100),
    "seed": ("a whole number", _is_whole),
    "max_tokens": ("a whole number from 1", lambda value: _is_whole(value) and value >= 1),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TalkerSettings:
    """Voice and sampling of one session.

    ``temperature`` 0 takes the likeliest code; ``top_k`` 0 and -1 mean all. ``max_tokens`` limits the codec frames.
    ``seed`` None draws one. Defaults are those of the model's family.
    """

    voice: str
    temperature: float
    top_k: int
    top_p: float
    repetition_penalty: float = 1.05
    max_tokens: int = 4096
    seed: int | None = None

    def changed(self, settings: Mapping[str, Any], voices: Sequence[str]) -> TalkerSettings:
        """Return these with ``settings`` put over them; None there leaves a value as it is, but for ``seed``.

        A voice is known by its name in any case. Raises RefusedInput.
        """
        asked = {name: value for name, value in settings.items() if value is not None}
        if unknown := asked.keys() - {field.name for field in fields(self)}:
            raise RefusedInput(f"unknown setting of the Talker: {min(unknown)}")
        for name, reason in wrong_settings(asked).items():
            raise RefusedInput(f"talker.{name} {reason}")
        if "voice" in asked:
            asked["voice"] = _known_voice(asked["voice"], voices)
        if asked.get("seed", self.seed) is None:
            asked["seed"] = secrets.randbits(63)
        return replace(self, **asked)


def wrong_settings(asked: Mapping[str, Any]) -> dict[str, str]:
    """Return, by their names, why values are no sampling parameters of a Talker."""
    return {
        name: f"must be {rule}, got {asked[name]!r}"
        for name, (rule, holds) in _RULES.items()
        if asked.get(name) is not None and not holds(asked[name])
    }


def _known_voice(voice: Any, voices: Sequence[str]) -> str:
    known = {name.lower(): name for name in voices}
    if not isinstance(voice, str) or voice.lower() not in known:
        raise RefusedInput(f"unknown voice {voice!r}; the model has {', '.join(voices)}")
    return known[voice.lower()]
