"""The distribution's Chromium, for tests of the browser demo: its pages, what is said to them and what
they play, and whether everybody can use them.

Nothing is downloaded. Where there is no Chromium the tests are skipped and say so; under CI that is a failure.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import shutil
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest
from numpy.typing import NDArray
from support.patience import PATIENCE_SEC
from support.speech_clips import SAMPLE_RATE

from omni_ws.client.audio import Pcm16, write_wav

if TYPE_CHECKING:
    from playwright.async_api import Browser, BrowserContext, Page


#: Where Chromium is, for machines on which it has no usual name.
VARIABLE: Final = "CHROMIUM"
_NAMES: Final = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
#: What pages are permitted, unless a test says otherwise.
_ALLOWED: Final = ("microphone", "camera")
#: What Playwright waits, as it counts.
PATIENCE_MS: Final = 1000 * PATIENCE_SEC
#: What tests of a page are marked with: they share an event loop, and on it the browser of tests/browser/conftest.py.
IN_BROWSER: Final = [
    pytest.mark.slow,
    pytest.mark.real_time,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.usefixtures("browser"),
]

#: Keeps what goes to the loudspeaker, on the audio thread itself, so that a busy page cannot make holes in it.
TAP_PROCESSOR: Final = """
globalThis.registerProcessor?.("tap", globalThis.AudioWorkletProcessor && class extends AudioWorkletProcessor {
  kept = [];
  process([[input]]) {
    if (input) this.kept.push(input.slice());
    if (this.kept.length === 16) this.port.postMessage(this.kept.splice(0));
    return true;
  }
});
"""
_TAP: Final = """
window.tapped = { rate: 0, pieces: [], context: null };
const connect = AudioNode.prototype.connect;
AudioNode.prototype.connect = function (target, ...rest) {
  if (target instanceof AudioDestinationNode) {
    const mono = { numberOfOutputs: 0, channelCount: 1, channelCountMode: "explicit" };
    const tap = new AudioWorkletNode(this.context, "tap", mono);
    tapped.rate = this.context.sampleRate;
    tapped.context = this.context;
    tap.port.onmessage = ({ data }) => tapped.pieces.push(...data);
    connect.call(this, tap);
  }
  return connect.call(this, target, ...rest);
};
"""
_READ_TAP: Final = """async () => {
  const { rate, pieces, context } = window.tapped;
  const all = pieces.length + 32; // what is on its way here
  while (pieces.length < all && context?.state === "running") await new Promise((go) => setTimeout(go, 10));
  const reader = new FileReader();
  reader.readAsDataURL(new Blob(pieces));
  await new Promise((go) => (reader.onload = go));
  return { rate, samples: reader.result.split(",")[1] ?? "" };
}"""
#: A microphone that hears what a test says, within the page's own sound. The audio thread makes its samples when it
#: gets to them: however late a busy machine is, none is lost, while Chromium's own device goes on.
_EAR: Final = """
(() => {
  const { mediaDevices } = navigator;
  if (!mediaDevices) return;
  const askDevice = mediaDevices.getUserMedia.bind(mediaDevices);
  let context, ear;
  window.AudioContext = class extends AudioContext {
    constructor(options) { super(options); context = this; }
  };
  mediaDevices.getUserMedia = async (wanted) => {
    if (!wanted.audio || !context) return askDevice(wanted);
    ear = new MediaStreamAudioDestinationNode(context, { channelCount: 1 });
    // Silence that flows, and has a level as a real microphone has: zeros count as switched off.
    const silence = new ConstantSourceNode(context, { offset: 1e-4 });
    silence.connect(ear);
    silence.start();
    const [track] = ear.stream.getAudioTracks();
    const settings = track.getSettings.bind(track);
    track.getSettings = () => ({ ...settings(), ...wanted.audio });
    return ear.stream;
  };
  window.say = async (speech, rate) => {
    while (ear?.stream.getAudioTracks()[0].readyState !== "live") await new Promise((go) => setTimeout(go, 10));
    const samples = new Int16Array(Uint8Array.from(atob(speech), (letter) => letter.charCodeAt(0)).buffer);
    const buffer = new AudioBuffer({ length: samples.length, sampleRate: rate });
    buffer.copyToChannel(Float32Array.from(samples, (sample) => sample / 32768), 0);
    const source = new AudioBufferSourceNode(context, { buffer });
    source.connect(ear);
    window.said = new Promise((go) => (source.onended = go));
    source.start();
  };
})();
"""
#: A tab begins with nothing stored, as if it were the first one.
_BEGIN_ANEW: Final = """
try {
  if (!sessionStorage.getItem("begun")) localStorage.clear();
  sessionStorage.setItem("begun", "yes");
} catch { /* about:blank has no storage */ }
"""
#: Whether so many seconds lie between the first sound and the last one.
_PLAYED: Final = """(seconds) => {
  const { rate, pieces } = window.tapped;
  const sounding = (piece) => piece.some((sample) => Math.abs(sample) > 1e-4);
  const [first, last] = [pieces.findIndex(sounding), pieces.findLastIndex(sounding)];
  return first >= 0 && (last - first) * pieces[first].length >= seconds * rate;
}"""
#: What pages play and hear at, unless a test says otherwise: a third of the work of the usual 48 kHz.
_RATE: Final = 16_000
#: Every AudioContext of the page at this rate, whatever the page wants.
_FORCE_RATE: Final = """
window.AudioContext = class extends AudioContext {
  constructor(options) { super({ ...options, sampleRate: %d }); }
};
"""


def chromium_path() -> str:
    """Where Chromium is; skips the test, or fails it under CI, where there is none or playwright is missing."""
    path = os.environ.get(VARIABLE) or next(filter(None, map(shutil.which, _NAMES)), None)
    missing = "Chromium is not installed (on Debian: apt-get install chromium)" if path is None else ""
    try:
        import playwright.async_api  # noqa: F401
    except ImportError:
        missing = "the Python package playwright is not installed"
    if missing and os.environ.get("CI"):
        pytest.fail(f"{missing}, and under CI nothing is skipped")
    if missing:
        pytest.skip(missing)
    assert path is not None
    return path


@dataclass(frozen=True)
class Played:
    """What went to the loudspeaker, from its first sound to its last."""

    samples: NDArray[np.float32]
    rate: int

    @classmethod
    def within(cls, samples: NDArray[np.float32], rate: int) -> Played:
        """Without the silence around it."""
        sounding = np.flatnonzero(np.abs(samples) > 1e-4)
        return cls(samples[sounding[0] : sounding[-1] + 1] if len(sounding) else samples[:0], rate)

    @property
    def seconds(self) -> float:
        return len(self.samples) / self.rate if self.rate else 0.0

    @property
    def without_holes(self) -> Played:
        """What a busy machine leaves of it: runs of silence inside are cut out where they are longer than 5 ms."""
        sounding = np.flatnonzero(np.abs(self.samples) > 1e-4)
        gaps = np.diff(sounding, prepend=0)
        holes = [range(end - gap + 1, end) for end, gap in zip(sounding, gaps, strict=True) if gap > self.rate * 0.005]
        return Played(np.delete(self.samples, [place for hole in holes for place in hole]), self.rate)

    @property
    def level(self) -> float:
        """Root mean square."""
        return float(np.sqrt(np.mean(self.samples**2))) if len(self.samples) else 0.0

    @property
    def frequency(self) -> float:
        """The strongest one, in Hz."""
        spectrum = np.abs(np.fft.rfft(self.samples * np.hanning(len(self.samples))))
        return float(np.argmax(spectrum)) * self.rate / len(self.samples)


@dataclass
class DemoPage:
    """The demo in a browser. ``problems`` are its errors; every test looks at them at its end."""

    page: Page
    problems: list[str] = field(default_factory=list)

    async def open(self, url: str, state: str = "ready") -> None:
        await self.page.goto(url)
        if any("ERR_NETWORK_CHANGED" in problem for problem in self.problems):
            # The machine got or lost an address meanwhile, by which Chromium breaks off what it loads.
            self.problems.clear()
            await self.page.goto(url)
        await self.in_state(state)

    async def in_state(self, *states: str) -> None:
        """Waits until the page shows one of ``states``."""
        shown = self.page.locator(", ".join(f"body[data-state={state}]" for state in states))
        async with self._told_of_a_failure():
            await shown.wait_for(state="attached")

    @contextlib.asynccontextmanager
    async def _told_of_a_failure(self) -> AsyncIterator[None]:
        """Adds to an exception what the page shows then."""
        try:
            yield
        except Exception as error:
            state = await self.page.evaluate("document.body.dataset.state")
            error.add_note(f"The page is {state}, says {await self.messages()}, and has the problems {self.problems}")
            raise

    async def messages(self) -> list[str]:
        """The texts of all messages that the page shows."""
        return await self.page.locator(".message").all_inner_texts()

    async def heard(self, words: str, turn: int = -1) -> None:
        """Waits until the transcript of a turn has these words, settled or not."""
        await self.page.locator(".turn").nth(turn).locator(".you", has_text=words).wait_for()

    async def answered(self, words: str = "", turn: int = -1, state: str = "done") -> str:
        """Waits for an answer with these words to end in ``state``, and returns all of it."""
        answer = self.page.locator(".turn").nth(turn).locator(f".server[data-state={state}]", has_text=words)
        await answer.wait_for()
        return await answer.locator(".words").inner_text()

    async def note(self, turn: int = -1) -> str:
        """What stands below an answer, with ordinary spaces."""
        return (await self.page.locator(".turn .note").nth(turn).inner_text()).replace("\u00a0", " ")

    async def write(self, text: str) -> None:
        await self.page.locator("#text").fill(text)
        await self.page.locator("#text").press("Enter")

    async def change_first_question(self, text: str) -> None:
        """Asks another question in place of the first one; what came after that is gone."""
        await self.page.get_by_role("button", name="Change the question").first.click()
        await self.write(text)
        await self.page.locator(".turn", has_text=text).wait_for()

    async def interrupt_by_speech(self, speech: bytes, said: str, answer: str) -> None:
        """Opens the microphone during a long answer. What is said stops that, and gets an answer of its own."""
        await self.write("Count to twenty.")
        await self.until_played(0.3)  # what is interrupted before it is heard is answered together with what follows
        await self.page.locator("#talk").click()
        await self.say(speech)
        await self.answered(turn=0, state="stopped")
        await self.heard(said, turn=1)
        await self.answered(answer, turn=1)
        await self.in_state("listening")
        assert "stopped after" in await self.note(turn=0)

    async def open_settings(self) -> None:
        """Opens the settings and each of their groups."""
        await self.page.locator("#open-settings").click()
        for group in await self.page.locator("#settings-form details").all():
            if not await group.evaluate("(group) => group.open"):
                await group.locator("summary").click()

    async def say(self, speech: bytes) -> None:
        """Begins to speak (pcm16, 16 kHz) into the microphone, once that is open."""
        said = base64.b64encode(speech).decode()
        await self.page.evaluate("([speech, rate]) => say(speech, rate)", [said, SAMPLE_RATE])

    async def said(self) -> None:
        """Waits until what was said last has been heard to its end."""
        await self.page.evaluate("() => said.then(() => null)")

    async def message(self, words: str) -> None:
        async with self._told_of_a_failure():
            await self.page.locator(".message", has_text=words).wait_for()

    async def until(self, condition: str, argument: Any = None) -> None:
        """Waits until a function of JavaScript returns true. (Playwright's own wait compiles it anew each time, which
        the page's policy forbids.)"""
        look = f"""(argument) => new Promise((done) => {{
          const holds = {condition};
          const look = () => (holds(argument) ? done() : setTimeout(look, 20));
          look();
        }})"""
        async with asyncio.timeout(PATIENCE_SEC):
            await self.page.evaluate(look, argument)

    async def until_played(self, seconds: float) -> None:
        """Waits until so much sound has been played, silence within it counted."""
        await self.until(_PLAYED, seconds)

    async def played(self) -> Played:
        found = await self.page.evaluate(_READ_TAP)
        return Played.within(np.frombuffer(base64.b64decode(found["samples"]), "<f4"), int(found["rate"]))


#: Pages of one site and one context share a process, and none is for the graphics card that is not there. Sound is made
#: in pieces of 43 ms: fewer turns for a busy machine.
_THRIFTY: Final = (
    "--process-per-site",
    "--disable-gpu",
    "--in-process-gpu",
    "--audio-buffer-size=2048",
    "--deny-permission-prompts",
)


@contextlib.asynccontextmanager
async def chromium(*switches: str, microphone: Path | None = None) -> AsyncIterator[Browser]:
    """A browser of its own. ``microphone`` is a WAV file that is played from the moment the microphone is opened, over
    and over."""
    path = chromium_path()
    from playwright.async_api import async_playwright

    arguments = ["--no-sandbox", "--disable-dev-shm-usage", "--use-fake-device-for-media-stream", *switches]
    if microphone is not None:
        arguments.append(f"--use-file-for-fake-audio-capture={microphone}")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=arguments, timeout=PATIENCE_MS)
        try:
            yield browser
        finally:
            await browser.close()


