"""nginx and HAProxy as ``deploy/`` configures them: before two replicas, or before three that share a store."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support.commands import running

from benchmarks.server_process import free_port, wait_until_ready

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
