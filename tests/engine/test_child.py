"""A process of an engine: its messages, its log, its end by its input or by force, and how it is started again."""

from __future__ import annotations

import asyncio
import itertools
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.patience import until

from omni_ws.engine import child, child_main
from omni_ws.engine.child import Backoff, Child, ChildEnded, keep_running, receive_message
from omni_ws.engine.child_main import BrokenMessage, decode_lengths, encode_message
from omni_ws.engine.tts.synthesiser import FromWorker, VoiceReady
from omni_ws.engine.tts.voice_process import WORKER_MODULE
from omni_ws.errors import EngineFailed


class Note(msgspec.Struct, frozen=True, tag=True):
    text: str


class Count(msgspec.Struct, frozen=True, tag=True):
    number: int


HEADERS: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Note | Count)

READS = "import sys; print('up', flush=True); sys.stdin.read(); sys.exit(3)"
DOES_NOT_READ = "import signal; print('up', flush=True); signal.pause()"
#: Answers each message with the same header and twice the body, and the length of that.
ANSWERS = """
import msgspec
from omni_ws.engine.child_main import ServerLink
class Note(msgspec.Struct, tag=True):
    text: str
class Count(msgspec.Struct, tag=True):
    number: int
link = ServerLink(Note | Count)
print("what a library prints is no message", flush=True)
while True:
    header, body = link.receive()
    link.send(header, 2 * body, more=True)
    link.send(Count(2 * len(body)))
"""


async def running(program: str, *, keeps_log: bool = False) -> Child:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", program),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE if keeps_log else None,
        limit=1 << 20,
    )
    return Child("the program", process, kinds=Note | Count)


async def up(program: str) -> Child:
    found = await running(program)
    assert found._process.stdout is not None
    assert await found._process.stdout.readline() == b"up\n"
    return found


# Messages


async def test_a_file_of_the_current_folder_is_no_module_of_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "queue.py").write_text("raise SystemExit('of the user')\n")
    monkeypatch.chdir(tmp_path)
    process = await Child.start("the program", WORKER_MODULE, "espeak", kinds=FromWorker)
    header, _ = await process.receive()
    assert isinstance(header, VoiceReady)
    assert await process.end() == 0


async def test_messages_go_to_a_process_and_come_back_in_order() -> None:
    process = await running(ANSWERS)
    sent = [(Note("grüße"), b""), (Count(7), b"ab\n\0"), (Note("x" * 100_000), bytes(range(256)) * 20_000)]
    for header, body in sent:
        process.send(header, body)
    for header, body in sent:
        assert await process.receive() == (header, 2 * body)
        assert await process.receive() == (Count(2 * len(body)), b"")
    assert await process.end() == 0
    with pytest.raises(ChildEnded):
        await process.receive()
    process.send(Count(1))  # is lost


async def test_a_process_that_gets_something_else_than_messages_ends() -> None:
    process = await running(ANSWERS, keeps_log=True)
    assert process._process.stdin is not None
    process._process.stdin.write(b"\xff" * child_main.HEAD_BYTES)
    with pytest.raises(ChildEnded):
        await process.receive()
    await process.end()
    assert "BrokenMessage: a message of" in process.last_words


async def test_a_process_leaves_signals_to_the_server() -> None:
    process = await running(ANSWERS)
    process.send(Count(1))
    await process.receive()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        process._process.send_signal(number)
    process.send(Count(2))
    assert [await process.receive() for _ in range(3)][1:] == [(Count(2), b""), (Count(0), b"")]
    await process.end()


@pytest.mark.parametrize("size", [1, 3, 1000])
async def test_messages_arrive_in_any_pieces(size: int) -> None:
    sent: list[tuple[Any, bytes]] = [(Note("a"), b""), (Count(1), b"b" * 500), (Note("c" * 200), b"\0")]
    data = b"".join(encode_message(header, body) for header, body in sent)
    reader = asyncio.StreamReader()
    for start in range(0, len(data), size):
        reader.feed_data(data[start : start + size])
    reader.feed_eof()
    assert [await receive_message(reader, HEADERS) for _ in sent] == sent
    with pytest.raises(asyncio.IncompleteReadError):
        await receive_message(reader, HEADERS)


async def test_a_message_has_at_most_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_main, "MAX_PART_BYTES", 100)
    head = encode_message(Count(1), bytes(100))[: child_main.HEAD_BYTES]
    assert decode_lengths(head)[1] == 100
    with pytest.raises(BrokenMessage):
        encode_message(Count(1), bytes(101))
    monkeypatch.setattr(child_main, "MAX_PART_BYTES", 99)
    with pytest.raises(BrokenMessage):
        decode_lengths(head)


