"""The command ``omni-ws mcp``."""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from omni_ws.cli import INTERRUPTED
from omni_ws.config.keys import ApiKey, digest
from omni_ws.errors import OmniError
from omni_ws.installing import install_command
from omni_ws.mcp_server.voice import ProgramVoice, VoiceOptions
from omni_ws.scenarios.servers import run_interruptible
from omni_ws.talk.sound_devices import named_device
from omni_ws.transport.http.access import Authenticator

if TYPE_CHECKING:
    from mcp.server.lowlevel import Server

FAILED, USAGE = 1, 2
_KEY_VARIABLE: Final = "OMNI_WS_MCP_KEY"
#: A shorter key can be guessed.
_LEAST_KEY: Final = 16
_LOOPBACK: Final = "127.0.0.1"
#: The largest request: a text of the longest, with each character as an escape.
_MAX_BODY: Final = 1 << 17


def main(arguments: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """Run the server until its client leaves, and return the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if find_spec("mcp") is None:
        return _complain(f"this needs the extra mcp: {install_command('mcp')}", USAGE)
    if options.files is not None and not options.files.is_dir():
        parser.error(f"--files {options.files}: not a folder")
    if options.key_file is not None and options.port is None:
        parser.error("--key-file goes with --port")
    if options.port is not None and not 0 <= options.port < 1 << 16:
        parser.error(f"--port {options.port}: a port is a number up to 65535")
    key = None if options.port is None else _key(parser, options.key_file, environ)
    voice = VoiceOptions(
        environ=environ,
        microphone=options.mic,
        files=options.files,
        url=options.url,
        api_key=environ.get("OMNI_WS_API_KEY") or None,
        input_device=options.input_device,
        output_device=options.output_device,
    )
    try:
        return run_interruptible(_serve(voice, options.port, key))
    except (KeyboardInterrupt, BrokenPipeError):
        return INTERRUPTED
    except OSError as error:
        return _complain(error, FAILED)


def _complain(problem: object, status: int) -> int:
    print(f"omni-ws mcp: {problem}", file=sys.stderr)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="omni-ws mcp",
        description="An MCP server with the tools speak, listen and converse (docs/talk.md). It speaks MCP on standard "
        "input and output, or with --port over HTTP.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--mic", action="store_true", help="allow the tools to open the microphone; a line here tells each time")
    add("--files", type=Path, metavar="DIR", help="allow listen to read WAV files of this folder")
    add("--url", help="voice server [that on port 8080, or else one that starts now]; its key: OMNI_WS_API_KEY")
    add("--port", type=int, metavar="N", help=f"serve HTTP on {_LOOPBACK}, with the key in {_KEY_VARIABLE}")
    add("--key-file", type=Path, metavar="FILE", help="file with that key")
    add(
        "--input-device",
        type=named_device,
        metavar="D",
        help="number or part of the name (omni-ws talk --list-devices)",
    )
    add("--output-device", type=named_device, metavar="D", help="as in omni-ws talk")
    return parser


def _key(parser: argparse.ArgumentParser, file: Path | None, environ: Mapping[str, str]) -> str:
    """Return the key of HTTP. Exits without one."""
    try:
        key = environ.get(_KEY_VARIABLE, "") if file is None else file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        parser.error(f"--key-file {file}: {error}")
    if len(key) < _LEAST_KEY:
        parser.error(f"--port needs a key of {_LEAST_KEY} characters or more, in {_KEY_VARIABLE} or --key-file")
    return key


async def _serve(options: VoiceOptions, port: int | None, key: str | None) -> int:
    from omni_ws.mcp_server.tools import mcp_server

    async with ProgramVoice(options) as voice:
        # Models load while the program starts; what keeps them from it, the first call tells.
        warming = asyncio.create_task(_warm(voice))
        try:
            server = mcp_server(voice)
            await (_over_pipes(server) if port is None or key is None else _over_http(server, port, key))
        finally:
            warming.cancel()
            await asyncio.wait([warming])
    return 0


async def _warm(voice: ProgramVoice) -> None:
    with suppress(Exception):
        await voice.ready()


async def _over_pipes(server: Server[Any]) -> None:
    from mcp.server.stdio import stdio_server

    if sys.stdin.isatty():
        print("omni-ws mcp: a program is to start this and speak MCP with it (docs/talk.md)", file=sys.stderr)
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())


async def _over_http(server: Server[Any], port: int, key: str) -> None:
    import uvicorn
    from mcp.server.transport_security import TransportSecuritySettings

    listening = socket.create_server((_LOOPBACK, port))
    port = listening.getsockname()[1]
    hosts = [f"{name}:{port}" for name in (_LOOPBACK, "localhost")]
    app = server.streamable_http_app(
        transport_security=TransportSecuritySettings(
            allowed_hosts=hosts, allowed_origins=[f"http://{host}" for host in hosts]
        ),
        max_request_body_size=_MAX_BODY,
    )
    config = uvicorn.Config(KeyNeeded(app, key), log_level="warning", access_log=False, timeout_graceful_shutdown=1)
    print(f"omni-ws mcp: http://{_LOOPBACK}:{port}/mcp", file=sys.stderr, flush=True)
    await uvicorn.Server(config).serve([listening])


class KeyNeeded:
    """An ASGI application that lets requests with the key through, and answers others with status 401."""

    def __init__(self, app: Any, key: str) -> None:
        self._app = app
        self._authenticator = Authenticator([ApiKey(name="mcp", key_sha256=digest(key))])

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            presented = dict(scope["headers"]).get(b"authorization")
            try:
                self._authenticator.authenticate_header(None if presented is None else presented.decode("latin-1"))
            except OmniError as error:
                from starlette.responses import JSONResponse

                body = {"error": {"code": error.code, "message": error.message}}
                refusal = JSONResponse(body, status_code=401, headers={"WWW-Authenticate": "Bearer"})
                await refusal(scope, receive, send)
                return
        await self._app(scope, receive, send)
