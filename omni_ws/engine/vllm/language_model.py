"""LanguageModel: a model that vLLM runs in a separate process, which is supervised and restarted when it dies.

ModelOutputs are the outputs that the model generates for one prompt.
"""

from __future__ import annotations

import argparse
import asyncio
import atexit
import contextlib
import difflib
import logging
import math
import multiprocessing.process
import os
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import resource_tracker
from typing import TYPE_CHECKING, Any, Final, NoReturn, Self, TypeAlias, TypeVar

import msgspec

from omni_ws.config.values import ConfigurationError, literal_address, parse_free_form
from omni_ws.engine.base import EngineState, incident
from omni_ws.engine.child import STABLE_AFTER_SEC, Backoff, keep_running
from omni_ws.engine.threads import end_tasks
from omni_ws.engine.vllm.processes import marked_processes
from omni_ws.errors import (
    ContextLengthExceeded,
    EngineFailed,
    EngineOverloaded,
    InvalidValue,
    OmniError,
)
from omni_ws.installing import check_private_names

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM


log = logging.getLogger(__name__)

T = TypeVar("T")

#: How often the process is checked, in seconds. Requests in progress notice its death immediately.
WATCH_SEC: Final = 0.1
#: How long the processes may take to exit before they are killed, in seconds. No work is left by then, but Python takes
#: seconds to tear down torch and vLLM.
SHUTDOWN_SEC: Final = 1.0

#: Environment variables that vLLM reads when it is imported. Those set by the operator take precedence. The last keeps
#: the titles of vLLM's processes from overwriting their environments, in which the reaper looks.
_ENVIRONMENT: Final = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING", "SPT_NOENV": "1"}
#: The environment variable with the folder for the sockets between vLLM's processes.
_SOCKETS: Final = "VLLM_RPC_BASE_PATH"
#: Default engine arguments; those of the operator take precedence.
_DEFAULT_ARGS: Final[Mapping[str, Any]] = {
    "disable_log_stats": True,
    "enable_log_requests": False,
    "scheduling_policy": "priority",
}


