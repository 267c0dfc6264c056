from __future__ import annotations

from collections.abc import Callable

import pytest

from omni_ws.core.chunks import InputChunk, InputMode, Modality, StartTrigger
from omni_ws.core.request_input import (
    MAX_OTHER_REFS,
    Alignment,
    GenerationStarted,
    InputAppended,
    InputEnded,
    InputSettings,
    InputState,
    RequestInput,
)
from omni_ws.core.start_policy import ON_END_ONLY, ON_FIRST_CHUNK, StartPolicy
from omni_ws.errors import EmptyInput, SessionConflict


def session(policy: StartPolicy, mode: InputMode = InputMode.EXTEND) -> RequestInput:
    return RequestInput(InputSettings(start_policy=policy, mode=mode))


def text(content: bytes, number: int = 0, *, end: bool = False) -> InputChunk:
    return InputChunk(Modality.TEXT, content, number, end_of_input=end)


def test_collects_until_the_policy_fires_then_appends() -> None:
    subject = session(StartPolicy(min_text_chars=3))
    first, second, third = text(b"ab"), text(b"c", 1), text(b"d", 2)
    assert subject.receive_chunk(first) == []
    states = [subject.state]
    assert subject.receive_chunk(second) == [GenerationStarted(StartTrigger.MIN_LENGTH, 1, (first, second))]
    states.append(subject.state)
    assert subject.receive_chunk(third) == [InputAppended(third)]
    assert subject.bytes_after_start == 1
    assert subject.finish() == [InputEnded()]
    states.append(subject.state)
    assert states == [InputState.OPEN, InputState.STARTED, InputState.FINISHED]
    assert subject.received.bytes == 4


def test_the_end_starts_what_has_not_started() -> None:
    subject = session(ON_END_ONLY)
    chunk = text(b"a", 7, end=True)
    assert subject.receive_chunk(chunk) == [GenerationStarted(StartTrigger.END_OF_INPUT, 7, (chunk,)), InputEnded()]


def test_so_many_names_of_later_chunks_are_remembered_and_no_more() -> None:
    subject = session(ON_END_ONLY)
    for number in range(MAX_OTHER_REFS + 2):
        subject.name(InputChunk(Modality.TEXT, b"a", number, ref=f"name {number}"))
    assert [subject.ref_of(number) for number in range(1, MAX_OTHER_REFS + 2)] == [
        *(f"name {number}" for number in range(1, MAX_OTHER_REFS + 1)), "name 0"
    ]  # fmt: skip


def test_a_bare_end_names_no_chunk() -> None:
    subject = session(ON_END_ONLY)
    chunk = text(b"a")
    subject.receive_chunk(chunk)
    assert subject.finish() == [GenerationStarted(StartTrigger.END_OF_INPUT, None, (chunk,)), InputEnded()]


def test_the_policy_may_fire_with_the_chunk_that_ends() -> None:
    subject = session(ON_FIRST_CHUNK)
    chunk = text(b"a", end=True)
    assert subject.receive_chunk(chunk) == [GenerationStarted(StartTrigger.FIRST_CHUNK, 0, (chunk,)), InputEnded()]


@pytest.mark.parametrize("policy", [ON_FIRST_CHUNK, ON_END_ONLY])
def test_nothing_to_work_on_is_empty_input(policy: StartPolicy) -> None:
    subject = session(policy)
    assert subject.receive_chunk(text(b"")) == []
    (ended,) = subject.receive_chunk(text(b"", 1, end=True))
    assert isinstance(ended, InputEnded)
    assert isinstance(ended.error, EmptyInput)
    assert subject.state is InputState.FAILED
    assert subject.finish() == []


def test_an_empty_chunk_after_the_start_joins_nothing() -> None:
    subject = session(ON_FIRST_CHUNK)
    subject.receive_chunk(text(b"a"))
    assert subject.receive_chunk(text(b"", 1)) == []


@pytest.mark.parametrize("policy", [ON_FIRST_CHUNK, ON_END_ONLY])
def test_an_empty_chunk_of_another_modality_ends_no_part(policy: StartPolicy) -> None:
    subject = session(policy)
    subject.receive_chunk(text(b"a"))
    subject.receive_chunk(InputChunk(Modality.AUDIO, b"", 1))
    assert (subject.received.chunks, subject.received.open_part) == (1, Modality.TEXT)


