"""The timeline of a request: what is recorded, what is derived from it, and what observers get."""

from __future__ import annotations

import time

import pytest

from omni_ws.core.chunks import (
    FinalChunk,
    FinishReason,
    InputChunk,
    InputMode,
    Modality,
    OutputModality,
    StartTrigger,
    Task,
    Usage,
)
from omni_ws.core.ledger_entry import LedgerEntry
from omni_ws.core.request_input import GenerationStarted
from omni_ws.errors import EngineFailed, OmniError
from omni_ws.service.observing.observer import (
    CancelCause,
    Observation,
    ObservedSession,
    Observers,
    Origin,
    OutputBegan,
    PlayerStatistics,
    RequestEnded,
    RequestReached,
    RequestTimeline,
    SessionEnded,
    SessionIdentity,
    SessionOpened,
)

CHUNKS = (InputChunk(Modality.TEXT, b"a"), InputChunk(Modality.TEXT, b"b"))
STARTED = GenerationStarted(StartTrigger.FIRST_CHUNK, 3, CHUNKS)


WORDS = LedgerEntry(request_id="req_1", typed=bytearray(b"asked"))


class Bench:
    """A session on a clock of its own, and all that its observer gets."""

    def __init__(self) -> None:
        self.clock = 100.0
        self.seen: list[Observation] = []
        observers = Observers()
        observers.add(self)
        self.session = ObservedSession(SessionIdentity("sess_1", Origin.WEBSOCKET), observers, now=lambda: self.clock)

    def observe(self, session: SessionIdentity, observation: Observation) -> None:
        assert session is self.session.identity
        self.seen.append(observation)

    @property
    def steps(self) -> list[str]:
        return [one.step for one in self.seen if isinstance(one, RequestReached)]

    def open(self, request_id: str = "req_1", *, task: Task = Task.CHAT, by_speech: bool = False) -> RequestTimeline:
        return self.session.open_request(request_id, task=task, input_mode=InputMode.EXTEND, by_speech=by_speech)

    def end(self, timeline: RequestTimeline, error: OmniError | None = None) -> FinalChunk:
        final = FinalChunk(
            request_id=timeline.request_id, sequence_id=0, finish_reason=FinishReason.STOP, usage=Usage()
        )
        player = PlayerStatistics(1, 0.5, None)
        timeline.mark_ended(final, error, received_chunks=2, received_bytes=9, player=player, content=WORDS)
        return final


def test_a_whole_request() -> None:
    bench = Bench()
    timeline = bench.open()
    bench.clock += 1
    timeline.mark_policy_fired(STARTED)
    bench.clock += 1
    timeline.mark_engine_started()
    bench.clock += 1
    timeline.mark_input_ended()
    bench.clock += 1
    timeline.mark_output_began(OutputModality.TEXT)
    bench.clock += 1
    timeline.mark_engine_ended(whole=True, error=None)
    over = [timeline.is_over]
    final = bench.end(timeline)
    assert [*over, timeline.is_over] == [False, True]
    assert timeline.policy == (101.0, StartTrigger.FIRST_CHUNK, 3, 2)
    assert timeline.stages(bench.clock) == [
        ("input", 100.0, 101.0),
        ("queue", 101.0, 102.0),
        ("engine", 102.0, 105.0),
    ]
    assert timeline.first_output_sec(OutputModality.TEXT) == 1
    assert timeline.engine_end is not None
    assert timeline.engine_end.status == "ok"
    outcome = timeline.outcome
    assert outcome is not None
    assert (outcome.at, outcome.final, outcome.error, outcome.received_bytes) == (105.0, final, None, 9)
    assert bench.steps == [
        "opened",
        "policy_fired",
        "engine_started",
        "input_ended",
        "engine_ended",
    ]
    assert OutputBegan(timeline, OutputModality.TEXT) in bench.seen
    last = bench.seen[-1]
    assert isinstance(last, RequestEnded)
    assert (last.outcome, last.content.user_text) == (outcome, "asked")


def test_a_step_is_recorded_before_it_is_reported() -> None:
    bench = Bench()
    stages: list[str | None] = []

    class Reading:
        def observe(self, session: SessionIdentity, observation: Observation) -> None:
            if isinstance(observation, RequestReached | RequestEnded):
                stages.append(observation.timeline.stage)

    bench.session.observers.add(Reading())
    timeline = bench.open()
    timeline.mark_policy_fired(STARTED)
    timeline.mark_engine_started()
    timeline.mark_engine_ended(whole=True, error=None)
    bench.end(timeline)
    assert stages == ["input", "queue", "engine", None, None]


