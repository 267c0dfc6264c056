"""Profiling: records request events and traces of the engine, from a start to a stop while the server runs."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

from omni_ws.config.user_cache import user_cache_folder
from omni_ws.engine.base import Engine
from omni_ws.engine.threads import Work, run_work
from omni_ws.engine.traceable import TraceableEngine
from omni_ws.errors import InvalidValue
from omni_ws.profiler import events
from omni_ws.profiler.events import EventRecorder
from omni_ws.service.disk_space import check_space
from omni_ws.service.observing.observer import Observers
from omni_ws.service.observing.profile_events import ProfileEvents


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRequest:
    """The parameters of a start. None stands for a default; paths are relative to the root of profiles."""

    run_id: str | None = None
    event_dir: str | None = None
    trace_path_template: str | None = None
    trace: bool = False


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
    """Starts and stops profiles, one at a time, and writes them below ``root`` (``cache_folder()`` by default)."""

    def __init__(self, engine: Engine, observers: Observers, root: Path | None = None) -> None:
        self.running: RunningProfile | None = None
        self._engine = engine
        self._observers = observers
        self._root = (root or cache_folder()).expanduser()
        self._lock = asyncio.Lock()

    async def start(self, asked: ProfileRequest) -> RunningProfile:
        """Start a profile, after stopping the current one if it has another ``run_id`` or other traces.

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
            if self.running is not None and self.running.run_id == run_id and self.running.template == template:
                return self.running
            await self._stop()
            return await self._start(run_id, folder, template)

    async def stop(self, run_id: str | None = None) -> FinishedProfile | None:
        """Stop the current profile. Returns None if there is none, or if it has another ``run_id``. Idempotent."""
        async with self._lock:
            if self.running is None or run_id not in (None, self.running.run_id):
                return None
            return await self._stop()

    async def _start(self, run_id: str, folder: Path, template: Path | None) -> RunningProfile:
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
        observer = ProfileEvents()
        self.running = RunningProfile(run_id, recorder, observer, template)
        events.recorder = recorder
        self._observers.add(observer)
        return self.running

    async def _stop(self) -> FinishedProfile | None:
        running, self.running = self.running, None
        if running is None:
            return None
        self._observers.remove(running.observer)
        if events.recorder is running.recorder:
            events.recorder = None
        traces: tuple[Path, ...] = ()
        try:
            if running.template is not None and isinstance(self._engine, TraceableEngine):
                traces = await self._engine.stop_trace()
        finally:
            await run_work(Work.FILES, running.recorder.close)
        return FinishedProfile(running.run_id, running.recorder.paths, running.recorder.dropped, traces)

    def _below_root(self, asked: str | None, default: str, *, param: str) -> Path:
        try:
            root = self._root.resolve()
            path = (root / Path(asked or default)).resolve()
        except (OSError, ValueError, RuntimeError):
            raise InvalidValue(f"{param} must be a valid path", param=param) from None
        if path == root or not path.is_relative_to(root):
            raise InvalidValue(f"the path must be inside {root} (profiler.root)", param=param)
        return path


def cache_folder() -> Path:
    """The default root, in the user's cache folder."""
    return user_cache_folder() / "profiles"
