"""Sessions that send far more audio than they have time for, and one beside them that speaks. Counts, no clock."""

from __future__ import annotations

import asyncio
import contextlib
import io
from collections.abc import Callable
from functools import cache

import av
import numpy as np
import pytest
from support.live_server import live_server
from support.native_client import NativeClient, native_client
from support.speech_clips import clip_bytes, silence

from omni_ws.audio.codec import encode_file
from omni_ws.core.chunks import AudioEncoding, AudioFormat

RATE = 16_000
#: Sessions that send too much.
CROWD = 6
MINUTES = 5


@cache
def flac() -> bytes:
    """Silence, of which a second is 13 bytes."""
    silent = np.zeros(60 * RATE * MINUTES, np.float32)
    return encode_file(silent, source_rate=RATE, target=AudioFormat(AudioEncoding.FLAC, RATE))


def packed(container: str, codec: str, seconds: int, **options: str) -> bytes:
    """Silence, and where the format has that, almost no bytes for it."""
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream = output.add_stream(codec, rate=RATE, options=options)
        assert isinstance(stream, av.AudioStream)
        stream.codec_context.layout = "mono"
        kind = stream.codec_context.codec.audio_formats
        assert kind is not None
        for start in range(0, seconds * RATE, RATE):
            frame = av.AudioFrame.from_ndarray(np.zeros((1, RATE), np.int16), format="s16", layout="mono")
            frame.sample_rate, frame.pts = RATE, start
            resampled = av.AudioResampler(format=kind[0].name, layout="mono", rate=RATE).resample(frame)
            for each in resampled:
                output.mux(stream.encode(each))
        output.mux(stream.encode(None))
    return file.getvalue()


@cache
def mp3() -> bytes:
    return packed("mp3", "libmp3lame", 60, b="8000") * MINUTES


@cache
def webm() -> bytes:
    """Opus that sends nothing in silence (DTX), with its track of video left out."""
    return packed("webm", "libopus", 60, dtx="1", application="voip", b="6000")


ATTACKS: dict[str, tuple[Callable[[], bytes], str]] = {
    "flac": (flac, "flac"),
    "flac under another name": (flac, "wav"),
    "mp3": (mp3, "mp3"),
    "webm with opus": (webm, "webm"),
}


async def listen(client: NativeClient, form: str = "pcm16") -> None:
    audio = {"format": form, "sample_rate": RATE}
    await client.configure(turn_detection={"type": "server_vad"}, input_audio=audio, modalities=["text"])


@pytest.mark.slow
@pytest.mark.parametrize("attack", ATTACKS)
async def test_speech_is_heard_before_the_backlog_of_others(attack: str) -> None:
    """Each of the others is asked something behind its audio, and is answered once that was heard."""
    made, form = ATTACKS[attack]
    data = made()
    async with live_server() as server, contextlib.AsyncExitStack() as stack:
        innocent = await stack.enter_async_context(native_client(server))
        await listen(innocent)
        crowd = [await stack.enter_async_context(native_client(server)) for _ in range(CROWD)]
        for client in crowd:
            await listen(client, form)
        for client in crowd:
            await client.binary(data)
            await client.chunk("Hello?", end=True)
        answers = [asyncio.create_task(client.until("response_started")) for client in crowd]
        await innocent.binary(silence(0.7) + clip_bytes("goforward")[: 2 * RATE])
        await innocent.until("speech_started")
        answered = [task for task in answers if task.done()]
        for task in answers:
            task.cancel()
        await asyncio.gather(*answers, return_exceptions=True)
        assert not answered
        assert not any(client.seen("error") for client in crowd)
