"""What the server says unasked in a silence: that a tool still works, and whether the user is still there."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable
from functools import lru_cache
from importlib.resources import files
from typing import Final

import msgspec

from omni_ws.core.chunks import StartTrigger
from omni_ws.errors import SessionTimeout
from omni_ws.service.conversation.request import Remark
from omni_ws.wire.session_config import SessionConfig

#: The silence before the first filler of a tool call, and before each further one, in seconds.
FIRST_FILLER_SEC: Final = 1.5
NEXT_FILLER_SEC: Final = 8.0
#: Fillers for the same calls, about a minute of them: a client may never send a result.
MOST_FILLERS: Final = 7


class _Phrases(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The sentences of one language, see remarks.toml."""

    filler: list[str]
    again: list[str]
    idle: str
    murmur: list[str]


@lru_cache(maxsize=1)
def phrases() -> dict[str, _Phrases]:
    """Return the sentences of remarks.toml, by the primary subtags of their languages."""
    text = files(__package__).joinpath("remarks.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text), dict[str, _Phrases])


class Remarks:
    """Decides when the server of a session speaks unasked, and what it says. There is no clock in here.

    ``quiet`` and ``disturb`` tell since when nobody has spoken. While a tool works, the first filler is said
    FIRST_FILLER_SEC after the call, unless the model said something itself; further ones NEXT_FILLER_SEC after the last
    word of anybody. With ``idle_prompt`` the user is asked once in a silence, and the session may end after it.

    ``is_done`` returns whether no result of a call is awaited any more.
    """

    __slots__ = ("_asked", "_fillers", "_is_done", "_said", "_since", "_turn", "_working")

    def __init__(self, is_done: Callable[[str], bool]) -> None:
        self._is_done = is_done
        #: Since when nobody has spoken; None while anybody does, or an answer is due.
        self._since: float | None = None
        #: Calls whose results are awaited, by id.
        self._working: dict[str, None] = {}
        #: The fillers for these calls so far, and whether the user heard or said anything since the calls.
        self._fillers = 0
        self._said = False
        #: The fillers of the session so far: they take turns.
        self._turn = 0
        #: Whether the user was asked in this silence.
        self._asked = False

    def quiet(self, since: float) -> None:
        """Note that nobody speaks from ``since`` on, and no answer is due."""
        self._since = since

    def disturb(self, *, by_user: bool) -> None:
        """Note that somebody speaks, or that an answer is due; ``by_user``: because of something that the user said."""
        self._since = None
        if by_user:
            self._asked, self._said = False, True

    def call(self, call_ids: Iterable[str], *, spoken: bool) -> None:
        """Note that an answer has ended with these calls; ``spoken``: it had words, too."""
        self._working.update(dict.fromkeys(call_ids))
        self._fillers, self._said = 0, spoken

    def stop_fillers(self) -> None:
        """Say no more fillers for the calls so far."""
        self._working.clear()

    def _next(self, config: SessionConfig) -> tuple[float, StartTrigger] | None:
        """Return when something is to be said next, and what; None for nothing."""
        for done in [one for one in self._working if self._is_done(one)]:
            del self._working[done]
        since, idle = self._since, config.idle_prompt
        if since is None:
            return None
        if self._working and self._fillers < MOST_FILLERS:
            return since + (NEXT_FILLER_SEC if self._said else FIRST_FILLER_SEC), StartTrigger.FILLER
        if idle is None or not idle.after_sec:
            return None
        wait = idle.closes_after_sec if self._asked else idle.after_sec
        return None if wait is None else (since + wait, StartTrigger.IDLE)

    def get_timer(self, config: SessionConfig) -> float | None:
        """Return when ``due`` may have something to say, or raise; None if nothing depends on time."""
        following = self._next(config)
        return None if following is None else following[0]

    def due(self, config: SessionConfig, *, language: str | None, filler: str | None, now: float) -> Remark | None:
        """Return what is to be said now, once; None for nothing.

        ``language`` is that of the talk; None if no voice speaks it. ``filler`` is the operator's own sentence, which
        comes first. Raises SessionTimeout if nobody has answered the idle prompt.
        """
        following = self._next(config)
        if following is None or now < following[0]:
            return None
        self._since = now  # in a language without sentences nothing is said, and the silence goes on
        known = phrases().get(language or "")
        if following[1] is StartTrigger.FILLER:
            return self._filler(known, language, filler)
        if self._asked:
            raise SessionTimeout("nobody answered whether the user is still there")
        assert config.idle_prompt is not None
        if text := config.idle_prompt.text.strip():
            remark = Remark(text, StartTrigger.IDLE, field="idle_prompt.text")
        elif known is not None:
            remark = Remark(known.idle, StartTrigger.IDLE, language)
        else:
            return None
        self._asked = True
        return remark

    def _filler(self, known: _Phrases | None, language: str | None, own: str | None) -> Remark | None:
        first, self._fillers, self._said = not self._fillers, self._fillers + 1, True
        if own and (first or known is None):
            return Remark(own, StartTrigger.FILLER)
        if known is None:
            return None
        choice = known.filler if first else known.again
        self._turn += 1
        return Remark(choice[self._turn % len(choice) - 1], StartTrigger.FILLER, language)
