"""An OpenAI-compatible server that does what a test tells it.

Of it are made servers by the published APIs of Ollama, LM Studio and llama.cpp, with what they say in their own way: a
token is a word there, and every message takes four more.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Self, TypeVar

import orjson
from support.http_server import RoutedApplication, serving

from omni_ws.config.model import RemoteConfig
from omni_ws.engine.asr.recogniser_engine import RecogniserEngine
from omni_ws.engine.base import Engine
from omni_ws.engine.remote.engine import RemoteEngine, RemoteLlmEngine, RemoteRecogniser
from omni_ws.engine.remote.settings import RemoteAsrSettings, RemoteLlmSettings
from omni_ws.transport.http.application import Handler
from omni_ws.transport.http.exchange import HttpExchange, read_form

Answer = Callable[[HttpExchange], Awaitable[None]]
RemotePart = TypeVar("RemotePart", bound=Engine)

SSE = (("Content-Type", "text/event-stream"),)


def delta(**fields: Any) -> dict[str, Any]:
    return {"id": "c", "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": fields}]}


def finish(reason: str = "stop") -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}


def usage(prompt: int, completion: int) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion}}


async def cut(exchange: HttpExchange) -> None:
    """As a step: the connection breaks here."""
    await asyncio.sleep(0)
    exchange._output.abort()


async def hang(exchange: HttpExchange) -> None:
    """As a step, or as a whole answer: nothing more comes."""
    await asyncio.Event().wait()


def streams(*steps: Any, done: bool = True, headers: Iterable[tuple[str, str]] = SSE) -> Answer:
    """An answer of events: an object is one, bytes go out as they are, a callable is awaited."""

    async def answer(exchange: HttpExchange) -> None:
        await exchange.start(200, headers)
        for step in steps:
            if callable(step):
                await step(exchange)
            else:
                await exchange.write(step if isinstance(step, bytes) else b"data: " + orjson.dumps(step) + b"\n\n")
        if done:
            await exchange.write(b"data: [DONE]\n\n")
        await exchange.end()

    return answer


def says(*words: str) -> Answer:
    return streams(delta(role="assistant"), *(delta(content=word) for word in words), finish())


def text_of(message: dict[str, Any]) -> str:
    """The text of a message of a chat."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else " ".join(part.get("text") or "" for part in content)


def refuses(status: int, content: Any = None, **headers: str) -> Answer:
    async def answer(exchange: HttpExchange) -> None:
        body = content if isinstance(content, bytes) else orjson.dumps(content)
        named = [(name.replace("_", "-"), value) for name, value in headers.items()]
        await exchange.respond(status, [("Content-Type", "application/json"), *named], body)

    return answer


