"""Excerpts: contiguous parts of a prompt as tokens, with the media that belong to them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omni_ws.core.chunks import Modality


@dataclass(frozen=True, slots=True)
class Media:
    """A media item, with ``data`` in the form that vLLM expects for ``modality``."""

    modality: Modality
    data: Any


@dataclass(frozen=True, slots=True)
class Excerpt:
    """A contiguous part of a prompt: its tokens, and the media whose placeholders are among them, in order."""

    tokens: list[int]
    media: tuple[Media, ...] = ()

    def for_vllm(self, cache_salt: str | None) -> dict[str, Any]:
        """Return the excerpt as a prompt of vLLM."""
        # A copy, because vLLM appends to the list.
        prompt: dict[str, Any] = {"prompt_token_ids": list(self.tokens)}
        if self.media:
            data: dict[str, list[Any]] = {}
            for item in self.media:
                data.setdefault(item.modality.value, []).append(item.data)
            prompt["multi_modal_data"] = data
        if cache_salt is not None:
            prompt["cache_salt"] = cache_salt
        return prompt

    def after(self, given: Given) -> Excerpt | None:
        """Return what follows ``given``; None if this excerpt does not start with it."""
        count = len(given.tokens)
        if count >= len(self.tokens) or self.tokens[:count] != given.tokens:
            return None
        return Excerpt(self.tokens[count:], self.media[len(given.media) :])


@dataclass(frozen=True, slots=True)
class StableExcerpt(Excerpt):
    """An excerpt that further input cannot change.

    ``end`` is its end, in characters of the template's head and the input.
    """

    end: int = 0


@dataclass(slots=True)
class Given:
    """The part of a draft, from its beginning, that a model has received. Owned by the code that submits it."""

    #: Its length, in characters of the template's head and the input.
    chars: int = 0
    tokens: list[int] = field(default_factory=list)
    media: list[Media] = field(default_factory=list)

    def add(self, excerpt: StableExcerpt) -> None:
        self.chars = excerpt.end
        self.tokens += excerpt.tokens
        self.media += excerpt.media

    @property
    def whole(self) -> Excerpt:
        """All of it, as one prompt."""
        return Excerpt(self.tokens, tuple(self.media))
