"""The agent of docs/tutorial.md, as a reader makes it: a page of another origin, whose functions a model calls."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from support.chromium import IN_BROWSER, demo_page
from support.document_blocks import ROOT, blocks
from support.embedded_engine import ears
from support.file_server import page_server
from support.live_server import live_server
from support.scripted_engines import PlayingEngine, ReadingEngine
from support.speech_clips import WORDS, clip_bytes

from omni_ws.core.chunks import FinishReason, InputChunk, Modality, OutputModality, Task, ToolCallFragment, Usage
from omni_ws.engine.base import Finished, GenerationRequest, TextOutput, ToolCallOutput
from omni_ws.engine.composed.engine import ComposedEngine

pytestmark = IN_BROWSER

SPOKEN = "goforward"
WRITTEN = "Put milk on the shopping list"


class House(PlayingEngine):
    """An LLM that calls a tool for each of two requests, and reads the result out."""

    def __init__(self) -> None:
        super().__init__(
            input_modalities=frozenset({Modality.TEXT}),
            output_modalities=frozenset({OutputModality.TEXT}),
            tasks=frozenset({Task.CHAT}),
            tools=True,
        )
        self.tools: list[dict[str, Any]] = []

    def steps(self, request: GenerationRequest, taken: list[InputChunk]) -> Iterable[Any]:
        self.tools = [dict(tool) for tool in request.tools]
        said = b"".join(chunk.payload for chunk in taken).decode()
        if any(chunk.tool_call_id for chunk in taken):
            return [TextOutput(said)]
        name, given = (
            ("set_light", {"room": "kitchen", "state": "on"})
            if WORDS[SPOKEN] in said
            else ("add_to_list", {"item": "milk"})
        )
        call = ToolCallFragment(0, id=f"call_{len(self.inputs)}", name=name, arguments=json.dumps(given))
        return [ToolCallOutput(call), Finished(FinishReason.TOOL_CALLS, Usage())]


async def test_the_agent_of_the_tutorial_does_what_it_is_told(tmp_path: Path) -> None:
    (page,) = [block.text for block in blocks(ROOT / "docs" / "tutorial.md") if block.language == "html"]
    (tmp_path / "favicon.ico").write_bytes(b"")
    llm = House()
    with page_server(tmp_path) as site:
        async with (
            live_server(
                ComposedEngine(llm, asr=ears(), tts=ReadingEngine()), still_answers=False, allow_origin=(site.origin,)
            ) as server,
            demo_page() as demo,
        ):
            (tmp_path / "agent.html").write_text(page.replace("127.0.0.1:8080", f"127.0.0.1:{server.port}"))
            await demo.page.goto(f"{site.origin}/agent.html")
            await demo.page.locator("#talk").click()
            await demo.page.locator("#state", has_text="listening").wait_for()
            await demo.say(clip_bytes(SPOKEN))
            await demo.page.locator("#lights", has_text="kitchen").wait_for()
            await demo.page.locator("#log", has_text="The light in the kitchen is on.").wait_for()
            await demo.page.locator("#text").fill(WRITTEN)
            await demo.page.locator("#text").press("Enter")
            await demo.page.locator("#list", has_text="milk").wait_for()
            await demo.page.locator("#log", has_text="On the list: milk.").wait_for()
            log = await demo.page.locator("#log").inner_text()
            await demo.page.close()
    assert WORDS[SPOKEN] in log
    assert [tool["function"]["name"] for tool in llm.tools] == ["set_light", "add_to_list"]
