"""PressedKeys: the keys that a caller presses, until they are complete."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

#: The keys of a telephone (RFC 4733, 3.2).
KEYS: Final = frozenset("0123456789*#ABCD")
#: The key that completes an entry.
END: Final = "#"
#: So long after the last key an entry is complete, too.
PAUSE_SEC: Final = 2.0
#: The longest entry: a credit card has 19 digits.
MAX_KEYS: Final = 32


class PressedKeys:
    """Collects keys, and calls ``entered`` with them: after ``#``, which is none of them, a pause, or MAX_KEYS.

    ``began`` is called at the first key of an entry.
    """

    def __init__(self, began: Callable[[], None], entered: Callable[[str], None]) -> None:
        self._began = began
        self._entered = entered
        self._loop = asyncio.get_running_loop()
        self._keys = ""
        self._pause: asyncio.TimerHandle | None = None

    def press(self, key: str) -> None:
        """A key was pressed. What is none is ignored."""
        if key not in KEYS:
            return
        if not self._keys and key != END:
            self._began()
        self._disarm()
        if key != END:
            self._keys += key
        if key == END or len(self._keys) == MAX_KEYS:
            self._complete()
        else:
            self._pause = self._loop.call_later(PAUSE_SEC, self._complete)

    def close(self) -> None:
        """The call is over: forget what was not complete."""
        self._disarm()
        self._keys = ""

    def _disarm(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None

    def _complete(self) -> None:
        self._disarm()
        keys, self._keys = self._keys, ""
        if keys:
            self._entered(keys)
