"""The process of a StepModel: ``python -m omni_ws.engine.omni.worker SOCKET``, which the server starts.

One thread does the model's steps and, between them, what the server asks for. Another waits for the end of the
standard input, which is the death of the server, and ends the process whatever the model does.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, Final

from omni_ws.config.values import ConfigurationError
from omni_ws.engine.child import leave_signals_to_server
from omni_ws.engine.omni.step_model import LoadedModel, NoSlot, RefusedInput, StepModel
from omni_ws.engine.omni.step_process import (
    AskOccupation,
    ChangeTrace,
    CloseSlot,
    FeedItem,
    GrantFrames,
    ItemMade,
    ItemTaken,
    LoadFailed,
    LoadModel,
    MessageBuffer,
    ModelReady,
    Occupation,
    OpenSlot,
    SlotOpened,
    SlotRefused,
    TraceChanged,
    encode_message,
)

_READ_BYTES: Final = 1 << 20


class _Gone(Exception):
    """The server has closed the socket."""


class _Link:
    """The socket to the server. Sending blocks while the server is slow to read; it always reads."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = MessageBuffer()

    def send(self, *messages: object) -> None:
        try:
            self._connection.sendall(b"".join(encode_message(message) for message in messages))
        except (BrokenPipeError, ConnectionResetError):
            raise _Gone from None

    def receive(self, *, wait: bool) -> list[Any]:
        """Return the messages that are there; with ``wait``, at least one."""
        messages: list[Any] = []
        while wait or not messages:
            try:
                data = self._connection.recv(_READ_BYTES, 0 if wait else socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except ConnectionResetError:
                raise _Gone from None
            if not data:
                raise _Gone
            messages += self._buffer.feed(data)
            wait = wait and not messages
        return messages


class _Worker:
    """Serves one model."""

    def __init__(self, model: StepModel, link: _Link) -> None:
        self._model = model
        self._link = link
        self._sessions: set[int] = set()
        #: The running trace and its file.
        self._trace: tuple[Any, str] | None = None

    def run(self) -> None:
        """Serve until the server closes the socket."""
        while True:
            for message in self._link.receive(wait=not self._model.busy):
                self._take(message)
            if self._model.busy:
                self._step()

    def _step(self) -> None:
        made: list[object] = []
        for result in self._model.step():
            if result.session not in self._sessions:
                continue
            if result.refused is not None:
                made.append(self._refused(result.session, result.refused))
            elif result.item is not None:
                made.append(ItemMade(result.session, result.item))
        if made:
            self._link.send(*made)

    def _take(self, message: object) -> None:
        model = self._model
        match message:
            case OpenSlot(session, settings):
                self._open(session, settings)
            case FeedItem(session, item, cost):
                if session in self._sessions:
                    self._feed(session, item)
                self._link.send(ItemTaken(session, cost))
            case GrantFrames(session, frames):
                if session in self._sessions:
                    model.grant(session, frames)
            case CloseSlot(session):
                self._sessions.discard(session)
                model.close(session)
            case AskOccupation(number):
                self._link.send(Occupation(number, len(self._sessions), model.busy))
            case ChangeTrace(number, path):
                self._link.send(TraceChanged(number, self._change_trace(path)))
            case _:
                raise TypeError(f"unknown message: {type(message).__name__}")

    def _change_trace(self, path: str | None) -> str | None:
        """Begin or end a trace of this thread; returns why that failed."""
        from torch.profiler import profile

        try:
            running, self._trace = self._trace, None
            if running is not None:
                trace, destination = running
                trace.stop()
                trace.export_chrome_trace(destination)
            if path is not None:
                trace = profile()
                trace.start()
                self._trace = trace, path
        except (OSError, RuntimeError) as error:
            return str(error)
        return None

    def _open(self, session: int, settings: Any) -> None:
        try:
            self._model.open(session, settings)
        except NoSlot:
            self._link.send(SlotRefused(session, "all slots are taken", overloaded=True))
        except RefusedInput as refusal:
            self._link.send(SlotRefused(session, str(refusal)))
        else:
            self._sessions.add(session)
            self._link.send(SlotOpened(session))

    def _feed(self, session: int, item: Any) -> None:
        try:
            self._model.feed(session, item)
        except RefusedInput as refusal:
            self._link.send(self._refused(session, str(refusal)))
        except Exception:  # what one session sends must not end the others
            traceback.print_exc()
            self._link.send(self._refused(session, "this input cannot be read"))

    def _refused(self, session: int, message: str) -> SlotRefused:
        self._sessions.discard(session)
        self._model.close(session)
        return SlotRefused(session, message)


def _load(message: LoadModel) -> LoadedModel:
    module, _, function = message.factory.partition(":")
    factory: Callable[..., LoadedModel] = getattr(importlib.import_module(module), function)
    loaded = factory(**message.arguments)
    loaded.model.warm_up()
    return loaded


def _end_with_server() -> None:
    """Wait for the end of the standard input, which the server never writes to."""
    # Not by sys.stdin, whose lock a thread that waits would keep when the interpreter ends.
    while os.read(0, 1):
        pass
    os._exit(0)


def main(descriptor: int) -> None:
    """Load the model, say so, and serve it."""
    leave_signals_to_server()
    threading.Thread(target=_end_with_server, name="end with the server", daemon=True).start()
    link = _Link(socket.socket(fileno=descriptor))
    try:
        (load,) = link.receive(wait=True)
        try:
            model, facts = _load(load)
        except ConfigurationError as error:
            link.send(LoadFailed("; ".join(error.problems)))
            return
        except Exception as error:
            traceback.print_exc()
            link.send(LoadFailed(f"{type(error).__name__}: {error}"[:500]))
            return
        link.send(ModelReady(model.slots, model.memory_bytes, facts))
        _Worker(model, link).run()
    except _Gone:
        return


if __name__ == "__main__":
    main(int(sys.argv[1]))
