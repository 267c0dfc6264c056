"""The golden vectors of the wire in a browser, read and written by the client's own modules."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

VECTORS: Final = Path(__file__).parents[2] / "protocol" / "vectors"

#: Calls a function of JavaScript with an argument in the page, and returns what it returned.
Evaluate = Callable[[str, Any], Awaitable[Any]]

_BINARY: Final = """async (vectors) => {
  const { decodeOutput, encodeInput } = await import("/client/frames.js");
  const bytes = (hex) => Uint8Array.from(hex.match(/../g) ?? [], (pair) => parseInt(pair, 16));
  const hex = (array) => Array.from(array, (byte) => byte.toString(16).padStart(2, "0")).join("");
  const tryTo = (action) => { try { return action(); } catch (error) { return { error: error.code }; } };
  return vectors.map(({ direction, hex: given, expect }) => direction === "output"
    ? tryTo(() => {
        const { sequenceId, modality, startMs, payload } = decodeOutput(bytes(given).buffer);
        return { sequence_id: sequenceId, modality, start_ms: startMs, payload_hex: hex(payload) };
      })
    : expect.payload_hex === undefined ? null : hex(encodeInput({
        sequenceId: expect.sequence_id, modality: expect.modality, payload: bytes(expect.payload_hex),
        endOfInput: expect.end_of_input, timestampMs: expect.timestamp_ms,
      })));
}"""
_TEXT: Final = "async (frames) => frames.map((await import('/client/frames.js')).parseFrame)"
_REFUSED: Final = """async (texts) => {
  const { parseFrame } = await import("/client/frames.js");
  return texts.map((text) => { try { return parseFrame(text); } catch (error) { return error.code; } });
}"""


async def check_binary_frames(evaluate: Evaluate) -> None:
    found = await evaluate(_BINARY, vectors("binary_frames"))
    checked = {"input": 0, "output": 0}
    for vector, got in zip(vectors("binary_frames"), found, strict=True):
        if vector["direction"] == "input":
            if got is None or vector.get("canonical") is False:
                continue  # a refusal: the page never writes such a frame
            assert got == vector["hex"], vector["name"]
        elif "error" in vector["expect"]:
            assert got == {"error": vector["expect"]["error"]}, vector["name"]
        else:
            assert got.pop("modality") == vector["expect"].get("modality", "audio")
            wanted = {name: vector["expect"][name] for name in ("sequence_id", "start_ms", "payload_hex")}
            assert got == wanted, vector["name"]
        checked[vector["direction"]] += 1
    assert checked["input"] > 5
    assert checked["output"] > 1


async def check_text_frames(evaluate: Evaluate) -> None:
    """All that a server may say can be read, and what is no frame is refused."""
    frames = [vector["frame"] for vector in vectors("server_frames")]
    assert await evaluate(_TEXT, frames) == [json.loads(frame) for frame in frames]
    assert await evaluate(_REFUSED, ["", "{", "null", "[]", "1", "{}", '{"type": 1}']) == ["invalid_frame"] * 7


def vectors(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (VECTORS / f"{name}.jsonl").read_text().splitlines()]
