"""Microphones that fail while `omni-ws mcp` listens."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from support.live_server import live_server
from support.scripted_engines import HearingEngine

from omni_ws.mcp_server.command import (
    ProgramVoice,
    VoiceOptions,
)
from omni_ws.talk.sound_devices import NoSoundDevice

pytestmark = pytest.mark.virtual_clock


class PortAudioError(Exception):
    pass


class DeadStream:
    """A stream of a device that gives nothing."""

    def __init__(self, **_: Any) -> None: ...

    def start(self) -> None: ...

    stop = close = start


class BusyStream(DeadStream):
    """A stream of a device that another program has taken."""

    def start(self) -> None:
        raise PortAudioError("Device unavailable")


def library_of(stream: type) -> SimpleNamespace:
    return SimpleNamespace(
        PortAudioError=PortAudioError,
        query_devices=lambda *_: {"default_samplerate": 16_000.0},
        check_input_settings=lambda **_: None,
        RawInputStream=stream,
    )


@pytest.mark.parametrize(
    ("stream", "words", "log"),
    [
        (DeadStream, "the microphone gave nothing for 10 s", ["open", "closed"]),
        (BusyStream, "the microphone cannot be started: Device unavailable", []),
    ],
)
async def test_a_microphone_that_fails_is_told(
    stream: type, words: str, log: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "sounddevice", library_of(stream))
    async with live_server(HearingEngine()) as server:
        options = VoiceOptions(environ={}, microphone=True, url=server.websocket_url)
        async with ProgramVoice(options) as voice:
            with pytest.raises(NoSoundDevice, match=words):
                await voice.listen(1)
        await server.check_empty()
    assert capsys.readouterr().err.splitlines() == [f"omni-ws mcp: the microphone is {state}" for state in log]


async def test_a_call_that_its_client_cancels_tells_that_the_microphone_is_closed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    anyio = pytest.importorskip("anyio", reason="what MCP's SDK is built on")
    monkeypatch.setitem(sys.modules, "sounddevice", library_of(DeadStream))
    async with live_server(HearingEngine()) as server:
        options = VoiceOptions(environ={}, microphone=True, url=server.websocket_url)
        async with ProgramVoice(options) as voice:
            with anyio.move_on_after(1):  # as MCP's SDK cancels: each await raises, those of the clean-up, too
                await voice.listen(30)
        await server.check_empty()
    assert capsys.readouterr().err.splitlines() == [
        f"omni-ws mcp: the microphone is {state}" for state in ("open", "closed")
    ]
