"""LanguageModel: one model that vLLM runs in a process of its own, watched, and started again when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import logging
import math
import os
import signal
import threading
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from functools import partial
from multiprocessing import resource_tracker
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self, TypeVar

from omni_ws.config.error import ConfigurationError
from omni_ws.engine.base import EngineState
from omni_ws.engine.incident import incident
from omni_ws.engine.vllm.undertaker import Undertaker
from omni_ws.errors import (
    ContextLengthExceeded,
    EngineFailed,
    EngineOverloaded,
    InvalidValue,
    OmniError,
)

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

log = logging.getLogger(__name__)

T = TypeVar("T")

#: How often is looked whether the process still lives; a request notices its death at once.
WATCH_SEC: Final = 0.1
#: Waits between the attempts to start it again.
FIRST_BACKOFF_SEC: Final = 0.5
MAX_BACKOFF_SEC: Final = 60.0
#: One that lived this long starts again as if it had never died.
SETTLED_SEC: Final = 60.0
#: How long the processes may take to end by themselves. They have nothing left to do then, but Python takes seconds
#: to take down what torch and vLLM have built.
SHUTDOWN_SEC: Final = 1.0

#: vLLM reads these when it is imported. What the operator set counts.
_ENVIRONMENT: Final = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
#: What this engine asks for where the operator says nothing.
_DEFAULT_ARGS: Final[Mapping[str, Any]] = {
    "disable_log_stats": True,
    "enable_log_requests": False,
    "scheduling_policy": "priority",
}


def prepare_environment() -> None:
    """Before vLLM is imported."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


