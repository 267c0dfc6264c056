"""LanguageModel: a model that vLLM runs in a process of its own, supervised and restarted when it dies."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import difflib
import logging
import math
import os
import shutil
import signal
import tempfile
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from multiprocessing import resource_tracker
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self, TypeVar

from omni_ws.config.values import ConfigurationError
from omni_ws.engine.base import EngineState
from omni_ws.engine.incident import incident
from omni_ws.engine.vllm.model_outputs import ModelOutputs, OutputGroups
from omni_ws.engine.vllm.process_reaper import ProcessReaper
from omni_ws.errors import (
    ContextLengthExceeded,
    EngineFailed,
    EngineOverloaded,
    InvalidValue,
    OmniError,
)

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

log = logging.getLogger(__name__)

T = TypeVar("T")

#: How often the process is checked, in seconds. Requests in progress notice its death at once.
WATCH_SEC: Final = 0.1
#: The delay before the first restart, which doubles with each attempt up to the maximum.
FIRST_BACKOFF_SEC: Final = 0.5
MAX_BACKOFF_SEC: Final = 60.0
#: A process that ran for this long is restarted with the initial delay.
STABLE_AFTER_SEC: Final = 60.0
#: How long the processes may take to exit before they are killed, in seconds. They have nothing left to do, but
#: tearing down torch and vLLM takes Python seconds.
SHUTDOWN_SEC: Final = 1.0

#: Environment variables that vLLM reads when it is imported. Those set by the operator take precedence.
_ENVIRONMENT: Final = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
#: The variable that says where vLLM's processes have the sockets by which they talk to each other.
_SOCKETS: Final = "VLLM_RPC_BASE_PATH"
#: Default engine arguments; those of the operator take precedence.
_DEFAULT_ARGS: Final[Mapping[str, Any]] = {
    "disable_log_stats": True,
    "enable_log_requests": False,
    "scheduling_policy": "priority",
}


def prepare_environment() -> None:
    """Set the environment that vLLM reads when it is imported. To be called before that."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if _SOCKETS not in os.environ:
        # By default vLLM leaves its sockets in the common folder for temporary files.
        os.environ[_SOCKETS] = folder = tempfile.mkdtemp(prefix="omni-ws-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)


class LanguageModel:
    """A model with its vLLM process.

    ``role`` names it in messages. ``args`` are vLLM's engine arguments, which are passed on unchanged; ``setting`` is
    the configuration key that holds them, for messages. ``prepare`` is awaited after each load, also after a restart.

    When the process dies, running requests fail, ``state`` becomes UNHEALTHY, and a new process is started, with
    increasing delays until it succeeds.
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
        self._groups = OutputGroups()
        self._running: _Running | None = None
        self._died = asyncio.Event()
        self._watcher: asyncio.Task[None] | None = None

    @property
    def by_priority(self) -> bool:
        """Whether waiting requests are scheduled by priority."""
        return bool(self._args["scheduling_policy"] == "priority")

    @property
    def llm(self) -> AsyncLLM:
        """vLLM's engine client. Raises EngineFailed while there is no process."""
        if self._running is None:
            raise EngineFailed(f"the {self.role} is not available", fatal=True)
        return self._running.llm

    def take_defaults(self, args: Mapping[str, Any]) -> None:
        """Set engine arguments that the operator did not set. To be called before ``start``."""
        self._args = {**args, **self._args}

    async def start(self) -> None:
        """Load the model and warm it up. Raises ConfigurationError for invalid arguments, EngineFailed otherwise."""
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

    def generate(self, prompt: Any, params: SamplingParams, request_id: str, *, priority: int = 0) -> ModelOutputs:
        """Return vLLM's outputs for a prompt, which is submitted when they are iterated.

        The iteration raises OmniErrors only: vLLM's exceptions are translated.
        """
        llm = self.llm

        async def forget_unsent_media(arrived: bool) -> None:
            if not arrived and isinstance(prompt, Mapping) and "mm_hashes" in prompt:
                await self.forget_media()

        return ModelOutputs(
            llm,
            partial(llm.add_request, request_id, prompt, params, priority=priority),
            translate=lambda error: self._mapped(error, llm, request_id),
            on_end=forget_unsent_media,
            groups=self._groups,
        )

    async def render(self, prompt: Mapping[str, Any]) -> Any:
        """Convert a prompt to vLLM's internal form, processing its media off the event loop. Raises as ``generate``."""
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
        """Clear vLLM's media cache, after media were processed that may not have reached the model.

        vLLM sends the same media to its engine process only once, and assumes that they arrived: further prompts with
        them would fail.
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
        """Translate an exception of vLLM; ``of_input`` if it was raised while processing the prompt."""
        from vllm.exceptions import VLLMClientError
        from vllm.v1.engine.async_llm import InputStreamError
        from vllm.v1.engine.exceptions import EngineDeadError

        if isinstance(error, InputStreamError):
            error = error.cause
        if isinstance(error, OmniError):
            return error
        if isinstance(error, EngineDeadError) or llm.errored:
            self._note_death(llm)
            return EngineFailed(f"the {self.role} died", request_id=request_id, fatal=True)
        if type(error).__name__ in ("QueueOverflowError", "MaxQueuedTokensError"):
            return EngineOverloaded(f"the {self.role} has too many requests; retry later", retry_after_ms=1000)
        if isinstance(error, VLLMClientError) or (of_input and isinstance(error, ValueError)):
            too_long = "maximum model length" in str(error) or "maximum context length" in str(error)
            return (ContextLengthExceeded if too_long else InvalidValue)(str(error))
        return incident(f"the {self.role} failed", error, request_id=request_id)

    def _note_death(self, llm: AsyncLLM) -> None:
        if self._running is not None and llm is self._running.llm and self.state is EngineState.OK:
            self.state = EngineState.UNHEALTHY
            self._died.set()

    async def _watch(self) -> None:
        """Wait for the death of the process and restart it, forever."""
        backoff = FIRST_BACKOFF_SEC
        while True:
            started = time.monotonic()
            await self._until_death()
            if time.monotonic() - started > STABLE_AFTER_SEC:
                backoff = FIRST_BACKOFF_SEC
            log.error("the %s died; restarting it", self.role)
            while True:
                await self._release()
                await asyncio.sleep(backoff)
                backoff = min(2 * backoff, MAX_BACKOFF_SEC)
                try:
                    await self._load()
                except OmniError as error:
                    log.error("the %s failed to restart: %s", self.role, error.message)
                else:
                    break
            self._died.clear()
            self.state = EngineState.OK
            log.warning("the %s restarted", self.role)

    async def _until_death(self) -> None:
        while not self._died.is_set():
            # Not ``errored``, which is also true before the first request.
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
            raise EngineFailed(f"the {self.role} failed to start: {_innermost(error)}", fatal=True) from error

    def _create(self) -> _Running:
        """Start the process; blocks for seconds to minutes.

        Runs in a thread of its own, because the new process inherits the thread's signal mask.
        """
        args = self.engine_args()
        # Ctrl-C and a terminal's closing reach all its processes. The model ignores both: a drain finishes its answers.
        resource_tracker.ensure_running()  # started later, it would unblock SIGINT
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
        # Not assigned to a variable, which tracebacks that vLLM keeps would keep alive.
        return _Running.over(self._open(args))

    def engine_args(self) -> AsyncEngineArgs:
        """Return vLLM's engine arguments. Raises ConfigurationError for unknown names."""
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
        """Generate one token, so that the first request does not pay for what vLLM does on first use.

        Also detects weights that are damaged, or overflow in this dtype: their logits are NaN, and vLLM would generate
        arbitrary tokens.
        """
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=1, temperature=0, detokenize=False, logprobs=0)
        prompt = await self.render({"prompt_token_ids": [1]})
        async for output in llm.generate(prompt, params, f"warm-up-{uuid.uuid4().hex}"):
            for chances in output.outputs[0].logprobs or ():
                if any(math.isnan(chance.logprob) for chance in chances.values()):
                    raise EngineFailed(
                        f"the {self.role} failed to start: its weights produce NaN in this dtype", fatal=True
                    )

    async def _release(self) -> None:
        """End the process; also completes when cancelled."""
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
        finally:
            _cancel_tasks(running.llm)


