"""Servers of files over HTTP, in threads: one that can be made to misbehave, for downloads, and one for pages."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TypeVar

Server = TypeVar("Server", bound=ThreadingHTTPServer)


@contextmanager
def _serving(server: Server) -> Iterator[Server]:
    with server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class _Quiet(BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Says nothing."""


@dataclass
class FileServer:
    """``files`` by path. ``asked`` lists each request: its path and its range."""

    files: dict[str, bytes] = field(default_factory=dict)
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    #: Answers this to everything.
    status: int | None = None
    #: Breaks off after so many bytes of an answer.
    break_after: int | None = None
    #: Sends a byte at a time, this far apart.
    trickle_sec: float | None = None
    #: Answers only after this is set.
    answers: threading.Event = field(default_factory=threading.Event)
    #: Knows ranges, and begins at the byte that was asked for plus so many.
    ranges: bool = True
    off_by: int = 0
    #: Leads to another place.
    redirects: dict[str, str] = field(default_factory=dict)
    #: Set at the end: nobody waits any longer.
    over: threading.Event = field(default_factory=threading.Event)
    url: str = ""


@contextmanager
def file_server(files: dict[str, bytes] | None = None) -> Iterator[FileServer]:
    """Serves on a free port of this machine; ``url`` ends in a slash."""
    state = FileServer(files or {})
    state.answers.set()

    class Handler(_Quiet):
        def do_GET(self) -> None:
            _answer(self, state)

    with _serving(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as server:
        state.url = f"http://127.0.0.1:{server.server_port}/"
        try:
            yield state
        finally:
            state.over.set()
            state.answers.set()


def _answer(request: BaseHTTPRequestHandler, state: FileServer) -> None:
    asked = request.headers.get("Range")
    state.asked.append((request.path, asked))
    state.answers.wait()
    content = state.files.get(request.path)
    if request.path in state.redirects:
        request.send_response(302)
        request.send_header("Location", state.redirects[request.path])
        request.end_headers()
        return
    if state.status is not None or content is None:
        request.send_error(state.status or 404)
        return
    if asked and state.ranges and (match := re.fullmatch(r"bytes=(\d+)-", asked)):
        begin = int(match[1]) + state.off_by
        request.send_response(206)
        request.send_header("Content-Range", f"bytes {begin}-{len(content) - 1}/{len(content)}")
        content = content[begin:]
    else:
        request.send_response(200)
    request.send_header("Content-Length", str(len(content)))
    request.end_headers()
    if state.trickle_sec is not None:
        for byte in content:
            if state.over.wait(state.trickle_sec):
                return
            request.wfile.write(bytes([byte]))
    request.wfile.write(content if state.break_after is None else content[: state.break_after])


class PageServer(ThreadingHTTPServer):
    """``headers`` are sent with each file."""

    def __init__(self, folder: Path) -> None:
        self.headers: dict[str, str] = {}
        super().__init__(("127.0.0.1", 0), partial(_Files, directory=str(folder)))
        self.origin = f"http://localhost:{self.server_port}"


class _Files(_Quiet, SimpleHTTPRequestHandler):
    server: PageServer

    def end_headers(self) -> None:
        for header in self.server.headers.items():
            self.send_header(*header)
        super().end_headers()


def page_server(folder: Path) -> AbstractContextManager[PageServer]:
    return _serving(PageServer(folder))
