"""Language models at a URL (chat completions): judges of what was said, and callers that they play."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.error import HTTPError
from urllib.parse import urlsplit, urlunsplit
from urllib.request import Request, urlopen

import orjson

from omni_ws.scenarios.form import Persona, ScenarioUnusable

#: How long a model may think.
_ANSWER_SEC: Final = 120.0
_JUDGE: Final = (
    "You judge a telephone conversation between a caller and an assistant. Answer the question about it. Begin with "
    "the one word yes or no. Then give the reason in one short sentence."
)
_PLAY: Final = (
    "You write what a caller says in a telephone call with an assistant. The caller asks, and never helps or answers "
    "for the assistant. Write only the caller's next words, one or two short sentences, without stage directions. "
    "When the caller has what it wants, or it is hopeless, write only: GOODBYE"
)
_SO_FAR: Final = "The caller: {who}\nWhat the caller wants: {goal}\n\nThe call so far:\n{talk}\n\nThe caller says next:"
_GOODBYE: Final = "goodbye"


@dataclass(frozen=True, slots=True)
class Judgement:
    """The answer of a judge, and its words."""

    is_yes: bool
    reason: str


@dataclass
class ChatModel:
    """A model behind ``/v1/chat/completions``; ``http://host/v1#NAME`` names one of several."""

    url: str
    key: str | None = field(default=None, repr=False)
    _model: str | None = None

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ScenarioUnusable(f"{self.url!r} is not the URL of a language model, such as http://127.0.0.1:8000/v1")
        path = parts.path.rstrip("/").removesuffix("/chat/completions") or "/v1"
        self._model = parts.fragment or None
        self._base = urlunsplit((parts.scheme, parts.netloc, path, parts.query, ""))

    async def judge(self, question: str, talk: Sequence[tuple[str, str]]) -> Judgement:
        """Ask a question about a conversation. Raises ScenarioUnusable if the answer is neither yes nor no."""
        told = "\n".join(f"{who}: {what}" for who, what in talk)
        said = await self._ask([_message("system", _JUDGE), _message("user", f"{told}\n\nQuestion: {question}")], 100)
        word = said.strip().strip("*\"'").lower()
        first = next(iter("".join(one if one.isalpha() else " " for one in word).split()), "")
        if first not in ("yes", "no"):
            raise ScenarioUnusable(f"the judge said neither yes nor no: {said.strip()[:200]!r}")
        return Judgement(first == "yes", said.strip())

    async def play(self, persona: Persona, talk: Sequence[tuple[str, str]]) -> str | None:
        """Return what the caller says next; None if it hangs up."""
        lines = "\n".join(f"{who}: {what}" for who, what in [("server", "Hello, how can I help you?"), *talk])
        told = _SO_FAR.format(who=persona.who, goal=persona.goal, talk=lines)
        messages = [_message("system", _PLAY), _message("user", told)]
        said = (await self._ask(messages, 120)).strip().removeprefix("caller:").strip().strip('"')
        return None if _GOODBYE in said.lower() or not said else said

    async def _ask(self, messages: list[dict[str, str]], tokens: int) -> str:
        if self._model is None:
            listed = await self._call("models", None)
            self._model = str(next((one.get("id") for one in listed.get("data") or ()), "default"))
        body = {"model": self._model, "messages": messages, "temperature": 0, "max_tokens": tokens}
        answer = await self._call("chat/completions", body)
        try:
            return str(answer["choices"][0]["message"]["content"])
        except (KeyError, IndexError, TypeError):
            raise ScenarioUnusable(f"{self._base} sent no answer") from None

    async def _call(self, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        if self.key is not None:
            headers["Authorization"] = f"Bearer {self.key}"
        data = None if body is None else orjson.dumps(body)
        request = Request(f"{self._base}/{path}", data, headers)
        return await asyncio.to_thread(self._fetch, request)

    def _fetch(self, request: Request) -> dict[str, Any]:
        try:
            with urlopen(request, timeout=_ANSWER_SEC) as answer:
                found = orjson.loads(answer.read())
        except HTTPError as error:
            raise ScenarioUnusable(
                f"{self._base} refuses: {error.code} {error.read()[:200].decode(errors='replace')}"
            ) from None
        except (OSError, ValueError) as error:
            raise ScenarioUnusable(f"{self._base} cannot be reached: {error}") from None
        if not isinstance(found, dict):
            raise ScenarioUnusable(f"{self._base} sent no JSON object")
        return found


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
