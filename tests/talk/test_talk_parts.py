"""How `omni-ws talk` tells who works on the server."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from support.live_server import live_server

from omni_ws.client import connect
from omni_ws.talk.display import sentence
from omni_ws.wire.server_frames import Part, Parts

WHISPER, RULES = Part(name="whisper", model="tiny.en"), Part(name="rules", model="rules")
HIBARI, GEMMA = Part(name="hibari", model="heart"), Part(name="remote", model="gemma3:latest")


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        (Parts(asr=WHISPER, llm=RULES, tts=HIBARI), "heard by whisper, answered by rules, spoken by hibari"),
        (Parts(asr=WHISPER, llm=GEMMA, tts=HIBARI), "heard by whisper, answered by gemma3:latest, spoken by hibari"),
        # What has no part of its own the model does itself: the server of this test hears and speaks.
        (Parts(llm=GEMMA), "heard and answered and spoken by gemma3:latest"),
        (
            Parts(asr=Part(name="remote", model="whisper-1"), llm=GEMMA, tts=Part(name="remote", model="kokoro")),
            "heard by whisper-1, answered by gemma3:latest, spoken by kokoro",
        ),
        (Parts(), ""),
    ],
)
async def test_parts_are_named_as_people_know_them(parts: Parts, said: str) -> None:
    async with live_server() as server, connect(server.websocket_url) as session:
        assert sentence(replace(session.created, parts=parts)) == said


async def test_a_model_that_neither_hears_nor_speaks_is_not_said_to() -> None:
    async with live_server() as server, connect(server.websocket_url) as session:
        can = replace(session.created.capabilities, input_modalities=["text"], output_modalities=["text"])
        created = replace(session.created, parts=Parts(llm=RULES), capabilities=can)
        assert sentence(created) == "answered by rules"
