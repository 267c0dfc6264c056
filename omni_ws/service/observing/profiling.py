"""Profiles of a running server: files with events of requests and traces of the engine, from a start to a stop."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final

from omni_ws.config.values import user_cache_folder
from omni_ws.core.chunks import FinalChunk
from omni_ws.engine.base import Engine, TraceableEngine
from omni_ws.engine.threads import Work, run_work
from omni_ws.errors import InvalidValue
from omni_ws.profiler import events
from omni_ws.profiler.events import COORDINATOR, EventRecorder
from omni_ws.service.observing.observer import (
    NO_INPUT,
    InputAccepted,
    Observation,
    Observers,
    OutputMade,
    OutputStalled,
    OutputWritten,
    RequestEnded,
    RequestReached,
    RequestTimeline,
    SessionEnded,
    SessionIdentity,
    SessionOpened,
    SpeechHeard,
    Step,
)
from omni_ws.service.process import check_space


class ProfileKind(Enum):
    """The kind of a profile: what it records. One of each kind may run at a time."""

    #: Events, and a trace of the engine if it can make one.
    WHOLE = "profile"
    #: Events of requests alone.
    REQUESTS = "request_profile"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRequest:
    """The parameters for starting a profile. None stands for a default; paths are relative to the root of profiles.

    ``event_dir`` is the folder for events; ``trace_path_template`` is the common prefix of the trace files. ``trace``:
    trace the engine, too, if it can.
    """

    kind: ProfileKind = ProfileKind.WHOLE
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
    """A profile that was stopped, with its files.

    ``dropped_events`` is the number of events that could not be written.
    """

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
        """Start a profile.

        A running profile of the same kind with the same ``run_id`` and prefix of traces is returned as it is; any other
        is stopped first. An engine that cannot trace is profiled by events alone. Raises InvalidValue for paths that
        are outside the root, cannot be written, or are another profile's; and the errors of the engine's tracing.
        """
        run_id = asked.run_id or time.strftime("run_%Y%m%d_%H%M%S")
        folder = self._below_root(asked.event_dir, f"{run_id}/events", param="event_dir")
        # Checked even if nothing is traced: whether a path is valid does not depend on the engine.
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

    async def stop(self, kind: ProfileKind, run_id: str | None = None) -> FinishedProfile | None:
        """Stop the profile of this kind. Returns None if none runs, or if its ``run_id`` is another. Idempotent.

        If no profile of kind WHOLE has the given ``run_id``, WHOLE means one of kind REQUESTS that has it. Raises the
        errors of the engine's tracing; the profile is stopped nevertheless.
        """
        async with self._lock:
            kinds = [kind]
            if kind is ProfileKind.WHOLE and run_id is not None:
                kinds.append(ProfileKind.REQUESTS)
            for one in kinds:
                running = self.running.get(one)
                if running is not None and run_id in (None, running.run_id):
                    return await self._stop(one)
            return None

    async def close(self) -> None:
        """Stop all profiles. Idempotent."""
        for kind in ProfileKind:
            await self.stop(kind)

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
        events.record_with([one.recorder for one in self.running.values()])
        self._observers.add(observer)
        return running

    async def _stop(self, kind: ProfileKind) -> FinishedProfile | None:
        running = self.running.pop(kind, None)
        if running is None:
            return None
        self._observers.remove(running.observer)
        events.record_with([one.recorder for one in self.running.values()])
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
            raise InvalidValue(
                f"{param} must be inside {root}: leave it out, give a path relative to that folder, "
                "or start the server with --profiler.root FOLDER",
                param=param,
            )
        return path


def cache_folder() -> Path:
    """Return the default root of profiles, in the user's cache folder."""
    return user_cache_folder() / "profiles"


# What happens to sessions and requests, as events of the profiler.

#: Stages of the service, beside the coordinator. An engine has stages of its own.
INPUT: Final = "input"
QUEUE: Final = "queue"
ENGINE: Final = "engine"
ANSWER: Final = "answer"
TRANSPORT: Final = "transport"


class ProfileEvents:
    """The observer that records an event for each step of each request that opens during the profile.

    Requests that were open before are not recorded: half a request explains nothing.
    """

    def __init__(self, recorder: EventRecorder) -> None:
        self._sessions: dict[str, _ProfiledSession] = {}
        self._recorder = recorder

    def observe(self, session: SessionIdentity, observation: Observation) -> None:
        """Record the events of an observation."""
        known = self._sessions.get(session.session_id)
        if type(observation) is InputAccepted:  # by far the most frequent
            if known is not None:
                known.acknowledge(observation)
            return
        match observation:
            case SessionOpened():
                self._sessions[session.session_id] = _ProfiledSession(session, self._recorder, NO_INPUT)
                return
            case SessionEnded():
                self._sessions.pop(session.session_id, None)
                return
            case RequestReached(step="opened") if known is None:
                known = self._sessions[session.session_id] = _ProfiledSession(session, self._recorder, None)
        if known is not None:
            known.observe(observation)


