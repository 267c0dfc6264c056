"""ReadAloud: takes the Thinker's place when the task is to read the input aloud."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from omni_ws.core.chunks import Task
from omni_ws.engine.base import EngineOutput
from omni_ws.engine.channel import Channel
from omni_ws.engine.decoded_parts import DecodedPart, TextPart
from omni_ws.errors import UnsupportedModality


class ReadAloud:
    """A Stage: text of the input in, the same text to the Talker.

    Parts are separated by newlines, which end sentences.
    """

    name = "read aloud"

    async def run(
        self, source: AsyncIterator[DecodedPart], sink: Channel[Any] | None, outputs: Channel[EngineOutput]
    ) -> None:
        """Pass text on. Raises UnsupportedModality for other input."""
        assert sink is not None, "this stage requires a Talker after it"
        last: int | None = None
        async for decoded in source:
            if not isinstance(decoded, TextPart):
                raise UnsupportedModality(f"task {Task.SPEECH} accepts only text", param="modality")
            await sink.put(decoded.text if last in (None, decoded.part) else f"\n{decoded.text}")
            last = decoded.part
