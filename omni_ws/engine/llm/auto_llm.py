"""AutoLlm: answers by rules at once, and by a language model as soon as there is one, without a restart."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from omni_ws.core.chunks import InputMode, Modality, OutputModality
from omni_ws.engine.base import Engine, EngineCapabilities, EngineState, GenerationRequest, OutputWriter
from omni_ws.engine.continued_answer import go_on
from omni_ws.engine.decoding import Chunks
from omni_ws.engine.llm.coming import Coming, ComingState, GrowingLlm
from omni_ws.engine.llm.fetched_mind import FetchedMind, Plan
from omni_ws.engine.llm.rules_engine import is_plain
from omni_ws.engine.threads import Work, run_work
from omni_ws.errors import EngineFailed, OmniError, SessionConflict
from omni_ws.weights.sources import Fetching, Progress, WeightsError

logger = logging.getLogger(__name__)

#: How long a server that was found may take until it can be used. The start waits for it.
FOUND_SEC: Final = 3.0
#: How long the end of the server waits for the fetching thread. What has come by then is kept.
_STOP_SEC: Final = 1.0
#: The log tells the progress of a fetch at each tenth.
_TOLD_PARTS: Final = 10
_GB: Final = 1e9


@dataclass(frozen=True, slots=True)
class Found:
    """What was found on this machine: an engine that is not started yet, or None, and lines for the operator."""

    engine: Engine | None = None
    lines: tuple[str, ...] = ()


class AutoLlm(GrowingLlm):
    """An engine for the task ``chat``: rules, and a language model in their place as soon as one is there.

    At the start, ``find`` looks for a server of models on this machine. Without one, ``mind`` is fetched and loaded in
    the background, if its plan says so. A request keeps the engine it began with. Rules go on answering what the model
    cannot: pictures, raw prompts, and everything plain while the model does not run. ``on_change`` is called when
    another engine answers, and the capabilities may be others.
    """

    def __init__(self, rules: Engine, *, find: Callable[[], Awaitable[Found]], mind: FetchedMind | None) -> None:
        self.name, self.model = rules.name, rules.model
        self.on_change: Callable[[], None] = lambda: None
        self._rules = rules
        self._find = find
        self._mind = mind
        self._lines: tuple[str, ...] = ()
        #: The language model, once it runs.
        self._llm: Engine | None = None
        self._growing: asyncio.Task[None] | None = None
        self._fetching = Fetching(self._progressed)
        self._looked = False
        #: Whether the language model ran when it was last asked.
        self._runs = True

    @property
    def engine(self) -> Engine:
        """The engine that answers now."""
        return self._llm or self._rules

    @property
    def credited(self) -> str:
        return str(getattr(self.engine, "credited", self.engine.model))

    @property
    def active_requests(self) -> int:
        return self._rules.active_requests + (0 if self._llm is None else self._llm.active_requests)

    @property
    def state(self) -> EngineState:
        """The state of the rules, which answer if the model does not run."""
        return self._rules.state

    @property
    def capabilities(self) -> EngineCapabilities:
        """Those of the engine that answers. Growing input and raw prompts stay, since the rules can take them."""
        continues = frozenset({OutputModality.TEXT})  # by go_on, whatever the one that answers can
        if self._llm is None:
            return replace(self._rules.capabilities, continues=continues)
        return replace(self._llm.capabilities, extend=True, raw_prompts=True, continues=continues)

    def describe(self) -> tuple[str, ...]:
        if self._llm is not None:
            return (*self._lines, *self._llm.describe())
        # `_begin` has logged what is under way.
        return self._lines if self._growing is not None else self.advice

    @property
    def advice(self) -> tuple[str, ...]:
        # About servers that were found and are not used, and about the model that is to come.
        if self._llm is not None:
            return ()
        return (*self._lines, *(() if self.coming is None else (self.coming.why,)))

    # life

    async def start(self) -> None:
        """Start the rules, and look for a model once. Idempotent. Raises EngineFailed if the rules do not start."""
        await self._rules.start()
        if self._looked:
            return
        self._looked = True
        found = await self._find()
        self._lines = found.lines
        if found.engine is not None and await self._start_found(found.engine):
            self._answer_by(found.engine)
        elif self._mind is not None:
            plan = await asyncio.to_thread(self._mind.plan)
            if plan.begins:
                self._begin(self._mind, plan, plan.why)
            else:
                self.coming = Coming(self._mind.model, ComingState.OFFERED, plan.why, can_begin=plan.can_begin)

    async def _start_found(self, engine: Engine) -> bool:
        try:
            async with asyncio.timeout(FOUND_SEC):
                await engine.start()
        except (OmniError, TimeoutError) as error:
            reason = error.message if isinstance(error, OmniError) else f"it is not ready after {FOUND_SEC:g} s"
            self._lines = (f"the server that was found cannot be used: {reason}",)
            await engine.stop()
            return False
        return True

    async def stop(self) -> None:
        """Stop all of it. What was fetched is kept. Idempotent."""
        growing, self._growing, self._looked = self._growing, None, False
        self._fetching.stop.set()
        if growing is not None:
            growing.cancel()
            await asyncio.gather(growing, return_exceptions=True)
        llm, self._llm, self.coming = self._llm, None, None
        self.name, self.model = self._rules.name, self._rules.model
        if llm is not None:
            await llm.stop()
        await self._rules.stop()

    # the model

    async def fetch(self) -> Coming:
        """Begin to fetch the model, because somebody at this machine asks for it; return how that goes.

        If it is under way, nothing changes. Raises SessionConflict if there is nothing to fetch, or this machine or the
        configuration does not allow it.
        """
        if self._mind is None or self._llm is not None:
            raise SessionConflict("there is no model to fetch: a language model answers already, or none is wanted")
        if self._growing is None:
            plan = await run_work(Work.FILES, self._mind.plan)
        if self._llm is not None or not self._looked:
            raise SessionConflict("a language model answers meanwhile, or the server ends")
        if self._growing is None:
            if not plan.can_begin:
                raise SessionConflict(plan.why)
            self._begin(self._mind, plan, f"{self._mind.model} is fetched, because it was asked for")
            self.on_change()
        assert self.coming is not None
        return self.coming

    def _begin(self, mind: FetchedMind, plan: Plan, why: str) -> None:
        logger.info("%s", why)
        self.coming = Coming(mind.model, ComingState.FETCHING, why)
        self._fetching = Fetching(self._progressed)
        self._growing = asyncio.create_task(self._grow(mind, plan), name=f"fetch of {mind.model}")

    async def _grow(self, mind: FetchedMind, plan: Plan) -> None:
        """Fetch and load the model, and let it answer from then on."""
        engine: Engine | None = None
        try:
            await self._in_thread(lambda: mind.fetch(self._fetching, weights=plan.fetches))
            self.coming = Coming(mind.model, ComingState.LOADING, f"{mind.model} is being loaded, and answers then")
            engine = await run_work(Work.FILES, mind.engine)
            await engine.start()
        except asyncio.CancelledError:
            if engine is not None:
                await engine.stop()
            raise
        except Exception as error:
            if engine is not None:
                await engine.stop()
            self._fail(mind, error)
            return
        self._growing = None
        self._answer_by(engine)
        logger.info("%s answers from now on; rules go on answering what is exact", engine.model)
        self.on_change()

    def _answer_by(self, engine: Engine) -> None:
        self._llm, self.coming = engine, None
        self.name, self.model = engine.name, engine.model

    def _fail(self, mind: FetchedMind, error: Exception) -> None:
        if isinstance(error, (EngineFailed, WeightsError, OSError)):
            reason = error.message if isinstance(error, OmniError) else str(error)
        else:
            logger.error("the model cannot be had", exc_info=error)
            reason = type(error).__name__
        why = f"{mind.model} does not answer, and rules do: {reason}"
        logger.warning("%s", why)
        self.coming, self._growing = Coming(mind.model, ComingState.FAILED, why, can_begin=True), None
        self.on_change()

    async def _in_thread(self, call: Callable[[], None]) -> None:
        """Run ``call`` in a thread of its own, which may wait for a network and does not keep the process alive."""
        loop, done = asyncio.get_running_loop(), asyncio.Event()
        failed: list[Exception] = []

        def run() -> None:
            try:
                call()
            except Exception as error:
                failed.append(error)
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(done.set)

        threading.Thread(target=run, name="fetch of a model", daemon=True).start()
        try:
            await done.wait()
        except asyncio.CancelledError:
            self._fetching.stop.set()
            with suppress(TimeoutError):
                async with asyncio.timeout(_STOP_SEC):
                    await done.wait()
            raise
        if failed:
            raise failed[0]

    def _progressed(self, progress: Progress) -> None:
        """Note how far the fetch is. Called from its thread."""
        before = self.coming
        if before is None or before.state is not ComingState.FETCHING:
            return
        # Each step counts its own bytes; only the download has most of them.
        if progress.done is None or progress.total is None:
            logger.info("%s: %s", before.model, progress.doing)
            return
        self.coming = Coming(
            before.model, before.state, before.why, bytes_done=progress.done, bytes_total=progress.total
        )
        part = progress.done * _TOLD_PARTS // max(progress.total, 1)
        if part != (before.bytes_done or 0) * _TOLD_PARTS // max(progress.total, 1):
            logger.info("%s: %.1f of %.1f GB were fetched", before.model, progress.done / _GB, progress.total / _GB)

    # requests

    async def generate(self, request: GenerationRequest, out: OutputWriter) -> None:
        llm = self._llm
        if llm is None or (request.options.raw_prompt and not llm.capabilities.raw_prompts):
            await go_on(self._rules, request, out)
            return
        if not llm.capabilities.extend:
            taken = tuple([chunk async for chunk in request.input])
            request = replace(request, input=Chunks(taken), input_mode=InputMode.SNAPSHOT)
            shown = {chunk.modality for chunk in taken if chunk.payload} & {Modality.IMAGE, Modality.VIDEO}
            if shown - llm.capabilities.input_modalities:  # they were sent while the rules took them
                await go_on(self._rules, request, out)
                return
        runs = llm.state is EngineState.OK
        if runs != self._runs:
            self._runs = runs
            logger.warning("%s", f"{llm.model} answers again" if runs else f"{llm.model} does not run: rules answer")
        if not runs and is_plain(request):
            await go_on(self._rules, request, out)
            return
        await go_on(llm, request, out)