def prepare_environment() -> None:
    """Set the environment variables that vLLM reads when it is imported. Call it before the import of vLLM.

    Variables that are set already are kept. Also creates a folder for vLLM's sockets, which is removed at exit.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if _SOCKETS not in os.environ:
        # By default vLLM leaves its sockets in the common folder for temporary files.
        os.environ[_SOCKETS] = folder = tempfile.mkdtemp(prefix="omni-ws-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)


def use_first_model_runner() -> None:
    """Make vLLM use its model runner V1, on whose internals our workers rely. Call this before vLLM is imported."""
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"


def check_vllm() -> None:
    """Import vLLM. Raises ImportError if vLLM is missing, or lacks one of the internal names that this module uses.

    The workers use further names, of the model and its runner; a missing one fails by name when it is used.
    """
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core_client import BackgroundResources, MPClient
    from vllm.v1.engine.output_processor import RequestOutputCollector

    collector = ("put", "get", "get_nowait", "close", "aggregate", "request_id")
    used = {
        AsyncLLM: ("engine_core", "output_processor", "abort"),
        MPClient: ("resources",),
        BackgroundResources: ("engine_dead", "engine_manager", "coordinator"),
        RequestOutputCollector: collector,
    }
    check_private_names("vllm", used)


class LanguageModel:
    """A model that vLLM runs in a separate process.

    ``role`` is the model's name in messages. ``args`` are vLLM's engine arguments, which take precedence over our
    defaults; ``setting`` is the configuration key that holds them, for messages. ``prepare`` is awaited after each
    load, also after a restart, and before the warm-up.

    Once started, when the process dies, running requests fail, ``state`` becomes UNHEALTHY, and a new process is
    started, with increasing delays until this succeeds.
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
        self._running: AsyncLLM | None = None
        self._others: OtherMachines | None = None
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
        return self._running

    def take_defaults(self, args: Mapping[str, Any]) -> None:
        """Set engine arguments, except those that are set already. To be called before ``start``."""
        self._args = {**args, **self._args}

    async def start(self) -> None:
        """Load the model and warm it up.

        Raises ConfigurationError for unknown arguments, the ConfigurationErrors and OmniErrors of ``prepare``, and
        EngineFailed for any other failure, such as an invalid value of an argument.
        """
        await self._load()
        self.state = EngineState.OK
        keeping = keep_running(f"the {self.role}", self._until_death, self._start_again, Backoff())
        self._watcher = asyncio.create_task(keeping, name=f"watch over the {self.role}")

    async def stop(self) -> None:
        """End the process; running requests fail. Idempotent."""
        self.state = EngineState.STARTING
        watcher, self._watcher = self._watcher, None
        await end_tasks(watcher)
        await self._release()

    def generate(self, prompt: Any, params: SamplingParams, request_id: str, *, priority: int = 0) -> ModelOutputs:
        """Return an iterator over vLLM's outputs for a prompt; the first iteration submits the prompt.

        ``request_id`` must be unique. Of waiting requests, those with a lower ``priority`` come first, see
        ``by_priority``. Raises EngineFailed while there is no process.
        The iteration raises only OmniErrors: vLLM's exceptions are translated.
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
        """Convert a prompt to vLLM's internal form; its media are processed off the event loop. Raises OmniErrors."""
        llm = self.llm
        try:
            if "prompt_token_ids" in prompt and "multi_modal_data" not in prompt:  # nothing to compute: no tasks for it
                (rendered,) = llm.renderer.render_cmpl([prompt])
            else:
                (rendered,) = await llm.renderer.render_cmpl_async([prompt])
        except asyncio.CancelledError:
            if prompt.get("multi_modal_data"):
                await self.forget_media()
            raise
        except Exception as error:
            raise self._mapped(error, llm, None, of_input=True) from error
        return rendered

    async def forget_media(self) -> None:
        """Clear vLLM's media cache, because processed media may not have reached the model.

        vLLM sends the same media to its engine process only once, and assumes that they arrived: further prompts with
        these media would fail.
        """
        if self._running is None:
            return
        forgetting = asyncio.ensure_future(self._running.renderer.clear_mm_cache_async())
        try:
            await asyncio.shield(forgetting)
        except asyncio.CancelledError:
            await asyncio.wait([forgetting])
            raise

    def _mapped(self, error: Exception, llm: AsyncLLM, request_id: str | None, *, of_input: bool = False) -> OmniError:
        """Translate an exception of vLLM to an OmniError; if the process has died, note its death.

        ``of_input``: the exception was raised by processing the prompt.
        """
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
        if self._running is not None and llm is self._running and self.state is EngineState.OK:
            self.state = EngineState.UNHEALTHY
            self._died.set()

    async def _until_death(self) -> str:
        how = "vLLM's process has ended"
        while not self._died.is_set():
            # Not ``errored``, which is also true before the first request.
            if self._running is not None and self._running.engine_core.resources.engine_dead:
                self._note_death(self._running)
            elif self._running is not None and self._others is not None and self._others.lost:
                how = "the connection with a copy on another machine has ended"
                self._note_death(self._running)
            try:
                async with asyncio.timeout(WATCH_SEC):
                    await self._died.wait()
            except TimeoutError:
                continue
        await self._release()
        return how

    async def _start_again(self) -> None:
        await self._load()
        self._died.clear()
        self.state = EngineState.OK

    async def _load(self) -> None:
        try:
            give_up = partial(_kill_children, but=frozenset(multiprocessing.active_children()))
            self._running = await _in_daemon_thread(self._create, _shut_down, give_up, name=f"{self.role} start")
            self._others = OtherMachines.of(self._running)
            if self._prepare is not None:
                await self._prepare(self._running)
            await self._warm_up(self._running)
        except (ConfigurationError, OmniError):
            await self._release()
            raise
        except Exception as error:
            await self._release()
            raise EngineFailed(f"the {self.role} failed to start: {_innermost(error)}", fatal=True) from error

    def _create(self) -> AsyncLLM:
        """Start the process. Blocks for seconds to minutes.

        Must run in a new thread, whose signal mask the process inherits.
        """
        args = self.engine_args()
        check_vllm()
        # Ctrl-C and a terminal's closing reach all its processes. The model ignores both: a drain finishes its answers.
        resource_tracker.ensure_running()  # started later, it would unblock SIGINT
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
        # Not assigned to a variable, which tracebacks that vLLM keeps would keep alive.
        given = {name: value for name, value in self._args.items() if _DEFAULT_ARGS.get(name, ...) != value}
        with marked_processes(), telling_of_others(self.role, args, given):
            return self._open(args)

    def engine_args(self) -> AsyncEngineArgs:
        """Return vLLM's engine arguments. Imports vLLM. Raises ConfigurationError for unknown names."""
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
        """Generate one token, so that the first request does not wait for vLLM's work on first use.

        This also detects weights that are damaged or overflow in this dtype: then the logits are NaN, and vLLM would
        generate arbitrary tokens.
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
        """End the process, also if the call is cancelled."""
        running, self._running = self._running, None
        if running is None:
            return
        if self._others is not None:
            self._others.close()
            self._others = None
        _end_requests(running)
        ending = asyncio.ensure_future(asyncio.to_thread(_shut_down, running))
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            await asyncio.wait([ending])
            raise
        finally:
            _cancel_tasks(running)


def _processes(llm: AsyncLLM) -> list[Any]:
    """Return the processes that vLLM started on this machine; vLLM's executor manages those on other machines."""
    return list(getattr(getattr(llm.engine_core.resources, "engine_manager", None), "processes", ()))


