"""A caller of ``/v1/realtime/calls``: aiortc as the other end, with a microphone of our own."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import AsyncIterator
from fractions import Fraction
from typing import Any

import httpx
import numpy as np
import orjson
from aiortc import RTCConfiguration, RTCIceServer, RTCPeerConnection, RTCSessionDescription
from aiortc.mediastreams import MediaStreamError, MediaStreamTrack
from av import AudioFrame
from numpy.typing import NDArray
from support.live_server import LiveServer
from support.patience import PATIENCE_SEC
from support.realtime_client import check

RATE = 24_000
#: Samples of a packet of 20 ms.
PACKET = RATE // 50


class Microphone(MediaStreamTrack):
    """Says what it is given, in real time, and silence in between."""

    kind = "audio"

    def __init__(self) -> None:
        super().__init__()
        self._pieces: deque[NDArray[np.int16]] = deque()
        self._begun: float | None = None
        self._sent = 0
        #: Set when everything was said.
        self.silent = asyncio.Event()

    def say(self, audio: bytes) -> None:
        """pcm16 of 24 kHz."""
        samples = np.frombuffer(audio, "<i2")
        self._pieces.extend(samples[start : start + PACKET] for start in range(0, len(samples), PACKET))
        self.silent.clear()

    async def recv(self) -> AudioFrame:
        if self.readyState != "live":
            raise MediaStreamError
        now = asyncio.get_running_loop().time()
        if self._begun is None:
            self._begun = now
        await asyncio.sleep(self._begun + self._sent / RATE - now)
        samples = np.zeros(PACKET, np.int16)
        if self._pieces:
            piece = self._pieces.popleft()
            samples[: len(piece)] = piece
        else:
            self.silent.set()
        frame = AudioFrame.from_ndarray(samples[None, :], format="s16", layout="mono")
        frame.sample_rate, frame.pts, frame.time_base = RATE, self._sent, Fraction(1, RATE)
        self._sent += PACKET
        return frame


class WebrtcCaller:
    """One call. ``received`` has all events, ``heard`` the samples of the answers at 48 kHz."""

    #: Holds each event to what its API says of it.
    check = staticmethod(check)

    def __init__(self, *ice_servers: RTCIceServer) -> None:
        self.peer = RTCPeerConnection(RTCConfiguration(iceServers=[*ice_servers]))
        self.channel = self.peer.createDataChannel("oai-events")
        self.microphone = Microphone()
        self.peer.addTrack(self.microphone)
        self.received: list[dict[str, Any]] = []
        self.heard: list[NDArray[np.int16]] = []
        self.location = ""
        self._fresh: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._ears: asyncio.Task[None] | None = None
        self.channel.on("message", self._on_message)
        self.channel.on("close", lambda: self._fresh.put_nowait(None))
        self.peer.on("track", self._on_track)

    async def offer(self) -> str:
        await self.peer.setLocalDescription(await self.peer.createOffer())
        return str(self.peer.localDescription.sdp)

    async def accept(self, answer: httpx.Response) -> None:
        assert answer.status_code == 201, answer.text
        self.location = answer.headers["location"]
        await self.peer.setRemoteDescription(RTCSessionDescription(sdp=answer.text, type="answer"))

    async def close(self) -> None:
        await self.peer.close()
        if self._ears is not None:  # which end with the call, but not where that has not begun
            self._ears.cancel()
            await asyncio.wait([self._ears])

    def _on_message(self, message: str) -> None:
        event = orjson.loads(message)
        self.check(event)
        self.received.append(event)
        self._fresh.put_nowait(event)

    def _on_track(self, track: MediaStreamTrack) -> None:
        self._ears = asyncio.create_task(self._listen(track))

    async def _listen(self, track: MediaStreamTrack) -> None:
        with contextlib.suppress(MediaStreamError):
            while True:
                frame = await track.recv()
                assert isinstance(frame, AudioFrame)
                channels = len(frame.layout.channels)
                self.heard.append(frame.to_ndarray()[0][::channels])

    # what clients do

    def send(self, kind: str, **fields: Any) -> None:
        self.channel.send(orjson.dumps({"type": kind, **fields}).decode())

    async def receive(self) -> dict[str, Any]:
        """The next event. Raises EOFError at the end of the channel."""
        async with asyncio.timeout(PATIENCE_SEC):
            event = await self._fresh.get()
        if event is None:
            raise EOFError(f"the channel closed after {self.received[-5:]}")
        return event

    async def until(self, kind: str) -> dict[str, Any]:
        while (event := await self.receive())["type"] != kind:
            pass
        return event

    async def ended(self) -> None:
        """Waits for the end of the channel."""
        with contextlib.suppress(EOFError):
            while True:
                await self.receive()

    async def update(self, **session: Any) -> dict[str, Any]:
        self.send("session.update", session={"type": "realtime", **session})
        updated: dict[str, Any] = (await self.until("session.updated"))["session"]
        return updated

    def seen(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.received if event["type"] == kind]


async def post_offer(server: LiveServer, offer: str, *, key: str = "", **options: Any) -> httpx.Response:
    """The answer to an offer."""
    headers = {"Content-Type": "application/sdp"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=PATIENCE_SEC) as client:
        return await client.post("/v1/realtime/calls", content=offer, headers=headers, **options)


@contextlib.asynccontextmanager
async def webrtc_call(server: LiveServer, *, key: str = "") -> AsyncIterator[WebrtcCaller]:
    """A call whose ``session.created`` has arrived; it is hung up when the block is left."""
    caller = WebrtcCaller()
    try:
        await caller.accept(await post_offer(server, await caller.offer(), key=key))
        await caller.until("session.created")
        yield caller
    finally:
        await caller.close()


def lossy(caller: WebrtcCaller, loss: float, dice: random.Random) -> None:
    """From now on this share of the caller's packets of speech is lost on the way."""
    transport = caller.peer.getSenders()[0].transport
    send = transport._send_rtp

    async def sometimes(packet: bytes) -> None:
        if dice.random() >= loss:
            await send(packet)

    setattr(transport, "_send_rtp", sometimes)  # noqa: B010  # it is a method