@dataclass(frozen=True)
class _Shared:
    """A browser for many pages, one after the other."""

    browser: Browser
    #: Of most pages. One more is always open in it, which keeps the process that knows the page's modules.
    context: BrowserContext
    #: What Chromium's own microphone plays. The file is read anew each time the microphone is opened.
    microphone: Path


_shared: list[_Shared] = []


@contextlib.asynccontextmanager
async def shared_chromium(folder: Path) -> AsyncIterator[Browser]:
    """The browser of every ``demo_page`` in the block that needs no switches of its own."""
    microphone = folder / "microphone.wav"
    async with (
        chromium(*_THRIFTY, microphone=microphone) as browser,
        await browser.new_context(permissions=list(_ALLOWED), reduced_motion="reduce") as context,
    ):
        context.set_default_timeout(PATIENCE_MS)
        keeper = await context.new_page()
        await keeper.route("**", lambda route: route.fulfill(body="", content_type="text/html"))
        await keeper.goto("http://127.0.0.1/")
        _shared.append(_Shared(browser, context, microphone))
        try:
            yield browser
        finally:
            _shared.clear()


@contextlib.asynccontextmanager
async def _browser(switches: tuple[str, ...], microphone: Path | None) -> AsyncIterator[Browser]:
    if switches or not _shared:
        async with chromium(*switches, microphone=microphone) as browser:
            yield browser
        return
    (shared,) = _shared
    if microphone is None:
        beeps = (0.5 * 32767 * np.sin(np.arange(3200) * 2 * np.pi * 400 / 16_000)).astype("<i2").tobytes()
        recording(shared.microphone, beeps, bytes(4 * len(beeps)))
    else:
        shutil.copyfile(microphone, shared.microphone)
    yield shared.browser


