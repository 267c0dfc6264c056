"""What is known of conversations that have fallen silent: their clients, their records, the replicas and the front."""

from __future__ import annotations

import asyncio
import csv
import socket
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from redis.asyncio import Redis

from benchmarks.fleet.processes import Process, StoreProcess
from benchmarks.fleet.talkers import Talker

#: The most conversations that are described, and log lines of each process about one of them.
_MOST: Final = 4
_LINES: Final = 6
#: The printed fields of each server in HAProxy's statistics: connections, queue, state, last check, seconds since.
_OF_A_SERVER: Final = ("scur", "qcur", "status", "check_status", "lastchg")


async def told(
    silent: Sequence[Talker], processes: Sequence[Process], store: StoreProcess | None, front: Path | None
) -> list[str]:
    """Return lines about the first of these conversations. ``front`` is the socket of HAProxy's statistics."""
    lines: list[str] = []
    for one in silent[:_MOST]:
        lines += ["", f"{one.name}: {one.state}"]
        lines += _tasks_of(one)
        if store is not None:
            lines.append(await _record_of(one.session_id, store))
        for process in processes:
            lines += [f"{process.name}: {line}" for line in process.lines_about(one.session_id)[-_LINES:]]
    return lines if front is None else [*lines, "", *await asyncio.to_thread(_servers, front)]


def _tasks_of(talker: Talker) -> Iterator[str]:
    """Yield for each task of a conversation and its client where it waits."""
    for task in asyncio.all_tasks():
        name = task.get_name()
        if name.partition(",")[0] in talker.task_names:
            yield f"{name}: {' > '.join(_calls(task))}"


def _calls(task: asyncio.Task[object]) -> Iterator[str]:
    """Yield the calls of a task that wait, outermost first; ``get_stack`` has the outermost alone."""
    awaited: object = task.get_coro()
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "ag_frame", None)
        if frame is not None:
            yield f"{frame.f_code.co_name}:{frame.f_lineno}"
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "ag_await", None)


async def _record_of(session_id: str, store: StoreProcess) -> str:
    names = ("fence", "serial", "holder", "gone", "away", "changed")
    client: Any = Redis.from_url(store.url, socket_timeout=5, decode_responses=True)
    try:
        found = await client.hmget(f"omni_ws:{{{session_id}}}:record", names)
        now, _ = await client.time()
        living = await client.exists(f"omni_ws:holder:{found[2]}")
        length = await client.llen(f"omni_ws:{{{session_id}}}:log")
    except Exception as error:
        return f"its record: {error!r}"
    finally:
        await client.aclose()
    told = ", ".join(f"{name} {value}" for name, value in zip(names, found, strict=True))
    return f"its record: {told}, now {now}; {length} elements; its holder {'lives' if living else 'is gone'}"


def _servers(path: Path) -> Iterable[str]:
    """What HAProxy says of its servers."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(5)
            connection.connect(str(path))
            connection.sendall(b"show stat\n")
            with connection.makefile(encoding="utf-8") as answer:
                rows = list(csv.DictReader(answer))
    except OSError as error:
        return [f"HAProxy: {error!r}"]
    return [
        f"HAProxy, {row['# pxname']}/{row['svname']}: {', '.join(f'{name} {row[name]}' for name in _OF_A_SERVER)}"
        for row in rows
        if row["svname"] != "FRONTEND"
    ]
