"""RFC 6455 by wsproto, which shares no code with the server: ``websocket_wsproto.py HOST PORT PATH LIMIT``.

``LIMIT`` is the most bytes that a message may have. What wsproto would not send is made here, byte by byte.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import sys

from wsproto import ConnectionType, WSConnection
from wsproto.events import (
    AcceptConnection,
    CloseConnection,
    Ping,
    Pong,
    RejectConnection,
    Request,
    TextMessage,
)
from wsproto.utilities import LocalProtocolError

HOST, PORT, PATH, LIMIT = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
CHUNK = json.dumps({"type": "input_chunk", "sequence_id": 0, "text": "hellö", "end_of_input": True}, ensure_ascii=False)


class Client:
    """One connection, opened."""

    def __init__(self, **options: object) -> None:
        self.socket = socket.create_connection((HOST, PORT), timeout=500)
        self.connection = WSConnection(ConnectionType.CLIENT)
        self.socket.sendall(self.connection.send(Request(host=f"{HOST}:{PORT}", target=PATH, **options)))
        self.waiting = []
        #: Messages that came while another event was waited for, and the part of one.
        self.messages, self.part = [], ""
        self.opened = self.event(AcceptConnection, RejectConnection)

    def event(self, *kinds: type) -> object:
        """The next event of one of these kinds; others are passed over."""
        while True:
            while self.waiting:
                event = self.waiting.pop(0)
                if isinstance(event, TextMessage):
                    self.part += event.data
                    if event.message_finished:
                        self.messages.append(self.part)
                        self.part = ""
                if isinstance(event, kinds):
                    return event
            data = self.socket.recv(65536)
            self.connection.receive_data(data or None)
            self.waiting.extend(self.connection.events())

    def send(self, event: object) -> None:
        self.socket.sendall(self.connection.send(event))

    def answer(self) -> str:
        """The text of the answer, up to its final."""
        text = ""
        while True:
            while not self.messages:
                self.event(TextMessage)
            frame = json.loads(self.messages.pop(0))
            assert frame["type"] != "error", frame
            text += frame.get("text") or ""
            if frame.get("final"):
                return text

    def close_code(self) -> int:
        """The code with which the server closes; the end of the connection follows."""
        code = self.event(CloseConnection).code
        with contextlib.suppress(LocalProtocolError):  # it may have been answered already
            self.send(CloseConnection(code=1000))
        while self.socket.recv(65536):
            pass
        return code


def frame(
    opcode: int, payload: bytes = b"", *, fin: bool = True, reserved: int = 0, masked: bool = True, form: int = 0
) -> bytes:
    """A frame with any bits. ``form`` is the length field to use: 0 for the shortest, 126 or 127."""
    first = (fin << 7) | (reserved << 4) | opcode
    size = len(payload)
    form = form or (size if size < 126 else 126 if size < 2**16 else 127)
    head = bytes([first, (masked << 7) | form])
    head += struct.pack("!H", size) if form == 126 else struct.pack("!Q", size) if form == 127 else b""
    if not masked:
        return head + payload
    key = os.urandom(4)
    return head + key + bytes(byte ^ key[at % 4] for at, byte in enumerate(payload))


def refused() -> dict[str, tuple[bytes, set[int]]]:
    """What breaks the protocol, and the codes with which RFC 6455 has it closed."""
    text, bad = CHUNK.encode(), b"\xce\xba\xe1\xbd\xb9\xcf\x83\xce\xbc\xce\xb5\xed\xa0\x80"
    cases = {f"opcode {code}": (frame(code), {1002}) for code in (3, 4, 5, 6, 7, 11, 12, 13, 14, 15)}
    cases |= {f"reserved bits {bits}": (frame(1, text, reserved=bits), {1002}) for bits in range(1, 8)}
    cases |= {
        f"close code {code}": (frame(8, struct.pack("!H", code)), {1002})
        for code in (0, 999, 1004, 1005, 1006, 1015, 2000, 65535)
    }
    return cases | {
        "not masked": (frame(1, text, masked=False), {1002}),
        "a ping that is not masked": (frame(9, masked=False), {1002}),
        "a ping of 126 bytes": (frame(9, bytes(126)), {1002}),
        "a ping in fragments": (frame(9, b"x", fin=False), {1002}),
        "a close in fragments": (frame(8, b"", fin=False), {1002}),
        "a continuation of nothing": (frame(0, text), {1002}),
        "a message within a message": (frame(1, text[:5], fin=False) + frame(1, text), {1002}),
        "a close of one byte": (frame(8, b"\x03"), {1002}),
        "a reason that is not UTF-8": (frame(8, struct.pack("!H", 1000) + bad), {1002, 1007}),
        "text that is not UTF-8": (frame(1, bad), {1007}),
        "text that is not UTF-8 in fragments": (frame(1, bad[:9], fin=False) + frame(0, bad[9:]), {1007}),
        "text that ends within a character": (frame(1, text[: text.index(b"\xc3") + 1]), {1007}),
        "a length of 2**63": (b"\x81\xff" + struct.pack("!Q", 2**63) + bytes(4), {1002, 1009}),
        "a length over the limit": (b"\x81\xff" + struct.pack("!Q", LIMIT + 1) + bytes(4), {1009}),
        "fragments over the limit": (frame(2, bytes(LIMIT - 10), fin=False) + frame(0, bytes(11)), {1009}),
    }


def main() -> None:
    passed = 0
    for name, (sent, codes) in refused().items():
        client = Client()
        client.socket.sendall(sent)
        code = client.close_code()
        assert code in codes, (name, code)
        passed += 1

    # One message in fragments, with pings between them, which are answered with their own bytes.
    client = Client()
    data = CHUNK.encode()
    pieces = [data[at : at + 7] for at in range(0, len(data), 7)]
    for number, piece in enumerate(pieces):
        last = number == len(pieces) - 1
        client.socket.sendall(frame(0 if number else 1, piece, fin=last))
        client.socket.sendall(frame(9, bytes([number]) * 125))
        assert client.event(Pong).payload == bytes([number]) * 125
    assert client.answer() == "hellö"
    passed += 1

    # Empty fragments, lengths in longer forms than needed, a pong that nobody asked for.
    for sent in (
        frame(1, b"", fin=False) + frame(0, data, fin=False) + frame(0, b""),
        frame(10, b"nobody asked") + frame(1, data),
        frame(9, b"") + frame(1, data),
    ):
        client = Client()
        client.socket.sendall(sent)
        assert client.answer() == "hellö"
        passed += 1

    # Closing: the code comes back, and so does none.
    for code in (1000, 1001, 1003, 1007, 1011, 3000, 3999, 4000, 4999):
        client = Client()
        client.send(CloseConnection(code=code, reason="ü" * 61))
        assert client.event(CloseConnection).code == code
        assert client.socket.recv(1) == b""
        passed += 1
    client = Client()
    client.socket.sendall(frame(8))
    assert client.event(CloseConnection).code == 1005
    passed += 1

    # The handshake: subprotocols by the client's order, no extension unless it is on, refusals as plain HTTP.
    offers = (["omni.v1+binary", "omni.v1+json"], ["other", "omni.v1+json"], ["other"])
    for offered, chosen in zip(offers, ("omni.v1+binary", "omni.v1+json", None), strict=True):
        opened = Client(subprotocols=offered).opened
        assert isinstance(opened, AcceptConnection)
        assert opened.subprotocol == chosen
        assert opened.extensions == []
        passed += 1
    for headers in ([(b"Origin", b"http://elsewhere.example")],):
        opened = Client(extra_headers=headers).opened
        assert isinstance(opened, RejectConnection)
        assert opened.status_code == 403
        passed += 1
    client = Client()
    client.send(Ping(b"still there"))
    assert client.event(Pong).payload == b"still there"
    print(f"{passed + 1} passed")


main()
