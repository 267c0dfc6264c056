"""GgufEngine: a language model in a GGUF file, which llama.cpp runs in a separate process; and its tool calls."""

from __future__ import annotations

import asyncio
import glob
import logging
import re
import secrets
import struct
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import orjson

from omni_ws.core.chunks import (
    AudioFormat,
    FinishReason,
    InputChunk,
    InputMode,
    Modality,
    OutputModality,
    Task,
    ToolCallFragment,
)
from omni_ws.core.history import Message
from omni_ws.engine.base import (
    EngineCapabilities,
    EngineOutput,
    EngineState,
    Finished,
    GenerationRequest,
    InputSource,
    OutputFilter,
    OutputWriter,
    StructuredOutput,
    TextOutput,
    ThoughtOutput,
    ToolCallOutput,
    Unread,
)
from omni_ws.engine.child import Backoff, Child, ChildEnded, keep_running
from omni_ws.engine.decoding import Chunks
from omni_ws.engine.llm.gguf_server import FromModel, ModelServed, Order
from omni_ws.engine.remote.answer_stream import OpenBrackets
from omni_ws.engine.remote.engine import RemoteLlmEngine
from omni_ws.engine.remote.settings import RemoteLlmSettings
from omni_ws.engine.threads import available_memory, cores, end_tasks, free_cores
from omni_ws.errors import EngineFailed, EngineOverloaded, OmniError

logger = logging.getLogger(__name__)

#: How long an answer waits for a free place, in seconds.
PLACE_SEC: Final = 2.0
#: How long after the loss of a connection to wait for the end of the process, in seconds.
_DEATH_SEC: Final = 1.0
#: For how many seconds the health checks of a process may fail: then it hangs, and is killed. Each check waits for
#: seconds, so that a busy machine kills none.
HANG_SEC: Final = 60.0
#: How often that is looked at, in seconds.
LOOK_SEC: Final = 5.0

SERVER_MODULE: Final = "omni_ws.engine.llm.gguf_server"

#: The chat template of Qwen2.5-Coder. In the form of its own one, the model writes calls that llama.cpp cannot read.
QWEN_CODER_TEMPLATE: Final = Path(__file__).with_name("qwen_coder.jinja")

#: The repetition penalty if the client sets none; llama.cpp applies it to the last 64 tokens.
REPETITION_PENALTY: Final = 1.1

#: llama.cpp's field of a request for the slot that processes it.
_SLOT: Final = "id_slot"

#: How many answers run at the same time: with more, each would be slower than speech.
_FEWEST_PARALLEL: Final = 2
_MOST_PARALLEL: Final = 4
#: With at most so many free cores, the model uses all of them: the ASR and the TTS have a higher priority.
_SHARED_CORES: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufSettings:
    """The file of a model, and how to run it. A number that is None is derived from the number of cores."""

    file: Path
    #: The model's name.
    name: str
    #: The context of one conversation, in tokens.
    context: int = 4096
    threads: int | None = None
    #: How many conversations are answered at the same time.
    parallel: int | None = None
    #: Whether a reasoning model thinks before it answers.
    think: bool = False
    #: Whether the context is kept in 8 bits, which takes half the memory. Not all models can do that.
    eight_bits: bool = False
    #: The file of a Jinja chat template that replaces the model's own.
    chat_template: Path | None = None
    #: Instructions with which most conversations begin. They are processed at the start, so that no first answer waits
    #: for them.
    instructions: str = ""
    #: Pairs of words and answers with which a conversation with these instructions begins: a small model learns more
    #: from them than from rules. They are left out where there are tools, which could do what an example refuses.
    examples: tuple[tuple[str, str], ...] = ()
    #: Sampling parameters for clients that set none of them.
    sampling: Mapping[str, Any] = field(default_factory=dict)
    #: A note on the model for the operator.
    about: str = ""
    #: How long the first output of an answer may take, in seconds.
    first_byte_timeout: float = 120


