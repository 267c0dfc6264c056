"""Mode A over time: answers during the upload, silence, and clients that disconnect."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from support.live_server import LiveServer, live_server
from support.raw_http import (
    DONE,
    Event,
    RawClient,
    arriving_events,
    chunked,
    content,
    events_of,
    post,
    raw_client,
    request,
)
from support.scripted_engines import ActingEngine, CountingEngine

from omni_ws.engine.base import AudioOutput, TextOutput
from omni_ws.engine.fake import EchoEngine, EchoSettings, ScriptedEngine
from omni_ws.errors import EngineFailed

CHAT = "/v1/chat/completions"
STREAMING = "X-Streaming-Input: true"
CHUNKED = "Transfer-Encoding: chunked"


def line(word: str, **fields: Any) -> bytes:
    more = "".join(f',"{name}":{value}' for name, value in fields.items())
    return f'{{"text":"{word}"{more}}}\n'.encode()


async def begin(client: RawClient, *bodies: bytes, headers: tuple[str, ...] = ()) -> None:
    await client.send(request("POST", CHAT, STREAMING, CHUNKED, *headers))
    await client.send(chunked(*bodies, end=False))


async def next_event(events: Any) -> Event:
    event: Event = await anext(events)
    return event


def now() -> float:
    return asyncio.get_running_loop().time()


# --- full duplex


async def test_the_answer_begins_while_the_upload_still_runs() -> None:
    async with live_server() as server, raw_client(server.port) as client:
        await begin(client, line("one"))
        _, status, headers = await client.head()
        assert (status, headers["transfer-encoding"]) == (200, "chunked")
        events = arriving_events(client)
        assert (await next_event(events)).json()["choices"][0]["delta"] == {"role": "assistant"}
        assert content([await next_event(events)]) == "one"
        for word in (" two", " three"):
            await client.send(chunked(line(word), end=False))
            # Each word is echoed before the next is sent.
            assert content([await next_event(events)]) == word
        await client.send(b"0\r\n\r\n")
        assert [event async for event in events][-1] == DONE


async def test_an_answer_may_begin_in_the_middle_of_a_body_of_known_length() -> None:
    body = line("one") + line(" two")
    async with live_server() as server, raw_client(server.port) as client:
        await client.send(request("POST", CHAT, STREAMING, f"Content-Length: {len(body)}"), line("one"))
        assert (await client.head())[1] == 200
        events = arriving_events(client)
        assert content([await next_event(events), await next_event(events)]) == "one"
        await client.send(line(" two"))
        assert content([event async for event in events]) == " two"


async def test_the_head_marks_the_start_of_work_and_the_role_the_first_output() -> None:
    gate = asyncio.Event()
    async with live_server(ScriptedEngine([gate.wait, TextOutput("a")])) as server, raw_client(server.port) as client:
        await begin(client, line("one"))
        assert (await client.head())[1] == 200
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await client.reader.readexactly(1)
        await client.send(b"0\r\n\r\n")
        gate.set()
        assert content([event async for event in arriving_events(client)]) == "a"


async def test_the_start_policy_says_when() -> None:
    parameters = b'{"start_policy":{"type":"on_min_length","min_chunks":2}}\n'
    async with live_server() as server, raw_client(server.port) as client:
        await begin(client, parameters, line("one"))
        await server.until(lambda: server.held_bytes == 3)
        assert server.engine.active_requests == 0
        await client.send(chunked(line(" two"), end=False))
        assert (await client.head())[1] == 200
        await client.send(b"0\r\n\r\n")
        assert content([event async for event in arriving_events(client)]) == "one two"


async def test_a_frozen_input_is_answered_while_the_rest_still_comes() -> None:
    parameters = b'{"start_policy":"on_first_chunk","usage_on_final_chunk":true}\n'
    async with live_server(ActingEngine("fake", extend=False)) as server, raw_client(server.port) as client:
        await begin(client, parameters, line("one"))
        assert (await client.head())[1] == 200
        events = arriving_events(client)
        assert content([await next_event(events), await next_event(events)]) == "one"
        await client.send(chunked(line(" and more")))
        last = [event async for event in events]
        assert content(last) == ""
        # The final waits for the end of the input, since it reports how much of it was not used.
        assert last[0].json()["usage"]["input_after_start_bytes"] == len(" and more")


async def test_an_answer_that_ends_early_ends_while_the_upload_runs() -> None:
    async with live_server() as server, raw_client(server.port) as client:
        await begin(client, b'{"stage_params":{"fake":{"fail_after_chunks":1}}}\n', line("one two"))
        events = events_of(await client.response())
        assert content(events[:-1]) == "one"
        assert events[-1].name == "error"
        await server.until(lambda: server.sessions == 0)
        # Further input is discarded until the connection closes.
        await client.send(chunked(line("more"), end=False))
        assert await client.rest() == b""


async def test_expect_100_continue() -> None:
    async with live_server() as server:
        async with raw_client(server.port) as client:
            await client.send(request("POST", CHAT, STREAMING, CHUNKED, "Expect: 100-continue"))
            assert (await client.head())[1] == 100
            await client.send(chunked(line("one")))
            assert content(events_of(await client.response())) == "one"
        async with raw_client(server.port) as client:
            # A request refused by its head needs no body.
            headers = (STREAMING, CHUNKED, "Content-Encoding: br", "Expect: 100-continue")
            await client.send(request("POST", CHAT, *headers))
            response = await client.response()
            assert (response.status, response.interim) == (415, [])


async def test_http_1_0() -> None:
    async with live_server() as server, raw_client(server.port) as client:
        body = line("one") + line(" two")
        head = f"POST {CHAT} HTTP/1.0\r\n{STREAMING}\r\nContent-Length: {len(body)}\r\n\r\n"
        await client.send(head, body)
        assert content(events_of(await client.response())) == "one two"


async def test_a_client_that_closes_its_sending_side_gets_its_answer() -> None:
    engine = EchoEngine(EchoSettings(first_chunk_delay_ms=50))
    async with live_server(engine) as server, raw_client(server.port) as client:
        await client.send(request("POST", CHAT, STREAMING, CHUNKED), chunked(line("one")))
        client.finish_sending()
        assert content(events_of(await client.response())) == "one"


async def test_requests_before_and_after_on_one_connection() -> None:
    async with live_server() as server, raw_client(server.port) as client:
        for word in ("one", "two"):
            await client.send(request("POST", CHAT, STREAMING, CHUNKED), chunked(line(word)))
            assert content(events_of(await client.response())) == word
            await client.send(
                request("POST", CHAT, body=b'{"messages":[{"role":"user","content":"%b"}]}' % word.encode())
            )
            assert (await client.response()).json()["choices"][0]["message"]["content"] == word


async def test_an_upload_rests_while_the_engine_does() -> None:
    """Buffers between the socket and an engine that does not take its input are bounded."""
    gate = asyncio.Event()
    engine = CountingEngine(gate=gate)
    size, count = 64 * 1024, 400
    async with live_server(engine) as server, raw_client(server.port) as client:
        await client.send(request("POST", CHAT, STREAMING, CHUNKED, "Content-Type: audio/pcm"))

        async def upload() -> None:
            for _ in range(count):
                await client.send(chunked(bytes(size), end=False))
            await client.send(b"0\r\n\r\n")

        uploading = asyncio.create_task(upload())
        await server.until(lambda: server.held_bytes > 1 << 20)
        held = -1
        while held != server.held_bytes:
            held = server.held_bytes
            await asyncio.sleep(0.05)
        assert held < 4 << 20
        assert not uploading.done()
        gate.set()
        await uploading
        assert content(events_of(await client.response())) == str(size * count)


# --- errors after the head


@pytest.mark.parametrize(
    ("rest", "code", "said"),
    [
        (b"{\n", "invalid_frame", "line 2"),
        (b'{"payload":"?"}\n', "invalid_frame", "line 2"),
        (b'{"text":"b","sequence_id":5}\n', "invalid_value", "line 2"),
        (b'{"text":"b","format":"x"}\n', "invalid_value", "line 2"),
        (b'{"modality":"audio","payload":"AAAA","format":"nonsense"}\n', "unsupported_format", "line 2"),
    ],
)
async def test_a_bad_line_after_the_answer_began_is_an_event(rest: bytes, code: str, said: str) -> None:
    async with live_server() as server, raw_client(server.port) as client:
        await begin(client, line("one"), headers=("Accept: application/json",))
        assert (await client.head())[1] == 200
        events = arriving_events(client)
        assert content([await next_event(events), await next_event(events)]) == "one"
        await client.send(chunked(rest, end=False))
        last = [event async for event in events]
        assert [event.name for event in last] == ["error"]
        fields = last[0].json()
        assert (fields["code"], fields["error"]["code"]) == (code, code)
        assert fields["message"].startswith(said)


@pytest.mark.parametrize(
    ("chunks", "code"),
    [
        ((line("one", sequence_id=0), line("three", sequence_id=2)), "sequence_gap"),
        ((line("one", end_of_input="true"), line("two")), "session_conflict"),
    ],
)
async def test_ends_that_are_none_after_the_answer_began(chunks: tuple[bytes, bytes], code: str) -> None:
    engine = EchoEngine(EchoSettings(chunk_interval_ms=200))
    async with live_server(engine) as server, raw_client(server.port) as client:
        await begin(client, b"{}\n", chunks[0].replace(b"one", b"one one"))
        assert (await client.head())[1] == 200
        await client.send(chunked(chunks[1]))
        events = [event async for event in arriving_events(client)]
        assert events[-1].name == "error"
        assert events[-1].json()["code"] == code


async def test_a_body_that_breaks_off() -> None:
    async with live_server() as server:
        async with raw_client(server.port) as client:
            await begin(client, b'{"start_policy":"on_end_only"}\n', line("one"))
            client.finish_sending()
            assert (await client.response()).status == 400
        async with raw_client(server.port) as client:
            await begin(client, line("one"))
            assert (await client.head())[1] == 200
            await client.send(b"not a chunk\r\n")
            assert [event async for event in arriving_events(client)][-1].name == "error"


async def test_an_engine_that_fails_while_the_upload_runs() -> None:
    async with live_server() as server:
        async with raw_client(server.port) as client:
            await begin(client, b'{"stage_params":{"fake":{"fail_after_chunks":1}}}\n', line("one two"))
            events = events_of(await client.response())
            assert (content(events[:-1]), events[-1].json()["code"]) == ("one", "engine_failed")
        async with raw_client(server.port) as client:
            await begin(client, b'{"stream":false,"stage_params":{"fake":{"fail_after_chunks":1}}}\n', line("one two"))
            response = await client.response()
            assert (response.status, response.error["code"]) == (500, "engine_failed")


async def test_an_engine_that_fails_before_its_first_output_fails_after_the_head() -> None:
    async with live_server(ScriptedEngine([EngineFailed("broken")])) as server:
        answer = await post(server.port, CHAT, line("one"), STREAMING)
        (event,) = events_of(answer)
        assert event.name == "error"
        assert event.json()["message"].startswith("broken; error id err_")


# --- time


@pytest.mark.virtual_clock
async def test_a_gap_that_is_not_filled_in_time() -> None:
    async with live_server(streaming_input={"reorder_timeout_sec": 10}) as server:
        async with raw_client(server.port) as client:
            began = now()
            await begin(client, line("two", sequence_id=1))
            response = await client.response()
            assert (response.status, response.error["code"]) == (408, "sequence_gap")
            assert 10 <= now() - began <= 11.5
        async with raw_client(server.port) as client:
            await begin(client, line("two", sequence_id=1))
            await asyncio.sleep(9)
            await client.send(chunked(line("one ", sequence_id=0)))
            assert content(events_of(await client.response())) == "one two"


@pytest.mark.virtual_clock
@pytest.mark.parametrize("body", [b"", b"{}\n", b'{"start_policy":"on_end_only"}\n{"text":"a"}\n', b'{"text":"half'])
async def test_a_client_that_falls_silent(body: bytes) -> None:
    async with live_server(streaming_input={"session_timeout_sec": 40}) as server, raw_client(server.port) as client:
        await client.send(request("POST", CHAT, STREAMING, CHUNKED))
        if body:
            await client.send(chunked(body, end=False))
        began = now()
        response = await client.response()
        assert (response.status, response.error["code"]) == (408, "session_timeout")
        assert 40 <= now() - began <= 42


@pytest.mark.virtual_clock
async def test_a_client_that_falls_silent_after_the_answer_began() -> None:
    async with live_server(streaming_input={"session_timeout_sec": 40}) as server, raw_client(server.port) as client:
        await begin(client, line("one"))
        events = [event async for event in arriving_events_after_head(client)]
        assert events[-1].name == "error"
        assert events[-1].json()["code"] == "session_timeout"
        assert [event.comment for event in events].count(True) == 2


@pytest.mark.virtual_clock
@pytest.mark.parametrize("streamed", [True, False])
async def test_a_client_that_closes_while_the_engine_is_silent(streamed: bool) -> None:
    """A FIN alone means half-closed; a probe finds out that the socket is closed."""
    engine = ScriptedEngine([lambda: asyncio.sleep(1000), TextOutput("nobody hears this")])
    async with live_server(engine) as server:
        async with raw_client(server.port) as client:
            await client.send(request("POST", CHAT, STREAMING, CHUNKED))
            await client.send(chunked(*([] if streamed else [b'{"stream":false}\n']), line("one")))
            await server.until(lambda: engine.active_requests == 1, "the silence")
            if streamed:
                assert (await client.head())[1] == 200
        closed = now()
        await server.check_empty()
        assert now() - closed < 1


async def arriving_events_after_head(client: RawClient) -> Any:
    assert (await client.head())[1] == 200
    async for event in arriving_events(client):
        yield event


@pytest.mark.virtual_clock
async def test_any_bytes_are_a_sign_of_life() -> None:
    async with live_server(streaming_input={"session_timeout_sec": 40}) as server, raw_client(server.port) as client:
        await begin(client, b'{"start_policy":"on_end_only"}\n')
        for byte in (b"{", b'"text"', b":", b'"slow"', b"}"):
            await asyncio.sleep(35)
            await client.send(chunked(byte, end=False))
        await asyncio.sleep(35)
        await client.send(b"0\r\n\r\n")
        assert content(events_of(await client.response())) == "slow"


@pytest.mark.virtual_clock
async def test_nothing_times_out_while_an_answer_is_owed() -> None:
    async def long() -> None:
        await asyncio.sleep(500)

    limits = {"session_timeout_sec": 40}
    for ending in (b"0\r\n\r\n", b""):  # the end of the body, or only of the input
        engine = ScriptedEngine([long, TextOutput("at last")])
        async with live_server(engine, streaming_input=limits) as server, raw_client(server.port) as client:
            began = now()
            await begin(client, line("one", end_of_input="true"))
            await client.send(ending)
            events = [event async for event in arriving_events_after_head(client)]
            assert content(events) == "at last"
            assert now() - began >= 500


@pytest.mark.virtual_clock
async def test_the_silence_of_a_client_that_is_not_read_is_not_its_own() -> None:
    """While the engine takes no input for ten minutes, input waits in the socket."""
    gate = asyncio.Event()
    engine = CountingEngine(gate=gate)
    limits = {"session_timeout_sec": 40}
    async with live_server(engine, streaming_input=limits) as server, raw_client(server.port) as client:
        await client.send(request("POST", CHAT, STREAMING, CHUNKED, "Content-Type: audio/pcm"))
        for _ in range(40):
            client.writer.write(chunked(bytes(65536), end=False))
        client.writer.write(b"0\r\n\r\n")
        await asyncio.sleep(600)
        assert engine.active_requests == 1
        gate.set()
        events = [event async for event in arriving_events_after_head(client)]
        assert content(events) == str(40 * 65536)


@pytest.mark.virtual_clock
async def test_ordinary_bodies_keep_the_ordinary_time_out() -> None:
    limits: dict[str, Any] = {"streaming_input": {"session_timeout_sec": 400}, "http": {"body_timeout_sec": 20}}
    async with live_server(**limits) as server, raw_client(server.port) as client:
        began = now()
        await client.send(request("POST", CHAT, "Content-Length: 100"), b"{")
        response = await client.response()
        assert (response.status, response.error["code"]) == (408, "session_timeout")
        assert now() - began <= 22


# --- clients that disconnect


@pytest.mark.parametrize("reset", [True, False])
@pytest.mark.parametrize("body", [b"", b"{}\n", b'{"start_policy":"on_end_only"}\n{"text":"a"}\n', b'{"text":"a"}\n'])
async def test_a_client_that_goes_while_it_uploads(body: bytes, reset: bool) -> None:
    """The end of the connection within a body ends the request, by a FIN or by a reset."""
    async with live_server() as server:
        async with raw_client(server.port) as client:
            await client.send(request("POST", CHAT, STREAMING, CHUNKED))
            if body:
                await client.send(chunked(body, end=False))
            await server.until(lambda: server.running._connections.busy == 1 and server.sessions == bool(body))
            if b"on_end_only" in body:
                await server.until(lambda: server.held_bytes == 1)
            elif b"text" in body:
                await server.until(lambda: server.engine.active_requests == 1)
            if reset:
                client.reset()
        await server.until(lambda: server.sessions == 0, "the end of the session")


async def test_a_client_that_goes_after_its_upload() -> None:
    async def forever() -> None:
        await asyncio.Event().wait()

    async with live_server(ScriptedEngine([TextOutput("a"), forever])) as server, raw_client(server.port) as client:
        await client.send(request("POST", CHAT, STREAMING, CHUNKED), chunked(line("one")))
        assert (await client.head())[1] == 200
        await server.until(lambda: server.engine.active_requests == 1)
        client.reset()


async def test_a_client_that_goes_while_it_is_not_read() -> None:
    gate = asyncio.Event()
    async with live_server(CountingEngine(gate=gate)) as server, raw_client(server.port) as client:
        await client.send(request("POST", CHAT, STREAMING, CHUNKED, "Content-Type: audio/pcm"))
        for _ in range(40):
            client.writer.write(chunked(bytes(65536), end=False))
        await server.until(lambda: server.held_bytes > 1 << 20)
        client.reset()
        # The end of a socket whose reading is paused is noticed late.
        gate.set()


async def drained(server: LiveServer) -> None:
    await server.running.drain(5)


async def test_an_upload_that_runs_is_finished_while_the_server_drains() -> None:
    async with live_server(still_answers=False) as server, raw_client(server.port) as client:
        await begin(client, line("one"))
        assert (await client.head())[1] == 200
        draining = asyncio.create_task(drained(server))
        await server.until(lambda: server.app.sessions.admission.draining)
        await client.send(chunked(line(" two")))
        assert content([event async for event in arriving_events(client)]) == "one two"
        await draining


async def test_an_answer_that_nobody_reads_counts_in_what_the_server_holds() -> None:
    script: list[Any] = [AudioOutput(np.zeros(24_000, dtype=np.float32), 24_000)] * 400
    fields = {"max_output_bytes": 200_000}
    async with live_server(ScriptedEngine(script), streaming_input=fields) as server:
        async with raw_client(server.port, read_ahead=1024) as client:
            parameters = b'{"modalities":["audio"],"audio":{"format":"pcm"}}\n'
            await client.send(request("POST", CHAT, STREAMING, CHUNKED), chunked(parameters, line("one")))
            await server.until(lambda: server.held_bytes >= 200_000, "the full outbox")
            assert server.held_bytes < 300_000
            client.reset()
        await server.check_empty()
