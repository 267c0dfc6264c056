"""The process of a StepModel: ``python -m omni_ws.engine.omni.worker``, which the server starts.

One thread runs the model's steps and, between them, handles the messages of the server.
"""

from __future__ import annotations

import importlib
import pickle
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import msgspec

from omni_ws.config.values import ConfigurationError
from omni_ws.engine.child_main import ServerLink
from omni_ws.engine.omni.step_process import (
    Ask,
    CloseSlot,
    FeedItem,
    GrantFrames,
    ItemMade,
    ItemTaken,
    Loaded,
    LoadedModel,
    LoadModel,
    OpenSlot,
    SlotOpened,
    SlotRefused,
    Status,
    StepModel,
    ToStepWorker,
    packed,
)
from omni_ws.errors import EngineOverloaded, InvalidValue


class _Worker:
    """The loop that serves one model: it handles messages from the server, runs steps, and sends the results."""

    def __init__(self, model: StepModel, link: ServerLink) -> None:
        self._model = model
        self._link = link
        self._sessions: set[int] = set()
        #: The running trace and its file.
        self._trace: tuple[Any, str] | None = None

    def run(self) -> NoReturn:
        """Serve until the server closes the input of this process, which ends the process."""
        while True:
            if not self._model.busy:
                self._take(*self._link.receive())
            for message, body in self._link.received():
                self._take(message, body)
            if self._model.busy:
                self._step()

    def _step(self) -> None:
        for session, item in self._model.step():
            if session in self._sessions:
                self._link.send(ItemMade(session), packed(item), more=True)
        self._link.flush()

    def _take(self, message: object, body: bytes) -> None:
        model = self._model
        match message:
            case OpenSlot(session):
                self._open(session, pickle.loads(body))
            case FeedItem(session, cost):
                if session in self._sessions:
                    self._feed(session, pickle.loads(body))
                self._link.send(ItemTaken(session, cost))
            case GrantFrames(session, frames):
                if session in self._sessions:
                    model.grant(session, frames)
            case CloseSlot(session):
                self._sessions.discard(session)
                model.close(session)
            case Ask(number, trace):
                error = None if trace is msgspec.UNSET else self._change_trace(trace)
                self._link.send(Status(number, len(self._sessions), model.busy, error))
            case _:
                raise TypeError(f"unknown message: {type(message).__name__}")

    def _change_trace(self, path: str | None) -> str | None:
        """End the running trace, if any; with ``path``, begin a new trace. Return the text of an error, or None."""
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
        except (EngineOverloaded, InvalidValue) as refusal:
            overloaded = isinstance(refusal, EngineOverloaded)
            self._link.send(SlotRefused(session, str(refusal), overloaded=overloaded))
        else:
            self._sessions.add(session)
            self._link.send(SlotOpened(session))

    def _feed(self, session: int, item: Any) -> None:
        try:
            self._model.feed(session, item)
        except InvalidValue as refusal:
            self._link.send(self._refused(session, str(refusal)))
        except Exception:  # the input of one session must not end the others
            traceback.print_exc()
            self._link.send(self._refused(session, "this input cannot be read"))

    def _refused(self, session: int, message: str) -> SlotRefused:
        self._sessions.discard(session)
        self._model.close(session)
        return SlotRefused(session, message)


def _load(message: LoadModel) -> LoadedModel:
    module, _, function = message.factory.partition(":")
    factory: Callable[..., LoadedModel] = getattr(importlib.import_module(module), function)
    model, facts = factory(**message.arguments)
    model.warm_up()
    return model, facts


def main() -> None:
    """Load the model, report it to the server, and serve it; if loading fails, report the error and return."""
    link = ServerLink(ToStepWorker)
    load, _ = link.receive()
    try:
        model, facts = _load(load)
    except ConfigurationError as error:
        link.send(Loaded(error="; ".join(error.problems)))
        return
    except Exception as error:
        traceback.print_exc()
        link.send(Loaded(error=f"{type(error).__name__}: {error}"[:500]))
        return
    link.send(Loaded(model.slots, model.memory_bytes, facts))
    _Worker(model, link).run()


if __name__ == "__main__":
    main()