@dataclass
class ScriptedUpstream:
    """``chat``, ``speech`` and ``written`` hold one answer for each request to come; the last is for all later."""

    chat: list[Answer] = field(default_factory=list)
    speech: list[Answer] = field(default_factory=list)
    written: list[Answer] = field(default_factory=list)
    models: tuple[str, ...] = ("tiny",)
    owner: str = "scripted"
    transcripts: bool = False
    health: int = 200
    models_answer: Answer | None = None
    requests: list[dict[str, Any]] = field(default_factory=list)
    spoken: list[dict[str, Any]] = field(default_factory=list)
    #: The fields of forms with audio.
    heard: list[dict[str, bytes]] = field(default_factory=list)
    headers: list[dict[str, str | None]] = field(default_factory=list)
    checks: int = 0
    active: int = 0
    port: int = 0
    #: Set when a client goes before its answer is complete.
    deserted: asyncio.Event = field(default_factory=asyncio.Event)
    #: Set while at least one request is being answered.
    asked: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    async def _health(self, exchange: HttpExchange) -> None:
        self.checks += 1
        await exchange.respond_json(self.health, {})

    async def _models(self, exchange: HttpExchange) -> None:
        self._note_headers(exchange)
        if self.models_answer is not None:
            await self.models_answer(exchange)
            return
        await exchange.respond_json(200, {"object": "list", "data": self.listed()})

    def listed(self) -> list[dict[str, Any]] | None:
        """The models as they are listed."""
        fields = {"object": "model", "owned_by": self.owner, "transcripts": self.transcripts}
        return [{"id": model, **fields} for model in self.models]

    def _note_headers(self, exchange: HttpExchange) -> None:
        names = ("authorization", "x-request-id", "user-agent")
        self.headers.append({name: exchange.request.headers.get(name) for name in names})

    async def _answer(self, exchange: HttpExchange, script: list[Answer]) -> None:
        self._note_headers(exchange)
        self.active += 1
        self.asked.set()
        try:
            await (script.pop(0) if len(script) > 1 else script[0])(exchange)
        except asyncio.CancelledError:
            self.deserted.set()
            raise
        finally:
            self.active -= 1

    async def _chat(self, exchange: HttpExchange) -> None:
        self.requests.append(orjson.loads(await exchange.read_body(1 << 28)))
        await self._answer(exchange, self.chat)

    async def _speech(self, exchange: HttpExchange) -> None:
        self.spoken.append(orjson.loads(await exchange.read_body(1 << 28)))
        await self._answer(exchange, self.speech)

    async def _transcriptions(self, exchange: HttpExchange) -> None:
        self.heard.append({part.name: bytes(part.data) for part in await read_form(exchange, 1 << 28)})
        await self._answer(exchange, self.written)

    def routes(self) -> dict[str, Handler]:
        return {
            "GET /health": self._health,
            "GET /v1/models": self._models,
            "POST /v1/chat/completions": self._chat,
            "POST /v1/audio/speech": self._speech,
            "POST /v1/audio/transcriptions": self._transcriptions,
        }

    @asynccontextmanager
    async def serve(self, port: int = 0, **options: Any) -> AsyncIterator[Self]:
        async with serving(RoutedApplication(self.routes()), port=port, **options) as server:
            self.port = server.port
            yield self


@asynccontextmanager
async def upstream(*chat: Answer, **fields: Any) -> AsyncIterator[ScriptedUpstream]:
    async with ScriptedUpstream(chat=list(chat), **fields).serve() as scripted:
        yield scripted


@asynccontextmanager
async def _started(engine: RemotePart) -> AsyncIterator[RemotePart]:
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()
        assert engine.active_requests == 0


def _urls(upstreams: Sequence[ScriptedUpstream | str]) -> tuple[str, ...]:
    return tuple(one if isinstance(one, str) else one.url for one in upstreams)


def remote(*upstreams: ScriptedUpstream | str, **settings: Any) -> AbstractAsyncContextManager[RemoteEngine]:
    """A started engine in front of them."""
    settings = {"upstreams": _urls(upstreams), "start_timeout_sec": 0, **settings}
    return _started(RemoteEngine(RemoteConfig(**settings)))


def remote_llm(*upstreams: ScriptedUpstream | str, **settings: Any) -> AbstractAsyncContextManager[RemoteLlmEngine]:
    """A started engine for the task chat alone."""
    settings = {"urls": _urls(upstreams), "start_timeout": 0, **settings}
    return _started(RemoteLlmEngine(RemoteLlmSettings(**settings)))


def remote_asr(
    *upstreams: ScriptedUpstream | str, clock: Callable[[], float] = lambda: 0.0, **settings: Any
) -> AbstractAsyncContextManager[RecogniserEngine]:
    """A started engine for the task transcribe alone; its clock stands still, so all audio comes as from a file."""
    settings = {"urls": _urls(upstreams), "start_timeout": 0, **settings}
    return _started(RecogniserEngine(RemoteRecogniser(RemoteAsrSettings(**settings)), clock=clock))


@contextmanager
def deaf_port() -> Any:
    """A port whose queue of connections is full: nobody accepts, and nobody refuses."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        waiting = [socket.socket() for _ in range(4)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(listener.getsockname())
        try:
            yield listener.getsockname()[1]
        finally:
            for one in waiting:
                one.close()


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
