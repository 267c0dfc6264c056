"""Which upstream is asked, when it is asked again, and how it is lost and found; over real sockets."""

from __future__ import annotations

import asyncio
import logging
import zlib
from contextlib import aclosing

import orjson
import pytest
from support.engine_answers import Answer as EngineAnswer
from support.engine_answers import answer, asking, final, said, streamed
from support.patience import PATIENCE_SEC, until
from support.scripted_upstream import (
    Answer,
    ScriptedUpstream,
    cut,
    deaf_port,
    delta,
    hang,
    refuses,
    remote,
    says,
    streams,
    upstream,
)

from benchmarks.server_process import free_port
from omni_ws.core.chunks import FinishReason
from omni_ws.engine.base import EngineOutput, EngineState, TextOutput
from omni_ws.engine.remote.engine import RemoteEngine
from omni_ws.engine.remote.upstream import normalised
from omni_ws.errors import EngineFailed, EngineOverloaded, OmniError
from omni_ws.transport.http.exchange import HttpExchange

pytestmark = pytest.mark.usefixtures("no_task_left")


def state(engine: RemoteEngine) -> str:
    return engine.state.value


def now() -> float:
    return asyncio.get_running_loop().time()


async def closing_models(exchange: HttpExchange) -> None:
    """A list of models after which the connection is closed: the request to come opens one of its own."""
    content = {"object": "list", "data": [{"id": "tiny", "object": "model", "owned_by": "vllm"}]}
    await exchange.respond(200, [("Content-Type", "application/json"), ("Connection", "close")], orjson.dumps(content))


# retries


@pytest.mark.virtual_clock
@pytest.mark.parametrize("status", [502, 503])
async def test_what_was_not_taken_is_sent_again(status: int) -> None:
    async with upstream(refuses(status), refuses(status), says("at ", "last")) as there, remote(there) as engine:
        began = now()
        outputs = await answer(engine)
        assert said(outputs) == "at last"
        assert final(outputs).reason is FinishReason.STOP
        assert [body["messages"][0]["content"] for body in there.requests] == ["hello"] * 3
        assert now() - began == pytest.approx(0.2 + 0.4, abs=0.05)


@pytest.mark.virtual_clock
@pytest.mark.parametrize("status", [429, 503])
async def test_an_upstream_says_when_to_come_again(status: int) -> None:
    async with upstream(refuses(status, retry_after="3"), says("yes")) as there, remote(there) as engine:
        began = now()
        assert said(await answer(engine)) == "yes"
        assert now() - began == pytest.approx(3, abs=0.05)


@pytest.mark.parametrize(
    ("status", "retry_after", "milliseconds"), [(429, None, 1000), (429, "5.1", 5100), (503, "60", 60_000)]
)
async def test_what_takes_too_long_is_told_to_the_client(
    status: int, retry_after: str | None, milliseconds: int
) -> None:
    headers = {} if retry_after is None else {"retry_after": retry_after}
    async with upstream(refuses(status, **headers), says("never")) as there, remote(there) as engine:
        with pytest.raises(EngineOverloaded) as caught:
            await answer(engine)
        assert caught.value.retry_after_ms == milliseconds
        assert len(there.requests) == 1


@pytest.mark.virtual_clock
@pytest.mark.parametrize("retries", [0, 1, 2])
async def test_tries_are_counted(retries: int) -> None:
    async with upstream(refuses(503)) as there, remote(there, retries=retries) as engine:
        with pytest.raises(EngineOverloaded):
            await answer(engine)
        assert len(there.requests) == retries + 1


@pytest.mark.parametrize("status", [400, 401, 404, 408, 413, 415, 500, 504])
async def test_everything_else_is_final(status: int) -> None:
    async with upstream(refuses(status), says("never")) as there, remote(there) as engine:
        with pytest.raises(OmniError):
            await answer(engine)
        assert len(there.requests) == 1


