"""``/v1/completions``: raw prompts, as texts or token ids, without a chat template."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial

import orjson

from omni_ws.core.chunks import InputChunk, Modality
from omni_ws.engine.base import AnswerOptions
from omni_ws.service.conversation.conversation import Conversation
from omni_ws.service.conversation.openai_requests import checked_options, ended_on_error
from omni_ws.service.failure import new_id
from omni_ws.transport.http.application import Router
from omni_ws.transport.http.exchange import HttpExchange
from omni_ws.transport.routes.generation import GenerationRoutes
from omni_ws.transport.routes.http_session import HttpSession
from omni_ws.transport.routes.merged_answers import MergedAnswers
from omni_ws.transport.routes.response_stream import AnswerSource, charging, collect_answer
from omni_ws.wire.openai_requests import CompletionRequest, chat_wants_events, read_completion
from omni_ws.wire.openai_responses import Completion, CompletionOptions, CompletionStream


class CompletionRoutes(GenerationRoutes):
    """The handler of ``/v1/completions``."""

    def register(self, router: Router) -> None:
        router.add("POST", "/v1/completions", self.completions)

    async def completions(self, exchange: HttpExchange) -> None:
        """Respond with the completions of all prompts of one request, each of which is a session of its own."""
        async with (
            self.admitted(exchange) as owner,
            self.json_body(exchange, chat_wants_events) as body,
        ):
            request = await body.read(read_completion)
            sessions: list[HttpSession] = []
            with ExitStack() as opening:  # where one cannot be opened, none of them ever runs
                for one in range(len(request.prompts)):
                    sessions.append(self._prompt_session(exchange, request, one, owner=owner))
                    opening.enter_context(ended_on_error(sessions[-1].conversation))
            async with self._running(request, sessions) as source:
                await self._respond(exchange, request, source)

    def _prompt_session(
        self, exchange: HttpExchange, request: CompletionRequest, index: int, *, owner: str | None
    ) -> HttpSession:
        """Open the session of one prompt; its errors name the prompt's place in the body."""
        place = request.places[index]
        patch = replace(request.patch, names={**request.patch.names, "prompt": place}, input=place)
        asked = AnswerOptions(
            raw_prompt=True,
            token_prompt=not isinstance(request.prompts[index], str),
            echo=request.echo,
            only_echo=request.only_echo,
        )

        def prepare(conversation: Conversation) -> None:
            conversation.options = checked_options(conversation, request.answer, asked)

        session, _ = self.open_session(
            exchange, patch, owner=owner, samples=False, streaming_input=False, prepare=prepare
        )
        return session

    @asynccontextmanager
    async def _running(self, request: CompletionRequest, sessions: list[HttpSession]) -> AsyncIterator[AnswerSource]:
        """Run all sessions at the same time, until the block ends. Yields the source of the merged answer."""
        async with AsyncExitStack() as running:
            for prompt, session in zip(request.prompts, sessions, strict=True):
                text = prompt.encode() if isinstance(prompt, str) else orjson.dumps(prompt)
                feed = self.source_of([InputChunk(Modality.TEXT, text)])
                await running.enter_async_context(session.running(partial(feed, session)))
            if len(sessions) == 1:
                yield sessions[0]
                return
            merged = MergedAnswers(sessions, choices=request.answer.choices)
            await running.enter_async_context(merged.receiving())
            yield merged

    async def _respond(self, exchange: HttpExchange, request: CompletionRequest, source: AnswerSource) -> None:
        options = CompletionOptions(
            completion_id="cmpl-" + (request.request_id or new_id("")),
            created=int(time.time()),
            model=self.sessions.model.names[0],
            choices=len(request.prompts) * request.answer.choices,
            logprobs=request.answer.logprobs is not None,
            include_usage=request.include_usage,
            usage_on_final_chunk=request.usage_on_final_chunk,
        )
        if request.stream:
            await self.stream_events(exchange, source, CompletionStream(options), head_at_start=False)
            return
        with charging(self.sessions.budget) as charge:
            outputs, final = await collect_answer(source, charge)
            completion = Completion(options)
            for output in outputs:
                completion.output(output)
            await exchange.respond_json(200, completion.final(final))