def test_an_engine_that_winds_up_a_cancelled_request_keeps_it_from_being_over() -> None:
    bench = Bench()
    timeline = bench.open()
    timeline.mark_policy_fired(STARTED)
    timeline.mark_engine_started()
    bench.clock += 1
    timeline.mark_cancelled(None)
    bench.end(timeline)
    assert (timeline.stage, timeline.is_over) == ("engine", False)
    assert list(bench.session.timeline.unfinished.values()) == [timeline]
    bench.clock += 1
    timeline.mark_engine_ended(whole=False, error=None)
    assert timeline.is_over
    assert bench.session.timeline.unfinished == {}
    assert timeline.stages(bench.clock)[-1].seconds == 2
    assert timeline.engine_end is not None
    assert timeline.engine_end.status == "cancelled"


def test_a_request_that_ends_early_has_the_stages_it_reached() -> None:
    bench = Bench()
    refused, queued = bench.open("req_1"), bench.open("req_2")
    queued.mark_policy_fired(STARTED)
    error = EngineFailed("broken")
    bench.end(refused, error)
    bench.end(queued)
    assert [passed.name for passed in refused.stages(bench.clock)] == ["input"]
    assert [passed.name for passed in queued.stages(bench.clock)] == ["input", "queue"]
    assert refused.times.engine_started is None
    assert queued.times.engine_started is None
    assert refused.outcome is not None
    assert refused.outcome.error is error
    assert bench.session.timeline.request_count == 2


def test_what_interrupted_a_request() -> None:
    bench = Bench()
    timeline = bench.open()
    timeline.mark_cancelled(None)
    timeline.mark_cancelled(bench.open("req_2"))
    timeline.mark_cancelled(bench.open("req_3", by_speech=True))
    assert [(one.cause, one.by) for one in timeline.cancellations] == [
        (CancelCause.CANCEL, None),
        (CancelCause.REQUEST, "req_2"),
        (CancelCause.SPEECH, "req_3"),
    ]


@pytest.mark.parametrize(
    ("task", "first"), [(Task.CHAT, OutputModality.AUDIO), (Task.TRANSCRIBE, OutputModality.TRANSCRIPT)]
)
def test_a_transcript_is_an_answer_to_the_task_of_transcribing(task: Task, first: OutputModality) -> None:
    bench = Bench()
    timeline = bench.open(task=task)
    assert timeline.first_answer_modality is None
    assert timeline.first_output_sec(timeline.first_answer_modality) is None
    timeline.mark_output_began(OutputModality.TRANSCRIPT)
    timeline.mark_output_began(OutputModality.AUDIO)
    assert timeline.first_answer_modality is first


def test_output_before_the_end_of_the_input_took_no_time() -> None:
    bench = Bench()
    timeline = bench.open()
    timeline.mark_output_began(OutputModality.TEXT)
    bench.clock += 5
    assert timeline.first_output_sec(OutputModality.TEXT) == 0
    timeline.mark_input_ended()
    assert timeline.first_output_sec(OutputModality.TEXT) == 0


def test_times_are_also_those_of_the_wall() -> None:
    before = time.time_ns()
    bench = Bench()
    timeline = bench.open()
    assert before <= timeline.wall_ns(timeline.opened) <= time.time_ns()
    assert timeline.wall_ns(timeline.opened + 1.5) - timeline.wall_ns(timeline.opened) == 1_500_000_000


def test_a_session_reports_its_beginning_and_end_with_its_timeline() -> None:
    bench = Bench()
    bench.session.opened()
    bench.session.ended()
    assert bench.seen == [SessionOpened(bench.session.timeline), SessionEnded(bench.session.timeline)]
    assert bench.session.timeline.opened == 100


def test_who_begins_to_observe_late_reads_the_whole_timeline() -> None:
    bench = Bench()
    timeline = bench.open()
    timeline.mark_policy_fired(STARTED)
    late: list[Observation] = []

    class Late:
        def observe(self, session: SessionIdentity, observation: Observation) -> None:
            late.append(observation)

    bench.session.observers.add(Late())
    timeline.mark_input_ended()
    (observation,) = late
    assert isinstance(observation, RequestReached)
    assert (observation.timeline.opened, observation.timeline.policy) == (100, timeline.policy)