@pytest.mark.parametrize("alignment", Alignment)
def test_the_input_before_the_start_is_in_the_order_of_its_alignment(alignment: Alignment) -> None:
    subject = RequestInput(InputSettings(start_policy=ON_END_ONLY, mode=InputMode.EXTEND, alignment=alignment))
    late = InputChunk(Modality.AUDIO, bytes(32), 0, timestamp_ms=200)
    early = InputChunk(Modality.TEXT, b"a", 1, timestamp_ms=100)
    subject.receive_chunk(late)
    subject.receive_chunk(early)
    chunks = (early, late) if alignment is Alignment.TIMESTAMP else (late, early)
    assert subject.finish() == [GenerationStarted(StartTrigger.END_OF_INPUT, None, chunks), InputEnded()]


def test_snapshot_counts_what_comes_late() -> None:
    subject = session(ON_FIRST_CHUNK, InputMode.SNAPSHOT)
    keeps = [subject.keeps_input]
    subject.receive_chunk(text(b"a"))
    keeps.append(subject.keeps_input)
    assert keeps == [True, False]
    assert subject.receive_chunk(text(b"bcd", 1)) == []
    assert subject.receive_chunk(InputChunk(Modality.AUDIO, bytes(320), 2)) == []
    assert subject.bytes_after_start == 323
    assert subject.received.bytes == 324
    assert subject.received.audio_ms == pytest.approx(10)
    assert subject.finish() == [InputEnded()]


def test_extend_keeps_input_after_the_start() -> None:
    subject = session(ON_FIRST_CHUNK)
    subject.receive_chunk(text(b"a"))
    assert subject.keeps_input


def test_a_chunk_after_the_end_is_a_conflict() -> None:
    subject = session(ON_FIRST_CHUNK)
    subject.receive_chunk(text(b"a", end=True))
    with pytest.raises(SessionConflict) as caught:
        subject.receive_chunk(text(b"b", 1))
    assert caught.value.sequence_id == 1
    assert subject.received.bytes == 1


@pytest.mark.parametrize(
    ("close", "state"),
    [
        (RequestInput.cancel, InputState.CANCELLED),
        (RequestInput.expire, InputState.EXPIRED),
        (RequestInput.fail, InputState.FAILED),
    ],
)
@pytest.mark.parametrize("policy", [ON_FIRST_CHUNK, ON_END_ONLY])
def test_a_closed_session_stays_closed(
    close: Callable[[RequestInput], None], state: InputState, policy: StartPolicy
) -> None:
    subject = session(policy)
    subject.receive_chunk(text(b"a"))
    close(subject)
    assert subject.state is state
    assert not subject.input_open
    assert subject.finish() == []
    subject.cancel()
    subject.expire()
    subject.fail()
    assert subject.state is state


@pytest.mark.parametrize(
    ("state", "following"),
    [
        (InputState.OPEN, {"STARTED", "EXPIRED", "CANCELLED", "FAILED"}),
        (InputState.STARTED, {"FINISHED", "EXPIRED", "CANCELLED", "FAILED"}),
        (InputState.FINISHED, set()),
        (InputState.EXPIRED, set()),
        (InputState.CANCELLED, set()),
        (InputState.FAILED, set()),
    ],
)
def test_state_changes_only_along_its_table(state: InputState, following: set[str]) -> None:
    for target in InputState:
        subject = session(ON_FIRST_CHUNK)
        subject.state = state
        if target.name in following:
            subject._set_state(target)
            assert subject.state is target
        else:
            with pytest.raises(RuntimeError, match=f"from {state.name} to {target.name}"):
                subject._set_state(target)


@pytest.mark.parametrize("policy", [ON_END_ONLY, ON_FIRST_CHUNK])
def test_an_empty_result_of_a_tool_is_something_to_work_on(policy: StartPolicy) -> None:
    subject = session(policy)
    nothing = InputChunk(Modality.TEXT, b"", 0, tool_call_id="call_1")
    started = subject.receive_chunk(nothing) + subject.finish()
    assert [event.chunks for event in started if isinstance(event, GenerationStarted)] == [(nothing,)]
    assert started[-1] == InputEnded()


def test_an_empty_result_of_a_tool_joins_what_has_started() -> None:
    subject = session(ON_FIRST_CHUNK)
    subject.receive_chunk(text(b"a"))
    nothing = InputChunk(Modality.TEXT, b"", 1, tool_call_id="call_1")
    assert subject.receive_chunk(nothing) == [InputAppended(nothing)]
    assert subject.received.chunks == 2