def _end_requests(llm: AsyncLLM) -> None:
    """Fail all running requests, which vLLM's shutdown would leave waiting, or would log as an error of its own."""
    from vllm.v1.engine.exceptions import EngineDeadError

    if llm.output_handler is not None:
        llm.output_handler.cancel()
    llm.output_processor.propagate_error(EngineDeadError())


def _cancel_tasks(llm: AsyncLLM) -> None:
    """Cancel vLLM's tasks on this event loop, since vLLM's own clean-up may still run in another thread."""
    resources = llm.engine_core.resources
    for name in ("output_queue_task", "stats_update_task"):
        if (task := getattr(resources, name, None)) is not None:
            task.cancel()


def _shut_down(llm: AsyncLLM) -> None:
    """End vLLM's processes, and kill them after SHUTDOWN_SEC. Blocks until they have exited."""
    from psutil import NoSuchProcess

    resources = llm.engine_core.resources
    processes = _processes(llm)
    if resources.coordinator is not None:
        # It keeps nothing, and vLLM would give it five seconds.
        processes.append(resources.coordinator.proc)
        resources.coordinator.proc.kill()
    # vLLM would log a warning for each process that it kills.
    logging.getLogger("vllm.v1.utils").setLevel(logging.ERROR)
    try:
        llm.shutdown(timeout=SHUTDOWN_SEC)
    except NoSuchProcess:  # a process ended by itself just when vLLM was about to kill it
        resources()
    for process in processes:
        if process.is_alive():
            process.kill()
        process.join()


def _no_argument(name: str, known: tuple[str, ...]) -> str:
    """Return a message for an unknown argument, with the name of the most similar argument."""
    close = difflib.get_close_matches(name, known, n=1)
    return "unknown vLLM argument" + (f"; did you mean {close[0]}?" if close else "")


