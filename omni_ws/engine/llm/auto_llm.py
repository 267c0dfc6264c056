"""AutoLlm: an LLM that answers by rules first, and by a language model as soon as one runs, without a restart.

FetchedMind is the model that ``--llm auto`` downloads, or has downloaded before; its Plan says what is allowed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from omni_ws.config.model import ServerConfig
from omni_ws.core.chunks import InputMode, Modality, OutputModality
from omni_ws.engine.answer_limit import go_on
from omni_ws.engine.base import Engine, EngineCapabilities, EngineState, GenerationRequest, OutputWriter
from omni_ws.engine.composed.parts import (
    Coming,
    ComingState,
    GrowingLlm,
)
from omni_ws.engine.decoding import Chunks
from omni_ws.engine.llm.rules_engine import is_plain
from omni_ws.engine.threads import Work, available_memory, cores, end_tasks, run_work
from omni_ws.errors import EngineFailed, OmniError, SessionConflict
from omni_ws.installing import fetch_command, install_command
from omni_ws.weights import (
    Fetching,
    PinnedWeights,
    Progress,
    WeightsCache,
    WeightsError,
    pinned_weights,
    weights_cache,
)

logger = logging.getLogger(__name__)

#: What this machine must have free for a model in this server: bytes of memory, cores, and bytes of disk for the fetch.
LEAST_MEMORY: Final = 4_000_000_000
LEAST_CORES: Final = 2
LEAST_DISK: Final = 3_000_000_000
#: The model that is fetched.
FETCHED: Final = "qwen"
#: Models that are used if they were fetched before, the best first. The others are often wrong: rules are better.
_USED: Final = ("qwen", "qwen3-1.7b", "qwen2.5-1.5b", "qwen3-0.6b")
#: What runs a model, and what talks with it.
_PACKAGES: Final = ("xllamacpp", "httpx")
#: How to have no language model.
RULES_ALONE: Final = "for rules alone: --llm rules, or make serve LLM=rules"


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan for a language model in this server.

    ``begins``: the server fetches or loads the model without being asked; ``can_begin``: it may do so when a user asks.
    ``why`` is a line for the operator. ``fetches``: the weights have to be downloaded first; otherwise they are on the
    disk already.
    """

    begins: bool
    can_begin: bool
    why: str
    fetches: bool = False


class FetchedMind:
    """A language model that was downloaded before, or may be downloaded.

    ``make`` creates the engine for the name of pinned weights, such as "qwen"; ``titles`` are the models' names for
    people. The server downloads a model on its own initiative only with the setting ``llm.fetch`` (``omni-ws serve
    --fetch``), and never with API keys, with several workers, or with ``CI`` in the environment.
    """

    def __init__(
        self,
        config: ServerConfig,
        make: Callable[[str], Engine],
        *,
        titles: Mapping[str, str],
        environ: Mapping[str, str] = os.environ,
        cache: WeightsCache | None = None,
    ) -> None:
        self._config = config
        self._make = make
        self._titles = titles
        self._environ = environ
        self._cache = cache or weights_cache()
        #: Models whose files are on the disk, but differ from the pinned ones.
        self._changed: set[str] = set()
        self._name = FETCHED

    @property
    def model(self) -> str:
        """The name of the model, which ``plan`` chooses."""
        return self._titles[self._name]

    @property
    def _weights(self) -> PinnedWeights:
        return pinned_weights()[self._name]

    def _there(self) -> Iterator[str]:
        """Yield the names of the models that were downloaded before, the best first. Checks only the files' sizes."""
        for name in _USED:
            weights = pinned_weights()[name]
            folder = self._cache.folder_of(weights)
            if name not in self._changed and all(_size(folder / file.name) == file.size for file in weights.files):
                yield name

    def plan(self) -> Plan:
        """Choose a model by the configuration, the downloaded files and this machine's resources; return the Plan.

        Blocks briefly; reads no weights.
        """
        found = next(self._there(), None)
        self._name, fetches = found or FETCHED, found is None
        line = f"to talk with the language model {self.model}, start with --llm {self._name}"
        if why := why_none(self._config, self._environ):
            return Plan(False, False, f"{line}; {why}")
        if lacking := [*self._lacking(fetches=fetches)]:
            return Plan(False, False, f"{line}; by itself it takes {' and '.join(lacking)}")
        if not all(map(find_spec, _PACKAGES)):
            return Plan(False, False, f"{line}, after: {install_command()}")
        if not fetches:
            why = f"{self.model}, which was fetched before, is being loaded, and answers soon; {RULES_ALONE}"
            return Plan(True, True, why)
        size = f"{self._weights.download / 1e9:.1f} GB"
        if self._config.api_key is not None or self._config.auth.keys_file is not None:
            return Plan(False, False, f"{line} ({size}); with keys configured nothing is fetched")
        if not self._config.llm.fetch:
            return Plan(False, True, f"{line} ({size}), or with --fetch", fetches)
        what = f"it is fetched ({size}, in the background, once)"
        return Plan(True, True, f"rules answer at once, and {self.model} as soon as {what}; {RULES_ALONE}", fetches)

    def _lacking(self, *, fetches: bool) -> Iterator[str]:
        memory = available_memory()
        if memory is not None and memory < LEAST_MEMORY:
            yield f"{LEAST_MEMORY / 1e9:.0f} GB of free memory"
        if cores() < LEAST_CORES:
            yield f"{LEAST_CORES} cores"
        if fetches and _free_disk(self._cache.folder) + self._cache.kept(self._weights) < LEAST_DISK:
            yield f"{LEAST_DISK / 1e9:.0f} GB of free disk in {self._cache.folder}"

    def fetch(self, fetching: Fetching, *, weights: bool) -> None:
        """Download the model's weights or, without ``weights``, choose among downloaded models. Blocks.

        Without ``weights``, the best model is used whose files have the pinned checksums. ``fetching`` gets the
        progress, and can stop the download. Raises WeightsError.
        """
        if weights:
            self._cache.fetch(self._weights, fetching)
            self._changed.discard(self._name)
            return
        wanted = self._name
        for name in [*self._there()]:
            if self._cache.find(pinned_weights()[name]) is not None:
                self._name = name
                return
            self._changed.add(name)
        raise WeightsError(f"its files have changed; fetch them with: {fetch_command(wanted)}")

    def engine(self) -> Engine:
        """Create the engine of the downloaded model, without starting it. Blocks."""
        return self._make(self._name)


