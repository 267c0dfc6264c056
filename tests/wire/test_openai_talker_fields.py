"""OpenAI bodies have flat fields for the Talker, which are mapped to the stages of the session's configuration."""

from typing import Any

import pytest

from omni_ws.wire.openai_requests import read_chat, read_speech


def chat(**fields: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": "Hi."}], **fields}
    return read_chat(body, input_follows=False).patch.fields


def test_they_become_sampling_of_the_stage() -> None:
    fields = {"talker_temperature": 0.5, "talker_top_k": 9, "talker_max_tokens": 70, "talker_seed": 0}
    expected = {"talker": {"temperature": 0.5, "top_k": 9, "max_tokens": 70, "seed": 0}}
    assert chat(**fields)["stage_sampling"] == expected
    assert read_speech({"input": "Hi.", **fields}, input_follows=False).patch.fields["stage_sampling"] == expected


def test_they_win_over_the_stages_and_leave_the_rest() -> None:
    stages = {"talker": {"temperature": 1, "top_p": 0.5}, "thinker": {"top_k": 3}}
    assert chat(stage_sampling=stages, talker_temperature=0.2)["stage_sampling"] == {
        "talker": {"temperature": 0.2, "top_p": 0.5},
        "thinker": {"top_k": 3},
    }
    assert stages["talker"] == {"temperature": 1, "top_p": 0.5}


@pytest.mark.parametrize("fields", [{}, {"talker_temperature": None}])
def test_nothing_said_is_nothing_set(fields: dict[str, Any]) -> None:
    assert "stage_sampling" not in chat(**fields)
