"""Serves from an installed package, in an empty folder, and talks with it: `PYTHON .ci/try_package.py [ARGUMENTS]`.

PYTHON is that of an environment which has the wheel, and nothing of the repository. The server starts as `omni-ws
ARGUMENTS`, by default `serve --port 0`. With PAGE_PYTHON, the Python of one with playwright, the page is talked to as
well (try_page.py).
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.request import urlopen

START_SEC = 300


def main() -> int:
    os.chdir(tempfile.mkdtemp())
    sys.path[:] = [entry for entry in sys.path if entry != str(Path(__file__).parent)]
    import omni_ws

    repository = Path(__file__).resolve().parents[1]
    if Path(omni_ws.__file__).resolve().parent.parent == repository:
        raise SystemExit("this Python has the repository itself, not the package")
    command = Path(sys.executable).with_name("omni-ws")
    arguments = sys.argv[1:] or ("serve", "--port", "0")
    began = time.monotonic()
    environment = {**os.environ, "CI": "1"}
    server = subprocess.Popen([str(command), *arguments], stderr=subprocess.PIPE, text=True, env=environment)
    try:
        address = listening(server)
        fetch_page(address)
        text, audio_ms = asyncio.run(ask(address))
        after = f"{time.monotonic() - began:.0f} s after the command"
        print(f"asked what three plus four is; answered {text!r} in {audio_ms:.0f} ms of speech, {after}")
        if python := os.environ.get("PAGE_PYTHON"):
            subprocess.run([python, str(repository / ".ci" / "try_page.py"), address], check=True)
        server.send_signal(signal.SIGTERM)
        status = server.wait(30)
    finally:
        server.kill()
    return status


def listening(server: subprocess.Popen[str]) -> str:
    """The server's address, from its log."""
    assert server.stderr is not None
    said = []
    for line in server.stderr:
        said.append(line)
        if found := re.search(r"open (http://\S+) in a browser", line):
            return found[1]
    raise SystemExit("the server did not start:\n" + "".join(said))


def fetch_page(address: str) -> None:
    """Gets the page, what it names, and what its modules import. An answer other than 200 raises."""
    waiting, seen = ["/", "/openapi.json", "/client.js", "/widget.js", "/health"], set[str]()
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        with urlopen(address + path) as answer:
            content = answer.read().decode("utf-8", "replace")
        if path == "/":
            waiting += ["/" + name for name in re.findall(r'(?:src|href)="((?:browser|client)[^"]+)"', content)]
        elif path.endswith(".js"):
            folder = path.rpartition("/")[0]
            named = re.findall(r'(?:^(?:im|ex)port .*from |await import\()"(\.{1,2}/[^"]+)"', content, re.MULTILINE)
            waiting += [os.path.normpath(f"{folder}/{name}") for name in named]
    print(f"{len(seen)} files of the page")


async def ask(address: str) -> tuple[str, float]:
    from omni_ws.client import connect

    url = address.replace("http", "ws", 1) + "/v1/streaming_input"
    async with asyncio.timeout(START_SEC), connect(url) as session:
        answer = await session.ask_text("what is three plus four")
    if ("seven" not in answer.text.lower() and "7" not in answer.text) or not answer.audio:
        raise SystemExit(f"not an answer with speech: {answer.text!r}, {len(answer.audio)} bytes")
    return answer.text, len(answer.audio) / 2 / (answer.sample_rate or 1) * 1000


if __name__ == "__main__":
    sys.exit(main())
