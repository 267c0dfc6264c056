"""The process that runs a GGUF model: ``python -m omni_ws.engine.llm.gguf_server``.

The process runs llama.cpp's HTTP server, from the package xllamacpp, on a local port that the system chooses; requests
need a key. A separate process keeps a crash of native code, or a lack of memory, from ending omni_ws. The process
receives one message, an Order, and sends one, ModelServed or NotServed.
"""

from __future__ import annotations

import os
import sys
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec

from omni_ws.engine.child_main import ServerLink, leave_signals_to_server

if sys.platform == "linux":
    import fcntl

#: The verbosity of llama.cpp's log.
_ERRORS_ALONE: Final = 1
#: Without mmap: on a CPU llama.cpp keeps a reordered copy of most weights, and would have both in memory.
_READ_WHOLE: Final = 0
#: GGML_TYPE_Q8_0, of the keys and values of the context: half the memory of 16 bits.
_EIGHT_BITS: Final = 8
#: Thinking is on if the template does not decide.
_AS_THE_MODEL_DOES: Final = -1
#: The limit on the cache of prompts of earlier conversations. llama.cpp's default is 8 GiB.
_CACHE_MIB: Final = 256
#: How many tokens of prompts are computed in one step. Answers that are being written, and the end of a request that is
#: given up, wait for the step.
_BATCH: Final = 128
#: Requests without a slot get the one unused longest, and what it had goes to the cache. By default they get that with
#: the longest common beginning, and overwrite the history of another conversation with the same instructions.
_OLDEST_SLOT: Final = 0.0
#: Connections besides those of answers, for health checks.
_SPARE_THREADS: Final = 2
_PROPERTIES_SEC: Final = 60.0
#: Added to the nice value of the process: recognition and the voice go first, since an answer that begins late is less
#: bad than words that are lost, and speech that stops.
_NICENESS: Final = 5
#: Added to the badness score of the process, of at most 1000, by which the system chooses what to kill (proc(5)).
_OUT_OF_MEMORY_SCORE: Final = "500"


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """The order to serve a model. ``key`` is the API key of requests, ``context`` the tokens for one conversation."""

    file: str
    #: The model's name.
    name: str
    key: str
    context: int
    #: How many conversations are answered at the same time.
    parallel: int
    threads: int
    #: Whether a reasoning model thinks before it answers.
    think: bool = False
    #: Whether the context is kept in 8 bits.
    eight_bits: bool = False
    #: A Jinja chat template that replaces the model's own.
    chat_template: str | None = None

    def __repr__(self) -> str:
        """Return a text without the key, which must not be logged."""
        return f"Order({self.file!r})"


class ModelServed(msgspec.Struct, frozen=True, tag=True):
    """A report that the model is served: the URL, the context in tokens, and whether the chat template has tools."""

    address: str
    context: int
    tools: bool


class NotServed(msgspec.Struct, frozen=True, tag=True):
    """A report that the model cannot be served, with the error of xllamacpp; details are in llama.cpp's log."""

    reason: str


FromModel: TypeAlias = ModelServed | NotServed


def main() -> None:
    """Load the model that the server orders (``Order``), and serve it until the standard input ends."""
    _be_first_to_go()
    _let_others_first()
    # llama.cpp would listen on the port of this variable, which Google's containers set.
    os.environ.pop("AIP_MODE", None)
    link = ServerLink(Order)
    order, _ = link.receive()
    _end_with_input_while_loading()
    try:
        server = _server(order)
        served = _served(server.listening_address, order.key)
    except Exception as error:  # whatever the package raises
        link.send(NotServed(str(error)))
        os._exit(1)
    # llama.cpp's signal handlers would end its work but not the process.
    leave_signals_to_server()
    link.send(served)
    link.receive()  # nothing more comes


def _server(order: Order) -> Any:
    """Return llama.cpp's server, with the model loaded. Raises the exceptions of xllamacpp."""
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path, parameters.model_alias = order.file, {order.name}
    parameters.hostnames, parameters.port, parameters.api_keys = ["127.0.0.1"], 0, [order.key]
    # llama.cpp divides its context among the conversations.
    parameters.n_ctx, parameters.n_parallel = order.context * order.parallel, order.parallel
    parameters.kv_unified = False
    parameters.n_batch = _BATCH
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = order.threads
    parameters.n_threads_http = order.parallel + _SPARE_THREADS
    parameters.load_mode = _READ_WHOLE
    if order.eight_bits:
        parameters.cache_type_k = parameters.cache_type_v = xllamacpp.ggml_type(_EIGHT_BITS)
    parameters.n_gpu_layers, parameters.cache_ram_mib = 0, _CACHE_MIB
    parameters.slot_prompt_similarity = _OLDEST_SLOT
    parameters.use_jinja, parameters.ui, parameters.endpoint_slots = True, False, False
    parameters.enable_reasoning = _AS_THE_MODEL_DOES if order.think else 0
    parameters.verbosity = _ERRORS_ALONE
    if order.chat_template is not None:
        parameters.chat_template = order.chat_template
    return xllamacpp.Server(parameters)


def _served(address: str, key: str) -> ModelServed:
    """Ask the llama.cpp server at ``address`` for the properties of its model, and return them."""
    request = urllib.request.Request(f"{address}/props", headers={"Authorization": f"Bearer {key}"})
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(request, timeout=_PROPERTIES_SEC) as answer:
        told = msgspec.json.decode(answer.read())
    return ModelServed(
        address=address,
        context=told["default_generation_settings"]["n_ctx"],
        tools=bool(told.get("chat_template_caps", {}).get("supports_tools")),
    )


def _be_first_to_go() -> None:
    """Have the operating system kill this process, rather than omni_ws's server, when memory runs out."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_OUT_OF_MEMORY_SCORE, encoding="ascii")


def _let_others_first() -> None:
    """Give this process a lower CPU priority than the server's other processes."""
    if hasattr(os, "nice"):
        os.nice(_NICENESS)


def _end_with_input_while_loading() -> None:
    """End this process at the end of its input even while xllamacpp loads a model.

    xllamacpp then holds the GIL, so no thread of Python can run. Linux sends SIGIO when the other end is closed.
    """
    if sys.platform == "linux":
        fcntl.fcntl(0, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(0, fcntl.F_SETFL, fcntl.fcntl(0, fcntl.F_GETFL) | os.O_ASYNC)


if __name__ == "__main__":
    main()
