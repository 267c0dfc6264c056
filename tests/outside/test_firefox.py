"""The client and the page in Firefox: the wire, a written question, a spoken one, and a connection that breaks."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import pytest
import pytest_asyncio
from support.chromium import recording
from support.commands import running
from support.embedded_engine import EmbeddedEngine
from support.golden_frames import check_binary_frames, check_text_frames
from support.live_server import LiveServer, live_server
from support.outside import program
from support.patience import PATIENCE_SEC, until
from support.speech_clips import clip_bytes, silence
from support.tcp_relay import tcp_relay
from websockets.asyncio.client import ClientConnection, connect

from omni_ws.config.model import VoiceChoice

_SAYS: Final = b"WebDriver BiDi listening on "
#: Nothing is fetched that no page asked for, and a page may play sound before it was touched.
_PREFERENCES: Final = {
    "app.normandy.enabled": False,
    "app.update.disabledForTesting": True,
    "browser.shell.checkDefaultBrowser": False,
    "datareporting.policy.dataSubmissionEnabled": False,
    "extensions.update.enabled": False,
    "media.autoplay.blocking_policy": 0,
    "media.autoplay.default": 0,
    "network.captive-portal-service.enabled": False,
    "network.connectivity-service.enabled": False,
    "services.settings.server": "data:,",
    "toolkit.telemetry.reportingpolicy.firstRun": False,
}
#: What the page's policy forbids is an error of the page.
_TELL_VIOLATIONS: Final = """() => addEventListener("securitypolicyviolation",
  ({ violatedDirective, blockedURI }) => console.error(`policy: ${violatedDirective} ${blockedURI}`))"""


class Firefox:
    """One tab. One command runs at a time; ``problems`` are the errors of its pages until the last one ended."""

    def __init__(self, socket: ClientConnection) -> None:
        self.problems: list[str] = []
        self._socket = socket
        self._commands = 0
        self._tab = ""

    async def start(self) -> None:
        await self._send("session.new", {"capabilities": {}})
        await self._send("session.subscribe", {"events": ["log.entryAdded"]})
        self._tab = (await self._send("browsingContext.getTree", {}))["contexts"][0]["context"]
        await self.before_each_page(_TELL_VIOLATIONS)

    async def end(self) -> None:
        """The page is left, which ends its sessions."""
        await self.open("about:blank")

    async def before_each_page(self, function: str) -> None:
        """A function of JavaScript runs in every page of a server before its own scripts."""
        code = f"() => {{ if (location.protocol === 'http:') ({function})(); }}"
        await self._send("script.addPreloadScript", {"functionDeclaration": code})

    async def open(self, url: str) -> None:
        """Returns when the page has loaded."""
        await self._send("browsingContext.navigate", {"context": self._tab, "url": url, "wait": "complete"})

    async def evaluate(self, function: str, argument: Any = None) -> Any:
        """What a function of JavaScript, or its promise, returns for ``argument``; both are values of JSON.

        The page takes it for an act of its user. Raises AssertionError with what the function threw.
        """
        code = f"(async () => JSON.stringify((await ({function})({json.dumps(argument)})) ?? null))()"
        told = await self._send(
            "script.evaluate",
            {"expression": code, "target": {"context": self._tab}, "awaitPromise": True, "userActivation": True},
        )
        assert told["type"] == "success", told["exceptionDetails"]["text"]
        return json.loads(told["result"]["value"])

    async def until(self, condition: str, argument: Any = None) -> None:
        """Waits until a function of JavaScript returns a true value."""
        await self.evaluate(
            f"""async (argument) => {{
              while (!({condition})(argument)) await new Promise((go) => setTimeout(go, 20));
            }}""",
            argument,
        )

    async def _send(self, method: str, parameters: dict[str, Any]) -> dict[str, Any]:
        self._commands += 1
        await self._socket.send(json.dumps({"id": self._commands, "method": method, "params": parameters}))
        async with asyncio.timeout(PATIENCE_SEC):
            while True:
                told = json.loads(await self._socket.recv())
                if told.get("id") == self._commands:
                    assert told["type"] == "success", f"{method}: {told.get('error')}: {told.get('message')}"
                    result: dict[str, Any] = told["result"]
                    return result
                if told.get("method") == "log.entryAdded" and told["params"]["level"] == "error":
                    self.problems.append(str(told["params"]["text"]))


@contextlib.asynccontextmanager
async def firefox(folder: Path) -> AsyncIterator[Firefox]:
    """A browser with a new profile in ``folder``, and a sound card that plays to nobody.

    When the block was left without an exception its pages must have had no error.
    """
    profile = folder / "profile"
    profile.mkdir()
    (profile / "user.js").write_text(
        "".join(f"user_pref({json.dumps(name)}, {json.dumps(value)});\n" for name, value in _PREFERENCES.items())
    )
    environment = os.environ | {"HOME": str(folder), "XDG_RUNTIME_DIR": str(folder)}
    # Without a sound card Firefox starts no AudioContext.
    sound = folder / "sound"
    devices = ("--load=module-null-sink", f"--load=module-native-protocol-unix socket={sound} auth-anonymous=1")
    quiet: dict[str, Any] = {"stdout": asyncio.subprocess.DEVNULL, "stderr": asyncio.subprocess.PIPE}
    async with running(program("pulseaudio"), "-n", "--exit-idle-time=-1", *devices, env=environment, **quiet):
        await until(sound.exists)
        arguments = ("--headless", "--no-remote", "--profile", str(profile), "--remote-debugging-port", "0")
        environment["PULSE_SERVER"] = f"unix:{sound}"
        async with running(program("firefox-esr"), *arguments, env=environment, **quiet) as process:
            assert process.stderr is not None
            async with asyncio.timeout(PATIENCE_SEC):
                said = b""
                while not (line := await process.stderr.readline()).startswith(_SAYS):
                    assert line, f"Firefox did not start: {said.decode()}"
                    said += line
            address = line.removeprefix(_SAYS).decode().strip()
            async with connect(f"{address}/session", max_size=None, proxy=None) as socket:
                browser = Firefox(socket)
                await browser.start()
                yield browser
                await browser.end()
            assert not browser.problems, browser.problems


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
HANDS_FREE = "() => localStorage.setItem('omni_ws.settings', JSON.stringify({ mode: 'open', greeting: false }))"


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
