"""Servers written from the published APIs of Ollama, LM Studio and llama.cpp: what they say in their own way.

A token is a word here, and every message takes four more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson
from support.scripted_upstream import Answer, ScriptedUpstream, delta, finish, refuses, streams

from omni_ws.transport.http.application import Handler
from omni_ws.transport.http.exchange import HttpExchange

MESSAGE_TOKENS: Final = 4


def tokens_of(messages: Iterable[dict[str, Any]]) -> int:
    return sum(MESSAGE_TOKENS + len(str(message["content"] or "").split()) for message in messages)


def words_for(tokens: int) -> str:
    """A text of so many tokens."""
    return " ".join(["word"] * tokens)


@dataclass
class LimitedServer(ScriptedUpstream):
    """Answers with ``replies`` in turn, the last for all that follow, as far as prompts fit into ``context`` tokens."""

    context: int = 64
    replies: Sequence[Answer] = ()
    #: The prompts that the model has read, after whatever the server did to them.
    read: list[list[dict[str, Any]]] = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        self.read = []
        self.chat = [self._limited]

    async def _limited(self, exchange: HttpExchange) -> None:
        messages = self.requests[-1]["messages"]
        if tokens_of(messages) >= self.context:
            await self.too_long(exchange, messages)
            return
        await self.reply(exchange, messages)

    async def reply(self, exchange: HttpExchange, messages: list[dict[str, Any]]) -> None:
        self.read.append(messages)
        await self.replies[min(len(self.read), len(self.replies)) - 1](exchange)

    async def too_long(self, exchange: HttpExchange, messages: list[dict[str, Any]]) -> None:
        raise NotImplementedError


class LlamaCppServer(LimitedServer):
    """llama.cpp: refuses with ``exceed_context_size_error``; tells its context at ``/props``."""

    tells_context = True

    def listed(self) -> list[dict[str, Any]]:
        fields = {"object": "model", "owned_by": "llamacpp", "meta": {"n_ctx_train": 8192}}
        return [{"id": one, **fields} for one in self.models]

    def routes(self) -> dict[str, Handler]:
        return {**super().routes(), **({"GET /props": self._props} if self.tells_context else {})}

    async def _props(self, exchange: HttpExchange) -> None:
        await exchange.respond_json(200, {"default_generation_settings": {"n_ctx": self.context}, "total_slots": 1})

    async def too_long(self, exchange: HttpExchange, messages: list[dict[str, Any]]) -> None:
        tokens = tokens_of(messages)
        message = (
            f"request ({tokens} tokens) exceeds the available context size ({self.context} tokens), try increasing it"
        )
        fields = {"code": 400, "type": "exceed_context_size_error", "n_prompt_tokens": tokens, "n_ctx": self.context}
        await refuses(400, {"error": {"message": message, **fields}})(exchange)


class SilentLlamaCppServer(LlamaCppServer):
    """One whose ``/props`` is turned off: what its context is, only its refusals tell."""

    tells_context = False


class LmStudioServer(LimitedServer):
    """LM Studio: lists models for embeddings, too; its error has no numbers, and comes in the stream."""

    def listed(self) -> list[dict[str, Any]]:
        ids = ("text-embedding-nomic-embed-text-v1.5", *self.models)
        return [{"id": one, "object": "model", "owned_by": "organization_owner"} for one in ids]

    async def too_long(self, exchange: HttpExchange, messages: list[dict[str, Any]]) -> None:
        message = "The number of tokens to keep from the initial prompt is greater than the context length."
        error = b"event: error\ndata: " + orjson.dumps({"error": {"message": message}}) + b"\n\n"
        await streams(error, done=False)(exchange)


@dataclass
class OllamaServer(LimitedServer):
    """Ollama: cuts prompts without a word, keeping the system message and the newest; tells its context elsewhere.

    ``num_ctx`` is what the model's file asks for. ``lists`` is the route that lists the models.
    """

    context: int = 4096
    num_ctx: int | None = None
    loaded: bool = False
    lists: str = "/v1/models"

    def routes(self) -> dict[str, Handler]:
        routes = super().routes()
        if self.lists != "/v1/models":
            del routes["GET /v1/models"]
        del routes["GET /health"]
        return {
            **routes,
            "GET /api/version": self._version,
            "GET /api/tags": self._tags,
            "GET /api/ps": self._ps,
            "POST /api/show": self._show,
        }

    def listed(self) -> list[dict[str, Any]] | None:
        return [{"id": one, "object": "model", "created": 0, "owned_by": "library"} for one in self.models] or None

    async def _version(self, exchange: HttpExchange) -> None:
        await exchange.respond_json(200, {"version": "0.12.6"})

    async def _tags(self, exchange: HttpExchange) -> None:
        await exchange.respond_json(200, {"models": [{"name": one, "model": one} for one in self.models]})

    async def _ps(self, exchange: HttpExchange) -> None:
        running = [{"name": self.models[0], "model": self.models[0], "context_length": self.context}]
        await exchange.respond_json(200, {"models": running if self.loaded else []})

    async def _show(self, exchange: HttpExchange) -> None:
        asked = orjson.loads(await exchange.read_body(1 << 16))
        parameters = 'stop                           "<|eot_id|>"'
        if self.num_ctx is not None:
            parameters += f"\nnum_ctx                        {self.num_ctx}"
        shown = {"parameters": parameters, "model_info": {"llama.context_length": 131_072}}
        if not {asked["model"], f"{asked['model']}:latest"} & set(self.models):
            await refuses(404, {"error": "model not found"})(exchange)
            return
        await exchange.respond_json(200, shown)

    async def too_long(self, exchange: HttpExchange, messages: list[dict[str, Any]]) -> None:
        system = [message for message in messages if message["role"] == "system"]
        rest = [message for message in messages if message["role"] != "system"]
        while len(rest) > 1 and tokens_of([*system, *rest]) >= self.context:
            del rest[0]
        await self.reply(exchange, [*system, *rest])


def ollama_says(*words: str, thinks: str = "", usage: tuple[int, int] | None = None) -> Answer:
    """Ollama's stream: the role in every piece, what it thinks as ``reasoning``, usage only where it was asked for."""
    pieces = [delta(role="assistant", content="", reasoning=thinks)] if thinks else []
    pieces += [delta(role="assistant", content=word) for word in words]
    counted = {"prompt_tokens": usage[0], "completion_tokens": usage[1]} if usage else None
    return streams(*pieces, finish(), *([{"choices": [], "usage": counted}] if counted else []))


def ollama_calls(*calls: tuple[str, str, dict[str, Any]]) -> Answer:
    """Whole calls, each in a piece of its own, all with the index 0."""
    pieces = []
    for call_id, name, arguments in calls:
        function = {"name": name, "arguments": orjson.dumps(arguments).decode()}
        call = {"id": call_id, "index": 0, "type": "function", "function": function}
        pieces.append(delta(role="assistant", content="", tool_calls=[call]))
    return streams(*pieces, finish("tool_calls"))