@contextlib.asynccontextmanager
async def _tab(browser: Browser, own: bool, allow: tuple[str, ...], options: Mapping[str, Any]) -> AsyncIterator[Page]:
    """A tab of the context that pages share, unless it needs its ``own``: for other permissions, or a clock that is
    changed."""
    # Without a GPU each moving page takes a tenth of a core and more, and many are open at once.
    options = {"reduced_motion": "reduce", **options}
    ways = {name: options[name] for name in ("reduced_motion", "color_scheme") if name in options}
    if (
        own
        or allow != _ALLOWED
        or not options.keys() <= {"viewport", *ways}
        or not _shared
        or browser is not _shared[0].browser
    ):
        async with await browser.new_context(permissions=list(allow), **options) as context:
            context.set_default_timeout(PATIENCE_MS)
            yield await context.new_page()
        return
    async with await _shared[0].context.new_page() as page:
        await page.add_init_script(_BEGIN_ANEW)
        await page.emulate_media(**ways)
        if "viewport" in options:
            await page.set_viewport_size(options["viewport"])
        yield page


@contextlib.asynccontextmanager
async def demo_page(
    *switches: str,
    device: bool = False,
    microphone: Path | None = None,
    allow: tuple[str, ...] = _ALLOWED,
    sample_rate: int | None = _RATE,
    tapped: bool = True,
    settings: Mapping[str, Any] | None = None,
    expect_problems: bool = False,
    own_context: bool = False,
    **context_options: Any,
) -> AsyncIterator[DemoPage]:
    """A tab for the demo: permissions in ``allow`` are given, others refused; ``settings`` are what the person chose
    earlier. The microphone hears what ``say`` says, and silence else; where it is Chromium's own ``device`` it plays a
    recording, or beeps. ``tapped`` needs a server of this process, whose page has the processor that keeps what is
    played. When the block was left without an exception the page must have had no error."""
    async with (
        _browser(switches, microphone) as browser,
        _tab(browser, own_context, allow, context_options) as page,
    ):
        if sample_rate is not None:
            await page.add_init_script(_FORCE_RATE % sample_rate)
        if not device and microphone is None:
            await page.add_init_script(_EAR)
        if tapped:
            await page.add_init_script(_TAP)
        # On a busy machine, a page that thinks for long would play more than what the server says.
        # The log shows every turn, and nothing is said that a test did not ask for.
        usual = {"thinkingSound": False, "greeting": False, "log": True}
        stored = json.dumps(json.dumps({**usual, **(settings or {})}))
        keep = "" if settings is not None else "localStorage.getItem('omni_ws.settings') ?? "
        await page.add_init_script(f"try {{ localStorage.setItem('omni_ws.settings', {keep}{stored}) }} catch {{}}")
        demo = DemoPage(page)
        demo.page.on("pageerror", lambda error: demo.problems.append(str(error)))
        demo.page.on("console", lambda message: demo.problems.append(message.text) if message.type == "error" else None)
        yield demo
        assert expect_problems or not demo.problems, demo.problems


