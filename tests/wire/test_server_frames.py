from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from omni_ws.wire.server_frames import DONE, HEARTBEAT, HEARTBEAT_BLOCK, event

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(), lambda inner: st.lists(inner, max_size=3)
)


def test_an_event_is_one_data_line() -> None:
    assert event({"a": "ü\n"}) == 'data: {"a":"ü\\n"}\n\n'.encode()
    assert event(b'{"a":1}') == b'data: {"a":1}\n\n', "what is JSON already"
    assert event({"error": 1}, name="error") == b'event: error\ndata: {"error":1}\n\n'


@given(JSON)
def test_line_breaks_in_the_data_never_end_the_event(data: object) -> None:
    encoded = event(data)
    assert encoded.endswith(b"\n\n")
    body = encoded[len(b"data: ") : -2]
    assert b"\n" not in body
    assert b"\r" not in body
    assert json.loads(body) == data


def test_fixed_events() -> None:
    assert DONE == b"data: [DONE]\n\n"
    # A comment: begins with a colon, ends like an event.
    assert HEARTBEAT_BLOCK.startswith(b":")
    assert HEARTBEAT_BLOCK.endswith(b"\n\n")
    assert HEARTBEAT_BLOCK == HEARTBEAT + b"\n"
