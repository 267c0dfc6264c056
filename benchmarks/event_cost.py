"""CPU time of the server's own code per frame, from the unmasked message to the acknowledgement, without sockets.

Child process of ``benchmarks.events``. Prints the microseconds per frame of each batch; a batch is a session with its
own event loop. Also runs in older checkouts, unless events are recorded.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from websockets.protocol import State

from omni_ws.config.model import EngineName, ServerConfig
from omni_ws.engine.fake import EchoEngine
from omni_ws.service.observing.observer import Origin
from omni_ws.service.sessions.factory import SessionFactory
from omni_ws.service.sessions.session import Sessions
from omni_ws.transport.native.endpoint import AcknowledgementClock, WebSocketSession
from omni_ws.transport.native.keep_alive import NO_PINGS

FRAMES = 2000
#: Frames that arrive within the delay of an acknowledgement.
FRAMES_PER_ACK = 5


class Nowhere:
    """Connection that discards everything."""

    state = State.OPEN
    is_open = True
    paused = False
    is_reading = True
    held_to_pace = False

    def __init__(self) -> None:
        self.transport = self
        self.heard_at = asyncio.get_running_loop().time()

    def is_closing(self) -> bool:
        return False

    def write_message(self, data: bytes, *, is_text: bool) -> None:
        pass


def messages() -> list[bytes]:
    payload = base64.b64encode(bytes(640)).decode()
    return [
        json.dumps({"type": "input_chunk", "modality": "audio", "sequence_id": number, "payload": payload}).encode()
        for number in range(FRAMES)
    ]


async def batch(live: Sessions, frames: list[bytes]) -> float:
    session = live.open(None)
    session.conversation.configure({"start_policy": "on_end_only"})
    connection: Any = Nowhere()
    attachment: Any = WebSocketSession(
        connection,
        session,
        binary_audio=False,
        ack_clock=AcknowledgementClock(),
        rounds=NO_PINGS,
    )
    session.attach(attachment)
    acks = getattr(attachment, "acks", attachment)
    acknowledge = acks.acknowledge if hasattr(acks, "acknowledge") else acks._acknowledge
    began = time.process_time()
    for number, frame in enumerate(frames):
        attachment.receive_message(frame, is_text=True)
        if number % FRAMES_PER_ACK == 0:
            acknowledge()
    took = time.process_time() - began
    session.detach(attachment)
    session.end(None)
    await asyncio.sleep(0)
    await live.wait_closed()
    return took / len(frames) * 1e6


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batches", type=int, required=True)
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    engine = EchoEngine()
    await engine.start()
    factory = SessionFactory(engine, ServerConfig(engine=EngineName.FAKE))
    live = Sessions(factory, origin=Origin.WEBSOCKET, grace=0)
    frames = messages()
    with tempfile.TemporaryDirectory() as folder:
        if options.record:
            from omni_ws.service.observing.profiling import ProfileKind, ProfileRequest, Profiling

            profiling = Profiling(engine, factory.observers, Path(folder))
            await profiling.start(ProfileRequest(run_id="cost"))
        await batch(live, frames)
        print(json.dumps([await batch(live, frames) for _ in range(options.batches)]))
        if options.record:
            finished = await profiling.stop(ProfileKind.WHOLE)
            assert finished is not None
            assert finished.dropped_events == 0
    factory.speech_workers.close()
    await engine.stop()


if __name__ == "__main__":
    asyncio.run(main())