def recording(path: Path, *pieces: bytes, rate: int = 16_000) -> Path:
    """A WAV file of pcm16 pieces, for the microphone."""
    write_wav(path, Pcm16(b"".join(pieces), rate))
    return path


#: What somebody may do without a pointer. Of a group of radio buttons the Tab key reaches one.
_CONTROLS = """() => {
  const all = "button, a[href], input, select, textarea, summary, [tabindex='0']";
  const within = [...document.querySelectorAll("dialog[open]")].at(-1) ?? document;
  const usable = [...within.querySelectorAll(all)].filter(
    (one) => one.checkVisibility() && !one.disabled && !(one.type === "radio" && !one.checked),
  );
  usable.forEach((one, place) => (one.dataset.place = place));
  return usable.map((one) => one.id || one.name || one.title || one.textContent.trim() || one.tagName);
}"""
_FOCUSED = """() => {
  const { place } = document.activeElement.dataset;
  return place === undefined ? null : Number(place);
}"""
#: The text of each live region after each of its changes, but for alerts: a busy machine has them.
_HEAR_READER = """(host) => {
  window.saidByReader = [];
  const root = host ? document.querySelector(host).shadowRoot : document;
  for (const region of root.querySelectorAll("[role=status], [aria-live]:not([aria-live=off])")) {
    const note = () => region.textContent.trim() && saidByReader.push(region.textContent.trim());
    new MutationObserver(note).observe(region, { childList: true, characterData: true, subtree: true });
  }
}"""
# What lies behind a dialog was judged without it.
_RUN = """async () => (await axe.run([...document.querySelectorAll("dialog[open]")].at(-1) ?? document,
  { resultTypes: ["violations"] })).violations.flatMap(({ id, nodes }) =>
  nodes.map(({ target, failureSummary }) => [id, target.join(" "), failureSummary]))"""


