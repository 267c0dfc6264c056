"""The salience client: calls, recovery, display."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import pytest
from salience_client import Picture, SalienceClient, Session, common_prefix
from salience_display import Spread, load_vocabulary, make_trace
from support.patience import PATIENCE_SEC
from support.salience_server import SalienceServer, salience_server
from support.token_engine import CONCEPTS, END, LAYERS, PAD, START, TokenEngine, logprob

from omni_ws.generated import salience_pb2 as messages

Status = grpc.StatusCode


@pytest.fixture
def engine() -> TokenEngine:
    return TokenEngine()


@pytest.fixture
async def server(engine: TokenEngine) -> AsyncIterator[SalienceServer]:
    async with salience_server(engine) as running:
        yield running


@pytest.fixture
async def session(server: SalienceServer) -> AsyncIterator[Session]:
    async with SalienceClient(server.channel).session() as opened:
        yield opened


class Sent:
    """The requests that go out."""

    def __init__(self, session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
        self.requests: list[messages.GenerateRequest] = []
        stub = session._client.stub
        generate = stub.Generate

        def noted(request: messages.GenerateRequest, **options: Any) -> Any:
            self.requests.append(request)
            return generate(request, **options)

        monkeypatch.setattr(stub, "Generate", noted)

    @property
    def last(self) -> tuple[list[int], int, bool, int]:
        request = self.requests[-1]
        return list(request.append_tokens), request.offset, request.truncating, len(request.images)


@pytest.fixture
def sent(session: Session, monkeypatch: pytest.MonkeyPatch) -> Sent:
    return Sent(session, monkeypatch)


async def hold(session: Session, tokens: Sequence[int], **fields: Any) -> list[messages.GenerateEvent]:
    return [event async for event in session.generate(tokens, **fields)]


def picture(start: int, data: bytes = b"xx") -> Picture:
    return Picture(data, "image/png", start, start + len(data) + 2)


BLOCK = [START, PAD, PAD, END]


async def test_only_what_is_new_is_sent(server: SalienceServer, session: Session, sent: Sent) -> None:
    await hold(session, [5, 6, 7])
    assert sent.last == ([5, 6, 7], 0, False, 0)
    await hold(session, [5, 6, 7, 8], max_tokens=2)
    assert sent.last == ([8], 3, False, 0)
    assert session.tokens == await server.dump(session.session_id)
    assert len(session.tokens) == 6
    await hold(session, [5, 6, 9])
    assert sent.last == ([9], 2, True, 0)
    await hold(session, [5])
    assert sent.last == ([], 1, True, 0)
    assert session.tokens == await server.dump(session.session_id) == [5]


async def test_pictures_are_sent_once(server: SalienceServer, session: Session, sent: Sent) -> None:
    one, two = picture(1), picture(5, b"yy")
    await hold(session, [5, *BLOCK], pictures=[one])
    await hold(session, [5, *BLOCK, *BLOCK, 6], pictures=[one, two])
    assert sent.last == ([*BLOCK, 6], 5, False, 1)
    await hold(session, [5, *BLOCK, *BLOCK, 7], pictures=[one, two])
    assert sent.last == ([7], 9, True, 0)
    # The same tokens, but another picture behind them.
    other = picture(5, b"zz")
    await hold(session, [5, *BLOCK, *BLOCK, 7], pictures=[one, other])
    assert sent.last == ([*BLOCK, 7], 5, True, 1)
    # A walk that parts inside of a block.
    await hold(session, [5, START, PAD, END, 8], pictures=[picture(1, b"x")])
    assert sent.last == ([START, PAD, END, 8], 1, True, 1)
    assert await server.dump(session.session_id) == session.tokens


@pytest.mark.parametrize("held", [[5, 6, 7, 8, 9], [5], [4, 4, 4, 4], []])
async def test_it_finds_its_way_back_where_the_server_holds_something_else(
    server: SalienceServer, session: Session, held: list[int]
) -> None:
    await hold(session, [5, 6, 7])
    await server.events(session.session_id, held, 0, truncating=True)  # by another hand
    await hold(session, [5, 6, 7, 8])
    assert await server.dump(session.session_id) == session.tokens == [5, 6, 7, 8]


async def test_it_waits_for_a_session_that_is_busy(
    server: SalienceServer, session: Session, engine: TokenEngine
) -> None:
    engine.gate.clear()
    other = aiter(server.generate(session.session_id, [5], max_tokens=2))
    await anext(other)
    await engine.waiting.wait()
    waiting = asyncio.create_task(hold(session, [5, 6], max_tokens=1))
    await asyncio.sleep(0)
    engine.gate.set()
    async for _ in other:
        pass
    assert [event.WhichOneof("event") for event in await waiting] == ["token", "done"]
    assert await server.dump(session.session_id) == session.tokens


async def test_after_a_call_that_was_left(server: SalienceServer, session: Session, engine: TokenEngine) -> None:
    engine.gate.clear()
    events = session.generate([5], max_tokens=3)
    await anext(events)
    await engine.waiting.wait()
    await events.aclose()
    await engine.idle()
    engine.gate.set()
    await hold(session, [5, 6], max_tokens=1)
    assert await server.dump(session.session_id) == session.tokens
    assert session.tokens[:2] == [5, 6]


async def test_what_cannot_be_is_raised_and_not_tried_again(session: Session, sent: Sent) -> None:
    await hold(session, [5])
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await hold(session, [5, 10_000])
    assert raised.value.code() is Status.INVALID_ARGUMENT
    assert len(sent.requests) == 2
    assert session.tokens == [5]


async def test_scores_are_sums(session: Session) -> None:
    scores = await session.score([5, 6, 7, 8], [(0, 4), (2, 3), (1, 1)])
    assert scores == pytest.approx([logprob(6, 1) + logprob(7, 2) + logprob(8, 3), logprob(7, 2), 0.0])


async def test_forks(server: SalienceServer, session: Session) -> None:
    await hold(session, [5, *BLOCK, 6], pictures=[picture(1)])
    child = await session.fork(5)
    await hold(child, [5, *BLOCK, 7], pictures=[picture(1)])
    assert await server.dump(child.session_id) == child.tokens == [5, *BLOCK, 7]
    assert await server.dump(session.session_id) == [5, *BLOCK, 6]
    await child.close()


@pytest.mark.parametrize(
    ("one", "other"),
    [([], []), ([1], []), ([1, 2, 3], [1, 2, 3]), ([1, 2, 3], [1, 2]), ([1, 2], [3, 2]), ([1, 2, 3, 4], [1, 2, 9, 4])],
)
def test_common_prefix(one: list[int], other: list[int]) -> None:
    plain = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    assert common_prefix(one, other) == plain


def test_readouts_are_shown_against_those_before() -> None:
    spread = Spread()
    assert [spread.z(value) for value in (1.0, 2.0, 3.0)] == [0, 0, 0]
    assert spread.z(4.0) == pytest.approx(2.0)
    with pytest.raises(ValueError, match="layer 9 is not read out; 1, 3 is"):
        make_trace(None, CONCEPTS, LAYERS, layer=9)  # type: ignore[arg-type]


def test_the_first_position_does_not_count(capsys: pytest.CaptureFixture[str]) -> None:
    """It is an attention sink in trained models: with it, all that follows would look alike."""

    def shown(*values: float) -> list[list[str]]:
        trace = make_trace(load_vocabulary(None), ["joy"], [3])
        for position, value in enumerate(values):
            trace.token(messages.Token(id=7, position=position, is_prefill=True, readout=[value]))
        heading, *lines = capsys.readouterr().out.splitlines()
        assert heading.split() == ["joy"]
        return [line.split() for line in lines]

    lines = shown(-1043.0, 1.0, 2.0, 3.0, 4.0)
    assert lines[0] == ["0", "7", "-"]
    assert [line[-1] for line in lines[1:]] == ["+0.0", "+0.0", "+0.0", "+2.0"]


async def program(server: SalienceServer, *arguments: str) -> tuple[int | None, str, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "examples/salience_client.py", "--address", f"127.0.0.1:{server.port}", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    said, complained = await asyncio.wait_for(process.communicate(), PATIENCE_SEC)
    return process.returncode, said.decode(), complained.decode()


@pytest.mark.slow
async def test_the_program(server: SalienceServer) -> None:
    status, said, complained = await program(server, "--prompt-ids", "5,6,7", "--max-tokens", "2")
    assert (status, complained) == (0, "")
    heading, *lines, last = said.splitlines()
    assert heading.split() == list(CONCEPTS)
    assert [line.split()[0] for line in lines] == ["0", "1", "2", "3", "4"]
    assert last == "3 + 2 tokens, length"
    status, said, _ = await program(server, "--tokenizer", "bytes", "--prompt", "hi!", "--score")
    assert status == 0
    assert said.startswith(f"log-probability {logprob(ord('i'), 1) + logprob(ord('!'), 2):.4f}")
    for arguments, expected, match in (
        (("--prompt", "hi"), 2, "--tokenizer"),
        (("--prompt", "hi", "--tokenizer", "nowhere"), 2, "no folder"),
        (("--prompt-ids", "5,x"), 2, "invalid literal"),
        (("--prompt-ids", "5", "--layer", "9"), 2, "not read out"),
        (("--prompt-ids", "5000"), 1, "INVALID_ARGUMENT: append_tokens"),
    ):
        status, _, complained = await program(server, *arguments)
        assert (status, match in complained) == (expected, True), complained
        assert "Traceback" not in complained