@pytest.mark.parametrize(
    "broken",
    [
        b"\xff" * child_main.HEAD_BYTES,
        encode_message(Note("x")).replace(b"Note", b"Nota"),
        encode_message(Note("x")).replace(b'"x"', b"345"),
    ],
)
async def test_who_sends_something_else_is_killed(broken: bytes, caplog: pytest.LogCaptureFixture) -> None:
    process = await running(
        f"import sys, signal; sys.stdout.buffer.write({broken!r}); sys.stdout.flush(); signal.pause()"
    )
    with pytest.raises(ChildEnded):
        await process.receive()
    assert await process.wait() == -signal.SIGKILL
    assert "the program sends something else than messages" in caplog.text
    await process.end()


# Its log, and its end


async def test_a_line_of_its_log_may_be_long() -> None:
    talkative = """
import sys
print("x" * 3_000_000, file=sys.stderr)
print("the end", file=sys.stderr, flush=True)
sys.stdin.read()
"""
    process = await running(talkative, keeps_log=True)
    await until(lambda: process.last_words.endswith("; the end"))
    assert not process.ended
    assert len(process.last_words) < 2000
    assert await process.end() == 0
    assert process.last_words.endswith("; the end")


async def test_the_end_of_its_input_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "STOP_SEC", 60)
    process = await up(READS)
    assert await process.end() == 3
    assert process.ended
    assert await process.end() == 3


async def test_one_that_goes_on_is_killed(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(child, "STOP_SEC", 0.05)
    assert await (await up(DOES_NOT_READ)).end() == -signal.SIGKILL
    assert "the program does not end by itself and is killed" in caplog.text


async def test_one_that_goes_on_is_killed_at_once_if_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "STOP_SEC", 60)
    process = await up(DOES_NOT_READ)
    ending = asyncio.create_task(process.end())
    assert process._process.stdin is not None
    await until(process._process.stdin.is_closing)
    ending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ending
    assert await process.wait() == -signal.SIGKILL


async def test_one_that_has_ended_has_its_status() -> None:
    process = await up("print('up', flush=True)")
    await process.wait()
    assert await process.end() == 0


async def test_it_has_a_session_of_its_own_and_finds_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So Ctrl-C in a terminal does not reach it."""
    (tmp_path / "of_a_test.py").write_text(
        """
import os, sys
import omni_ws.errors
sys.exit(os.getsid(0) == os.getpid() and 5)
"""
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    process = await Child.start("the program", "of_a_test", kinds=Note)
    assert await process.wait() == 5
    await process.end()


# How it is started again


def test_each_wait_is_twice_as_long_up_to_the_longest() -> None:
    backoff = Backoff()
    waits = [backoff.next() for _ in range(2000)]
    assert waits[:4] == [0.05, 0.1, 0.2, 0.4]
    assert waits[-1] == max(waits) == 30
    backoff.reset()
    assert backoff.next() == 0.05


class _Flaky:
    """A process of which each start fails so many times, and each run lasts so many seconds."""

    def __init__(self, *runs: tuple[int, float]) -> None:
        self._runs = iter(runs)
        self._failures, self._lasts = next(self._runs)
        self.starts: list[float] = []

    async def until_death(self) -> str:
        await asyncio.sleep(self._lasts)
        try:
            self._failures, self._lasts = next(self._runs)
        except StopIteration:
            raise asyncio.CancelledError from None
        return "status 1"

    async def start(self) -> None:
        self.starts.append(asyncio.get_running_loop().time())
        if self._failures:
            self._failures -= 1
            raise (EngineFailed("no memory"), OSError("no program"), ValueError("no file"))[self._failures % 3]

    async def run(self) -> list[float]:
        """How long each wait was."""
        with pytest.raises(asyncio.CancelledError):
            await keep_running("the program", self.until_death, self.start, Backoff())
        return self.starts


@pytest.mark.virtual_clock
async def test_it_is_started_until_that_succeeds_with_growing_waits(caplog: pytest.LogCaptureFixture) -> None:
    starts = await _Flaky((0, 0), (3, 1), (0, 0)).run()
    assert [after - before for before, after in itertools.pairwise(starts)] == pytest.approx([0.1, 0.2, 0.4, 1.8])
    assert caplog.text.count("the program died (status 1); starting it again") == 2
    assert "the program does not start again: no program" in caplog.text
    assert caplog.text.count("the program was started again") == 2


@pytest.mark.virtual_clock
@pytest.mark.parametrize(("lasts", "wait"), [(59, 0.2), (61, 0.05)])
async def test_one_that_ran_for_long_is_started_again_soon(lasts: float, wait: float) -> None:
    starts = await _Flaky((0, 0), (1, lasts), (0, 0)).run()
    assert starts[-1] - starts[-2] == pytest.approx(lasts + wait)
