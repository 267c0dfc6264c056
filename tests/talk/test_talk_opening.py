"""An open microphone listens when it hears, and says what it cannot."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from omni_ws.client import Reconnecting
from omni_ws.talk.conversation import SILENT_PIECES, AnswerListener, recorded
from omni_ws.talk.display import JsonDisplay

SILENT = "nothing comes out of the microphone; is it switched off?"
ZEROS, SOUND = bytes(640), bytes(639) + b"\1"


class Recording:
    """A microphone that gives these pieces; before each of ``drops`` one was dropped."""

    def __init__(self, *pieces: bytes, drops: tuple[int, ...] = ()) -> None:
        self.dropped_pieces = 0
        self._pieces = pieces
        self._drops = drops

    async def pieces(self) -> AsyncIterator[bytes]:
        for number, piece in enumerate(self._pieces):
            self.dropped_pieces += number in self._drops
            yield piece


class Told(JsonDisplay):
    """Keeps what it is told, in its order."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def show(self, kind: str, **fields: Any) -> None:
        self.told.append(fields["message"])

    def state(self, state: str, *, idle: bool = False) -> None:
        self.told.append((state, idle))


async def told(*pieces: bytes, drops: tuple[int, ...] = ()) -> list[Any]:
    display = Told()
    microphone: Any = Recording(*pieces, drops=drops)
    async for piece in recorded(microphone, display, "listening", idle=True):
        display.told.append(len(piece))
    return display.told


async def test_it_listens_when_the_first_samples_with_a_level_have_come() -> None:
    assert await told(ZEROS, SOUND, ZEROS) == [("opening the microphone", True), 640, ("listening", True), 640, 640]


@pytest.mark.parametrize(("silent", "notes"), [(SILENT_PIECES - 1, 0), (SILENT_PIECES, 1), (SILENT_PIECES * 3, 1)])
async def test_a_microphone_without_a_level_is_told_once(silent: int, notes: int) -> None:
    found = await told(*[ZEROS] * silent, SOUND)
    assert [one for one in found if isinstance(one, str)] == [
        "nothing comes out of the microphone; is it switched off?"
    ] * notes
    assert found[-2] == ("listening", True)


async def test_speech_that_could_not_be_sent_is_told() -> None:
    found = await told(*[SOUND] * 4, drops=(1, 3))
    assert [one for one in found if isinstance(one, str)] == [
        "the network does not keep up: 0.0 s of speech were not sent"
    ] * 2


def test_a_wait_for_a_connection_is_told() -> None:
    display = Told()
    AnswerListener(display, None).take(Reconnecting(59.6, ConnectionError("the server is full")))
    assert display.told == ["no connection (the server is full); the next attempt is in 60 s"]
