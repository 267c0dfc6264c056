"""The caller of the benchmark ``network``: speaks a recording in real time, and listens for the answer.

Runs in the network namespace: ``python -m benchmarks.network_caller WAY SERVER:PORT RECORDING TURNS``. A line of JSON
for each turn: how long after the last word the first sound of the answer arrived, in seconds, or null. A line
``speaking`` precedes it.
"""

from __future__ import annotations

import asyncio
import base64
import json
import sys
import wave
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import websockets
from numpy.typing import NDArray

from omni_ws.audio.pcm import (
    SampleLayout,
    decode_mu_law,
    encode_mu_law,
    pcm16_from_samples,
    resampled,
    samples_from_bytes,
)
from omni_ws.caller.script import beside

#: A sound of the answer, and of the recording: pcm16.
LOUD: Final = 1000
PIECE_SEC: Final = 0.02
#: Before the first word, and behind the last: the end of a turn is found in it.
LEAD_SEC, TAIL_SEC = 0.4, 2.0
PATIENCE_SEC: Final = 20.0
_SILENCE_BETWEEN_SEC: Final = 1.0

Pcm = NDArray[np.int16]


class Ear:
    """When the first sound of an answer arrived."""

    def __init__(self) -> None:
        self.heard_at: float | None = None
        self._earliest = 0.0
        self._heard = asyncio.Event()
        self._now = asyncio.get_running_loop().time

    def expect(self, earliest: float) -> None:
        """Wait for the next answer. What is heard before the question has ended is none to it."""
        self.heard_at, self._earliest = None, earliest
        self._heard.clear()

    def hear(self, samples: Pcm) -> None:
        due = self.heard_at is None and self._now() >= self._earliest
        if due and len(samples) and np.abs(samples.astype(np.int32)).max() > LOUD:
            self.heard_at = self._now()
            self._heard.set()

    async def wait(self) -> float | None:
        try:
            async with asyncio.timeout(PATIENCE_SEC):
                await self._heard.wait()
        except TimeoutError:
            return None
        return self.heard_at


class Mouth:
    """The pieces of 20 ms that are to be sent, each when it is due: what is said, and silence in between."""

    def __init__(self, rate: int) -> None:
        self.rate = rate
        self._now = asyncio.get_running_loop().time
        self._begin = self._now()
        self._given = 0
        self._pieces: list[Pcm] = []

    def say(self, samples: Pcm) -> float:
        """Returns when its first piece is due."""
        size = round(self.rate * PIECE_SEC)
        self._pieces = [samples[start : start + size] for start in range(0, len(samples) - size + 1, size)]
        return max(self._now(), self._begin + self._given * PIECE_SEC)

    async def next(self) -> Pcm:
        if not self._given:  # connecting took its time
            self._begin = self._now()
        await asyncio.sleep(max(0.0, self._begin + self._given * PIECE_SEC - self._now()))
        self._given += 1
        return self._pieces.pop(0) if self._pieces else np.zeros(round(self.rate * PIECE_SEC), np.int16)


@asynccontextmanager
async def by_websocket(server: str, ear: Ear) -> AsyncIterator[Mouth]:
    async with websockets.connect(f"ws://{server}/v1/realtime?model=any", max_size=None, compression=None) as socket:
        mouth = Mouth(24_000)

        def render(piece: Pcm) -> str:
            payload = base64.b64encode(piece.tobytes()).decode()
            return json.dumps({"type": "input_audio_buffer.append", "audio": payload})

        def take(message: dict[str, Any]) -> None:
            if message["type"] == "response.output_audio.delta":
                ear.hear(np.frombuffer(base64.b64decode(message["delta"]), "<i2"))

        async with _talking(socket, mouth, render, take):
            yield mouth


@asynccontextmanager
async def by_telephone(server: str, ear: Ear) -> AsyncIterator[Mouth]:
    async with websockets.connect(f"ws://{server}/v1/telephony/media-stream", compression=None) as socket:
        media = {"encoding": "audio/x-mulaw", "sampleRate": 8000, "channels": 1}
        start = {"streamSid": "MZ1", "callSid": "CA1", "tracks": ["inbound"], "mediaFormat": media}
        await socket.send(json.dumps({"event": "start", "streamSid": "MZ1", "start": start}))
        mouth = Mouth(8000)

        def render(piece: Pcm) -> str:
            payload = base64.b64encode(encode_mu_law(piece)).decode()
            return json.dumps({"event": "media", "streamSid": "MZ1", "media": {"track": "inbound", "payload": payload}})

        def take(message: dict[str, Any]) -> str | None:
            if message["event"] == "media":
                samples = decode_mu_law(base64.b64decode(message["media"]["payload"]))
                ear.hear(pcm16_from_samples(samples))
            if message["event"] == "mark":  # as if it were played at once
                return json.dumps({"event": "mark", "streamSid": "MZ1", "mark": message["mark"]})
            return None

        async with _talking(socket, mouth, render, take):
            yield mouth