class _ProfiledSession:
    """Records the events of one session.

    ``acknowledged`` is the input that was acknowledged so far. It is None if the session opened before the profile
    began, until the first acknowledgement.
    """

    def __init__(self, session: SessionIdentity, recorder: EventRecorder, acknowledged: InputAccepted | None) -> None:
        self._session = session
        self._recorder = recorder
        self._acknowledged = acknowledged
        #: The request that opened last, to which the input belongs.
        self._newest: str | None = None
        #: Requests that opened since the profile began, and are not over.
        self._followed: set[str] = set()
        #: Requests of which no output was written to the socket yet.
        self._unwritten: set[str] = set()

    def _emit(self, stage: str, name: str, *, request_id: str | None, **metadata: Any) -> None:
        if request_id is not None:
            self._recorder.record(request_id, stage, name, metadata)

    def observe(self, observation: Observation) -> None:
        """Record the events of an observation other than InputAccepted."""
        match observation:
            case OutputMade(chunk=chunk):
                self._emit(
                    ANSWER,
                    "stage_stream_chunk_sent",
                    request_id=chunk.request_id,
                    to_stage=TRANSPORT,
                    chunk_id=chunk.sequence_id,
                    modality=chunk.modality.value,
                )
            case OutputWritten():
                self._written(observation)
            case SpeechHeard(event=event):
                name = type(event).__struct_config__.tag
                self._emit(INPUT, str(name), request_id=self._newest, audio_ms=event.audio_ms)
            case OutputStalled(request_id=str() as request_id, seconds=seconds):
                self._emit(TRANSPORT, "send_stall", request_id=request_id, stalled_ms=seconds * 1000)
            case RequestReached(timeline=timeline, step="opened"):
                self._opened(timeline)
            case RequestReached(timeline=timeline, step=step) if timeline.request_id in self._followed:
                self._reached(timeline, step)
                self._drop_if_over(timeline)
            case RequestEnded(timeline=timeline) if timeline.request_id in self._followed:
                self._ended(observation)
                self._drop_if_over(timeline)

    def acknowledge(self, new: InputAccepted) -> None:
        """Record how much input was acknowledged since the last call."""
        request_id = self._newest
        old, self._acknowledged = self._acknowledged, new
        if request_id is None or old is None:
            return
        if (old.next_sequence_id, old.duplicates) == (new.next_sequence_id, new.duplicates):
            return
        before, now = old.reordering, new.reordering
        counts: dict[str, float] = {
            "chunks": new.next_sequence_id - old.next_sequence_id,
            "bytes": new.received_bytes - old.received_bytes,
            "duplicates": new.duplicates - old.duplicates,
        }
        if now is not before:  # nearly always they are one object
            counts |= {
                "reordered": now.items - before.items,
                "reorder_wait_ms": 1000 * (now.waited - before.waited),
                "gap_ms": 1000 * (now.gaps - before.gaps),
            }
        self._emit(INPUT, "input_received", request_id=request_id, **counts)

    def _drop_if_over(self, timeline: RequestTimeline) -> None:
        if timeline.is_over:
            self._followed.discard(timeline.request_id)
            if timeline.withdrawn:
                self._unwritten.discard(timeline.request_id)

    def _opened(self, timeline: RequestTimeline) -> None:
        request_id = self._newest = timeline.request_id
        self._followed.add(request_id)
        self._unwritten.add(request_id)
        self._emit(
            COORDINATOR,
            "request_admission",
            request_id=request_id,
            session_id=self._session.session_id,
            origin=str(self._session.origin),
            task=timeline.task.value,
            by_speech=timeline.by_speech,
        )
        self._emit(INPUT, events.STAGE_START, request_id=request_id, from_stage=COORDINATOR)

    def _reached(self, timeline: RequestTimeline, step: Step) -> None:
        request_id = timeline.request_id
        match step:
            case "policy_fired" if timeline.policy is not None:
                self._emit(
                    INPUT,
                    "policy_fired",
                    request_id=request_id,
                    trigger=timeline.policy.trigger.value,
                    sequence_id=timeline.policy.sequence_id,
                    chunks=timeline.policy.chunks,
                    input_mode=timeline.input_mode.value,
                )
                self._emit(QUEUE, events.STAGE_START, request_id=request_id, from_stage=INPUT)
            case "engine_started":
                self._emit(QUEUE, events.STAGE_END, request_id=request_id, next=ENGINE)
                self._emit(ENGINE, "model_path_start", request_id=request_id)
            case "input_ended":
                self._emit(INPUT, events.STAGE_END, request_id=request_id, next=ENGINE)
            case "cancelled":
                by = timeline.cancellations[-1].by
                self._emit(COORDINATOR, "cancel" if by is None else "interrupt", request_id=request_id, by=by)
            case "engine_ended" if timeline.engine_end is not None:
                self._emit(ENGINE, "model_path_end", request_id=request_id, status=timeline.engine_end.status)

    def _ended(self, ended: RequestEnded) -> None:
        timeline, final, error = ended.timeline, ended.outcome.final, ended.outcome.error
        request_id = timeline.request_id
        # Stages that the end cut short are closed, so that each event of a beginning has its end.
        if timeline.times.input_ended is None:
            self._emit(INPUT, events.STAGE_END, request_id=request_id, next=ENGINE)
        if timeline.policy is not None and timeline.times.engine_started is None and not timeline.heard_later:
            self._emit(QUEUE, events.STAGE_END, request_id=request_id, next=ENGINE)
        self._emit(
            COORDINATOR,
            "terminal_response",
            request_id=request_id,
            finish_reason=final.finish_reason.value,
            error=None if error is None else error.code,
            input_audio_ms=final.usage.input_audio_ms,
            output_audio_ms=final.usage.output_audio_ms,
            input_tokens=final.usage.input_tokens,
            output_tokens=final.usage.output_tokens,
        )

    def _written(self, observation: OutputWritten) -> None:
        chunk = observation.chunk
        request_id = chunk.request_id
        if isinstance(chunk, FinalChunk):
            self._unwritten.discard(request_id)
            self._emit(TRANSPORT, "response_written", request_id=request_id)
            return
        self._emit(
            TRANSPORT,
            "stage_stream_chunk_received",
            request_id=request_id,
            from_stage=ANSWER,
            chunk_id=chunk.sequence_id,
        )
        if request_id in self._unwritten:
            self._unwritten.discard(request_id)
            self._emit(TRANSPORT, "first_byte_written", request_id=request_id, modality=chunk.modality.value)
