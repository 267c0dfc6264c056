"""A bare ``websockets`` server, which acknowledges messages without reading them: the lower bound of that library."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import uvloop
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from benchmarks.peers.acknowledgement import Acknowledgements, arguments


async def receive(connection: ServerConnection) -> None:
    acknowledgements = Acknowledgements()
    with suppress(ConnectionClosed):
        async for message in connection:
            acknowledgement = acknowledgements.accept(len(message))
            if acknowledgement is not None:
                await connection.send(acknowledgement)


async def echo(connection: ServerConnection) -> None:
    with suppress(ConnectionClosed):
        async for message in connection:
            await connection.send(message)


async def main() -> None:
    options = arguments()
    async with serve(echo if options.echo else receive, "127.0.0.1", options.port, compression=None) as server:
        await server.serve_forever()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
