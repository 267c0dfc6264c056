"""coturn between the server and a caller that has no other way to it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, TypeVar

import pytest
from support.commands import running
from support.fronts import program

from benchmarks.soak_network import enter_network

#: Networks for documentation (RFC 5737): the server and the relay share one, the relay and the caller the other.
SERVER, RELAY_BY_SERVER = "198.51.100.1", "198.51.100.2"
RELAY_BY_CALLER, CALLER = "203.0.113.1", "203.0.113.2"
PORT: Final = 3478
USER, PASSWORD = "omni", "a secret of two"
_RELAY, _BEYOND = "omni_relay", "omni_caller"
_CABLE: Final = "omni_turn"
_START_SEC: Final = 100.0

Result = TypeVar("Result")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def _join(left: str | None, left_address: str, right: str, right_address: str, device: str) -> None:
    """A cable between two namespaces. ``left`` None is the machine's own."""
    inside = ("-n", left) if left else ()
    _ip(*inside, "link", "add", device, "type", "veth", "peer", "name", device, "netns", right)
    for where, address in ((inside, left_address), (("-n", right), right_address)):
        _ip(*where, "address", "add", f"{address}/30", "dev", device)
        _ip(*where, "link", "set", device, "up")


@contextlib.contextmanager
def _networks() -> Iterator[None]:
    def delete() -> None:
        # The cable by itself, because a namespace goes some time after its name.
        for what in (("link", "delete", _CABLE), ("netns", "delete", _RELAY), ("netns", "delete", _BEYOND)):
            with contextlib.suppress(OSError, subprocess.CalledProcessError):
                _ip(*what)

    delete()  # of a run that was killed
    try:
        try:
            _ip("netns", "add", _RELAY)
            _join(None, SERVER, _RELAY, RELAY_BY_SERVER, _CABLE)
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("network namespaces need root, the program ip (Debian: iproute2) and veth devices")
        _ip("netns", "add", _BEYOND)
        _join(_RELAY, RELAY_BY_CALLER, _BEYOND, CALLER, "omni_caller")
        # Candidates name all addresses of the machine, and coturn ends an allocation over one without a route.
        _ip("-n", _RELAY, "route", "add", "default", "via", SERVER)
        _ip("netns", "exec", _RELAY, "sh", "-c", "echo 0 > /proc/sys/net/ipv4/ip_forward")
        yield
    finally:
        delete()


@contextlib.asynccontextmanager
async def turn_relay(folder: Path, *, address: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """coturn in both networks, which relays at ``address``. Skips where that cannot be had."""
    coturn = program("coturn")
    with _networks():
        async with running(
            *("ip", "netns", "exec", _RELAY, coturn, "-n", "--no-cli", "--no-tls", "--no-dtls"),
            *("--listening-ip", RELAY_BY_SERVER, "--listening-ip", RELAY_BY_CALLER, "--listening-port", str(PORT)),
            *("--relay-ip", address, "--lt-cred-mech", "--realm", "example.org", "--user", f"{USER}:{PASSWORD}"),
            *("--pidfile", str(folder / "pid"), "--userdb", str(folder / "users"), "--log-file", "stdout"),
            at_once=False,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        ) as process:
            await _listening(process)
            yield process


async def _listening(process: asyncio.subprocess.Process) -> None:
    """Returns when it takes connections; its log comes too late to say so."""
    async with asyncio.timeout(_START_SEC):
        while True:
            assert process.returncode is None, f"coturn ended with {process.returncode}"
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection(RELAY_BY_SERVER, PORT)
                writer.close()
                return


async def from_beyond(work: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
    """What ``work`` returns, which runs where the caller is, on an event loop of its own."""

    def enter() -> None:
        # A thread has its own namespace, and so have the sockets and threads that it makes.
        namespace = os.open(f"/run/netns/{_BEYOND}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            enter_network(namespace)
        finally:
            os.close(namespace)

    with ThreadPoolExecutor(1, initializer=enter) as thread:
        return await asyncio.get_running_loop().run_in_executor(thread, lambda: asyncio.run(work()))