class LanguageModel:
    """``role`` names it in messages; ``args`` are vLLM's own engine arguments, passed on as they are.

    ``setting`` is the key of the configuration that holds them; ``prepare`` is awaited whenever it has been loaded.
    """

    def __init__(
        self,
        role: str,
        args: Mapping[str, Any],
        *,
        setting: str,
        prepare: Callable[[AsyncLLM], Awaitable[None]] | None = None,
    ) -> None:
        self.role = role
        self.state = EngineState.STARTING
        self._args = {**_DEFAULT_ARGS, **args}
        self._setting = setting
        self._prepare = prepare
        self._running: _Running | None = None
        self._died = asyncio.Event()
        self._watcher: asyncio.Task[None] | None = None

    @property
    def by_priority(self) -> bool:
        """Whether waiting requests start in the order of their priority."""
        return bool(self._args["scheduling_policy"] == "priority")

    @property
    def llm(self) -> AsyncLLM:
        """Raises EngineFailed while there is none."""
        if self._running is None:
            raise EngineFailed(f"the {self.role} is not available", fatal=True)
        return self._running.llm

    def take_defaults(self, args: Mapping[str, Any]) -> None:
        """Arguments that count where none of their names was given. Before ``start``."""
        self._args = {**args, **self._args}

    async def start(self) -> None:
        """Load and warm up. Raises ConfigurationError for bad arguments, EngineFailed when it does not load."""
        await self._load()
        self.state = EngineState.OK
        self._watcher = asyncio.create_task(self._watch(), name=f"watch over the {self.role}")

    async def stop(self) -> None:
        """End the process. Idempotent."""
        self.state = EngineState.STARTING
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)
        await self._release()

    async def generate(
        self, prompt: Any, params: SamplingParams, request_id: str, *, priority: int = 0
    ) -> AsyncGenerator[RequestOutput, None]:
        """vLLM's own outputs. Closing it, or cancelling its task, frees the request's slot.

        Raises OmniErrors only: what vLLM raises is mapped here.
        """
        llm = self.llm
        arrived = False
        try:
            async with aclosing(llm.generate(prompt, params, request_id, priority=priority)) as outputs:
                async for output in outputs:
                    arrived = True
                    yield output
        except OmniError:
            raise
        except Exception as error:
            raise self._mapped(error, llm, request_id) from error
        finally:
            if not arrived and isinstance(prompt, Mapping) and "mm_hashes" in prompt:
                await self.forget_media()

    async def render(self, prompt: Mapping[str, Any]) -> Any:
        """A prompt as the engine takes it: its media processed, off the event loop. Raises like ``generate``."""
        llm = self.llm
        try:
            (rendered,) = await llm.renderer.render_cmpl_async([prompt])
        except asyncio.CancelledError:
            if prompt.get("multi_modal_data"):
                await self.forget_media()
            raise
        except Exception as error:
            raise self._mapped(error, llm, None, of_input=True) from error
        return rendered

    async def forget_media(self) -> None:
        """For media that were rendered, and perhaps never reached the model.

        vLLM sends media once, and then believes that its engine's process has them: prompts with the same would fail.
        """
        if self._running is None:
            return
        forgetting = asyncio.ensure_future(self._running.llm.renderer.clear_mm_cache_async())
        try:
            await asyncio.shield(forgetting)
        except asyncio.CancelledError:
            await asyncio.wait([forgetting])
            raise

    def _mapped(self, error: Exception, llm: AsyncLLM, request_id: str | None, *, of_input: bool = False) -> OmniError:
        from vllm.exceptions import VLLMClientError
        from vllm.v1.engine.exceptions import EngineDeadError

        if isinstance(error, EngineDeadError) or llm.errored:
            self._note_death(llm)
            return EngineFailed(f"the {self.role} died", request_id=request_id, fatal=True)
        if type(error).__name__ in ("QueueOverflowError", "MaxQueuedTokensError"):
            return EngineOverloaded(f"the {self.role} has too many requests", retry_after_ms=1000)
        if isinstance(error, VLLMClientError) or (of_input and isinstance(error, ValueError)):
            too_long = "maximum model length" in str(error) or "maximum context length" in str(error)
            return (ContextLengthExceeded if too_long else InvalidValue)(str(error))
        return incident(f"the {self.role} failed", error, request_id=request_id)

    def _note_death(self, llm: AsyncLLM) -> None:
        if self._running is not None and llm is self._running.llm and self.state is EngineState.OK:
            self.state = EngineState.UNHEALTHY
            self._died.set()

    async def _watch(self) -> None:
        """Notices the death of the process, and starts another one, for as long as it takes."""
        backoff = FIRST_BACKOFF_SEC
        while True:
            started = time.monotonic()
            await self._until_death()
            if time.monotonic() - started > SETTLED_SEC:
                backoff = FIRST_BACKOFF_SEC
            log.error("the %s died; starting it again", self.role)
            while True:
                await self._release()
                await asyncio.sleep(backoff)
                backoff = min(2 * backoff, MAX_BACKOFF_SEC)
                try:
                    await self._load()
                except OmniError as error:
                    log.error("the %s did not start again: %s", self.role, error.message)
                else:
                    break
            self._died.clear()
            self.state = EngineState.OK
            log.warning("the %s is there again", self.role)

    async def _until_death(self) -> None:
        while not self._died.is_set():
            # Not ``errored``, which is true as well before the first request.
            if self._running is not None and self._running.llm.engine_core.resources.engine_dead:
                self._note_death(self._running.llm)
            try:
                async with asyncio.timeout(WATCH_SEC):
                    await self._died.wait()
            except TimeoutError:
                continue

    async def _load(self) -> None:
        try:
            self._running = await _in_daemon_thread(self._create, _shut_down, name=f"{self.role} start")
            if self._prepare is not None:
                await self._prepare(self._running.llm)
            await self._warm_up(self._running.llm)
        except (ConfigurationError, OmniError):
            await self._release()
            raise
        except Exception as error:
            await self._release()
            raise EngineFailed(f"the {self.role} did not start: {_innermost(error)}", fatal=True) from error

    def _create(self) -> _Running:
        """Blocks for seconds to minutes. Runs in a thread of its own, whose signal mask the new process inherits."""
        args = self.engine_args()
        # Ctrl-C goes to every process of the terminal: the model has to live on while the last answers are given.
        resource_tracker.ensure_running()  # else it starts later, and unblocks them
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        # Not kept in a variable: frames of this thread live on in tracebacks that vLLM keeps.
        return _Running.over(self._open(args))

    def engine_args(self) -> AsyncEngineArgs:
        """What vLLM is started with. Raises ConfigurationError for names that it does not know."""
        prepare_environment()
        from vllm.engine.arg_utils import AsyncEngineArgs

        known = tuple(AsyncEngineArgs.__dataclass_fields__)
        problems = [f"{self._setting}.{name}: {_no_argument(name, known)}" for name in self._args if name not in known]
        if problems:
            raise ConfigurationError(problems)
        return AsyncEngineArgs(**self._args)

    def _open(self, args: AsyncEngineArgs) -> AsyncLLM:
        from vllm.v1.engine.async_llm import AsyncLLM

        return AsyncLLM.from_engine_args(args)

    async def _warm_up(self, llm: AsyncLLM) -> None:
        """One token, so that the first client does not wait for what vLLM does on first use.

        Weights that are damaged, or that overflow in this dtype, give no numbers; vLLM would answer with any token.
        """
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=1, temperature=0, detokenize=False, logprobs=0)
        prompt = await self.render({"prompt_token_ids": [1]})
        async for output in llm.generate(prompt, params, f"warm-up-{uuid.uuid4().hex}"):
            for chances in output.outputs[0].logprobs or ():
                if any(math.isnan(chance.logprob) for chance in chances.values()):
                    raise EngineFailed(
                        f"the {self.role} did not start: its weights give no numbers (NaN) in this dtype", fatal=True
                    )

    async def _release(self) -> None:
        """Ends the process, also when cancelled meanwhile."""
        running, self._running = self._running, None
        if running is None:
            return
        _end_requests(running.llm)
        ending = asyncio.ensure_future(asyncio.to_thread(_shut_down, running))
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            await asyncio.wait([ending])
            raise


