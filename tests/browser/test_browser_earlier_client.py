"""A page with the client library of an earlier version, on the server of today."""

from __future__ import annotations

import tarfile
from pathlib import Path

import numpy as np
from support.chromium import IN_BROWSER, TAP_PROCESSOR, demo_page
from support.file_server import page_server
from support.live_server import live_server
from support.scripted_engines import HearingEngine
from support.speech_clips import clip_bytes

from omni_ws.engine.base import AudioOutput, TextOutput, TranscriptOutput

pytestmark = IN_BROWSER

PACKAGE = Path(__file__).parents[1] / "data" / "omni-ws-before-ducking.tgz"
PAGE = """<!doctype html><title>Earlier</title><link rel="icon" href="data:,">
<body data-state="away"><button id="talk">Talk</button>
<script type="module">
import { VoiceClient } from "./package/client.js";
const client = (window.client = new VoiceClient({ url: new URLSearchParams(location.search).get("server") }));
client.addEventListener("change", () => (document.body.dataset.state = client.state));
document.getElementById("talk").onclick = () => client.listen();
client.open();
</script>"""
TURNS = """client.conversation.turns.filter(({ dropped }) => !dropped)
  .map(({ user, answer }) => [user.text, answer.text, answer.state])"""


def pieces(first: int, count: int) -> list[AudioOutput]:
    """100 ms each, and each of a level of its own, in percent."""
    return [AudioOutput(np.full(2400, level / 100, np.float32), 24_000) for level in range(first, first + count)]


async def test_it_loses_no_word_to_an_acknowledgement_and_plays_no_rest_of_what_is_interrupted(tmp_path: Path) -> None:
    with tarfile.open(PACKAGE) as package:
        # The argument ``filter`` is of Python 3.11.4.
        package.extraction_filter = getattr(tarfile, "data_filter", lambda member, _: member)
        package.extractall(tmp_path)
    with (tmp_path / "package" / "client" / "playback-worklet.js").open("a") as worklet:
        worklet.write(TAP_PROCESSOR)
    (tmp_path / "index.html").write_text(PAGE)
    long, other = pieces(1, 60), pieces(80, 10)
    engine = HearingEngine([TextOutput("A long answer."), *long])
    engine.heard = (TranscriptOutput("Yeah."), TextOutput("Yes?"), *other)
    with page_server(tmp_path) as site:
        async with live_server(engine, allow_origin=(site.origin,)) as server, demo_page() as demo:
            await demo.open(f"{site.origin}/?server=http://127.0.0.1:{server.port}/", state="ready")
            await demo.page.locator("#talk").click()
            await demo.in_state("listening")
            await demo.page.evaluate("void client.write('Talk to me.')")
            await demo.until_played(0.3)
            await demo.say(clip_bytes("cards_001"))
            await demo.until("() => client.conversation.turns[0].answer.state === 'held'")
            await demo.until(
                "() => client.conversation.turns[0].answer.state === 'done' && client.state === 'listening'"
            )
            whole = (await demo.played()).samples
            assert (await demo.page.evaluate(TURNS))[0] == ["Talk to me.", "A long answer.", "done"]

            engine.heard = (TranscriptOutput("Go forward."), TextOutput("I go."), *other)
            await demo.page.evaluate("tapped.pieces.length = 0; void client.write('Again.')")
            await demo.until_played(0.3)
            await demo.say(clip_bytes("goforward"))
            await demo.until("() => client.conversation.turns.at(-1).answer.state === 'done'")
            await demo.in_state("listening")
            cut = (await demo.played()).samples
            turns = await demo.page.evaluate(TURNS)
            assert await demo.page.evaluate("client.conversation.turns.every(({ answer }) => answer.state !== 'held')")
            await demo.page.evaluate("client.close()")

    def seconds_at(samples: np.ndarray, percent: int) -> float:
        return float(np.count_nonzero(np.abs(samples - percent / 100) < 0.002)) / 16_000

    assert all(seconds_at(whole, level) > 0.08 for level in range(1, 61))  # every piece of it, once it goes on
    assert not any(seconds_at(whole, level) for level in range(80, 90))
    assert turns[-2:] == [["Again.", "A long answer.", "stopped"], ["Go forward.", "I go.", "done"]]
    heard = [level for level in range(1, 61) if seconds_at(cut, level) > 0.02]
    assert heard
    assert heard == list(range(1, len(heard) + 1))  # its beginning, and nothing behind that
    assert len(heard) < 60
    assert all(seconds_at(cut, level) > 0.08 for level in range(80, 90))  # all of the next answer
