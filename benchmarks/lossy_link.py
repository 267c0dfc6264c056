"""LossyLink: a network between this machine and a network namespace that loses, delays, reorders and interrupts.

Two TUN devices, and a process that carries whole IP packets between them. So TCP is the kernel's own, and meets the
losses that UDP does. Needs root and /dev/net/tun; nothing else of the machine is touched.
"""

from __future__ import annotations

import fcntl
import heapq
import multiprocessing
import os
import random
import select
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

NAMESPACE: Final = "omni-ws-bench"
SERVER, CLIENT = "10.213.77.1", "10.213.77.2"
_DEVICES: Final = ("omniwstun0", "omniwstun1")
_TUNSETIFF: Final = 0x400454CA
_IFF_TUN_NO_PI: Final = 0x1001
_MAX_PACKET_BYTES: Final = 2048
_LOCK: Final = Path(tempfile.gettempdir()) / "omni-ws-bench.lock"


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Its properties each way; times in seconds. Jitter is a delay of its own for each packet, which reorders them."""

    name: str
    delay: float = 0.02
    jitter: float = 0.0
    loss: float = 0.0
    #: Duration of an outage that begins while the caller speaks.
    outage: float = 0.0


@dataclass(slots=True)
class _Carrier:
    """The process that carries packets. ``orders`` brings Networks and the lengths of outages; None ends it."""

    devices: tuple[int, int]
    orders: Connection
    rng: random.Random
    network: Network = field(default_factory=lambda: Network(name="clean"))
    dead_until: float = 0.0
    waiting: list[tuple[float, int, int, bytes]] = field(default_factory=list)
    carried: int = 0

    def run(self) -> None:
        watched: list[int | Connection] = [*self.devices, self.orders]
        while True:
            now = time.monotonic()
            while self.waiting and self.waiting[0][0] <= now:
                _, _, target, packet = heapq.heappop(self.waiting)
                with suppress(OSError):
                    os.write(target, packet)
            pause = self.waiting[0][0] - now if self.waiting else 1.0
            ready, _, _ = select.select(watched, [], [], max(0.0, pause))
            if self.orders in ready and not self._obey(self.orders.recv()):
                return
            for source, target in (self.devices, self.devices[::-1]):
                if source in ready:
                    self._carry(os.read(source, _MAX_PACKET_BYTES), target)

    def _obey(self, order: Network | float | None) -> bool:
        if isinstance(order, Network):
            self.network = order
        elif order is not None:
            self.dead_until = time.monotonic() + order
        return order is not None

    def _carry(self, packet: bytes, target: int) -> None:
        now, network = time.monotonic(), self.network
        if now < self.dead_until or self.rng.random() < network.loss:
            return
        self.carried += 1
        due = now + network.delay + self.rng.uniform(0, network.jitter)
        heapq.heappush(self.waiting, (due, self.carried, target, packet))


class LossyLink:
    """The network in between. ``set`` it, or cut it for some seconds."""

    def __init__(self, orders: Connection) -> None:
        self._orders = orders

    def set(self, network: Network) -> None:
        self._orders.send(network)

    def cut(self, seconds: float) -> None:
        self._orders.send(seconds)


def _run(devices: tuple[int, int], orders: Connection, seed: int) -> None:
    _Carrier(devices, orders, random.Random(seed)).run()


def _device(name: str) -> int:
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH14x", name.encode(), _IFF_TUN_NO_PI))
    return device


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@contextmanager
def lossy_link(*, seed: int = 1) -> Iterator[LossyLink]:
    """From SERVER, here, to CLIENT, in NAMESPACE. Raises OSError or CalledProcessError without root.

    The machine has one at a time: another one waits until it has ended.
    """
    with _LOCK.open("w") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)  # it ends with this process, and not with the carrier, which is forked
        with _link(seed) as link:
            yield link


@contextmanager
def _link(seed: int) -> Iterator[LossyLink]:
    with suppress(subprocess.CalledProcessError):
        _ip("netns", "delete", NAMESPACE)  # of a run that was killed
    _ip("netns", "add", NAMESPACE)
    inside = ("-n", NAMESPACE)
    here, there = (_device(name) for name in _DEVICES)
    orders, theirs = multiprocessing.Pipe()
    carrier = multiprocessing.get_context("fork").Process(target=_run, args=((here, there), theirs, seed), daemon=True)
    try:
        _ip("link", "set", _DEVICES[1], "netns", NAMESPACE)
        for where, device, own, other in (((), _DEVICES[0], SERVER, CLIENT), (inside, _DEVICES[1], CLIENT, SERVER)):
            _ip(*where, "address", "add", own, "peer", other, "dev", device)
            _ip(*where, "link", "set", device, "up")
        _ip(*inside, "link", "set", "lo", "up")
        carrier.start()
        yield LossyLink(orders)
    finally:
        if carrier.is_alive():
            orders.send(None)
            carrier.join(5)
        os.close(here)
        os.close(there)
        with suppress(subprocess.CalledProcessError):
            _ip("netns", "delete", NAMESPACE)
