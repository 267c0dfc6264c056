"""The page by WebRTC: the same conversation as over the WebSocket, by a call of the Realtime API."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio
from support.chromium import IN_BROWSER, DemoPage, demo_page
from support.embedded_engine import EmbeddedEngine
from support.live_server import LiveServer, live_server
from support.realtime_client import realtime_client, text_of
from support.scripted_engines import HearingEngine, ReadingEngine, ToolCallingEngine
from support.speech_clips import WORDS, clip_bytes

from omni_ws.config.keys import ApiKey, digest
from omni_ws.config.model import VoiceChoice
from omni_ws.engine.base import TextOutput
from omni_ws.engine.composed.engine import ComposedEngine
from omni_ws.scenarios.speech import word_errors

if TYPE_CHECKING:
    from playwright.async_api import Route

pytestmark = IN_BROWSER

CALL = {"connection": "webrtc"}
FORWARD = WORDS["goforward"]
TO_FORWARD = "I can't move. I'm only a voice."


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def started() -> AsyncIterator[LiveServer]:
    async with live_server(EmbeddedEngine(voice=VoiceChoice.ESPEAK)) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="session")
async def server(started: LiveServer) -> AsyncIterator[LiveServer]:
    """The running server; afterwards nothing of a test may be left in it."""
    yield started
    await started.check_empty()


def url(server: LiveServer) -> str:
    return f"http://127.0.0.1:{server.port}/"


@asynccontextmanager
async def calling_page(
    server: LiveServer, settings: Mapping[str, Any] = CALL, **options: Any
) -> AsyncIterator[DemoPage]:
    """The page with a call that is open. In the end the person goes to another page, which ends the call."""
    async with demo_page(settings=settings, **options) as demo:
        await demo.open(url(server))
        assert await connected_by(demo) == "WebRTC"
        yield demo
        await demo.page.goto(url(server) + "health")


async def connected_by(demo: DemoPage) -> str:
    return await demo.page.locator("#figure-connection").text_content() or ""


async def choose_call(demo: DemoPage, server: LiveServer) -> None:
    """As if it had been chosen earlier; the page can still choose otherwise."""
    await demo.open(url(server))
    await demo.page.evaluate("localStorage.setItem('omni_ws.settings', JSON.stringify({ connection: 'webrtc' }))")
    await demo.page.reload()


async def test_a_spoken_turn(server: LiveServer) -> None:
    async with calling_page(server) as demo:
        await demo.page.locator("#talk").click()
        await demo.say(clip_bytes("goforward"))
        await demo.heard(FORWARD, turn=0)
        await demo.answered(TO_FORWARD, turn=0)
        await demo.until_played(1.5)
        await demo.in_state("listening")
        note = await demo.note(turn=0)
        played = await demo.played()
        await demo.page.locator("#talk").click()
        await demo.in_state("ready")
        assert await demo.page.locator(".turn").count() == 1
    assert re.search(r"first sound after \S", note), note
    assert played.seconds > 1.5
    assert played.level > 0.01


async def test_the_level_in_the_settings_is_not_sent(server: LiveServer) -> None:
    async with calling_page(server, CALL | {"mode": "open"}) as demo:
        await demo.open_settings()
        await demo.say(clip_bytes("goforward"))
        await demo.until("() => document.querySelector('#input-level').value > 0.1")
        await demo.said()
        assert await demo.page.locator(".turn").count() == 0
        await demo.page.locator("#close-settings").click()
        await demo.page.locator("#talk").click()
        await demo.say(clip_bytes("goforward"))
        await demo.heard(FORWARD, turn=0)


async def test_speech_interrupts_an_answer(server: LiveServer) -> None:
    async with calling_page(server) as demo:
        await demo.interrupt_by_speech(clip_bytes("goforward"), FORWARD, TO_FORWARD)


async def test_a_button_that_is_held(server: LiveServer) -> None:
    async with calling_page(server, CALL | {"mode": "hold"}) as demo:
        await demo.page.keyboard.down("Space")
        await demo.in_state("hearing")
        await demo.say(clip_bytes("goforward"))
        await demo.said()
        await demo.page.keyboard.up("Space")
        await demo.heard(FORWARD)
        assert await demo.answered() == TO_FORWARD
        await demo.in_state("ready")
        await demo.page.keyboard.press("Space")  # a tap, and another one: nothing was said
        await demo.in_state("hearing")
        await demo.page.keyboard.press("Space")
        await demo.page.locator(".turn").nth(1).locator(".server:not([data-state=thinking])").wait_for()


async def test_what_was_written_is_stopped_and_changed(server: LiveServer) -> None:
    async with calling_page(server) as demo:
        await demo.write("Count to twenty.")
        await demo.in_state("speaking")
        await demo.until_played(0.3)  # what is stopped before it is heard is answered together with what follows
        await demo.page.keyboard.press("Escape")
        await demo.answered(state="stopped")
        await server.until(lambda: server.engine.active_requests == 0, "the engine to stop")
        await demo.write("What is three plus four?")
        assert await demo.answered() == "That makes 7."
        await demo.change_first_question("What is three plus five?")
        assert await demo.answered() == "That makes 8."
        assert await demo.page.locator(".turn").count() == 1
        assert await demo.page.locator(".message").count() == 0
        await demo.page.locator("#new").click()
        await demo.page.locator("#welcome").wait_for()
        await demo.in_state("ready")
        assert await demo.page.locator(".message").count() == 0


async def test_a_model_uses_the_tool_of_the_page() -> None:
    llm = ToolCallingEngine()
    engine = ComposedEngine(llm, tts=ReadingEngine())
    async with live_server(engine, still_answers=False) as server, calling_page(server) as demo:
        await demo.write("What time is it?")
        assert re.fullmatch(r"It is .+ at .+ \(.+\)\.", await demo.answered(turn=1))
        assert "used local_time" in await demo.page.locator(".turn").nth(0).locator(".note").inner_text()


async def test_a_sideband_sees_the_call_and_asks_for_an_answer(server: LiveServer) -> None:
    async with demo_page(settings=CALL) as demo:
        async with demo.page.expect_response("**/v1/realtime/calls") as answered:
            await demo.open(url(server))
        call_id = (await answered.value).headers["location"].rpartition("/")[2]
        async with realtime_client(server, query=f"call_id={call_id}") as sideband:
            await demo.page.locator("#talk").click()
            await demo.say(clip_bytes("goforward"))
            heard = await sideband.until("conversation.item.input_audio_transcription.completed")
            assert word_errors(FORWARD, heard["transcript"].strip()).wrong <= 1
            assert text_of(await sideband.response()) == TO_FORWARD
            await sideband.until("output_audio_buffer.stopped")
            before = (await demo.played()).seconds
            await sideband.say("What is three plus four?")
            await sideband.send("response.create")
            assert text_of(await sideband.response()) == "That makes 7."
            await sideband.until("output_audio_buffer.stopped")
            await demo.in_state("listening")
            assert (await demo.played()).seconds > before + 0.5
        await demo.page.goto(url(server) + "health")


async def test_a_call_that_ends_is_made_again(server: LiveServer) -> None:
    async with demo_page(settings=CALL) as demo:
        async with demo.page.expect_response("**/v1/realtime/calls") as answered:
            await demo.open(url(server))
        call = (await answered.value).headers["location"]
        await demo.write("What is three plus four?")
        assert await demo.answered() == "That makes 7."
        assert (await demo.page.request.post(f"{url(server).rstrip('/')}{call}/hangup")).ok
        await demo.message("A new session began")
        await demo.in_state("ready")
        await demo.write("What is three plus five?")
        assert await demo.answered() == "That makes 8."
        await demo.page.goto(url(server) + "health")


async def test_a_server_that_wants_a_key() -> None:
    keys = (ApiKey(name="one", key_sha256=digest("secret")),)
    async with live_server(keys=keys) as server, demo_page(settings=CALL) as demo:
        await demo.open(url(server) + "#key=secret")
        assert await connected_by(demo) == "WebRTC"
        await demo.write("Hello")
        assert await demo.answered() == "Hello"
        await demo.page.goto(url(server) + "health")


#: How long the page waits for the first packet (SETUP_MS in call.js).
SETUP_MS = 15_000


async def test_a_network_without_udp(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omni_ws.transport.webrtc.call.SETUP_TIMEOUT_SEC", 1.0)  # of 30: how long the session stays

    async def without_ways(route: Route) -> None:
        answer = await route.fetch()
        await route.fulfill(response=answer, body=re.sub(r"a=candidate.*\r\n", "", await answer.text()))

    async with demo_page(own_context=True) as demo:
        await demo.page.route("**/v1/realtime/calls", without_ways)
        await demo.page.clock.install()
        async with demo.page.expect_response("**/v1/realtime/calls"):
            await choose_call(demo, server)
        await demo.page.clock.fast_forward(SETUP_MS)
        await demo.message("No packets get through by WebRTC. Choose the WebSocket in the settings. Trying again.")
        await demo.open_settings()
        await demo.page.locator("select[name=connection]").select_option("websocket")
        await demo.in_state("ready")
        assert await connected_by(demo) == "WebSocket"


async def test_a_call_that_is_refused_for_a_while(server: LiveServer) -> None:
    """The page calls again when the server has said, and not before: by its clock, which stands still else."""
    asked = 0

    async def busy_once(route: Route) -> None:
        nonlocal asked
        asked += 1
        error = {"error": {"code": "engine_overloaded", "message": "all seats are taken", "type": "server_error"}}
        if asked > 1:
            await route.continue_()
        else:
            await route.fulfill(status=503, headers={"Retry-After": "2"}, json=error)

    # A try begins with a WebSocket, by which the page finds out what the server can do.
    tries = """window.tries = [];
      window.WebSocket = class extends WebSocket {
        constructor(...given) { super(...given); tries.push(Date.now()); }
      };"""
    async with demo_page(expect_problems=True, own_context=True) as demo:
        await demo.page.add_init_script(tries)
        await demo.page.route("**/v1/realtime/calls", busy_once)
        await demo.page.clock.install()
        await demo.page.clock.pause_at(datetime.now(UTC) + timedelta(minutes=1))
        await choose_call(demo, server)
        await demo.message("Trying again")
        await demo.page.clock.run_for(2000)
        await demo.in_state("ready")
        assert await connected_by(demo) == "WebRTC"
        first, second = await demo.page.evaluate("tries")
        assert second - first == 2000
        await demo.page.goto(url(server) + "health")
    assert asked == 2


async def test_the_page_keeps_nothing_of_a_call_that_was_closed(server: LiveServer) -> None:
    """A page may make many, each with the sound of its conversation."""
    async with demo_page() as demo:
        await demo.open(url(server))
        kept = await demo.page.evaluate(
            """async () => {
              const { VoiceCall } = await import("/client/call.js");
              const kept = new Set();
              const { addEventListener: add, removeEventListener: remove } = window;
              window.addEventListener = (name, listener, ...rest) => {
                if (name === "pagehide") kept.add(listener);
                add.call(window, name, listener, ...rest);
              };
              window.removeEventListener = (name, listener, ...rest) => {
                if (name === "pagehide") kept.delete(listener);
                remove.call(window, name, listener, ...rest);
              };
              const call = new VoiceCall({ url: document.baseURI });
              const counts = [kept.size];
              for (const step of ["open", "close", "open", "startAnew", "close"]) {
                call[step]();
                counts.push(kept.size);
              }
              return counts;
            }"""
        )
    assert kept == [0, 1, 0, 1, 1, 0]


async def test_a_call_in_which_nothing_happens() -> None:
    limits = {"session_timeout_sec": 1}
    async with live_server(streaming_input=limits) as server, demo_page(settings=CALL) as demo:
        await demo.page.goto(url(server))
        await demo.message("The server closed the conversation, because nothing happened for long.")


async def test_the_way_is_chosen_in_the_settings(server: LiveServer) -> None:
    async with demo_page() as demo:
        await demo.open(url(server))
        assert await connected_by(demo) == "WebSocket"
        await demo.open_settings()
        await demo.page.locator("select[name=connection]").select_option("webrtc")
        await demo.page.locator("#figure-connection", has_text="WebRTC").wait_for(state="attached")
        await demo.in_state("ready")
        await demo.page.goto(url(server) + "health")


async def test_a_server_that_takes_no_calls() -> None:
    async with live_server(webrtc={"enabled": False}) as server, demo_page() as demo:
        await choose_call(demo, server)
        await demo.in_state("ready")
        assert await connected_by(demo) == "WebSocket"
        await demo.open_settings()
        assert not await demo.page.locator("select[name=connection]").is_visible()


async def test_words_to_expect_are_told_in_a_call() -> None:
    engine = HearingEngine([TextOutput("yes")], heard=[TextOutput("yes")], keywords=True, lexicon=True)
    async with live_server(engine) as running:
        settings = CALL | {"keywords": "Siobhan Ng\nZyntrix", "lexicon": "nginx = engine x"}
        async with calling_page(running, settings) as demo:
            await demo.open_settings()
            assert await demo.page.get_by_label("Words to expect").is_visible()
            assert not await demo.page.get_by_label("How to say words").is_visible()  # calls have no place for it
            await demo.page.locator("#close-settings").click()
            await demo.write("hello")
            await demo.answered("yes")
        assert [request.expected for request in engine.requests] == ["Siobhan Ng, Zyntrix."]