class _Running(NamedTuple):
    llm: AsyncLLM
    undertaker: Undertaker

    @classmethod
    def over(cls, llm: AsyncLLM) -> Self:
        return cls(llm, Undertaker([process.pid for process in _processes(llm)]))


def _processes(llm: AsyncLLM) -> list[Any]:
    """Those that vLLM started on this machine; on others, its executor looks after its own."""
    return list(getattr(getattr(llm.engine_core.resources, "engine_manager", None), "processes", ()))


def _end_requests(llm: AsyncLLM) -> None:
    """Tells whoever waits for an answer: vLLM would leave them waiting, or complain of its own end."""
    from vllm.v1.engine.exceptions import EngineDeadError

    if llm.output_handler is not None:
        llm.output_handler.cancel()
    llm.output_processor.propagate_error(EngineDeadError())


def _shut_down(running: _Running) -> None:
    """Ends the processes, by force if they take too long. Blocks until they are gone."""
    llm, undertaker = running
    processes = _processes(llm)
    # It warns of every process that it has to kill, and these are to be killed.
    logging.getLogger("vllm.v1.utils").setLevel(logging.ERROR)
    llm.shutdown(timeout=SHUTDOWN_SEC)
    for process in processes:
        if process.is_alive():
            process.kill()
        process.join()
    undertaker.dismiss()


def _no_argument(name: str, known: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return "vLLM has no such argument" + (f"; did you mean {close[0]}?" if close else "")


def _innermost(error: BaseException) -> str:
    """What went wrong first, in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split())[:500] or type(error).__name__


async def _in_daemon_thread(call: Callable[[], T], discard: Callable[[T], None], *, name: str) -> T:
    """Like ``asyncio.to_thread``, but the end of the program does not wait for it: loading a model takes minutes.

    What ``call`` returns to nobody, because the waiting task was cancelled, goes to ``discard``.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    # Not in the future: what is made here must not outlive its owner because somebody looks at a stack.
    made: list[T] = []

    def succeed() -> None:
        if done.cancelled():
            threading.Thread(target=discard, args=(made.pop(),), daemon=True).start()
        else:
            done.set_result(None)

    def fail(error: BaseException) -> None:
        if not done.cancelled():
            done.set_exception(error)

    def run() -> None:
        settle: Callable[[], None] = succeed
        try:
            made.append(call())
        except BaseException as error:
            settle = partial(fail, error)
        with contextlib.suppress(RuntimeError):  # the loop is closed: the program ends
            loop.call_soon_threadsafe(settle)

    threading.Thread(target=run, name=name, daemon=True).start()
    await done
    return made.pop()
