"""A language model by URL for calls over the Live API: what it says follows from what it is asked, and nothing else.

It knows the recordings of the tests. ``go forward ten meters`` is a question; ``eight of spades …`` a task, which it
delegates; ``ten of clubs`` asks for a story at first, and is a question from then on. What it is to tell it tells in
words of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from support.scripted_upstream import Answer, ScriptedUpstream, delta, finish, says, streams, text_of

from omni_ws.transport.http.exchange import HttpExchange

GREETING: Final = "Good morning, Ann."
TO_QUESTION: Final = "I am only a voice."
ACKNOWLEDGEMENT: Final = "One moment."
TO_OTHER: Final = "Clubs it is."
#: What the application finds out, by whichever way, and what is made of it.
RESULT: Final = "The parcel is in Lisbon."
TOLD: Final = "Your parcel has come to Lisbon."
STORY: Final = (
    "Once upon a time there was a king. ",
    "The king had a daughter who loved the sea. ",
    "Every morning she walked along the shore. ",
    "One day she found a bottle with a letter. ",
    "The letter came from an island far away. ",
    "So she built a ship and sailed there. ",
)


@dataclass
class LiveMind(ScriptedUpstream):
    """One for all callers. It remembers nothing but its requests."""

    def __post_init__(self) -> None:
        self.chat = [self._decide]

    async def _decide(self, exchange: HttpExchange) -> None:
        request = self.requests[-1]
        await (await self._answer_to(request))(exchange)

    async def _answer_to(self, request: dict[str, Any]) -> Answer:
        messages = request["messages"]
        tools = [tool["function"]["name"] for tool in request.get("tools", ())]
        system = " ".join(text_of(one) for one in messages if one["role"] in ("system", "developer"))
        if "backend of a voice assistant" in system:
            return says(f">> {RESULT}")
        if "find_parcel" in tools:
            found = any(one["role"] == "tool" and RESULT in text_of(one) for one in messages)
            return says(RESULT) if found else calls("find_parcel")
        last = text_of(messages[-1])
        if RESULT in last:
            return says(TOLD)
        if "the name Ann" in last:
            return says(GREETING)
        if "spades" in last:
            return calls(*tools, text=ACKNOWLEDGEMENT) if tools else says("I cannot look it up.")
        if "ten of clubs" in last:
            earlier = " ".join(text_of(one) for one in messages[:-1] if one["role"] == "user")
            return says(TO_OTHER) if "ten of clubs" in earlier else says(*STORY)
        return says(TO_QUESTION)


def calls(name: str, *, text: str = "") -> Answer:
    """An answer that says a text and calls a tool without arguments."""
    call = {"index": 0, "id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": "{}"}}
    spoken = [delta(content=text)] if text else []
    return streams(delta(role="assistant"), *spoken, delta(tool_calls=[call]), finish("tool_calls"))
