"""The programs in docs/guides do what they say, with the frameworks that they are for."""

from __future__ import annotations

import pytest
from support.document_blocks import ROOT, blocks
from support.embedded_engine import EmbeddedEngine
from support.live_server import live_server
from support.outside import run_outside, tool
from support.voices import need

from omni_ws.config.model import VoiceChoice

pytestmark = [pytest.mark.slow]


@pytest.mark.parametrize("guide", ["pipecat.md", "livekit.md"])
async def test_a_framework_asks_and_is_answered(guide: str) -> None:
    python = tool("OUTSIDE_PYTHON")
    (program,) = [
        block.text for block in blocks(ROOT / "docs" / "guides" / guide) if block.marker.endswith("test_guides.py")
    ]
    async with live_server(EmbeddedEngine(voice=need(VoiceChoice.ESPEAK))) as server:
        output = await run_outside(python, "-c", program.replace("127.0.0.1:8080", f"127.0.0.1:{server.port}"))
    assert "That makes 7." in output
    assert float(output.rpartition("s of sound")[0].split()[-1]) > 0.5
