"""A server of a folder of files at http://localhost, for pages of another origin than the server that they talk with.

A browser lets no page that came from elsewhere connect to this machine.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class PageServer(ThreadingHTTPServer):
    """``headers`` are sent with each file."""

    def __init__(self, folder: Path) -> None:
        self.headers: dict[str, str] = {}
        super().__init__(("127.0.0.1", 0), partial(_Files, directory=str(folder)))
        self.origin = f"http://localhost:{self.server_port}"


class _Files(SimpleHTTPRequestHandler):
    server: PageServer

    def end_headers(self) -> None:
        for header in self.server.headers.items():
            self.send_header(*header)
        super().end_headers()

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@contextmanager
def page_server(folder: Path) -> Iterator[PageServer]:
    with PageServer(folder) as site:
        thread = threading.Thread(target=site.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield site
        finally:
            site.shutdown()
            thread.join()
