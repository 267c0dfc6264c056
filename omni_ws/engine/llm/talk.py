"""Talk: the conversation so far, as answers by rules need it."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Final

from omni_ws.core.history import Message

#: Of how many messages of each side the texts are looked at, and how many characters of each.
RECENT: Final = 64
_LOOKED_AT: Final = 2048


class Talk:
    """What both sides said, the newest last."""

    def __init__(self, history: Sequence[Message]) -> None:
        self._history = history
        answers, heard = _said(history, "assistant"), _said(history, "user")
        #: The last answer, whole; empty before the first. The same of what was heard.
        self.last_answer = answers[-1].strip() if answers else ""
        self.last_heard = heard[-1].strip() if heard else ""
        self.answers = tuple(answer[:_LOOKED_AT] for answer in answers)
        self.heard = tuple(words[:_LOOKED_AT] for words in heard)

    def going_on(self, said: Sequence[str]) -> Talk:
        """The same, a few sentences later in the message that is being answered."""
        talk = copy(self)
        talk.heard = (*self.heard, *(sentence[:_LOOKED_AT] for sentence in said))
        return talk

    @property
    def position(self) -> int:
        """The number of messages before this one."""
        return len(self._history)

    def all_heard(self) -> list[str]:
        """What was heard in the whole conversation, without empty texts: the oldest first."""
        texts = (message.text.strip()[:_LOOKED_AT] for message in self._history if message.role == "user")
        return [text for text in texts if text]

    def has_said(self, sentence: str) -> bool:
        """Whether any answer contained ``sentence``."""
        return any(message.role == "assistant" and sentence in message.text for message in self._history)

    def fresh(self, wordings: Sequence[str]) -> str:
        """Return the first of ``wordings`` that was not said yet; where all were, the one said longest ago."""
        return min(wordings, key=self._last_said)

    def _last_said(self, wording: str) -> int:
        """The place of the newest answer with ``wording``; -1 for none."""
        return max((place for place, answer in enumerate(self.answers) if wording in answer), default=-1)


def _said(history: Sequence[Message], role: str) -> list[str]:
    """The newest texts of one side, whole, in their order."""
    texts: list[str] = []
    for message in reversed(history):
        if len(texts) == RECENT:
            break
        if message.role == role and message.text and not message.text.isspace():
            texts.append(message.text)
    return texts[::-1]
