"""Makes the pictures of the documents: conversations with the real page, server and engine. One of them moves: in it
the person interrupts an answer, and the log beside the words has the time that was measured.

`make picture` runs it. It needs Chromium and the weights of the embedded parts. The person has the voice of the server.
"""

from __future__ import annotations

import asyncio
import io
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
from PIL import Image
from support.chromium import DemoPage, demo_page, recording
from support.commands import server_process
from support.speech_clips import as_pcm16

from omni_ws.config.model import VoiceChoice
from omni_ws.engine.tts.voice_process import VoiceProcess

#: What is said, with the seconds of silence before it; the last interrupts.
SAID: Final = ((1.5, "What is three plus four?"), (6.5, "Count to twenty."), (4.5, "Tell me a joke."))
#: The microphone's file ends in so much silence, since browsers play it over and over.
REST_SEC: Final = 30.0
#: After the last answer, and before that until what moves has come to its place.
LINGER_MS: Final = 2000
REST_AT_END_SEC: Final = 1.0
#: Of the window, and of the picture.
WINDOW: Final = (1280, 800)
SIZE: Final = (960, 600)
FRAMES_PER_SEC: Final = 10
#: The page draws no oftener than that is filmed: without a graphics card its frames take the processor from the speech.
SLOWER_FRAMES: Final = f"""
const draw = window.requestAnimationFrame.bind(window);
window.requestAnimationFrame = (callback) => setTimeout(() => draw(callback), {1000 // FRAMES_PER_SEC - 20});
void draw;  // a function would be called
"""
#: What is asked in those that stand still, the word that sounds in them, and the window of each.
ASKED: Final = ("What is three plus four?", "Count to twenty.")
SOUNDING: Final = "8"
STILLS: Final = {"page-dark.png": (1440, 900), "page-phone.png": (360, 740)}
RATE: Final = 24_000
#: The window of the page of the recorded call; which answer and word sound.
CALL_WINDOW: Final = (1360, 850)
CALL_SOUNDING: Final = (1, 3)
MOVING: Final = {"reduced_motion": "no-preference"}


async def microphone(folder: Path) -> Path:
    voice = VoiceProcess(VoiceChoice.HIBARI)
    await voice.start()
    pieces: list[bytes] = []
    for wait, text in SAID:
        pieces.append(bytes(2 * round(wait * RATE)))
        async for piece in voice.say(text):
            assert piece.sample_rate == RATE
            pieces.append(as_pcm16(np.asarray(piece.samples, np.float32)))
    await voice.stop()
    return recording(folder / "microphone.wav", *pieces, bytes(2 * round(REST_SEC * RATE)), rate=RATE)


@asynccontextmanager
async def page(*flags: str, window: tuple[int, int], **options: Any) -> AsyncIterator[DemoPage]:
    """The page of ``omni-ws serve`` with the embedded engine."""
    viewport = dict(zip(("width", "height"), window, strict=True))
    with server_process("--engine", "embedded", *flags) as server:
        async with demo_page(tapped=False, viewport=viewport, **options) as demo:
            await demo.open(f"http://127.0.0.1:{server.port}")
            yield demo


async def talk(demo: DemoPage) -> None:
    """Opens the microphone, up to the end of the last answer."""
    await demo.page.locator("#talk").click()
    await demo.page.locator(".turn").nth(len(SAID) - 1).locator(".server[data-state=done]").wait_for()
    await demo.in_state("listening", "ready")


async def photograph(demo: DemoPage, path: Path, **options: Any) -> None:
    shot = Image.open(io.BytesIO(await demo.page.screenshot()))
    shot.convert("RGB").save(path, **options)


def save(frames: Sequence[tuple[float, bytes]], path: Path) -> None:
    """Writes an animated WebP with FRAMES_PER_SEC at most, of the frames and the milliseconds at which they appeared;
    what does not change is one long frame."""
    kept = [frames[0]]
    for frame in frames:
        if frame[0] - kept[-1][0] >= 0.9 * 1000 / FRAMES_PER_SEC:
            kept.append(frame)
    times = [time for time, _ in kept]
    lasts = [round(end - time) for time, end in zip(times, [*times[1:], times[-1] + LINGER_MS], strict=True)]
    first, *others = (
        Image.open(io.BytesIO(data)).convert("RGB").resize(SIZE, Image.Resampling.LANCZOS) for _, data in kept
    )
    first.save(path, save_all=True, append_images=others, duration=lasts, loop=0, quality=70, method=4)


async def filmed(path: Path) -> None:
    frames: list[tuple[float, bytes]] = []
    with TemporaryDirectory() as folder:
        async with page(window=WINDOW, microphone=await microphone(Path(folder)), **MOVING) as demo:
            await demo.page.evaluate(SLOWER_FRAMES)
            await demo.page.screencast.start(
                on_frame=lambda frame: frames.append((frame["timestamp"], frame["data"])),
                quality=95,
                size={"width": WINDOW[0], "height": WINDOW[1]},
            )
            await talk(demo)
            await asyncio.sleep(REST_AT_END_SEC)
            await demo.page.screencast.stop()
    save(frames, path)


async def photographed(path: Path, window: tuple[int, int]) -> None:
    """The page in the dark, in the middle of its second answer."""
    async with page(window=window, settings={"log": False}, color_scheme="dark", **MOVING) as demo:
        for question in ASKED[:-1]:
            await demo.write(question)
            await demo.in_state("speaking")
            await demo.in_state("ready")
        await demo.write(ASKED[-1])
        sounds = "(word) => [...(CSS.highlights.get('spoken') ?? [])].some((range) => String(range).startsWith(word))"
        await demo.until(sounds, SOUNDING)
        await photograph(demo, path, optimize=True)


async def call_photographed(path: Path) -> None:
    """The page of a recorded call with an interruption, while a word of it sounds."""
    with TemporaryDirectory() as folder:
        sound, kept = await microphone(Path(folder)), str(Path(folder, "calls"))
        async with page("--record", kept, window=CALL_WINDOW, microphone=sound) as demo:
            await talk(demo)
            link = await demo.page.locator("#recorded").evaluate("(link) => link.href")
            told = await demo.page.evaluate("(link) => fetch(`${link}/call.json`).then((call) => call.json())", link)
            turn, word = CALL_SOUNDING
            start_ms = told["turns"][turn]["answer"]["words"][word]["start_ms"]
            await demo.page.goto(f"{link}#t={start_ms / 1000}")
            await demo.until("() => CSS.highlights.get('spoken')?.size > 0")
            await asyncio.sleep(REST_AT_END_SEC)
            await photograph(demo, path, quality=88, method=6)


async def main(folder: Path) -> None:
    await call_photographed(folder / "call.webp")
    for name, window in STILLS.items():
        await photographed(folder / name, window)
    await filmed(folder / "conversation.webp")


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
