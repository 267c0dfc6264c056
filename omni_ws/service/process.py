"""Care for the server's process: log lines, the limit of open files, the disk, the delay of the event loop, memory."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Final

import msgspec

from omni_ws.config.model import LogFormat, LogLevel
from omni_ws.engine.child_main import return_freed_memory

logger = logging.getLogger(__name__)

#: Control characters, which could forge a line or control the terminal.
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_PLAIN: Final = re.compile(r"[^\s\"=]+")

#: The lowest level that libraries may log, by the names of their loggers.
QUIETED_LOGGERS: Final[dict[str, int]] = {
    # Lines about single connections are noise for an operator; debug lines contain all headers and frames, even keys.
    "websockets": logging.ERROR,
    # A line for each request to an upstream, health checks included.
    "httpx": logging.WARNING,
    # They log URLs of MCP servers, what is sent to them and, as errors, tracebacks with both.
    "mcp": logging.CRITICAL,
    "client": logging.CRITICAL,  # the name of the logger of mcp.client.session
    "httpx2": logging.CRITICAL,
    "httpcore2": logging.CRITICAL,
    # A malformed form is reported to its client.
    "python_multipart": logging.ERROR,
}


class JsonFormatter(logging.Formatter):
    """Formats a record as a JSON object. ``time`` is UTC in ISO 8601; structured facts are fields of the object.

    ``worker`` is the name of this process among several workers.
    """

    def __init__(self, *, worker: str | None = None) -> None:
        super().__init__()
        self._worker = {} if worker is None else {"worker": worker}

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            **self._worker,
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields |= {name: fact for name, fact in _facts(record).items() if name not in fields}
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        try:
            return msgspec.json.encode(fields, enc_hook=str).decode()
        except UnicodeEncodeError:  # a lone surrogate, as in the name of a file
            fields = {name: _whole(value) if isinstance(value, str) else value for name, value in fields.items()}
            return msgspec.json.encode(fields, enc_hook=str).decode()


class TextFormatter(logging.Formatter):
    """Formats a record as one line, with its facts appended as ``name=value``. Only a traceback adds lines.

    ``worker`` is the name of this process among several workers.
    """

    def __init__(self, *, worker: str | None = None) -> None:
        name = "" if worker is None else f"{worker} "
        super().__init__(f"%(asctime)s %(levelname)-7s {name}%(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # name of logging's method
        facts = "".join(f" {name}={_word(value)}" for name, value in _facts(record).items())
        return _CONTROL.sub(_escaped, super().formatMessage(record)) + facts


def _facts(record: logging.LogRecord) -> dict[str, Any]:
    facts: dict[str, Any] = getattr(record, "facts", {})
    return facts


def _word(value: object) -> str:
    text = str(value)
    if _PLAIN.fullmatch(text) and not _CONTROL.search(text):
        return text
    return _CONTROL.sub(_escaped, msgspec.json.encode(_whole(text)).decode())


def _whole(text: str) -> str:
    """Return the text with each lone surrogate, which UTF-8 cannot encode, replaced by its name."""
    return text.encode("utf-8", "backslashreplace").decode()


def _escaped(found: re.Match[str]) -> str:
    return {"\n": r"\n", "\r": r"\r", "\t": r"\t"}.get(found[0], f"\\u{ord(found[0]):04x}")


def configure_logging(log_format: LogFormat, level: LogLevel, worker: str | None = None) -> None:
    """Send the logs of this process to standard error, in place of any earlier handlers, and quiet QUIETED_LOGGERS.

    The lines of a ``worker`` have its name.
    """
    handler = logging.StreamHandler()
    form = JsonFormatter if log_format == "json" else TextFormatter
    handler.setFormatter(form(worker=worker))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name, quietest in QUIETED_LOGGERS.items():
        logging.getLogger(name).setLevel(quietest)


# Care for the server's process: its limit of open files, its disk, the delay of its event loop, its memory.


#: Files that the server may open besides the connections of its clients.
_OWN_FILES: Final = 128


def allow_connections(count: int) -> None:
    """Raise the soft limit on open files to the hard limit, and warn if that is too low for ``count`` connections."""
    try:
        import resource
    except ImportError:  # a system without such limits
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
        except (OSError, ValueError):  # macOS refuses an infinite limit
            logger.debug("the limit of open files stays at %d", soft)
    if soft != resource.RLIM_INFINITY and count + _OWN_FILES > soft:
        logger.warning(
            "limits.max_connections is %d, but this process can open only %d files: raise the limit (ulimit -Hn, "
            "LimitNOFILE) to %d, or lower limits.max_connections",
            count,
            soft,
            count + _OWN_FILES,
        )


#: Bytes that the probe writes: at least a block of the file system, so that one has to be free.
_PROBE_BYTES: Final = 4096


def check_space(folder: Path) -> None:
    """Raise OSError if no data can be written to ``folder``.

    Writes a file, as on a full disk files can still be opened.
    """
    with TemporaryFile(dir=folder, buffering=0) as probe:
        probe.write(bytes(_PROBE_BYTES))


async def unless(event: asyncio.Event, work: Coroutine[Any, Any, Any], *, name: str) -> bool:
    """Run ``work`` to its end, or cancel it once ``event`` is set. Returns whether ``work`` came to its end.

    Raises what ``work`` raises. ``name`` is the name of its task.
    """
    working = asyncio.create_task(work, name=name)
    interrupted = asyncio.create_task(event.wait(), name=f"signal during {name}")
    try:
        await asyncio.wait({working, interrupted}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
        return working.done()
    finally:
        working.cancel()
        interrupted.cancel()
        await asyncio.gather(working, interrupted, return_exceptions=True)


# The delay of the event loop, which everything in a real-time server has to wait for.

#: Seconds between two measurements of a busy loop.
INTERVAL_SEC: Final = 0.1
#: For an idle loop, which is hardly ever late: ten measurements a second cost more than all else that an idle server
#: does.
LONGEST_INTERVAL_SEC: Final = 1.0
#: The loop is idle if its thread takes less than this share of a core.
IDLE_SHARE: Final = 0.02


@contextmanager
def watching_loop(
    observe: Callable[[float], object], *, cpu_time: Callable[[], float] = time.thread_time
) -> Iterator[None]:
    """Within the block, call ``observe`` ten times a second, with the seconds by which the event loop is late.

    While the loop is idle, the interval doubles step by step, up to a second. ``cpu_time`` returns the CPU time of the
    loop's thread in seconds.
    """
    watch = _Watch(observe, cpu_time)
    try:
        yield
    finally:
        watch.stop()


class _Watch:
    """A timer that measures how late it fires."""

    def __init__(self, observe: Callable[[float], object], cpu_time: Callable[[], float]) -> None:
        self._loop = asyncio.get_running_loop()
        self._observe = observe
        self._cpu_time = cpu_time
        self._interval = INTERVAL_SEC
        self._begin()

    def stop(self) -> None:
        self._timer.cancel()

    def _begin(self) -> None:
        self._cpu_before = self._cpu_time()
        self._due = self._loop.time() + self._interval
        self._timer = self._loop.call_at(self._due, self._wake)

    def _wake(self) -> None:
        late = max(0.0, self._loop.time() - self._due)
        self._observe(late)
        is_idle = self._cpu_time() - self._cpu_before < IDLE_SHARE * (self._interval + late)
        self._interval = min(2 * self._interval, LONGEST_INTERVAL_SEC) if is_idle else INTERVAL_SEC
        self._begin()


# Memory: the C library keeps memory that was freed, instead of returning it to the system.

#: By how many bytes ``held()`` has to fall before freed memory is returned. The objects around those bytes take several
#: times as much memory.
_MUCH_BYTES: Final = 8 << 20
#: Seconds between two looks at ``held()``. Memory that is freed and taken again in between is reused.
_LOOKS_EVERY_SEC: Final = 5.0
#: After such a fall, so many looks in a row return memory: the sessions that held it may end, and free more, later.
_RETURNS: Final = 12


@contextmanager
def returning_memory(held: Callable[[], int]) -> Iterator[None]:
    """Within the block, return freed memory to the system each time that ``held()`` (bytes) has fallen by much.

    The C library by itself returns freed memory only if no memory at a higher address is in use.
    """
    task = asyncio.create_task(_return_what_was_held(held), name="returning memory")
    try:
        yield
    finally:
        task.cancel()


async def _return_what_was_held(held: Callable[[], int]) -> None:
    highest = times = 0
    while True:
        await asyncio.sleep(_LOOKS_EVERY_SEC)
        now = held()
        if highest - now >= _MUCH_BYTES:
            highest, times = now, _RETURNS
        highest = max(highest, now)
        if times:
            times -= 1
            await asyncio.to_thread(return_freed_memory)
