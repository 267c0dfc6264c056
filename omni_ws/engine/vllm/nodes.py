"""A model over several machines: what a start waits for, the loss of a machine, and the other machines' side.

vLLM does the work. The server's machine has the front of the model and usually a part of it; the other machines run
the rest (``run_node``, vLLM's headless mode). They find the front by its address, so they may come and go in any
order.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import shlex
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NoReturn

import msgspec

from omni_ws.config.values import ConfigurationError, literal_address, parse_free_form
from omni_ws.engine.child import STABLE_AFTER_SEC, Backoff
from omni_ws.engine.vllm.processes import marked_processes

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

log = logging.getLogger(__name__)

#: How often a start that still waits says so, in seconds.
AGAIN_SEC: Final = 60.0
#: How often a node looks for its connections with the server, in seconds, and after how many looks without any the
#: server is gone.
_LOOK_SEC: Final = 1.0
_NODE_LOOKS: Final = 2


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """What a model lacks on this machine: ``lacks`` in words, where it is waited for, and the line to type there."""

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
    """Return what a model needs of other machines before it starts; None if nothing, or if Ray starts it there.

    ``given`` are those of vLLM's ``args`` that are not defaults.
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
    """Return the command for the other machine with these of vLLM's arguments."""
    command = ["omni-ws", "vllm-node", "--model", str(args["model"])]
    for name, value in args.items():
        if name != "model":
            command += [f"--vllm.args.{name}", _text(value)]
    return shlex.join(command)


def _text(value: object) -> str:
    """Return a value as the command line takes it."""
    if isinstance(value, str) and parse_free_form(value) == value:
        return value
    return msgspec.json.encode(value).decode()


@contextmanager
def telling_of_others(role: str, args: AsyncEngineArgs, given: Mapping[str, Any]) -> Iterator[None]:
    """Log what the model ``role`` waits for, if its start in the block needs other machines."""
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
    """Reads what vLLM logs about the processes that register, as details. Those stay out of the log."""

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
    """The connections with a model's copies on other machines. vLLM itself only watches its processes on this one."""

    def __init__(self, llm: AsyncLLM) -> None:
        import zmq

        core = llm.engine_core
        address = f"inproc://connections-{id(self)}"
        zmq.Socket.shadow(core.input_socket).monitor(address, zmq.EVENT_DISCONNECTED)
        self._events: Any = core.resources.ctx.socket(zmq.PAIR)
        self._events.connect(address)

    @classmethod
    def of(cls, llm: AsyncLLM) -> OtherMachines | None:
        """Return the connections of a model that has started; None if it has no copies elsewhere."""
        parallel = llm.vllm_config.parallel_config
        remote = parallel.data_parallel_size > parallel.data_parallel_size_local and not parallel.local_engines_only
        return cls(llm) if remote and parallel.data_parallel_backend == "mp" else None

    @property
    def lost(self) -> bool:
        """Whether a connection has ended. A machine that loses its power or its cable leaves the connection open."""
        return bool(self._events.poll(0))

    def close(self) -> None:
        self._events.close(linger=0)


def run_node(args: AsyncEngineArgs) -> NoReturn:
    """Run this machine's part of a model, again whenever it has ended, until SIGTERM or SIGINT (SystemExit).

    Its processes end with those of the server, and wait for the next one. Raises ConfigurationError.
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
    """Kill this process's models when all their connections with the server have ended, which they do not notice."""
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
    """Return whether a process has a connection with one of the addresses, other than with itself."""
    import psutil

    try:
        connections = process.net_connections("tcp")
    except psutil.Error:
        return False
    own = {one.laddr for one in connections}
    return any(
        one.status == psutil.CONN_ESTABLISHED and one.raddr.ip in server and one.raddr not in own for one in connections
    )