@pytest.mark.parametrize(
    "breaks",
    [
        streams(delta(content="once"), cut),
        streams(delta(content="once"), done=False),
        streams(delta(content="once"), {"error": {"message": "m", "code": 503}}),
        streams(cut),
        cut,
    ],
    ids=["cut", "ends early", "error event", "cut after the head", "cut before the head"],
)
async def test_what_was_begun_is_never_sent_again(breaks: Answer) -> None:
    async with (
        upstream(breaks, says("twice"), models_answer=closing_models) as there,
        upstream(says("twice"), models_answer=closing_models) as other,
        remote(there, other) as engine,
    ):
        outputs: list[EngineOutput] = []
        with pytest.raises(OmniError):
            await engine.generate(asking("x"), EngineAnswer(outputs))
        assert said(outputs) in ("once", "")
        assert len(there.requests) + len(other.requests) == 1


async def test_what_is_lost_with_a_connection_used_before_is_sent_again() -> None:
    """A server may have closed it, for it was idle, before it could read the request."""
    async with upstream(cut, says("once"), cut, cut, says("twice")) as there, remote(there) as engine:
        assert said(await answer(engine)) == "once"
        assert len(there.requests) == 2
        with pytest.raises(EngineFailed, match="broke the connection before its answer"):
            await answer(engine)
        assert len(there.requests) == 4


async def test_another_upstream_is_asked_at_once() -> None:
    busy = refuses(429, retry_after="600")
    async with upstream(busy) as first, upstream(says("here")) as second, remote(first, second) as engine:
        assert said(await answer(engine)) == "here"
        assert (len(first.requests), len(second.requests)) == (1, 1)
        # It asked to be left alone, and is.
        for _ in range(3):
            assert said(await answer(engine)) == "here"
        assert (len(first.requests), len(second.requests)) == (1, 4)


async def test_a_busier_upstream_is_asked_before_the_same_one_again() -> None:
    """The one that failed may fail again, however little it has to do."""
    held = streams(delta(content="x"), hang)
    async with upstream(refuses(502)) as first, upstream(held, says("here")) as second, remote(second, first) as engine:
        outputs = streamed(engine, asking("x"))
        await anext(outputs)
        assert said(await answer(engine)) == "here"
        assert (len(first.requests), len(second.requests)) == (1, 2)
        await outputs.aclose()


async def test_an_upstream_that_went_is_passed_over() -> None:
    async with upstream(says("here")) as second:
        async with upstream(says("never")) as first:
            engine = remote(first, second)
            started = await engine.__aenter__()
        for _ in range(3):
            assert said(await answer(started)) == "here"
        assert [one.is_up for one in started.llm.upstreams] == [False, True]
        await engine.__aexit__(None, None, None)


@pytest.mark.virtual_clock
async def test_the_last_upstream_goes_and_comes_back() -> None:
    there = ScriptedUpstream(chat=[says("here")])
    async with there.serve():
        engine = remote(there, health_interval_sec=1000)
        started = await engine.__aenter__()
        assert said(await answer(started)) == "here"
    with pytest.raises(EngineFailed, match="cannot be reached"):
        await answer(started)
    assert state(started) == "unhealthy"
    with pytest.raises(EngineFailed, match="no upstream can be reached"):
        await answer(started)
    await asyncio.sleep(100)
    async with there.serve(there.port):
        await asyncio.sleep(31)
        assert state(started) == "ok"
        assert said(await answer(started)) == "here"
        await engine.__aexit__(None, None, None)


# load


async def test_the_least_busy_is_asked() -> None:
    hold = streams(delta(content="x"), hang)
    async with upstream(hold) as first, upstream(hold) as second, upstream(hold) as third:
        servers = [first, second, third]
        async with remote(*servers) as engine:
            streams_open = []
            for expected in ([1, 1, 1], [2, 2, 2], [3, 3, 3]):
                for _ in range(3):
                    outputs = streamed(engine, asking("x"))
                    assert await anext(outputs) == TextOutput("x")
                    streams_open.append(outputs)
                assert [server.active for server in servers] == expected
            # Two leave the second: it gets the next two.
            leaving = [number for number in range(9) if number % 3 == 1][:2]
            for number in leaving:
                await streams_open[number].aclose()
            await until(lambda: second.active == 1)
            for number in leaving:
                streams_open[number] = streamed(engine, asking("x"))
                await anext(streams_open[number])
            assert [server.active for server in servers] == [3, 3, 3]
            assert engine.active_requests == 9
            for outputs in streams_open:
                await outputs.aclose()


