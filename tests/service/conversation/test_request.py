"""The state machine of a request: each legal transition, and each illegal one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.parts_of_sessions import make_request

from omni_ws.core.chunks import (
    InputChunk,
    InputMode,
    Modality,
    OutputChunk,
    OutputModality,
    StartTrigger,
    ToolCall,
    ToolCallFragment,
)
from omni_ws.core.request_input import GenerationStarted
from omni_ws.errors import EmptyInput, EngineFailed
from omni_ws.service.conversation.request import Request, RequestState

STARTED = GenerationStarted(StartTrigger.END_OF_INPUT, 0, (InputChunk(Modality.TEXT, b"hello", 0),))
ERROR = EngineFailed("broken")

#: Each method that changes the state, and the state that it leads to.
STEPS: dict[str, tuple[Callable[[Request], object], RequestState]] = {
    "start": (lambda request: request.start(STARTED), RequestState.WAITING),
    "begin_answer": (Request.begin_answer, RequestState.ANSWERING),
    "hold": (lambda request: request.hold([]), RequestState.HELD),
    "go_on": (lambda request: request.go_on(), RequestState.ANSWERING),
    "await_rest_of_input": (Request.await_rest_of_input, RequestState.ANSWERED),
    "fail": (lambda request: request.fail(ERROR), RequestState.FAILED),
    "cancel": (lambda request: request.cancel(), RequestState.CANCELLED),
    "finish": (Request.finish, RequestState.FINISHED),
}
#: The shortest way to each state.
PATHS = {
    RequestState.OPEN: (),
    RequestState.WAITING: ("start",),
    RequestState.ANSWERING: ("start", "begin_answer"),
    RequestState.HELD: ("start", "begin_answer", "hold"),
    RequestState.ANSWERED: ("start", "begin_answer", "await_rest_of_input"),
    RequestState.FAILED: ("fail",),
    RequestState.CANCELLED: ("cancel",),
    RequestState.FINISHED: ("finish",),
}
#: The table in the docstring of Request.
LEGAL = {
    RequestState.OPEN: {"start", "fail", "cancel", "finish"},
    RequestState.WAITING: {"begin_answer", "go_on", "fail", "cancel", "finish"},
    RequestState.ANSWERING: {"hold", "await_rest_of_input", "fail", "cancel", "finish"},
    RequestState.HELD: {"begin_answer", "go_on", "cancel", "finish"},
    RequestState.ANSWERED: {"fail", "cancel", "finish"},
    RequestState.FAILED: {"cancel", "finish"},
    RequestState.CANCELLED: {"cancel", "finish"},
    RequestState.FINISHED: set[str](),
}


def request_in(state: RequestState, *, mode: InputMode = InputMode.EXTEND) -> Request:
    request = make_request(mode=mode)
    for step in PATHS[state]:
        STEPS[step][0](request)
    assert request.state is state
    return request


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("state", RequestState, ids=lambda state: state.name)
def test_every_transition(state: RequestState, step: str) -> None:
    request = request_in(state)
    change, after = STEPS[step]
    if step in LEGAL[state]:
        change(request)
        assert request.state is after
    else:
        with pytest.raises(RuntimeError, match=f"illegal transition from {state.name} to {after.name}"):
            change(request)
        assert request.state is state


@pytest.mark.parametrize("state", RequestState, ids=lambda state: state.name)
def test_what_the_state_means(state: RequestState) -> None:
    request = request_in(state, mode=InputMode.SNAPSHOT)
    assert request.answering is (state in (RequestState.ANSWERING, RequestState.ANSWERED))
    assert request.is_frozen is ("start" in PATHS[state])
    assert (request.error is not None) is (state is RequestState.FAILED)


def test_a_start_hands_the_input_to_the_engine() -> None:
    request = make_request()
    request.start(STARTED)
    request.append(InputChunk(Modality.TEXT, b" there", 1))
    assert (request.input.queued, request.waiting_chunks, request.entry.user_text) == (11, 2, "hello there")


def test_input_after_a_frozen_start_is_dropped() -> None:
    request = make_request(mode=InputMode.SNAPSHOT)
    request.start(STARTED)
    request.append(InputChunk(Modality.TEXT, b" there", 1))
    assert (request.input.queued, request.entry.user_text) == (5, "hello")


def test_a_cancellation_drops_the_error_and_the_input() -> None:
    request = make_request()
    request.fail(EmptyInput("no input"))
    request.cancel()
    assert request.error is None
    assert not request.session.input_open


def test_a_failed_request_keeps_its_error_to_the_end() -> None:
    request = make_request()
    request.fail(ERROR)
    request.finish()
    assert request.error is ERROR


def test_a_released_request_holds_neither_input_nor_the_engine_s_meter() -> None:
    request = request_in(RequestState.ANSWERING)
    meter = request.meter
    request.finish()
    request.release()
    assert request.input.queued == 0
    assert request.meter is not meter


#: The fragments of two calls.
FRAGMENTS = (
    ToolCallFragment(0, "call_1", "weather", '{"city": '),
    ToolCallFragment(0, None, None, '"Bern"}'),
    ToolCallFragment(1, "call_2", "time", ""),
    ToolCallFragment(1, None, None, "{}"),
)
CALLS = (ToolCall("call_1", "weather", '{"city": "Bern"}'), ToolCall("call_2", "time", "{}"))


@pytest.mark.parametrize("sent", range(len(FRAGMENTS) + 1))
def test_an_answer_that_goes_on_has_its_tool_calls_whole(sent: int) -> None:
    request = request_in(RequestState.ANSWERING)
    for fragment in FRAGMENTS:
        request.entry.call(fragment)
    withdrawn = [OutputChunk("req_1", 1, OutputModality.TOOL_CALL, tool_call=one) for one in FRAGMENTS[sent:]]
    request.hold(withdrawn)
    assert [call.id for call in request.tool_calls] == ["call_1", "call_2"][: (sent + 1) // 2]
    seen = request.ledger.messages(now=0, held=request.entry)
    assert sum((one.tool_calls for one in seen), ()) == CALLS[: sent // 2]
    assert request.go_on() == withdrawn
    assert request.tool_calls == CALLS