class _Running(NamedTuple):
    """The engine client, and the process that kills the model if this one is killed."""

    llm: AsyncLLM
    reaper: ProcessReaper

    @classmethod
    def over(cls, llm: AsyncLLM) -> Self:
        return cls(llm, ProcessReaper([process.pid for process in _processes(llm)]))


def _processes(llm: AsyncLLM) -> list[Any]:
    """Return the processes that vLLM started on this machine; those on others are its executor's responsibility."""
    return list(getattr(getattr(llm.engine_core.resources, "engine_manager", None), "processes", ()))


def _end_requests(llm: AsyncLLM) -> None:
    """Fail all running requests: on shutdown vLLM would leave them waiting, or report its own end as an error."""
    from vllm.v1.engine.exceptions import EngineDeadError

    if llm.output_handler is not None:
        llm.output_handler.cancel()
    llm.output_processor.propagate_error(EngineDeadError())


def _cancel_tasks(llm: AsyncLLM) -> None:
    """Cancel vLLM's tasks on this loop: its own clean-up may still run in the thread that watches the process."""
    resources = llm.engine_core.resources
    for name in ("output_queue_task", "stats_update_task"):
        if (task := getattr(resources, name, None)) is not None:
            task.cancel()


def _shut_down(running: _Running) -> None:
    """End the processes, killing them after SHUTDOWN_SEC. Blocks until they have exited."""
    from psutil import NoSuchProcess

    llm, reaper = running
    processes = _processes(llm)
    # vLLM would log a warning for each process that it kills.
    logging.getLogger("vllm.v1.utils").setLevel(logging.ERROR)
    try:
        llm.shutdown(timeout=SHUTDOWN_SEC)
    except NoSuchProcess:  # a process ended by itself just when vLLM was about to kill it
        llm.engine_core.resources()
    for process in processes:
        if process.is_alive():
            process.kill()
        process.join()
    reaper.dismiss()


def _no_argument(name: str, known: tuple[str, ...]) -> str:
    """Return a message for an unknown argument, with the most similar one."""
    close = difflib.get_close_matches(name, known, n=1)
    return "unknown vLLM argument" + (f"; did you mean {close[0]}?" if close else "")


def _innermost(error: BaseException) -> str:
    """Return the message of the first cause, in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split())[:500] or type(error).__name__


async def _in_daemon_thread(call: Callable[[], T], discard: Callable[[T], None], *, name: str) -> T:
    """Run ``call`` in a daemon thread, for which the interpreter's exit does not wait: loading takes minutes.

    When the waiting task is cancelled, the result is passed to ``discard``.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    # Not the future's result, which tracebacks of the waiting task would keep alive.
    made: list[T] = []

    def discard_made() -> None:
        threading.Thread(target=discard, args=(made.pop(),), daemon=True).start()

    def succeed() -> None:
        if done.cancelled():
            discard_made()
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
        with contextlib.suppress(RuntimeError):  # the loop is closed, the program is exiting
            loop.call_soon_threadsafe(settle)

    threading.Thread(target=run, name=name, daemon=True).start()
    try:
        await done
    except asyncio.CancelledError:
        if not done.cancelled():  # it was settled in the very pass in which the waiting task was cancelled
            discard_made()
        raise
    return made.pop()
