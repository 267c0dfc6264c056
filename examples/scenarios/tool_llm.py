"""A scripted model for tools.yaml: it calls a tool by the words of the question, and says what the tool said.

A server of OpenAI's /v1/chat/completions on loopback, made of the standard library. ``python tool_llm.py [PORT]``
(8791); ends with its terminal, or by a signal.
"""

from __future__ import annotations

import json
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PORT = 8791
_CITY = re.compile(r"\bin ([A-Z]\w+)")
_DAY = re.compile(r"\bon (\w+day)", re.IGNORECASE)
_FIXED = {"finish_reason": None}


def _text(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else " ".join(part.get("text", "") for part in content)


def answered(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The choices that are streamed, one after the other."""
    said = _text(messages[-1])
    if messages[-1]["role"] == "tool":
        pieces = [f"{word} " for word in f"It says {said}.".split()]
    elif tools and "weather" in said.lower():
        city, day = _CITY.search(said), _DAY.search(said)
        arguments = {"city": city[1] if city else "", **({"day": day[1].capitalize()} if day else {})}
        call = {"index": 0, "id": f"call_{len(messages)}", "type": "function"}
        function = {"name": "weather", "arguments": json.dumps(arguments)}
        # The arguments come in two pieces, as models stream them.
        first, rest = function["arguments"][:5], function["arguments"][5:]
        return [
            {
                **_FIXED,
                "delta": {"role": "assistant", "tool_calls": [{**call, "function": {**function, "arguments": first}}]},
            },
            {**_FIXED, "delta": {"tool_calls": [{"index": 0, "function": {"arguments": rest}}]}},
            {"delta": {}, "finish_reason": "tool_calls"},
        ]
    else:
        pieces = ["Ask ", "me ", "for ", "the ", "weather."]
    return [
        *({**_FIXED, "delta": {"content": piece}} for piece in pieces),
        {"delta": {}, "finish_reason": "stop"},
    ]


class Handler(BaseHTTPRequestHandler):
    """One request: the list of models, or a chat, streamed or whole."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._respond({"object": "list", "data": [{"id": "scripted", "object": "model", "owned_by": "scenarios"}]})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        choices = answered(asked["messages"], asked.get("tools") or [])
        chunks = [
            {"id": "c", "object": "chat.completion.chunk", "model": "scripted", "choices": [{"index": 0, **choice}]}
            for choice in choices
        ]
        events = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
        self._respond(events.encode(), "text/event-stream")

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is logged."""

    def _respond(self, body: Any, kind: str = "application/json") -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1]) if len(sys.argv) > 1 else PORT), Handler).serve_forever()