async def load_axe(page: Page) -> None:
    """Load axe-core into a page, whatever its policy."""
    await page.evaluate(resources.files("axe_playwright_python").joinpath("axe.min.js").read_text())


async def violations(page: Page) -> list[Any]:
    """Return what axe-core finds: the rule, the element and the reason of each."""
    found: list[Any] = await page.evaluate(_RUN)
    return found


async def hear_screen_reader(page: Page, host: str = "") -> None:
    """Keep from now on what a screen reader says unasked while nothing is wrong. ``host`` is the selector of an element
    with a shadow, where it is that which is heard."""
    await page.evaluate(_HEAR_READER, host)


async def said_by_screen_reader(page: Page) -> list[str]:
    said: list[str] = await page.evaluate("saidByReader")
    return said


async def out_of_reach_by_keyboard(page: Page) -> list[str]:
    """Return the names of the controls in sight to which no number of Tab keys leads."""
    names = await page.evaluate(_CONTROLS)
    assert names
    reached = set()
    # The browser's own frame and the body are stops, too, and so are frames on the wire that came meanwhile.
    for _ in range(2 * len(names) + 4):
        await page.keyboard.press("Tab")
        reached.add(await page.evaluate(_FOCUSED))
        if len(reached - {None}) == len(names):
            break
    return [name for place, name in enumerate(names) if place not in reached]
