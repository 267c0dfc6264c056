"""MediaSizes: how many tokens media take in the prompts of one model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from omni_ws.core.chunks import Modality
from omni_ws.engine.vllm.excerpt import Media

#: What a second of audio takes before any was seen: Qwen2-Audio and Qwen2.5-Omni read one token for 40 ms.
_AUDIO_TOKENS_PER_SEC: Final = 25


class MediaSizes:
    """Estimates of the tokens that media take, from the averages of those that vLLM has processed.

    Placeholders grow when vLLM processes a prompt, so the length of a prompt with media is only known afterwards.
    Images and video count nothing before the first of their kind. Methods may be called from any thread.
    """

    def __init__(self) -> None:
        #: The tokens of all media seen, and their amounts: samples or pixels.
        self._seen: dict[Modality, tuple[int, int]] = {}

    def of(self, media: Media) -> int:
        """Return about how many tokens ``media`` takes."""
        if (seen := self._seen.get(media.modality)) is not None:
            return math.ceil(_amount(media) * seen[0] / seen[1])
        if media.modality is Modality.AUDIO:
            samples, sample_rate = media.data
            return math.ceil(len(samples) * _AUDIO_TOKENS_PER_SEC / float(sample_rate))
        return 0

    def learn(self, media: Iterable[Media], placeholders: Mapping[str, Sequence[Any]]) -> None:
        """Note the sizes in a processed prompt: vLLM's ``mm_placeholders``, which has a range for each item."""
        taken: dict[Modality, list[int]] = {
            Modality(name): [place.length for place in places] for name, places in placeholders.items()
        }
        for item in media:
            if lengths := taken.get(item.modality):
                tokens, amount = self._seen.get(item.modality, (0, 0))
                self._seen[item.modality] = tokens + lengths.pop(0), amount + _amount(item)


def _amount(media: Media) -> int:
    match media.modality:
        case Modality.IMAGE:
            width, height = media.data.size
            return max(1, int(width * height))
        case _:
            samples, _ = media.data
            return max(1, int(samples.size))
