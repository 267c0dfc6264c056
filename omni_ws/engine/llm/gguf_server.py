"""The process that runs a GGUF model: ``python -m omni_ws.engine.llm.gguf_server``.

llama.cpp's own HTTP server, out of the package xllamacpp, on a port of this machine that the system chooses, for
whoever has the key. A process of its own, because native code that crashes, and gigabytes, should not take the server
down. It gets one message, an Order, and sends one, ModelServed or NotServed.
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

#: Of llama.cpp's log.
_ERRORS_ALONE: Final = 1
#: Without mmap: for the processor, llama.cpp keeps a copy of most weights in another order, and would have both.
_READ_WHOLE: Final = 0
#: Thinking is on where the template leaves it open.
_AS_THE_MODEL_DOES: Final = -1
#: Prompts of earlier conversations that are kept for their next turn. llama.cpp would take 8 GiB.
_CACHE_MIB: Final = 256
#: Connections beside those of answers: questions about health.
_SPARE_THREADS: Final = 2
_PROPERTIES_SEC: Final = 60.0
#: Of 1000, beside the share of the memory that a process has (proc(5)).
_OUT_OF_MEMORY_SCORE: Final = "500"


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What to serve, and to whom. ``context`` is that of one conversation, in tokens."""

    file: str
    #: The model's name.
    name: str
    key: str
    context: int
    #: Conversations that are answered at the same time.
    parallel: int
    threads: int
    #: Whether a model that can think does so before it answers.
    think: bool = False
    #: A Jinja template in place of the model's own.
    chat_template: str | None = None

    def __repr__(self) -> str:
        """Return it without the key, which is no matter for a log."""
        return f"Order({self.file!r})"


class ModelServed(msgspec.Struct, frozen=True, tag=True):
    """What is served: at which address, with which context, and whether the chat template knows tools."""

    address: str
    context: int
    tools: bool


class NotServed(msgspec.Struct, frozen=True, tag=True):
    """What the package says where the model cannot be served; more is in llama.cpp's log."""

    reason: str


FromModel: TypeAlias = ModelServed | NotServed


def main() -> None:
    """Serve until the input ends."""
    _be_first_to_go()
    # In Google's containers llama.cpp would listen where this one says.
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
    # llama.cpp's handlers would end its work, and leave the process.
    leave_signals_to_server()
    link.send(served)
    link.receive()  # nothing more comes


def _server(order: Order) -> Any:
    """llama.cpp's server, with the model loaded. Raises what the package raises."""
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path, parameters.model_alias = order.file, {order.name}
    parameters.hostnames, parameters.port, parameters.api_keys = ["127.0.0.1"], 0, [order.key]
    # Each conversation has its part of the whole.
    parameters.n_ctx, parameters.n_parallel = order.context * order.parallel, order.parallel
    parameters.kv_unified = False
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = order.threads
    parameters.n_threads_http = order.parallel + _SPARE_THREADS
    parameters.load_mode = _READ_WHOLE
    parameters.n_gpu_layers, parameters.cache_ram_mib = 0, _CACHE_MIB
    parameters.use_jinja, parameters.ui, parameters.endpoint_slots = True, False, False
    parameters.enable_reasoning = _AS_THE_MODEL_DOES if order.think else 0
    parameters.verbosity = _ERRORS_ALONE
    if order.chat_template is not None:
        parameters.chat_template = order.chat_template
    return xllamacpp.Server(parameters)


def _served(address: str, key: str) -> ModelServed:
    """What the server at ``address`` says of itself."""
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
    """Where memory runs out, the system should end this process rather than the server."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_OUT_OF_MEMORY_SCORE, encoding="ascii")


def _end_with_input_while_loading() -> None:
    """End this process with its input also while xllamacpp loads a model.

    It holds the GIL then, so no thread can act. Linux sends SIGIO when the other end closes.
    """
    if sys.platform == "linux":
        fcntl.fcntl(0, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(0, fcntl.F_SETFL, fcntl.fcntl(0, fcntl.F_GETFL) | os.O_ASYNC)


if __name__ == "__main__":
    main()
