"""Calls over WebRTC that only a TURN server can carry: coturn, between two networks without a route.

``make test-outside`` installs it; elsewhere, and without root, these tests are skipped.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, TypeVar

import httpx
import numpy as np
import pytest
from aiortc import RTCIceServer
from support.commands import running
from support.live_server import LiveServer, live_server
from support.outside import program, tool
from support.patience import PATIENCE_SEC
from support.speech_clips import at_24k, clip_bytes, silence
from support.webrtc_client import WebrtcCaller, post_offer

from benchmarks.soak_network import enter_network
from omni_ws.engine.base import AudioOutput, TextOutput
from omni_ws.engine.fake import ScriptedEngine

#: Networks for documentation (RFC 5737): the server and the relay share one, the relay and the caller the other.
SERVER, RELAY_BY_SERVER = "198.51.100.1", "198.51.100.2"
RELAY_BY_CALLER, CALLER = "203.0.113.1", "203.0.113.2"
PORT: Final = 3478
USER, PASSWORD = "omni", "a secret of two"
_RELAY, _BEYOND = "omni_relay", "omni_caller"
_CABLE: Final = "omni_turn"

Result = TypeVar("Result")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def _join(left: str | None, left_address: str, right: str, right_address: str, device: str) -> None:
    """A cable between two namespaces. ``left`` None is the machine's own."""
    inside = ("-n", left) if left else ()
    _ip(*inside, "link", "add", device, "type", "veth", "peer", "name", device, "netns", right)
    for where, address in ((inside, left_address), (("-n", right), right_address)):
        _ip(*where, "address", "add", f"{address}/30", "dev", device)
        _ip(*where, "link", "set", device, "up")


@contextlib.contextmanager
def _networks() -> Iterator[None]:
    def delete() -> None:
        # The cable by itself, because a namespace goes some time after its name.
        for what in (("link", "delete", _CABLE), ("netns", "delete", _RELAY), ("netns", "delete", _BEYOND)):
            with contextlib.suppress(OSError, subprocess.CalledProcessError):
                _ip(*what)

    delete()  # of a run that was killed
    try:
        try:
            _ip("netns", "add", _RELAY)
            _join(None, SERVER, _RELAY, RELAY_BY_SERVER, _CABLE)
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("network namespaces need root, the program ip (Debian: iproute2) and veth devices")
        _ip("netns", "add", _BEYOND)
        _join(_RELAY, RELAY_BY_CALLER, _BEYOND, CALLER, "omni_caller")
        # Candidates name all addresses of the machine, and coturn ends an allocation over one without a route.
        _ip("-n", _RELAY, "route", "add", "default", "via", SERVER)
        _ip("netns", "exec", _RELAY, "sh", "-c", "echo 0 > /proc/sys/net/ipv4/ip_forward")
        yield
    finally:
        delete()


