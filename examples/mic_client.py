"""How to write a voice client: an open microphone, a loudspeaker, and an answer that can be interrupted.

.venv/bin/pip install -e '.[talk]'                    # sounddevice; on Debian also: apt install libportaudio2
.venv/bin/python examples/mic_client.py               # speak; Ctrl-C ends it
.venv/bin/python examples/mic_client.py --file question.wav --save answer.wav

`omni-ws talk` (docs/talk.md) is the whole client: it takes the echo out, shows levels, and chooses devices. With this
one, wear a headset.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from typing import Any

from omni_ws.client import (
    DEFAULT_URL,
    AudioChunk,
    ClientSession,
    ConnectionFailed,
    ConnectionLost,
    ErrorEvent,
    Final,
    SpeechStarted,
    TextChunk,
    TranscriptChunk,
    connect,
)
from omni_ws.client.audio import AnswerBuffer, Pcm16, UnreadableAudio, paced, pieces, read_wav, write_wav
from omni_ws.errors import OmniError

MICROPHONE_RATE, LOUDSPEAKER_RATE, PIECE_MS = 16_000, 24_000, 20


class Loudspeaker:
    """Plays what arrives. The buffer knows which answer plays and how much of it was heard."""

    def __init__(self, sounddevice: Any) -> None:
        self.buffer = AnswerBuffer(LOUDSPEAKER_RATE)
        self.stream = sounddevice.RawOutputStream(
            samplerate=LOUDSPEAKER_RATE, channels=1, dtype="int16", callback=self.wanted
        )
        self.stream.start()

    def wanted(self, data: Any, frames: int, time: Any, status: Any) -> None:
        """The sound device asks for samples, in a thread of its own."""
        data[:] = self.buffer.read(len(data))


async def talk(options: argparse.Namespace) -> None:
    """Open microphone: the server finds the turns, and speech interrupts an answer."""
    import sounddevice

    config = {
        "input_audio": {"format": "pcm16", "sample_rate": MICROPHONE_RATE},
        "output_audio": {"format": "pcm16", "sample_rate": LOUDSPEAKER_RATE},
        "turn_detection": {"type": "server_vad", "interrupt_response": True, "interrupt_resume": True},
    }
    loop, heard = asyncio.get_running_loop(), asyncio.Queue[bytes]()

    def recorded(data: Any, frames: int, time: Any, status: Any) -> None:
        """The sound device has recorded a piece, in a thread of its own."""
        loop.call_soon_threadsafe(heard.put_nowait, bytes(data))

    loudspeaker = Loudspeaker(sounddevice)
    microphone = sounddevice.RawInputStream(
        samplerate=MICROPHONE_RATE,
        blocksize=MICROPHONE_RATE * PIECE_MS // 1000,
        channels=1,
        dtype="int16",
        callback=recorded,
    )
    # With reconnect, the conversation goes on when the network comes back.
    async with connect(options.url, api_key=options.api_key, config=config, reconnect=True) as session:

        async def send() -> None:
            while True:
                await session.send_audio(await heard.get())

        async def report() -> None:
            """The server paces an answer by what was played, and knows what was heard of it if it is interrupted."""
            while True:
                await asyncio.sleep(0.2)
                if (played := loudspeaker.buffer.heard) is not None:
                    await session.acknowledge_output(request_id=played[0], played_ms=played[1])

        with microphone:
            print("speak", flush=True)
            async with asyncio.TaskGroup() as group:
                group.create_task(send())
                group.create_task(report())
                group.create_task(receive(session, loudspeaker))


async def receive(session: ClientSession, loudspeaker: Loudspeaker) -> None:
    async for event in session.events():
        match event:
            case SpeechStarted():
                if (played := loudspeaker.buffer.heard) is not None:
                    await session.acknowledge_output(request_id=played[0], played_ms=played[1])
                loudspeaker.buffer.clear()
            case TranscriptChunk(text=text, interim=False):
                print(f"\nyou: {text}", flush=True)
            case TextChunk(text=text):
                print(text, end="", flush=True)
            case AudioChunk():
                loudspeaker.buffer.play(event)
            case Final():
                loudspeaker.buffer.end()
                print(flush=True)
            case ErrorEvent(error=error):
                print(f"\n{error.code}: {error.message}", file=sys.stderr)
    raise ConnectionLost("the server has closed the session")


async def ask(options: argparse.Namespace) -> None:
    """A WAV file as if it was being spoken: sent in real time, with the answer in one piece."""
    audio = read_wav(options.file)
    if not audio.samples:
        raise UnreadableAudio("there is no sound in it")
    config = {
        "input_audio": {"format": "pcm16", "sample_rate": audio.sample_rate, "channels": audio.channels},
        "output_audio": {"format": "pcm16"},
    }
    async with connect(options.url, api_key=options.api_key, config=config) as session:
        async for piece in paced(pieces(audio, piece_ms=PIECE_MS), interval=PIECE_MS / 1000):
            await session.send_audio(piece)
        await session.finish()
        answer = await session.answer()
    print(f"you: {answer.transcript}\n{answer.text}")
    if options.save and answer.sample_rate is not None:
        write_wav(options.save, Pcm16(answer.audio, answer.sample_rate))


def main() -> int:
    parser = argparse.ArgumentParser(description="Talk with a server; the whole client is `omni-ws talk`.")
    parser.add_argument("--file", metavar="X.wav", help="ask with a WAV file instead of the microphone")
    parser.add_argument("--save", metavar="ANSWER.wav", help="write the spoken answer to --file")
    parser.add_argument("--url", default=DEFAULT_URL, help=f"[{DEFAULT_URL}]")
    options = parser.parse_args()
    options.api_key = os.environ.get("OMNI_WS_API_KEY")
    problem: BaseException
    try:
        asyncio.run(ask(options) if options.file else talk(options))
    except KeyboardInterrupt:
        return 130
    except BaseExceptionGroup as failures:
        problem = failures.exceptions[0]
    except (OmniError, ConnectionFailed, ConnectionLost, UnreadableAudio, OSError, ImportError) as error:
        problem = error
    else:
        return 0
    print(f"mic_client: {problem}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