def _innermost(error: BaseException) -> str:
    """Return the message of the innermost cause of ``error``, in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split())[:500] or type(error).__name__


def _kill_children(starting: threading.Thread, *, but: frozenset[multiprocessing.process.BaseProcess]) -> None:
    """Kill the children of this process that the thread ``starting`` starts, until this thread ends.

    ``but`` are older children, which are not killed.
    """
    while starting.is_alive():
        for child in set(multiprocessing.active_children()) - but:
            child.kill()
        starting.join(WATCH_SEC)


async def _in_daemon_thread(
    call: Callable[[], T], discard: Callable[[T], None], give_up: Callable[[threading.Thread], None], *, name: str
) -> T:
    """Run ``call`` in a daemon thread, since loading takes minutes, and the interpreter's exit must not wait for it.

    Returns the result of ``call``, or raises its exception. If the waiting task is cancelled, ``give_up`` is called
    with the thread and, once the call has a result, ``discard`` with this result, both in further threads.
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

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    try:
        await done
    except asyncio.CancelledError:
        if done.cancelled():
            threading.Thread(target=give_up, args=(thread,), daemon=True).start()
        elif done.exception() is None:  # it was settled in the very pass in which the waiting task was cancelled
            discard_made()
        raise
    return made.pop()


#: How long an output may wait for the next outputs, in seconds. An output that comes later than this after the previous
#: one does not wait: up to 200 tokens a second for each answer, no output waits.
GROUP_SEC: Final = 0.005

#: Consumes an output, without waiting; returns False if the output cannot be consumed now.
Take: TypeAlias = "Callable[[RequestOutput], bool]"


class ModelOutputs(AsyncIterator["RequestOutput"]):
    """An iterator over vLLM's outputs for one prompt. The request for the first output submits the prompt.

    ``submit`` calls ``AsyncLLM.add_request``, ``translate`` maps vLLM's exceptions, and ``on_end`` is awaited at the
    end of a submitted request; its argument says whether any output arrived. ``aclose`` aborts a request that still
    runs, and has to be called also after the iteration was cancelled.

    ``AsyncLLM`` reads the outputs of its process in one task, which puts each output into the
    ``RequestOutputCollector`` of the request and so wakes the task that waits for it. With eight answers, waking these
    tasks takes as much time as all other work on an output. Therefore ``hand_to`` sets a function that consumes outputs
    in vLLM's own task while the iteration waits. Outputs in quick succession are merged, as vLLM does for a slow
    consumer. The iteration gets the outputs that the function refuses, the last output, and errors, so the order is
    kept. An exception of the function is raised by the iteration.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        submit: Callable[[], Awaitable[Any]],
        *,
        translate: Callable[[Exception], Exception],
        on_end: Callable[[bool], Awaitable[None]],
        groups: OutputGroups,
    ) -> None:
        #: Whether any output arrived, since the last call of ``expect_output`` if there was one.
        self.arrived = False
        self._consume: Take | None = None
        self._llm = llm
        self._submit = submit
        self._translate = translate
        self._on_end = on_end
        self._groups = groups
        self._submitted = False
        self._ended = False
        self._waiting = False
        #: An output that waits for the next outputs, to be consumed with them; only while the iteration waits.
        self._held: Any = None
        #: When an output was last consumed inside vLLM's loop, on the clock of the event loop.
        self._taken_at = -math.inf
        self._failure: Exception | None = None
        #: vLLM's RequestOutputCollector, and its own ``put``.
        self._collector: Any = None
        self._collect: Callable[[Any], None]

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._ended:
            raise StopAsyncIteration
        try:
            output = await self._next()
        except Exception as error:
            from vllm.v1.engine.exceptions import EngineDeadError

            await self._end(running=not isinstance(error, EngineDeadError))
            if error is self._failure:
                raise
            raise self._translate(error) from error
        self.arrived = True
        if output.finished:
            await self._end(running=False)
            if not output.outputs:  # the end of a streamed prompt, after its last output
                raise StopAsyncIteration
            if any(one.finish_reason == "abort" for one in output.outputs):
                raise self._translate(_death())
        return output

    def hand_to(self, consume: Take | None) -> None:
        """Pass outputs to ``consume`` while the iteration waits; with None, the iteration yields all outputs."""
        self._consume = consume

    def expect_output(self) -> None:
        """Reset ``arrived``, because a further piece of the prompt is about to be submitted."""
        self.arrived = False

    async def aclose(self) -> None:
        """Abort the request, unless it has ended. Idempotent."""
        await self._end()

    async def _next(self) -> RequestOutput:
        if self._collector is None:
            self._submitted = True
            self._collector = await self._submit()
            self._collect = self._collector.put
            self._collector.put = self._put
        output: RequestOutput | None = self._collector.get_nowait()
        if output is not None:
            return output
        self._waiting = True
        try:
            output = await self._collector.get()
        finally:
            self._waiting = False
            if self._held is not None:  # cancelled
                self._collect(self._held)
                self._held = None
        assert output is not None
        return output

    def _put(self, output: Any) -> None:
        """Replace ``RequestOutputCollector.put``. Must not raise: that would end vLLM's task, for all requests."""
        if not self._waiting or self._consume is None or getattr(output, "finished", True):
            self.take_held()
            self._waiting = False
            self._collect(output)
        elif self._held is not None:
            self._held.add(output, aggregate=self._collector.aggregate)
        elif self._groups.now() - self._taken_at < GROUP_SEC:
            self._held = output
            self._groups.hold(self)
        else:
            self._take(output)

    def take_held(self) -> None:
        """Consume the output that is held for grouping (OutputGroups), if there is one. Does not raise."""
        held, self._held = self._held, None
        if held is not None:
            self._take(held)

    def _take(self, output: Any) -> None:
        assert self._consume is not None
        self._taken_at = self._groups.now()
        try:
            if self._consume(output):
                self.arrived = True
                return
        except Exception as error:
            self._failure = output = error
        self._waiting = False
        self._collect(output)

    async def _end(self, *, running: bool = True) -> None:
        """Release vLLM's resources for the request; abort it if it is ``running``."""
        if self._ended:
            return
        self._ended = True
        self._consume = self._held = None
        try:
            if self._collector is not None:
                await self._release(running=running)
        finally:
            if self._submitted:
                await self._on_end(self.arrived)

    async def _release(self, *, running: bool) -> None:
        collector, self._collector = self._collector, None
        del collector.put
        try:
            if running:
                await self._llm.abort(collector.request_id, internal=True)
        except Exception as error:
            raise self._translate(error) from error
        finally:
            collector.close()


