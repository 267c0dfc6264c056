"""Images by URL in ``/v1/realtime``: fetched from listed hosts only, while what depends on them waits."""

from __future__ import annotations

from typing import Any

from support.http_server import GIF, listed, media_host
from support.live_server import live_server
from support.realtime_client import RealtimeClient, failed, realtime_client, text_of
from support.scripted_engines import CapableEngine, said

from omni_ws.core.chunks import InputChunk
from omni_ws.transport.realtime.effects import (
    MAX_IMAGES,
    MAX_WAITING,
)


def message(*urls: str, text: str = "What is it?", **fields: Any) -> dict[str, Any]:
    images = [{"type": "input_image", "image_url": url} for url in urls]
    content = [{"type": "input_text", "text": text}, *images]
    return {"type": "message", "role": "user", "content": content, **fields}


async def create(client: RealtimeClient, item: dict[str, Any], **fields: Any) -> None:
    await client.send("conversation.item.create", item=item, **fields)


def pictures(chunks: list[InputChunk]) -> list[bytes]:
    return [bytes(chunk.payload) for chunk in chunks if chunk.modality == "image"]


async def test_an_image_is_fetched_before_what_comes_behind_it() -> None:
    engine = CapableEngine([said("a thing")])
    async with (
        media_host() as host,
        live_server(engine, http={"media_domains": listed(host)}) as server,
        realtime_client(server) as client,
    ):
        await create(client, message(host.url("/a.gif"), host.url("/untyped.gif"), id="first"))
        await create(client, message(text="Say.", id="second"))
        assert text_of(await client.respond()) == "a thing"
        assert [one["item"]["id"] for one in client.seen("conversation.item.added")][:2] == ["first", "second"]
        assert pictures(engine.inputs[0]) == [GIF, GIF]
        await client.respond(input=[message(host.url("/a.gif"))])
        assert pictures(engine.inputs[1]) == [GIF]
        assert len(host.requests) == 3


async def test_what_does_not_depend_on_it_overtakes_an_image() -> None:
    engine = CapableEngine([said("a thing")])
    async with (
        media_host() as host,
        live_server(engine, http={"media_domains": listed(host)}) as server,
        realtime_client(server) as client,
    ):
        await create(client, message(host.url("/silent")), event_id="picture")
        await client.send("conversation.item.retrieve", item_id="none")
        assert (await client.update(instructions="Be brief."))["instructions"] == "Be brief."
        assert (await failed(client, "response.cancel"))["code"] == "response_cancel_not_active"
        host.released.set()
        error = (await client.until("error"))["error"]
        assert (error["code"], error["event_id"]) == ("invalid_value", "picture")
        assert error["param"] == "item.content[1].image_url"
        assert (await client.until("error"))["error"]["code"] == "item_retrieve_invalid_item_id"


async def test_what_is_not_listed_is_refused() -> None:
    async with media_host() as host, live_server() as server, realtime_client(server) as client:
        await create(client, message(host.url("/a.gif")))
        error = (await client.until("error"))["error"]
        assert (error["code"], error["param"]) == ("unsupported_parameter", "item.content[1].image_url")
        assert "http.media_domains" in error["message"]
        await client.send("response.create", response={"input": [message(), message(host.url("/a.gif"))]})
        error = (await client.until("error"))["error"]
        assert (error["code"], error["param"]) == ("unsupported_parameter", "response.input[1].content[1].image_url")
        assert not host.requests
        await client.say("hello")
        assert text_of(await client.respond()) == "hello"


async def test_what_is_no_image_is_refused() -> None:
    async with (
        media_host() as host,
        live_server(http={"media_domains": listed(host)}) as server,
        realtime_client(server) as client,
    ):
        for path in ("/a.txt", "/missing"):
            await create(client, message(host.url(path)))
            error = (await client.until("error"))["error"]
            assert error["param"] == "item.content[1].image_url"


async def test_the_most_images_and_events() -> None:
    async with (
        media_host() as host,
        live_server(http={"media_domains": listed(host)}) as server,
        realtime_client(server) as client,
    ):
        await create(client, message(*[host.url("/a.gif")] * MAX_IMAGES))
        await client.until("conversation.item.added")
        await create(client, message(*[host.url("/a.gif")] * (MAX_IMAGES + 1)))
        error = (await client.until("error"))["error"]
        assert error["param"] == f"item.content[{MAX_IMAGES + 1}].image_url"
        await create(client, message(host.url("/silent")))
        for _ in range(MAX_WAITING):
            await client.send("conversation.item.retrieve", item_id="none", event_id="mine")
        error = (await client.until("error"))["error"]
        assert (error["code"], error["event_id"]) == ("invalid_value", "mine")
        assert str(MAX_WAITING) in error["message"]
        host.released.set()
        for _ in range(MAX_WAITING):
            await client.until("error")


async def test_a_client_that_leaves_leaves_nothing() -> None:
    async with media_host() as host, live_server(http={"media_domains": listed(host)}) as server:
        async with realtime_client(server) as client:
            await create(client, message(host.url("/silent")))
            await server.until(lambda: bool(host.requests))
        await host.left.wait()