async def test_equals_take_turns() -> None:
    async with upstream(says("x")) as first, upstream(says("x")) as second, remote(first, second) as engine:
        for _ in range(6):
            await answer(engine)
        assert (len(first.requests), len(second.requests)) == (3, 3)


# health


@pytest.mark.virtual_clock
async def test_an_upstream_that_is_not_well_is_left_out_until_it_is() -> None:
    async with (
        upstream(says("one")) as first,
        upstream(says("two")) as second,
        remote(first, second, health_interval_sec=10) as engine,
    ):
        first.health = 503
        await asyncio.sleep(11)
        for _ in range(4):
            assert said(await answer(engine)) == "two"
        assert state(engine) == "ok"
        second.health = 500
        await asyncio.sleep(11)
        assert state(engine) == "unhealthy"
        first.health = second.health = 200
        await asyncio.sleep(31)
        assert state(engine) == "ok"
        assert {said(await answer(engine)) for _ in range(2)} == {"one", "two"}


@pytest.mark.virtual_clock
async def test_a_lost_upstream_is_looked_at_less_and_less() -> None:
    async with upstream(says("one")) as first, remote(first, health_interval_sec=10) as engine:
        first.health = 503
        await asyncio.sleep(11)
        assert state(engine) == "unhealthy"
        before = first.checks
        await asyncio.sleep(15)  # after 0.5, 1, 2, 4 and nearly 8 seconds
        assert 3 <= first.checks - before <= 6
        before = first.checks
        await asyncio.sleep(300)
        assert 9 <= first.checks - before <= 12


@pytest.mark.virtual_clock
async def test_a_slow_check_alone_is_no_loss() -> None:
    """A server that works hard may be late."""
    async with upstream(says("one")) as first, remote(first, health_interval_sec=10, connect_timeout_sec=5) as engine:
        first.models_answer = hang
        await asyncio.sleep(16)
        assert state(engine) == "ok"
        await asyncio.sleep(16)
        assert state(engine) == "unhealthy"


@pytest.mark.virtual_clock
async def test_trouble_makes_it_look_at_once() -> None:
    async with upstream(streams(cut)) as first, remote(first, health_interval_sec=1000) as engine:
        before = first.checks
        first.health = 503
        with pytest.raises(EngineFailed):
            await answer(engine)
        await until(lambda: state(engine) == "unhealthy")
        assert first.checks == before + 1


@pytest.mark.virtual_clock
async def test_a_model_that_is_exchanged_is_noticed() -> None:
    async with upstream(says("one")) as first, remote(first, health_interval_sec=10) as engine:
        first.models = ("other",)
        await asyncio.sleep(11)
        assert state(engine) == "unhealthy"
        assert engine.describe() == (
            f"upstream 127.0.0.1:{first.port} is lost: it does not serve tiny; it serves other",
        )


async def test_servers_without_a_health_route() -> None:
    async with upstream(says("one"), health=404) as first, remote(first) as engine:
        assert said(await answer(engine)) == "one"


# the start


async def start_error(*urls: ScriptedUpstream | str, **settings: object) -> str:
    with pytest.raises(EngineFailed) as caught:
        async with remote(*urls, **settings):
            pytest.fail("it started")
    return caught.value.message


async def test_nobody_is_there() -> None:
    port, other = free_port(), free_port()
    message = await start_error(f"http://me:hush@127.0.0.1:{port}/v1", f"http://127.0.0.1:{other}")
    assert message.startswith(f"LLM (remote): no upstream can be used: 127.0.0.1:{port}: ConnectError")
    assert f"; 127.0.0.1:{other}: ConnectError" in message
    assert "hush" not in message