class GgufEngine:
    """An engine for the task ``chat``: a llama.cpp process, and a RemoteLlmEngine that sends requests to it.

    If the process dies, the answers in progress fail, ``state`` becomes UNHEALTHY, and a new process is started, with
    increasing delays until this succeeds. Each process has its own port and key.
    """

    name = "gguf"

    def __init__(self, settings: GgufSettings) -> None:
        self.model = settings.name
        self.active_requests = 0
        self.settings = settings
        self.parallel = settings.parallel or max(_FEWEST_PARALLEL, min(cores() // 2, _MOST_PARALLEL))
        self.threads = settings.threads or threads_of(free_cores())
        self._places = _Places(self.parallel)
        self._running: RunningModel | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._capabilities = RemoteLlmEngine(_settings_of(settings, "", "", tools=False)).capabilities

    @property
    def capabilities(self) -> EngineCapabilities:
        return self._capabilities

    @property
    def state(self) -> EngineState:
        if self._keeper is None:
            return EngineState.STARTING
        if self._running is None or self._running.child.ended:
            return EngineState.UNHEALTHY
        return self._running.llm.state

    @property
    def process(self) -> RunningModel | None:
        """The running process; None while it is being restarted."""
        return self._running

    def describe(self) -> tuple[str, ...]:
        if self._running is None:
            return ()
        ready = self._running.served
        line = (
            f"{self.model} runs on {_count(self.threads, 'thread')}, with a context of {ready.context} tokens for each "
            f"of {_count(self.parallel, 'conversation')} at a time"
        )
        tools = "" if ready.tools else "; its chat template leaves tools out, so they are refused"
        return (line + tools, *filter(None, (self.settings.about,)))

    # life

    async def start(self) -> None:
        """Load the model. Idempotent. Raises EngineFailed if the file is no model or cannot be loaded."""
        if self._keeper is not None:
            return
        try:
            await self._launch()
        except OSError as error:
            raise EngineFailed("llama.cpp does not start") from error
        keeping = keep_running("llama.cpp", self._until_death, self._launch, Backoff())
        self._keeper = asyncio.create_task(keeping, name="watch over llama.cpp")

    async def stop(self) -> None:
        """End the process. Idempotent."""
        keeper, self._keeper = self._keeper, None
        await end_tasks(keeper)
        await self._release()

    async def _launch(self) -> None:
        settings, key = self.settings, secrets.token_urlsafe(32)
        template = await asyncio.to_thread(_checked_template, settings)
        order = Order(
            file=str(settings.file),
            name=settings.name,
            key=key,
            context=settings.context,
            parallel=self.parallel,
            threads=self.threads,
            think=settings.think,
            eight_bits=settings.eight_bits,
            chat_template=template,
        )
        child = await Child.start("llama.cpp", SERVER_MODULE, kinds=FromModel, keeps_log=True)
        async with AsyncExitStack() as undo:
            undo.push_async_callback(child.end)
            served = await _loaded(child, order)
            llm = RemoteLlmEngine(_settings_of(settings, served.address, key, tools=served.tools))
            undo.push_async_callback(llm.stop)
            await llm.start()
            running = RunningModel(child, served, llm)
            self._places.note_start(filled=bool(settings.instructions))
            if settings.instructions:
                await running.compute(settings, self.parallel)
            undo.pop_all()
        able = replace(llm.capabilities, context=served.context, shares_cores=True)
        self._running, self._capabilities = running, able

    async def _release(self) -> int | None:
        running, self._running = self._running, None
        if running is None:
            return None
        try:
            return await running.child.end()
        finally:
            await running.llm.stop()

    async def _until_death(self) -> str:
        assert self._running is not None
        running, child, lost_sec = self._running, self._running.child, 0.0
        while not await running.has_ended(within=LOOK_SEC):
            lost_sec = 0.0 if running.llm.state is EngineState.OK else lost_sec + LOOK_SEC
            if lost_sec >= HANG_SEC:
                logger.warning("llama.cpp has not answered for %g s and is killed", HANG_SEC)
                child.kill()
        return f"status {await self._release()}; {child.last_words or 'it said nothing'}"

    # requests

    async def generate(self, request: GenerationRequest, out: OutputWriter) -> None:
        running = self._running
        if running is None:
            raise EngineFailed("the process of the model has died, and is being started again", fatal=True)
        if not request.computes_only:
            await self._generate(running, request, out)
        elif self._places.in_use or not await self._places.compute(partial(self._generate, running, request, out)):
            raise EngineOverloaded("an answer goes before what is computed ahead")

    async def _generate(self, running: RunningModel, request: GenerationRequest, out: OutputWriter) -> None:
        place = _Place(self._places, request)
        self.active_requests += 1
        try:
            begun = _begun(request, self.settings)
            fields = dict(begun.sampling)
            asked = replace(begun, sampling=fields, input=place.after(request.input, fields))
            await _answer(running.llm, asked, out)
        except EngineFailed:
            if await running.has_ended():
                raise EngineFailed("the process of the model has died", fatal=True) from None
            raise
        finally:
            place.leave()
            self.active_requests -= 1


def threads_of(free: int) -> int:
    """Return the number of threads for a model if ``free`` cores are free.

    If there are three or more, one core is left to the ASR and the TTS. More threads than free cores are worse than
    fewer: in each step, all threads wait for the slowest one.
    """
    return free if free <= _SHARED_CORES else free - 1


async def _answer(llm: RemoteLlmEngine, request: GenerationRequest, out: OutputWriter) -> None:
    """Write the answer of ``llm``, with tool calls only if ``request`` allows them, and always if it requires them."""
    if not request.tools:
        await llm.generate(request, out)
    elif request.tool_choice == "none":
        await llm.generate(replace(request, tools=(), tool_choice=None), out)
    elif must_call(request):
        await llm.generate(in_json(request), CallsInJson(out))
    else:
        taken: list[InputChunk] = []
        watch = CallWatch(out, request)  # also behind text that was begun elsewhere
        try:
            await llm.generate(replace(request, input=_noted(request.input, taken)), watch)
        except CallWritten:
            again = in_json(replace(request, input=Chunks(tuple(taken)), begun=""))
            await llm.generate(again, CallsInJson(out, before=watch.tokens))


async def _noted(source: InputSource, taken: list[InputChunk]) -> AsyncIterator[InputChunk]:
    """Yield the chunks of ``source``, and append each to ``taken``."""
    async for chunk in source:
        taken.append(chunk)
        yield chunk


@dataclass(frozen=True, slots=True)
class RunningModel:
    """A running llama.cpp process, its description of the model, and the RemoteLlmEngine that sends requests to it."""

    child: Child
    served: ModelServed
    llm: RemoteLlmEngine

    @property
    def pid(self) -> int:
        return self.child.pid

    async def compute(self, settings: GgufSettings, parallel: int) -> None:
        """Have llama.cpp process the instructions and examples with which most conversations begin, and cache them.

        The first of ``parallel`` slots gets this prompt. The other slots get a short prompt, because llama.cpp does not
        load cached prompts into an empty slot. A failure is only logged.
        """
        request = GenerationRequest(
            request_id="start",
            task=Task.CHAT,
            input=Chunks((InputChunk(Modality.TEXT, b"Hello."),)),
            input_mode=InputMode.SNAPSHOT,
            input_audio=AudioFormat(),
            modalities=frozenset({OutputModality.TEXT}),
            instructions=settings.instructions,
            sampling={"max_tokens": 1},
        )
        try:
            for slot in range(parallel):
                begun = _begun(request if not slot else replace(request, instructions=""), settings)
                await self.llm.generate(replace(begun, sampling={**begun.sampling, _SLOT: slot}), Unread())
        except OmniError as error:  # the first answer will begin later, and report the error
            logger.warning("the instructions were not computed ahead: %s", error)

    async def has_ended(self, *, within: float = _DEATH_SEC) -> bool:
        """Return whether the process ends ``within`` seconds, by default those after a connection to it was lost."""
        try:
            async with asyncio.timeout(within):
                await self.child.wait()
        except TimeoutError:
            return False
        return True


class _Places:
    """The slots of llama.cpp, each for one of the concurrent answers. A slot keeps the KV cache of its last prompt."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._free = asyncio.Semaphore(number)
        #: From each free slot to its last conversation. The slot that was unused longest comes first.
        self._slots: dict[int, str | None] = dict.fromkeys(range(number))
        self.note_start(filled=False)
        #: Prompts that are computed for later requests.
        self._ahead: set[asyncio.Task[None]] = set()

    def note_start(self, *, filled: bool) -> None:
        """Note that the process was started; ``filled``: each slot has processed a prompt, see RunningModel.compute."""
        #: The slots in which nothing was computed yet.
        self._empty = set[int]() if filled else set(range(self.number))

    @property
    def in_use(self) -> bool:
        """Whether any slot is in use, for an answer or for a prompt that is computed ahead."""
        return len(self._slots) < self.number

    async def compute(self, work: Callable[[], Coroutine[Any, Any, None]]) -> bool:
        """Run ``work`` until it is done or ``give_way`` cancels it; return whether it was done."""
        task = asyncio.create_task(work(), name="a prompt ahead")
        self._ahead.add(task)
        task.add_done_callback(self._ahead.discard)
        try:
            await asyncio.wait([task])
            if task.cancelled():
                return False
            task.result()
            return True
        finally:
            task.cancel()

    async def give_way(self) -> None:
        """Cancel the computation of prompts for later requests. llama.cpp keeps the part that is computed."""
        await end_tasks(*self._ahead)

    async def take(self, conversation: str | None) -> tuple[int, bool]:
        """Wait for a free slot; return its number, and whether the request has to name it.

        The slot is the last one of the conversation, or else the slot that was unused longest. llama.cpp by itself also
        chooses the slot that was unused longest, and first saves its KV cache, which it does not do for a slot that a
        request names. So the request names only the conversation's own slot, or an empty slot: among empty slots,
        llama.cpp would choose any.
        """
        await self._free.acquire()
        had = (slot for slot, last in self._slots.items() if last == conversation is not None)
        slot = next(had, None)
        taken = next(iter(self._slots)) if slot is None else slot
        del self._slots[taken]
        named = slot is not None or taken in self._empty
        self._empty.discard(taken)
        return taken, named

    def give_back(self, slot: int, conversation: str | None) -> None:
        self._slots[slot] = conversation
        self._free.release()


class _Place:
    """The slot of one request, which the request takes when its input has ended."""

    def __init__(self, places: _Places, request: GenerationRequest) -> None:
        self._places = places
        self._gives_way = request.computes_only
        #: The conversation; over HTTP, where it has no ID, the words with which it began.
        self._conversation = request.conversation or (request.history[0].text if request.history else None)
        self._slot: int | None = None

    async def after(self, source: InputSource, fields: dict[str, Any]) -> AsyncIterator[InputChunk]:
        """Yield the whole input, then wait for a slot, and add it to ``fields`` (of the HTTP request) if needed.

        Raises EngineOverloaded if no slot becomes free within PLACE_SEC.
        """
        async for chunk in source:
            if self._conversation is None and chunk.modality is Modality.TEXT:
                self._conversation = chunk.payload.decode(errors="replace")
            yield chunk
        if not self._gives_way:
            await self._places.give_way()
        try:
            async with asyncio.timeout(PLACE_SEC):
                self._slot, named = await self._places.take(self._conversation)
        except TimeoutError:
            raise EngineOverloaded(
                f"the model answers {_count(self._places.number, 'conversation')} at a time; retry later",
                retry_after_ms=1000,
            ) from None
        if named:
            fields[_SLOT] = self._slot

    def leave(self) -> None:
        """Return the slot, if one was taken. Idempotent."""
        if self._slot is not None:
            slot, self._slot = self._slot, None
            self._places.give_back(slot, self._conversation)


def _checked_template(settings: GgufSettings) -> str | None:
    """Check the files in ``settings``; return the text of the chat template, if any. Raises EngineFailed. Blocks."""
    check_model_file(settings.file)
    if (template := settings.chat_template) is None:
        return None
    try:
        return template.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise EngineFailed(f"cannot read the chat template {template}: {reason}", fatal=True) from None


def _begun(request: GenerationRequest, settings: GgufSettings) -> GenerationRequest:
    """Return ``request`` for the model: with the default sampling parameters and the examples of ``settings``.

    The examples are added only to a request that has the instructions of ``settings`` and no tools.
    """
    sampling = _without_loops(replace(request, sampling={**settings.sampling, **request.sampling}))
    if not request.instructions or request.tools or request.instructions != settings.instructions:
        return replace(request, sampling=sampling)
    examples = (
        Message(role, said)
        for pair in settings.examples
        for role, said in zip(("user", "assistant"), pair, strict=True)
    )
    return replace(request, sampling=sampling, history=(*examples, *request.history))


def _without_loops(request: GenerationRequest) -> Mapping[str, Any]:
    """Return the request's sampling parameters with a repetition penalty, since small models may repeat text endlessly.

    No penalty is added if the answer may be JSON or a tool call, which repeat their punctuation, if the client sets any
    penalty, or if the client requests log-probabilities, which a penalty would change.
    """
    named = {"repetition_penalty", "presence_penalty", "frequency_penalty"} & request.sampling.keys()
    options = request.options
    if named or request.tools or options.structure is not None or options.logprobs is not None:
        return request.sampling
    return {**request.sampling, "repetition_penalty": REPETITION_PENALTY}


def _settings_of(settings: GgufSettings, address: str, key: str, *, tools: bool) -> RemoteLlmSettings:
    return RemoteLlmSettings(
        urls=(address,),
        model=settings.name,
        api_key=key,
        section="llm",
        # A request that did not reach this process will not reach any other.
        retries=0,
        start_timeout=0,
        first_byte_timeout=settings.first_byte_timeout,
        options=("response_format", "logprobs", *(("tools",) if tools else ())),
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


async def _loaded(child: Child, order: Order) -> ModelServed:
    """Send ``order`` to the process, and return its ModelServed. Raises EngineFailed if the model cannot be loaded."""
    child.send(order)
    reason = ""
    try:
        answer, _ = await child.receive()
        if isinstance(answer, ModelServed):
            return answer
        reason = answer.reason
    except ChildEnded:
        pass
    status = await child.end()
    # The package only reports that it failed; the reason is in the log of llama.cpp.
    reason = child.last_words or reason or _how_it_ended(status)
    raise EngineFailed(f"llama.cpp does not load {order.file}: {reason}", fatal=True)


def _how_it_ended(status: int) -> str:
    if status == -9:
        return "it was killed, perhaps because memory ran out"
    return f"it ended by itself, status {status}"


# Checks of the file before it is loaded

_MAGIC: Final = b"GGUF"
#: The magic and the version, little-endian.
_HEAD: Final = struct.Struct("<4sI")
#: The versions of the format that llama.cpp reads.
_VERSIONS: Final = (2, 3)
#: The name of a file of a model that is split into several files.
_PART_NAME: Final = re.compile(r"(.+-)\d{5}(-of-\d{5}\.gguf)")
_GB: Final = 1_000_000_000


def check_model_file(file: Path) -> None:
    """Check that llama.cpp can run ``file``. Raises EngineFailed, with a one-sentence message, if it cannot."""
    if file.exists() and not file.is_file():
        raise EngineFailed(f"{file} is not a file", fatal=True)
    try:
        with file.open("rb") as opened:
            head = opened.read(_HEAD.size)
        size = sum(part.stat().st_size for part in _parts(file))
    except OSError as error:
        raise EngineFailed(f"cannot read {file}: {error.strerror}", fatal=True) from None
    if len(head) < _HEAD.size or not head.startswith(_MAGIC):
        raise EngineFailed(f"{file} is not a GGUF file: it does not begin with {_MAGIC.decode()}", fatal=True)
    _, version = _HEAD.unpack(head)
    if version not in _VERSIONS:
        raise EngineFailed(f"{file} is of a version of GGUF that llama.cpp does not read", fatal=True)
    free = available_memory()
    if free is not None and size > free:
        raise EngineFailed(
            f"{file} is too large for this machine: {_gigabytes(size)} of weights, {_gigabytes(free)} of memory free",
            fatal=True,
        )


def _parts(file: Path) -> list[Path]:
    """Return all files of the model to which ``file`` belongs: a large model is split into several files."""
    named = _PART_NAME.fullmatch(file.name)
    return [file] if named is None else [*file.parent.glob(f"{glob.escape(named[1])}?????{named[2]}")]


def _gigabytes(size: int) -> str:
    return f"{size / _GB:.1f} GB"


# Tool calls that llama.cpp does not make by itself.
#
# llama.cpp holds the arguments of a call to their schema once a model has begun the call as its chat template has it.
# But a model that must call may go on in words, a tool that the client chose is not chosen, and a call in another form
# is text. So calls that the client requires, and calls that are begun in another form, are answers in JSON here: a list
# that is held to a schema with the tools, which CallsInJson converts to calls.

#: The text from the end of one call to the arguments of the next; ``name`` comes first, as in ``schema_of_calls``.
_CALL_HEAD: Final = re.compile(r'[\s\[,}]*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*')

#: The beginning of a call in a form that models write instead of their template's: JSON, perhaps in a fence or a tag,
#: perhaps with two braces for one, as an often copied template of Qwen2.5 shows it.
_WRITTEN: Final = re.compile(
    r'\s*(?:```\w*|<tools?(?:_call)?>|\s)*\[?\s*\{{1,2}\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"(?:arguments|parameters)"\s*:'
)
#: The first characters of such a beginning, and how many characters are held back while a text may be one.
_MAY_BEGIN: Final = ("{", "[", "`", "<")
_MOST_HELD: Final = 200


class CallWritten(Exception):
    """Raised by CallWatch when the model has begun to write a tool call as text."""


def must_call(request: GenerationRequest) -> bool:
    """Whether the client requires a tool call, of any tool or of a named one."""
    return bool(request.tools) and request.tool_choice not in (None, "auto", "none")


def in_json(request: GenerationRequest) -> GenerationRequest:
    """Return ``request`` with an answer constrained to a JSON list of at least one tool call.

    If the client named a tool, the answer is a single call of this tool. It is also a single call if the client does
    not allow parallel calls.
    """
    choice = request.tool_choice
    named = choice["function"]["name"] if isinstance(choice, Mapping) else None
    wanted = [_function(tool) for tool in request.tools if named in (None, _function(tool)["name"])]
    one = named is not None or not request.options.parallel_tool_calls
    structure = StructuredOutput(schema=schema_of_calls(wanted, one=one))
    return replace(request, tool_choice=None, options=replace(request.options, structure=structure, logprobs=None))


def schema_of_calls(functions: Sequence[Mapping[str, Any]], *, one: bool) -> dict[str, Any]:
    """Return the JSON Schema of a list of calls of ``functions``; with ``one``, of a list with a single call."""
    definitions: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    for number, function in enumerate(functions):
        # References begin at the root of a schema, which is a definition now.
        place = f"#/$defs/{number}"
        definitions[str(number)] = {**_moved(function.get("parameters") or {}, place), "type": "object"}
        properties = {"name": {"const": function["name"]}, "arguments": {"$ref": place}}
        call = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
        calls.append(call)
    items = calls[0] if len(calls) == 1 else {"anyOf": calls}
    most = {"maxItems": 1} if one else {}
    return {"type": "array", "items": items, "minItems": 1, **most, "$defs": definitions}


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function: Mapping[str, Any] = tool["function"]
    return function


def _moved(value: Any, place: str) -> Any:
    """Return a copy of the schema ``value`` in which local references ("#/…") begin with ``place`` instead of "#"."""
    if isinstance(value, list):
        return [_moved(one, place) for one in value]
    if not isinstance(value, Mapping):
        return value
    return {
        name: place + one[1:] if name == "$ref" and isinstance(one, str) and one.startswith("#") else _moved(one, place)
        for name, one in value.items()
    }


class CallsInJson(OutputFilter):
    """An OutputWriter that converts a JSON list of tool calls, which arrives as text, to ToolCallOutputs.

    ``before`` is set if this is the second attempt at an answer: the number of tokens of the first attempt. The usage
    then counts both attempts, and therefore the prompt twice. Thoughts are then dropped, since the first attempt's
    were written already.
    """

    def __init__(self, out: OutputWriter, *, before: int | None = None) -> None:
        super().__init__(out)
        self._before = before
        self._count = 0
        #: The text that precedes arguments, as far as it has come.
        self._held = ""
        #: What is open in the arguments; None outside of them.
        self._arguments: OpenBrackets | None = None

    def write(self, output: EngineOutput) -> None:
        match output:
            case TextOutput(text=text):
                for fragment in self._read(text):
                    self._out.write(ToolCallOutput(fragment))
            case ThoughtOutput() if self._before is not None:
                pass
            case Finished(reason=reason, usage=usage):
                if self._count and reason is FinishReason.STOP:
                    reason = FinishReason.TOOL_CALLS
                if self._before is not None:
                    tokens = {
                        "input_tokens": 2 * usage.input_tokens,
                        "output_tokens": usage.output_tokens + self._before,
                    }
                    usage = replace(usage, **tokens)
                self._out.write(replace(output, reason=reason, usage=usage))
            case _:
                self._out.write(output)

    def _read(self, text: str) -> Iterator[ToolCallFragment]:
        while text:
            begun: tuple[str | None, str | None] = (None, None)
            if self._arguments is None:
                self._held += text
                head = _CALL_HEAD.match(self._held)
                if head is None or head.end() == len(self._held):
                    return  # the bracket of the arguments is still to come
                text, self._held = self._held[head.end() :], ""
                self._arguments = OpenBrackets()
                self._count += 1
                begun = (f"call_{uuid.uuid4().hex[:24]}", orjson.loads(head[1]))
            end = self._arguments.read(text)
            if end is not None:
                self._arguments = None
            yield ToolCallFragment(self._count - 1, *begun, text[:end])
            text = "" if end is None else text[end:]


class CallWatch(OutputFilter):
    """An OutputWriter that raises CallWritten if the answer begins with a tool call as text.

    While the text may be the beginning of a call, it is held back, up to 200 characters. It is a call only if it names
    a tool of the request. If the client allows only one call, further calls are dropped.
    """

    def __init__(self, out: OutputWriter, request: GenerationRequest) -> None:
        super().__init__(out)
        self._names = frozenset(_function(tool)["name"] for tool in request.tools)
        self._one = not request.options.parallel_tool_calls
        self._waits = True
        #: The pieces of the answer so far, of a token each.
        self.tokens = 0
        self._held: list[TextOutput] = []

    def write(self, output: EngineOutput) -> None:
        self.tokens += 1
        match output:
            case ToolCallOutput(call=call) if self._one and call.index > 0:
                return
            case TextOutput() if self._waits:
                self._held.append(output)
                if not self._may_be_call("".join(held.text for held in self._held)):
                    self._let_go()
                return
            case ToolCallOutput() | Finished():
                self._let_go()
        self._out.write(output)

    def _may_be_call(self, text: str) -> bool:
        """Whether the text so far may be the beginning of a tool call. Raises CallWritten if it certainly is."""
        begun = text.lstrip()
        if begun and not begun.startswith(_MAY_BEGIN):
            return False
        written = _WRITTEN.match(text)
        if written is not None and written[1] in self._names:
            raise CallWritten
        return written is None and len(text) <= _MOST_HELD

    def _let_go(self) -> None:
        held, self._held, self._waits = self._held, [], False
        for output in held:
            self._out.write(output)
