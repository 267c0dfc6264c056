"""What goes wrong, and what the page says and does about it."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest
from support.chromium import IN_BROWSER, demo_page
from support.live_server import live_server
from support.scripted_engines import RetortEngine
from support.tcp_relay import tcp_relay
from websockets.asyncio.client import connect

from omni_ws.config.keys import ApiKey, digest
from omni_ws.core.chunks import Modality
from omni_ws.engine.base import AudioOutput, EngineState, TextOutput
from omni_ws.engine.composed.engine import ComposedEngine
from omni_ws.engine.fake import EchoEngine, EchoSettings, ScriptedEngine
from omni_ws.engine.llm.rules_engine import RulesEngine
from omni_ws.errors import EngineFailed

pytestmark = IN_BROWSER

HOLD = {"mode": "hold"}
OPEN = {"mode": "open"}
#: A second of it, at 24 kHz.
TONE = (0.3 * np.sin(2 * np.pi * 300 * np.arange(24_000) / 24_000)).astype(np.float32)


def url(port: int) -> str:
    return f"http://127.0.0.1:{port}/"


# --- microphone and speaker


async def test_the_microphone_is_refused() -> None:
    async with live_server() as server, demo_page(device=True, allow=()) as demo:
        await demo.open(url(server.port))
        await demo.page.locator("#talk").press("Enter")
        await demo.message("does not let this page use the microphone")
        await demo.in_state("ready")
        await demo.write("still here")
        assert await demo.answered() == "still here"


async def test_a_tap_is_one_while_the_page_is_held_up() -> None:
    """Sound that takes longer to wake than a tap does."""
    slow = """window.AudioContext = class extends AudioContext {
      constructor(options) {
        for (const begun = performance.now(); performance.now() < begun + 1000; );
        super(options);
      }
    };"""
    async with live_server() as server, demo_page(settings=HOLD) as demo:
        await demo.page.add_init_script(slow)
        for of_keyboard in (False, True):
            await demo.open(url(server.port))
            if of_keyboard:
                # The key is let go before the page has looked at the press. The times are those of the keyboard,
                # however late a busy machine passes them on.
                key = {"key": " ", "code": "Space", "windowsVirtualKeyCode": 32}
                events = (("rawKeyDown", 0.0), ("keyUp", 0.05))
                began = time.time()
                devtools = await demo.page.context.new_cdp_session(demo.page)
                sent = (
                    devtools.send("Input.dispatchKeyEvent", {**key, "type": kind, "timestamp": began + after})
                    for kind, after in events
                )
                await asyncio.gather(*sent)
            else:
                await demo.page.locator("#talk").press("Enter")
            await demo.in_state("hearing")


async def test_the_microphone_is_pulled_out() -> None:
    async with live_server() as server, demo_page(settings=HOLD) as demo:
        await demo.page.add_init_script(
            """const ask = navigator.mediaDevices.getUserMedia.bind(navigator.mediaDevices);
            navigator.mediaDevices.getUserMedia = async (wanted) => {
              const stream = await ask(wanted);
              window.pullOut = () => stream.getAudioTracks()[0].onended();
              return stream;
            };"""
        )
        await demo.open(url(server.port))
        await demo.page.locator("#talk").press("Enter")
        await demo.in_state("hearing")
        # Where nothing was said until then there is no turn.
        await server.until(lambda: server.held_bytes > 0 or server.engine.active_requests > 0, "the first audio")
        await demo.page.evaluate("pullOut()")
        await demo.message("The microphone went away")
        await demo.answered()  # what was said until then is a turn


async def test_the_browser_takes_the_echo_out() -> None:
    async with live_server() as server, demo_page(device=True, settings=OPEN) as demo:
        await demo.open(url(server.port))
        echo = demo.page.locator("#figure-echo")
        assert await echo.text_content() == "–"
        await demo.page.locator("#talk").press("Enter")
        await demo.in_state("listening")
        assert await echo.text_content() == "taken out"
        await demo.open_settings()
        await demo.page.locator("input[name=echoCancellation]").uncheck()
        await demo.page.locator("#figure-echo", has_text="not taken out").wait_for()
        assert await demo.page.locator(".message").count() == 0  # as the person wants it


async def test_a_browser_that_leaves_the_echo_in() -> None:
    """The microphone is one without an echo canceller, and the browser itself says so."""
    plain = """const ask = navigator.mediaDevices.getUserMedia.bind(navigator.mediaDevices);
    navigator.mediaDevices.getUserMedia = ({ audio }) => ask({ audio: { ...audio, echoCancellation: false } });"""
    async with live_server() as server, demo_page(device=True, settings=OPEN) as demo:
        await demo.page.add_init_script(plain)
        await demo.open(url(server.port))
        talk = demo.page.locator("#talk")
        await talk.press("Enter")
        await demo.message("Use headphones")
        await demo.page.get_by_role("button", name="Dismiss").click()
        await demo.page.keyboard.press("m")
        await demo.in_state("muted")
        assert await demo.page.locator(".message").count() == 0
        await talk.press("Enter")
        await demo.in_state("ready")
        await talk.press("Enter")
        await demo.message("Use headphones")


async def test_there_is_no_microphone() -> None:
    """Browsers may give the page none, as over plain http from another machine, where navigator.mediaDevices is
    missing; or the machine has none."""
    hide = "Object.defineProperty(Navigator.prototype, 'mediaDevices', { value: undefined, configurable: true });"
    none = """const getUserMedia = async () => { throw new DOMException("none", "NotFoundError"); };
    Object.defineProperty(Navigator.prototype, "mediaDevices", { value: { getUserMedia } });"""
    async with live_server() as server, demo_page() as demo:
        await demo.page.add_init_script(hide)
        await demo.open(url(server.port))
        await demo.page.locator("#talk").press("Enter")
        await demo.message("over https")
        await demo.page.evaluate(f"() => {{ {none} }}")
        await demo.page.locator("#talk").press("Enter")
        await demo.message("No microphone was found")


async def test_sound_that_the_browser_locks() -> None:
    """Until somebody touches the page: nothing is lost meanwhile."""
    lock = """const resume = AudioContext.prototype.resume;
    window.unlocked = false;
    AudioContext.prototype.resume = function () { return unlocked ? resume.call(this) : new Promise(() => {}); };
    const Context = AudioContext;
    window.AudioContext = class extends Context { constructor(options) { super(options); this.suspend(); } };"""
    engine = ScriptedEngine([TextOutput("listen"), AudioOutput(TONE, 24_000)])
    async with live_server(engine) as server, demo_page() as demo:
        await demo.page.add_init_script(lock)
        await demo.open(url(server.port))
        await demo.write("sing")
        await demo.message("silent until you touch it")
        await demo.answered("listen")
        assert (await demo.played()).seconds == 0
        await demo.page.evaluate("unlocked = true")
        await demo.page.get_by_role("button", name="Let it sound").click()
        await demo.page.locator(".message").wait_for(state="detached")
        await demo.until_played(0.9)
        await demo.in_state("ready")
        assert (await demo.played()).without_holes.seconds == pytest.approx(1.0, abs=0.05)


async def test_sound_that_does_not_start() -> None:
    """As where there is no output device: some browsers do not record then either."""
    silent = """AudioContext.prototype.resume = () => Promise.reject(new DOMException("no", "InvalidStateError"));
    const Context = AudioContext;
    window.AudioContext = class extends Context { get state() { return "suspended"; } };"""
    async with live_server() as server, demo_page(settings=HOLD) as demo:
        await demo.page.add_init_script(silent)
        await demo.open(url(server.port))
        await demo.page.locator("#talk").press("Enter")
        await demo.message("does not start the sound")
        await demo.in_state("ready")
        await demo.write("still here")
        assert await demo.answered() == "still here"


async def test_sound_that_stops_while_one_speaks() -> None:
    """As a call does on a phone: it is told, and the turn still has an end."""
    async with live_server() as server, demo_page(settings=HOLD) as demo:
        await demo.open(url(server.port))
        await demo.page.locator("#talk").press("Enter")
        await demo.in_state("hearing")
        await server.until(lambda: server.held_bytes > 0 or server.engine.active_requests > 0, "the first audio")
        await demo.page.evaluate(
            """AudioContext.prototype.resume = () => new Promise(() => {});
            tapped.context.suspend()"""
        )
        await demo.message("silent until you touch it")
        await demo.page.locator("#talk").press("Enter")
        await demo.answered()


async def test_sound_that_is_first_wanted_while_the_server_is_away() -> None:
    engine = ScriptedEngine([TextOutput("la"), AudioOutput(TONE, 24_000)])
    async with (
        live_server(engine) as server,
        tcp_relay(server.port) as relay,
        demo_page(expect_problems=True, settings=HOLD) as demo,
    ):
        await demo.open(url(relay.port))
        relay.refusing = True
        relay.cut()
        await demo.message("Trying again")
        await demo.page.locator("#talk").press("Enter")
        await demo.message("cannot be had from the server")
        await demo.write("sing")
        relay.refusing = False
        await demo.answered("la")
        await demo.until_played(0.9)
        await demo.in_state("ready")


# --- the server


async def test_a_key_is_asked_for() -> None:
    keys = (ApiKey(name="one", key_sha256=digest("secret")),)
    async with live_server(keys=keys) as server, demo_page(expect_problems=True) as demo:
        await demo.open(url(server.port), state="away")
        key = demo.page.locator("#key")
        await key.wait_for()
        await key.fill("wrong")
        await key.press("Enter")
        await demo.page.locator("#key-problem", has_text="not known").wait_for()
        await key.fill("not a token (")
        await key.press("Enter")
        await demo.page.locator("#key-problem", has_text="cannot send").wait_for()
        await key.fill("secret")
        await key.press("Enter")
        await demo.in_state("ready")
        await demo.write("let me in")
        assert await demo.answered() == "let me in"
        await demo.page.reload()
        await demo.in_state("ready")  # the key is kept for this tab


async def test_a_link_brings_the_key() -> None:
    """As that of ``omni-ws serve --lan``; also in a tab that shows the page already. It is not kept in the address."""
    keys = (ApiKey(name="one", key_sha256=digest("se+cret&")),)
    async with live_server(keys=keys) as server, demo_page(expect_problems=True) as demo:
        await demo.open(url(server.port) + "#key=se%2Bcret%26")
        assert await demo.page.evaluate("location.hash") == ""
        await demo.page.evaluate("sessionStorage.clear()")
        await demo.page.reload()
        await demo.page.locator("#key").wait_for()
        await demo.page.evaluate("location.hash = 'key=se%2Bcret%26'")
        await demo.in_state("ready")
        assert await demo.page.evaluate("location.hash") == ""


async def test_the_key_is_asked_for_again() -> None:
    """A question that was closed can be opened again, and what is written until then is kept."""
    keys = (ApiKey(name="one", key_sha256=digest("secret")),)
    async with live_server(keys=keys) as server, demo_page(expect_problems=True) as demo:
        await demo.open(url(server.port), state="away")
        key = demo.page.locator("#key")
        await key.wait_for()
        await key.press("Escape")
        await key.wait_for(state="hidden")
        await demo.message("asks for a key")
        await demo.page.get_by_role("button", name="Enter the key").click()
        await demo.page.get_by_role("button", name="Not now").click()
        await key.wait_for(state="hidden")
        await demo.page.locator("#talk").press("Enter")
        await key.press("Escape")
        await demo.write("kept until then")
        await key.fill("secret")
        await key.press("Enter")
        await demo.in_state("ready")
        assert await demo.answered() == "kept until then"
        assert await demo.page.locator(".turn").count() == 1
        assert await demo.page.locator(".message").count() == 0


async def test_a_server_that_is_starting_is_not_busy() -> None:
    engine = EchoEngine()
    async with live_server(engine) as server, demo_page(expect_problems=True) as demo:
        engine.state = EngineState.STARTING
        await demo.open(url(server.port), state="busy")
        assert await demo.page.locator("#status").inner_text() == "Starting"
        await demo.message("The server is starting.")
        assert await demo.page.locator(".message[data-kind=bad]").count() == 0
        await demo.write("kept until then")
        engine.state = EngineState.OK
        assert await demo.answered() == "kept until then"
        assert await demo.page.locator(".message").count() == 0


async def test_a_server_that_is_full_is_busy() -> None:
    async with live_server(limits={"max_sessions": 1}) as server, demo_page(expect_problems=True) as demo:
        async with connect(server.websocket_url) as other:
            # Without content its session would give way after a while. Its answer shows that the content is there.
            await other.send('{"type": "input_chunk", "sequence_id": 0, "modality": "text", "text": "a"}')
            await server.until(lambda: server.engine.active_requests == 1, "the request")
            await demo.open(url(server.port), state="away")
            await demo.message("The server is busy.")
        await demo.in_state("ready")
        assert await demo.page.locator(".message").count() == 0


async def test_time_without_a_connection_is_no_latency() -> None:
    engine = ScriptedEngine([TextOutput("la"), AudioOutput(TONE, 24_000)])
    async with live_server(engine) as server, tcp_relay(server.port) as relay, demo_page(expect_problems=True) as demo:
        await demo.open(url(relay.port))
        for turn, away in enumerate((False, True, False)):
            if away:
                relay.refusing = True
                relay.cut()
                await demo.message("Trying again")
            await demo.write("sing")
            relay.refusing = False
            await demo.answered("la", turn=turn)
            await demo.until_played(0.95 * (turn + 1))
            await demo.in_state("ready")
            assert ("first sound after" in await demo.note(turn)) is not away


async def test_the_engine_fails() -> None:
    """On the machine of the server the reason is shown: whoever reads it there can do something about it."""
    async with (
        live_server(ScriptedEngine([EngineFailed("the model fell over")]), expect_errors=True) as server,
        demo_page() as demo,
    ):
        await demo.open(url(server.port))
        await demo.write("hello")
        await demo.page.locator(
            ".server[data-state=failed]", has_text="could not work this out: the model fell over"
        ).wait_for()
        await demo.in_state("ready")


async def test_what_a_slow_answer_waits_for_is_said() -> None:
    llm = RetortEngine("fine")
    llm.gate = asyncio.Event()
    async with live_server(ComposedEngine(llm)) as server, demo_page() as demo:
        await demo.open(url(server.port))
        await demo.write("hello")
        await demo.message("Still waiting for the model retort to begin its answer.")
        llm.gate.set()
        await demo.answered("fine")
        await demo.page.locator(".message").wait_for(state="detached")


async def test_pictures_are_not_offered_to_rules() -> None:
    """They take them, and can tell no more than their size and colour."""
    async with live_server(ComposedEngine(RulesEngine())) as server, demo_page() as demo:
        await demo.open(url(server.port))
        for button in ("#image", "#camera", "#screen"):
            assert not await demo.page.locator(button).is_visible()
        cannot = await demo.page.locator("#who-abilities .cannot").all_text_contents()
        assert {"It cannot look at pictures.", "It cannot watch the camera or a screen."} <= set(cannot)


async def test_what_an_engine_cannot_take_is_not_offered() -> None:
    async with (
        live_server(RetortEngine("fine", input_modalities=frozenset({Modality.TEXT}))) as server,
        demo_page() as demo,
    ):
        await demo.open(url(server.port))
        await demo.write("how are you")
        assert await demo.answered() == "fine"
        assert not await demo.page.locator("#image").is_visible()
        assert not await demo.page.locator("#camera").is_visible()
        await demo.open_settings()
        assert not await demo.page.locator("select[name=voice]").is_visible()


async def test_a_server_that_was_restarted_is_asked_again() -> None:
    """It knows nothing any more; the turn that it did not answer is sent to it from its first word."""
    gate = asyncio.Event()
    async with (
        live_server() as second,
        live_server(ScriptedEngine([gate.wait])) as first,
        tcp_relay(first.port) as relay,
        demo_page(expect_problems=True) as demo,
    ):
        await demo.open(url(relay.port))
        await demo.write("are you there")
        await first.until(lambda: first.engine.active_requests == 1)
        relay.target_port = second.port
        relay.cut()
        await demo.message("does not remember what was said before")
        assert await demo.answered() == "are you there"
        await demo.in_state("ready")
        gate.set()


async def test_where_nothing_was_said_nothing_was_forgotten() -> None:
    async with (
        live_server() as second,
        live_server() as first,
        tcp_relay(first.port) as relay,
        demo_page(expect_problems=True) as demo,
    ):
        await demo.open(url(relay.port))
        trip = demo.page.locator("#round-trip")
        await trip.wait_for()
        relay.target_port = second.port
        relay.refusing = True
        relay.cut()
        await demo.message("Trying again")
        assert not await trip.is_visible()  # it would be that of a connection that is no more
        relay.refusing = False
        await demo.in_state("ready")
        await demo.write("hello")
        await demo.answered("hello")
        assert not await demo.page.locator(".message", has_text="does not remember").is_visible()
        await trip.wait_for()


async def test_no_server_for_a_while() -> None:
    page = demo_page(expect_problems=True, own_context=True)
    async with live_server() as server, tcp_relay(server.port) as relay, page as demo:
        await demo.open(url(relay.port))
        await demo.page.clock.install()
        relay.refusing = True
        relay.cut()
        await demo.message("Trying again")
        # The clock of the page stands still: nothing but the button makes it try again.
        await demo.page.clock.pause_at(datetime.now(UTC) + timedelta(minutes=1))
        await demo.in_state("away")
        await demo.write("kept until then")
        relay.refusing = False
        relay.hold()
        refused = relay.accepted
        await demo.page.get_by_role("button", name="Try now").click()
        await server.until(lambda: relay.accepted > refused, "the next try")
        assert await demo.page.locator("#status").inner_text() == "Reconnecting"
        relay.let_go()
        # Where the button came in the middle of a try, which writing makes too, the next one is for the clock.
        await demo.page.clock.resume()
        assert await demo.answered() == "kept until then"


async def test_a_connection_that_is_dead_is_made_again() -> None:
    """A network that says nothing: what a tab finds that was asleep, and a phone that changed its network."""
    page = demo_page(expect_problems=True, own_context=True)
    async with live_server() as server, tcp_relay(server.port) as relay, page as demo:
        await demo.page.clock.install()
        await demo.open(url(relay.port))
        relay.hold()
        await demo.page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
        await demo.page.clock.run_for(60_000)
        await demo.in_state("away")
        relay.cut()
        relay.let_go()
        await demo.page.clock.run_for(60_000)
        await demo.in_state("ready")
        await demo.write("awake again")
        assert await demo.answered() == "awake again"


async def test_a_slow_network_is_told() -> None:
    """Nothing gets through while someone talks: first that is said, then nothing more is recorded."""
    slow = """Object.defineProperty(WebSocket.prototype, "bufferedAmount", { get: () => window.behind ?? 0 });"""
    async with live_server() as server, demo_page(settings=HOLD) as demo:
        await demo.page.add_init_script(slow)
        await demo.open(url(server.port))
        await demo.page.locator("#talk").press("Enter")
        await demo.in_state("hearing")
        second = 2 * 48_000
        await demo.page.evaluate(f"window.behind = {4 * second}")
        await demo.message("arrives late")
        await demo.page.evaluate(f"window.behind = {40 * second}")
        await demo.message("is not sent")
        await demo.answered()  # the turn ended there
        await demo.page.evaluate("window.behind = 0")
        await demo.page.locator("#talk").press("Enter")
        await demo.page.locator(".message[data-name=network]").wait_for(state="detached")
        await demo.page.locator("#talk").press("Enter")


async def test_a_field_that_the_server_refuses_harms_no_other() -> None:
    """Settings of another server, remembered by the browser."""
    settings = {"model": "gone", "instructions": "Be brief."}
    async with live_server() as server, demo_page(settings=settings) as demo:
        await demo.open(url(server.port))
        await demo.message("does not have this model")
        await demo.write("all the same")
        assert await demo.answered() == "all the same"


async def test_an_answer_that_never_comes_is_stopped_by_the_person() -> None:
    engine = EchoEngine(EchoSettings(first_chunk_delay_ms=60_000))
    async with live_server(engine) as server, demo_page() as demo:
        await demo.open(url(server.port))
        await demo.write("hello")
        await demo.in_state("busy")
        await demo.page.locator("#stop").click()
        await demo.page.locator(".server[data-state=stopped]").wait_for()
        await demo.in_state("ready")


async def test_a_session_that_was_deleted_is_told() -> None:
    async with live_server() as server, demo_page() as demo:
        await demo.open(url(server.port))
        await demo.write("hello")
        await demo.answered("hello")
        (living,) = server.native._live._living.values()
        await server.native._live.end(living.session, deleted=True)
        await demo.message("This conversation was deleted.")
        await demo.page.get_by_role("button", name="Begin anew here").click()
        await demo.write("and now")
        await demo.answered("and now", turn=1)


async def test_a_session_that_ends_closes_the_microphone() -> None:
    tracks = """window.tracks = [];
    const ask = navigator.mediaDevices.getUserMedia.bind(navigator.mediaDevices);
    navigator.mediaDevices.getUserMedia = async (wanted) => {
      const stream = await ask(wanted);
      tracks.push(...stream.getTracks());
      return stream;
    };"""
    async with live_server() as server, demo_page() as demo:
        await demo.page.add_init_script(tracks)
        await demo.open(url(server.port))
        await demo.page.locator("#talk").click()
        await demo.in_state("listening")
        (living,) = server.native._live._living.values()
        await server.native._live.end(living.session, deleted=True)
        await demo.message("This conversation was deleted.")
        assert await demo.page.evaluate("tracks.map((track) => track.readyState)") == ["ended"]
        # The button begins anew, and is not the end of what has ended.
        await demo.page.locator("#talk").click()
        await demo.in_state("listening")
        assert await demo.page.evaluate("tracks.map((track) => track.readyState)") == ["ended", "live"]
