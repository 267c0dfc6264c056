"""A network that is away for seconds in the middle of a question, or of its answer: nothing is lost or comes twice."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from support.chromium import IN_BROWSER, DemoPage, Played, demo_page
from support.embedded_engine import EmbeddedEngine
from support.live_server import live_server
from support.patience import until
from support.speech_clips import WORDS, clip_bytes
from support.tcp_relay import TcpRelay, tcp_relay

from omni_ws.config.model import VoiceChoice
from omni_ws.core.chunks import InputChunk
from omni_ws.engine.base import AudioOutput, GenerationRequest, OutputWriter, TextOutput
from omni_ws.engine.fake import ScriptedEngine
from omni_ws.scenarios.speech import word_errors

pytestmark = IN_BROWSER

#: After a break the page tries again within 0.25, 0.5, 1, 2 and 4 s, each up to a quarter more or less.
TRIES = 3
KEEPS = {"resume_grace_sec": 30}
RATE = 48_000
#: Ten samples of each level, so that every place in the answer sounds different.
STAIRS = (np.repeat(np.arange(2000, 30_800), 10) / 32768).astype(np.float32)
PIECES = [AudioOutput(piece, RATE) for piece in np.split(STAIRS, 60)]
#: The page fades over 4 ms wherever sound breaks off and begins again.
FADE = RATE * 4 // 1000


#: What the microphone gives the page.
CAPTURED = """window.captured = [];
window.AudioWorkletNode = class extends AudioWorkletNode {
  constructor(context, name, options) {
    super(context, name, options);
    if (name === "capture") this.port.addEventListener("message", ({ data }) => captured.push(data.samples.slice()));
  }
};"""
READ_CAPTURED = """async () => {
  const bytes = new Uint8Array(await new Blob(captured).arrayBuffer());
  let text = "";
  for (let start = 0; start < bytes.length; start += 32768) {
    text += String.fromCharCode(...bytes.subarray(start, start + 32768));
  }
  return btoa(text);
}"""


async def lose(relay: TcpRelay, demo: DemoPage) -> None:
    """The network breaks, and is away until the page has tried in vain to come back so often."""
    relay.refusing = True
    tried = relay.accepted + TRIES
    relay.cut()
    await until(lambda: relay.accepted >= tried)
    relay.refusing = False


def breaks(played: Played) -> list[int]:
    """Where sound begins behind a silence, counted without the silences."""
    sounding = np.flatnonzero(np.abs(played.samples) > 1e-6)
    return [int(place) + 1 for place in np.flatnonzero(np.diff(sounding) > FADE)]


def check_whole(played: Played) -> None:
    """Every sample in its place; only silence is between."""
    heard: NDArray[np.float32] = played.samples[np.abs(played.samples) > 1e-6]
    places = breaks(played)
    # The last sample of each fade is silence itself.
    assert len(STAIRS) - len(heard) == len(places)
    expected = np.delete(STAIRS, np.array(places, int) + np.arange(len(places)))
    clear = np.ones(len(STAIRS) - len(places), bool)
    for place in (0, *places):
        clear[max(0, place - FADE) : place + FADE] = False
    assert np.abs(heard - expected)[clear].max() < 1.5 / 32768


async def test_an_answer_is_played_whole() -> None:
    """Also what was made of it while nobody was there."""
    come_back = asyncio.Event()
    engine = ScriptedEngine([TextOutput("up the stairs"), *PIECES[:20], come_back.wait, *PIECES[20:]])
    async with (
        live_server(engine, streaming_input=KEEPS) as server,
        tcp_relay(server.port) as relay,
        demo_page(expect_problems=True, sample_rate=RATE) as demo,
    ):
        await demo.open(f"http://127.0.0.1:{relay.port}/")
        await demo.write("climb")
        await demo.until_played(0.5)
        losing = asyncio.create_task(lose(relay, demo))
        await demo.until_played(1.9)
        come_back.set()
        await losing
        await demo.message("Connected again. Nothing was lost.")
        await demo.answered("up the stairs")
        await demo.in_state("ready")
        played = await demo.played()
        assert len(engine.requests) == 1
    check_whole(played)


class Recorder(EmbeddedEngine):
    """Keeps the speech that it gets."""

    speech = b""

    async def generate(self, request: GenerationRequest, out: OutputWriter) -> None:
        async def kept() -> AsyncIterator[InputChunk]:
            async for chunk in request.input:
                self.speech += chunk.payload
                yield chunk

        await super().generate(replace(request, input=kept()), out)


async def test_a_question_is_heard_whole() -> None:
    engine = Recorder(voice=VoiceChoice.ESPEAK)
    async with (
        live_server(engine, streaming_input=KEEPS) as server,
        tcp_relay(server.port) as relay,
        demo_page(settings={"mode": "open"}, expect_problems=True, sample_rate=RATE) as demo,
    ):
        await demo.page.add_init_script(CAPTURED)
        await demo.open(f"http://127.0.0.1:{relay.port}/")
        await demo.page.locator("#talk").click()
        await demo.say(clip_bytes("goforward"))
        await demo.in_state("hearing")
        await lose(relay, demo)
        await demo.message("Connected again. Nothing was lost.")
        await demo.answered()
        heard = await demo.page.locator(".you .words").all_inner_texts()
        captured = base64.b64decode(await demo.page.evaluate(READ_CAPTURED))
    assert len(heard) == 1
    assert word_errors(WORDS["goforward"], heard[0]).wrong <= 1
    assert len(engine.speech) > 2 * 2 * RATE
    assert engine.speech in captured
