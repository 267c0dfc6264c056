"""A bare ``picows`` server (WebSocket parser in Cython): the cost of framing outside Python."""

from __future__ import annotations

import asyncio

import uvloop
from picows import WSFrame, WSListener, WSMsgType, WSTransport, WSUpgradeRequest, ws_create_server

from benchmarks.peers.acknowledgement import Acknowledgements, arguments


class Receiver(WSListener):
    def __init__(self, *, echo: bool) -> None:
        super().__init__()
        self._echo = echo
        self._acknowledgements = Acknowledgements()

    def on_ws_frame(self, transport: WSTransport, frame: WSFrame) -> None:
        if frame.msg_type == WSMsgType.CLOSE:
            transport.send_close(frame.get_close_code())
            transport.disconnect()
            return
        if frame.msg_type not in (WSMsgType.TEXT, WSMsgType.BINARY):
            return
        message = frame.get_payload_as_bytes()
        if self._echo:
            transport.send(frame.msg_type, message)
            return
        acknowledgement = self._acknowledgements.accept(len(message))
        if acknowledgement is not None:
            transport.send(WSMsgType.TEXT, acknowledgement.encode())


async def main() -> None:
    options = arguments()

    def listener(_: WSUpgradeRequest) -> Receiver:
        return Receiver(echo=options.echo)

    server = await ws_create_server(listener, "127.0.0.1", options.port)
    await server.serve_forever()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
