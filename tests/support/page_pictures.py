"""Makes the pictures of the documents: conversations with the real page, server and engine. One of them moves: in it
the person interrupts an answer, and the log beside the words has the time that was measured.

`make picture` runs it. It needs Chromium and the weights of the embedded parts. The person has the voice of the server.
"""

from __future__ import annotations

import asyncio
import base64
import io
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
from PIL import Image
from support.chromium import demo_page, recording
from support.speech_clips import as_pcm16
from support.worker_server import server_process

from omni_ws.config.model import VoiceChoice
from omni_ws.engine.tts.voice_process import VoiceProcess

#: What is said, with the seconds of silence before it; the last interrupts.
SAID: Final = ((1.5, "What is three plus four?"), (6.5, "Count to twenty."), (4.5, "Tell me a joke."))
#: The microphone's file ends in so much silence, since browsers play it over and over.
REST_SEC: Final = 30.0
#: After the last answer.
LINGER_SEC: Final = 2.0
#: Before that, until what moves has come to its place.
REST_AT_END_SEC: Final = 1.0
#: Of the window, and of the picture.
WINDOW: Final = (1280, 800)
SIZE: Final = (960, 600)
FRAMES_PER_SEC: Final = 10
#: The page draws no oftener than that is filmed: without a graphics card its frames take the processor from the speech.
SLOWER_FRAMES: Final = f"""
const draw = window.requestAnimationFrame.bind(window);
window.requestAnimationFrame = (callback) => setTimeout(() => draw(callback), {1000 // FRAMES_PER_SEC - 20});
"""
#: What is asked in those that stand still, the word that sounds in them, and the window of each.
ASKED: Final = ("What is three plus four?", "Count to twenty.")
SOUNDING: Final = "8"
STILLS: Final = {"page-dark.png": (1440, 900), "page-phone.png": (360, 740)}
RATE: Final = 24_000
#: The window of the page of the recorded call; which answer and word sound.
CALL_WINDOW: Final = (1360, 850)
CALL_SOUNDING: Final = (1, 3)


async def spoken(voice: VoiceProcess, text: str) -> bytes:
    """16-bit mono samples of the text."""
    pieces = [piece async for piece in voice.say(text)]
    assert {piece.sample_rate for piece in pieces} == {RATE}
    return b"".join(as_pcm16(np.asarray(piece.samples, np.float32)) for piece in pieces)


async def microphone(folder: Path) -> Path:
    voice = VoiceProcess(VoiceChoice.HIBARI)
    await voice.start()
    pieces = [part for wait, text in SAID for part in (bytes(2 * round(wait * RATE)), await spoken(voice, text))]
    await voice.stop()
    return recording(folder / "microphone.wav", *pieces, bytes(2 * round(REST_SEC * RATE)), rate=RATE)


@asynccontextmanager
async def served(*flags: str) -> AsyncIterator[str]:
    """The address of ``omni-ws serve`` with the embedded engine."""
    with server_process("--engine", "embedded", *flags) as server:
        yield f"http://127.0.0.1:{server.port}"


class Film:
    """The frames of a tab, each with the time in seconds at which it appeared."""

    def __init__(self, devtools: Any) -> None:
        self._devtools = devtools
        self._frames: list[tuple[float, bytes]] = []
        self._acknowledging: set[asyncio.Task[Any]] = set()
        devtools.on("Page.screencastFrame", self._take)

    def _take(self, frame: dict[str, Any]) -> None:
        self._frames.append((frame["metadata"]["timestamp"], base64.b64decode(frame["data"])))
        reply = self._devtools.send("Page.screencastFrameAck", {"sessionId": frame["sessionId"]})
        task = asyncio.ensure_future(reply)
        self._acknowledging.add(task)
        task.add_done_callback(self._acknowledging.discard)

    async def begin(self) -> None:
        await self._devtools.send("Page.startScreencast", {"format": "jpeg", "quality": 95})

    async def end(self) -> None:
        await self._devtools.send("Page.stopScreencast")
        self._devtools.remove_listener("Page.screencastFrame", self._take)
        await asyncio.gather(*self._acknowledging, return_exceptions=True)

    def save(self, path: Path) -> None:
        """Writes an animated WebP with FRAMES_PER_SEC at most; what does not change is one long frame."""
        pictures: list[Image.Image] = []
        durations: list[int] = []
        begun, interval = self._frames[0][0], 1 / FRAMES_PER_SEC
        shown = -interval
        kept: list[tuple[float, bytes]] = []
        for time, data in self._frames:
            if time - begun - shown >= interval * 0.9:
                shown = time - begun
                kept.append((shown, data))
        ends = [time for time, _ in kept[1:]] + [kept[-1][0] + LINGER_SEC]
        for (time, data), end in zip(kept, ends, strict=True):
            pictures.append(Image.open(io.BytesIO(data)).convert("RGB").resize(SIZE, Image.Resampling.LANCZOS))
            durations.append(round((end - time) * 1000))
        pictures[0].save(
            path, save_all=True, append_images=pictures[1:], duration=durations, loop=0, quality=70, method=4
        )


