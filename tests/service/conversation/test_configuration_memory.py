"""The memory of a configuration is charged from the first byte that is beyond the ordinary."""

from __future__ import annotations

from typing import Any

import pytest

from omni_ws.core.quota import ByteBudget
from omni_ws.engine.fake import CAPABILITIES
from omni_ws.service.conversation.configuration import Configuration, ConfigurationRules, ServedModel
from omni_ws.wire.session_config import FIELDS

RULES = ConfigurationRules(capabilities=CAPABILITIES, model=ServedModel(("fake",)), output_formats=frozenset({"pcm16"}))


def charged(**fields: Any) -> int:
    account = ByteBudget(1 << 20)
    session = Configuration(RULES, account)
    session.apply(fields)
    used = account.used
    session.close()
    assert account.used == 0
    return used


@pytest.mark.parametrize("more", [{}, {"idle_prompt": {"after_sec": 0}, "tool_filler": False}])
def test_settings_are_charged_from_the_first_byte_beyond_the_ordinary(more: dict[str, Any]) -> None:
    long = 8192
    ordinary = long - charged(instructions="a" * long, **more)
    assert ordinary > 0
    assert [charged(instructions="a" * (ordinary + by), **more) for by in (-1, 0, 1, 2)] == [0, 0, 1, 2]


def test_the_names_of_fields_are_not_charged() -> None:
    """All sessions share them, also those that were read from JSON."""
    account = ByteBudget(1 << 20)
    session = Configuration(RULES, account)
    session.apply({bytes(name, "ascii").decode(): "a" * 8192 for name in ("instructions",)})
    (name,) = session.wanted
    assert any(name is one for one in FIELDS)
    used = account.used
    session.apply({"tool_filler": True})  # a value without bytes
    assert account.used - used < len("tool_filler")
