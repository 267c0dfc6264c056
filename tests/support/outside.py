"""Software of others: Node, what ``make test-outside`` names, and nginx and HAProxy as ``deploy/`` configures them."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support.commands import run_command, running

from benchmarks.server_process import free_port, wait_until_ready


def tool(variable: str) -> str:
    """What ``make test-outside`` says where it is."""
    path = os.environ.get(variable)
    if path is None:
        pytest.skip(f"{variable} is not set: make test-outside sets it")
    return path


async def run_outside(*command: str, cwd: Path | None = None, variables: Mapping[str, str] | None = None) -> str:
    """The output of a command that succeeds within 500 seconds. It sees neither a key nor the test's own modules."""
    hidden = ("PYTHONPATH", "OPENAI_API_KEY")
    environment = {name: value for name, value in os.environ.items() if name not in hidden} | dict(variables or {})
    ended = await run_command(*command, environment=environment, cwd=cwd)
    assert ended.status == 0, (ended.output + ended.errors)[-6000:]
    return ended.output


async def run_in_node(script: Path, folder: Path, *arguments: str, variables: Mapping[str, str] | None = None) -> str:
    """Where its packages are: a module looks for them from where it stands."""
    home = Path(tool("OUTSIDE_NODE"))
    place = home / f"{folder.name}-{script.name}"
    await asyncio.to_thread(shutil.copy, script, place)
    try:
        return await run_outside(
            str(home / "node_modules" / ".bin" / "node"), str(place), *arguments, variables=variables
        )
    finally:
        place.unlink()


async def node_command() -> list[str]:
    """Node, which has the global WebSocket behind a switch at first."""
    path = shutil.which("node")
    if path is None:
        pytest.skip("Node is not installed")
    version = int((await run_outside(path, "--version")).removeprefix("v").partition(".")[0])
    if version < 20:
        pytest.skip(f"Node {version} is too old")
    return [path] if version >= 22 else [path, "--experimental-websocket"]


ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
#: The socket at which HAProxy tells its statistics, in its folder.
STATISTICS = "haproxy.sock"
#: What the files in ``deploy/`` call the replicas, by their folder.
_ADDRESSES = {
    "": ("10.0.0.1:8080", "10.0.0.2:8080"),
    "fleet": ("omni_ws_a:8080", "omni_ws_b:8080", "omni_ws_c:8080"),
}


def program(name: str) -> str:
    """Where a program of the system is."""
    path = shutil.which(name) or shutil.which(name, path="/usr/sbin")
    if path is None:
        pytest.skip(f"{name} is not installed (Debian: {name})")
    return path


def _rewritten(folder: str, name: str, listen: str, port: int, replicas: Sequence[int]) -> str:
    """The file of that name in ``deploy/``, with the ports of a test."""
    text = (DEPLOY / folder / name).read_text(encoding="utf-8")
    for address, replica in zip(_ADDRESSES[folder], replicas, strict=True):
        assert address in text
        text = text.replace(address, f"127.0.0.1:{replica}")
    end = ";" if name == "nginx.conf" else ""
    text, count = re.subn(rf"(?m)^(    {listen} )\S+", rf"\g<1>127.0.0.1:{port}{end}", text)
    assert count == 1
    return text


def _nginx(kind: str, folder: Path, port: int, replicas: Sequence[int]) -> list[str]:
    (folder / "omni_ws.conf").write_text(_rewritten(kind, "nginx.conf", "listen", port, replicas), encoding="utf-8")
    paths = "".join(
        f"{kind}_temp_path {folder}/{kind};\n" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    user = "user root;\n" if os.getuid() == 0 else ""
    main = folder / "nginx.conf"
    main.write_text(
        f"{user}daemon off;\nworker_processes 2;\npid {folder}/nginx.pid;\nerror_log {folder}/error.log;\n"
        f"events {{}}\nhttp {{\naccess_log off;\n{paths}include {folder}/omni_ws.conf;\n}}\n",
        encoding="utf-8",
    )
    return [program("nginx"), "-c", str(main), "-e", str(folder / "error.log")]


def _haproxy(kind: str, folder: Path, port: int, replicas: Sequence[int]) -> list[str]:
    path = folder / "haproxy.cfg"
    path.write_text(_rewritten(kind, "haproxy.cfg", "bind", port, replicas), encoding="utf-8")
    more = folder / "haproxy-statistics.cfg"
    more.write_text(f"global\n    stats socket {folder / STATISTICS}\n", encoding="utf-8")
    return [program("haproxy"), "-db", "-q", "-f", str(more), "-f", str(path)]


_FRONTS: dict[str, Callable[[str, Path, int, Sequence[int]], list[str]]] = {"nginx": _nginx, "haproxy": _haproxy}
FRONTS = tuple(_FRONTS)


@asynccontextmanager
async def front(kind: str, folder: Path, replicas: Sequence[int]) -> AsyncIterator[int]:
    """The port of a front before the replicas at these ports, once it forwards.

    ``kind`` is one of FRONTS for two replicas, or ``fleet/`` and one of them for three that share a store.
    """
    port = free_port()
    of, _, program_name = kind.rpartition("/")
    async with running(*_FRONTS[program_name](of, folder, port, replicas), at_once=False):
        await asyncio.to_thread(wait_until_ready, port)
        yield port