async def filmed(path: Path) -> None:
    with TemporaryDirectory() as folder:
        sound = await microphone(Path(folder))
        viewport = {"width": WINDOW[0], "height": WINDOW[1]}
        async with (
            served() as address,
            demo_page(microphone=sound, tapped=False, viewport=viewport, reduced_motion="no-preference") as demo,
        ):
            await demo.page.add_init_script(SLOWER_FRAMES)
            await demo.open(address)
            film = Film(await demo.page.context.new_cdp_session(demo.page))
            await film.begin()
            await demo.page.locator("#talk").click()
            await demo.page.locator(".turn").nth(len(SAID) - 1).locator(".server[data-state=done]").wait_for()
            await demo.in_state("listening", "ready")
            await asyncio.sleep(REST_AT_END_SEC)
            await film.end()
        film.save(path)


async def photographed(path: Path, width: int, height: int) -> None:
    """The page in the dark, in the middle of its second answer."""
    viewport = {"width": width, "height": height}
    dark: Any = {"tapped": False, "viewport": viewport, "color_scheme": "dark", "reduced_motion": "no-preference"}
    async with served() as address, demo_page(settings={"log": False}, **dark) as demo:
        await demo.open(address)
        for question in ASKED[:-1]:
            await demo.write(question)
            await demo.in_state("speaking")
            await demo.in_state("ready")
        await demo.write(ASKED[-1])
        sounds = "(word) => [...(CSS.highlights.get('spoken') ?? [])].some((range) => String(range).startsWith(word))"
        await demo.until(sounds, SOUNDING)
        shot = Image.open(io.BytesIO(await demo.page.screenshot()))
        shot.convert("RGB").save(path, optimize=True)


async def call_photographed(path: Path) -> None:
    """The page of a recorded call with an interruption, while a word of it sounds."""
    viewport = {"width": CALL_WINDOW[0], "height": CALL_WINDOW[1]}
    with TemporaryDirectory() as folder:
        sound = await microphone(Path(folder))
        async with (
            served("--record", str(Path(folder, "calls"))) as address,
            demo_page(microphone=sound, tapped=False, viewport=viewport) as demo,
        ):
            await demo.open(address)
            await demo.page.locator("#talk").click()
            last = demo.page.locator(".turn").nth(len(SAID) - 1).locator(".server[data-state=done]")
            await last.wait_for()
            await demo.in_state("listening", "ready")
            link = await demo.page.locator("#recorded").evaluate("(link) => link.href")
            told = await demo.page.evaluate("(link) => fetch(`${link}/call.json`).then((call) => call.json())", link)
            turn, word = CALL_SOUNDING
            start_ms = told["turns"][turn]["answer"]["words"][word]["start_ms"]
            await demo.page.goto(f"{link}#t={start_ms / 1000}")
            await demo.until("() => CSS.highlights.get('spoken')?.size > 0")
            await asyncio.sleep(REST_AT_END_SEC)
            shot = Image.open(io.BytesIO(await demo.page.screenshot()))
            shot.convert("RGB").save(path, quality=88, method=6)


async def main(folder: Path) -> None:
    await call_photographed(folder / "call.webp")
    for name, (width, height) in STILLS.items():
        await photographed(folder / name, width, height)
    await filmed(folder / "conversation.webp")


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
