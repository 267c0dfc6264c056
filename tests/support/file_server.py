"""A server of files over HTTP, in a thread, that can be made to misbehave: what downloads are tested against."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


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

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            _answer(self, state)

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        state.url = f"http://127.0.0.1:{server.server_address[1]}/"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield state
        finally:
            state.over.set()
            state.answers.set()
            server.shutdown()
            thread.join()


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
