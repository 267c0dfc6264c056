"""Any sequence of calls: the stream does what its plain model does, and its accounts always balance."""

from __future__ import annotations

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from support.checked_input_stream import LIMITS, CheckedInputStream

from omni_ws.core.chunks import InputMode

pytestmark = pytest.mark.slow

PAYLOADS = st.binary(max_size=6)
REQUESTS = st.integers(0, 5)


class InputStreamMachine(RuleBasedStateMachine):
    """Numbers are drawn relative to the next one, so that most of them matter."""

    checked: CheckedInputStream
    last_next = 0

    @initialize(single_request=st.booleans())
    def begin(self, single_request: bool) -> None:
        self.checked = CheckedInputStream(single_request=single_request)

    def open(self) -> bool:
        return not self.checked.closed

    def number(self, offset: int) -> int:
        return max(0, self.checked.model.next + offset)

    def monotonic(self) -> None:
        assert self.checked.model.next >= self.last_next
        self.last_next = self.checked.model.next

    @rule(payload=PAYLOADS, end=st.booleans())
    def receive(self, payload: bytes, end: bool) -> None:
        self.checked.receive(self.number(0), payload, end_of_input=end)
        self.monotonic()

    @rule(offset=st.integers(1, LIMITS.reorder_window), payload=PAYLOADS, end=st.booleans())
    def ahead(self, offset: int, payload: bytes, end: bool) -> None:
        self.checked.receive(self.number(offset), payload, end_of_input=end)

    @rule(offset=st.integers(-9, -1), payload=PAYLOADS)
    def duplicate(self, offset: int, payload: bytes) -> None:
        if self.number(offset) < self.checked.model.next:
            self.checked.receive(self.number(offset), payload)

    @rule(payload=st.binary(min_size=LIMITS.max_chunk_bytes, max_size=LIMITS.max_chunk_bytes + 1))
    def large(self, payload: bytes) -> None:
        self.checked.receive(self.number(0), payload)

    @rule(payload=PAYLOADS)
    def unnumbered(self, payload: bytes) -> None:
        self.checked.receive(None, payload)

    @rule(offset=st.integers(-2, LIMITS.reorder_window))
    def refuse(self, offset: int) -> None:
        self.checked.refuse(self.number(offset))
        self.monotonic()

    @rule()
    def finish(self) -> None:
        self.checked.finish()

    @rule()
    def cancel(self) -> None:
        self.checked.cancel()
        self.monotonic()

    @rule()
    def drop_waiting(self) -> None:
        self.checked.drop_waiting()
        self.monotonic()

    @rule(number=REQUESTS)
    def abandon(self, number: int) -> None:
        self.checked.abandon(number)

    @rule(number=REQUESTS, byte_count=st.integers(0, 12))
    def taken(self, number: int, byte_count: int) -> None:
        self.checked.take(number, byte_count)

    @rule(number=REQUESTS)
    def forget(self, number: int) -> None:
        self.checked.forget(number)

    @rule(byte_count=st.integers(0, 48))
    def other_sessions_hold(self, byte_count: int) -> None:
        self.checked.other_sessions_hold(byte_count)

    @rule(mode=st.sampled_from(InputMode))
    def mode(self, mode: InputMode) -> None:
        self.checked.set_mode(mode)

    @rule(reject=st.booleans())
    def reject(self, reject: bool) -> None:
        self.checked.set_reject(reject)

    @rule(answering=st.booleans())
    def answering(self, answering: bool) -> None:
        self.checked.set_answering(answering)

    @rule()
    def touch(self) -> None:
        self.checked.touch()

    @rule()
    def unheard(self) -> None:
        self.checked.unheard()

    @rule()
    def acknowledge(self) -> None:
        self.checked.take_ack()

    @rule(seconds=st.sampled_from([0, 0.05, 0.1, 3, 9, 10, 29]))
    def time_passes(self, seconds: float) -> None:
        self.checked.advance(seconds)

    @precondition(open)
    @rule()
    def close(self) -> None:
        self.checked.close()

    def teardown(self) -> None:
        self.checked.check_forgotten()


TestInputStream = InputStreamMachine.TestCase
# Without the phase that explains a failure: it traces every line, for minutes.
TestInputStream.settings = settings(
    max_examples=300,
    stateful_step_count=40,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
)
