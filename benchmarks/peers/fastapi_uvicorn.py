"""The usual voice server: a FastAPI WebSocket route that validates each message and queues samples for a consumer."""

from __future__ import annotations

import asyncio
import base64
import json
import struct

import numpy as np
import uvicorn
from fastapi import FastAPI, WebSocket, WebSocketDisconnect
from numpy.typing import NDArray
from pydantic import BaseModel

from benchmarks.peers.acknowledgement import Acknowledgements, arguments

#: About two minutes of 20 ms chunks.
QUEUE_CHUNKS = 6000
HEADER = struct.Struct(">BBBBII")

app = FastAPI()
options = arguments()


class InputChunk(BaseModel):
    type: str
    sequence_id: int
    modality: str = "audio"
    payload: str
    timestamp_ms: int | None = None
    end_of_input: bool = False


@app.websocket("/v1/streaming_input")
async def streaming_input(websocket: WebSocket) -> None:
    await websocket.accept()
    samples: asyncio.Queue[NDArray[np.int16]] = asyncio.Queue(QUEUE_CHUNKS)
    consumer = asyncio.create_task(consume(websocket, samples))
    acknowledgements = Acknowledgements()
    expected = 0
    try:
        while True:
            message = await websocket.receive()
            if message["type"] == "websocket.disconnect":
                return
            if message.get("text") is not None:
                chunk = InputChunk.model_validate(json.loads(message["text"]))
                sequence_id, payload = chunk.sequence_id, base64.b64decode(chunk.payload)
            else:
                sequence_id = HEADER.unpack_from(message["bytes"])[4]
                payload = message["bytes"][HEADER.size :]
            if sequence_id != expected:
                await websocket.close(4422)
                return
            expected += 1
            await samples.put(np.frombuffer(payload, dtype="<i2"))
            acknowledgement = acknowledgements.accept(len(payload))
            if acknowledgement is not None and not options.echo:
                await websocket.send_text(acknowledgement)
    except WebSocketDisconnect:
        pass
    finally:
        consumer.cancel()


async def consume(websocket: WebSocket, samples: asyncio.Queue[NDArray[np.int16]]) -> None:
    """Accumulates audio for an engine; with ``--echo`` returns every piece instead."""
    held: list[NDArray[np.int16]] = []
    sent = 0
    while True:
        piece = await samples.get()
        if options.echo:
            payload = base64.b64encode(piece.tobytes()).decode()
            await websocket.send_json(
                {
                    "type": "output_chunk",
                    "request_id": "req_0",
                    "sequence_id": sent,
                    "modality": "audio",
                    "payload": payload,
                    "format": "pcm16",
                    "sample_rate": 16000,
                }
            )
            sent += 1
        else:
            held.append(piece)


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=options.port, log_level="warning", loop="uvloop")