@pytest.mark.virtual_clock
async def test_the_start_waits_for_an_upstream() -> None:
    there = ScriptedUpstream(chat=[says("here")])
    port = free_port()
    engine = remote(f"http://127.0.0.1:{port}/v1", start_timeout_sec=60)
    starting = asyncio.create_task(engine.__aenter__())
    await asyncio.sleep(20)
    assert not starting.done()
    async with there.serve(port):
        assert said(await answer(await starting)) == "here"
        await engine.__aexit__(None, None, None)


@pytest.mark.virtual_clock
async def test_the_start_does_not_wait_for_ever_and_says_once_why_it_waits(caplog: pytest.LogCaptureFixture) -> None:
    began = now()
    with caplog.at_level(logging.INFO, "omni_ws.engine.remote.upstream"):
        assert "ConnectError" in await start_error(f"http://127.0.0.1:{free_port()}/v1", start_timeout_sec=60)
    assert now() - began == pytest.approx(60, abs=1)
    assert sum("waiting for an upstream" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.virtual_clock
@pytest.mark.parametrize(
    ("fields", "settings", "problem"),
    [
        ({"models_answer": refuses(401)}, {}, "it does not accept the key (status 401): set OMNI_WS_REMOTE__API_KEY"),
        (
            {"models_answer": refuses(401)},
            {"api_key": "hush"},
            "it does not accept the key (status 401): look at OMNI_WS_REMOTE__API_KEY",
        ),
        ({"models_answer": refuses(403)}, {}, "it does not accept the key (status 403)"),
        ({"models_answer": refuses(404)}, {}, "its list of models is 404"),
        ({"models_answer": refuses(200, b"<html>")}, {}, "is this an OpenAI-compatible server?"),
        ({"models_answer": refuses(200, ["tiny"])}, {}, "is this an OpenAI-compatible server?"),
        ({}, {"model": "large"}, "it does not serve large; it serves tiny"),
        ({}, {"model": "tinny"}, "it does not serve tinny; did you mean tiny?"),
        (
            {"models": ("x" * 500, "llama3.2:3b", "qwen2.5:7b")},
            {"model": "llama3.3:3b"},
            "it does not serve llama3.3:3b; did you mean llama3.2:3b?",
        ),
        ({"models": ()}, {}, "name one with remote.model"),
    ],
)
async def test_what_waiting_does_not_mend_is_told_at_once(
    fields: dict[str, object], settings: dict[str, object], problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with upstream(says("x"), **fields) as there:
        began = now()
        assert problem in await start_error(there, start_timeout_sec=60, **settings)
        assert now() - began < 30
        assert not [record for record in caplog.records if "is lost" in record.getMessage()]  # once is enough


async def test_the_model_is_found_out() -> None:
    async with upstream(says("x"), models=("tiny", "lora")) as there, remote(there) as engine:
        assert engine.model == "tiny"
        await answer(engine)
        assert there.requests[0]["model"] == "tiny"
        assert engine.describe() == (f"upstream 127.0.0.1:{there.port} serves tiny",)
    async with upstream(says("x"), models=("tiny", "lora")) as there, remote(there, model="lora") as engine:
        assert engine.model == "lora"
        await answer(engine)
        assert there.requests[0]["model"] == "lora"


async def test_a_server_that_lists_no_model_is_believed() -> None:
    async with upstream(says("x"), models=()) as there, remote(there, model="any") as engine:
        assert said(await answer(engine)) == "x"


async def test_upstreams_of_another_model_are_left_out() -> None:
    async with (
        upstream(says("one")) as first,
        upstream(says("two"), models=("other",)) as second,
        remote(first, second) as engine,
    ):
        for _ in range(3):
            assert said(await answer(engine)) == "one"
        assert "does not serve tiny" in engine.describe()[1]


async def test_an_engine_that_is_not_running() -> None:
    async with upstream(says("x")) as there:
        async with remote(there) as engine:
            assert state(engine) == "ok"
        assert state(engine) == "starting"
        with pytest.raises(EngineFailed, match="not running"):
            await answer(engine)
        await engine.stop()


# time-outs


@pytest.mark.virtual_clock
@pytest.mark.parametrize("silent", [hang, streams(hang)], ids=["no head", "no byte after the head"])
async def test_no_first_byte(silent: Answer) -> None:
    async with upstream(silent) as there, remote(there, first_byte_timeout_sec=30) as engine:
        began = now()
        with pytest.raises(EngineFailed):
            await answer(engine)
        assert now() - began == pytest.approx(30, abs=0.1)
        await there.deserted.wait()


@pytest.mark.virtual_clock
async def test_silence_in_the_middle() -> None:
    async with upstream(streams(delta(content="x"), hang)) as there, remote(there, idle_timeout_sec=20) as engine:
        began = now()
        outputs = streamed(engine, asking("x"))
        assert await anext(outputs) == TextOutput("x")
        with pytest.raises(EngineFailed, match="fell silent"):
            await anext(outputs)
        assert now() - began == pytest.approx(20, abs=0.1)
        await there.deserted.wait()


@pytest.mark.virtual_clock
async def test_signs_of_life_are_enough() -> None:
    async def wait(exchange: HttpExchange) -> None:
        await asyncio.sleep(15)

    steps = [step for _ in range(10) for step in (wait, b": keep-alive\n\n")]
    there_answers = streams(*steps, delta(content="late"))
    patience = {"first_byte_timeout_sec": 200, "idle_timeout_sec": 20}
    async with upstream(there_answers) as there, remote(there, **patience) as engine:
        began = now()
        assert said(await answer(engine)) == "late"
        assert now() - began >= 150


@pytest.mark.virtual_clock
@pytest.mark.parametrize(
    "sign",
    [
        b": keep-alive\n\n",
        b":",
        b"\n",
        b"event: ping\ndata: {}\n\n",
        b'data: {"choices":[{"delta":{}}]}\n\n',
        b"id: 1\n",
    ],
)
async def test_nothing_keeps_an_answer_alive_but_more_of_it(sign: bytes) -> None:
    async def forever(exchange: HttpExchange) -> None:
        while True:
            await exchange.write(sign)
            await asyncio.sleep(5)

    there_answers = streams(delta(content="x"), forever)
    async with upstream(there_answers) as there, remote(there, idle_timeout_sec=20) as engine:
        began = now()
        with pytest.raises(EngineFailed, match="fell silent"):
            await answer(engine)
        assert now() - began == pytest.approx(20, abs=0.1)


@pytest.mark.virtual_clock
async def test_a_long_event_in_pieces_is_no_silence() -> None:
    async def slowly(exchange: HttpExchange) -> None:
        for piece in (b'data: {"choices":[{"del', b'ta":{"content":', b'"y"}}]}\n', b"\n"):
            await asyncio.sleep(15)
            await exchange.write(piece)

    async with upstream(streams(delta(content="x"), slowly)) as there, remote(there, idle_timeout_sec=20) as engine:
        assert said(await answer(engine)) == "xy"


@pytest.mark.virtual_clock
async def test_a_reader_that_takes_its_time_is_no_silence() -> None:
    async with upstream(says("a", "b")) as there, remote(there, idle_timeout_sec=1, first_byte_timeout_sec=1) as engine:
        async with aclosing(streamed(engine, asking("x"))) as outputs:
            texts = []
            async for output in outputs:
                texts.append(output)
                await asyncio.sleep(100)
        assert said(texts) == "ab"


@pytest.mark.virtual_clock
async def test_nobody_takes_the_connection() -> None:
    with deaf_port() as port:
        began = now()
        url = f"http://127.0.0.1:{port}/v1"
        assert "no answer within 7 s" in await start_error(url, connect_timeout_sec=7)
        assert now() - began == pytest.approx(7, abs=0.1)


# cancellation


@pytest.mark.parametrize("answers", [streams(delta(content="x"), hang), streams(hang), hang], ids=["text", "head", ""])
async def test_cancelling_drops_the_upstreams_work(answers: Answer) -> None:
    async with upstream(answers) as there, remote(there) as engine:
        asked = asyncio.create_task(answer(engine))
        await there.asked.wait()
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        async with asyncio.timeout(PATIENCE_SEC):
            await there.deserted.wait()
        assert engine.active_requests == 0
        assert [one.active for one in engine.llm.upstreams] == [0]


async def test_closing_drops_the_upstreams_work() -> None:
    async with upstream(streams(delta(content="x"), hang)) as there, remote(there) as engine:
        outputs = streamed(engine, asking("x"))
        assert await anext(outputs) == TextOutput("x")
        await outputs.aclose()
        async with asyncio.timeout(PATIENCE_SEC):
            await there.deserted.wait()


async def test_a_whole_answer_leaves_a_connection_that_is_used_again() -> None:
    async with upstream(says("x")) as there, remote(there) as engine:
        connections = set()

        class Noting:
            async def __call__(self, exchange: HttpExchange) -> None:
                connections.add(id(exchange._output))
                await says("x")(exchange)

        there.chat = [Noting()]
        for _ in range(3):
            await answer(engine)
        assert len(connections) == 1
        assert not there.deserted.is_set()


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://host:8000", "http://host:8000/v1"),
        ("http://host:8000/", "http://host:8000/v1"),
        ("http://host:8000/v1/", "http://host:8000/v1"),
        ("https://host/openai/v1", "https://host/openai/v1"),
        ("https://host/api", "https://host/api"),
    ],
)
def test_base_urls(url: str, base: str) -> None:
    assert normalised(url) == base


