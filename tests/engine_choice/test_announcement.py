"""What the start says about parts."""

from __future__ import annotations

from support.part_engines import RetortEngine, WordEngine
from support.tone_engine import ToneEngine

from omni_ws.engine.composed.engine import ComposedEngine
from omni_ws.engine.fake import EchoEngine
from omni_ws.engine_choice.announcement import part_lines


def test_each_part_has_a_line_with_its_model() -> None:
    asr = WordEngine()
    asr.model = "en-us"
    engine = ComposedEngine(RetortEngine(), asr=asr, tts=ToneEngine())
    assert [*part_lines(engine)] == ["ASR: words (en-us)", "LLM: retort", "TTS: tone"]


def test_what_is_missing_is_said() -> None:
    assert [*part_lines(ComposedEngine(RetortEngine()))] == ["ASR: none", "LLM: retort", "TTS: none"]


def test_what_the_llm_does_by_itself_is_said() -> None:
    lines = [*part_lines(ComposedEngine(EchoEngine(), asr=WordEngine(), tts=ToneEngine(), where_missing=True))]
    assert lines == ["ASR: words", "LLM: fake", "TTS: tone"]  # it turns out at the start
    lines = [*part_lines(ComposedEngine(EchoEngine()))]
    assert lines == ["ASR: the LLM hears by itself", "LLM: fake", "TTS: the LLM speaks by itself"]


def test_an_engine_that_is_a_whole_has_no_parts_to_tell() -> None:
    assert [*part_lines(EchoEngine())] == []
