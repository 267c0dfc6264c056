"""What ``python -m benchmarks.minds`` gives a server that runs already."""

from __future__ import annotations

import re
import tomllib

import pytest

from benchmarks.minds import __main__ as minds
from benchmarks.minds import long_talk
from omni_ws.config.parts import LlmConfig

URL = "http://127.0.0.1:1/v1"


@pytest.mark.parametrize(("mind", "instructions"), [("rules", ""), ("qwen", LlmConfig(use="qwen").spoken_instructions)])
def test_a_mind_gets_its_own_instructions(mind: str, instructions: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(minds, "ask", lambda *given: asked.append(given))
    minds.main([URL, "--llm", mind])
    assert asked == [(URL, instructions)]


def test_the_mind_of_a_server_has_to_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        minds.main([URL])
    assert ended.value.code == 2
    assert "name the mind of the server with --llm" in capsys.readouterr().err


def test_a_long_talk_tells_each_fact_once_before_it_goes_on() -> None:
    script = tomllib.loads(long_talk.SCRIPT.read_text("utf-8"))
    talk = long_talk.Talk()
    long_talk.given(talk, script, words=15_000)
    assert talk.words >= 15_000
    said = [item["content"] for item in talk.items if item["role"] == "user"]
    assert len(script["fact"]) == 20
    for fact in script["fact"]:
        assert [bool(re.search(fact["right"], one, re.IGNORECASE)) for one in said].count(True) == 1, fact["tell"]
        assert fact["tell"] in said[:30]
    assert len(set(said)) == len(said), "no question comes twice"