def _death() -> Exception:
    """Return the error for a request that vLLM itself aborted: a copy of the model died, so vLLM ends all copies."""
    from vllm.v1.engine.exceptions import EngineDeadError

    death: Exception = EngineDeadError()
    return death


class OutputGroups:
    """A timer that groups outputs in time: an output of any request to a model may wait briefly for the next outputs.

    A model computes all its requests in the same steps, so their outputs come at the same times. A fast model generates
    more tokens per second than a user reads or hears. Then sending each token alone costs more than generating it.
    """

    def __init__(self) -> None:
        self._holding: list[ModelOutputs] = []

    @staticmethod
    def now() -> float:
        """Return the time of the event loop, in seconds."""
        return asyncio.get_running_loop().time()

    def hold(self, outputs: ModelOutputs) -> None:
        """Have the timer call ``outputs.take_held``, GROUP_SEC after the first output of the current group was held."""
        self._holding.append(outputs)
        if len(self._holding) == 1:
            asyncio.get_running_loop().call_later(GROUP_SEC, self._release)

    def _release(self) -> None:
        holding, self._holding = self._holding, []
        for outputs in holding:
            outputs.take_held()


# A model over several machines: what a start waits for, the loss of a machine, and the other machines' side.
#
# vLLM does the work. The server's machine has the front of the model and usually a part of it; the other machines run
# the rest (``run_node``, vLLM's headless mode). They find the front by its address, so they may come and go in any
# order.


