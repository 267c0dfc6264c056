"""Profiling: records request events and traces of the engine, from a start to a stop while the server runs."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from omni_ws.config.values import user_cache_folder
from omni_ws.engine.base import Engine, TraceableEngine
from omni_ws.engine.threads import Work, run_work
from omni_ws.errors import InvalidValue
from omni_ws.profiler import events
from omni_ws.profiler.events import EventRecorder, SeveralRecorders
from omni_ws.service.observing.observer import Observers
from omni_ws.service.observing.profile_events import ProfileEvents
from omni_ws.service.process import check_space


class ProfileKind(Enum):
    """What a profile was started for. One of each kind may run at a time."""

    #: Events, and a trace of the engine where it has one.
    WHOLE = "profile"
    #: Events of requests alone.
    REQUESTS = "request_profile"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRequest:
    """The parameters of a start. None stands for a default; paths are relative to the root of profiles."""

    kind: ProfileKind = ProfileKind.WHOLE
    run_id: str | None = None
    event_dir: str | None = None
    trace_path_template: str | None = None
    trace: bool = False


@dataclass(frozen=True, slots=True)
class ProfileStop:
    """The parameters of a stop: the profile of this kind, and with a ``run_id`` only if it is that run.

    One of requests may be stopped as WHOLE if its ``run_id`` is named.
    """

    kind: ProfileKind
    run_id: str | None = None


@dataclass(frozen=True, slots=True)
class RunningProfile:
    """A profile that is being recorded. ``template`` is the common prefix of its trace files; None without traces."""

    run_id: str
    recorder: EventRecorder
    observer: ProfileEvents
    template: Path | None


@dataclass(frozen=True, slots=True)
class FinishedProfile:
    """A profile that was stopped, and its files. ``dropped_events`` were not written, for want of space or time."""

    run_id: str
    event_files: tuple[Path, ...]
    dropped_events: int
    traces: tuple[Path, ...]


class Profiling:
    """Starts and stops profiles, one of each kind, and writes them below ``root`` (``cache_folder()`` by default)."""

    def __init__(self, engine: Engine, observers: Observers, root: Path | None = None) -> None:
        self.running: dict[ProfileKind, RunningProfile] = {}
        self._engine = engine
        self._observers = observers
        self._root = (root or cache_folder()).expanduser()
        self._lock = asyncio.Lock()

    async def start(self, asked: ProfileRequest) -> RunningProfile:
        """Start a profile, after stopping the one of its kind if it has another ``run_id`` or other traces.

        An engine that cannot trace is profiled by events alone. Raises InvalidValue for paths that are outside the root
        or cannot be written.
        """
        run_id = asked.run_id or time.strftime("run_%Y%m%d_%H%M%S")
        folder = self._below_root(asked.event_dir, f"{run_id}/events", param="event_dir")
        # Checked also where nothing is traced: whether a path is valid does not depend on the engine.
        template: Path | None = self._below_root(
            asked.trace_path_template, f"{run_id}/trace", param="trace_path_template"
        )
        if not (asked.trace and isinstance(self._engine, TraceableEngine) and self._engine.can_trace):
            template = None
        async with self._lock:
            running = self.running.get(asked.kind)
            if running is not None and running.run_id == run_id and running.template == template:
                return running
            await self._stop(asked.kind)
            if any(other.recorder.folder == folder for other in self.running.values()):
                if asked.event_dir is not None:
                    raise InvalidValue("another profile writes to this folder; name another one", param="event_dir")
                folder = folder.with_name(f"{asked.kind.value}_events")
            return await self._start(asked.kind, run_id, folder, template)

    async def stop(self, asked: ProfileStop) -> FinishedProfile | None:
        """Stop a profile. Returns None if there is none, or if it has another ``run_id``. Idempotent."""
        async with self._lock:
            kinds = [asked.kind]
            if asked.kind is ProfileKind.WHOLE and asked.run_id is not None:
                kinds.append(ProfileKind.REQUESTS)
            for kind in kinds:
                running = self.running.get(kind)
                if running is not None and asked.run_id in (None, running.run_id):
                    return await self._stop(kind)
            return None

    async def close(self) -> None:
        """Stop all profiles. Idempotent."""
        for kind in ProfileKind:
            await self.stop(ProfileStop(kind))

    async def _start(self, kind: ProfileKind, run_id: str, folder: Path, template: Path | None) -> RunningProfile:
        def make() -> EventRecorder:
            folder.mkdir(parents=True, exist_ok=True)
            check_space(folder)  # before an empty file is left behind
            return EventRecorder(run_id, folder)

        try:
            recorder = await run_work(Work.FILES, make)
        except OSError as error:
            raise InvalidValue(f"cannot write to the folder: {error.strerror}", param="event_dir") from None
        try:
            if template is not None and isinstance(self._engine, TraceableEngine):
                await self._engine.start_trace(template)
        except BaseException:
            recorder.close()
            raise
        observer = ProfileEvents(recorder)
        running = self.running[kind] = RunningProfile(run_id, recorder, observer, template)
        self._record()
        self._observers.add(observer)
        return running

    async def _stop(self, kind: ProfileKind) -> FinishedProfile | None:
        running = self.running.pop(kind, None)
        if running is None:
            return None
        self._observers.remove(running.observer)
        self._record()
        traces: tuple[Path, ...] = ()
        try:
            if running.template is not None and isinstance(self._engine, TraceableEngine):
                traces = await self._engine.stop_trace()
        finally:
            await run_work(Work.FILES, running.recorder.close)
        return FinishedProfile(running.run_id, running.recorder.paths, running.recorder.dropped, traces)

    def _record(self) -> None:
        """Have what emits events record them in every profile that runs."""
        recorders = [running.recorder for running in self.running.values()]
        events.recorder = SeveralRecorders(recorders) if len(recorders) > 1 else next(iter(recorders), None)

    def _below_root(self, asked: str | None, default: str, *, param: str) -> Path:
        try:
            root = self._root.resolve()
            path = (root / Path(asked or default)).resolve()
        except (OSError, ValueError, RuntimeError):
            raise InvalidValue(f"{param} must be a valid path", param=param) from None
        if path == root or not path.is_relative_to(root):
            raise InvalidValue(
                f"{param} must be inside {root}: leave it out, give a path relative to that folder, "
                "or start the server with --profiler.root FOLDER",
                param=param,
            )
        return path


def cache_folder() -> Path:
    """The default root, in the user's cache folder."""
    return user_cache_folder() / "profiles"
