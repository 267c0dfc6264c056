"""The files of the browser demo over HTTP."""

from __future__ import annotations

import gzip
import re
import threading
from pathlib import Path
from urllib.parse import urljoin

import pytest
from support.live_server import LiveServer, live_server
from support.raw_http import RawResponse, raw_client, request

from omni_ws.config.keys import ApiKey, digest
from omni_ws.transport.routes import operations
from omni_ws.transport.routes.operations import MEDIA_TYPES

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "examples" / "browser"
LIBRARY = ROOT / "clients" / "js"
#: Every file by the path that it is served at.
FILES = {
    **{f"/browser/{file.name}": file for file in FOLDER.iterdir() if file.is_file()},
    **{f"/browser/calls/{file.name}": file for file in (FOLDER / "calls").iterdir()},
    **{f"/{part}/{file.name}": file for part in ("client", "widget") for file in (LIBRARY / part).glob("*.js")},
    "/client.js": LIBRARY / "client.js",
}


async def get(server: LiveServer, target: str, *headers: str) -> RawResponse:
    async with raw_client(server.port) as client:
        await client.send(request("GET", target, *headers))
        return await client.response()


async def test_every_file_is_served_as_what_it_is() -> None:
    async with live_server() as server:
        for path, file in FILES.items():
            response = await get(server, path)
            assert (response.status, response.body) == (200, file.read_bytes())
            assert response.headers["content-type"] == MEDIA_TYPES[file.suffix[1:]]
            assert response.headers["x-content-type-options"] == "nosniff"
        page = await get(server, "/")
    assert page.body == (FOLDER / "index.html").read_bytes()


async def test_files_are_read_and_compressed_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []

    def read() -> dict[str, operations.PageFile]:
        threads.append(threading.current_thread())
        return {}

    monkeypatch.setattr(operations, "page_files", read)
    async with live_server() as server:
        assert (await get(server, "/")).status == 404
    assert threading.current_thread() not in threads
    assert len(threads) == 1


async def test_nothing_inline_and_nothing_from_elsewhere() -> None:
    async with live_server() as server:
        response = await get(server, "/")
    policy = dict(part.split(" ", 1) for part in response.headers["content-security-policy"].split("; "))
    assert (policy["default-src"], policy["script-src"], policy["style-src"]) == ("'none'", "'self'", "'self'")
    assert "unsafe" not in response.headers["content-security-policy"]
    for file in FILES.values():
        if file.suffix == ".html":
            assert not re.search(r"<script(?![^>]*src=)|<style|\sstyle=|\son\w+=", file.read_text()), file.name
        # The name of a namespace, not an address to load.
        found = set(re.findall(r"https?://[^\"'\s)]+", file.read_text(errors="replace"))) - {
            "http://www.w3.org/2000/svg"
        }
        assert not found, file.name


async def test_what_a_module_imports_is_there() -> None:
    for path, file in FILES.items():
        imports = re.findall(r'^(?:im|ex)port .*from "(\.[^"]+)"', file.read_text(errors="replace"), re.MULTILINE)
        for name in imports if file.suffix == ".js" else ():
            assert urljoin(path, name) in FILES, f"{file.name} imports {name}"


async def test_a_browser_that_has_a_file_is_told_so() -> None:
    async with live_server() as server:
        first = await get(server, "/browser/main.js")
        tag = first.headers["etag"]
        for known in (tag, f"W/{tag}", f'"other", {tag}'):
            again = await get(server, "/browser/main.js", f"If-None-Match: {known}")
            assert (again.status, again.body, again.headers["etag"]) == (304, b"", tag)
        assert (await get(server, "/browser/main.js", 'If-None-Match: "other"')).status == 200


@pytest.mark.parametrize("accepted", ["gzip", "br, GZIP;q=0.5", "deflate, gzip"])
async def test_text_is_compressed_for_whoever_takes_it(accepted: str) -> None:
    async with live_server() as server:
        plain = await get(server, "/browser/main.js")
        small = await get(server, "/browser/main.js", f"Accept-Encoding: {accepted}")
        assert (small.headers["content-encoding"], small.headers["vary"]) == ("gzip", "Accept-Encoding")
        assert gzip.decompress(small.body) == plain.body
        assert len(small.body) < len(plain.body) / 2
        assert small.headers["etag"] != plain.headers["etag"]
        known = f"If-None-Match: {small.headers['etag']}"
        again = await get(server, "/browser/main.js", f"Accept-Encoding: {accepted}", known)
        assert (again.status, again.headers["etag"]) == (304, small.headers["etag"])
        assert (await get(server, "/browser/main.js", known)).status == 200  # that is another representation


@pytest.mark.parametrize(
    ("name", "accepted"),
    [("main.js", "br"), ("main.js", "gzip;q=0"), ("main.js", "gzip; q=0.0"), ("icon-512.png", "gzip")],
)
async def test_what_is_not_to_be_compressed_is_not(name: str, accepted: str) -> None:
    async with live_server() as server:
        plain = await get(server, f"/browser/{name}", f"Accept-Encoding: {accepted}")
        assert "content-encoding" not in plain.headers
        assert plain.body == (FOLDER / name).read_bytes()


@pytest.mark.parametrize(
    "name",
    [
        *("nothing.js", "..", "%2e%2e", "..%2f..%2fpyproject.toml", "index", "main.js/x", "calls", "calls/nothing.js"),
        *("calls/..", "calls/%2e%2e%2fmain.js"),
    ],
)
async def test_other_names_are_not_found(name: str) -> None:
    async with live_server() as server:
        response = await get(server, f"/browser/{name}")
        assert response.status in (400, 404)
        assert response.error["code"] in ("not_found", "invalid_frame")


async def test_no_key_is_needed() -> None:
    async with live_server(keys=(ApiKey(name="one", key_sha256=digest("secret")),)) as server:
        for path in ("/", "/browser/main.js"):
            assert (await get(server, path)).status == 200


async def test_pages_of_any_origin_may_read_the_widget_and_nothing_else() -> None:
    """And one that the browser has already, too: 304 has the fields of CORS again."""
    origin = "Origin: https://shop.example"
    fields = ("access-control-allow-origin", "cross-origin-resource-policy")
    async with live_server() as server:
        widget = await get(server, "/widget.js", "Origin: https://shop.example")
        again = await get(
            server, "/widget.js", "Origin: https://shop.example", f"If-None-Match: {widget.headers['etag']}"
        )
        for response, status in ((widget, 200), (again, 304)):
            assert response.status == status
            assert [response.headers[field] for field in fields] == ["https://shop.example", "cross-origin"]
        for path in ("/", "/client.js", *FILES):
            response = await get(server, path, origin)
            assert not set(fields) & response.headers.keys(), path
    assert widget.headers["content-type"] == MEDIA_TYPES["js"]
