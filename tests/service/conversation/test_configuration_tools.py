"""The tools of a configuration are read and checked when they change, and then only."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from omni_ws.engine.fake import CAPABILITIES
from omni_ws.errors import InvalidValue
from omni_ws.service.conversation.configuration import Configuration, ConfigurationRules, ServedModel

LOOK_UP = {"type": "function", "function": {"name": "look_up"}}
WRONG = {"type": "function", "function": {"name": "look up"}}
FORCED = {"type": "function", "function": {"name": "look_up"}}


def rules(**fields: Any) -> ConfigurationRules:
    return ConfigurationRules(
        capabilities=replace(CAPABILITIES, tools=True),
        model=ServedModel(("fake",)),
        output_formats=frozenset({"pcm16"}),
        **fields,
    )


def configuration(**defaults: Any) -> Configuration:
    return Configuration(rules(defaults=defaults))


@pytest.mark.parametrize("defaults", [{}, {"tools": [LOOK_UP], "tool_choice": FORCED}])
def test_tools_that_do_not_change_are_not_read_again(defaults: dict[str, Any]) -> None:
    session = configuration(**defaults)
    if not defaults:
        session.apply({"tools": [LOOK_UP], "tool_choice": FORCED})
    before = session.effective
    assert before.tools == [LOOK_UP]
    for patch in ({}, {"instructions": "Be brief."}, {"sampling": {"max_tokens": 5}}):
        assert session.with_patch(patch).tools is before.tools
        after = session.apply(patch)
        assert after.tools is before.tools
        assert after.tool_choice == FORCED
    assert session.apply({"tools": None, "tool_choice": None}).tools == defaults.get("tools", [])


@pytest.mark.parametrize(
    ("patch", "param"),
    [
        ({"tools": [WRONG]}, "tools[0].function.name"),
        ({"tools": None}, "tool_choice.function.name"),
        ({"tools": []}, "tool_choice.function.name"),
        ({"tools": [LOOK_UP, LOOK_UP]}, "tools[1].function.name"),
        ({"tool_choice": {"function": {"name": "other"}}}, "tool_choice.function.name"),
        ({"tool_choice": "any"}, "tool_choice"),
    ],
)
def test_each_change_of_them_is_checked(patch: dict[str, Any], param: str) -> None:
    session = configuration()
    before = session.apply({"tools": [LOOK_UP], "tool_choice": FORCED})
    for _ in range(2):
        with pytest.raises(InvalidValue) as refused:
            session.apply(patch)
        assert refused.value.param == param
    assert session.apply({}) == before


def test_tools_of_the_operator_are_checked() -> None:
    with pytest.raises(InvalidValue):
        configuration(tools=[WRONG])


@pytest.mark.parametrize("defaults", [{}, {"tools": [LOOK_UP]}], ids=["of the client", "of the operator"])
def test_a_spoken_session_with_tools_has_other_instructions(defaults: dict[str, Any]) -> None:
    """What says that the model cannot do something would keep it from the tool that can."""
    told = {"spoken_instructions": "You cannot look up.", "spoken_instructions_with_tools": "You are a voice."}
    session = Configuration(rules(defaults=defaults, **told))
    if not defaults:
        assert session.effective.instructions == "You cannot look up."
        assert session.with_patch({"tools": [LOOK_UP]}).instructions == "You are a voice."
        session.apply({"tools": [LOOK_UP]})
    assert session.effective.instructions == "You are a voice."
    assert session.with_patch({"tools": []}).instructions == "You cannot look up."
    assert session.with_patch({"modalities": ["text"]}).instructions == ""
    assert session.apply({"sampling": {"max_tokens": 5}}).instructions == "You are a voice."
    assert session.follow(rules(defaults=defaults, **told)).instructions == "You are a voice."
    # Those of a client are its own.
    assert session.apply({"instructions": "You cannot look up."}).instructions == "You cannot look up."
    assert session.apply({"instructions": None, "tools": []}).instructions == "You cannot look up."