@contextlib.asynccontextmanager
async def turn_relay(folder: Path, *, address: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """coturn in both networks, which relays at ``address``. Skips where that cannot be had."""
    coturn = program("coturn")
    with _networks():
        async with running(
            *("ip", "netns", "exec", _RELAY, coturn, "-n", "--no-cli", "--no-tls", "--no-dtls"),
            *("--listening-ip", RELAY_BY_SERVER, "--listening-ip", RELAY_BY_CALLER, "--listening-port", str(PORT)),
            *("--relay-ip", address, "--lt-cred-mech", "--realm", "example.org", "--user", f"{USER}:{PASSWORD}"),
            *("--pidfile", str(folder / "pid"), "--userdb", str(folder / "users"), "--log-file", "stdout"),
            at_once=False,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        ) as process:
            await _listening(process)
            yield process


async def _listening(process: asyncio.subprocess.Process) -> None:
    """Returns when it takes connections; its log comes too late to say so."""
    async with asyncio.timeout(PATIENCE_SEC):
        while True:
            assert process.returncode is None, f"coturn ended with {process.returncode}"
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection(RELAY_BY_SERVER, PORT)
                writer.close()
                return


async def from_beyond(work: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
    """What ``work`` returns, which runs where the caller is, on an event loop of its own."""

    def enter() -> None:
        # A thread has its own namespace, and so have the sockets and threads that it makes.
        namespace = os.open(f"/run/netns/{_BEYOND}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            enter_network(namespace)
        finally:
            os.close(namespace)

    with ThreadPoolExecutor(1, initializer=enter) as thread:
        return await asyncio.get_running_loop().run_in_executor(thread, lambda: asyncio.run(work()))


TONE = (0.25 * np.sin(2 * np.pi * 440 * np.arange(24_000) / 24_000)).astype(np.float32)
LOUD = 1000

pytestmark = [pytest.mark.slow, pytest.mark.real_time]


#: The server's side of it.
WEBRTC = {"ice_servers": (f"turn:{RELAY_BY_SERVER}:{PORT}",), "ice_username": USER, "ice_credential": PASSWORD}


@pytest.fixture(autouse=True)
def _outside() -> None:
    tool("OUTSIDE_PYTHON")


def engine() -> ScriptedEngine:
    return ScriptedEngine((TextOutput("Go on. "), AudioOutput(TONE, 24_000)))


async def call_from_beyond(
    server: LiveServer, talk: Callable[[WebrtcCaller], Awaitable[None]], *ice_servers: RTCIceServer
) -> str:
    """The answer to the offer of a caller beyond the relay, which then does ``talk``.

    Offer and answer are carried over by hand: there is no way for HTTP either.
    """
    here = asyncio.get_running_loop()

    async def call() -> str:
        with socket.socket(type=socket.SOCK_DGRAM) as direct, pytest.raises(OSError, match="unreachable"):
            direct.connect((SERVER, PORT))
        caller = WebrtcCaller(*ice_servers)
        try:
            crossing = asyncio.run_coroutine_threadsafe(post_offer(server, await caller.offer()), here)
            answer = await asyncio.wrap_future(crossing)
            await caller.accept(answer)
            await caller.until("session.created")
            await talk(caller)
        finally:
            await caller.close()
        return answer.text

    return await from_beyond(call)


async def spoken_turn(caller: WebrtcCaller) -> None:
    caller.microphone.say(at_24k(clip_bytes("cards_001") + silence(1.0)))
    await caller.until("input_audio_buffer.speech_stopped")
    await caller.until("output_audio_buffer.stopped")
    loud = np.abs(np.concatenate(caller.heard).astype(np.int32)) > LOUD
    assert loud.sum() / 48 > 700  # ms


@pytest.mark.parametrize("transport", ["udp", "tcp"])
async def test_a_caller_brings_its_turn_server(transport: str, tmp_path: Path) -> None:
    url = f"turn:{RELAY_BY_CALLER}:{PORT}?transport={transport}"
    turn = RTCIceServer(urls=url, username=USER, credential=PASSWORD)
    async with turn_relay(tmp_path, address=RELAY_BY_SERVER), live_server(engine()) as server:
        answer = await call_from_beyond(server, spoken_turn, turn)
        assert " typ relay" not in answer
        await server.check_empty()


async def test_the_server_has_a_turn_server(tmp_path: Path) -> None:
    async with turn_relay(tmp_path, address=RELAY_BY_CALLER), live_server(engine(), webrtc=WEBRTC) as server:
        answer = await call_from_beyond(server, spoken_turn)
        assert re.search(rf" {RELAY_BY_CALLER} \d+ typ relay ", answer)
        await server.check_empty()


async def test_a_turn_server_that_ends_holds_no_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library asks it for a minute to release the address of a call that was hung up."""
    monkeypatch.setattr("omni_ws.transport.webrtc.call.CLOSE_TIMEOUT_SEC", 0.1)
    async with turn_relay(tmp_path, address=RELAY_BY_CALLER) as coturn, live_server(engine(), webrtc=WEBRTC) as server:
        here = asyncio.get_running_loop()

        async def end_both(path: str) -> None:
            coturn.kill()
            await coturn.wait()
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=PATIENCE_SEC) as http:
                assert (await http.post(f"{path}/hangup")).status_code == 200
            assert server.sessions == 0

        async def talk(caller: WebrtcCaller) -> None:
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(end_both(caller.location), here))

        await call_from_beyond(server, talk)
