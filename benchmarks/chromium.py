"""Chromium with a recording for a microphone."""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import wave
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

#: What is said.
CLIP: Final = Path(__file__).parent.parent / "tests" / "data" / "goforward.wav"


def chromium_path(parser: argparse.ArgumentParser) -> str:
    """Where Chromium is. Without it, ``parser`` ends the program with an error."""
    names = ("chromium", "chromium-browser", "google-chrome")
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    if path is None:
        parser.error("Chromium is not installed")
    return path


def clip_seconds() -> float:
    """The length of the clip that is spoken."""
    with wave.open(str(CLIP), "rb") as clip:
        return clip.getnframes() / clip.getframerate()


@asynccontextmanager
async def page_with_speech(path: str, *, pause_sec: float) -> AsyncIterator[Any]:
    """A fresh page, whose microphone repeats a spoken clip with ``pause_sec`` of silence after it."""
    from playwright.async_api import async_playwright

    with tempfile.TemporaryDirectory() as folder:
        speech = Path(folder, "speech.wav")
        with wave.open(str(CLIP), "rb") as clip, wave.open(str(speech), "wb") as file:
            file.setparams(clip.getparams())
            pause = bytes(clip.getsampwidth() * round(pause_sec * clip.getframerate()))
            file.writeframes(clip.readframes(clip.getnframes()) + pause)
        switches = ["--no-sandbox", "--use-fake-device-for-media-stream", f"--use-file-for-fake-audio-capture={speech}"]
        async with async_playwright() as playwright:
            browser = await playwright.chromium.launch(executable_path=path, args=switches)
            yield await (await browser.new_context(permissions=["microphone"])).new_page()
            await browser.close()
