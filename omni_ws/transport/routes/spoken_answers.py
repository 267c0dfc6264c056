"""SpokenAnswers: what was said in answers with audio, so that clients can refer to them by ``audio.id``."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from omni_ws.service.sessions.shared_counts import SPOKEN_ANSWERS, WorkerGroup

#: How long an answer is known, in seconds.
KNOWN_SEC: Final = 3600
#: What is kept for each key, in answers and in characters; the oldest go first.
MAX_ANSWERS: Final = 1024
MAX_CHARACTERS: Final = 1 << 20


@dataclass(slots=True)
class _OfKey:
    """The answers of one key by their ids, with the times at which they are forgotten, oldest first."""

    answers: OrderedDict[str, tuple[float, str]] = field(default_factory=OrderedDict)
    characters: int = 0

    def drop(self, audio_id: str) -> None:
        _, text = self.answers.pop(audio_id, (0.0, ""))
        self.characters -= len(text)

    def drop_old(self, now: float) -> None:
        while self.answers:
            oldest, (until, _) = next(iter(self.answers.items()))
            if until > now and len(self.answers) <= MAX_ANSWERS and self.characters <= MAX_CHARACTERS:
                return
            self.drop(oldest)


class SpokenAnswers:
    """The transcripts of spoken answers by key and id.

    Each worker of a server keeps those of its own answers, and asks the others for an id that it does not know. ``now``
    returns a monotonic time in seconds.
    """

    def __init__(self, group: WorkerGroup | None, now: Callable[[], float]) -> None:
        self._group = group
        self._now = now
        self._by_key: dict[str | None, _OfKey] = {}
        if group is not None:
            group.on(SPOKEN_ANSWERS, self._tell)

    def keep(self, audio_id: str, text: str, *, key: str | None) -> None:
        """Know what was said in an answer to this key."""
        own = self._by_key.setdefault(key, _OfKey())
        own.drop(audio_id)
        own.answers[audio_id] = (self._now() + KNOWN_SEC, text)
        own.characters += len(text)
        own.drop_old(self._now())

    async def find(self, audio_ids: Iterable[str], *, key: str | None) -> dict[str, str]:
        """The texts of those that this server has given to this key within the last hour."""
        wanted = set(audio_ids)
        found = self._own(wanted, key)
        if (missing := wanted - found.keys()) and self._group is not None:
            for told in await self._group.ask_others(SPOKEN_ANSWERS, (key, tuple(missing))):
                found |= told
        return found

    async def _tell(self, asked: tuple[str | None, tuple[str, ...]]) -> dict[str, str]:
        key, audio_ids = asked
        return self._own(audio_ids, key)

    def _own(self, audio_ids: Iterable[str], key: str | None) -> dict[str, str]:
        own = self._by_key.get(key)
        if own is None:
            return {}
        own.drop_old(self._now())
        return {one: own.answers[one][1] for one in audio_ids if one in own.answers}