#: How often a start that still waits says so, in seconds.
AGAIN_SEC: Final = 60.0
#: How often a node looks for its connections with the server, in seconds, and after how many looks without any the
#: server is gone.
_LOOK_SEC: Final = 1.0
_NODE_LOOKS: Final = 2


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """The part of a model that has to be started on another machine.

    ``lacks`` describes it for the operator, ``address`` is where this machine waits for it, and ``line`` is the command
    for the other machine, or for the first of several. ``str`` puts them into one text for the operator.
    """

    lacks: str
    address: str
    line: str

    def __str__(self) -> str:
        host = self.address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
        literal = literal_address(host)
        own = host == "localhost" or (literal is not None and literal.is_loopback)
        reached = " (which only this machine reaches: set data_parallel_address, or master_addr)" if own else ""
        return f"{self.lacks} at {self.address}{reached}; type there: {self.line}"


def elsewhere(args: AsyncEngineArgs, given: Mapping[str, Any]) -> Elsewhere | None:
    """Return the part of a model that has to be started on other machines by hand; None if there is none.

    ``given`` are those of vLLM's ``args`` that are not defaults, for the command.
    """
    from vllm.config import ParallelConfig
    from vllm.utils.network_utils import get_tcp_uri

    size = int(args.data_parallel_size)
    local = size if args.data_parallel_size_local is None else int(args.data_parallel_size_local)
    nodes = int(args.nnodes)
    if nodes > 1 and int(args.node_rank) == 0:
        address = get_tcp_uri(args.master_addr, int(args.master_port))
        machines = "another machine" if nodes == 2 else f"{nodes - 1} other machines (each with a node_rank of its own)"
        return Elsewhere(machines, address, _line({**given, "node_rank": 1}))
    own_fronts = args.data_parallel_hybrid_lb or args.data_parallel_external_lb
    if args.data_parallel_backend != "mp" or own_fronts or args.data_parallel_rank is not None or local >= size:
        return None
    host = args.data_parallel_address or args.master_addr or ParallelConfig.data_parallel_master_ip
    port = args.data_parallel_rpc_port or ParallelConfig.data_parallel_rpc_port
    changes = {
        "data_parallel_address": host,
        "data_parallel_rpc_port": port,
        "data_parallel_size_local": size - local,
        "data_parallel_start_rank": local,
    }
    copies = f"{size - local} of its {size} copies, on another machine,"
    return Elsewhere(copies, get_tcp_uri(host, int(port)), _line({**given, **changes}))


def _line(args: Mapping[str, Any]) -> str:
    """Return the ``omni-ws vllm-node`` command with ``args``, vLLM's arguments."""
    command = ["omni-ws", "vllm-node", "--model", str(args["model"])]
    for name, value in args.items():
        if name != "model":
            command += [f"--vllm.args.{name}", _text(value)]
    return shlex.join(command)


def _text(value: object) -> str:
    """Return a value in the form that the command line takes: as JSON, or a string as it is if possible."""
    if isinstance(value, str) and parse_free_form(value) == value:
        return value
    return msgspec.json.encode(value).decode()


@contextmanager
def telling_of_others(role: str, args: AsyncEngineArgs, given: Mapping[str, Any]) -> Iterator[None]:
    """Log, while the block starts the model ``role``, which other machines the start waits for, and which have come.

    Nothing is logged for a model on this machine alone. ``args`` and ``given`` are those of ``elsewhere``.
    """
    needed = elsewhere(args, given)
    if needed is None:
        yield
        return
    log.warning("the %s waits for %s", role, needed)
    # The only place in which vLLM tells who has come.
    told = logging.getLogger("vllm.v1.engine.utils")
    reader = _Registrations(role, needed)
    level = told.level
    told.addFilter(reader)
    told.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        told.setLevel(level)
        told.removeFilter(reader)


