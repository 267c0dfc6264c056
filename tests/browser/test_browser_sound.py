"""What goes in at the microphone comes out at the speaker, at every rate, through an engine that echoes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.chromium import IN_BROWSER, Played, demo_page, recording
from support.live_server import live_server

pytestmark = IN_BROWSER

TONE_HZ = 440


@pytest.fixture
def tone(tmp_path: Path) -> Path:
    time = np.arange(48_000 * 20) / 48_000
    samples = (0.4 * 32767 * np.sin(2 * np.pi * TONE_HZ * time)).astype("<i2")
    return recording(tmp_path / "tone.wav", samples.tobytes(), rate=48_000)


@pytest.mark.parametrize("rate", [8_000, 44_100, 192_000])
async def test_every_rate_is_declared_as_what_it_is(tone: Path, rate: int) -> None:
    """A wrong rate on the way in or out would be heard as another pitch. (That nothing is lost on these ways is tested
    sample by sample in test_browser_lost_network.py.)"""
    played = (await echoed(tone, rate)).without_holes
    assert played.rate == rate
    assert played.frequency == pytest.approx(TONE_HZ, rel=0.02)
    assert 0.1 < played.level < 0.4
    assert played.seconds > 0.8


async def echoed(tone: Path, rate: int) -> Played:
    # Nothing may be done to the tone: it is no voice.
    plain = {"echoCancellation": False, "noiseSuppression": False, "autoGainControl": False}
    settings = {"mode": "hold", **plain}
    async with live_server() as server, demo_page(microphone=tone, sample_rate=rate, settings=settings) as demo:
        await demo.open(f"http://127.0.0.1:{server.port}/")
        await demo.page.keyboard.down("Space")
        await demo.in_state("hearing")
        await demo.until_played(1.0)
        await demo.page.keyboard.up("Space")
        await demo.answered()
        await demo.in_state("ready")
        return await demo.played()
