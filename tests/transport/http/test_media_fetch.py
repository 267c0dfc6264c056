"""Media by URL: from listed hosts, at allowed addresses, within limits of size, time and memory."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest
from support.http_server import GIF, WAV, listed, media_host, tls_contexts
from support.live_server import LiveServer, live_server
from support.raw_http import RawResponse, post
from support.scripted_engines import CapableEngine, said

from omni_ws.config.model import HttpConfig, MediaDomains
from omni_ws.core.chunks import InputChunk, Modality
from omni_ws.errors import OmniError, PayloadTooLarge, UnsupportedParameter
from omni_ws.transport.http.media_fetch import MAX_REDIRECTS, MediaFetcher, MediaReader
from omni_ws.wire.openai_fields import MediaUrl

PATH = "/v1/chat/completions"


async def ask(server: LiveServer, **body: Any) -> RawResponse:
    return await post(server.port, PATH, {"messages": [{"role": "user", "content": "What is this?"}], **body})


async def test_listed_hosts_are_fetched_from(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    engine = CapableEngine([said("a thing")])
    async with media_host() as host, live_server(engine, http={"media_domains": listed(host)}) as server:
        content = [
            {"type": "text", "text": "Look:"},
            {"type": "image_url", "image_url": {"url": host.url("/a.gif")}},
            {"type": "audio_url", "audio_url": {"url": host.url("/typed")}},
            {"type": "video_url", "video_url": host.url("/a.mp4")},
        ]
        response = await post(
            server.port,
            PATH,
            {
                "messages": [{"role": "user", "content": content}],
                "images": [host.url("/untyped.gif")],
                "audios": [host.url("/a.wav?x=1")],
            },
        )
        assert response.status == 200, response.body
        await server.check_empty()
    assert engine.inputs == [
        [
            InputChunk(Modality.IMAGE, GIF),
            InputChunk(Modality.AUDIO, WAV, format="wav"),
            InputChunk(Modality.TEXT, b"Look:"),
            InputChunk(Modality.IMAGE, GIF, format="image/gif"),
            InputChunk(Modality.AUDIO, WAV, format="wav"),
            InputChunk(Modality.VIDEO, b"mp4", format="video/mp4"),
        ]
    ]
    for request in host.requests:
        assert set(request) == {"host", "accept", "accept-encoding", "user-agent"}
        assert request["host"] == f"127.0.0.1:{host.port}"


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        ("http://192.0.2.1/a.gif", 400, "unsupported_parameter"),
        ("https://example.org/a.gif", 400, "unsupported_parameter"),
        ("http://127.0.0.1:1/a.gif", 400, "unsupported_parameter"),
        ("http://localhost:{port}/a.gif", 400, "unsupported_parameter"),
        ("https://127.0.0.1:{port}/a.gif", 400, "invalid_value"),
        ("http://user@127.0.0.1:{port}/a.gif", 400, "invalid_value"),
        ("http://127.0.0.1:{port}/ä.gif", 400, "invalid_value"),
        ("http://127.0.0.1:{port}/a\r\nX: y", 400, "invalid_value"),
        ("http://127.0.0.1:99999/a.gif", 400, "invalid_value"),
        ("http://[/a.gif", 400, "invalid_value"),
        ("file:///etc/passwd", 400, "unsupported_parameter"),
        ("gopher://127.0.0.1:{port}/a.gif", 400, "unsupported_parameter"),
        ("http://127.0.0.1:{port}/missing", 400, "invalid_value"),
        ("http://127.0.0.1:{port}/zipped", 400, "invalid_value"),
        ("http://127.0.0.1:{port}/a.txt", 415, "unsupported_format"),
        ("http://127.0.0.1:{port}/a.wav", 415, "unsupported_format"),
        ("http://127.0.0.1:{port}/away?url=http://127.0.0.1:1/a.gif", 400, "unsupported_parameter"),
        ("http://127.0.0.1:{port}/away?url=file:///etc/passwd", 400, "unsupported_parameter"),
        ("http://127.0.0.1:{port}/away?url=http://[", 400, "invalid_value"),
        ("http://listed.example..:{port}/a.gif", 400, "invalid_value"),
        ("http://127.0.0.1:{port}/endless", 413, "payload_too_large"),
    ],
)
async def test_what_is_not_fetched(path: str, status: int, code: str) -> None:
    engine = CapableEngine([])
    async with media_host() as host:
        domains = (*listed(host), f"http://listed.example:{host.port}")
        http = {"media_domains": domains, "max_body_bytes": 100_000}
        async with live_server(engine, http=http) as server:
            response = await ask(server, images=[path.replace("{port}", str(host.port))])
            await server.check_empty()
    assert (response.status, response.error["code"], response.error["param"]) == (status, code, "images[0]"), (
        response.body
    )
    assert b"inner text" not in response.body
    assert engine.requests == []


async def test_without_a_list_nothing_is_fetched() -> None:
    async with media_host() as host, live_server(CapableEngine([])) as server:
        response = await ask(server, videos=[host.url("/a.mp4")])
        assert (response.status, response.error["code"]) == (400, "unsupported_parameter")
        assert "http.media_domains" in response.error["message"]
        assert host.requests == []


async def test_redirects_among_listed_hosts_are_followed_a_few_times() -> None:
    async with media_host() as host, live_server(CapableEngine(), http={"media_domains": listed(host)}) as server:
        response = await ask(server, images=[host.url("/to" * MAX_REDIRECTS + "/a.gif")])
        assert response.status == 200, response.body
        response = await ask(server, images=[host.url("/to" * (MAX_REDIRECTS + 1) + "/a.gif")])
        assert (response.status, response.error["code"]) == (400, "invalid_value")
        assert "redirects" in response.error["message"]


async def test_sizes_count_together_up_to_the_limit_of_a_body() -> None:
    async with media_host() as host:
        items = [MediaUrl(host.url("/a.gif"), Modality.IMAGE, f"images[{index}]") for index in range(2)]
        for limit in (2 * len(GIF), 2 * len(GIF) - 1):
            kept: list[int] = []
            reader = MediaReader(HttpConfig(media_domains=listed(host), max_body_bytes=limit))
            if limit < 2 * len(GIF):
                with pytest.raises(PayloadTooLarge) as caught:
                    await reader.read(items, kept.append)
                assert caught.value.param == "images[1]"
                assert max(kept) <= limit
            else:
                assert [chunk.payload for chunk in await reader.read(items, kept.append)] == [GIF, GIF]
                assert kept[-1] == limit


async def test_media_are_charged_before_they_are_read() -> None:
    async with media_host() as host:
        options: dict[str, Any] = {"http": {"media_domains": listed(host)}, "limits": {"max_held_bytes": 50_000}}
        async with live_server(CapableEngine(), **options) as server:
            response = await ask(server, images=[host.url("/endless")])
            assert (response.status, response.error["code"]) == (503, "engine_overloaded")
            assert (await ask(server, images=[host.url("/a.gif")])).status == 200
            await server.check_empty()


async def test_a_host_that_is_silent_costs_a_bounded_time() -> None:
    async with media_host() as host:
        http = {"media_domains": listed(host), "media_timeout_sec": 0.05}
        async with live_server(CapableEngine(), http=http) as server:
            response = await ask(server, images=[host.url("/silent")])
            assert (response.status, response.error["code"]) == (400, "invalid_value")
            assert "0.05 s" in response.error["message"]
            host.released.set()
            if host.requests:  # on a busy machine the time may be over before the request has come
                await host.left.wait()
            await server.check_empty()


async def test_a_name_leads_to_public_or_listed_addresses_alone() -> None:
    async with media_host() as host:
        for more, status in (((), 400), (("127.0.0.1/32", "::1"), 200)):
            http = {"media_domains": (f"http://localhost:{host.port}", *more)}
            async with live_server(CapableEngine(), http=http) as server:
                response = await ask(server, images=[host.url("/a.gif", host="localhost")])
                assert response.status == status, response.body
        assert len(host.requests) == 1


async def test_a_name_is_resolved_once_and_connected_to_at_that_address(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    async def rebinding(host: str, port: int, **_: Any) -> list[Any]:
        asked.append(host)
        address = "127.0.0.1" if len(asked) == 1 else "127.0.0.2"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]

    async with media_host() as host:
        domains = MediaDomains((f"http://media.example:{host.port}", "127.0.0.1"))
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", rebinding)
        url = host.url("/a.gif", host="media.example")
        data, _ = await MediaFetcher(domains).fetch(url, max_bytes=100, charge=lambda size: None)
        assert (data, asked) == (GIF, ["media.example"])


async def test_https_is_checked_by_the_name_of_the_host(tmp_path: Path) -> None:
    for_server, for_client = tls_contexts(tmp_path)
    async with media_host(ssl=for_server) as host:
        fetcher = MediaFetcher(MediaDomains((f"localhost:{host.port}", "127.0.0.0/8", "::1")), tls=for_client)
        data, kind = await fetcher.fetch(
            f"https://localhost:{host.port}/a.gif", max_bytes=100, charge=lambda size: None
        )
        assert (data, kind) == (GIF, "image/gif")
        stranger = MediaFetcher(MediaDomains((f"localhost:{host.port}", "127.0.0.0/8", "::1")))
        with pytest.raises(OmniError, match="no valid response"):
            await stranger.fetch(f"https://localhost:{host.port}/a.gif", max_bytes=100, charge=lambda size: None)
        with pytest.raises(UnsupportedParameter):
            await fetcher.fetch(f"http://localhost:{host.port}/a.gif", max_bytes=100, charge=lambda size: None)