class _Registrations(logging.Filter):
    """A log filter that reads vLLM's debug messages about registering processes, and keeps them out of the log."""

    def __init__(self, role: str, needed: Elsewhere) -> None:
        super().__init__()
        self._role = role
        self._needed = needed
        self._told_at = time.monotonic()

    def filter(self, record: logging.LogRecord) -> bool:
        match record.args:
            case ("HELLO", "remote", rank):
                log.warning("copy %s of the %s has come, and loads", rank, self._role)
            case (int(), int(missing)) if missing and "connect" in record.msg:
                if time.monotonic() - self._told_at >= AGAIN_SEC:
                    self._told_at = time.monotonic()
                    log.warning("the %s still waits for %s", self._role, self._needed)
        return record.levelno >= logging.getLogger("vllm").getEffectiveLevel()


class OtherMachines:
    """A watch on the connections with a model's copies on other machines; vLLM only watches processes on this one."""

    def __init__(self, llm: AsyncLLM) -> None:
        import zmq

        core = llm.engine_core
        address = f"inproc://connections-{id(self)}"
        zmq.Socket.shadow(core.input_socket).monitor(address, zmq.EVENT_DISCONNECTED)
        self._events: Any = core.resources.ctx.socket(zmq.PAIR)
        self._events.connect(address)

    @classmethod
    def of(cls, llm: AsyncLLM) -> OtherMachines | None:
        """Return a watch for a model that has started; None if it has no copies on other machines."""
        parallel = llm.vllm_config.parallel_config
        remote = parallel.data_parallel_size > parallel.data_parallel_size_local and not parallel.local_engines_only
        return cls(llm) if remote and parallel.data_parallel_backend == "mp" else None

    @property
    def lost(self) -> bool:
        """Whether a connection has ended. A machine that loses its power or its cable is not noticed."""
        return bool(self._events.poll(0))

    def close(self) -> None:
        self._events.close(linger=0)


def run_node(args: AsyncEngineArgs) -> NoReturn:
    """Run this machine's part of a model until SIGTERM or SIGINT (SystemExit), and start it again whenever it ends.

    The processes here end with those of the server; new ones wait for the next server. Raises ConfigurationError if the
    server's address is not found, or vLLM refuses the arguments.
    """
    from vllm.entrypoints.cli.serve import run_headless

    options = argparse.Namespace(**vars(args), api_server_count=0)
    server = args.master_addr if int(args.nnodes) > 1 else args.data_parallel_address or args.master_addr
    try:
        addresses = {str(found[4][0]) for found in socket.getaddrinfo(server, None)}
    except OSError as error:
        raise ConfigurationError([f"the server {server} is not found: {error.strerror}"]) from None
    threading.Thread(target=_follow, args=(frozenset(addresses),), daemon=True).start()
    backoff = Backoff()
    while True:
        began = time.monotonic()
        try:
            with marked_processes():
                run_headless(options)
        except (ValueError, AssertionError, NotImplementedError) as error:
            raise ConfigurationError([str(error)]) from error
        if time.monotonic() - began > STABLE_AFTER_SEC:
            backoff.reset()
        print(f"omni-ws vllm-node: this part of the model has ended; it waits for {server} again", file=sys.stderr)
        time.sleep(backoff.next())


def _follow(server: frozenset[str]) -> NoReturn:
    """Kill this process's models when all their connections with the server have ended: they do not notice the end."""
    import psutil

    this, looks = psutil.Process(), 0
    connected: set[psutil.Process] = set()
    while True:
        time.sleep(_LOOK_SEC)
        now = {one for one in this.children(recursive=True) if _is_connected(one, server)}
        looks = 0 if now else looks + 1
        connected |= now
        if looks >= _NODE_LOOKS and connected:
            for process in connected:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            connected.clear()


def _is_connected(process: Any, server: frozenset[str]) -> bool:
    """Whether a process has a TCP connection with one of the addresses ``server``, other than with itself."""
    import psutil

    try:
        connections = process.net_connections("tcp")
    except psutil.Error:
        return False
    own = {one.laddr for one in connections}
    return any(
        one.status == psutil.CONN_ESTABLISHED and one.raddr.ip in server and one.raddr not in own for one in connections
    )