def why_none(config: ServerConfig, environ: Mapping[str, str]) -> str:
    """Return why the configuration or the environment rules out an automatic choice of a language model; "" if none."""
    if environ.get("CI"):
        return "with CI in the environment none is chosen"
    # Several workers would each decide for itself, and clients talk with one model now, and with another one then.
    return "several workers choose none" if config.workers > 1 else ""


def _size(file: Path) -> int | None:
    """Return the size of a file in bytes; None if the file does not exist."""
    try:
        return file.stat().st_size
    except OSError:
        return None


def _free_disk(folder: Path) -> int:
    """Return the free space, in bytes, of the disk of ``folder``, which need not exist yet; 0 if it cannot be read."""
    for place in (folder, *folder.parents):
        try:
            return shutil.disk_usage(place).free
        except FileNotFoundError:
            continue
        except OSError:  # the home is another user's, as with sudo -u
            break
    return 0


#: How long a server that was found may take until it can be used. The start waits for it.
FOUND_SEC: Final = 3.0
#: How long the end of the server waits for the fetching thread. What has come by then is kept.
_STOP_SEC: Final = 1.0
#: The log tells the progress of a fetch at each tenth.
_TOLD_PARTS: Final = 10
_GB: Final = 1e9


@dataclass(frozen=True, slots=True)
class Found:
    """The result of the search for a model server: its engine, not started yet, or None; and lines for the operator."""

    engine: Engine | None = None
    lines: tuple[str, ...] = ()


class AutoLlm(GrowingLlm):
    """An engine for the task ``chat``: rules, which a language model replaces as soon as one runs.

    At the start, ``find`` looks for a model server on this machine. If there is none, the model ``mind`` is downloaded
    and loaded in the background, if its plan says so. A request keeps the engine it began with. The rules go on
    answering requests that the model cannot: those with pictures or raw prompts, and all plain requests while the model
    does not run. ``on_change`` is called when another engine answers and the capabilities may have changed, and when
    ``coming`` changes.
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
        """The capabilities of the engine that answers, plus ``extend`` and ``raw_prompts``, which the rules have."""
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
        """Start the rules, and look for a model. Idempotent. Raises EngineFailed if the rules do not start."""
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
        """Stop the search, the download and both engines. Downloaded files are kept. Idempotent."""
        growing, self._growing, self._looked = self._growing, None, False
        self._fetching.stop.set()
        await end_tasks(growing)
        llm, self._llm, self.coming = self._llm, None, None
        self.name, self.model = self._rules.name, self._rules.model
        if llm is not None:
            await llm.stop()
        await self._rules.stop()

    # the model

    async def fetch(self) -> Coming:
        """Begin to fetch the model because a user of this machine asks for it; return the model's state.

        A fetch that is under way goes on. Raises SessionConflict if there is no model to fetch, or if this machine or
        the configuration does not allow it.
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
        """Download the model if planned, load it, and let it answer from then on."""
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
        """Run ``call`` in a new daemon thread: it may wait for the network, and must not keep the process alive."""
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
        """Note and log the progress of the download. Called from the download's thread."""
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
        messages = (one for message in request.history for one in (message, *message.more))
        seen = {one.picture.modality for one in messages if one.picture is not None}
        if seen - llm.capabilities.pictures_in_history:  # the request came while the rules took them
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
        try:
            await go_on(llm, request, out)
        except EngineFailed as error:
            error.fatal = False  # the session goes on with the rules, until the model runs again
            raise
