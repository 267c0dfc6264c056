"""The network of a soak: a namespace with talkers of its own, behind a link that is cut for seconds."""

from __future__ import annotations

import asyncio
import ctypes
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from benchmarks.lossy_link import NAMESPACE, SERVER, LossyLink, Network, lossy_link

_CLONE_NEWNET: Final = 0x40000000


@contextmanager
def link_to_cut(seed: int) -> Iterator[LossyLink | None]:
    """A link without losses; None where none can be made: it needs root, /dev/net/tun and the program ``ip``."""
    with ExitStack() as stack:
        link = None
        try:
            link = stack.enter_context(lossy_link(seed=seed))
            link.set(Network(name="clean"))
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"no network to cut: {error}\n")
        yield link


async def connect_from_beyond(port: int) -> socket.socket:
    """A connection to the server from the other side of the link. Raises OSError."""
    connection = _socket_in(Path("/run/netns") / NAMESPACE)
    try:
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, (SERVER, port))
    except BaseException:
        connection.close()
        raise
    return connection


def _socket_in(namespace: Path) -> socket.socket:
    # A socket belongs to the namespace in which its thread was when it was made, wherever it is used later.
    own = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        other = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
        try:
            enter_network(other)
            try:
                return socket.socket()
            finally:
                enter_network(own)
        finally:
            os.close(other)
    finally:
        os.close(own)


def enter_network(namespace: int) -> None:
    """From now on the sockets that this thread makes are in the namespace of this descriptor. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "cannot enter the network namespace")