def test_making_an_engine_touches_nothing() -> None:
    from omni_ws.config.model import RemoteConfig

    engine = RemoteEngine(RemoteConfig(upstreams=("http://127.0.0.1:1",)))
    assert (engine.state, engine.model, engine.active_requests) == (EngineState.STARTING, "remote", 0)


# sizes


async def endless(exchange: HttpExchange) -> None:
    await exchange.start(200, [("Content-Type", "application/json")])
    while True:
        await exchange.write(b" " * 65536)


def compressed(body: bytes, coding: str) -> Answer:
    window = {"gzip": 31, "deflate": 15, "raw": -15, "br": 15}[coding]
    stream = zlib.compressobj(wbits=window)
    data = stream.compress(body) + stream.flush()

    async def reply(exchange: HttpExchange) -> None:
        await exchange.respond(200, [("Content-Encoding", "deflate" if coding == "raw" else coding)], data)

    return reply


async def test_answers_about_the_upstream_have_an_end() -> None:
    bomb = compressed(b" " * (9 << 20), "gzip")
    for long in (endless, bomb):
        async with upstream(models_answer=long) as there:
            assert "its answer to /v1/models has more than 8 MiB" in await start_error(there.url)
    scripted = ScriptedUpstream()
    scripted._health = endless  # type: ignore[method-assign]
    async with scripted.serve() as there:
        assert "its answer to /health has more than 8 MiB" in await start_error(there.url)


@pytest.mark.parametrize("coding", ["gzip", "deflate", "raw"])
async def test_answers_that_come_compressed_are_inflated(coding: str) -> None:
    events = b'data: {"choices":[{"delta":{"content":"' + b"x" * 200_000 + b'"},"finish_reason":"stop"}]}\n\n'
    async with upstream(compressed(events, coding)) as there, remote(there) as engine:
        assert said(await answer(engine)) == "x" * 200_000


async def test_answers_that_come_compressed_in_another_way_are_refused() -> None:
    for coding, data in (("br", b"x"), ("gzip, gzip", b"x"), ("gzip", b"????")):

        async def reply(exchange: HttpExchange, coding: str = coding, data: bytes = data) -> None:
            await exchange.respond(200, [("Content-Encoding", coding)], data)

        async with upstream(reply) as there, remote(there) as engine:
            with pytest.raises(EngineFailed, match=r"compressed|inflated"):
                await answer(engine)


async def test_a_bomb_is_inflated_in_pieces() -> None:
    """Before it is whole, an event without end is noticed."""
    async with upstream(compressed(b"data: " + b" " * (70 << 20), "gzip")) as there, remote(there) as engine:
        with pytest.raises(EngineFailed, match="event without an end"):
            await answer(engine)
