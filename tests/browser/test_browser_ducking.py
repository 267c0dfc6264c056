"""The page lowers an answer while it is not known whether what it hears interrupts that, and plays on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.chromium import IN_BROWSER, Played, demo_page
from support.live_server import LiveServer, live_server
from support.scripted_engines import HearingEngine
from support.speech_clips import clip_bytes

from omni_ws.audio import speech_watch
from omni_ws.audio.pcm import DUCKED
from omni_ws.engine.base import AudioOutput, TextOutput, TranscriptOutput
from omni_ws.wire.server_frames import SpeechDismissedFrame, SpeechStartedFrame

pytestmark = IN_BROWSER

LEVEL = 0.5
#: Of a voice, as long as an acknowledgement.
SHORT_MS = 600
UNCERTAIN = SpeechStartedFrame(audio_ms=96, turn_id="turn_a", certain=False)
DISMISSED = SpeechDismissedFrame(audio_ms=96, turn_id="turn_a")
SECONDS = 4
ANSWER = [TextOutput("It goes on."), *[AudioOutput(np.full(2400, LEVEL, np.float32), 24_000)] * (10 * SECONDS)]


def tell(server: LiveServer, frame: Any) -> None:
    """Sends a frame to the only client, in order with the answer."""
    (living,) = server.native._live._living.values()
    living.session.conversation.outbox.put_nowait(frame)


def seconds_at(played: Played, level: float) -> float:
    return float(np.count_nonzero(np.abs(played.samples - level) < 0.002)) / played.rate


#: Has the page note each of its states.
NOTE_STATES = """() => {
  const { dataset } = document.body;
  const note = () => (dataset.states = `${dataset.states ?? ""} ${dataset.state}`);
  new MutationObserver(note).observe(document.body, { attributeFilter: ["data-state"] });
}"""


async def test_the_voice_is_lowered_until_it_is_known_that_nobody_interrupts() -> None:
    """Nothing is lost meanwhile, and nothing is shown of what was no turn."""
    async with live_server(HearingEngine(ANSWER)) as server, demo_page(settings={"mode": "open"}) as demo:
        await demo.open(f"http://127.0.0.1:{server.port}/")
        await demo.page.locator("#talk").click()
        await demo.in_state("listening")
        await demo.write("Talk to me.")
        await demo.in_state("speaking")
        tell(server, UNCERTAIN)
        await demo.in_state("ducked")
        status = demo.page.locator("#status")
        assert await status.inner_text() == "Speaking"  # nothing is read out for a moment's doubt
        await demo.page.locator("#status", has_text="Speaking quietly").wait_for()
        tell(server, DISMISSED)
        await demo.in_state("speaking")
        assert await status.inner_text() == "Speaking"
        await demo.answered("It goes on.", turn=0)
        await demo.in_state("listening")
        played = await demo.played()
        assert await demo.page.locator(".turn:visible").count() == 1
    assert played.without_holes.seconds == pytest.approx(SECONDS, abs=0.1)
    assert seconds_at(played, LEVEL * DUCKED) > 0.5
    assert seconds_at(played, LEVEL) > 0.5


async def test_the_server_decides_what_interrupts_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short sound lowers the voice for a moment, and all of the answer is played; a sentence stops it."""
    monkeypatch.setattr(speech_watch, "backchannel_probability", lambda samples: 0.95)
    levels = [number / 100 for number in range(1, 61)]
    pieces = [AudioOutput(np.full(2400, level, np.float32), 24_000) for level in levels]
    engine = HearingEngine(
        [TextOutput("It goes on."), *pieces], heard=[TranscriptOutput("Mm-hm."), TextOutput("What?")]
    )
    async with live_server(engine) as server, demo_page(settings={"mode": "open"}) as demo:
        await demo.open(f"http://127.0.0.1:{server.port}/")
        await demo.page.locator("#talk").click()
        await demo.in_state("listening")
        await demo.write("Talk to me.")
        await demo.until_played(0.3)
        await demo.page.evaluate(NOTE_STATES)
        await demo.say(clip_bytes("cards_001")[: SHORT_MS * 32])
        # It lasts for a moment, which a poll may miss.
        await demo.page.locator("body[data-states~=ducked]:not([data-state=ducked])").wait_for()
        assert await demo.answered(turn=0) == "It goes on."
        await demo.in_state("listening")
        whole = await demo.played()
        assert await demo.page.locator(".turn:visible").count() == 1
        engine.heard = (TranscriptOutput("Go forward ten metres."), TextOutput("I go."))
        await demo.write("Again.")
        await demo.in_state("speaking")
        await demo.say(clip_bytes("goforward"))
        await demo.answered(turn=1, state="stopped")
        await demo.heard("Go forward ten metres.", turn=2)
        assert await demo.answered(turn=2) == "I go."
    assert whole.without_holes.seconds == pytest.approx(6.0, abs=0.1)
    played = {level: seconds_at(whole, level) + seconds_at(whole, level * DUCKED) for level in levels}
    assert sum(seconds < 0.07 for seconds in played.values()) <= 2  # those on a slope


async def test_short_words_stop_an_answer_where_that_is_wanted() -> None:
    async with live_server(HearingEngine(ANSWER)) as server, demo_page(settings={"mode": "open"}) as demo:
        await demo.open(f"http://127.0.0.1:{server.port}/")

        def ducks() -> bool:
            (living,) = server.native._live._living.values()
            turns = living.session.conversation.configuration.effective.turn_detection
            return turns is not None and turns.duck

        await server.until(ducks, "the page's own choice")
        await demo.open_settings()
        choice = demo.page.get_by_label("Don't stop for short words")
        assert await choice.is_checked()
        await choice.uncheck()
        await server.until(lambda: not ducks(), "the other choice")
