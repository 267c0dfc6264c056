"""The client and the page in Firefox: the wire, a written question, a spoken one, and a connection that breaks."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from support.chromium import recording
from support.embedded_engine import EmbeddedEngine
from support.firefox import Firefox, firefox
from support.golden_frames import check_binary_frames, check_text_frames
from support.live_server import LiveServer, live_server
from support.speech_clips import clip_bytes, silence
from support.tcp_relay import tcp_relay

from omni_ws.config.model import VoiceChoice

pytestmark = [pytest.mark.slow, pytest.mark.real_time]

#: Firefox's own microphone for tests gives a tone. This one gives a recording, from when it is opened.
MICROPHONE = """() => {
  navigator.mediaDevices.getUserMedia = async () => {
    const context = new AudioContext();
    const source = context.createBufferSource();
    const bytes = Uint8Array.from(atob("%s"), (character) => character.charCodeAt(0));
    source.buffer = await context.decodeAudioData(bytes.buffer);
    const target = context.createMediaStreamDestination();
    source.connect(target);
    source.start();
    return target.stream;
  };
}"""
#: The loudest sample that went to the loudspeaker.
LOUDEST = """() => {
  window.loudest = 0;
  const connect = AudioNode.prototype.connect;
  AudioNode.prototype.connect = function (target, ...rest) {
    if (target instanceof AudioDestinationNode) {
      const analyser = new AnalyserNode(this.context);
      const samples = new Float32Array(analyser.fftSize);
      setInterval(() => {
        analyser.getFloatTimeDomainData(samples);
        window.loudest = samples.reduce((most, sample) => Math.max(most, Math.abs(sample)), window.loudest);
      }, 20);
      connect.call(this, analyser);
    }
    return connect.call(this, target, ...rest);
  };
}"""
IN_STATE = "(state) => document.body.dataset.state === state"
ANSWERED = """([words, count]) => {
  const answers = document.querySelectorAll(".server[data-state=done] .words");
  return answers.length === count && answers[count - 1].textContent.includes(words);
}"""
WRITE = """(text) => {
  const field = document.querySelector("#text");
  field.value = text;
  field.dispatchEvent(new InputEvent("input", { bubbles: true }));
  field.form.requestSubmit();
}"""
HANDS_FREE = "() => localStorage.setItem('omni_ws.settings', JSON.stringify({ mode: 'open' }))"


@pytest_asyncio.fixture
async def server() -> AsyncIterator[LiveServer]:
    engine = EmbeddedEngine(voice=VoiceChoice.ESPEAK)
    async with live_server(engine, streaming_input={"resume_grace_sec": 30}) as running:
        yield running


@pytest_asyncio.fixture
async def browser(tmp_path: Path) -> AsyncIterator[Firefox]:
    async with firefox(tmp_path) as running:
        await running.before_each_page(LOUDEST)
        yield running


async def test_the_wire_and_a_broken_connection(server: LiveServer, browser: Firefox) -> None:
    async with tcp_relay(server.port) as relay:
        await browser.open(f"http://127.0.0.1:{relay.port}/")
        await browser.until(IN_STATE, "ready")
        await check_binary_frames(browser.evaluate)
        await check_text_frames(browser.evaluate)
        await browser.evaluate(WRITE, "Count to twelve.")
        await browser.until(IN_STATE, "speaking")
        relay.cut()
        await browser.until(ANSWERED, ["12", 1])
        await browser.until(IN_STATE, "ready")
        assert await browser.evaluate("() => loudest") > 0.05
        await browser.end()  # while the server can still be told


async def test_a_spoken_question(server: LiveServer, browser: Firefox, tmp_path: Path) -> None:
    speech = recording(tmp_path / "speech.wav", silence(1.5), clip_bytes("goforward"), silence(30))
    await browser.before_each_page(MICROPHONE % base64.b64encode(speech.read_bytes()).decode())
    await browser.before_each_page(HANDS_FREE)
    await browser.open(f"http://127.0.0.1:{server.port}/")
    await browser.until(IN_STATE, "ready")
    await browser.evaluate("() => document.querySelector('#talk').click()")
    await browser.until("() => document.querySelector('.you')?.textContent.includes('go forward ten meters')")
    await browser.until(ANSWERED, ["", 1])
    await browser.until(IN_STATE, "listening")
    assert await browser.evaluate("() => loudest") > 0.05