@asynccontextmanager
async def _talking(
    socket: websockets.ClientConnection,
    mouth: Mouth,
    render: Callable[[Pcm], str],
    take: Callable[[dict[str, Any]], str | None] | Callable[[dict[str, Any]], None],
) -> AsyncIterator[None]:
    async def speak() -> None:
        while True:
            await socket.send(render(await mouth.next()))

    async def listen() -> None:
        async for data in socket:
            if (reply := take(json.loads(data))) is not None:
                await socket.send(reply)

    async with beside(speak(), listen()):
        yield


@asynccontextmanager
async def by_webrtc(server: str, ear: Ear) -> AsyncIterator[Mouth]:
    from aiortc import RTCConfiguration, RTCPeerConnection, RTCSessionDescription
    from aiortc.mediastreams import MediaStreamTrack
    from av import AudioFrame

    from omni_ws.metrics import Metrics
    from omni_ws.transport.webrtc.call import CallMicrophone

    mouth = Mouth(48_000)  # of other rates aiortc keeps a packet back

    class Track(MediaStreamTrack):
        kind = "audio"
        sent = 0

        async def recv(self) -> AudioFrame:
            piece = await mouth.next()
            frame = AudioFrame.from_ndarray(piece[None, :], format="s16", layout="mono")
            frame.sample_rate, frame.pts, frame.time_base = mouth.rate, self.sent, Fraction(1, mouth.rate)
            self.sent += len(piece)
            return frame

    peer = RTCPeerConnection(RTCConfiguration(iceServers=[]))
    channel = peer.createDataChannel("oai-events")
    created = asyncio.Event()
    channel.on("message", lambda message: created.set())
    peer.addTrack(Track())
    # What arrives is heard without the delay of a player, as it is on the other ways.
    receiver = CallMicrophone(lambda audio: ear.hear(np.frombuffer(audio, "<i2")), Metrics())
    receiver.connect(peer.getTransceivers()[0].receiver)
    await peer.setLocalDescription(await peer.createOffer())
    async with httpx.AsyncClient(timeout=PATIENCE_SEC) as client:
        headers = {"Content-Type": "application/sdp"}
        offer = peer.localDescription.sdp
        answer = await client.post(f"http://{server}/v1/realtime/calls", content=offer, headers=headers)
    await peer.setRemoteDescription(RTCSessionDescription(sdp=answer.text, type="answer"))
    try:
        async with asyncio.timeout(PATIENCE_SEC):
            await created.wait()
        yield mouth
    finally:
        receiver.close()
        await peer.close()


WAYS: Final = {"websocket": by_websocket, "webrtc": by_webrtc, "telephone": by_telephone}


def recording(file: Path, rate: int) -> tuple[Pcm, float]:
    """What is said, with silence around it, and how long after its beginning the last word ends."""
    with wave.open(str(file), "rb") as sound:
        samples = samples_from_bytes(sound.readframes(sound.getnframes()), SampleLayout.S16)
        speech = pcm16_from_samples(resampled(samples, sound.getframerate(), rate))
    ends = LEAD_SEC + (np.flatnonzero(np.abs(speech.astype(np.int32)) > LOUD)[-1] + 1) / rate
    around = [np.zeros(round(rate * LEAD_SEC), np.int16), speech, np.zeros(round(rate * TAIL_SEC), np.int16)]
    return np.concatenate(around), float(ends)


async def call(way: str, server: str, file: Path, turns: int) -> None:
    ear = Ear()
    async with AsyncExitStack() as stack:
        mouth = await stack.enter_async_context(WAYS[way](server, ear))
        said, ends = recording(file, mouth.rate)
        for _ in range(turns):
            begin = mouth.say(said)
            ear.expect(begin + ends)
            print("speaking", flush=True)
            heard = await ear.wait()
            print(json.dumps(None if heard is None else heard - begin - ends), flush=True)
            await asyncio.sleep(_SILENCE_BETWEEN_SEC)


if __name__ == "__main__":
    asyncio.run(call(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])))
